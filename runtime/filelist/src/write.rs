//! Writes the list of a layer by walking its tree.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{CString, OsStr};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use coracle_sandbox::describe_io;
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags};

use crate::entry::{Entry, Record, Writer, look, open_directory, push};
use crate::read::{FILE_BYTES_MIN, Reader};

/// Inode of a file that was written, its number among the entries of the archive, and the checksum of its content.
pub type Sum = (u64, u32, u32);

/// The checksums of a layer's files.
#[derive(Default)]
pub struct Sums(Vec<Sum>);

impl Sums {
    /// Takes checksums. Of those of an inode the last one counts: a file may have that of one that it replaced.
    pub fn new(mut sums: Vec<Sum>) -> Self {
        sums.sort_unstable();
        Self(sums)
    }

    fn get(&self, inode: u64) -> Option<u32> {
        let end = self.0.partition_point(|(other, ..)| *other <= inode);
        self.0[..end].last().filter(|(other, ..)| *other == inode).map(|(.., sum)| *sum)
    }
}

/// The error of a file of the layer, or of the list.
#[derive(Debug)]
pub struct FileError {
    /// Path in the layer; empty for the root directory.
    pub path: Vec<u8>,
    /// The error itself.
    pub error: io::Error,
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "/{}: {}", OsStr::from_bytes(&self.path).display(), describe_io(&self.error))
    }
}

/// Writes the list of the layer at `tree`, which was just unpacked. `implied` are the paths of directories without an entry in the archive,
/// which have no time. Files that `sums` lacks are read.
///
/// # Errors
/// [`FileError`]; also a path that is longer than the kernel permits.
pub fn write(
    tree: &Path,
    implied: &[Vec<u8>],
    sums: &Sums,
    reader: &mut Reader<'_>,
    into: impl Write,
) -> Result<(), FileError> {
    let mut path = Vec::new();
    let implied = implied.iter().map(Vec::as_slice).collect();
    let written = Writer::new(into).and_then(|into| {
        let mut walk = Walk { into, implied, sums, reader, links: BTreeMap::new() };
        let root = open_root(tree)?;
        walk.tree(&root, &mut path)?;
        walk.into.finish()
    });
    written.map_err(|error| FileError { path, error })
}

pub(crate) fn open_root(tree: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, tree, flags, Mode::empty())?)
}

struct Walk<'a, 'b, W> {
    into: Writer<W>,
    implied: HashSet<&'a [u8]>,
    sums: &'a Sums,
    reader: &'a mut Reader<'b>,
    /// Numbers of files with several names, by their inodes.
    links: BTreeMap<u64, u32>,
}

/// A directory whose end was not written yet.
struct Open {
    /// Length of the path of its parent.
    parent: usize,
    /// Number of its entries.
    entries: u64,
    /// Names of subdirectories that were not walked yet.
    directories: Vec<CString>,
}

impl<W: Write> Walk<'_, '_, W> {
    /// Writes the entries of the whole tree; `path` is set to the path of the current file.
    fn tree(&mut self, root: &OwnedFd, path: &mut Vec<u8>) -> io::Result<()> {
        let mut open = vec![self.directory(root, path, 0)?];
        while let Some(top) = open.last_mut() {
            let length = path.len();
            if let Some(name) = top.directories.pop() {
                push(path, name.as_bytes());
                open.push(self.directory(root, path, length)?);
            } else {
                self.into.write(&Record::End(top.entries))?;
                path.truncate(top.parent);
                open.pop();
            }
        }
        Ok(())
    }

    /// Writes a directory and those of its entries that are no directories.
    fn directory(&mut self, root: &OwnedFd, path: &mut Vec<u8>, parent: usize) -> io::Result<Open> {
        let directory = open_directory(root, path)?;
        let (mut entry, _) = look(&directory, c".")?;
        entry.name = path[parent..].strip_prefix(b"/").unwrap_or(&path[parent..]).to_vec();
        if path.is_empty() || self.implied.contains(path.as_slice()) {
            entry.time = None;
        }
        self.into.write(&Record::Entry(entry))?;
        self.reader.pass(FILE_BYTES_MIN);
        let mut open = Open { parent, entries: 0, directories: Vec::new() };
        for found in Dir::read_from(&directory)? {
            let found = found?;
            let name = found.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            open.entries += 1;
            let length = path.len();
            push(path, name.to_bytes());
            let (mut entry, inode) = look(&directory, name)?;
            match entry.kind() {
                FileType::Directory => open.directories.push(name.to_owned()),
                _ => {
                    self.file(&directory, &mut entry, inode)?;
                    self.into.write(&Record::Entry(entry))?;
                }
            }
            path.truncate(length);
        }
        Ok(open)
    }

    /// Adds the number of a file with several names, and the checksum of its content; only its first name has that.
    fn file(&mut self, directory: &OwnedFd, entry: &mut Entry, inode: u64) -> io::Result<()> {
        let next = self.links.len() as u32;
        if let Some((_, number)) = &mut entry.links {
            *number = *self.links.entry(inode).or_insert(next);
            if *number < next {
                return Ok(());
            }
        }
        if entry.kind() == FileType::RegularFile {
            entry.content = match self.sums.get(inode) {
                Some(sum) => (entry.content.0, sum),
                None => self.reader.sum(directory, &CString::new(&entry.name[..])?, entry.content.0)?,
            };
        }
        Ok(())
    }
}
