//! Directories without an entry of their own: an archive has `a/b` but no `a`. Such directories are created
//! with mode 0755 for root, and then get owner, mode, times and extended attributes of the topmost directory
//! with this name in the lower layers, as in containerd (2.x, `pkg/archive`, mkparent). Otherwise a layer
//! that adds one file to /home/alice would change the owner of /home/alice to root.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_job::Failure;
use rustix::fs::{Mode, Timespec, Timestamps, XattrFlags, fchmod, fchown, fstat, futimens, openat2};
use rustix::fs::{fgetxattr, flistxattr, fsetxattr};
use rustix::io::Errno;

use super::layer::at;
use super::outline::Visible;
use super::tree::{DIRECTORY, INSIDE};
use crate::failure::io_failure;

/// Maximum length in bytes of the list of extended attributes and of one value: the kernel's limits.
const XATTR_BYTES_MAX: usize = 64 << 10;

/// Copies the attributes of the `implied` directories from the layers `below`, topmost first. Both are
/// untrusted: links cannot lead out of a layer. Returns whether root without capabilities may enter all of these directories.
pub(crate) fn copy_attributes(
    directory: &Path,
    implied: &[Vec<u8>],
    below: &[PathBuf],
) -> Result<bool, Failure> {
    if implied.is_empty() {
        return Ok(true);
    }
    let open = |path: &Path| {
        let opened = rustix::fs::open(path, DIRECTORY, Mode::empty());
        opened.map_err(|errno| io_failure("open", path, &errno.into()))
    };
    let own = open(directory)?;
    let below = below.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    let mut are_entered = true;
    for path in implied {
        are_entered &= copy_attributes_of(&own, path, &below)
            .map_err(|errno| at(&String::from_utf8_lossy(path), errno))?;
    }
    Ok(are_entered)
}

fn copy_attributes_of(own: &OwnedFd, path: &[u8], below: &[OwnedFd]) -> Result<bool, Errno> {
    let Some(known) = find(below, path)? else { return Ok(true) };
    match openat2(own, path, DIRECTORY, Mode::empty(), INSIDE) {
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(true), // a later entry replaced one of its parents
        opened => copy(&known, &opened?),
    }
}

/// The topmost directory with this path in the lower layers; `None` if there is none or another type of entry
/// hides it.
fn find(below: &[OwnedFd], path: &[u8]) -> Result<Option<OwnedFd>, Errno> {
    for root in below {
        match openat2(root, path, DIRECTORY, Mode::empty(), INSIDE) {
            Ok(found) => return Ok(Some(found)),
            Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

/// Copies attributes; returns whether root without capabilities may enter the directory.
fn copy(from: &OwnedFd, to: &OwnedFd) -> Result<bool, Errno> {
    let about = fstat(from)?;
    let (uid, gid) = (rustix::fs::Uid::from_raw(about.st_uid), rustix::fs::Gid::from_raw(about.st_gid));
    fchown(to, Some(uid), Some(gid))?;
    fchmod(to, Mode::from_raw_mode(about.st_mode & 0o7777))?;
    let has_list = copy_xattrs(from, to)?;
    let time = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    futimens(
        to,
        &Timestamps {
            last_access: time(about.st_atime, about.st_atime_nsec as _),
            last_modification: time(about.st_mtime, about.st_mtime_nsec as _),
        },
    )?;
    Ok(!has_list && Visible::of_status(&about).is_entered())
}

/// Copies all extended attributes except `trusted.*`: those of overlayfs apply only to their own directory. Returns
/// whether an access control list is among them.
fn copy_xattrs(from: &OwnedFd, to: &OwnedFd) -> Result<bool, Errno> {
    let mut names = vec![0; XATTR_BYTES_MAX];
    let length = match flistxattr(from, &mut names) {
        Err(Errno::NOTSUP) => return Ok(false),
        length => length?,
    };
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut has_list = false;
    for name in names.filter(|name| !name.starts_with(b"trusted.")) {
        has_list |= name.starts_with(b"system.");
        let mut value = vec![0; XATTR_BYTES_MAX];
        let length = fgetxattr(from, name, &mut value)?;
        match fsetxattr(to, name, &value[..length], XattrFlags::empty()) {
            Err(Errno::NOTSUP | Errno::PERM) => {}
            set => set?,
        }
    }
    Ok(has_list)
}
