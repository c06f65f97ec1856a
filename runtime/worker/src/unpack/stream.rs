//! The bytes of a layer on their way: decompressed by what they begin with, and counted while an entry is described.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

/// Largest zstd window: 128 MiB, what `zstd -d` takes without being asked. A frame that wants more is refused.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Text of the error when a layer is longer than allowed; the caller looks for it.
pub(crate) const TOO_LONG: &str = "unpacks to more bytes than the limit";

/// A decompressor chosen by the first bytes: media types lie more often than magic numbers.
pub(crate) fn decompress<'a>(from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut from = BufReader::with_capacity(64 << 10, from);
    let magic = from.fill_buf()?;
    if magic.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(MultiGzDecoder::new(from)));
    }
    if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(from)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(from))
}

/// Most bytes that describe one entry: its header, long names, PAX records with extended attributes, the map of a sparse
/// file. The tar reader holds them whole.
const DESCRIPTION_BYTES_MAX: u64 = 2 << 20;

/// What may still pass before the next entry; without a limit while an entry is read.
#[derive(Default)]
pub(crate) struct Budget(Cell<Option<u64>>);

impl Budget {
    /// Runs what looks for the next entry.
    pub(crate) fn next<T>(&self, next: impl FnOnce() -> T) -> T {
        self.0.set(Some(DESCRIPTION_BYTES_MAX));
        let found = next();
        self.0.set(None);
        found
    }
}

/// Keeps to a [`Budget`].
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
            let left = left.checked_sub(count as u64);
            self.budget.0.set(Some(left.ok_or_else(|| io::Error::other("an entry is described too long"))?));
        }
        Ok(count)
    }
}
