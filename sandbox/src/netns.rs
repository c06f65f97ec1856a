//! Network namespaces kept by name: a bind mount of /proc/PID/ns/net on a file, as ip-netns(8) does it. It lives in
//! the host's mount namespace, so that CNI plugins find it, also those in other mount namespaces that see /run/netns
//! (CRI 5.8). Whether the mount travels there is up to the directory's mount being shared; where it is not
//! (no systemd), the plugins that share our mount namespace still find it.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{FsType, statfs};

use crate::{Error, umask};

/// What statfs(2) says of a namespace file (include/uapi/linux/magic.h).
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Keeps the network namespace of process `pid` at `path`, which is made with its parents. Where a namespace is
/// already kept there it is let go first, so that a repeated call ends in the same state.
///
/// # Errors
/// [`Error::Kernel`]; nothing is mounted then, and [`unpin`] removes the file.
pub fn pin(pid: u32, path: &Path) -> Result<(), Error> {
    unpin(path)?;
    // As ip-netns(8) makes them: every user may list the names.
    let _mask = umask::Public::begin();
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|error| Error::io("make directory", parent.display(), &error))?;
    }
    // Read-only and for root: the file under the mount is never to be used itself.
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o444)
        .open(path)
        .map_err(|error| Error::io("make", path.display(), &error))?;
    let source = format!("/proc/{pid}/ns/net");
    mount(Some(source.as_str()), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|errno| Error::kernel("bind", format!("{source} on {}", path.display()), errno))
}

/// Lets go of what [`pin`] kept. The namespace ends when its last process has. Not there is success.
///
/// # Errors
/// [`Error::Kernel`] where the file cannot be unmounted or removed.
pub fn unpin(path: &Path) -> Result<(), Error> {
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // EINVAL: a file, but no mount.
        Ok(()) | Err(Errno::ENOENT | Errno::EINVAL) => {}
        Err(errno) => return Err(Error::kernel("unmount", path.display(), errno)),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("remove", path.display(), &error))
        }
        _ => Ok(()),
    }
}

/// Whether a namespace is kept at `path`: not after a reboot, nor where only the file is.
pub fn exists(path: &Path) -> bool {
    // The type of `FsType` differs between C libraries; the number does not.
    statfs(path).is_ok_and(|found| found.filesystem_type() == FsType(NSFS_MAGIC as _))
}
