//! The records of a list, and what the kernel says about a file.
//!
//! Format: [`MAGIC`], then records: for each the length in 4 bytes, little-endian, and the [`Record`] in postcard. The root
//! directory is first; after a directory follow its entries that are no directories, its subdirectories with what is in them, and
//! [`Record::End`]. After [`Record::Last`] follows the SHA-256 digest of all bytes before it. Another format needs another directory in the
//! store: a build that does not know it then finds no list, and no damaged one.

use std::ffi::CStr;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use coracle_sandbox::collect;
use flate2::Crc;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2, readlinkat, statat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The first bytes of a list.
pub(crate) const MAGIC: &[u8; 8] = b"corlst\x00\x01";
/// Maximum length of a record in bytes: a name, and the names of 64 KiB of extended attributes.
const RECORD_BYTES_MAX: usize = 1 << 20;
/// Maximum length in bytes of the names of a file's extended attributes, and of one value: the kernel's limits.
const ATTRIBUTES_BYTES_MAX: usize = 64 << 10;
/// Extended attributes that the node's security modules give to files: they are not the image's, and differ between two copies.
const OF_NODE: [&[u8]; 2] = [b"security.selinux", b"security.evm"];

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    Entry(Entry),
    /// The end of a directory, with the number of its entries.
    End(u64),
    /// The end of the list.
    Last,
}

/// A file, directory, link or device.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Name in its directory; empty for the root directory.
    pub(crate) name: Vec<u8>,
    /// Type and permissions.
    pub(crate) mode: u32,
    /// User and group.
    pub(crate) owner: (u32, u32),
    /// Number of a device.
    pub(crate) device: u64,
    /// Time of modification in seconds and nanoseconds; `None` if it is not the archive's.
    pub(crate) time: Option<(i64, u64)>,
    /// Extended attributes by their names, with the checksum of their values.
    pub(crate) attributes: Vec<(Vec<u8>, u32)>,
    /// Length and checksum of the content of a file, or of the target of a link.
    pub(crate) content: (u64, u32),
    /// Number of names of the file, and the number by which the list calls it, if it has several names.
    pub(crate) links: Option<(u64, u32)>,
}

impl Entry {
    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// Asks the kernel about `name` in a directory, or about the directory itself if `name` is `.`; also returns its inode.
/// The content of a file is not read, and the number of a file with several names is 0.
pub(crate) fn look(directory: &OwnedFd, name: &CStr) -> io::Result<(Entry, u64)> {
    let about = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = FileType::from_raw_mode(about.st_mode);
    let is_node = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
    let content = match kind {
        FileType::RegularFile => (about.st_size as u64, 0),
        FileType::Symlink => {
            let target = readlinkat(directory, name, Vec::new())?;
            (target.as_bytes().len() as u64, sum_of(target.as_bytes()))
        }
        _ => (0, 0),
    };
    let links = (kind != FileType::Directory && about.st_nlink > 1).then_some((about.st_nlink as _, 0));
    // A whiteout has no time of its own.
    let has_time = kind != FileType::CharacterDevice || about.st_rdev != 0;
    // Through the descriptor, because the tree may be deeper than PATH_MAX.
    let path = [format!("/proc/self/fd/{}/", directory.as_raw_fd()).as_bytes(), name.to_bytes()].concat();
    let sums = attributes(&path)?.into_iter();
    let entry = Entry {
        name: if name == c"." { Vec::new() } else { name.to_bytes().to_vec() },
        mode: about.st_mode,
        owner: (about.st_uid, about.st_gid),
        device: if is_node { about.st_rdev } else { 0 },
        time: has_time.then_some((about.st_mtime, about.st_mtime_nsec as u64)),
        attributes: sums.map(|(name, value)| (name, sum_of(&value))).collect(),
        content,
        links,
    };
    Ok((entry, about.st_ino))
}

/// The extended attributes of the file at `path` with their values, in the order of their names. A link at its end is not followed.
pub(crate) fn attributes(path: &[u8]) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    // Most files have none, and need no buffers.
    match rustix::fs::llistxattr_query(path) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(Vec::new()),
        length => length?,
    };
    let (mut names, mut value) = (vec![0; ATTRIBUTES_BYTES_MAX], vec![0; ATTRIBUTES_BYTES_MAX]);
    let length = rustix::fs::llistxattr(path, &mut names)?;
    let mut found = Vec::new();
    for name in names[..length].split(|byte| *byte == 0) {
        if !name.is_empty() && !OF_NODE.contains(&name) {
            let length = rustix::fs::lgetxattr(path, name, &mut value)?;
            found.push((name.to_vec(), value[..length].to_vec()));
        }
    }
    collect::sort(&mut found);
    Ok(found)
}

pub(crate) fn sum_of(bytes: &[u8]) -> u32 {
    let mut sum = Crc::new();
    sum.update(bytes);
    sum.sum()
}

/// Opens the directory at `path` below `root`; no link is followed and no mount crossed.
pub(crate) fn open_directory(root: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let path = if path.is_empty() { b"." } else { path };
    Ok(openat2(root, path, flags, Mode::empty(), resolve)?)
}

/// Appends a name to a path.
pub(crate) fn push(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// Writes records.
pub(crate) struct Writer<W> {
    into: W,
    hash: Sha256,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(into: W) -> io::Result<Self> {
        let mut writer = Self { into, hash: Sha256::new() };
        writer.put(MAGIC)?;
        Ok(writer)
    }

    pub(crate) fn write(&mut self, record: &Record) -> io::Result<()> {
        let bytes = postcard::to_allocvec(record).map_err(io::Error::other)?;
        self.put(&(bytes.len() as u32).to_le_bytes())?;
        self.put(&bytes)
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.write(&Record::Last)?;
        self.into.write_all(&self.hash.finalize())?;
        self.into.flush()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.into.write_all(bytes)
    }
}

/// Reads records.
pub(crate) struct Records<R> {
    from: R,
    hash: Sha256,
    bytes: Vec<u8>,
}

impl<R: Read> Records<R> {
    pub(crate) fn new(from: R) -> io::Result<Self> {
        let mut records = Self { from, hash: Sha256::new(), bytes: Vec::new() };
        records.take(MAGIC.len())?;
        if records.bytes == MAGIC { Ok(records) } else { Err(invalid("not a list")) }
    }

    /// The next record. Errors of kind `InvalidData` and `UnexpectedEof` mean that the bytes are not a list.
    pub(crate) fn next(&mut self) -> io::Result<Record> {
        self.take(size_of::<u32>())?;
        let length = self.bytes.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if length > RECORD_BYTES_MAX {
            return Err(invalid("a record that is too long"));
        }
        self.take(length)?;
        postcard::from_bytes(&self.bytes).map_err(|_| invalid("a record that cannot be decoded"))
    }

    /// Verifies the digest, after the last record was read.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let expected = self.hash.clone().finalize();
        self.take(expected.len())?;
        if self.bytes != expected[..] {
            return Err(invalid("its digest is wrong"));
        }
        if self.from.read(&mut [0])? == 0 { Ok(()) } else { Err(invalid("bytes after its end")) }
    }

    fn take(&mut self, length: usize) -> io::Result<()> {
        self.bytes.resize(length, 0);
        self.from.read_exact(&mut self.bytes)?;
        self.hash.update(&self.bytes);
        Ok(())
    }
}

pub(crate) fn invalid(text: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}
