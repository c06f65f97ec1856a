//! What pods' monitors see of the host's files: what they and the starts of containers need, and nothing else. A monitor's
//! mount namespace is copied from this one instead of the host's, and a container's from its monitor's, for two reasons:
//!
//! - A copy costs time and kernel memory for every mount. The host's table grows with pods (volumes of the kubelet, a
//!   network namespace in /run/netns for each), and where its mounts are shared, as systemd has them, each new one
//!   arrives in every copy: with n pods that are n² mounts.
//! - A mount of the host that somebody unmounts would live on in copies that it does not reach, and keep its disk busy.
//!
//! Volumes, and namespaces that are given by a path, are taken in the host's own mount namespace (`Op::OpenTree`,
//! `Op::JoinNamespace`). Paths are the host's, so that a record means the same in both.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, mount};
use coracle_wire::SHARED_PROC;
use nix::errno::Errno;

use crate::{Error, umask, userns};

/// What every monitor needs: its own cgroup, the sysctls and attributes of processes, /dev/null, the host's shared memory for
/// pods that share its IPC namespace. The whole of sysfs, because a user namespace may mount one only where one is in view
/// (Linux, fs/namespace.c, `mount_too_revealing`).
const KERNELS: [Source; 6] = [
    Source { path: "/proc", is_whole: false, is_needed: true },
    Source { path: "/sys", is_whole: false, is_needed: true },
    Source { path: "/sys/fs/cgroup", is_whole: true, is_needed: true },
    Source { path: "/sys/fs/resctrl", is_whole: false, is_needed: false },
    Source { path: "/dev", is_whole: false, is_needed: true },
    Source { path: "/dev/shm", is_whole: false, is_needed: false },
];

/// Of the file system that holds the mount points.
const OPTIONS: &std::ffi::CStr = c"mode=755,size=64k";

struct Source {
    path: &'static str,
    /// With the mounts below it.
    is_whole: bool,
    is_needed: bool,
}

/// A mount namespace with the kernel's file systems and some directories, all at their paths. What the host mounts or
/// unmounts in those still arrives where its mounts are shared.
#[derive(Debug)]
pub struct BaseMountNamespace {
    namespace: Fd,
}

impl BaseMountNamespace {
    /// Makes it, with `directories` and all that is mounted below them. Their paths are absolute.
    ///
    /// # Errors
    /// [`Error::Kernel`]: which path, and what could not be done; nothing is left then.
    pub fn make(directories: &[&Path]) -> Result<Self, Error> {
        let parts = parts(directories)?;
        let kernel = |errno: sys::Errno| {
            Error::kernel("make pipe for", "view of the host's files", Errno::from_raw(errno.0))
        };
        let (outcome, report) = sys::fs::pipe().map_err(kernel)?;
        let (wait, release) = sys::fs::pipe().map_err(kernel)?;
        let cloned = process::clone(process::CLONE_NEWNS, None);
        let (pid, pidfd) = match cloned
            .map_err(|errno| Error::kernel("clone", "into a mount namespace", Errno::from_raw(errno.0)))?
        {
            Clone::Child => {
                drop((outcome, release));
                let (part, errno) = assemble(&parts).map_or_else(|failed| failed, |()| (DONE, sys::Errno(0)));
                let mut bytes = [part; REPORT_BYTES];
                bytes[1..].copy_from_slice(&errno.0.to_ne_bytes());
                let _ = sys::fs::write(report.borrow(), &bytes);
                // Its namespace lives until the other end of the pipe goes; from then on in a descriptor.
                let _ = sys::fs::read(wait.borrow(), &mut [0]);
                process::exit(0)
            }
            Clone::Parent { pid, pidfd } => (pid, pidfd),
        };
        drop((report, wait));
        let made = read_report(&outcome, &parts).and_then(|()| {
            let path = format!("/proc/{pid}/ns/mnt");
            fs::File::open(&path).map_err(|error| Error::io("open", &path, &error))
        });
        userns::end(pid, &pidfd);
        drop(release);
        Ok(Self { namespace: Fd::from(OwnedFd::from(made?)) })
    }

    /// Moves the caller into a copy of it.
    pub(crate) fn enter(&self) -> Result<(), sys::Errno> {
        process::setns(self.namespace.borrow(), process::CLONE_NEWNS)?;
        process::unshare(process::CLONE_NEWNS)
    }
}

/// One path of the view: what is opened on the host, and what is made for it.
struct Part {
    path: PathBuf,
    source: CString,
    flags: usize,
    is_needed: bool,
}

/// Which part, or [`DONE`] or [`ROOT`], then an error number.
const REPORT_BYTES: usize = 5;
const DONE: u8 = u8::MAX;
const ROOT: u8 = u8::MAX - 1;

/// Parents come before what is below them.
fn parts(directories: &[&Path]) -> Result<Vec<Part>, Error> {
    let own = directories.iter().map(|path| (*path, true, true));
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
        parts.push(Part { path: path.to_owned(), source, flags, is_needed });
    }
    parts.sort_by_key(|part| part.path.components().count());
    Ok(parts)
}

/// In the child, which is the only process of its namespace.
fn assemble(parts: &[Part]) -> Result<(), (u8, sys::Errno)> {
    let root = |errno| (ROOT, errno);
    // Nothing mounted here reaches the host, while what the host does still arrives.
    mount::mount(None, c"/", None, mount::MS_REC | mount::MS_SLAVE, None).map_err(root)?;
    let mut trees = Vec::new();
    for (index, part) in (0..).zip(parts) {
        match mount::clone_tree(FdRef::WORKING_DIRECTORY, &part.source, part.flags) {
            Err(sys::Errno::ENOENT) if !part.is_needed => {}
            Err(errno) => return Err((index, errno)),
            Ok(tree) => trees.push((index, part, tree)),
        }
    }
    // Any directory will do to put the new root on: the old one goes, with all that is mounted on it.
    let kind = c"tmpfs";
    mount::mount(Some(kind), c"/proc", Some(kind), 0, Some(OPTIONS)).map_err(root)?;
    sys::fs::change_directory_to(c"/proc").map_err(root)?;
    mount::pivot_root(c".", c".").map_err(root)?;
    mount::unmount(c".", mount::MNT_DETACH).map_err(root)?;
    sys::fs::change_directory_to(c"/").map_err(root)?;
    sys::fs::make_directory(FdRef::WORKING_DIRECTORY, SHARED_PROC, 0o755).map_err(root)?;
    // Monitors of user namespaces pass through them as other users.
    let _mask = umask::Public::begin();
    for (index, part, tree) in trees {
        let errno =
            |error: std::io::Error| (index, sys::Errno(error.raw_os_error().unwrap_or(sys::Errno::EIO.0)));
        fs::create_dir_all(&part.path).map_err(errno)?;
        let flags = sys::fs::O_PATH | sys::fs::O_DIRECTORY;
        sys::fs::open(FdRef::WORKING_DIRECTORY, &part.source, flags, 0)
            .and_then(|target| mount::attach(tree.borrow(), target.borrow()))
            .map_err(|errno| (index, errno))?;
    }
    Ok(())
}

fn read_report(outcome: &Fd, parts: &[Part]) -> Result<(), Error> {
    let mut bytes = [0; REPORT_BYTES];
    let failed = |errno: sys::Errno, what: &dyn std::fmt::Display| {
        Error::kernel("show monitors", what, Errno::from_raw(errno.0))
    };
    match sys::fs::read(outcome.borrow(), &mut bytes) {
        Ok(REPORT_BYTES) => {}
        // It was killed.
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
        let parts =
            parts(&[Path::new("/var/lib/coracle"), Path::new("/srv"), Path::new("/dev/shm/state")]).unwrap();
        for (index, part) in parts.iter().enumerate() {
            let later = &parts[index + 1..];
            assert!(!later.iter().any(|other| part.path.starts_with(&other.path)), "{}", part.path.display());
        }
        assert!(parts.iter().any(|part| part.path == Path::new("/srv") && part.is_needed && part.flags != 0));
    }

    #[test]
    fn paths_are_absolute_texts() {
        for wrong in ["", "srv", "./srv", "/a\0b"] {
            assert!(BaseMountNamespace::make(&[Path::new(wrong)]).is_err(), "{wrong:?}");
        }
    }
}
