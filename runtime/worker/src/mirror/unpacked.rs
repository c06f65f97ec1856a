//! Unpacked layers, as the process that serves neighbours sees them: the outline of a layer ([`coracle_chunked::outline`]), and any range
//! of its archive, made from the outline and the files of its tree. Nothing is verified here: the neighbour compares each chunk with its
//! digest.
//!
//! The author of an image chooses what is in a tree: FIFOs, devices, links, files that are longer than the archive says. A path is
//! opened name by name without links, instead of by openat2(2), because the filter of system calls can tell then that nothing is opened
//! for writing; only a regular file is opened. The process has no capabilities: content that it may not read is in the outline.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use coracle_chunked::outline::{BYTES_MAX, Content, END_BYTES, MAGIC, Part, Reader, archive_bytes};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};

use crate::store::open_plain;

/// Buffer size in bytes for the outline.
const BUFFER_BYTES: usize = 16 << 10;

/// The root directory of the store.
pub(super) struct Layers {
    root: PathBuf,
}

/// A layer that has an outline.
pub(super) struct Unpacked {
    pub(super) outline: File,
    /// Length of the outline in bytes.
    pub(super) outline_bytes: u64,
    /// Length of the archive in bytes.
    pub(super) archive_bytes: u64,
    tree: PathBuf,
}

impl Layers {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
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
        let tree = self.root.join("layers").join(name);
        tree.is_dir().then_some(Unpacked { outline, outline_bytes, archive_bytes, tree })
    }
}

impl Unpacked {
    /// Sends the bytes of the archive from `begin` to `end`; `buffer` is for the content of files.
    ///
    /// # Errors
    /// Those of `send`; the outline is damaged, or the tree is not the one of the archive any more.
    pub(super) fn send(
        &self,
        begin: u64,
        end: u64,
        buffer: &mut [u8],
        send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = openat(CWD, &self.tree, flags, Mode::empty())?;
        let damaged = |problem| io::Error::new(ErrorKind::InvalidData, problem);
        let from = BufReader::with_capacity(BUFFER_BYTES, At { file: &self.outline, position: 0 });
        let mut outline = Reader::new(from).map_err(damaged)?;
        loop {
            let position = outline.position();
            if position >= end {
                return Ok(());
            }
            let part = outline.part().map_err(damaged)?.ok_or(ErrorKind::UnexpectedEof)?;
            // The wanted bytes of the part, as offsets in it.
            let within = |length: u64| {
                let (first, last) = (begin.saturating_sub(position), (end - position).min(length));
                (first < last).then_some((first, last))
            };
            match part {
                Part::Bytes(bytes) => {
                    if let Some((first, last)) = within(bytes.len() as u64) {
                        send(&bytes[first as usize..last as usize])?;
                    }
                }
                Part::Content(content) => {
                    if let Some((first, last)) = within(content.size) {
                        send_content(&root, &content, (first, last), buffer, send)?;
                    }
                }
            }
        }
    }
}

/// Sends the bytes of a file's content between two offsets in it.
fn send_content(
    root: &OwnedFd,
    content: &Content<'_>,
    (first, last): (u64, u64),
    buffer: &mut [u8],
    send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let file = open(root, content.path)?;
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
        send(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// Opens a regular file of a tree, without a link in its path.
fn open(root: &OwnedFd, path: &[u8]) -> io::Result<File> {
    let (mut names, mut directory) = (path.split(|byte| *byte == b'/').peekable(), None::<OwnedFd>);
    while let Some(name) = names.next() {
        let at = directory.as_ref().unwrap_or(root);
        if matches!(name, b"" | b"." | b"..") {
            return Err(ErrorKind::InvalidInput.into());
        }
        let name = OsStr::from_bytes(name);
        if names.peek().is_some() {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            directory = Some(openat(at, name, flags, Mode::empty())?);
            continue;
        }
        // To open a FIFO or a device has effects. A layer does not change, and the mount has no devices.
        let kind = FileType::from_raw_mode(statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match kind {
            FileType::RegularFile => File::from(openat(at, name, flags, Mode::empty())?),
            _ => return Err(ErrorKind::InvalidInput.into()),
        };
        return match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(ErrorKind::InvalidInput.into()),
        };
    }
    Err(ErrorKind::InvalidInput.into())
}

/// Reads a file without its position, which other connections could share.
struct At<'a> {
    file: &'a File,
    position: u64,
}

impl io::Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
