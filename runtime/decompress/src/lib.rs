//! Decompression of layers and archives, by their first bytes and not by their media types or names.
//!
//! | first bytes | format |
//! |---|---|
//! | `1f 8b` | gzip: any number of members (RFC 1952); what follows the last one and is no member is ignored, as by gzip(1) |
//! | `28 b5 2f fd`, or `5? 2a 4d 18` of a skippable frame | zstd: any number of frames (RFC 8878) |
//! | others | none |
#![forbid(unsafe_code)]

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::GzDecoder;

/// Maximum zstd window as a power of two: 512 MiB, the maximum of the decoder in containerd 2.4 (tests/compare tries both). A frame
/// with a larger window is refused. The decoder needs as much memory as the window, if the content is that long.
pub const ZSTD_WINDOW_LOG_MAX: u32 = 29;

/// Number of bytes at the start of a file that identify its compression.
pub const MAGIC_BYTES: usize = 4;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The compression of a layer or archive, detected by its first bytes, because media types are wrong more
/// often than magic numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl Compression {
    /// The compression of data that begins with `magic`, of at least [`MAGIC_BYTES`] bytes if there are so many.
    pub fn of(magic: &[u8]) -> Self {
        match magic {
            magic if magic.starts_with(&GZIP_MAGIC) => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// Creates the decompressor for the compression that the first bytes identify.
///
/// # Errors
/// Errors of the input, whose first bytes are read, and of the decompressor.
pub fn decompress<'a>(from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut from = Ahead { ahead: Vec::new(), inner: BufReader::with_capacity(64 << 10, from) };
    match Compression::of(from.peek(MAGIC_BYTES)?) {
        Compression::Gzip => Ok(Box::new(Gzip(Some(GzDecoder::new(from))))),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(from)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Ok(Box::new(decoder))
        }
        Compression::None => Ok(Box::new(from)),
    }
}

/// A reader whose next bytes can be examined, also if the input returns them one by one.
struct Ahead<R> {
    /// Bytes that were examined and not read.
    ahead: Vec<u8>,
    inner: BufReader<R>,
}

impl<R: Read> Ahead<R> {
    /// The next `count` bytes, or fewer at the end of the input.
    fn peek(&mut self, count: usize) -> io::Result<&[u8]> {
        let missing = count.saturating_sub(self.ahead.len());
        self.inner.by_ref().take(missing as u64).read_to_end(&mut self.ahead)?;
        Ok(&self.ahead)
    }
}

impl<R: Read> Read for Ahead<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.ahead.is_empty() {
            true => self.inner.read(buffer),
            false => {
                let count = self.ahead.as_slice().read(buffer)?;
                self.consume(count);
                Ok(count)
            }
        }
    }
}

impl<R: Read> BufRead for Ahead<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match self.ahead.is_empty() {
            true => self.inner.fill_buf(),
            false => Ok(&self.ahead),
        }
    }

    fn consume(&mut self, count: usize) {
        match self.ahead.is_empty() {
            true => self.inner.consume(count),
            false => drop(self.ahead.drain(..count)),
        }
    }
}

/// The members of a gzip file; `None` after the last one.
struct Gzip<R>(Option<GzDecoder<Ahead<R>>>);

impl<R: Read> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            match member.read(buffer)? {
                0 if !buffer.is_empty() => {}
                count => return Ok(count),
            }
            let Some(mut from) = self.0.take().map(GzDecoder::into_inner) else { break };
            if from.peek(GZIP_MAGIC.len())? == GZIP_MAGIC {
                self.0 = Some(GzDecoder::new(from));
            } else {
                // The process that writes a pipe must not find it closed.
                io::copy(&mut from, &mut io::sink())?;
            }
        }
        Ok(0)
    }
}
