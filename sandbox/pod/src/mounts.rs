//! Creates the mounts of a container through descriptors: targets are resolved inside the root ([`Root`]), and detached
//! trees are attached there.
//!
//! `mount_setattr` needs Linux 5.12. On older kernels flags are set by a remount through `/proc/self/fd/N`, where a
//! real procfs must be mounted. A remount changes only the top mount, so attributes for a whole tree give ENOSYS on
//! these kernels.

use core::ffi::CStr;

use coracle_sys::mount::{self, Attributes};
use coracle_sys::{Errno, Fd, FdRef, fs};
use coracle_wire::{Block, Propagation, SHARED_PROC};

use crate::init::PROC_ATTRIBUTES;
use crate::root::{KERNEL, Make, Root};

/// File system type of procfs (statfs(2)).
pub(crate) const PROC_SUPER_MAGIC: u64 = 0x9fa0;

/// Attributes of a tree after it has been attached.
pub(crate) struct Wanted {
    /// Attributes of the mount (MOUNT_ATTR_…).
    pub(crate) attributes: u64,
    /// Whether the attributes apply to all mounts of the tree.
    pub(crate) is_recursive: bool,
    /// Propagation type of the whole tree.
    pub(crate) propagation: Propagation,
}

/// The flag of mount(2) for a propagation type.
pub(crate) fn flag(propagation: Propagation) -> u64 {
    match propagation {
        Propagation::Private => mount::MS_PRIVATE,
        Propagation::Slave => mount::MS_SLAVE,
        Propagation::Shared => mount::MS_SHARED,
    }
}

/// Mounts a new file system on `target`, which is created if missing, and returns its identity.
pub(crate) fn filesystem(
    root: &Root,
    kind: &CStr,
    options: &Block<'_>,
    attributes: u64,
    target: &CStr,
) -> Result<Identity, Errno> {
    let context = mount::fsopen(kind)?;
    // What /proc/mounts shows as the device; "none" without it.
    mount::fs_option(context.borrow(), c"source", Some(kind))?;
    for option in options.iter() {
        set_option(context.borrow(), option)?;
    }
    mount::fs_create(context.borrow())?;
    let mounted = mount::fsmount(context.borrow(), attributes)?;
    attach_fresh(root, kind, &mounted, target)?;
    Ok(fs::stat(mounted.borrow())?.identity)
}

/// Identity of a file system: `(major, minor, inode)` of its root directory.
pub(crate) type Identity = (u32, u32, u64);

/// A procfs that another process has mounted, for a container in whose PID namespace the caller is not: a new procfs
/// would show the caller's namespace.
pub(crate) struct SharedProc {
    /// Before the first use a detached tree; afterwards the tree attached at the first target.
    tree: Fd,
    is_attached: bool,
}

impl SharedProc {
    /// Clones the mount at [`SHARED_PROC`] in the monitor's mount namespace.
    pub(crate) fn open() -> Result<Self, Errno> {
        let tree = mount::clone_tree(FdRef::WORKING_DIRECTORY, SHARED_PROC, 0)?;
        Ok(Self { tree, is_attached: false })
    }

    /// Clones the procfs that a container was started with, from /proc in that container's mount namespace, which the
    /// caller must be in.
    ///
    /// # Errors
    /// ESTALE if another file system is mounted there now.
    pub(crate) fn of_container(started_with: Identity) -> Result<Self, Errno> {
        let flags = fs::O_PATH | fs::O_DIRECTORY | fs::O_NOFOLLOW;
        let found = fs::open(FdRef::WORKING_DIRECTORY, c"/proc", flags, 0)?;
        if fs::stat(found.borrow())?.identity != started_with {
            return Err(Errno::ESTALE);
        }
        let tree = mount::clone_tree(found.borrow(), c"", mount::AT_EMPTY_PATH)?;
        Ok(Self { tree, is_attached: false })
    }

    /// Mounts the procfs on `target`, like [`filesystem`].
    ///
    /// # Errors
    /// EOPNOTSUPP if there are options, because they would apply to all containers that share the superblock.
    pub(crate) fn mount(
        &mut self,
        root: &Root,
        options: &Block<'_>,
        attributes: u64,
        target: &CStr,
    ) -> Result<Identity, Errno> {
        if options.count != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let again;
        let tree = if self.is_attached {
            again = mount::clone_tree(self.tree.borrow(), c"", mount::AT_EMPTY_PATH)?;
            &again
        } else {
            &self.tree
        };
        if attributes != PROC_ATTRIBUTES {
            set_attributes(tree.borrow(), attributes, false)?;
        }
        attach_fresh(root, c"proc", tree, target)?;
        self.is_attached = true;
        Ok(fs::stat(self.tree.borrow())?.identity)
    }
}

/// Attaches a new file system of type `kind` at `target`, which is created if missing.
fn attach_fresh(root: &Root, kind: &CStr, mounted: &Fd, target: &CStr) -> Result<(), Errno> {
    let found = root.find_or_make(target, Make::Directory(0o755))?;
    // The kernel's file systems must be mounted at their exact paths: otherwise masks would cover other files, and
    // device nodes and mounts in /dev would be created where a link leads.
    if kind == c"proc" || kind == c"sysfs" || KERNEL.contains(&target) {
        let itself = root.find(target, fs::O_PATH | fs::O_NOFOLLOW)?;
        if !fs::stat(itself.borrow())?.is_directory() {
            return Err(Errno::ENOTDIR);
        }
    }
    check_target(root, target, &found)?;
    mount::attach(mounted.borrow(), found.borrow())?;
    root.remember(target, mounted.borrow())
}

/// Sets an option of a new file system: `key=value`, or a flag.
fn set_option(context: FdRef<'_>, option: &CStr) -> Result<(), Errno> {
    /// Maximum length of a mount option's key, with its NUL; the kernel's keys are shorter than 32.
    const KEY_BYTES_MAX: usize = 64;
    let bytes = option.to_bytes_with_nul();
    let Some(equals) = bytes.iter().position(|byte| *byte == b'=') else {
        return mount::fs_option(context, option, None);
    };
    let mut key = [0; KEY_BYTES_MAX];
    key[..KEY_BYTES_MAX - 1].get_mut(..equals).ok_or(Errno::EINVAL)?.copy_from_slice(&bytes[..equals]);
    let key = CStr::from_bytes_until_nul(&key).map_err(|_| Errno::EINVAL)?;
    let value = CStr::from_bytes_until_nul(&bytes[equals + 1..]).map_err(|_| Errno::EINVAL)?;
    mount::fs_option(context, key, Some(value))
}

/// Refuses a target that a link has led to the root itself, or to the mounts at /proc, /sys and /dev, which only a
/// mount with exactly that path may cover (CVE-2021-30465, CVE-2019-16884).
pub(crate) fn check_target(root: &Root, target: &CStr, found: &Fd) -> Result<(), Errno> {
    let stat = fs::stat(found.borrow())?;
    if stat.identity == fs::stat(root.directory())?.identity {
        return Err(Errno::ELOOP);
    }
    let is_below = |directory: &CStr| {
        let rest = target.to_bytes().strip_prefix(directory.to_bytes());
        rest.is_some_and(|rest| rest.starts_with(b"/"))
    };
    for (directory, made) in KERNEL.into_iter().zip(root.made()) {
        if made.mount != 0 && stat.mount == made.mount && !is_below(directory) {
            return Err(Errno::ELOOP);
        }
    }
    let is_procs = fs::mount_flags_and_type(found.borrow())?.1 == PROC_SUPER_MAGIC;
    if is_procs && !target.to_bytes().starts_with(b"/proc/") {
        return Err(Errno::ELOOP);
    }
    Ok(())
}

/// Attaches a detached tree at `target`.
pub(crate) fn attach_tree(
    root: &Root,
    tree: &Fd,
    path: &CStr,
    wanted: &Wanted,
    skip_missing: bool,
) -> Result<(), Errno> {
    let target = if skip_missing {
        match existing(root, path)? {
            Some(target) => target,
            None => return Ok(()),
        }
    } else {
        let is_directory = fs::stat(tree.borrow())?.is_directory();
        root.find_or_make(path, if is_directory { Make::Directory(0o755) } else { Make::File })?
    };
    check_target(root, path, &target)?;
    attach_as(root, tree, &target, wanted)?;
    root.remember(path, tree.borrow())
}

fn attach_as(root: &Root, tree: &Fd, target: &Fd, wanted: &Wanted) -> Result<(), Errno> {
    match set_on_detached(tree, wanted) {
        Err(Errno::ENOSYS) if !wanted.is_recursive => {
            mount::attach(tree.borrow(), target.borrow())?;
            remount(root, tree, MountCall::Propagation(wanted.propagation))?;
            remount(root, tree, MountCall::Attributes(wanted.attributes))
        }
        Err(errno) => Err(errno),
        Ok(()) => mount::attach(tree.borrow(), target.borrow()),
    }
}

fn set_on_detached(tree: &Fd, wanted: &Wanted) -> Result<(), Errno> {
    let propagation = Attributes { propagation: flag(wanted.propagation), ..Attributes::default() };
    mount::set_attributes(tree.borrow(), &propagation, mount::AT_RECURSIVE)?;
    set_attributes(tree.borrow(), wanted.attributes, wanted.is_recursive)
}

fn set_attributes(mounted: FdRef<'_>, set: u64, is_recursive: bool) -> Result<(), Errno> {
    if set == 0 {
        return Ok(());
    }
    // The access time bits form one field, which has to be cleared before it is set.
    let clear = if set & mount::MOUNT_ATTR_ATIME == 0 { 0 } else { mount::MOUNT_ATTR_ATIME };
    let flags = if is_recursive { mount::AT_RECURSIVE } else { 0 };
    mount::set_attributes(mounted, &Attributes { set, clear, ..Attributes::default() }, flags)
}

/// Masks `target`: mounts an empty tmpfs on a directory and `null` on anything else. Read-only, because `null` is the
/// node's: root in the container could otherwise change its mode, owner and times. It can be opened for writing.
pub(crate) fn mask(root: &Root, null: &Fd, target: &CStr) -> Result<(), Errno> {
    let Some(target) = existing(root, target)? else { return Ok(()) };
    if !fs::stat(target.borrow())?.is_directory() {
        let attributes = mount::MOUNT_ATTR_RDONLY;
        let wanted = Wanted { attributes, is_recursive: false, propagation: Propagation::Private };
        return attach_as(root, null, &target, &wanted);
    }
    let context = mount::fsopen(c"tmpfs")?;
    mount::fs_option(context.borrow(), c"ro", None)?;
    mount::fs_create(context.borrow())?;
    let empty = mount::fsmount(context.borrow(), mount::MOUNT_ATTR_RDONLY)?;
    mount::attach(empty.borrow(), target.borrow())
}

/// Makes `target` and all mounts below it read-only. If `target` is not the root of a mount, it is bind-mounted on
/// itself first.
pub(crate) fn read_only(root: &Root, target: &CStr) -> Result<(), Errno> {
    let Some(found) = existing(root, target)? else { return Ok(()) };
    if fs::stat(found.borrow())?.is_mount_root {
        return match set_attributes(found.borrow(), mount::MOUNT_ATTR_RDONLY, true) {
            Err(Errno::ENOSYS) => remount(root, &found, MountCall::Attributes(mount::MOUNT_ATTR_RDONLY)),
            set => set,
        };
    }
    let tree = mount::clone_tree(found.borrow(), c"", mount::AT_EMPTY_PATH | mount::AT_RECURSIVE)?;
    match set_attributes(tree.borrow(), mount::MOUNT_ATTR_RDONLY, true) {
        Err(Errno::ENOSYS) => {
            mount::attach(tree.borrow(), found.borrow())?;
            remount(root, &tree, MountCall::Attributes(mount::MOUNT_ATTR_RDONLY))
        }
        Err(errno) => Err(errno),
        Ok(()) => mount::attach(tree.borrow(), found.borrow()),
    }?;
    root.remember(target, tree.borrow())
}

/// Bind-mounts the image's directory at `path` on itself (`Op::BindSelf`). This is allowed only for the root's own file
/// system: a clone of procfs, sysfs or /dev would be writable and without the masks that are mounted later.
pub(crate) fn image_volume(root: &Root, path: &CStr) -> Result<(), Errno> {
    let found = root.find_or_make(path, Make::Directory(0o755))?;
    let (stat, of_root) = (fs::stat(found.borrow())?, fs::stat(root.directory())?);
    // The device is compared for image volumes inside image volumes, the mount id for files, because OverlayFS may
    // report the device of a layer.
    let is_on_root = stat.device() == of_root.device() || (stat.mount == of_root.mount && stat.mount != 0);
    if !is_on_root || stat.identity == of_root.identity {
        return Err(Errno::ELOOP);
    }
    let tree = mount::clone_tree(found.borrow(), c"", mount::AT_EMPTY_PATH)?;
    // A peer of a shared root would receive each submount twice.
    let wanted = Wanted { attributes: 0, is_recursive: false, propagation: Propagation::Private };
    attach_as(root, &tree, &found, &wanted)
}

/// Makes the root mount read-only, without its submounts.
pub(crate) fn read_only_root(root: &Root) -> Result<(), Errno> {
    match set_attributes(root.directory(), mount::MOUNT_ATTR_RDONLY, false) {
        Err(Errno::ENOSYS) => {
            let flags = kept_flags(root.directory())? | mount::MS_RDONLY;
            mount::mount(None, c"/", None, mount::MS_REMOUNT | mount::MS_BIND | flags, None)
        }
        set => set,
    }
}

/// Opens `target`; `None` if it does not exist.
pub(crate) fn existing(root: &Root, target: &CStr) -> Result<Option<Fd>, Errno> {
    match root.find(target, fs::O_PATH) {
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        found => found.map(Some),
    }
}

#[derive(Clone, Copy)]
enum MountCall {
    Propagation(Propagation),
    Attributes(u64),
}

/// The fallback for a kernel without `mount_setattr`: remounts the attached `tree`.
fn remount(root: &Root, tree: &Fd, call: MountCall) -> Result<(), Errno> {
    let proc = root.find(c"/proc", fs::O_PATH | fs::O_DIRECTORY)?;
    if fs::mount_flags_and_type(proc.borrow())?.1 != PROC_SUPER_MAGIC {
        return Err(Errno::ENOSYS);
    }
    let flags = match call {
        MountCall::Propagation(propagation) => mount::MS_REC | flag(propagation),
        MountCall::Attributes(attributes) => {
            mount::MS_REMOUNT | mount::MS_BIND | kept_flags(tree.borrow())? | mount_flags(attributes)?
        }
    };
    fs::change_directory(proc.borrow())?;
    let mut buffer = *b"self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    let done = mount::mount(None, path_of(&mut buffer, tree.number()), None, flags, None);
    fs::change_directory(root.directory())?;
    done
}

/// The path `self/fd/N` of a descriptor.
fn path_of(buffer: &mut [u8; 20], number: i32) -> &CStr {
    let mut rest = number.unsigned_abs();
    let digits = rest.checked_ilog10().unwrap_or(0) as usize + 1;
    for digit in buffer[8..8 + digits].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    CStr::from_bytes_until_nul(buffer).unwrap_or(c"self/fd")
}

/// The current flags of a mount, which a remount must keep (statfs(2): these ST_… flags equal MS_…).
fn kept_flags(mounted: FdRef<'_>) -> Result<u64, Errno> {
    const SAME_AS_MS: u64 = 1 | 2 | 4 | 8 | 1024 | 2048;
    const ST_RELATIME: u64 = 4096;
    const MS_RELATIME: u64 = 1 << 21;
    let flags = fs::mount_flags_and_type(mounted)?.0;
    Ok(flags & SAME_AS_MS | if flags & ST_RELATIME == 0 { 0 } else { MS_RELATIME })
}

/// Converts MOUNT_ATTR_… flags to MS_… flags; ENOSYS for a flag that mount(2) does not have.
fn mount_flags(attributes: u64) -> Result<u64, Errno> {
    const TABLE: [(u64, u64); 8] = [
        (0x1, 1),         // RDONLY
        (0x2, 2),         // NOSUID
        (0x4, 4),         // NODEV
        (0x8, 8),         // NOEXEC
        (0x10, 1024),     // NOATIME
        (0x20, 1 << 24),  // STRICTATIME
        (0x80, 2048),     // NODIRATIME
        (0x20_0000, 256), // NOSYMFOLLOW
    ];
    let known = TABLE.iter().fold(0, |known, (attribute, _)| known | attribute);
    if attributes & !known != 0 {
        return Err(Errno::ENOSYS);
    }
    Ok(TABLE
        .iter()
        .filter(|(attribute, _)| attributes & attribute != 0)
        .fold(0, |flags, (_, flag)| flags | flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_become_flags_or_are_refused() {
        let cases = [(0, Ok(0)), (0xf, Ok(0xf)), (0x91, Ok(1 | 1024 | 2048)), (1 << 20, Err(Errno::ENOSYS))];
        for (attributes, flags) in cases {
            assert_eq!(mount_flags(attributes), flags, "{attributes:#x}");
        }
    }

    #[test]
    fn a_descriptor_has_its_path_in_procfs() {
        for number in [0, 7, 10, i32::MAX] {
            let mut buffer = *b"self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
            assert_eq!(path_of(&mut buffer, number).to_str(), Ok(format!("self/fd/{number}").as_str()));
        }
    }
}
