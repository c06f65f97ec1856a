//! Writes the outline of a layer ([`coracle_chunked::outline`]) while its archive is unpacked: the parser's input, which notes what
//! passes. Content that the process which serves neighbours could not read in the tree is in the outline itself: that process is root
//! without capabilities.

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Read};

use coracle_chunked::outline::Writer;
use coracle_tar::Entry;

/// The input of the parser of an archive.
pub(super) struct Noted<R> {
    inner: R,
    outline: Option<Writer<BufWriter<File>>>,
}

impl<R> Noted<R> {
    /// Notes what passes in an outline of at most `bytes_max` bytes; `outline` is `None`: nowhere.
    pub(super) fn new(inner: R, outline: Option<File>, bytes_max: u64) -> Self {
        Self { inner, outline: outline.map(|file| Writer::new(BufWriter::new(file), bytes_max)) }
    }

    /// The next bytes are content of the file at `path`, from this offset on, if a process without capabilities can read it.
    pub(super) fn begin(&mut self, entry: &Entry, path: &[u8], offset: u64) {
        if let Some(outline) = self.outline.as_mut().filter(|_| is_readable(entry)) {
            outline.begin(path, offset);
        }
    }

    /// The content of the file has passed.
    pub(super) fn end(&mut self) {
        if let Some(outline) = &mut self.outline {
            outline.end();
        }
    }

    /// Ends the outline; returns whether there is one.
    pub(super) fn finish(self) -> bool {
        self.outline.is_some_and(|outline| outline.finish().is_some())
    }
}

/// Whether root without capabilities can read the file.
fn is_readable(entry: &Entry) -> bool {
    entry.mode
        & match (entry.uid, entry.gid) {
            (0, _) => 0o400,
            (_, 0) => 0o040,
            _ => 0o004,
        }
        != 0
}

impl<R: Read> Read for Noted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let Some(outline) = &mut self.outline {
            outline.pass(&buffer[..count]);
        }
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Noted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        if let Some(outline) = &mut self.outline {
            // They are there, so nothing is read.
            let bytes = self.inner.fill_buf().unwrap_or_default();
            outline.pass(bytes.get(..count).unwrap_or_default());
        }
        self.inner.consume(count);
    }
}
