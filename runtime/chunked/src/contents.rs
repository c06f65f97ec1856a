//! The files of a layer and their chunks, in few allocations: a layer may have a hundred thousand of them.

use std::ops::Range;

use crate::Problem;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// Maximum number of chunks of one layer: with 64 bytes for each, 8 MiB of memory. A layer of 300 MB has some 15 000.
pub(crate) const CHUNKS_MAX: usize = 1 << 17;
/// Maximum length in bytes of the paths of one layer together.
pub(crate) const PATHS_BYTES_MAX: usize = 4 << 20;

/// A part of a file, which is compressed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The bytes of the blob that contain the chunk, compressed.
    pub begin: u64,
    /// Offset of the first byte of the blob after the chunk.
    pub end: u64,
    /// Length in bytes of the uncompressed chunk, at least 1.
    pub size: u64,
    /// SHA-256 digest of the uncompressed chunk; of a chunk of zeros, all zeros.
    pub digest: Digest,
}

impl Chunk {
    /// Whether the chunk consists of zeros, so that it is not downloaded.
    pub fn is_zeros(&self) -> bool {
        self.digest == [0; 32]
    }
}

/// A file that is not empty.
#[derive(Clone, Copy, Debug)]
pub struct File<'a> {
    /// Path in the layer as the table has it.
    pub path: &'a [u8],
    /// Length in bytes.
    pub size: u64,
    /// Index of the first chunk in [`Contents::chunks`].
    pub first: usize,
    /// All chunks, in order and without gaps; their sizes add up to the file's.
    pub chunks: &'a [Chunk],
}

/// The files of a layer that are not empty, in the order of the archive.
#[derive(Debug, Default)]
pub struct Contents {
    paths: Vec<u8>,
    chunks: Vec<Chunk>,
    files: Vec<Row>,
}

/// The ends of a file's path and chunks in the lists; they begin where those of the file before end.
#[derive(Debug)]
struct Row {
    path_end: usize,
    chunks_end: usize,
    size: u64,
}

impl Contents {
    /// Adds a file, whose chunks are added by [`Contents::push`].
    ///
    /// # Errors
    /// The paths are too long.
    pub(crate) fn begin(&mut self, path: &[u8], size: u64) -> Result<(), Problem> {
        self.paths.extend_from_slice(path);
        if self.paths.len() > PATHS_BYTES_MAX {
            return Err(Problem::new(format!("paths of more than {PATHS_BYTES_MAX} bytes")));
        }
        self.files.push(Row { path_end: self.paths.len(), chunks_end: self.chunks.len(), size });
        Ok(())
    }

    /// Adds a chunk of the last file.
    ///
    /// # Errors
    /// There is no file, or there are too many chunks.
    pub(crate) fn push(&mut self, chunk: Chunk) -> Result<(), Problem> {
        let row = self.files.last_mut().ok_or_else(|| Problem::new("a chunk without its file"))?;
        if self.chunks.len() == CHUNKS_MAX {
            return Err(Problem::new(format!("more than {CHUNKS_MAX} chunks")));
        }
        self.chunks.push(chunk);
        row.chunks_end = self.chunks.len();
        Ok(())
    }

    /// All chunks of all files, in order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The files, in order.
    pub fn files(&self) -> impl Iterator<Item = File<'_>> {
        let mut before = (0, 0);
        self.files.iter().map(move |row| {
            let (path, chunks): (Range<usize>, _) = (before.0..row.path_end, before.1..row.chunks_end);
            before = (row.path_end, row.chunks_end);
            let first = chunks.start;
            File { path: &self.paths[path], size: row.size, first, chunks: &self.chunks[chunks] }
        })
    }

    /// Number of bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |bytes, row| bytes.saturating_add(row.size))
    }
}
