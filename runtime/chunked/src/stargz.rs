//! Reads the table of contents of a layer in eStargz, and finds the headers of its archive in the outlines of other layers.
//!
//! ```text
//! members of the layer: headers │ chunk + headers │ chunk │ chunk + headers │ … │ table │ footer
//! ```
//! The blob is a sequence of gzip members (RFC 1952). Each chunk of a file begins one, and the padding and the headers that follow the
//! file are in the member of its last chunk. So a file that the node has is no use without the headers after it, and a table has
//! no more of these than the attributes that it lists. The archive of an earlier release has them: [`find`] reads those of each entry,
//! which are the same but for times and sizes ([`fit`]). If they are others nevertheless, the archive does not have its diff ID.
//!
//! Source: stargz-snapshotter 0.19, its page `estargz.md`, `estargz/estargz.go` (`appendTar`) and `estargz/gzip.go`.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};

use coracle_tar::{BLOCK_BYTES, Block, Event, Kind, Parser, Reader, Time};
use data_encoding::BASE64;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::elements::Elements;
use crate::headers::{ENTRY_BYTES, Headers};
use crate::index::{Prefix, prefix};
use crate::outline::{self, Part};
use crate::toc::{self, TABLE_BYTES_MAX};
use crate::{Chunk, Contents, Digest, Division, Problem};

/// Annotation of a layer's descriptor: the digest of the table of contents, uncompressed.
pub const DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
/// Length in bytes of the last member, whose header has the offset of the table.
pub const FOOTER_BYTES: u64 = 51;
/// Maximum length in bytes of the headers of one entry that are read in outlines. With long names and attributes they have some 10 KiB.
const HEADERS_BYTES_MAX: usize = 64 << 10;
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

/// Identifies an entry by its attributes but time and size.
pub type Key = Prefix;

/// An entry of an archive, as a table describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Identification of the entry.
    pub key: Key,
    /// Time of the last modification in seconds since 1970; 0 if the table has none.
    pub time: i64,
    /// Length of the file in bytes; 0 if it is no file.
    pub size: u64,
}

/// A table of contents.
#[derive(Debug)]
pub struct Table {
    /// The files of the layer. The range of a chunk contains the headers after it, too.
    pub contents: Contents,
    /// The headers of the entries up to the last file.
    pub headers: Headers,
}

/// Reads the last part of an archive, uncompressed, whose first entry is the table of a layer; the content of the layer ends before byte
/// `end` of its blob. The table needs at most `memory_max` bytes of memory.
///
/// # Errors
/// It is not a table with this digest, it contradicts itself, or it is too long.
pub fn read(from: impl Read, end: u64, digest: &Digest, memory_max: usize) -> Result<Table, Problem> {
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
    let mut rows = Rows { contents, entries: Vec::new(), ends: Vec::new(), open: None, end };
    while let Some(text) = entries.next()? {
        rows.add(&serde_json::from_slice(text)?)?;
        if rows.memory() > memory_max {
            return Err(Problem::new(format!("more than {memory_max} bytes of memory")));
        }
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

impl Described {
    /// An entry of an archive.
    fn of(entry: &coracle_tar::Entry) -> Self {
        let xattrs = entry.xattrs.iter().map(|(name, value)| (&name[..], BASE64.encode(value)));
        let owner = [entry.uid, entry.gid];
        let mut hash = hash(entry.kind, &entry.path, entry.mode, owner, &ordered(xattrs));
        add_kind(&mut hash, entry.kind, &entry.link, entry.device);
        let size = if entry.kind == Kind::File { entry.size } else { 0 };
        Self { key: prefix(&hash.finalize().into()), time: rounded(entry.mtime), size }
    }

    /// An entry of a table; `None` if it has a time that is none.
    fn of_row(kind: Kind, entry: &Entry) -> Option<Self> {
        let xattrs = entry.xattrs.iter().map(|(name, value)| (name.as_bytes(), value.clone()));
        let owner = [entry.uid as u32, entry.gid as u32];
        let mode = (entry.mode & 0o7777) as u32;
        let mut hash = hash(kind, entry.name.as_bytes(), mode, owner, &ordered(xattrs));
        add_kind(&mut hash, kind, entry.link_name.as_bytes(), (entry.dev_major, entry.dev_minor));
        let size = if kind == Kind::File { entry.size } else { 0 };
        Some(Self { key: prefix(&hash.finalize().into()), time: seconds(&entry.modtime)?, size })
    }
}

/// Extended attributes in the order of their names, with little code.
fn ordered<'a>(xattrs: impl Iterator<Item = (&'a [u8], String)>) -> BTreeMap<&'a [u8], String> {
    let mut ordered = BTreeMap::new();
    ordered.extend(xattrs);
    ordered
}

/// Begins the hash of an entry.
fn hash(
    kind: Kind,
    path: &[u8],
    mode: u32,
    [uid, gid]: [u32; 2],
    xattrs: &BTreeMap<&[u8], String>,
) -> Sha256 {
    let mut hash = Sha256::new();
    add(&mut hash, format!("{kind:?} {mode:o} {uid} {gid} {}", xattrs.len()).as_bytes());
    add(&mut hash, path);
    for (name, value) in xattrs {
        add(&mut hash, name);
        add(&mut hash, value.as_bytes());
    }
    hash
}

/// Adds what a table has of entries of one type.
fn add_kind(hash: &mut Sha256, kind: Kind, link: &[u8], device: (i64, i64)) {
    match kind {
        Kind::HardLink | Kind::Symlink => add(hash, link),
        Kind::Char | Kind::Block => add(hash, format!("{device:?}").as_bytes()),
        Kind::File | Kind::Directory | Kind::Fifo | Kind::Unknown(_) => {}
    }
}

/// Adds a text with its length, so that no others together are equal.
fn add(hash: &mut Sha256, text: &[u8]) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

/// The seconds of a time as a table has them.
fn rounded(Time { seconds, nanoseconds }: Time) -> i64 {
    match seconds {
        0 => 0,
        _ => seconds + i64::from(nanoseconds >= 500_000_000),
    }
}

/// Parses a time of a table, such as `1970-01-01T00:00:00Z`; none is 0.
fn seconds(text: &str) -> Option<i64> {
    if text.is_empty() {
        return Some(0);
    }
    let text = text.strip_suffix('Z')?;
    let (date, time) = text.split_once('T')?;
    let numbers = |text: &str, separator| -> Option<[i64; 3]> {
        let numbers = text.split(separator).map(|part| part.parse::<u16>().ok().map(i64::from));
        numbers.collect::<Option<Vec<i64>>>()?.try_into().ok()
    };
    let ([year, month, day], [hour, minute, second]) = (numbers(date, '-')?, numbers(time, ':')?);
    Some(coracle_wire::days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second)
}

/// The entries that were read.
struct Rows {
    contents: Contents,
    /// The entries, and for each file the number of entries up to it.
    entries: Vec<Described>,
    ends: Vec<u32>,
    /// The last chunk, and the number of bytes of its file after it.
    open: Option<(Chunk, u64)>,
    /// Offset of the first byte of the blob after the content.
    end: u64,
}

impl Rows {
    /// Number of bytes of memory of the table.
    fn memory(&self) -> usize {
        self.contents.memory() + self.entries.len() * ENTRY_BYTES + size_of_val(&self.ends[..])
    }

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
        let kind = toc::kind(&entry.r#type).ok_or_else(|| refused("an unknown type"))?;
        let described = Described::of_row(kind, entry).ok_or_else(|| refused("a time that is none"))?;
        self.entries.push(described);
        if described.size == 0 {
            return Ok(());
        }
        let first = if entry.chunk_size == 0 { entry.size } else { entry.chunk_size };
        let left = entry.size.checked_sub(first).ok_or_else(|| refused("a chunk that is too long"))?;
        self.ends.push(self.entries.len() as u32);
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
        // Those after the last file are in the member of its last chunk.
        self.entries.truncate(self.ends.last().map_or(0, |end| *end as usize));
        Ok(Table { contents: self.contents, headers: Headers::new(self.entries, self.ends) })
    }
}

/// Receives the headers of an entry as they are in an archive.
pub type Hear<'a> = dyn FnMut(&Described, &[u8]) -> Result<(), Problem> + 'a;

/// Reads the outline of a layer; `hear` receives the headers of each entry.
///
/// # Errors
/// It is not an outline, it is damaged, or its headers are not those of an archive; and the errors of `hear`.
pub fn find(outline: impl BufRead, hear: &mut Hear<'_>) -> Result<(), Problem> {
    let mut outline = outline::Reader::of_either(outline)?;
    let (mut parser, mut bytes) = (Parser::default(), Vec::new());
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
        // Longer headers are not found.
        if bytes.len() <= HEADERS_BYTES_MAX {
            bytes.extend_from_slice(block);
        }
        match parser.feed(block).map_err(|problem| Problem::new(problem.to_string()))? {
            Event::More => {}
            Event::End => return Ok(()),
            Event::Entry(entry) => {
                if bytes.len() <= HEADERS_BYTES_MAX {
                    hear(&Described::of(&entry), &bytes)?;
                }
                bytes.clear();
                let content: u64 = entry.pieces().iter().map(|piece| piece.length).sum();
                body = content.saturating_add(padding(content) as u64);
            }
        }
    }
    Ok(())
}

/// Changes the headers of an entry, which are those of `found`, to those of `wanted`; returns whether that is possible. In archives of
/// BuildKit and containerd only the fields of the last header are others, and its checksum.
pub fn fit(headers: &mut [u8], found: &Described, wanted: &Described) -> bool {
    /// The fields of a header (POSIX ustar): a number, its end, and the place of the checksum.
    const SIZE: std::ops::Range<usize> = 124..136;
    const TIME: std::ops::Range<usize> = 136..148;
    const SUM: std::ops::Range<usize> = 148..156;
    if (found.time, found.size) == (wanted.time, wanted.size) {
        return true;
    }
    let Some((before, header)) = headers.split_last_chunk_mut::<BLOCK_BYTES>() else { return false };
    let has = |record: &[u8]| before.windows(record.len()).any(|window| window == record);
    if has(b" mtime=") || has(b" size=") {
        return false;
    }
    let has_time = found.time == wanted.time
        || u64::try_from(wanted.time).is_ok_and(|time| set_number(&mut header[TIME], time));
    if !has_time || found.size != wanted.size && !set_number(&mut header[SIZE], wanted.size) {
        return false;
    }
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    let blanks = SUM.len() as u64 * u64::from(b' ');
    let sum = sum(&header[..SUM.start]) + blanks + sum(&header[SUM.end..]);
    set_number(&mut header[SUM], sum)
}

/// Writes a number in place of another one with as many octal digits, leading zeros included; returns whether that is possible.
fn set_number(field: &mut [u8], number: u64) -> bool {
    let count = field.iter().take_while(|byte| (b'0'..=b'7').contains(byte)).count();
    let (digits, end) = field.split_at_mut(count);
    let text = format!("{number:0count$o}");
    let is_plain = !end.is_empty() && end.iter().all(|byte| b"\0 ".contains(byte)) && text.len() == count;
    if is_plain {
        digits.copy_from_slice(text.as_bytes());
    }
    is_plain
}

/// Number of bytes between the content of a file of `size` bytes and the next header.
pub fn padding(size: u64) -> usize {
    (size.wrapping_neg() % BLOCK_BYTES as u64) as usize
}
