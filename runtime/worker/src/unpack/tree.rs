//! The tree of one layer while it is unpacked. Every path is resolved within the layer's root by descriptors
//! (openat2): a symbolic link of the layer cannot lead out of it, nor through magic links of /proc.
//!
//! Lower layers are ignored: a parent that is a symbolic link in a lower layer becomes a directory here, as
//! in other runtimes that unpack each layer separately. A parent that is a symbolic link of this layer to a missing
//! directory creates that directory (containerd 2.4, pkg/archive).

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags, chmodat,
    chownat, fchmod, fchown, fstat, futimens, linkat, lsetxattr, makedev, mkdirat, mknodat, openat2,
    readlinkat, setxattr, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::layer::Unpacked;
use super::outline::Visible;

/// Owner, mode and time of an entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Mode including the setuid, setgid and sticky bits.
    pub(super) mode: u32,
    /// Times of the last modification and access.
    pub(super) mtime: Timespec,
    pub(super) atime: Timespec,
}

impl Attributes {
    fn times(self) -> Timestamps {
        Timestamps { last_access: self.atime, last_modification: self.mtime }
    }
}

/// An attribute `security.*` other than file capabilities, of which containerd sets all: signatures of IMA, labels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SecurityAttribute {
    pub(super) path: Vec<u8>,
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
}

/// The tree of a layer.
pub(super) struct Tree {
    root: OwnedFd,
    /// Parent directory of the last entry, which is usually also that of the next entry: its path and
    /// descriptor. `None` if it was removed.
    last: Option<(Vec<u8>, OwnedFd)>,
    /// The last result of [`Tree::visible`], which also holds for other files of this parent directory.
    seen: Option<(Vec<u8>, Option<Vec<u8>>)>,
    /// Opaque directories, whose overlayfs attribute is set by the caller.
    opaque: Paths,
    /// Directories without an entry of their own, up to [`IMPLIED_BYTES_MAX`].
    implied: Paths,
    /// Attributes that are set by the caller: the path, a NUL and the name.
    security: Paths,
}

/// Paths with a value each.
#[derive(Default)]
struct Paths {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Size in bytes of all paths and values that were recorded, including removed ones.
    bytes: usize,
}

/// The position of an entry: its open parent directory and its name.
pub(super) struct Position<'a> {
    directory: BorrowedFd<'a>,
    name: &'a [u8],
}

/// Maximum size in bytes of the names of all implied directories of one layer, which are sent in one
/// message. Further directories keep their default attributes.
const IMPLIED_BYTES_MAX: usize = 2 << 20;
/// Maximum size in bytes of the names of all opaque directories of one layer, which are sent in the same message.
const OPAQUE_BYTES_MAX: usize = 3 << 20;
/// Maximum size in bytes of all [`SecurityAttribute`]s of one layer, which are sent in the same message: those of some
/// thousand signed files.
const SECURITY_BYTES_MAX: usize = 2 << 20;
/// Size in bytes that each record counts in addition to its texts.
const RECORD_BYTES: usize = 16;
/// Maximum number of symbolic links in a path, as in the kernel.
const LINKS_MAX: usize = 40;

pub(super) const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
pub(super) const INSIDE: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

impl Tree {
    /// Creates a tree in an existing directory.
    pub(super) fn new(path: &Path) -> Result<Self, Errno> {
        let root = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        let (opaque, implied, security) = Default::default();
        Ok(Self { root, last: None, seen: None, opaque, implied, security })
    }

    /// The reason for refusing the archive if it has more opaque directories or security attributes than are recorded.
    pub(super) fn excess(&self) -> Option<String> {
        let opaque = (&self.opaque, OPAQUE_BYTES_MAX, "names of opaque directories");
        let security = (&self.security, SECURITY_BYTES_MAX, "security attributes");
        let too_long = [opaque, security].into_iter().find(|(paths, limit, _)| paths.bytes > *limit);
        too_long.map(|(_, limit, what)| format!("more than {limit} bytes of {what}"))
    }

    /// Everything that was recorded.
    pub(super) fn into_unpacked(self, has_outline: bool) -> Unpacked {
        let security = self.security.values.into_iter().map(|(place, value)| {
            let mut parts = place.splitn(2, |byte| *byte == 0).map(<[u8]>::to_vec);
            let mut part = || parts.next().unwrap_or_default();
            SecurityAttribute { path: part(), name: part(), value }
        });
        Unpacked {
            opaque: self.opaque.values.into_keys().collect(),
            implied: self.implied.values.into_keys().collect(),
            security: security.collect(),
            has_outline,
            sums: Vec::new(),
        }
    }

    /// Opens the parent directory of `path` (normalised, relative); creates missing directories.
    pub(super) fn position<'a>(&'a mut self, path: &'a [u8]) -> Result<Position<'a>, Errno> {
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], path),
        };
        if parent.is_empty() {
            return Ok(Position { directory: self.root.as_fd(), name });
        }
        if self.last.as_ref().is_none_or(|(known, _)| known != parent) {
            let directory = self.open_or_make(parent)?;
            self.last = Some((parent.to_vec(), directory));
        }
        let directory = self.last.as_ref().map_or(self.root.as_fd(), |(_, directory)| directory.as_fd());
        Ok(Position { directory, name })
    }

    /// Drops cached data of `path`, which was removed, and the cached parent, which may be below it.
    pub(super) fn forget(&mut self, path: &[u8]) -> Result<(), Errno> {
        (self.last, self.seen) = (None, None);
        if [&self.opaque, &self.implied, &self.security].iter().all(|paths| paths.values.is_empty()) {
            return Ok(());
        }
        let path = self.resolve(path, false)?;
        for paths in [&mut self.opaque, &mut self.implied, &mut self.security] {
            paths.forget(&path);
        }
        Ok(())
    }

    /// Records an opaque directory, by its path without links, which later entries may replace.
    pub(super) fn opaque(&mut self, path: &[u8]) -> Result<(), Errno> {
        let path = self.resolve(path, true)?;
        self.opaque.insert(path, Vec::new());
        Ok(())
    }

    /// Records an attribute of the entry at `path`, by its path without links.
    pub(super) fn security(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let path = self.resolve(path, false)?;
        self.security.insert([&path, &b"\0"[..], name].concat(), value.to_vec());
        Ok(())
    }

    /// Records that an existing directory has an entry of its own.
    pub(super) fn explicit(&mut self, path: &[u8]) -> Result<(), Errno> {
        if !self.implied.values.is_empty() {
            let path = self.resolve(path, true)?;
            self.implied.values.remove(&path);
        }
        Ok(())
    }

    /// Sets the overlayfs attribute that hides the content of lower layers in this directory.
    pub(super) fn mark_opaque(&self, path: &[u8]) -> Result<(), Errno> {
        let path = if path.is_empty() { b"." } else { path };
        let directory = openat2(&self.root, path, DIRECTORY, Mode::empty(), INSIDE)?;
        rustix::fs::fsetxattr(&directory, "trusted.overlay.opaque", b"y", XattrFlags::empty())
    }

    /// Sets an attribute of the namespace `security`, which requires CAP_SYS_ADMIN; ignored if a later entry removed the path, or
    /// on a file system without extended attributes.
    pub(super) fn set_security(&self, attribute: &SecurityAttribute) -> Result<(), Errno> {
        if !attribute.name.starts_with(b"security.") {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match openat2(&self.root, attribute.path.as_slice(), flags, Mode::empty(), INSIDE) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            file => file?,
        };
        // The link leads to the object of the descriptor, also if that is a symbolic link.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match setxattr(path, attribute.name.as_slice(), &attribute.value, XattrFlags::empty()) {
            Err(Errno::NOTSUP) => Ok(()),
            set => set,
        }
    }

    fn open_or_make(&mut self, path: &[u8]) -> Result<OwnedFd, Errno> {
        match openat2(&self.root, path, DIRECTORY, Mode::empty(), INSIDE) {
            // The parent may be a whiteout and not a directory, or a link to a directory of a lower layer.
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            opened => return opened,
        }
        let path = &self.resolve(path, true)?[..];
        let mut directory = self.root.try_clone().map_err(|_| Errno::MFILE)?;
        for (at, byte) in path.iter().chain(b"/").enumerate() {
            if *byte != b'/' {
                continue;
            }
            let (above, name) = match path[..at].iter().rposition(|byte| *byte == b'/') {
                Some(slash) => (&path[..slash], &path[slash + 1..at]),
                None => (&b""[..], &path[..at]),
            };
            if !above.is_empty() {
                directory = openat2(&self.root, above, DIRECTORY, Mode::empty(), INSIDE)?;
            }
            let position = Position { directory: directory.as_fd(), name };
            if position.is_whiteout()? {
                position.clear()?;
                self.opaque.insert(path[..at].to_vec(), Vec::new());
            }
            let mode = Mode::from_raw_mode(0o755);
            match mkdirat(&directory, name, mode) {
                Ok(()) => {
                    // A directory in one with the set-group-ID bit inherits it; containerd removes it (pkg/archive, `mkdir`).
                    chmodat(&directory, name, mode, AtFlags::empty())?;
                    self.imply(&path[..at]);
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        openat2(&self.root, path, DIRECTORY, Mode::empty(), INSIDE)
    }

    /// The path without symbolic links and `..`, within the root; components that do not exist are kept (containerd,
    /// continuity's `fs.RootPath`). If the last component is a link, it is followed only with `follows_last`.
    fn resolve(&self, path: &[u8], follows_last: bool) -> Result<Vec<u8>, Errno> {
        let components =
            |path: &[u8]| -> Vec<Vec<u8>> { path.rsplit(|byte| *byte == b'/').map(<[u8]>::to_vec).collect() };
        let (mut rest, mut done, mut links) = (components(path), Vec::new(), 0);
        while let Some(name) = rest.pop() {
            let above = done.len();
            match name.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    done.truncate(done.iter().rposition(|byte| *byte == b'/').unwrap_or(0));
                    continue;
                }
                _ if done.is_empty() => done.extend(name),
                _ => done.extend([b"/", name.as_slice()].concat()),
            }
            if rest.is_empty() && !follows_last {
                break;
            }
            let Some(target) = self.link_at(&done)? else { continue };
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP);
            }
            done.truncate(if target.starts_with(b"/") { 0 } else { above });
            rest.extend(components(&target));
        }
        Ok(done)
    }

    /// The path without links of the file at `path`, whose parent directory exists; `None` if root without capabilities may not enter
    /// one of its directories, or if it is not known.
    pub(super) fn visible(&mut self, path: &[u8]) -> Option<Vec<u8>> {
        let Some(slash) = path.iter().rposition(|byte| *byte == b'/') else { return Some(path.to_vec()) };
        let parent = &path[..slash];
        if self.seen.as_ref().is_none_or(|(known, _)| known != parent) {
            // An error, as that of a path that is too long, is none of the unpacking.
            let real = self.resolve(parent, true).ok().filter(|real| self.is_entered(real));
            self.seen = Some((parent.to_vec(), real));
        }
        let real = self.seen.as_ref().and_then(|(_, real)| real.as_ref())?;
        Some(match real.as_slice() {
            b"" => path[slash + 1..].to_vec(),
            real => [real, &path[slash..]].concat(),
        })
    }

    /// Whether root without capabilities may search the directory at `path`, which has no symbolic links, and all directories above it.
    fn is_entered(&self, path: &[u8]) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        ends.chain([path.len()]).filter(|end| *end > 0).all(|end| {
            let about = statat(&self.root, &path[..end], AtFlags::SYMLINK_NOFOLLOW);
            about.is_ok_and(|about| Visible::of_status(&about).is_entered())
        })
    }

    /// A directory has other attributes than before.
    pub(super) fn look_again(&mut self) {
        self.seen = None;
    }

    /// The target of the symbolic link at `path`; `None` if there is none.
    fn link_at(&self, path: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat2(&self.root, path, flags, Mode::empty(), INSIDE) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            found => found?,
        };
        match readlinkat(&found, "", Vec::new()) {
            Ok(target) => Ok(Some(target.into_bytes())),
            Err(Errno::NOENT | Errno::INVAL) => Ok(None), // no link
            Err(errno) => Err(errno),
        }
    }

    fn imply(&mut self, path: &[u8]) {
        if self.implied.bytes <= IMPLIED_BYTES_MAX {
            self.implied.insert(path.to_vec(), Vec::new());
        }
    }

    /// Opens the parent directory of an existing file, for a hard link to it. Links and `..` in `path` stay within the root. If
    /// `path` ends with a slash, a symbolic link in its last component is followed (containerd 2.4, pkg/archive, hardlinkRootPath).
    pub(super) fn existing(&self, path: &[u8]) -> Result<(OwnedFd, Vec<u8>), Errno> {
        let path = &match path {
            [.., b'/'] | [.., b'/', b'.'] => self.resolve(path, true)?,
            path => path.to_vec(),
        }[..];
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at + 1], &path[at + 1..]),
            None => (&b"."[..], path),
        };
        let parent = match openat2(&self.root, parent, DIRECTORY, Mode::empty(), INSIDE) {
            // A path through what is missing or no directory, and `..`.
            Err(Errno::NOENT | Errno::NOTDIR) => {
                let parent = [b"./", self.resolve(parent, true)?.as_slice()].concat();
                openat2(&self.root, parent, DIRECTORY, Mode::empty(), INSIDE)?
            }
            parent => parent?,
        };
        match name {
            b"" | b"." | b".." => Err(Errno::ISDIR),
            name => Ok((parent, name.to_vec())),
        }
    }
}

impl Paths {
    fn insert(&mut self, path: Vec<u8>, value: Vec<u8>) {
        if self.values.get(&path) != Some(&value) {
            self.bytes += path.len() + value.len() + RECORD_BYTES;
            self.values.insert(path, value);
        }
    }

    /// Removes `path`, what begins with it and a NUL, and all paths below it.
    fn forget(&mut self, path: &[u8]) {
        self.values.remove(path);
        // The byte of each range's end follows that of its start.
        for (first, end) in [(b"\0", b"\x01"), (b"/", b"0")] {
            let range = [path, first].concat()..[path, end].concat();
            while let Some(known) = self.values.range(range.clone()).next().map(|(known, _)| known.clone()) {
                self.values.remove(&known);
            }
        }
    }
}

impl<'a> Position<'a> {
    /// The position of a file that [`Tree::existing`] returned.
    pub(super) fn of((directory, name): &'a (OwnedFd, Vec<u8>)) -> Self {
        Self { directory: directory.as_fd(), name }
    }

    /// The existing entry; `None` if there is none.
    fn status(&self) -> Result<Option<Stat>, Errno> {
        match statat(self.directory, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            status => status.map(Some),
        }
    }

    /// Type of the existing entry; `None` if there is none.
    pub(super) fn kind(&self) -> Result<Option<FileType>, Errno> {
        Ok(self.status()?.map(|status| FileType::from_raw_mode(status.st_mode)))
    }

    /// Whether a directory exists at this position; a directory entry does not replace it.
    pub(super) fn is_directory(&self) -> Result<bool, Errno> {
        Ok(self.kind()? == Some(FileType::Directory))
    }

    /// Whether a whiteout exists at this position.
    pub(super) fn is_whiteout(&self) -> Result<bool, Errno> {
        Ok(self.status()?.is_some_and(|status| {
            FileType::from_raw_mode(status.st_mode) == FileType::CharacterDevice && status.st_rdev == 0
        }))
    }

    /// Removes an earlier entry of this layer; returns whether there was one.
    pub(super) fn clear(&self) -> Result<bool, Errno> {
        match unlinkat(self.directory, self.name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(Errno::ISDIR | Errno::PERM) if self.is_directory()? => {
                let name = std::ffi::CString::new(self.name).map_err(|_| Errno::INVAL)?;
                coracle_trees::remove::empty(self.directory, &name)?; // does not follow symbolic links
                unlinkat(self.directory, self.name, AtFlags::REMOVEDIR)?;
                Ok(true)
            }
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn directory(&self) -> Result<(), Errno> {
        mkdirat(self.directory, self.name, Mode::from_raw_mode(0o700))
    }

    /// Creates a file, replacing an earlier entry; returns whether there was one.
    pub(super) fn file(&self, mode: u32) -> Result<(File, bool), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        let make = || rustix::fs::openat(self.directory, self.name, flags, mode).map(File::from);
        match make() {
            Err(Errno::EXIST) => self.clear().and_then(|was_there| Ok((make()?, was_there))),
            made => Ok((made?, false)),
        }
    }

    pub(super) fn symlink(&self, content: &[u8]) -> Result<(), Errno> {
        symlinkat(content, self.directory, self.name)
    }

    pub(super) fn hard_link(&self, (directory, name): &(OwnedFd, Vec<u8>)) -> Result<(), Errno> {
        linkat(directory, name.as_slice(), self.directory, self.name, AtFlags::empty())
    }

    pub(super) fn node(&self, kind: FileType, major: u32, minor: u32) -> Result<(), Errno> {
        mknodat(self.directory, self.name, kind, Mode::from_raw_mode(0o600), makedev(major, minor))
    }

    /// Creates a whiteout (overlayfs), which hides this name in lower layers.
    pub(super) fn whiteout(&self) -> Result<(), Errno> {
        self.node(FileType::CharacterDevice, 0, 0)
    }

    /// Sets the owner, then the mode (a change of the owner clears setuid), then the time. A symbolic link
    /// has no mode.
    pub(super) fn attributes(&self, attributes: Attributes, is_symlink: bool) -> Result<(), Errno> {
        // (uid_t)-1 means "unchanged", so such an owner is not set.
        let uid = (attributes.uid != u32::MAX).then(|| Uid::from_raw(attributes.uid));
        let gid = (attributes.gid != u32::MAX).then(|| Gid::from_raw(attributes.gid));
        chownat(self.directory, self.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        if !is_symlink {
            chmodat(
                self.directory,
                self.name,
                Mode::from_raw_mode(attributes.mode & 0o7777),
                AtFlags::empty(),
            )?;
        }
        self.times(attributes)
    }

    /// Sets the times.
    pub(super) fn times(&self, attributes: Attributes) -> Result<(), Errno> {
        utimensat(self.directory, self.name, &attributes.times(), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Sets the attributes of an open file that differ from those of its creation.
    pub(super) fn attributes_of(file: &File, attributes: Attributes) -> Result<(), Errno> {
        let about = fstat(file)?;
        let uid = (attributes.uid != u32::MAX && attributes.uid != about.st_uid).then_some(attributes.uid);
        let gid = (attributes.gid != u32::MAX && attributes.gid != about.st_gid).then_some(attributes.gid);
        let is_owned = uid.is_none() && gid.is_none();
        if !is_owned {
            fchown(file, uid.map(Uid::from_raw), gid.map(Gid::from_raw))?;
        }
        let mode = attributes.mode & 0o7777;
        if !is_owned || mode != about.st_mode & 0o7777 {
            fchmod(file, Mode::from_raw_mode(mode))?;
        }
        futimens(file, &attributes.times())
    }

    /// Sets an extended attribute; ignored on a file system without extended attributes, as in other
    /// runtimes.
    pub(super) fn xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let is_common = matches!(self.kind()?, Some(FileType::RegularFile | FileType::Directory));
        let set = match is_common {
            true => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = rustix::fs::openat(self.directory, self.name, flags, Mode::empty())?;
                rustix::fs::fsetxattr(&file, name, value, XattrFlags::empty())
            }
            // Links, devices and FIFOs: by name relative to the parent directory, because there is no system
            // call with descriptors before Linux 6.13. This process has one thread and uses no other relative
            // path.
            false => rustix::process::fchdir(self.directory)
                .and_then(|()| lsetxattr(self.name, name, value, XattrFlags::empty())),
        };
        match set {
            Err(Errno::NOTSUP) => Ok(()),
            // Links, devices and FIFOs cannot have them.
            Err(Errno::PERM) if !is_common && name.starts_with(b"user.") => Ok(()),
            set => set,
        }
    }
}
