//! The parser of a layer's archive, which runs in a confined process: creates each entry in the directory of the layer, within the limits.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::num::NonZeroU64;
use std::path::Path;

use coracle_job::{Failure, FailureKind, Limits};
use coracle_sandbox::describe_io;
use rustix::fs::{Advice, FileType, fadvise};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tar::{Archive, Entry, EntryType};

use super::stream::{Budget, Metered, TOO_LONG};
use super::tree::{Attributes, Position, Tree};
use crate::failure::{failure, invalid, io_failure};

/// Maximum length of an entry's path in bytes: the kernel's PATH_MAX.
const PATH_BYTES_MAX: usize = 4096;
/// Maximum length of a path component in bytes: NAME_MAX.
const NAME_BYTES_MAX: usize = 255;
/// Prefix of the PAX records with extended attributes.
const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
/// Buffer size in bytes for reading archives and writing files.
const COPY_BYTES: usize = 64 << 10;
/// Size in bytes of a block that becomes a hole if it contains only zeros.
const BLOCK_BYTES: usize = 4096;
/// Maximum length in bytes of the names of all opaque directories of one layer, which are sent in one
/// message.
const OPAQUE_BYTES_MAX: usize = 4 << 20;

/// The result of unpacking an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Unpacked {
    /// Paths of opaque directories. The caller, which has the necessary capability, sets their attribute.
    pub(super) opaque: Vec<Vec<u8>>,
    /// Paths of directories without an entry of their own, parents first.
    pub(super) implied: Vec<Vec<u8>>,
}

/// Unpacks a tar archive into an empty directory; runs in the confined process.
pub(crate) fn unpack_to(directory: &Path, input: impl Read, limits: &Limits) -> Result<Unpacked, Failure> {
    let tree = Tree::new(directory).map_err(|errno| io_failure("open", directory, &errno.into()))?;
    let budget = Budget::default();
    // Headers and small files are read from a larger buffer.
    let metered = Metered::new(BufReader::with_capacity(COPY_BYTES, input), &budget);
    let mut archive = Archive::new(metered);
    let buffer = vec![0; COPY_BYTES];
    let mut unpacker = Unpacker { tree, limits, entries: 0, bytes: 0, directories: Vec::new(), buffer };
    let mut entries = archive.entries().map_err(broken)?;
    while let Some(entry) = budget.next(|| entries.next()) {
        let mut entry = entry.map_err(broken)?;
        unpacker.entry(&mut entry)?;
        // The rest of an entry must not count as metadata of the next one.
        io::copy(&mut entry, &mut io::sink()).map_err(broken)?;
    }
    let opaque = unpacker.finish()?;
    let implied = std::mem::take(&mut unpacker.tree.implied).into_iter().collect();
    // Padding after the last entry is part of the digest: the input is read to its end.
    io::copy(&mut archive.into_inner().into_inner(), &mut io::sink()).map_err(broken)?;
    Ok(Unpacked { opaque, implied })
}

/// The failure for an archive that cannot be read or decompressed.
pub(crate) fn broken(error: io::Error) -> Failure {
    invalid(format!("archive: {}", describe_io(&error)))
}

struct Unpacker<'a> {
    tree: Tree,
    limits: &'a Limits,
    entries: u64,
    /// Apparent size of all files in bytes; counted because holes need no space in an archive.
    bytes: u64,
    /// Directories and their times, which are set last because creating entries changes them.
    directories: Vec<(Vec<u8>, Attributes)>,
    /// Buffer for the content of files.
    buffer: Vec<u8>,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<(), Failure> {
        self.entries += 1;
        if self.entries > self.limits.layer_entries_max {
            return Err(invalid(format!("more than {} entries", self.limits.layer_entries_max)));
        }
        let shown = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let refused = |why: &str| invalid(format!("entry {shown:?}: {why}"));
        let path = clean(&entry.path_bytes()).map_err(refused)?;
        let header = entry.header();
        let old = header.as_old();
        let number =
            |bytes: &[u8], field: io::Result<u64>| match bytes.iter().all(|byte| matches!(byte, 0 | b' ')) {
                true => Ok(0), // empty, as some tools write it
                false => field.map_err(|error| refused(&describe_io(&error))),
            };
        let id = |bytes, field| number(bytes, field).map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        let attributes = Attributes {
            uid: id(&old.uid, header.uid())?,
            gid: id(&old.gid, header.gid())?,
            mode: u32::try_from(number(&old.mode, header.mode().map(u64::from))?).unwrap_or(0),
            mtime: i64::try_from(number(&old.mtime, header.mtime())?).unwrap_or(0),
        };
        self.bytes = self.bytes.saturating_add(entry.size());
        if self.bytes > self.limits.layer_bytes_max {
            return Err(refused(TOO_LONG));
        }
        let kind = header.entry_type();
        if path.is_empty() {
            // The root directory of the layer: only its attributes apply.
            let set = if kind.is_dir() { self.tree.root().attributes(attributes, false) } else { Ok(()) };
            return set.map_err(|errno| at(&shown, errno));
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if let Some(hidden) = name.strip_prefix(b".wh.") {
            return self
                .whiteout(&path, hidden)
                .map_err(|error| error.unwrap_or_else(|errno| at(&shown, errno)));
        }
        // A file detects an existing entry itself, because there is rarely one.
        if !is_file(kind) {
            self.clear(&path, kind).map_err(|errno| at(&shown, errno))?;
        }
        self.make(entry, &path, attributes).map_err(|error| match error {
            EntryError::Kernel(errno) => at(&shown, errno),
            EntryError::Io(error) => at_io(&shown, &error),
            EntryError::Archive(why) => refused(&why),
        })
    }

    /// Removes an existing entry at `path`, except that a directory entry keeps an existing directory. A
    /// directory that replaces a whiteout is marked as opaque.
    fn clear(&mut self, path: &[u8], kind: EntryType) -> Result<(), Errno> {
        let position = self.tree.position(path)?;
        if kind.is_dir() && position.is_directory() {
            return Ok(());
        }
        let is_hiding = kind.is_dir() && position.is_whiteout();
        if position.clear()? {
            self.tree.forget(path);
            if is_hiding {
                self.tree.opaque.push(path.to_vec());
            }
        }
        Ok(())
    }

    fn make<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &[u8],
        attributes: Attributes,
    ) -> Result<(), EntryError> {
        let xattrs = xattrs(entry)?;
        let header = entry.header();
        let kind = header.entry_type();
        if is_file(kind) {
            return self.make_file(entry, path, attributes, &xattrs);
        }
        let device = match kind {
            EntryType::Char | EntryType::Block => {
                (header.device_major()?.unwrap_or(0), header.device_minor()?.unwrap_or(0))
            }
            _ => (0, 0),
        };
        let link = entry.link_name_bytes().map(|link| link.into_owned()).unwrap_or_default();
        let target = match kind {
            EntryType::Link => {
                let target = clean(&link).map_err(|why| EntryError::Archive(format!("its target {why}")))?;
                Some(self.tree.existing(&target)?)
            }
            _ => None,
        };
        let position = self.tree.position(path)?;
        match kind {
            EntryType::Directory => {
                match position.directory() {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
                self.tree.implied.remove(path);
                self.directories.push((path.to_vec(), attributes));
            }
            EntryType::Symlink => position.symlink(&link)?,
            EntryType::Link => match &target {
                // The target of the link has the attributes already.
                Some(target) => return Ok(position.hard_link(target)?),
                None => return Err(EntryError::Archive("its link target is missing".to_owned())),
            },
            EntryType::Char => position.node(FileType::CharacterDevice, device.0, device.1)?,
            EntryType::Block => position.node(FileType::BlockDevice, device.0, device.1)?,
            EntryType::Fifo => position.node(FileType::Fifo, 0, 0)?,
            _ => return Ok(()), // not a file system object
        }
        let position = self.tree.position(path)?;
        position.attributes(attributes, kind == EntryType::Symlink)?;
        for (name, value) in xattrs {
            position.xattr(&name, &value)?;
        }
        Ok(())
    }

    fn make_file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &[u8],
        attributes: Attributes,
        xattrs: &[Xattr],
    ) -> Result<(), EntryError> {
        let is_sparse = entry.header().entry_type() == EntryType::GNUSparse;
        let position = self.tree.position(path)?;
        let (mut file, has_replaced) = position.file(attributes.mode)?;
        match is_sparse {
            true => copy_sparse(entry, &mut file)?,
            false => copy(entry, &mut file, &mut self.buffer)?,
        }
        Position::attributes_of(&file, attributes)?;
        for (name, value) in xattrs {
            position.xattr(name, value)?;
        }
        if has_replaced {
            self.tree.forget(path);
        }
        Ok(())
    }

    /// Creates a whiteout for the name `hidden`, or marks the directory of `path` as opaque. `Err(Ok(…))`:
    /// the archive is refused; `Err(Err(…))`: an error of the kernel.
    fn whiteout(&mut self, path: &[u8], hidden: &[u8]) -> Result<(), Result<Failure, Errno>> {
        if hidden == b".wh..opq" {
            let directory = path.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |at| &path[..at]);
            let made = self.tree.position(path).map(drop).map_err(Err);
            self.tree.opaque.push(directory.to_vec());
            return made;
        }
        if hidden.starts_with(b".wh.") {
            return Ok(()); // internal files of AUFS
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(Ok(invalid(format!(
                "entry {:?}: a whiteout without a name",
                String::from_utf8_lossy(path)
            ))));
        }
        let mut target = path[..path.len() - hidden.len() - b".wh.".len()].to_vec();
        target.extend_from_slice(hidden);
        let position = self.tree.position(&target).map_err(Err)?;
        match position.kind() {
            // It hides the entry of lower layers, not that of this layer.
            Some(FileType::Directory) => self.tree.opaque.push(target.clone()),
            Some(_) => {}
            None => position.whiteout().map_err(Err)?,
        }
        Ok(())
    }

    /// Sets the times of directories; returns the paths of opaque directories.
    fn finish(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        for (path, attributes) in std::mem::take(&mut self.directories).into_iter().rev() {
            let found = match self.tree.existing(&path) {
                Err(Errno::NOENT | Errno::NOTDIR) => continue, // a later entry replaced one of its parents
                found => found.map_err(|errno| at(&String::from_utf8_lossy(&path), errno))?,
            };
            let position = Position::of(&found);
            if position.is_directory() {
                position
                    .attributes(attributes, false)
                    .map_err(|errno| at(&String::from_utf8_lossy(&path), errno))?;
            }
        }
        let mut opaque = std::mem::take(&mut self.tree.opaque);
        opaque.sort_unstable();
        opaque.dedup();
        match opaque.iter().map(Vec::len).sum::<usize>() > OPAQUE_BYTES_MAX {
            true => Err(invalid("more opaque directories than the limit")),
            false => Ok(opaque),
        }
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

/// Normalises an entry's name: removes `.`, empty components and a leading `/`. The result is empty for the
/// root directory.
pub(super) fn clean(name: &[u8]) -> Result<Vec<u8>, &'static str> {
    if name.len() > PATH_BYTES_MAX {
        return Err("is longer than the maximum path length");
    }
    if name.contains(&0) {
        return Err("contains a NUL");
    }
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("leaves the layer"),
            part if part.len() > NAME_BYTES_MAX => return Err("has a component of more than 255 bytes"),
            part => parts.push(part),
        }
    }
    Ok(parts.join(&b'/'))
}

/// Name and value of an extended attribute.
type Xattr = (Vec<u8>, Vec<u8>);

/// The extended attributes in the PAX records of an entry.
fn xattrs<R: Read>(entry: &mut Entry<'_, R>) -> Result<Vec<Xattr>, EntryError> {
    let mut xattrs = Vec::new();
    for record in entry.pax_extensions()?.into_iter().flatten() {
        let record = record?;
        if let Some(name) = record.key_bytes().strip_prefix(XATTR_PREFIX) {
            // Images must not set overlayfs attributes, which would hide files of lower layers.
            if !name.starts_with(b"trusted.overlay.") {
                xattrs.push((name.to_vec(), record.value_bytes().to_vec()));
            }
        }
    }
    Ok(xattrs)
}

/// Whether entries of this type have content.
fn is_file(kind: EntryType) -> bool {
    matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse)
}

fn copy(entry: &mut impl Read, file: &mut File, buffer: &mut [u8]) -> io::Result<()> {
    let (mut begun, mut length) = (0_u64, 0_u64);
    loop {
        let count = entry.read(buffer)?;
        file.write_all(&buffer[..count])?;
        length += count as u64;
        let unwritten = length - begun;
        if unwritten >= WRITE_BACK_BYTES || count == 0 && unwritten >= WRITE_BACK_BYTES_MIN {
            begin_write_back(file, begun, unwritten);
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

/// Copies an entry's content with holes: blocks of zeros are skipped, and the length is set at the end.
fn copy_sparse(entry: &mut impl Read, file: &mut File) -> Result<(), EntryError> {
    let mut block = [0; BLOCK_BYTES];
    let mut length = 0;
    loop {
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match entry.read(&mut block[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        if filled == 0 {
            break;
        }
        length += filled as u64;
        if block[..filled].iter().all(|byte| *byte == 0) {
            file.seek(io::SeekFrom::Start(length))?;
        } else {
            file.write_all(&block[..filled])?;
        }
    }
    Ok(file.set_len(length)?)
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
    failure(kind, format!("entry {entry:?}: {}", describe_io(error)))
}
