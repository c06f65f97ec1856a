//! The outline of an unpacked layer: all bytes of its uncompressed archive except the content of files that are in the layer's tree,
//! and for this content its path and chunks. With the tree it gives any range of the archive, so that a node passes a layer on to a
//! neighbour that has most of it, whatever the compression of its blob. It is kept in place of the layer's [`index`](crate::index),
//! and has all that an index has.
//!
//! The process that unpacks an untrusted archive writes it, and neighbours send it: lengths are limited, and what is made with it counts
//! only if it has the diff ID of the layer.
//!
//! The outline of a layer in eStargz, whose table lacks the headers of its archive, is kept by nodes that do not serve neighbours, too. It has no
//! content, also not that which a neighbour could not get, and chunks of the length of eStargz ([`Purpose::Headers`]).
//!
//! Format, version 1: one of [`MAGICS`], then records, of which the first byte is the kind. Numbers are in LEB128.
//!
//! | kind | record | fields |
//! |---|---|---|
//! | 1 | bytes of the archive that end at a multiple of 512 or before a file's content | their number, up to 512; the class of the block; then, up to their end, pairs: the number of bytes that the last block of this class has, too, and the number of bytes that it has not, with these bytes |
//! | 2 | content of a file | the number of first bytes of the path that the path before has, too, the number of others and these bytes; offset in the file; number of chunks, 1024 at most: a longer file has several records; for each chunk its SHA-256 digest, all zeros for zeros, and its length |
//! | 0 | the end, the last 9 bytes | the length of the archive, 8 bytes little-endian |
//!
//! The headers of an archive differ by few bytes, so that this is as short as a general compressor would make it, and neither
//! side needs one. The class of a block is the byte with the type of a header, which keeps headers of different types apart.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read as _, Take, Write};

use crate::contents::{CHUNKS_MAX, PATHS_BYTES_MAX};
use crate::index::{invalid, read_number, write_number};
use crate::{Chunk, Chunker, Contents, Digest, Problem};

/// The first bytes of an outline.
pub const MAGIC: &[u8; 8] = b"coroln\x00\x01";
/// The first bytes of an outline for this node only.
const HEADERS_MAGIC: &[u8; 8] = b"corhdr\x00\x01";
/// The first bytes of an outline of either purpose.
pub const MAGICS: [&[u8; 8]; 2] = [MAGIC, HEADERS_MAGIC];
/// Maximum length in bytes of an outline: that of some 30 000 files. A layer that needs more has none.
pub const BYTES_MAX: u64 = 4 << 20;
/// Length in bytes of the last record.
pub const END_BYTES: usize = 9;

/// Length in bytes of the chunks of eStargz (the default of `estargz.Build`).
const STARGZ_CHUNK_BYTES: u64 = 4 << 20;
const BLOCK_BYTES: usize = 512;
/// Maximum number of chunks of one record, which a reader keeps in memory: those of some 32 MB.
pub(crate) const RECORD_CHUNKS_MAX: usize = 1024;
/// Number of bytes of a file after which complete chunks are counted: few enough that all of them are not much memory.
const COUNT_BYTES: usize = 64 << 10;
/// Offset of the type in a header.
const TYPE_AT: usize = 156;
/// Maximum length of a path in bytes: the kernel's PATH_MAX.
const PATH_BYTES_MAX: usize = 4096;
/// Number of equal bytes between others from which on they are not repeated.
const EQUAL_MIN: usize = 3;

const END: u8 = 0;
const BLOCK: u8 = 1;
const FILE: u8 = 2;

type Block = [u8; BLOCK_BYTES];

/// The purpose of an outline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The layer is passed on to neighbours.
    Neighbours,
    /// The next release of a layer in eStargz has headers in common with this one.
    Headers,
}

/// The content of a file, or of one piece of a sparse file, as it is in the archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content<'a> {
    /// Path of the file in the tree.
    pub path: &'a [u8],
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub size: u64,
    /// Digest and length of each chunk.
    pub chunks: &'a [(Digest, u64)],
}

/// A part of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Bytes of the archive that are in no file: headers, padding.
    Bytes(&'a [u8]),
    /// The content of a file.
    Content(Content<'a>),
}

/// Writes an outline while an archive passes. An outline that would be too long, or that cannot be written, is not made.
pub struct Writer<W> {
    purpose: Purpose,
    /// Output for the outline; `None` once it would be too long, so that there will be no outline.
    into: Option<W>,
    /// Number of bytes that may still be written.
    left: u64,
    known: BTreeMap<u8, Block>,
    /// Bytes of the archive after the last record.
    pending: Vec<u8>,
    /// Number of bytes of the archive.
    position: u64,
    open: Option<(Vec<u8>, u64, Chunker)>,
    path: Vec<u8>,
    /// Numbers of chunks and of bytes of paths, which are limited.
    chunks: usize,
    path_bytes: usize,
}

impl<W: Write> Writer<W> {
    /// Begins an outline for neighbours of at most [`BYTES_MAX`] and `bytes_max` bytes.
    pub fn new(into: W, bytes_max: u64) -> Self {
        Self::with_purpose(into, bytes_max, Purpose::Neighbours)
    }

    /// Begins an outline of at most [`BYTES_MAX`] and `bytes_max` bytes.
    pub fn with_purpose(into: W, bytes_max: u64, purpose: Purpose) -> Self {
        let mut writer = Self {
            purpose,
            into: Some(into),
            left: bytes_max.min(BYTES_MAX).saturating_sub(END_BYTES as u64),
            known: BTreeMap::new(),
            pending: Vec::with_capacity(BLOCK_BYTES),
            position: 0,
            open: None,
            path: Vec::new(),
            chunks: 0,
            path_bytes: 0,
        };
        writer.put(match purpose {
            Purpose::Neighbours => MAGIC,
            Purpose::Headers => HEADERS_MAGIC,
        });
        writer
    }

    /// The purpose of the outline.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Passes the next bytes of the archive: of the content between [`Writer::begin`] and [`Writer::end`].
    pub fn pass(&mut self, mut bytes: &[u8]) {
        if self.into.is_none() {
            return;
        }
        if self.open.is_some() {
            self.position = self.position.saturating_add(bytes.len() as u64);
            return bytes.chunks(COUNT_BYTES).for_each(|bytes| self.pass_content(bytes));
        }
        while !bytes.is_empty() {
            let room = BLOCK_BYTES - (self.position % BLOCK_BYTES as u64) as usize;
            let (block, rest) = bytes.split_at(room.min(bytes.len()));
            self.pending.extend_from_slice(block);
            self.position += block.len() as u64;
            bytes = rest;
            if self.position.is_multiple_of(BLOCK_BYTES as u64) {
                self.block();
            }
        }
    }

    /// Begins the content of the file at `path`, `size` bytes from this offset on.
    pub fn begin(&mut self, path: &[u8], offset: u64, size: u64) {
        self.block();
        if self.into.is_some() {
            let chunker = match self.purpose {
                // As in a table of coracle-convert, because a node keeps an outline in place of the index of such a table.
                Purpose::Neighbours => Chunker::of_file(size, self.chunks),
                Purpose::Headers => Chunker::of_length(STARGZ_CHUNK_BYTES),
            };
            self.open = Some((path.to_vec(), offset, chunker));
        }
    }

    /// Ends the content of a file, if any has begun.
    pub fn end(&mut self) {
        if let Some((path, offset, chunker)) = self.open.take() {
            self.file(&path, offset, &chunker.finish());
        }
    }

    /// Passes content of the open file. Its chunks are written as soon as they are a record: an archive may have only chunks of a byte.
    fn pass_content(&mut self, bytes: &[u8]) {
        let Some((path, mut offset, mut chunker)) = self.open.take() else { return };
        chunker.update(bytes);
        while let Some(chunks) = chunker.take(RECORD_CHUNKS_MAX) {
            offset = self.file(&path, offset, &chunks);
        }
        if self.into.is_some() {
            self.open = Some((path, offset, chunker));
        }
    }

    /// Writes the records of chunks of a file from this offset on; returns the offset after them.
    fn file(&mut self, path: &[u8], mut offset: u64, chunks: &[(Digest, u64)]) -> u64 {
        for chunks in chunks.chunks(RECORD_CHUNKS_MAX) {
            self.chunks += chunks.len();
            self.path_bytes += path.len();
            if self.chunks > CHUNKS_MAX || self.path_bytes > PATHS_BYTES_MAX || path.len() > PATH_BYTES_MAX {
                self.into = None;
            }
            let shared = path.iter().zip(&self.path).take_while(|(one, other)| one == other).count();
            let mut record = vec![FILE];
            add(&mut record, shared);
            add(&mut record, path.len() - shared);
            record.extend_from_slice(&path[shared..]);
            add_long(&mut record, offset);
            add(&mut record, chunks.len());
            for (digest, size) in chunks {
                record.extend_from_slice(digest);
                add_long(&mut record, *size);
                offset = offset.saturating_add(*size);
            }
            self.put(&record);
            self.path = path.to_vec();
        }
        offset
    }

    /// Whether the outline is still written, that is, it is not too long.
    #[cfg(test)]
    pub(crate) fn is_made(&self) -> bool {
        self.into.is_some()
    }

    /// Ends the outline; returns the output, or `None` if there is no outline.
    pub fn finish(mut self) -> Option<W> {
        self.end();
        self.block();
        let mut end = vec![END];
        end.extend_from_slice(&self.position.to_le_bytes());
        self.left += END_BYTES as u64;
        self.put(&end);
        let mut into = self.into?;
        into.flush().is_ok().then_some(into)
    }

    /// Writes a record of the pending bytes.
    fn block(&mut self) {
        let bytes = std::mem::take(&mut self.pending);
        if bytes.is_empty() {
            return;
        }
        let class = bytes.get(TYPE_AT).copied().unwrap_or_default();
        let before = self.known.entry(class).or_insert([0; BLOCK_BYTES]);
        let mut record = vec![BLOCK];
        add(&mut record, bytes.len());
        record.push(class);
        let mut at = 0;
        while at < bytes.len() {
            let is_equal = |at: &usize| bytes[*at] == before[*at];
            let begin = (at..bytes.len()).find(|at| !is_equal(at)).unwrap_or(bytes.len());
            let is_next = |end: &usize| (*end..(end + EQUAL_MIN).min(bytes.len())).all(|at| is_equal(&at));
            let end = (begin..bytes.len()).find(is_next).unwrap_or(bytes.len());
            add(&mut record, begin - at);
            add(&mut record, end - begin);
            record.extend_from_slice(&bytes[begin..end]);
            at = end;
        }
        before[..bytes.len()].copy_from_slice(&bytes);
        self.put(&record);
        // The allocation is used again.
        self.pending = bytes;
        self.pending.clear();
    }

    fn put(&mut self, record: &[u8]) {
        let left = self.left.checked_sub(record.len() as u64);
        let is_written =
            left.is_some() && self.into.as_mut().is_some_and(|into| into.write_all(record).is_ok());
        if !is_written {
            self.into = None;
        }
        self.left = left.unwrap_or_default();
    }
}

fn add(record: &mut Vec<u8>, number: usize) {
    add_long(record, number as u64);
}

fn add_long(record: &mut Vec<u8>, number: u64) {
    // Memory takes it.
    let _ = write_number(record, number);
}

/// Reads an outline part by part. Its memory does not depend on the number of files.
#[derive(Debug)]
pub struct Reader<R> {
    from: Take<R>,
    known: BTreeMap<u8, Block>,
    path: Vec<u8>,
    chunks: Vec<(Digest, u64)>,
    last: Last,
    /// Number of bytes of the archive before the next part.
    position: u64,
}

/// Rest of the part that was read last.
#[derive(Debug)]
enum Last {
    Nothing,
    Block { class: u8, length: usize },
    File { offset: u64, size: u64 },
}

impl<R: BufRead> Reader<R> {
    /// Begins to read an outline for neighbours.
    ///
    /// # Errors
    /// It is not an outline of this version.
    pub fn new(from: R) -> Result<Self, Problem> {
        Self::of(from, &[MAGIC])
    }

    /// Begins to read an outline of either purpose.
    ///
    /// # Errors
    /// Those of [`Reader::new`].
    pub(crate) fn of_either(from: R) -> Result<Self, Problem> {
        Self::of(from, &MAGICS)
    }

    fn of(mut from: R, magics: &[&[u8; MAGIC.len()]]) -> Result<Self, Problem> {
        let mut magic = [0; MAGIC.len()];
        from.read_exact(&mut magic)?;
        match magics.contains(&&magic) {
            true => Ok(Self::after_magic(from)),
            false => Err(Problem::new("not an outline of this version")),
        }
    }

    pub(crate) fn after_magic(from: R) -> Self {
        let from = from.take(BYTES_MAX);
        let (known, path, chunks) = Default::default();
        Self { from, known, path, chunks, last: Last::Nothing, position: 0 }
    }

    /// Number of bytes of the archive before the next part.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Reads the next part of the archive; `None` at its end.
    ///
    /// # Errors
    /// Errors of the input, or it is damaged.
    pub fn part(&mut self) -> Result<Option<Part<'_>>, Problem> {
        self.next_part().map_err(Problem::from)
    }

    /// The part that was read last, and the number of bytes of the archive before it; `None` before the first one and at the end.
    pub fn last(&self) -> Option<(u64, Part<'_>)> {
        let Self { path, chunks, .. } = self;
        let (length, part) = match self.last {
            Last::Nothing => return None,
            Last::Block { class, length } => {
                (length as u64, Part::Bytes(self.known.get(&class)?.get(..length)?))
            }
            Last::File { offset, size } => (size, Part::Content(Content { path, offset, size, chunks })),
        };
        Some((self.position - length, part))
    }

    /// [`Reader::part`] with the kind of its error.
    fn next_part(&mut self) -> io::Result<Option<Part<'_>>> {
        self.last = Last::Nothing;
        self.last = match self.byte()? {
            END => self.end()?,
            BLOCK => self.block()?,
            FILE => self.file()?,
            kind => return Err(invalid(&format!("a record of kind {kind}"))),
        };
        Ok(self.last().map(|(_, part)| part))
    }

    fn end(&mut self) -> io::Result<Last> {
        let mut length = [0; END_BYTES - 1];
        self.from.read_exact(&mut length)?;
        if u64::from_le_bytes(length) != self.position {
            return Err(invalid("parts that do not add up to the archive"));
        }
        match self.from.fill_buf()?.is_empty() && self.from.limit() > 0 {
            true => Ok(Last::Nothing),
            false => Err(invalid("data after its end")),
        }
    }

    fn block(&mut self) -> io::Result<Last> {
        let length = self.number(BLOCK_BYTES)?;
        let class = self.byte()?;
        let block = self.known.entry(class).or_insert([0; BLOCK_BYTES]);
        let mut at = 0;
        while at < length {
            let begin = at + read_number(&mut self.from, (length - at) as u64)? as usize;
            let end = begin + read_number(&mut self.from, (length - begin) as u64)? as usize;
            if end == at {
                return Err(invalid("a block without progress"));
            }
            self.from.read_exact(&mut block[begin..end])?;
            at = end;
        }
        self.position = self.position.checked_add(length as u64).ok_or_else(too_long)?;
        Ok(Last::Block { class, length })
    }

    fn file(&mut self) -> io::Result<Last> {
        let shared = self.number(self.path.len())?;
        let rest = self.number(PATH_BYTES_MAX - shared)?;
        self.path.resize(shared + rest, 0);
        self.from.read_exact(&mut self.path[shared..])?;
        let offset = read_number(&mut self.from, u64::MAX)?;
        let count = self.number(RECORD_CHUNKS_MAX)?;
        self.chunks.clear();
        let mut size = 0_u64;
        for _ in 0..count {
            let mut digest = Digest::default();
            self.from.read_exact(&mut digest)?;
            let length = read_number(&mut self.from, u64::MAX)?;
            if length == 0 {
                return Err(invalid("a chunk without content"));
            }
            size = size.checked_add(length).ok_or_else(too_long)?;
            self.chunks.push((digest, length));
        }
        if size == 0 || offset.checked_add(size).is_none() {
            return Err(invalid("a file without content, or that is too long"));
        }
        self.position = self.position.checked_add(size).ok_or_else(too_long)?;
        Ok(Last::File { offset, size })
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.from.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    fn number(&mut self, most: usize) -> io::Result<usize> {
        Ok(read_number(&mut self.from, most as u64)? as usize)
    }
}

fn too_long() -> io::Error {
    invalid("an archive that is too long")
}

/// Reads all of an outline; returns the chunks of its files, with their places in the archive.
///
/// # Errors
/// Those of [`Reader::part`]; there are too many chunks or paths.
pub fn contents(from: impl BufRead) -> Result<Contents, Problem> {
    let (mut reader, mut contents) = (Reader::new(from)?, Contents::default());
    loop {
        let mut begin = reader.position();
        match reader.part()? {
            None => return Ok(contents),
            Some(Part::Bytes(_)) => {}
            Some(Part::Content(Content { path, size, chunks, .. })) => {
                contents.begin(path, size)?;
                for (digest, size) in chunks {
                    // The sum was checked by the reader.
                    let end = begin.saturating_add(*size);
                    contents.push(Chunk { begin, end, size: *size, digest: *digest })?;
                    begin = end;
                }
            }
        }
    }
}

/// Length of the archive in bytes, according to the first and the last bytes of an outline; `None`: it is none.
pub fn archive_bytes(first: &[u8; MAGIC.len()], last: &[u8; END_BYTES]) -> Option<u64> {
    let [END, length @ ..] = *last else { return None };
    (first == MAGIC).then_some(u64::from_le_bytes(length))
}

/// Reads an outline as an index; `hear` receives each chunk.
pub(crate) fn hear(from: impl BufRead, hear: &mut dyn FnMut(crate::index::Found<'_>)) -> io::Result<()> {
    let mut reader = Reader::after_magic(from);
    while let Some(part) = reader.next_part()? {
        let Part::Content(Content { path, mut offset, chunks, .. }) = part else { continue };
        for (digest, size) in chunks {
            hear(crate::index::Found { path, offset, size: *size, prefix: crate::index::prefix(digest) });
            offset = offset.saturating_add(*size);
        }
    }
    Ok(())
}
