//! The mount namespace that monitors start from. It contains only the host mounts that monitors and starts of
//! containers need. A monitor's mount namespace is a copy of this one instead of the host's, and a container's mount
//! namespace is a copy of its monitor's. The reasons are:
//!
//! - A copy costs time and kernel memory for every mount. The host's mount table grows with the number of pods (volumes
//!   of the kubelet, a network namespace in /run/netns for each). If the host's mounts are shared, as systemd sets them
//!   up, each new mount propagates to every copy: with n pods that is n² mounts.
//! - A mount that is unmounted on the host would remain in copies to which the unmount does not propagate, and keep its
//!   disk busy.
//!
//! Volumes, and namespaces given by a path, are opened in the host's own mount namespace (`Op::OpenTree`,
//! `Op::JoinNamespace`). All paths are the same as on the host, so a launch record is valid in both namespaces.
//!
//! /dev/null, which masks files in containers and is their standard streams, is a device node of the namespace's own: root in a
//! container could otherwise lock the node's. It and /dev are mounted read-only, so that no container changes the mode, owner
//! and times for all others; devices on a read-only mount can be opened for writing. With SELinux it is the node's, because
//! policies let containers use only a device with that one's label.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, mount};
use coracle_wire::SHARED_PROC;
use nix::errno::Errno;

use crate::collect;
use crate::{Error, lsm, umask, userns};

/// The kernel's file systems that every monitor needs: for cgroups, sysctls and process attributes, /dev/null, and the
/// host's shared memory for pods in the host's IPC namespace. All of sysfs is included, because a user namespace may
/// mount sysfs only if a complete one is visible (Linux, fs/namespace.c, `mount_too_revealing`).
const KERNELS: [Source; 6] = [
    Source { path: "/proc", is_whole: false, is_needed: true },
    Source { path: "/sys", is_whole: false, is_needed: true },
    Source { path: "/sys/fs/cgroup", is_whole: true, is_needed: true },
    Source { path: "/sys/fs/resctrl", is_whole: false, is_needed: false },
    Source { path: "/dev", is_whole: false, is_needed: true },
    Source { path: "/dev/shm", is_whole: false, is_needed: false },
];

/// The mount that is read-only in the namespace.
const DEV: &CStr = c"/dev";
/// The namespace's own device node, and the device that it covers.
const OWN_NULL: &CStr = c"/null";
const NULL: &CStr = c"/dev/null";
/// Device numbers of /dev/null (Documentation/admin-guide/devices.txt).
const NULL_DEVICE: (u32, u32) = (1, 3);

/// Options of the tmpfs that contains the mount points.
const OPTIONS: &CStr = c"mode=755,size=64k";

struct Source {
    path: &'static str,
    /// Whether submounts are included.
    is_whole: bool,
    is_needed: bool,
}

/// A mount namespace with the kernel's file systems and some directories of the host, all at their original paths.
/// Later mounts and unmounts on the host propagate into it if the host's mounts are shared.
#[derive(Debug)]
pub struct BaseMountNamespace {
    namespace: Fd,
    /// /dev/null on the namespace's read-only mount of /dev.
    null: Fd,
    /// The directories with their device and inode numbers, `None` for one that could not be examined.
    directories: Vec<(PathBuf, Option<(u64, u64)>)>,
}

impl BaseMountNamespace {
    /// Creates the namespace with `directories`, which must be absolute paths, and all their submounts, and with those of
    /// `optional` that exist.
    ///
    /// # Errors
    /// [`Error::Kernel`] with the path and the operation that failed; all created objects are removed.
    pub fn make(directories: &[&Path], optional: &[PathBuf]) -> Result<Self, Error> {
        #[cfg(feature = "simulation")]
        if crate::simulation::node().is_some() {
            let (namespace, null) = (open("/dev/null")?, open("/dev/null")?);
            return Ok(Self { namespace, null, directories: Vec::new() });
        }
        let needed = directories.iter().map(|path| (*path, true));
        let all = directories.iter().copied().chain(optional.iter().map(PathBuf::as_path));
        // Before the look for directories: one that comes meanwhile is noticed later.
        let identities = all.map(|path| (path.to_owned(), identity(path))).collect();
        let found = optional.iter().map(PathBuf::as_path).filter(|path| path.is_dir());
        let parts = parts(&needed.chain(found.map(|path| (path, false))).collect::<Vec<_>>())?;
        let directories = identities;
        let kernel = |errno: sys::Errno| {
            Error::kernel("make pipe for", "view of the host's files", Errno::from_raw(errno.0))
        };
        let (outcome, report) = sys::fs::pipe().map_err(kernel)?;
        let (wait, release) = sys::fs::pipe().map_err(kernel)?;
        // The child allocates and frees nothing: another thread of the caller may hold the allocator's lock at the clone.
        let mut trees = Vec::with_capacity(parts.len());
        let has_own_null = !lsm::has_selinux();
        let cloned = process::clone(process::CLONE_NEWNS, None);
        let (pid, pidfd) = match cloned
            .map_err(|errno| Error::kernel("clone", "into a mount namespace", Errno::from_raw(errno.0)))?
        {
            Clone::Child => {
                drop((outcome, release));
                let (part, errno) = assemble(&parts, &mut trees, has_own_null)
                    .map_or_else(|failed| failed, |()| (DONE, sys::Errno(0)));
                let mut bytes = [part; REPORT_BYTES];
                bytes[1..].copy_from_slice(&errno.0.to_ne_bytes());
                let _ = sys::fs::write(report.borrow(), &bytes);
                // The process keeps the namespace alive until the pipe is closed; the parent opens a descriptor of it
                // before.
                let _ = sys::fs::read(wait.borrow(), &mut [0]);
                process::exit(0)
            }
            Clone::Parent { pid, pidfd } => (pid, pidfd),
        };
        drop((report, wait));
        let made = read_report(&outcome, &parts).and_then(|()| {
            let namespace = open(&format!("/proc/{pid}/ns/mnt"))?;
            Ok(Self { namespace, null: open(&format!("/proc/{pid}/root/dev/null"))?, directories })
        });
        userns::end(pid, &pidfd);
        drop(release);
        made
    }

    /// Whether the directories are those that the namespace shows, and not others that were made after another program had
    /// removed them.
    pub fn is_current(&self) -> bool {
        self.directories.iter().all(|(path, made)| identity(path) == *made)
    }

    /// Opens /dev/null for the standard streams of a container's process, which cannot change the device node's
    /// attributes through it. Each call opens the file again: a shared open file would share flags and locks.
    ///
    /// # Errors
    /// [`Error::Kernel`] if no descriptor is free.
    pub fn open_null(&self) -> Result<OwnedFd, Error> {
        let path = format!("/proc/self/fd/{}", self.null.borrow().number());
        let opened = fs::OpenOptions::new().read(true).write(true).open(&path);
        opened.map(OwnedFd::from).map_err(|error| Error::io("open", "/dev/null", &error))
    }

    /// Moves the caller into a copy of the namespace.
    pub(crate) fn enter(&self) -> Result<(), sys::Errno> {
        process::setns(self.namespace.borrow(), process::CLONE_NEWNS)?;
        process::unshare(process::CLONE_NEWNS)
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

fn open(path: &str) -> Result<Fd, Error> {
    let file = fs::File::open(path).map_err(|error| Error::io("open", path, &error))?;
    Ok(Fd::from(OwnedFd::from(file)))
}

/// One mount of the namespace, with its source on the host.
struct Part {
    path: PathBuf,
    source: CString,
    /// The directories above `path` and itself, parents first.
    directories: Vec<CString>,
    flags: usize,
    is_needed: bool,
}

/// Length of a report in bytes: the index of a part, or [`DONE`] or [`ROOT`], followed by an error number.
const REPORT_BYTES: usize = 5;
const DONE: u8 = u8::MAX;
const ROOT: u8 = u8::MAX - 1;

/// Lists the mounts, parents before their submounts. A directory may be needed or not.
fn parts(directories: &[(&Path, bool)]) -> Result<Vec<Part>, Error> {
    let own = directories.iter().map(|(path, is_needed)| (*path, true, *is_needed));
    let kernels = KERNELS.iter().map(|source| (Path::new(source.path), source.is_whole, source.is_needed));
    let mut parts = Vec::new();
    for (path, is_whole, is_needed) in kernels.chain(own) {
        let text = || path.display().to_string();
        if !path.is_absolute() {
            return Err(Error::invalid(text(), "is not absolute"));
        }
        let source =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::invalid(text(), "holds a NUL"))?;
        let flags = if is_whole { mount::AT_RECURSIVE } else { 0 };
        let mut directories: Vec<_> =
            path.ancestors().filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect();
        directories.reverse();
        parts.push(Part { path: path.to_owned(), source, directories, flags, is_needed });
    }
    collect::sort_by_key(&mut parts, |part: &Part| part.path.components().count());
    Ok(parts)
}

/// A mount that is not attached yet, with its part and the part's index.
type Tree<'a> = (u8, &'a Part, Fd);

/// Creates the mounts; called in the child, which is the only process of its namespace. `trees` is empty and has
/// capacity for all parts.
fn assemble<'a>(
    parts: &'a [Part],
    trees: &mut Vec<Tree<'a>>,
    has_own_null: bool,
) -> Result<(), (u8, sys::Errno)> {
    let root = |errno| (ROOT, errno);
    // Mounts made here do not propagate to the host, but mounts of the host still propagate here.
    mount::mount(None, c"/", None, mount::MS_REC | mount::MS_SLAVE, None).map_err(root)?;
    for (index, part) in (0..).zip(parts) {
        match mount::clone_tree(FdRef::WORKING_DIRECTORY, &part.source, part.flags) {
            Err(sys::Errno::ENOENT) if !part.is_needed => {}
            Err(errno) => return Err((index, errno)),
            Ok(tree) => trees.push((index, part, tree)),
        }
    }
    // Any directory works as the mount point of the new root, because the old root is detached with all its mounts.
    let kind = c"tmpfs";
    mount::mount(Some(kind), c"/proc", Some(kind), 0, Some(OPTIONS)).map_err(root)?;
    sys::fs::change_directory_to(c"/proc").map_err(root)?;
    mount::pivot_root(c".", c".").map_err(root)?;
    mount::unmount(c".", mount::MNT_DETACH).map_err(root)?;
    sys::fs::change_directory_to(c"/").map_err(root)?;
    sys::fs::make_directory(FdRef::WORKING_DIRECTORY, SHARED_PROC, 0o755).map_err(root)?;
    // Monitors of pods with user namespaces traverse these directories as other users.
    let _mask = umask::Public::begin();
    for (index, part, tree) in trees.drain(..) {
        for directory in &part.directories {
            match sys::fs::make_directory(FdRef::WORKING_DIRECTORY, directory, 0o777) {
                Ok(()) | Err(sys::Errno::EEXIST) => {}
                Err(errno) => return Err((index, errno)),
            }
        }
        let flags = sys::fs::O_PATH | sys::fs::O_DIRECTORY;
        sys::fs::open(FdRef::WORKING_DIRECTORY, &part.source, flags, 0)
            .and_then(|target| mount::attach(tree.borrow(), target.borrow()))
            .map_err(|errno| (index, errno))?;
    }
    let dev = parts.iter().position(|part| part.source.as_c_str() == DEV);
    let covered = if has_own_null { cover_null() } else { Ok(()) };
    covered
        .and_then(|()| make_read_only(DEV))
        .map_err(|errno| (dev.and_then(|index| u8::try_from(index).ok()).unwrap_or(ROOT), errno))
}

/// Mounts a device node of the namespace's own over /dev/null, read-only.
fn cover_null() -> Result<(), sys::Errno> {
    let device = rustix::fs::makedev(NULL_DEVICE.0, NULL_DEVICE.1);
    // Users other than root write to it; this process makes no other file.
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    sys::fs::make_node(FdRef::WORKING_DIRECTORY, OWN_NULL, sys::fs::S_IFCHR | 0o666, device)?;
    let own = mount::clone_tree(FdRef::WORKING_DIRECTORY, OWN_NULL, 0)?;
    let target = sys::fs::open(FdRef::WORKING_DIRECTORY, NULL, sys::fs::O_PATH, 0)?;
    mount::attach(own.borrow(), target.borrow())?;
    make_read_only(NULL)
}

/// Makes the mount at `path` read-only; its other flags are kept. By mount(2), because Linux before 5.12 has no
/// mount_setattr.
fn make_read_only(path: &CStr) -> Result<(), sys::Errno> {
    const KEPT: u64 = mount::MS_NOSUID | mount::MS_NODEV | mount::MS_NOEXEC;
    let mounted = sys::fs::open(FdRef::WORKING_DIRECTORY, path, sys::fs::O_PATH, 0)?;
    // The ST_… flags of statfs(2) equal these MS_… flags; the flags for access times stay if none is given.
    let (flags, _) = sys::fs::mount_flags_and_type(mounted.borrow())?;
    let flags = flags & KEPT | mount::MS_RDONLY | mount::MS_REMOUNT | mount::MS_BIND;
    mount::mount(None, path, None, flags, None)
}

fn read_report(outcome: &Fd, parts: &[Part]) -> Result<(), Error> {
    let mut bytes = [0; REPORT_BYTES];
    let failed = |errno: sys::Errno, what: &dyn std::fmt::Display| {
        Error::kernel("show monitors", what, Errno::from_raw(errno.0))
    };
    match sys::fs::read(outcome.borrow(), &mut bytes) {
        Ok(REPORT_BYTES) => {}
        // The child was killed.
        Ok(_) => return Err(failed(sys::Errno::EIO, &"the host's files")),
        Err(errno) => return Err(failed(errno, &"the host's files")),
    }
    let [part, errno @ ..] = bytes;
    let errno = sys::Errno(i32::from_ne_bytes(errno));
    match (part, parts.get(usize::from(part))) {
        (DONE, _) => Ok(()),
        (_, Some(part)) => Err(failed(errno, &part.path.display())),
        (_, None) => Err(failed(errno, &"a root of their own")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_first() {
        let directories = ["/var/lib/coracle", "/srv", "/dev/shm/state"].map(|path| (Path::new(path), true));
        let parts = parts(&directories).unwrap();
        for (index, part) in parts.iter().enumerate() {
            let later = &parts[index + 1..];
            assert!(!later.iter().any(|other| part.path.starts_with(&other.path)), "{}", part.path.display());
        }
        assert!(parts.iter().any(|part| part.path == Path::new("/srv") && part.is_needed && part.flags != 0));
    }

    #[test]
    fn paths_are_absolute_texts() {
        for wrong in ["", "srv", "./srv", "/a\0b"] {
            assert!(BaseMountNamespace::make(&[Path::new(wrong)], &[]).is_err(), "{wrong:?}");
        }
    }
}
