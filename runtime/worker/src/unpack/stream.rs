//! Readers for a layer's archive: decompression by magic number, and a limit on the metadata of an entry.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

/// Maximum zstd window as a power of two: 128 MiB, the default limit of `zstd -d`. A frame with a larger
/// window is refused.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Text of the error for a layer above the maximum size, by which the caller recognises the error.
pub(crate) const TOO_LONG: &str = "unpacks to more bytes than the limit";

/// Number of bytes at the start of a file that identify its compression.
pub(crate) const MAGIC_BYTES: u64 = 4;

/// The compression of a layer or archive, detected by its first bytes, because media types are wrong more
/// often than magic numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Not compressed.
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// The compression of data that begins with `magic`.
    pub(crate) fn of(magic: &[u8]) -> Self {
        if magic.starts_with(&[0x1f, 0x8b]) {
            Self::Gzip
        } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Self::Zstd
        } else {
            Self::None
        }
    }
}

/// Creates the decompressor for the compression that the first bytes identify.
pub(crate) fn decompress<'a>(from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut from = BufReader::with_capacity(64 << 10, from);
    match Compression::of(from.fill_buf()?) {
        Compression::Gzip => Ok(Box::new(MultiGzDecoder::new(from))),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(from)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Ok(Box::new(decoder))
        }
        Compression::None => Ok(Box::new(from)),
    }
}

/// Maximum number of metadata bytes of one entry: its header, long names, PAX records with extended
/// attributes, the map of a sparse file. The tar parser buffers them completely.
const DESCRIPTION_BYTES_MAX: u64 = 2 << 20;

/// The remaining number of metadata bytes; unlimited while an entry's content is read.
#[derive(Default)]
pub(crate) struct Budget(Cell<Option<u64>>);

impl Budget {
    /// Calls `next`, the search for the next entry, with the limit enabled.
    pub(crate) fn next<T>(&self, next: impl FnOnce() -> T) -> T {
        self.0.set(Some(DESCRIPTION_BYTES_MAX));
        let found = next();
        self.0.set(None);
        found
    }
}

/// A reader that enforces a [`Budget`].
pub(crate) struct Metered<'a, R> {
    inner: R,
    budget: &'a Budget,
}

impl<'a, R> Metered<'a, R> {
    pub(crate) fn new(inner: R, budget: &'a Budget) -> Self {
        Self { inner, budget }
    }

    pub(crate) fn into_inner(self) -> R {
        self.inner
    }
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let Some(left) = self.budget.0.get() {
            let too_long =
                || io::Error::new(io::ErrorKind::FileTooLarge, "the metadata of an entry is too long");
            let left = left.checked_sub(count as u64).ok_or_else(too_long)?;
            self.budget.0.set(Some(left));
        }
        Ok(count)
    }
}
