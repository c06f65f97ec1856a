//! Unpacked layers, as the process that serves neighbours sees them: the outline of a layer ([`coracle_chunked::outline`]), and any range
//! of its archive, made from the outline and the files of its tree. Nothing is verified here: the neighbour compares each chunk with its
//! digest.
//!
//! The author of an image chooses what is in a tree: FIFOs, devices, links, files that are longer than the archive says
//! ([`open_in_layer`]). The process has no capabilities: content that it may not read is in the outline.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_chunked::outline::{BYTES_MAX, Content, END_BYTES, MAGIC, Part, Reader, archive_bytes};
use rustix::fs::{CWD, fstat};

use crate::store::{open_directory, open_in_layer, open_plain};

/// Buffer size in bytes for the outline.
const BUFFER_BYTES: usize = 16 << 10;
/// Maximum number of archives whose outlines stay open after a range: those of ten nodes with three layers each.
const BEGUN_MAX: usize = 32;

/// The layers of the store.
pub(super) struct Layers {
    root: PathBuf,
    /// Archives of which a range was sent. A client requests ranges in their order, each on a connection of its own, and so its outline is
    /// read once for all of them.
    begun: Mutex<VecDeque<Archive>>,
}

/// A layer that has an outline.
pub(super) struct Unpacked {
    name: String,
    pub(super) outline: File,
    /// Length of the outline in bytes.
    pub(super) outline_bytes: u64,
    /// Length of the archive in bytes.
    pub(super) archive_bytes: u64,
    tree: OwnedFd,
    /// Device and inode of the tree's directory: a layer that is pulled again has another one.
    identity: (u64, u64),
}

impl Layers {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), begun: Mutex::default() }
    }

    /// Looks for a layer by its name, the digits of its chain ID.
    pub(super) fn find(&self, name: &str) -> Option<Unpacked> {
        let outline = open_plain(&self.root.join("images/contents").join(name)).ok()?;
        let outline_bytes = outline.metadata().ok()?.len();
        if outline_bytes > BYTES_MAX {
            return None;
        }
        let (mut first, mut last) = ([0; MAGIC.len()], [0; END_BYTES]);
        outline.read_exact_at(&mut first, 0).ok()?;
        outline.read_exact_at(&mut last, outline_bytes.checked_sub(END_BYTES as u64)?).ok()?;
        let archive_bytes = archive_bytes(&first, &last)?;
        let tree = open_directory(CWD, self.root.join("layers").join(name)).ok()?;
        let about = fstat(&tree).ok()?;
        let (name, identity) = (name.to_owned(), (about.st_dev, about.st_ino));
        Some(Unpacked { name, outline, outline_bytes, archive_bytes, tree, identity })
    }

    /// The archive of a layer for a range that begins at `begin`, and the number of bytes of its outline that are read for it.
    ///
    /// # Errors
    /// The layer was removed, or its outline is damaged.
    pub(super) fn archive(&self, layer: Unpacked, begin: u64) -> io::Result<(Archive, u64)> {
        let mut begun = self.lock();
        begun.retain(|archive| archive.name != layer.name || archive.identity == layer.identity);
        let fitting = begun.iter().enumerate();
        let fitting =
            fitting.filter(|(_, archive)| archive.name == layer.name && archive.position() <= begin);
        // The nearest one: that of the client which has sent the request before.
        let nearest = fitting.max_by_key(|(_, archive)| archive.position()).map(|(index, _)| index);
        match nearest.and_then(|index| begun.remove(index)) {
            Some(archive) => Ok((archive, 0)),
            None => {
                let outline_bytes = layer.outline_bytes;
                Ok((Archive::new(layer)?, outline_bytes))
            }
        }
    }

    /// Keeps an archive for the next range.
    pub(super) fn keep(&self, archive: Archive) {
        let mut begun = self.lock();
        if begun.len() >= BEGUN_MAX {
            begun.pop_front();
        }
        begun.push_back(archive);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Archive>> {
        // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The archive of a layer, of which ranges are sent in their order.
pub(super) struct Archive {
    name: String,
    root: OwnedFd,
    identity: (u64, u64),
    outline: Reader<BufReader<At>>,
}

impl Archive {
    fn new(layer: Unpacked) -> io::Result<Self> {
        let from = BufReader::with_capacity(BUFFER_BYTES, At { file: layer.outline, position: 0 });
        let outline = Reader::new(from).map_err(damaged)?;
        Ok(Self { name: layer.name, root: layer.tree, identity: layer.identity, outline })
    }

    /// The first byte of the archive that can still be sent.
    fn position(&self) -> u64 {
        self.outline.last().map_or(self.outline.position(), |(position, _)| position)
    }

    /// Sends the bytes of the archive from `begin`, which [`Layers::archive`] was given, to `end`; `buffer` is for the content of
    /// files.
    ///
    /// # Errors
    /// Those of the output; the outline is damaged, or the tree is not the one of the archive any more.
    pub(super) fn send(
        &mut self,
        begin: u64,
        end: u64,
        buffer: &mut [u8],
        into: &mut impl Write,
    ) -> io::Result<()> {
        loop {
            if let Some((position, part)) = self.outline.last() {
                // The wanted bytes of the part, as offsets in it.
                let within = |length: u64| {
                    let (first, last) =
                        (begin.saturating_sub(position), end.saturating_sub(position).min(length));
                    (first < last).then_some((first, last))
                };
                match part {
                    Part::Bytes(bytes) => {
                        if let Some((first, last)) = within(bytes.len() as u64) {
                            into.write_all(&bytes[first as usize..last as usize])?;
                        }
                    }
                    Part::Content(content) => {
                        if let Some(range) = within(content.size) {
                            send_content(&self.root, &content, range, buffer, into)?;
                        }
                    }
                }
            }
            if self.outline.position() >= end {
                return Ok(());
            }
            self.outline.part().map_err(damaged)?.ok_or(ErrorKind::UnexpectedEof)?;
        }
    }
}

fn damaged(problem: coracle_chunked::Problem) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, problem)
}

/// Sends the bytes of a file's content between two offsets in it.
fn send_content(
    root: &OwnedFd,
    content: &Content<'_>,
    (first, last): (u64, u64),
    buffer: &mut [u8],
    into: &mut impl Write,
) -> io::Result<()> {
    let file = open_in_layer(root, content.path)?;
    let mut at = first;
    while at < last {
        let most = buffer.len().min(usize::try_from(last - at).unwrap_or(usize::MAX));
        // A layer that is being removed: its space on the disk is free only when the file is closed.
        if file.metadata()?.nlink() == 0 {
            return Err(ErrorKind::NotFound.into());
        }
        let count = file.read_at(&mut buffer[..most], content.offset.saturating_add(at))?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        into.write_all(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// Reads a file without its position, which other connections could share.
struct At {
    file: File,
    position: u64,
}

impl io::Read for At {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
