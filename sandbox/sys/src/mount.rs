//! Mounts: calls with paths (mount(2)) and calls with descriptors (Linux 5.2, `mount_setattr` 5.12).

use core::ffi::CStr;

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use crate::arch::call;
use crate::{Errno, Fd, FdRef, number};

/// Flag of mount(2): read-only.
pub const MS_RDONLY: u64 = 1;
/// Flag of mount(2): set-user-ID bits and file capabilities have no effect.
pub const MS_NOSUID: u64 = 2;
/// Flag of mount(2): device files cannot be opened.
pub const MS_NODEV: u64 = 4;
/// Flag of mount(2): files cannot be executed.
pub const MS_NOEXEC: u64 = 8;
/// Flag of mount(2): change the flags of an existing mount.
pub const MS_REMOUNT: u64 = 32;
/// Flag of mount(2) together with [`MS_REMOUNT`]: change this mount only, not the file system.
pub const MS_BIND: u64 = 4096;
/// Flag of mount(2) together with a propagation flag: change all submounts, too.
pub const MS_REC: u64 = 16384;
/// Propagation type of mount(2): no propagation.
pub const MS_PRIVATE: u64 = 1 << 18;
/// Propagation type of mount(2): from the peer group only.
pub const MS_SLAVE: u64 = 1 << 19;
/// Propagation type of mount(2): in both directions.
pub const MS_SHARED: u64 = 1 << 20;
/// Flag of umount2(2): lazy unmount.
pub const MNT_DETACH: usize = 2;
/// Flag: operate on the descriptor itself; the path is empty.
pub const AT_EMPTY_PATH: usize = 0x1000;
/// Flag: apply to the whole tree of mounts.
pub const AT_RECURSIVE: usize = 0x8000;
/// Mount attribute: read-only (mount_setattr(2), fsmount(2)).
pub const MOUNT_ATTR_RDONLY: u64 = 1;
/// Mount attribute: idmapped with the given user namespace (Linux 5.12).
pub const MOUNT_ATTR_IDMAP: u64 = 0x10_0000;
/// Mask of the mount attributes for access times. They form one field, so setting one requires clearing all.
pub const MOUNT_ATTR_ATIME: u64 = 0x70;

/// Calls mount(2). `data` is the option string.
pub fn mount(
    source: Option<&CStr>,
    target: &CStr,
    kind: Option<&CStr>,
    flags: u64,
    data: Option<&CStr>,
) -> Result<(), Errno> {
    let flags = MountFlags::from_bits_retain(flags as u32);
    rustix::mount::mount(source.unwrap_or(c"none"), target, kind.unwrap_or(c""), flags, data)
        .map_err(Errno::from)
}

/// Unmounts a file system (umount2(2)).
pub fn unmount(target: &CStr, flags: usize) -> Result<(), Errno> {
    rustix::mount::unmount(target, UnmountFlags::from_bits_retain(flags as u32)).map_err(Errno::from)
}

/// Changes the root mount (pivot_root(2)).
pub fn pivot_root(new_root: &CStr, put_old: &CStr) -> Result<(), Errno> {
    rustix::process::pivot_root(new_root, put_old).map_err(Errno::from)
}

/// Clones the mount at `path` as a detached tree (open_tree with OPEN_TREE_CLONE, Linux 5.2); `flags`:
/// [`AT_EMPTY_PATH`], [`AT_RECURSIVE`].
pub fn clone_tree(directory: FdRef<'_>, path: &CStr, flags: usize) -> Result<Fd, Errno> {
    let flags = OpenTreeFlags::from_bits_retain(flags as u32)
        | OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(directory, path, flags)?.into())
}

/// Attaches the detached tree `mount` at the file or directory that `target` refers to (move_mount, Linux 5.2).
pub fn attach(mount: FdRef<'_>, target: FdRef<'_>) -> Result<(), Errno> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, c"", target, c"", flags).map_err(Errno::from)
}

/// Creates a configuration context for a new file system (fsopen, Linux 5.2).
pub fn fsopen(kind: &CStr) -> Result<Fd, Errno> {
    Ok(rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?.into())
}

/// Sets an option of a context, with or without a value (fsconfig, Linux 5.2).
pub fn fs_option(context: FdRef<'_>, key: &CStr, value: Option<&CStr>) -> Result<(), Errno> {
    match value {
        Some(value) => rustix::mount::fsconfig_set_string(context, key, value),
        None => rustix::mount::fsconfig_set_flag(context, key),
    }
    .map_err(Errno::from)
}

/// Creates the configured file system (fsconfig with FSCONFIG_CMD_CREATE, Linux 5.2).
pub fn fs_create(context: FdRef<'_>) -> Result<(), Errno> {
    rustix::mount::fsconfig_create(context).map_err(Errno::from)
}

/// Creates a detached mount of a file system that [`fs_create`] created (fsmount, Linux 5.2); `attributes`:
/// MOUNT_ATTR_….
pub fn fsmount(context: FdRef<'_>, attributes: u64) -> Result<Fd, Errno> {
    let attributes = MountAttrFlags::from_bits_retain(attributes as u32);
    Ok(rustix::mount::fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?.into())
}

/// Changes of mount attributes, `struct mount_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes {
    /// MOUNT_ATTR_… flags to set.
    pub set: u64,
    /// MOUNT_ATTR_… flags to clear.
    pub clear: u64,
    /// Propagation type: MS_PRIVATE, MS_SLAVE, MS_SHARED, or 0 for no change.
    pub propagation: u64,
    /// Descriptor of a user namespace, for MOUNT_ATTR_IDMAP.
    pub user_namespace: u64,
}

/// Changes the attributes of the mount to which `mount` refers (mount_setattr, **Linux 5.12**: ENOSYS before); `flags`:
/// [`AT_RECURSIVE`].
pub fn set_attributes(mount: FdRef<'_>, attributes: &Attributes, flags: usize) -> Result<(), Errno> {
    let arguments = [
        mount.argument(),
        c"".as_ptr() as usize,
        AT_EMPTY_PATH | flags,
        core::ptr::from_ref(attributes) as usize,
        size_of::<Attributes>(),
    ];
    // SAFETY: the path is a static empty string; the kernel reads exactly the size given of a borrowed `repr(C)` value.
    unsafe { call(number::MOUNT_SETATTR, arguments) }.map(drop)
}
