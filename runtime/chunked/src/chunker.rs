//! Divides the content of a file into chunks as containers/storage does, so that equal parts of different releases of a file have
//! equal digests: at places that depend on the 64 bytes before them, on average every 64 KiB, and around runs of zeros. In long files
//! there is such a place every 32 KiB: all those of containers/storage, and as many others.

use sha2::Sha256;

use crate::{Contents, Digest};

/// Number of bytes that the rolling checksum covers.
const WINDOW_BYTES: usize = 64;
const CHAR_OFFSET: u32 = 31;
/// Average length in bytes of the chunks of containers/storage.
const CHUNK_BYTES: u32 = 1 << 16;
/// Average length in bytes of short chunks, of which less is downloaded where little of a long file changed.
const SHORT_CHUNK_BYTES: u32 = 1 << 15;
/// Length in bytes of a file from which on its chunks are short: of shorter files, the longer table would cost more than is saved.
const LONG_FILE_BYTES: u64 = 256 << 10;
/// Number of chunks of an archive after which no others are short, because a table has room for a limited number.
const SHORT_CHUNKS_MAX: usize = 1 << 14;
/// Number of chunks from which on their average says how they were made.
const AVERAGE_CHUNKS_MIN: u64 = 128;
/// A run of zeros of at least this length in bytes is a chunk of its own.
const ZEROS_MIN: u64 = 1 << 10;

/// Computes the chunks of one file, to which its content is passed in order.
pub struct Chunker {
    sum: RollingSum,
    /// A chunk ends where these bits of the checksum are set.
    split_mask: u32,
    /// Length in bytes of all chunks but the last, if the content does not decide.
    length: Option<u64>,
    hash: Sha256,
    /// Number of bytes of the current chunk that were hashed.
    size: u64,
    /// Number of zeros after the bytes of the current chunk.
    zeros: u64,
    chunks: Vec<(Digest, u64)>,
}

impl Default for Chunker {
    fn default() -> Self {
        Self::with_average(CHUNK_BYTES)
    }
}

impl Chunker {
    /// The chunker of a file of `size` bytes, before which the archive has `chunks` chunks.
    pub fn of_file(size: u64, chunks: usize) -> Self {
        match size >= LONG_FILE_BYTES && chunks < SHORT_CHUNKS_MAX {
            true => Self::short(),
            false => Self::default(),
        }
    }

    /// Makes a chunker of short chunks: of 32 KiB on average.
    pub fn short() -> Self {
        Self::with_average(SHORT_CHUNK_BYTES)
    }

    /// Makes a chunker of chunks of `bytes` bytes, at least 1.
    pub fn of_length(bytes: u64) -> Self {
        Self { length: Some(bytes.max(1)), ..Self::default() }
    }

    /// The average is a power of two.
    fn with_average(bytes: u32) -> Self {
        use sha2::Digest as _;
        let (sum, hash, chunks) = (RollingSum::default(), Sha256::new(), Vec::new());
        Self { sum, split_mask: bytes - 1, length: None, hash, size: 0, zeros: 0, chunks }
    }

    /// Passes the next bytes of the file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        if let Some(length) = self.length {
            while !bytes.is_empty() {
                let room = usize::try_from(length - self.size).unwrap_or(usize::MAX);
                let (chunk, rest) = bytes.split_at(room.min(bytes.len()));
                self.hash_data(chunk);
                if self.size == length {
                    self.end_chunk();
                }
                bytes = rest;
            }
            return;
        }
        // Bytes from here on are neither hashed nor counted as zeros.
        let mut begin = 0;
        for (at, byte) in bytes.iter().enumerate() {
            if *byte == 0 {
                self.hash_data(&bytes[begin..at]);
                begin = at + 1;
                self.zeros += 1;
                continue;
            }
            if self.zeros > 0 {
                self.end_zeros();
            }
            if self.ends_after(*byte) {
                self.hash_data(&bytes[begin..=at]);
                begin = at + 1;
                self.end_chunk();
            }
        }
        self.hash_data(&bytes[begin..]);
    }

    /// Takes the digests and sizes of the complete chunks: a file may have only chunks of a byte.
    pub fn take_all(&mut self) -> Vec<(Digest, u64)> {
        std::mem::take(&mut self.chunks)
    }

    /// Takes the digests and sizes of the first `count` chunks, if so many are complete.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<(Digest, u64)>> {
        (self.chunks.len() >= count).then(|| self.chunks.drain(..count).collect())
    }

    /// Ends the file; returns the digest and the size in bytes of each chunk. A chunk of zeros has the digest of all zeros.
    pub fn finish(mut self) -> Vec<(Digest, u64)> {
        self.end_zeros();
        self.end_chunk();
        self.chunks
    }

    /// Adds a byte to the checksum; returns whether a chunk ends after it.
    fn ends_after(&mut self, byte: u8) -> bool {
        self.sum.roll(byte) & self.split_mask == self.split_mask
    }

    fn hash_data(&mut self, bytes: &[u8]) {
        use sha2::Digest as _;
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
    }

    /// Ends a run of zeros: a long run becomes a chunk, a short one a part of the current chunk.
    fn end_zeros(&mut self) {
        let zeros = std::mem::take(&mut self.zeros);
        if zeros >= ZEROS_MIN {
            self.end_chunk();
            // The checksum is not changed by more zeros than the window has.
            for _ in 0..WINDOW_BYTES {
                self.sum.roll(0);
            }
            self.chunks.push(([0; 32], zeros));
            return;
        }
        const ZEROS: [u8; ZEROS_MIN as usize] = [0; ZEROS_MIN as usize];
        let mut begin = 0;
        for end in 1..=zeros as usize {
            if self.ends_after(0) {
                self.hash_data(&ZEROS[begin..end]);
                self.end_chunk();
                begin = end;
            }
        }
        self.hash_data(&ZEROS[begin..zeros as usize]);
    }

    fn end_chunk(&mut self) {
        use sha2::Digest as _;
        if self.size > 0 {
            let hash = std::mem::take(&mut self.hash);
            self.chunks.push((hash.finalize().into(), self.size));
            self.size = 0;
        }
    }
}

/// The average length of the chunks of a layer's long files, by which two layers are compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Average {
    chunks: u64,
    bytes: u64,
}

impl Average {
    /// The average of all chunks of a layer.
    pub fn of(contents: &Contents) -> Self {
        let mut average = Self::default();
        for file in contents.files() {
            average.add_file(file.chunks.iter().map(|chunk| (chunk.size, chunk.is_zeros())));
        }
        average
    }

    /// Adds the chunks of a file: for each its size, and whether it consists of zeros.
    pub fn add_file(&mut self, chunks: impl IntoIterator<Item = (u64, bool)>) {
        let mut offset = 0_u64;
        for (size, is_zeros) in chunks {
            self.add(offset, size, is_zeros);
            offset = offset.saturating_add(size);
        }
    }

    /// Adds a chunk at an offset of its file. Those after the length of a short file count, which are of a long one; zeros do not.
    pub fn add(&mut self, offset: u64, size: u64, is_zeros: bool) {
        if offset >= LONG_FILE_BYTES && !is_zeros {
            self.chunks += 1;
            self.bytes = self.bytes.saturating_add(size);
        }
    }

    /// Whether a file of `size` bytes is certainly divided alike in both layers, so that no other division finds more of it.
    pub fn divides_alike(self, other: Self, size: u64) -> bool {
        let is_short =
            |average: Self| average.bytes / average.chunks < u64::from(CHUNK_BYTES + SHORT_CHUNK_BYTES) / 2;
        let is_known = self.chunks.min(other.chunks) >= AVERAGE_CHUNKS_MIN;
        size < LONG_FILE_BYTES || is_known && is_short(self) == is_short(other)
    }
}

/// The rolling checksum of bup and perkeep.
struct RollingSum {
    one: u32,
    two: u32,
    window: [u8; WINDOW_BYTES],
    at: usize,
}

impl Default for RollingSum {
    fn default() -> Self {
        let one = WINDOW_BYTES as u32 * CHAR_OFFSET;
        Self { one, two: one * (WINDOW_BYTES as u32 - 1), window: [0; WINDOW_BYTES], at: 0 }
    }
}

impl RollingSum {
    /// Adds a byte; returns the part of the checksum that says where chunks end.
    fn roll(&mut self, byte: u8) -> u32 {
        let dropped = u32::from(std::mem::replace(&mut self.window[self.at], byte));
        self.at = (self.at + 1) % WINDOW_BYTES;
        self.one = self.one.wrapping_add(u32::from(byte)).wrapping_sub(dropped);
        self.two =
            self.two.wrapping_add(self.one).wrapping_sub(WINDOW_BYTES as u32 * (dropped + CHAR_OFFSET));
        self.two
    }
}
