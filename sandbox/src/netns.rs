//! Named network namespaces: bind mounts of /proc/PID/ns/net on a file, like those of ip-netns(8). The mounts are in
//! the host's mount namespace, so that CNI plugins find them, including plugins in other mount namespaces that see
//! /run/netns (CRI 5.8). A mount propagates to other mount namespaces only if the mount of the directory is shared;
//! otherwise (without systemd) only plugins in coracle's own mount namespace find the network namespace.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{FsType, statfs};

use crate::{Error, disk, umask};

/// File system type of a namespace file (include/uapi/linux/magic.h).
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Bind-mounts the network namespace of process `pid` at `path`, which is created with its parents. An earlier
/// namespace at `path` is unmounted first, so the call can be repeated.
///
/// # Errors
/// [`Error::Kernel`]; nothing is then mounted, and [`unpin`] removes the file.
pub fn pin(pid: u32, path: &Path) -> Result<(), Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.pin_netns(pid, path);
    }
    unpin(path)?;
    // Every user may list the names, as with ip-netns(8).
    let _mask = umask::Public::begin();
    if let Some(parent) = path.parent() {
        disk::create_dir_all(parent)
            .map_err(|error| Error::io("make directory", parent.display(), &error))?;
    }
    // Read-only and for root, because the file below the mount is never used itself.
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

/// Unmounts a namespace that [`pin`] mounted and removes the file. The namespace ends with its last process. A missing
/// file is success.
///
/// # Errors
/// [`Error::Kernel`] if the file cannot be unmounted or removed.
pub fn unpin(path: &Path) -> Result<(), Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.unpin_netns(path);
    }
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // EINVAL: the file is not a mount point.
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

/// Whether a namespace is mounted at `path`; false if only the file exists, as after a reboot.
pub fn exists(path: &Path) -> bool {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.has_netns(path);
    }
    // The type of `FsType` differs between C libraries; the number does not.
    statfs(path).is_ok_and(|found| found.filesystem_type() == FsType(NSFS_MAGIC as _))
}
