//! The index of an unpacked layer: the chunks of its files, by digest. It is kept beside the layer, says where a chunk may be, and
//! is never believed: what is taken from the file is verified.
//!
//! Format, version 1: `MAGIC`, then for each file the length of its path and the path, the number of its chunks, and for each of
//! them the first 16 bytes of its SHA-256 digest and its length in bytes. Numbers are in LEB128. The chunks of a file follow each
//! other from its first byte. A layer that is passed on to neighbours has an [`outline`] instead, which is read like an index.

use std::io::{self, BufRead, Read, Write};

use crate::contents::{CHUNKS_MAX, PATHS_BYTES_MAX};
use crate::{Contents, Digest, outline};

/// The first bytes of an index.
const MAGIC: &[u8; 8] = b"coridx\x00\x01";

/// Maximum length in bytes of an index: some 300 000 files. Files that exceed it are left out.
pub const BYTES_MAX: u64 = 32 << 20;
/// Maximum length in bytes of a number.
const NUMBER_BYTES_MAX: usize = 10;

/// The first bytes of a digest, by which an index finds chunks.
pub type Prefix = [u8; 16];

/// The prefix of a digest.
pub fn prefix(digest: &Digest) -> Prefix {
    let (prefix, _) = digest.split_first_chunk().unwrap_or((&[0; 16], &[]));
    *prefix
}

/// Writes an index.
#[derive(Debug)]
pub struct Writer<W> {
    into: W,
    /// Number of bytes that may still be written.
    left: u64,
}

impl<W: Write> Writer<W> {
    /// Begins an index.
    ///
    /// # Errors
    /// Errors of the output; the same applies to the other functions.
    pub fn new(mut into: W) -> io::Result<Self> {
        into.write_all(MAGIC)?;
        Ok(Self { into, left: BYTES_MAX - MAGIC.len() as u64 })
    }

    /// Adds a file with the digests and sizes of its chunks, if there is room for it.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn file(&mut self, path: &[u8], chunks: &[(Digest, u64)]) -> io::Result<()> {
        // The first chunks of a larger file.
        let chunks = &chunks[..chunks.len().min(CHUNKS_MAX)];
        let row_bytes = size_of::<Prefix>() + NUMBER_BYTES_MAX;
        let most = path.len() + 2 * NUMBER_BYTES_MAX + chunks.len() * row_bytes;
        let Some(left) = self.left.checked_sub(most as u64) else { return Ok(()) };
        self.left = left;
        write_number(&mut self.into, path.len() as u64)?;
        self.into.write_all(path)?;
        write_number(&mut self.into, chunks.len() as u64)?;
        for (digest, size) in chunks {
            self.into.write_all(&prefix(digest))?;
            write_number(&mut self.into, *size)?;
        }
        Ok(())
    }

    /// Ends the index; returns the output.
    pub fn finish(self) -> W {
        self.into
    }
}

/// Writes the index of a layer whose table of contents is known.
///
/// # Errors
/// Errors of the output.
pub fn write(contents: &Contents, into: impl Write) -> io::Result<()> {
    let mut writer = Writer::new(into)?;
    for file in contents.files() {
        let chunks: Vec<_> = file.chunks.iter().map(|chunk| (chunk.digest, chunk.size)).collect();
        writer.file(file.path, &chunks)?;
    }
    writer.finish().flush()
}

/// A chunk of a file of an unpacked layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    /// Path of the file in the layer.
    pub path: &'a [u8],
    /// Offset of the chunk in the file, in bytes.
    pub offset: u64,
    /// Length of the chunk in bytes.
    pub size: u64,
    /// The first bytes of its digest.
    pub prefix: Prefix,
}

/// Reads an index; `hear` receives each chunk.
///
/// # Errors
/// Errors of the input; [`io::ErrorKind::InvalidData`] if it is not an index. What was read before is valid.
pub fn read(from: impl BufRead, hear: &mut dyn FnMut(Found<'_>)) -> io::Result<()> {
    // One byte more, so that a longer file is not taken for one that ends there.
    let mut from = from.take(BYTES_MAX + 1);
    let mut magic = [0; MAGIC.len()];
    from.read_exact(&mut magic)?;
    if outline::MAGICS.contains(&&magic) {
        return outline::hear(from, hear);
    }
    if magic != *MAGIC {
        return Err(invalid("not an index of this version"));
    }
    let mut path = Vec::new();
    while !from.fill_buf()?.is_empty() {
        path.resize(read_number(&mut from, PATHS_BYTES_MAX as u64)? as usize, 0);
        from.read_exact(&mut path)?;
        let (count, mut offset) = (read_number(&mut from, CHUNKS_MAX as u64)?, 0_u64);
        for _ in 0..count {
            let mut prefix = Prefix::default();
            from.read_exact(&mut prefix)?;
            let size = read_number(&mut from, u64::MAX)?;
            let end = offset.checked_add(size).ok_or_else(|| invalid("a file that is too long"))?;
            hear(Found { path: &path, offset, size, prefix });
            offset = end;
        }
    }
    if from.limit() == 0 { Err(invalid("an index that is too long")) } else { Ok(()) }
}

pub(crate) fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

pub(crate) fn write_number(into: &mut impl Write, mut number: u64) -> io::Result<()> {
    while number >= 0x80 {
        into.write_all(&[number as u8 | 0x80])?;
        number >>= 7;
    }
    into.write_all(&[number as u8])
}

pub(crate) fn read_number(from: &mut impl BufRead, most: u64) -> io::Result<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        from.read_exact(&mut byte)?;
        let bits = u64::from(byte[0] & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        number |= bits << shift;
        if byte[0] & 0x80 == 0 {
            return if number <= most { Ok(number) } else { Err(invalid("a number out of range")) };
        }
    }
    Err(invalid("a number that is too long"))
}
