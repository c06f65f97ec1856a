//! The parser of a layer's archive, which runs in a confined process: creates each entry in the directory of the layer, within the limits.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::num::NonZeroU64;
use std::path::Path;

use coracle_chunked::outline::Purpose;
use coracle_filelist::{Crc, Sum};
use coracle_job::{Failure, FailureKind, Limits};
use coracle_sandbox::describe_io;
use coracle_tar::{Entry, Kind, Reader, Time};
use rustix::fs::{Advice, FileType, fadvise, fstat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::outline::{Noted, Visible};
use super::tree::{Attributes, Position, SecurityAttribute, Tree};
use crate::failure::io_failure;

/// Text of the error for a layer above the maximum size, by which the caller recognises the error.
pub(crate) const TOO_LONG: &str = "unpacks to more bytes than the limit";
/// Maximum length of an entry's path in bytes: the kernel's PATH_MAX.
const PATH_BYTES_MAX: usize = 4096;
/// Maximum length of a path component in bytes: NAME_MAX.
const NAME_BYTES_MAX: usize = 255;
/// Buffer size in bytes for reading archives and writing files.
const COPY_BYTES: usize = 64 << 10;
/// Maximum size in bytes of the paths and attributes of all directories of one layer: of some two hundred thousand.
const DIRECTORIES_BYTES_MAX: usize = 40 << 20;
/// Number of checksums that are told at once.
const SUMS_MAX: usize = 4096;
/// Size in bytes of the attributes of a directory in memory, with that of its place in a map.
const DIRECTORY_BYTES: usize = 112;

/// The result of unpacking an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Unpacked {
    /// Paths of opaque directories. The caller, which has the necessary capability, sets their attribute.
    pub(super) opaque: Vec<Vec<u8>>,
    /// Paths of directories without an entry of their own, parents first.
    pub(crate) implied: Vec<Vec<u8>>,
    /// Extended attributes that the caller sets, because they require CAP_SYS_ADMIN.
    pub(super) security: Vec<SecurityAttribute>,
    /// Whether the outline was written.
    pub(crate) has_outline: bool,
    /// Checksums of files, in the order in which they were written; the confined process sends them before.
    pub(crate) sums: Vec<Sum>,
}

/// Unpacks a tar archive into an empty directory; runs in the confined process. The lowest layer of an image has nothing to
/// hide, and overlayfs would list its whiteouts in directories that no other layer has. `outline` gets the outline of the archive; it
/// has none if an entry replaced another one, of which the tree lacks the content. `tell` receives the checksums of files.
pub(crate) fn unpack_to(
    directory: &Path,
    input: impl Read,
    limits: &Limits,
    is_lowest: bool,
    outline: Option<(File, Purpose)>,
    tell: &mut dyn FnMut(Vec<Sum>),
) -> Result<Unpacked, Failure> {
    let tree = Tree::new(directory).map_err(|errno| io_failure("open", directory, &errno.into()))?;
    // Headers and small files are read from a larger buffer.
    let input = BufReader::with_capacity(COPY_BYTES, input);
    let mut archive = Reader::new(Noted::new(input, outline, limits.layer_bytes_max));
    let mut unpacker = Unpacker {
        tree,
        limits,
        is_lowest,
        entries: 0,
        bytes: 0,
        directories: BTreeMap::new(),
        directory_bytes: 0,
        buffer: vec![0; COPY_BYTES],
        has_changed: false,
        sums: Vec::new(),
    };
    while let Some(entry) = archive.next().map_err(broken)? {
        unpacker.entry(&entry, &mut archive)?;
        if unpacker.sums.len() >= SUMS_MAX {
            tell(std::mem::take(&mut unpacker.sums));
        }
    }
    tell(std::mem::take(&mut unpacker.sums));
    unpacker.set_times()?;
    // Padding after the last entry is part of the digest: the input is read to its end.
    let mut input = archive.into_inner();
    io::copy(&mut input, &mut io::sink()).map_err(broken)?;
    let has_outline = input.finish() && !unpacker.has_changed;
    Ok(unpacker.tree.into_unpacked(has_outline))
}

/// The failure for an archive that cannot be read or decompressed.
pub(crate) fn broken(error: io::Error) -> Failure {
    Failure::invalid(format!("archive: {}", describe_io(&error)))
}

struct Unpacker<'a> {
    tree: Tree,
    limits: &'a Limits,
    is_lowest: bool,
    entries: u64,
    /// Apparent size of all files in bytes; counted because holes need no space in an archive.
    bytes: u64,
    /// Directories with the numbers of their entries and their times, which are set last because creating entries changes them; of
    /// equal directories the last one counts, also if their paths differ by links.
    directories: BTreeMap<Vec<u8>, (u64, Attributes)>,
    directory_bytes: usize,
    /// Buffer for the content of files.
    buffer: Vec<u8>,
    /// Whether an entry has changed what an earlier one made, so that neighbours could not read it where the outline says.
    has_changed: bool,
    /// Checksums of files that were not told yet.
    sums: Vec<Sum>,
}

impl Unpacker<'_> {
    fn entry(&mut self, entry: &Entry, archive: &mut Reader<Noted<impl BufRead>>) -> Result<(), Failure> {
        self.entries += 1;
        if self.entries > self.limits.layer_entries_max {
            return Err(Failure::invalid(format!("more than {} entries", self.limits.layer_entries_max)));
        }
        let shown = String::from_utf8_lossy(&entry.path).into_owned();
        let refused = |why: &str| Failure::invalid(format!("entry {shown:?}: {why}"));
        let path = clean(&entry.path).map_err(refused)?;
        self.bytes = self.bytes.saturating_add(entry.size);
        if self.bytes > self.limits.layer_bytes_max {
            return Err(refused(TOO_LONG));
        }
        if path.is_empty() {
            return Ok(()); // the root directory, whose attributes containerd ignores
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        // Of the entries before this one.
        if let Some(why) = self.tree.excess() {
            return Err(Failure::invalid(why));
        }
        if let Some(hidden) = name.strip_prefix(b".wh.") {
            return self
                .whiteout(&path, hidden)
                .map_err(|error| error.unwrap_or_else(|errno| at(&shown, errno)));
        }
        let made = match entry.kind {
            // A file detects an existing entry itself, because there is rarely one.
            Kind::File => self.make_file(entry, &path, archive),
            Kind::Unknown(b'V') => return Ok(()), // the label of GNU tar for the archive
            _ => self.make(entry, &path),
        };
        made.map_err(|error| match error {
            EntryError::Kernel(errno) => at(&shown, errno),
            EntryError::Io(error) => at_io(&shown, &error),
            EntryError::Archive(why) => refused(&why),
        })
    }

    /// Removes an existing entry at `path`, except that a directory entry keeps an existing directory. A
    /// directory that replaces a whiteout is marked as opaque.
    fn clear(&mut self, path: &[u8], is_directory: bool) -> Result<(), Errno> {
        let position = self.tree.position(path)?;
        if is_directory && position.is_directory()? {
            return Ok(());
        }
        let is_hiding = is_directory && position.is_whiteout()?;
        if position.clear()? {
            self.has_changed = true;
            self.tree.forget(path)?;
            if is_hiding {
                self.tree.opaque(path)?;
            }
        }
        Ok(())
    }

    /// Creates an entry without content.
    fn make(&mut self, entry: &Entry, path: &[u8]) -> Result<(), EntryError> {
        // GNU tar's directories with a list of their entries are directories.
        let is_directory = matches!(entry.kind, Kind::Directory | Kind::Unknown(b'D'));
        let number = |number: i64| {
            u32::try_from(number).map_err(|_| EntryError::Archive(format!("the device number {number}")))
        };
        let device = (number(entry.device.0), number(entry.device.1));
        self.clear(path, is_directory)?;
        let target = match entry.kind {
            Kind::HardLink => Some(self.tree.existing(&entry.link)?),
            _ => None,
        };
        let position = self.tree.position(path)?;
        match entry.kind {
            _ if is_directory => match position.directory() {
                Ok(()) => {}
                Err(Errno::EXIST) => {
                    // Content may be below it.
                    self.has_changed |= !Visible::of(entry).is_entered();
                    self.tree.look_again();
                    self.tree.explicit(path)?;
                }
                Err(errno) => return Err(errno.into()),
            },
            Kind::Symlink => position.symlink(&entry.link)?,
            Kind::HardLink => {
                self.has_changed |= !Visible::of(entry).is_readable();
                position.hard_link(&target.ok_or(Errno::NOENT)?)?;
            }
            Kind::Char => position.node(FileType::CharacterDevice, device.0?, device.1?)?,
            Kind::Block => position.node(FileType::BlockDevice, device.0?, device.1?)?,
            Kind::Fifo => position.node(FileType::Fifo, 0, 0)?,
            Kind::File | Kind::Directory | Kind::Unknown(_) => {
                return Err(EntryError::Archive("an unknown type of entry".to_owned()));
            }
        }
        // Those of a hard link's header too, which then apply to its file under all names (containerd 2.4, pkg/archive,
        // createTarFile).
        let attributes = attributes_of(entry);
        let position = self.tree.position(path)?;
        position.attributes(attributes, position.kind()? == Some(FileType::Symlink))?;
        self.set_xattrs(entry, path)?;
        if is_directory {
            if self.directories.insert(path.to_vec(), (self.entries, attributes)).is_none() {
                self.directory_bytes += path.len() + DIRECTORY_BYTES;
            }
            if self.directory_bytes > DIRECTORIES_BYTES_MAX {
                let why = format!(
                    "{} directories have more than {DIRECTORIES_BYTES_MAX} bytes of names and attributes",
                    self.directories.len()
                );
                return Err(EntryError::Archive(why));
            }
        }
        Ok(())
    }

    fn make_file(
        &mut self,
        entry: &Entry,
        path: &[u8],
        archive: &mut Reader<Noted<impl BufRead>>,
    ) -> Result<(), EntryError> {
        let position = self.tree.position(path)?;
        let (mut file, has_replaced) = position.file(entry.mode)?;
        let visible = match archive.input().purpose() {
            Some(Purpose::Headers) => Some(path.to_vec()),
            Some(Purpose::Neighbours) if Visible::of(entry).is_readable() => self.tree.visible(path),
            _ => None,
        };
        let (mut sum, mut end) = (Crc::new(), 0);
        for piece in entry.pieces() {
            if entry.is_sparse() {
                file.seek(io::SeekFrom::Start(piece.offset))?;
                add_hole(&mut sum, piece.offset.saturating_sub(end));
            }
            if let Some(path) = &visible {
                archive.input().begin(path, piece.offset, piece.length);
            }
            let mut content = archive.by_ref().take(piece.length);
            copy(&mut content, &mut file, piece.offset, &mut self.buffer, &mut sum)?;
            archive.input().end();
            end = piece.offset + piece.length;
        }
        if entry.is_sparse() {
            file.set_len(entry.size)?;
            add_hole(&mut sum, entry.size.saturating_sub(end));
        }
        Position::attributes_of(&file, attributes_of(entry))?;
        self.sums.push((fstat(&file)?.st_ino, self.entries as u32, sum.sum()));
        if has_replaced {
            self.has_changed = true;
            self.tree.forget(path)?;
        }
        self.set_xattrs(entry, path)
    }

    /// Sets the extended attributes of an entry, except `trusted.*`, as in containerd: among them are those of overlayfs,
    /// which would hide files of lower layers.
    fn set_xattrs(&mut self, entry: &Entry, path: &[u8]) -> Result<(), EntryError> {
        for (name, value) in &entry.xattrs {
            if name.starts_with(b"trusted.") {
                continue;
            }
            if name.starts_with(b"security.") && name != b"security.capability" {
                self.tree.security(path, name, value)?;
                continue;
            }
            // An access control list, or one that files inherit.
            self.has_changed |= name.starts_with(b"system.");
            self.tree.position(path)?.xattr(name, value)?;
        }
        Ok(())
    }

    /// Creates a whiteout for the name `hidden`, or marks the directory of `path` as opaque. `Err(Ok(…))`:
    /// the archive is refused; `Err(Err(…))`: an error of the kernel.
    fn whiteout(&mut self, path: &[u8], hidden: &[u8]) -> Result<(), Result<Failure, Errno>> {
        if hidden == b".wh..opq" {
            let directory = path.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |at| &path[..at]);
            let made = self.tree.position(path).map(drop).map_err(Err);
            return made.and_then(|()| self.tree.opaque(directory).map_err(Err));
        }
        if hidden.starts_with(b".wh.") {
            return Ok(()); // internal files of AUFS
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(Ok(Failure::invalid(format!(
                "entry {:?}: a whiteout without a name",
                String::from_utf8_lossy(path)
            ))));
        }
        let mut target = path[..path.len() - hidden.len() - b".wh.".len()].to_vec();
        target.extend_from_slice(hidden);
        let position = self.tree.position(&target).map_err(Err)?;
        match position.kind().map_err(Err)? {
            // It hides the entry of lower layers, not that of this layer.
            Some(FileType::Directory) => self.tree.opaque(&target).map_err(Err)?,
            Some(_) => {}
            None if self.is_lowest => {}
            None => position.whiteout().map_err(Err)?,
        }
        Ok(())
    }

    /// Sets the times of directories.
    fn set_times(&mut self) -> Result<(), Failure> {
        if let Some(why) = self.tree.excess() {
            return Err(Failure::invalid(why));
        }
        let mut directories: Vec<_> = std::mem::take(&mut self.directories).into_iter().collect();
        directories.sort_unstable_by_key(|(_, (entry, _))| *entry);
        for (path, (_, attributes)) in directories {
            let failed = |errno| at(&String::from_utf8_lossy(&path), errno);
            let found = match self.tree.existing(&path) {
                Err(Errno::NOENT | Errno::NOTDIR) => continue, // a later entry replaced one of its parents
                found => found.map_err(failed)?,
            };
            let position = Position::of(&found);
            if position.is_directory().map_err(failed)? {
                position.times(attributes).map_err(failed)?;
            }
        }
        Ok(())
    }
}

enum EntryError {
    Kernel(Errno),
    Io(io::Error),
    Archive(String),
}

impl From<Errno> for EntryError {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Number of bytes of a file after which their write-back begins, and the minimum for the rest of a file: a call for each
/// small file would take longer than it saves.
const WRITE_BACK_BYTES: u64 = 4 << 20;
const WRITE_BACK_BYTES_MIN: u64 = 64 << 10;

/// Normalises an entry's name like [`coracle_tar::clean`], within the kernel's limits.
pub(super) fn clean(name: &[u8]) -> Result<Vec<u8>, &'static str> {
    if name.len() > PATH_BYTES_MAX {
        return Err("is longer than the maximum path length");
    }
    if name.contains(&0) {
        return Err("contains a NUL");
    }
    if name.split(|byte| *byte == b'/').any(|part| part.len() > NAME_BYTES_MAX) {
        return Err("has a component of more than 255 bytes");
    }
    Ok(coracle_tar::clean(name))
}

fn attributes_of(entry: &Entry) -> Attributes {
    let time = |time: Time| rustix::fs::Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    Attributes {
        uid: entry.uid,
        gid: entry.gid,
        mode: entry.mode,
        mtime: time(entry.mtime),
        atime: time(entry.atime.map_or(entry.mtime, |atime| atime.max(entry.mtime))),
    }
}

/// Adds the zeros of a hole to a checksum.
fn add_hole(sum: &mut Crc, length: u64) {
    const ZEROS: [u8; 4096] = [0; 4096];
    let rest = (length % ZEROS.len() as u64) as usize;
    (0..length / ZEROS.len() as u64).for_each(|_| sum.update(&ZEROS));
    sum.update(&ZEROS[..rest]);
}

/// Copies a piece of a file to its offset, which is the position of `file`.
fn copy(
    piece: &mut impl Read,
    file: &mut File,
    offset: u64,
    buffer: &mut [u8],
    sum: &mut Crc,
) -> io::Result<()> {
    let (mut begun, mut length) = (0_u64, 0_u64);
    loop {
        let count = piece.read(buffer)?;
        file.write_all(&buffer[..count])?;
        sum.update(&buffer[..count]);
        length += count as u64;
        let unwritten = length - begun;
        if unwritten >= WRITE_BACK_BYTES || count == 0 && unwritten >= WRITE_BACK_BYTES_MIN {
            begin_write_back(file, offset + begun, unwritten);
            begun = length;
        }
        if count == 0 {
            return Ok(());
        }
    }
}

/// Lets the kernel begin to write a part of a file to the disk, so that little is left for the sync that makes the image
/// durable. The advice does that (mm/fadvise.c), and keeps pages that are not written yet; a file system may ignore it.
fn begin_write_back(file: &File, offset: u64, length: u64) {
    let _ = fadvise(file, offset, NonZeroU64::new(length), Advice::DontNeed);
}

pub(super) fn at(entry: &str, errno: Errno) -> Failure {
    at_io(entry, &errno.into())
}

/// The failure for an I/O error while creating `entry`: a full disk is an error of the node; an error because
/// of a name or a link makes the archive invalid.
fn at_io(entry: &str, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::NoSpace,
        _ => FailureKind::Invalid,
    };
    Failure::new(kind, format!("entry {entry:?}: {}", describe_io(error)))
}
