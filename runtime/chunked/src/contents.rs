//! The files of a layer and their chunks, in few allocations: a layer may have a hundred thousand of them.

use std::ops::Range;

use crate::Problem;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// Maximum number of chunks of one layer. A layer of 300 MB has some 15 000.
pub(crate) const CHUNKS_MAX: usize = 1 << 16;
/// Maximum length in bytes of the paths of one layer together.
pub(crate) const PATHS_BYTES_MAX: usize = 4 << 20;

/// Maximum number of bytes of memory of the contents of one layer with the data beside it: a pull needs 6 MiB more for the places of
/// the chunks, and the worker is to need 16 MiB. A layer of 40 000 files whose paths have 80 bytes needs 6 MiB.
pub const MEMORY_BYTES_MAX: usize = 9 << 20;

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

/// How files are divided into chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Division {
    /// A chunk ends where the content says so ([`Chunker`](crate::Chunker)).
    #[default]
    ByContent,
    /// All chunks of a file but the last have the same length.
    ByLength,
}

/// The files of a layer that are not empty, in the order of the archive.
#[derive(Debug, Default)]
pub struct Contents {
    division: Division,
    paths: Vec<u8>,
    chunks: Vec<Chunk>,
    files: Vec<Row>,
}

/// The ends of a file's path and chunks in the lists; they begin where those of the file before end.
#[derive(Debug)]
struct Row {
    path_end: u32,
    chunks_end: u32,
    size: u64,
}

impl Contents {
    /// No files, of which those that are added are divided in this way.
    pub(crate) fn divided(division: Division) -> Self {
        Self { division, ..Self::default() }
    }

    /// How the files are divided.
    pub fn division(&self) -> Division {
        self.division
    }

    /// Adds a file, whose chunks are added by [`Contents::push`].
    ///
    /// # Errors
    /// The paths are too long.
    pub(crate) fn begin(&mut self, path: &[u8], size: u64) -> Result<(), Problem> {
        self.paths.extend_from_slice(path);
        if self.paths.len() > PATHS_BYTES_MAX {
            return Err(Problem::new(format!("paths of more than {PATHS_BYTES_MAX} bytes")));
        }
        self.files.push(Row {
            path_end: self.paths.len() as u32,
            chunks_end: self.chunks.len() as u32,
            size,
        });
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
        row.chunks_end = self.chunks.len() as u32;
        Ok(())
    }

    /// Length in bytes of the last file; 0 if there is none.
    pub(crate) fn last_size(&self) -> u64 {
        self.files.last().map_or(0, |row| row.size)
    }

    /// All chunks of all files, in order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The files, in order.
    pub fn files(&self) -> impl Iterator<Item = File<'_>> {
        let mut before = (0, 0);
        self.files.iter().map(move |row| {
            let ends = (row.path_end as usize, row.chunks_end as usize);
            let (path, chunks): (Range<usize>, _) = (before.0..ends.0, before.1..ends.1);
            before = ends;
            let first = chunks.start;
            File { path: &self.paths[path], size: row.size, first, chunks: &self.chunks[chunks] }
        })
    }

    /// Number of bytes of memory of the contents.
    pub(crate) fn memory(&self) -> usize {
        self.paths.len() + size_of_val(&self.chunks[..]) + size_of_val(&self.files[..])
    }

    /// Compares the memory of the contents, and of `others` bytes beside them, with the limit of a pull.
    ///
    /// # Errors
    /// They are too many bytes.
    pub fn check_memory(&self, others: usize) -> Result<(), Problem> {
        let bytes = self.memory() + others;
        match bytes > MEMORY_BYTES_MAX {
            true => {
                Err(Problem::new(format!("{bytes} bytes of memory, at most {MEMORY_BYTES_MAX} are used")))
            }
            false => Ok(()),
        }
    }

    /// Number of bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |bytes, row| bytes.saturating_add(row.size))
    }
}
