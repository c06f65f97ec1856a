//! A layer's archive into a directory as overlayfs wants it (OCI image spec 1.1, "Image Layer Filesystem Changeset").
//!
//! ```text
//!   blob ─► jail: decompress ─► hash, count ─► jail: tar entries ─► layers/tmp-… ─► the hash is the diff ID ─► layers/NAME
//! ```
//! | entry | becomes |
//! |---|---|
//! | `.wh.NAME` | character device 0:0 called NAME; where this layer has a NAME of its own, that hides those below |
//! | `.wh..wh..opq` | `trusted.overlay.opaque=y` on its directory |
//! | file, directory, link, device, fifo | the same; a later entry replaces an earlier one |
//! | socket, GNU dump records | nothing |
//!
//! The archive is not trusted: it is decompressed by a process that sees nothing, and read by another one that sees nothing but
//! the new directory ([`crate::jail`]), while the worker between them computes its digest; names
//! that leave the layer are refused, links are resolved inside it, unpacked bytes, holes, entries and what describes one
//! entry are counted, and nothing is seen before the whole archive verified.

mod aside;
mod parents;
mod stream;
mod tree;

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::Path;

use coracle_job::{Failure, FailureKind, Layer, Limits};
use rustix::fs::FileType;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tar::{Archive, Entry, EntryType};

use crate::failure::{failure, invalid, io_failure};
use crate::jail::inmate;
use tree::{Attributes, Place, Tree};

pub(crate) use aside::Aside;
pub(crate) use parents::settle;
pub(crate) use stream::{Budget, Metered, TOO_LONG, decompress};

/// Longest path of an entry: PATH_MAX, as the kernel has it.
const PATH_BYTES_MAX: usize = 4096;
/// Longest component: NAME_MAX.
const NAME_BYTES_MAX: usize = 255;
/// PAX records that carry extended attributes.
const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
/// One read of an archive, one write of a file.
const COPY_BYTES: usize = 64 << 10;
/// Blocks of zeros of this size become holes.
const BLOCK_BYTES: usize = 4096;
/// Names of opaque directories of one layer, all together; they are one message.
const OPAQUE_BYTES_MAX: usize = 4 << 20;

/// What came of an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Unpacked {
    /// Directories that hide what is below; the mark is for whoever may set it.
    opaque: Vec<Vec<u8>>,
    /// Directories that no entry describes, parents before what is in them.
    implied: Vec<Vec<u8>>,
}

/// Unpacks `blob` into an empty directory; it is what `layer` says, or a failure. Gives the directories that it only
/// implies, which layers below say more of ([`settle`]).
pub(crate) fn unpack_verified(
    directory: &Path,
    blob: &Path,
    layer: &Layer,
    limits: &Limits,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<Vec<Vec<u8>>, Failure> {
    let file = crate::store::open_plain(blob)?;
    let (unpacked, digest) = inmate::unpack(directory, file, limits, pulse)?;
    if digest != layer.diff_id {
        let text = format!("its content has digest {digest}, the config says {}", layer.diff_id);
        return Err(invalid(text));
    }
    let tree = Tree::new(directory).map_err(|errno| io_failure("open", directory, &errno.into()))?;
    for path in &unpacked.opaque {
        tree.mark_opaque(path).map_err(|errno| at(&String::from_utf8_lossy(path), errno))?;
    }
    Ok(unpacked.implied)
}

/// Unpacks a tar archive into an empty directory, in the process that is shut in there.
pub(crate) fn unpack_to(directory: &Path, input: impl Read, limits: &Limits) -> Result<Unpacked, Failure> {
    let tree = Tree::new(directory).map_err(|errno| io_failure("open", directory, &errno.into()))?;
    let budget = Budget::default();
    // Headers and small files are taken out of a bigger piece.
    let metered = Metered::new(BufReader::with_capacity(COPY_BYTES, input), &budget);
    let mut archive = Archive::new(metered);
    let buffer = vec![0; COPY_BYTES];
    let mut unpacker = Unpacker { tree, limits, entries: 0, bytes: 0, directories: Vec::new(), buffer };
    let mut entries = archive.entries().map_err(broken)?;
    while let Some(entry) = budget.next(|| entries.next()) {
        let mut entry = entry.map_err(broken)?;
        unpacker.entry(&mut entry)?;
        // What is left of it is no part of what describes the next.
        io::copy(&mut entry, &mut io::sink()).map_err(broken)?;
    }
    let opaque = unpacker.finish()?;
    let implied = std::mem::take(&mut unpacker.tree.implied).into_iter().collect();
    // Padding behind the last entry is part of what is hashed: it is read to its end.
    io::copy(&mut archive.into_inner().into_inner(), &mut io::sink()).map_err(broken)?;
    Ok(Unpacked { opaque, implied })
}

/// The archive, or its compression, cannot be read on.
pub(crate) fn broken(error: io::Error) -> Failure {
    invalid(format!("archive: {error}"))
}

struct Unpacker<'a> {
    tree: Tree,
    limits: &'a Limits,
    entries: u64,
    /// Logical bytes of files: a hole costs an archive nothing.
    bytes: u64,
    /// Directories and their times, set last: what is put into one changes its time.
    directories: Vec<(Vec<u8>, Attributes)>,
    /// What a file's content passes through.
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
                true => Ok(0), // left blank, as some tools do
                false => field.map_err(|error| refused(&error.to_string())),
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
            // The root of the layer: only its attributes are of interest.
            let set = if kind.is_dir() { self.tree.root().attributes(attributes, false) } else { Ok(()) };
            return set.map_err(|errno| at(&shown, errno));
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if let Some(hidden) = name.strip_prefix(b".wh.") {
            return self
                .whiteout(&path, hidden)
                .map_err(|error| error.unwrap_or_else(|errno| at(&shown, errno)));
        }
        // A file finds out itself: mostly there is nothing in its way.
        if !is_file(kind) {
            self.clear(&path, kind).map_err(|errno| at(&shown, errno))?;
        }
        self.make(entry, &path, attributes).map_err(|error| match error {
            Trouble::Kernel(errno) => at(&shown, errno),
            Trouble::Io(error) => at_io(&shown, &error),
            Trouble::Archive(why) => refused(&why),
        })
    }

    /// A directory entry keeps a directory that is there; everything else starts anew. A directory in the place of a
    /// whiteout hides what the whiteout hid.
    fn clear(&mut self, path: &[u8], kind: EntryType) -> Result<(), Errno> {
        let place = self.tree.place(path)?;
        if kind.is_dir() && place.is_directory() {
            return Ok(());
        }
        let is_hiding = kind.is_dir() && place.is_whiteout();
        if place.clear()? {
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
    ) -> Result<(), Trouble> {
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
                let target = clean(&link).map_err(|why| Trouble::Archive(format!("its target {why}")))?;
                Some(self.tree.existing(&target)?)
            }
            _ => None,
        };
        let place = self.tree.place(path)?;
        match kind {
            EntryType::Directory => {
                match place.directory() {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
                self.tree.implied.remove(path);
                self.directories.push((path.to_vec(), attributes));
            }
            EntryType::Symlink => place.symlink(&link)?,
            EntryType::Link => match &target {
                // What it links to has the attributes already.
                Some(target) => return Ok(place.hard_link(target)?),
                None => return Err(Trouble::Archive("it links to nothing".to_owned())),
            },
            EntryType::Char => place.node(FileType::CharacterDevice, device.0, device.1)?,
            EntryType::Block => place.node(FileType::BlockDevice, device.0, device.1)?,
            EntryType::Fifo => place.node(FileType::Fifo, 0, 0)?,
            _ => return Ok(()), // nothing that a file system holds
        }
        let place = self.tree.place(path)?;
        place.attributes(attributes, kind == EntryType::Symlink)?;
        for (name, value) in xattrs {
            place.xattr(&name, &value)?;
        }
        Ok(())
    }

    fn make_file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &[u8],
        attributes: Attributes,
        xattrs: &[Xattr],
    ) -> Result<(), Trouble> {
        let is_sparse = entry.header().entry_type() == EntryType::GNUSparse;
        let place = self.tree.place(path)?;
        let (mut file, has_replaced) = place.file(attributes.mode)?;
        match is_sparse {
            true => copy_sparse(entry, &mut file)?,
            false => copy(entry, &mut file, &mut self.buffer)?,
        }
        Place::attributes_of(&file, attributes)?;
        for (name, value) in xattrs {
            place.xattr(name, value)?;
        }
        if has_replaced {
            self.tree.forget(path);
        }
        Ok(())
    }

    /// `Err(Ok(…))`: refused; `Err(Err(…))`: the kernel.
    fn whiteout(&mut self, path: &[u8], hidden: &[u8]) -> Result<(), Result<Failure, Errno>> {
        if hidden == b".wh..opq" {
            let directory = path.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |at| &path[..at]);
            let made = self.tree.place(path).map(drop).map_err(Err);
            self.tree.opaque.push(directory.to_vec());
            return made;
        }
        if hidden.starts_with(b".wh.") {
            return Ok(()); // AUFS' own bookkeeping
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(Ok(invalid(format!("entry {:?}: it hides nothing", String::from_utf8_lossy(path)))));
        }
        let mut target = path[..path.len() - hidden.len() - b".wh.".len()].to_vec();
        target.extend_from_slice(hidden);
        let place = self.tree.place(&target).map_err(Err)?;
        match place.kind() {
            // It hides what layers below have, not what this one has under that name.
            Some(FileType::Directory) => self.tree.opaque.push(target.clone()),
            Some(_) => {}
            None => place.whiteout().map_err(Err)?,
        }
        Ok(())
    }

    /// Times of directories; gives the opaque ones.
    fn finish(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        for (path, attributes) in std::mem::take(&mut self.directories).into_iter().rev() {
            let found = match self.tree.existing(&path) {
                Err(Errno::NOENT | Errno::NOTDIR) => continue, // a later entry has replaced what it was in
                found => found.map_err(|errno| at(&String::from_utf8_lossy(&path), errno))?,
            };
            let place = Place::of(&found);
            if place.is_directory() {
                place
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

enum Trouble {
    Kernel(Errno),
    Io(io::Error),
    Archive(String),
}

impl From<Errno> for Trouble {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// An entry's name without `.`, empty parts and a leading `/`; empty for the root.
fn clean(name: &[u8]) -> Result<Vec<u8>, &'static str> {
    if name.len() > PATH_BYTES_MAX {
        return Err("is longer than a path may be");
    }
    if name.contains(&0) {
        return Err("holds a NUL");
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

/// Name and value.
type Xattr = (Vec<u8>, Vec<u8>);

/// Extended attributes of an entry's PAX records.
fn xattrs<R: Read>(entry: &mut Entry<'_, R>) -> Result<Vec<Xattr>, Trouble> {
    let mut xattrs = Vec::new();
    for record in entry.pax_extensions()?.into_iter().flatten() {
        let record = record?;
        if let Some(name) = record.key_bytes().strip_prefix(XATTR_PREFIX) {
            // overlayfs' own marks are for us to make, not for images: they would hide files of lower layers.
            if !name.starts_with(b"trusted.overlay.") {
                xattrs.push((name.to_vec(), record.value_bytes().to_vec()));
            }
        }
    }
    Ok(xattrs)
}

/// What has content of its own.
fn is_file(kind: EntryType) -> bool {
    matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse)
}

fn copy(entry: &mut impl Read, file: &mut File, buffer: &mut [u8]) -> io::Result<()> {
    loop {
        match entry.read(buffer)? {
            0 => return Ok(()),
            count => file.write_all(&buffer[..count])?,
        }
    }
}

/// Holes stay holes: zeros are skipped over, and the length is set at the end.
fn copy_sparse(entry: &mut impl Read, file: &mut File) -> Result<(), Trouble> {
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

fn at(entry: &str, errno: Errno) -> Failure {
    at_io(entry, &errno.into())
}

/// What the disk lacks is ours; what the kernel refuses of a name or a link is the archive's.
fn at_io(entry: &str, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::NoSpace,
        _ => FailureKind::Invalid,
    };
    failure(kind, format!("entry {entry:?}: {error}"))
}

#[cfg(test)]
mod tests;
