//! Reads the table of contents of a zstd:chunked layer. Only what says where the content of files is gets used: names, owners and
//! modes come from the archive's headers, so that a layer that was pulled in part has the same tree as one that was pulled whole.

use std::io::{BufReader, Read};

use coracle_tar::Kind;
use data_encoding::HEXLOWER_PERMISSIVE;
use serde::Deserialize;

use crate::elements::Elements;
use crate::{Chunk, Contents, Digest, Problem, stargz};

/// Maximum length in bytes of a table and its tar-split data as they are stored.
pub const STORED_BYTES_MAX: u64 = 4 << 20;
/// Maximum length in bytes of a table; one entry has some 300.
pub const TABLE_BYTES_MAX: u64 = 64 << 20;
/// The only version of the format.
const VERSION: u64 = 1;

/// Annotation of a layer's descriptor: the digest of the table as it is stored.
pub const CHECKSUM: &str = "io.github.containers.zstd-chunked.manifest-checksum";
/// Annotation with the position of the table: offset, length, length uncompressed, and [`CRFS`], in decimal digits with colons.
pub const TABLE: &str = "io.github.containers.zstd-chunked.manifest-position";
/// Annotation with the position of the tar-split data, without a type.
pub const SPLIT: &str = "io.github.containers.zstd-chunked.tarsplit-position";
/// Type of the table: of the format CRFS.
pub const CRFS: u64 = 1;

/// Position of a part of a blob in the annotations of a layer's descriptor, and its length uncompressed. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length of the part as it is stored.
    pub length: u64,
    /// Length of the part uncompressed.
    pub uncompressed: u64,
}

impl Position {
    /// Offset of the first byte after the part.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// Location of a layer's table of contents and of its tar-split data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// SHA-256 digest of the table as it is stored.
    pub digest: Digest,
    /// Position of the table of contents.
    pub table: Position,
    /// Position of the tar-split data.
    pub split: Position,
}

impl Location {
    /// Number of bytes of a blob that are downloaded for the table and the tar-split data.
    pub fn stored(&self) -> u64 {
        self.split.end().saturating_sub(self.table.offset)
    }

    /// Number of bytes of memory for the table: it and the tar-split data as they are stored, and no more for its chunks than for the
    /// text of their entries.
    pub fn memory(&self) -> u64 {
        self.stored().saturating_add(self.table.uncompressed)
    }

    /// Compares the lengths with the limits of a pull.
    ///
    /// # Errors
    /// The table or the tar-split data is too long.
    pub fn check(&self) -> Result<(), Problem> {
        let stored = self.stored();
        if stored > STORED_BYTES_MAX {
            return Err(Problem::new(format!(
                "a table of contents of {stored} bytes, at most {STORED_BYTES_MAX} are read"
            )));
        }
        let uncompressed = self.table.uncompressed.max(self.split.uncompressed);
        if uncompressed > TABLE_BYTES_MAX {
            return Err(Problem::new(format!(
                "tar-split data of {uncompressed} bytes, at most {TABLE_BYTES_MAX} are read"
            )));
        }
        Ok(())
    }

    /// Reads the annotations of a layer of `blob_bytes` bytes; `None` if it has no usable table, or no tar-split data, without which
    /// the archive cannot be rebuilt (containers/storage before 1.51).
    pub fn of<'a>(annotation: impl Fn(&str) -> Option<&'a str>, blob_bytes: u64) -> Option<Self> {
        let numbers = |name| -> Option<Vec<u64>> {
            annotation(name)?.split(':').map(|number| number.parse().ok()).collect()
        };
        let position = |numbers: &[u64]| {
            let [offset, length, uncompressed] = *numbers else { return None };
            let position = Position { offset, length, uncompressed };
            let fits = offset > 0 && length > 0 && offset.checked_add(length)? <= blob_bytes;
            fits.then_some(position)
        };
        let table = numbers(TABLE)?.strip_suffix(&[CRFS]).and_then(position)?;
        let split = position(&numbers(SPLIT)?)?;
        let is_in_order = table.end() <= split.offset;
        is_in_order.then_some(Self { digest: digest(annotation(CHECKSUM)?)?, table, split })
    }
}

/// The types of entries with their names in tables, also of eStargz.
const KINDS: [(Kind, &str); 7] = [
    (Kind::File, "reg"),
    (Kind::HardLink, "hardlink"),
    (Kind::Symlink, "symlink"),
    (Kind::Char, "char"),
    (Kind::Block, "block"),
    (Kind::Directory, "dir"),
    (Kind::Fifo, "fifo"),
];

/// The type of an entry by its name in a table.
pub(crate) fn kind(name: &str) -> Option<Kind> {
    KINDS.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
}

/// The name of a type of entries in a table; `None` for a type that POSIX does not define.
pub fn kind_name(kind: Kind) -> Option<&'static str> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name)
}

/// The table of contents of a layer, according to the annotations of its descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stated {
    /// The layer is in zstd:chunked.
    Chunked(Location),
    /// The layer is in eStargz, with the digest of its uncompressed table ([`stargz`]).
    Stargz(Digest),
}

impl Stated {
    /// Reads the annotations of a layer of `blob_bytes` bytes; `None` if it has no usable table.
    pub fn of<'a>(annotation: impl Fn(&str) -> Option<&'a str>, blob_bytes: u64) -> Option<Self> {
        match annotation(TABLE) {
            // stargz-snapshotter annotates such layers with the digest of eStargz, too.
            Some(_) => Location::of(annotation, blob_bytes).map(Self::Chunked),
            None => digest(annotation(stargz::DIGEST)?).map(Self::Stargz),
        }
    }
}

/// A table of contents.
#[derive(Debug)]
pub struct Table {
    /// The files of the layer.
    pub contents: Contents,
    /// SHA-256 digest of the tar-split data as it is stored.
    pub split: Digest,
}

/// Reads the uncompressed table of a layer whose content ends before byte `end` of its blob.
///
/// # Errors
/// It is not a table, it contradicts itself, or it is too long.
pub fn read(from: impl Read, end: u64) -> Result<Table, Problem> {
    let mut entries = Elements::new(BufReader::new(from), "entries", TABLE_BYTES_MAX);
    let mut rows = Rows { contents: Contents::default(), open: None, end, position: 0 };
    while let Some(text) = entries.next()? {
        rows.add(&serde_json::from_slice(text)?)?;
    }
    rows.finish()?;
    let head: Head = serde_json::from_slice(entries.around())?;
    if head.version != VERSION {
        return Err(Problem::new(format!("version {} of the format", head.version)));
    }
    let split = head.tar_split_digest.as_deref().and_then(digest);
    let split = split.ok_or_else(|| Problem::new("it names no tar-split data"))?;
    Ok(Table { contents: rows.contents, split })
}

/// Parses `sha256:HEX`.
pub(crate) fn digest(text: &str) -> Option<Digest> {
    HEXLOWER_PERMISSIVE.decode(text.strip_prefix("sha256:")?.as_bytes()).ok()?.try_into().ok()
}

/// An entry of the table; members that describe the attributes of a file are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Entry {
    r#type: String,
    name: String,
    size: u64,
    digest: String,
    offset: u64,
    end_offset: u64,
    chunk_size: u64,
    chunk_offset: u64,
    chunk_digest: String,
    chunk_type: String,
}

/// The entries that were read.
struct Rows {
    contents: Contents,
    /// The file whose chunks are being read.
    open: Option<Open>,
    /// Offset of the first byte of the blob after the content.
    end: u64,
    /// Offset in the blob after the last file.
    position: u64,
}

/// A file whose chunks are being read: the end of a chunk is the beginning of the next.
struct Open {
    end: u64,
    size: u64,
    /// Number of bytes of the file before the last chunk that was read.
    passed: u64,
    last: Chunk,
}

impl Rows {
    fn add(&mut self, entry: &Entry) -> Result<(), Problem> {
        let refused = |why: &str| Problem::new(format!("entry {:?}: {why}", entry.name));
        if entry.r#type == "chunk" {
            let open = self.open.as_mut().ok_or_else(|| refused("a chunk without its file"))?;
            if entry.offset <= open.last.begin || entry.offset >= open.end {
                return Err(refused("a chunk out of order"));
            }
            open.passed = open.passed.saturating_add(open.last.size);
            if entry.chunk_offset != open.passed || entry.chunk_size == 0 {
                return Err(refused("chunks with a gap"));
            }
            let next = chunk(entry, entry.chunk_size).ok_or_else(|| refused("a chunk without a digest"))?;
            let before = std::mem::replace(&mut open.last, next);
            return self.contents.push(Chunk { end: entry.offset, ..before });
        }
        self.finish()?;
        if entry.r#type != "reg" || entry.size == 0 {
            return Ok(());
        }
        if entry.offset < self.position || entry.offset >= entry.end_offset || entry.end_offset > self.end {
            return Err(refused("a file out of order"));
        }
        let size = if entry.chunk_size > 0 { entry.chunk_size } else { entry.size };
        let last = chunk(entry, size).ok_or_else(|| refused("a file without a digest"))?;
        self.contents.begin(entry.name.as_bytes(), entry.size)?;
        self.open = Some(Open { end: entry.end_offset, size: entry.size, passed: 0, last });
        Ok(())
    }

    /// Ends the file whose chunks are being read.
    fn finish(&mut self) -> Result<(), Problem> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.passed.checked_add(open.last.size) != Some(open.size) {
            return Err(Problem::new(format!("chunks that do not add up to a file of {} bytes", open.size)));
        }
        self.position = open.end;
        self.contents.push(Chunk { end: open.end, ..open.last })
    }
}

/// The chunk of an entry, whose end is not known yet; `None` if it has no digest.
fn chunk(entry: &Entry, size: u64) -> Option<Chunk> {
    let digest = match &*entry.chunk_type {
        "zeros" => [0; 32],
        _ if entry.chunk_digest.is_empty() => digest(&entry.digest)?,
        _ => digest(&entry.chunk_digest)?,
    };
    Some(Chunk { begin: entry.offset, end: 0, size, digest })
}

/// The members of the table beside its entries.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    #[serde(default)]
    version: u64,
    tar_split_digest: Option<String>,
}
