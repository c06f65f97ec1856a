//! Writes the outline of a layer ([`coracle_chunked::outline`]) while its archive is unpacked: the parser's input, which notes what
//! passes. The process which serves neighbours is root without capabilities and follows no link. Content that it could not read in the
//! tree is in the outline itself, and paths are those without links ([`Visible`]). If a later entry changes what is visible, there is no
//! outline. One of headers ([`Purpose::Headers`]) has no content.

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Read};

use coracle_chunked::outline::{Purpose, Writer};
use coracle_tar::Entry;
use rustix::fs::Stat;

/// The input of the parser of an archive.
pub(super) struct Noted<R> {
    inner: R,
    outline: Option<Writer<BufWriter<File>>>,
}

impl<R> Noted<R> {
    /// Notes what passes in an outline of at most `bytes_max` bytes; `outline` is `None`: nowhere.
    pub(super) fn new(inner: R, outline: Option<(File, Purpose)>, bytes_max: u64) -> Self {
        let writer = |(file, purpose)| Writer::with_purpose(BufWriter::new(file), bytes_max, purpose);
        Self { inner, outline: outline.map(writer) }
    }

    /// The purpose of the outline.
    pub(super) fn purpose(&self) -> Option<Purpose> {
        self.outline.as_ref().map(Writer::purpose)
    }

    /// The next `size` bytes are content of the file at `path`, which has no link, from this offset on.
    pub(super) fn begin(&mut self, path: &[u8], offset: u64, size: u64) {
        if let Some(outline) = &mut self.outline {
            outline.begin(path, offset, size);
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

/// Owner and mode, by which root without capabilities may read a file or enter a directory, if it has no access control list.
#[derive(Clone, Copy)]
pub(super) struct Visible {
    uid: u32,
    gid: u32,
    mode: u32,
}

impl Visible {
    pub(super) fn of(entry: &Entry) -> Self {
        let Entry { uid, gid, mode, .. } = *entry;
        // Such an owner is not set, so that it is that of an earlier entry.
        let is_known = uid != u32::MAX && gid != u32::MAX;
        Self { uid, gid, mode: if is_known { mode } else { 0 } }
    }

    pub(super) fn of_status(about: &Stat) -> Self {
        Self { uid: about.st_uid, gid: about.st_gid, mode: about.st_mode }
    }

    /// Whether the file may be read.
    pub(super) fn is_readable(self) -> bool {
        self.permits(0o4)
    }

    /// Whether names in the directory may be opened.
    pub(super) fn is_entered(self) -> bool {
        self.permits(0o1)
    }

    fn permits(self, bit: u32) -> bool {
        let class = match (self.uid, self.gid) {
            (0, _) => 6,
            (_, 0) => 3,
            _ => 0,
        };
        self.mode & (bit << class) != 0
    }
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
