//! Reads the table of contents of a layer in eStargz, and finds the headers of its archive in the outlines of other layers.
//!
//! ```text
//! members of the layer: headers │ chunk + headers │ chunk │ chunk + headers │ … │ table │ footer
//! ```
//! The blob is a sequence of gzip members (RFC 1952). Each chunk of a file begins one, and the padding and the headers that follow the
//! file are in the member of its last chunk. So a file that the node has is no use without the headers after it, and a table has
//! no more of these than the attributes that it lists. The archive of an earlier release has them: [`find`] looks for headers
//! that describe the same entries. If they are others nevertheless, the archive does not have its diff ID.
//!
//! Source: stargz-snapshotter 0.19, its page `estargz.md`, `estargz/estargz.go` (`appendTar`) and `estargz/gzip.go`.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};

use coracle_tar::{BLOCK_BYTES, Block, Event, Kind, Parser, Reader, Time};
use data_encoding::BASE64;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::elements::Elements;
use crate::index::{Prefix, prefix};
use crate::outline::{self, Part};
use crate::toc::{self, TABLE_BYTES_MAX};
use crate::{Chunk, Contents, Digest, Division, Problem};

/// Annotation of a layer's descriptor: the digest of the table of contents, uncompressed.
pub const DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
/// Length in bytes of the last member, whose header has the offset of the table.
pub const FOOTER_BYTES: u64 = 51;
/// Maximum length in bytes of the headers between two files that are found in outlines: more than a PAX header may have.
const HEADERS_BYTES_MAX: usize = 2 << 20;
/// Name of the archive's last entry, which is the table.
const TABLE_NAME: &[u8] = b"stargz.index.json";
/// The only version of the format.
const VERSION: u64 = 1;

/// The offset of the table in a blob of `blob_bytes` bytes, according to its footer; `None`: it is none.
pub fn table_offset(footer: &[u8], blob_bytes: u64) -> Option<u64> {
    /// Positions in the footer of the subfield's identification and of its text.
    const ID: std::ops::Range<usize> = 12..14;
    const OFFSET: std::ops::Range<usize> = 16..32;
    const MAGIC: std::ops::Range<usize> = 32..38;
    let is_footer = footer.len() as u64 == FOOTER_BYTES
        && footer.starts_with(&[0x1f, 0x8b, 8, 4])
        && footer.get(ID) == Some(b"SG")
        && footer.get(MAGIC) == Some(b"STARGZ");
    let text = is_footer.then(|| footer.get(OFFSET)).flatten()?;
    let offset = u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()?;
    (offset > 0 && offset < blob_bytes.checked_sub(FOOTER_BYTES)?).then_some(offset)
}

/// Identifies the headers of a sequence of entries by what a table says about these.
pub type Key = Prefix;

/// The headers before the content of a file, after that of the file before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Number of entries that they describe; the last one is that of the file.
    pub entries: u32,
    /// Identification of what they describe.
    pub key: Key,
}

/// A table of contents.
#[derive(Debug)]
pub struct Table {
    /// The files of the layer. The range of a chunk contains the headers after it, too.
    pub contents: Contents,
    /// The headers before each file.
    pub headers: Vec<Headers>,
}

/// Reads the last part of an archive, uncompressed, whose first entry is the table of a layer; the content of the layer ends before byte
/// `end` of its blob.
///
/// # Errors
/// It is not a table with this digest, it contradicts itself, or it is too long.
pub fn read(from: impl Read, end: u64, digest: &Digest) -> Result<Table, Problem> {
    let mut archive = Reader::new(BufReader::new(from));
    let entry = archive.next()?.filter(|entry| entry.path == TABLE_NAME);
    let entry = entry.ok_or_else(|| Problem::new("it is not at its place"))?;
    if entry.size > TABLE_BYTES_MAX {
        let text = format!("a table of contents of {} bytes, at most {TABLE_BYTES_MAX} are read", entry.size);
        return Err(Problem::new(text));
    }
    let mut hashed = Hashed { from: archive, hash: Sha256::new() };
    let mut entries = Elements::new(BufReader::new(&mut hashed), "entries", TABLE_BYTES_MAX);
    let contents = Contents::divided(Division::ByLength);
    let mut rows = Rows { contents, headers: Vec::new(), next: Described::default(), open: None, end };
    while let Some(text) = entries.next()? {
        rows.add(&serde_json::from_slice(text)?)?;
    }
    let head: Head = serde_json::from_slice(entries.around())?;
    if <Digest>::from(hashed.hash.finalize()) != *digest {
        return Err(Problem::new("it does not have the digest that is stated for it"));
    }
    if head.version != VERSION {
        return Err(Problem::new(format!("version {} of the format", head.version)));
    }
    rows.finish()
}

/// A reader that computes the digest of what passes.
struct Hashed<R> {
    from: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}

/// The members of the table beside its entries.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    version: u64,
}

/// An entry of the table.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Entry {
    r#type: String,
    name: String,
    size: u64,
    modtime: String,
    link_name: String,
    mode: i64,
    uid: i64,
    gid: i64,
    offset: u64,
    inner_offset: u64,
    dev_major: i64,
    dev_minor: i64,
    /// Values in base64.
    xattrs: BTreeMap<String, String>,
    digest: String,
    chunk_offset: u64,
    chunk_size: u64,
    chunk_digest: String,
}

/// Entries that follow each other.
#[derive(Default)]
struct Described {
    count: u32,
    hash: Sha256,
}

impl Described {
    /// Adds an entry of an archive, as a table describes it.
    fn add(&mut self, entry: &coracle_tar::Entry) {
        let xattrs = entry.xattrs.iter().map(|(name, value)| (&name[..], BASE64.encode(value)));
        let xattrs: BTreeMap<&[u8], String> = xattrs.collect();
        let owner = [entry.uid, entry.gid];
        self.describe(entry.kind, &entry.path, entry.mode, owner, &modtime(entry.mtime), &xattrs);
        self.describe_kind(entry.kind, entry.size, &entry.link, entry.device);
    }

    /// Adds an entry of a table.
    fn add_row(&mut self, kind: Kind, entry: &Entry) {
        let xattrs = entry.xattrs.iter().map(|(name, value)| (name.as_bytes(), value.clone())).collect();
        let owner = [entry.uid as u32, entry.gid as u32];
        let mode = (entry.mode & 0o7777) as u32;
        self.describe(kind, entry.name.as_bytes(), mode, owner, &entry.modtime, &xattrs);
        self.describe_kind(kind, entry.size, entry.link_name.as_bytes(), (entry.dev_major, entry.dev_minor));
    }

    fn describe(
        &mut self,
        kind: Kind,
        path: &[u8],
        mode: u32,
        [uid, gid]: [u32; 2],
        modtime: &str,
        xattrs: &BTreeMap<&[u8], String>,
    ) {
        self.count = self.count.saturating_add(1);
        self.text(format!("{kind:?} {mode:o} {uid} {gid} {modtime} {}", xattrs.len()).as_bytes());
        self.text(path);
        for (name, value) in xattrs {
            self.text(name);
            self.text(value.as_bytes());
        }
    }

    /// Adds what a table has of entries of one type.
    fn describe_kind(&mut self, kind: Kind, size: u64, link: &[u8], device: (i64, i64)) {
        match kind {
            Kind::File => self.text(&size.to_le_bytes()),
            Kind::HardLink | Kind::Symlink => self.text(link),
            Kind::Char | Kind::Block => self.text(format!("{device:?}").as_bytes()),
            Kind::Directory | Kind::Fifo | Kind::Unknown(_) => {}
        }
    }

    /// Adds a text with its length, so that no others together are equal.
    fn text(&mut self, text: &[u8]) {
        self.hash.update((text.len() as u64).to_le_bytes());
        self.hash.update(text);
    }

    /// The entries; the next ones begin after them.
    fn take(&mut self) -> Headers {
        let Self { count, hash } = std::mem::take(self);
        Headers { entries: count, key: prefix(&hash.finalize().into()) }
    }
}

/// A time as a table has it.
fn modtime(Time { seconds, nanoseconds }: Time) -> String {
    /// Length of a time without the fraction.
    const SECONDS: usize = "1970-01-01T00:00:00".len();
    if seconds == 0 {
        return String::new();
    }
    let rounded = seconds + i64::from(nanoseconds >= 500_000_000);
    let text = coracle_wire::timestamp(rounded.saturating_mul(1_000_000_000));
    format!("{}Z", String::from_utf8_lossy(&text[..SECONDS]))
}

fn kind(text: &str) -> Option<Kind> {
    Some(match text {
        "reg" => Kind::File,
        "hardlink" => Kind::HardLink,
        "symlink" => Kind::Symlink,
        "char" => Kind::Char,
        "block" => Kind::Block,
        "dir" => Kind::Directory,
        "fifo" => Kind::Fifo,
        _ => return None,
    })
}

/// The entries that were read.
struct Rows {
    contents: Contents,
    headers: Vec<Headers>,
    /// Entries after the last file.
    next: Described,
    /// The last chunk, and the number of bytes of its file after it.
    open: Option<(Chunk, u64)>,
    /// Offset of the first byte of the blob after the content.
    end: u64,
}

impl Rows {
    fn add(&mut self, entry: &Entry) -> Result<(), Problem> {
        let refused = |why: &str| Problem::new(format!("entry {:?}: {why}", entry.name));
        if entry.inner_offset != 0 {
            return Err(refused("several chunks in one gzip member"));
        }
        let rest = self.open.map_or(0, |(_, rest)| rest);
        if entry.r#type == "chunk" {
            let (size, chunk_size) = (self.contents.last_size(), entry.chunk_size);
            if rest == 0 || size.checked_sub(rest) != Some(entry.chunk_offset) {
                return Err(refused("a chunk out of order"));
            }
            let left = rest.checked_sub(if chunk_size == 0 { rest } else { chunk_size });
            return self.chunk(entry, rest, left.ok_or_else(|| refused("a chunk that is too long"))?);
        }
        if rest > 0 {
            return Err(refused("it follows a file whose chunks do not add up"));
        }
        let kind = kind(&entry.r#type).ok_or_else(|| refused("an unknown type"))?;
        self.next.add_row(kind, entry);
        if kind != Kind::File || entry.size == 0 {
            return Ok(());
        }
        let first = if entry.chunk_size == 0 { entry.size } else { entry.chunk_size };
        let left = entry.size.checked_sub(first).ok_or_else(|| refused("a chunk that is too long"))?;
        self.headers.push(self.next.take());
        self.close(entry.offset).map_err(|_| refused("a file out of order"))?;
        self.contents.begin(entry.name.as_bytes(), entry.size)?;
        self.chunk(entry, entry.size, left)
    }

    /// Begins a chunk of a file of which `rest` bytes are not in the chunks before, and `left` not in this one, either.
    fn chunk(&mut self, entry: &Entry, rest: u64, left: u64) -> Result<(), Problem> {
        let refused = |why: &str| Problem::new(format!("entry {:?}: {why}", entry.name));
        let text = if entry.chunk_digest.is_empty() { &entry.digest } else { &entry.chunk_digest };
        let digest = toc::digest(text).ok_or_else(|| refused("a chunk without a digest"))?;
        self.close(entry.offset).map_err(|_| refused("a chunk out of order"))?;
        self.open = Some((Chunk { begin: entry.offset, end: 0, size: rest - left, digest }, left));
        Ok(())
    }

    /// Ends the last chunk, if there is one, before this offset of the blob.
    fn close(&mut self, offset: u64) -> Result<(), Problem> {
        let begin = self.open.map_or(0, |(chunk, _)| chunk.begin);
        if offset <= begin || offset > self.end {
            return Err(Problem::new("offsets out of order"));
        }
        match self.open.take() {
            Some((chunk, _)) => self.contents.push(Chunk { end: offset, ..chunk }),
            None => Ok(()),
        }
    }

    fn finish(mut self) -> Result<Table, Problem> {
        if self.open.is_some_and(|(_, rest)| rest > 0) {
            return Err(Problem::new("the chunks of the last file do not add up"));
        }
        self.close(self.end)?;
        Ok(Table { contents: self.contents, headers: self.headers })
    }
}

/// Receives headers as they are in an archive, with what they describe.
pub type Hear<'a> = dyn FnMut(&Headers, &[u8]) -> Result<(), Problem> + 'a;

/// Reads the outline of a layer; `hear` receives the headers before the content of each file.
///
/// # Errors
/// It is not an outline, it is damaged, or its headers are not those of an archive; and the errors of `hear`.
pub fn find(outline: impl BufRead, hear: &mut Hear<'_>) -> Result<(), Problem> {
    let mut outline = outline::Reader::new(outline)?;
    let (mut parser, mut described, mut bytes) = (Parser::default(), Described::default(), Vec::new());
    // Number of bytes of content and padding before the next header.
    let mut body = 0_u64;
    while let Some(part) = outline.part()? {
        let part = match part {
            Part::Content(content) => {
                let left = body.checked_sub(content.size);
                body = left.ok_or_else(|| Problem::new("content that is longer than its file"))?;
                continue;
            }
            // Also the content of files that the process for neighbours cannot read.
            Part::Bytes(part) => {
                let skipped = usize::try_from(body).unwrap_or(usize::MAX).min(part.len());
                body -= skipped as u64;
                &part[skipped..]
            }
        };
        if part.is_empty() {
            continue;
        }
        let block: &Block = part.try_into().map_err(|_| Problem::new("a header that is cut off"))?;
        if bytes.len() <= HEADERS_BYTES_MAX {
            bytes.extend_from_slice(block);
        }
        match parser.feed(block).map_err(|problem| Problem::new(problem.to_string()))? {
            Event::More => {}
            Event::End => return Ok(()),
            Event::Entry(entry) => {
                described.add(&entry);
                let content: u64 = entry.pieces().iter().map(|piece| piece.length).sum();
                if content == 0 {
                    continue;
                }
                body = content.saturating_add(padding(content) as u64);
                if bytes.len() <= HEADERS_BYTES_MAX {
                    hear(&described.take(), &bytes)?;
                }
                described = Described::default();
                bytes.clear();
            }
        }
    }
    Ok(())
}

/// Number of bytes between the content of a file of `size` bytes and the next header.
pub fn padding(size: u64) -> usize {
    (size.wrapping_neg() % BLOCK_BYTES as u64) as usize
}
