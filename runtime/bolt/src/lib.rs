//! Reads files of bbolt (go.etcd.io/bbolt 1.3 and 1.4, file format version 2), in which containerd keeps its
//! metadata. No crate for it is well kept: one port maps the file and panics on damage, and a smaller reader
//! does not verify the checksum. This reader never writes, maps or locks the file: a lock would stop a containerd
//! that starts. Every length, offset and page number is checked, and the bytes that are read are limited.
//!
//! ```text
//! file: pages of equal size; pages 0 and 1 are the two meta pages, of which each transaction writes the older one
//! page  header  id u64, flags u16 (1 branch, 2 leaf, 4 meta, 16 free list), count u16, overflow u32 (pages after this one)
//! meta          header, magic u32, version u32, page size u32, flags u32, root page u64, root sequence u64,
//!               page of the free list u64, end of the used pages u64, transaction u64, FNV-1a of the 56 bytes before u64
//! branch        header, count × (position u32, key length u32, page u64), keys
//! leaf          header, count × (flags u32, position u32, key length u32, value length u32), keys and values
//! bucket        a value with flag 1: root page u64, sequence u64; root page 0: a leaf page follows inside of the value
//! ```
//! Numbers are little-endian: bbolt uses the byte order of the machine, and coracle's are little-endian. A position counts
//! from the start of its own element. Source: internal/common/{page,meta,bucket,inode}.go and db.go of bbolt 1.4.
//!
//! A file that is being written can be read: a transaction never writes to a page that the last complete
//! transaction uses, and writes its meta page last. So all that was read is consistent if the newest meta page is
//! the same afterwards ([`Snapshot::is_current`]).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 16;
/// Length of a meta page that is used: the header and 64 bytes.
const META_BYTES: usize = 80;
/// Length of an element of a branch or a leaf.
const ELEMENT_BYTES: usize = 16;
const BRANCH: u16 = 1;
const LEAF: u16 = 2;
/// Flag of an element whose value is a bucket.
const IS_BUCKET: u32 = 1;
/// Page sizes: bbolt uses that of the machine, 4096 to 65536 bytes.
const PAGE_SIZES: std::ops::RangeInclusive<u64> = 1024..=65536;
/// Maximum number of bytes of a page with its overflow. A value of containerd's images has some kilobytes.
const PAGE_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of bytes that are read of one snapshot: tens of thousands of images. The keys and values of a leaf do
/// not overlap, so no more bytes than these are copied.
const BYTES_MAX: u64 = 64 << 20;
/// Maximum height of a tree; a page of 4096 bytes has dozens of elements.
const DEPTH_MAX: u32 = 16;
/// Maximum number of entries of a bucket.
const ENTRIES_MAX: usize = 100_000;

/// The reason why a file cannot be read.
#[derive(Debug)]
pub enum Problem {
    /// The content violates the format, or exceeds a limit.
    Damaged(String),
    /// A read failed.
    Io(io::Error),
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(text) => write!(out, "damaged: {text}"),
            Self::Io(error) => write!(out, "read: {error}"),
        }
    }
}

fn damaged(text: impl Into<String>) -> Problem {
    Problem::Damaged(text.into())
}

/// Reads at an offset: a file, or bytes in a test.
pub trait ReadAt {
    /// Reads bytes at an offset; 0 at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

/// The state of a file after its last complete transaction.
#[derive(Debug)]
pub struct Snapshot<'a, R> {
    file: &'a R,
    meta: Meta,
    /// Number of bytes that may still be read.
    left: Cell<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Meta {
    page_size: u64,
    root: u64,
    /// The first page number that is not used.
    end: u64,
    transaction: u64,
}

/// A bucket: a tree of pages, or one page inside of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bucket {
    /// A tree of pages; the number of its root page.
    Tree(u64),
    /// The bucket's only page.
    Inline(Vec<u8>),
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Bytes.
    Value(Vec<u8>),
    /// A bucket within the bucket.
    Bucket(Bucket),
}

/// The keys of a bucket in their order, with their values.
pub type Entries = Vec<(Vec<u8>, Entry)>;

impl<'a, R: ReadAt> Snapshot<'a, R> {
    /// Chooses the valid meta page with the newest transaction.
    ///
    /// # Errors
    /// Neither meta page is valid, or a read fails.
    pub fn open(file: &'a R) -> Result<Self, Problem> {
        Ok(Self { file, meta: newest(file)?, left: Cell::new(BYTES_MAX) })
    }

    /// Whether no transaction was completed since the snapshot was opened.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`].
    pub fn is_current(&self) -> Result<bool, Problem> {
        Ok(newest(self.file)? == self.meta)
    }

    /// The bucket that contains all others.
    pub fn root(&self) -> Bucket {
        Bucket::Tree(self.meta.root)
    }

    /// All entries of a bucket.
    ///
    /// # Errors
    /// The bucket is damaged, has too many entries, or cannot be read.
    pub fn entries(&self, bucket: &Bucket) -> Result<Entries, Problem> {
        let mut entries = Vec::new();
        match bucket {
            Bucket::Tree(page) => self.walk(*page, 0, &mut entries)?,
            Bucket::Inline(page) => Node::parse(page)?.leaf(&mut entries)?,
        }
        Ok(entries)
    }

    /// The bucket inside of `bucket` with this key; `None` if there is none.
    ///
    /// # Errors
    /// Those of [`Snapshot::entries`].
    pub fn bucket(&self, bucket: &Bucket, key: &[u8]) -> Result<Option<Bucket>, Problem> {
        let found = self.entries(bucket)?.into_iter().find(|(name, _)| name == key);
        Ok(found.and_then(|(_, entry)| match entry {
            Entry::Bucket(bucket) => Some(bucket),
            Entry::Value(_) => None,
        }))
    }

    fn walk(&self, page: u64, depth: u32, entries: &mut Entries) -> Result<(), Problem> {
        if depth > DEPTH_MAX {
            return Err(damaged(format!("page {page}: a tree is higher than {DEPTH_MAX} pages")));
        }
        let bytes = self.page(page)?;
        let named = |problem| match problem {
            Problem::Damaged(text) => damaged(format!("page {page}: {text}")),
            Problem::Io(_) => problem,
        };
        let node = Node::parse(&bytes).map_err(named)?;
        if node.is_leaf {
            return node.leaf(entries).map_err(named);
        }
        for child in node.branch().map_err(named)? {
            self.walk(child, depth + 1, entries)?;
        }
        Ok(())
    }

    /// Reads a page with its overflow.
    fn page(&self, number: u64) -> Result<Vec<u8>, Problem> {
        let Meta { page_size, end, .. } = self.meta;
        if number < 2 || number >= end {
            return Err(damaged(format!("page {number} is named, and there are {end}")));
        }
        let offset = number.checked_mul(page_size).ok_or_else(|| damaged("a page number is too large"))?;
        let header = self.read(offset, HEADER_BYTES as u64)?;
        if u64_at(&header, 0) != Some(number) {
            return Err(damaged(format!("page {number} has another number")));
        }
        let overflow = u64::from(u32_at(&header, 12).unwrap_or(u32::MAX));
        let length = (overflow + 1) * page_size;
        if overflow >= end - number || length > PAGE_BYTES_MAX {
            return Err(damaged(format!("page {number} is longer than the file or {PAGE_BYTES_MAX} bytes")));
        }
        self.read(offset, length)
    }

    fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, Problem> {
        let left = self.left.get().checked_sub(length);
        self.left.set(left.ok_or_else(|| damaged(format!("more than {BYTES_MAX} bytes of pages")))?);
        let mut bytes = vec![0; length as usize];
        match fill(self.file, offset, &mut bytes)? {
            true => Ok(bytes),
            false => {
                Err(damaged(format!("it ends before byte {}: truncated", offset.saturating_add(length))))
            }
        }
    }
}

/// The newest valid meta page.
fn newest(file: &impl ReadAt) -> Result<Meta, Problem> {
    let first = meta(file, 0)?;
    // Without the first one the page size, and so the place of the second one, is not known.
    let sizes = match &first {
        Ok(first) => vec![first.page_size],
        Err(_) => (10..=16).map(|shift| 1 << shift).collect(),
    };
    let mut second = None;
    for size in sizes {
        if let Ok(found) = meta(file, size)? {
            second = Some(found).filter(|found| found.page_size == size).or(second);
        }
    }
    match (first, second) {
        (Ok(first), Some(second)) if second.transaction > first.transaction => Ok(second),
        (Ok(first), _) => Ok(first),
        (Err(_), Some(second)) => Ok(second),
        (Err(why), None) => Err(damaged(format!("no valid meta page: {why}"))),
    }
}

/// The meta page at an offset, or what is wrong with it.
fn meta(file: &impl ReadAt, offset: u64) -> Result<Result<Meta, &'static str>, Problem> {
    let mut bytes = [0; META_BYTES];
    if !fill(file, offset, &mut bytes)? {
        return Ok(Err("the file is shorter than a page"));
    }
    let bytes = &bytes[HEADER_BYTES..];
    let long = |at| u64_at(bytes, at).unwrap_or_default();
    let page_size = u64::from(u32_at(bytes, 8).unwrap_or_default());
    Ok(if u32_at(bytes, 0) != Some(MAGIC) {
        Err("not a file of bbolt, or of a machine with another byte order")
    } else if u32_at(bytes, 4) != Some(VERSION) {
        Err("another version of the format")
    } else if long(56) != fnv_1a(&bytes[..56]) {
        Err("the checksum is wrong")
    } else if !PAGE_SIZES.contains(&page_size) || !page_size.is_power_of_two() {
        Err("the page size is not 1024 to 65536 bytes")
    } else {
        Ok(Meta { page_size, root: long(16), end: long(40), transaction: long(48) })
    })
}

/// Fills the buffer; `false` if the file ends before.
fn fill(file: &impl ReadAt, offset: u64, buffer: &mut [u8]) -> Result<bool, Problem> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset.saturating_add(done as u64)) {
            Ok(0) => return Ok(false),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Problem::Io(error)),
        }
    }
    Ok(true)
}

/// A branch or a leaf.
struct Node<'a> {
    bytes: &'a [u8],
    is_leaf: bool,
    count: usize,
}

impl<'a> Node<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, Problem> {
        let (flags, count) = (u16_at(bytes, 8), u16_at(bytes, 10));
        let (Some(flags), Some(count)) = (flags, count) else { return Err(damaged("a page is too short")) };
        match flags {
            BRANCH | LEAF => Ok(Node { bytes, is_leaf: flags == LEAF, count: usize::from(count) }),
            _ => Err(damaged(format!("a page with flags {flags:#x} is neither a branch nor a leaf"))),
        }
    }

    /// The 16 bytes of an element, and all bytes from its start on.
    fn element(&self, index: usize) -> Result<&'a [u8], Problem> {
        let start = HEADER_BYTES + index * ELEMENT_BYTES;
        let rest = self.bytes.get(start..).filter(|rest| rest.len() >= ELEMENT_BYTES);
        rest.ok_or_else(|| damaged(format!("element {index} is outside of the page")))
    }

    /// The pages below a branch.
    fn branch(&self) -> Result<Vec<u64>, Problem> {
        let page = |index| self.element(index).map(|element| u64_at(element, 8).unwrap_or_default());
        (0..self.count).map(page).collect()
    }

    /// Appends the entries of a leaf.
    fn leaf(&self, entries: &mut Entries) -> Result<(), Problem> {
        if !self.is_leaf {
            return Err(damaged("a branch inside of a value"));
        }
        // Each key and value begins where the one before ends or later (bbolt writes them in the order of the elements).
        // Otherwise a page of n bytes could have n / 16 values of n bytes each.
        let mut free = HEADER_BYTES + self.count * ELEMENT_BYTES;
        if free > self.bytes.len() {
            return Err(damaged(format!("{} elements reach outside of the page", self.count)));
        }
        for index in 0..self.count {
            let element = self.element(index)?;
            let number = |at| u32_at(element, at).unwrap_or(u32::MAX) as usize;
            let (flags, position, key, value) = (number(0), number(4), number(8), number(12));
            let part = |start: usize, length: usize| element.get(start..start.checked_add(length)?);
            let parts =
                part(position, key).zip(position.checked_add(key).and_then(|start| part(start, value)));
            let Some((key, value)) = parts else {
                return Err(damaged(format!(
                    "the key or the value of element {index} is outside of the page"
                )));
            };
            if entries.last().is_some_and(|(last, _)| last.as_slice() >= key) {
                return Err(damaged(format!("the key of element {index} is out of order")));
            }
            let start = HEADER_BYTES + index * ELEMENT_BYTES + position;
            if start < free {
                return Err(damaged(format!("the key of element {index} overlaps what is before it")));
            }
            free = start + key.len() + value.len();
            if entries.len() >= ENTRIES_MAX {
                return Err(damaged(format!("a bucket has more than {ENTRIES_MAX} entries")));
            }
            let entry = match flags as u32 & IS_BUCKET {
                0 => Entry::Value(value.to_owned()),
                _ => Entry::Bucket(bucket(value)?),
            };
            entries.push((key.to_owned(), entry));
        }
        Ok(())
    }
}

fn bucket(value: &[u8]) -> Result<Bucket, Problem> {
    match (u64_at(value, 0), value.get(16..)) {
        (Some(0), Some(page)) => Ok(Bucket::Inline(page.to_owned())),
        (Some(root), Some(_)) => Ok(Bucket::Tree(root)),
        _ => Err(damaged("a bucket is shorter than 16 bytes")),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The hash FNV-1a with 64 bits (draft-eastlake-fnv).
fn fnv_1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
