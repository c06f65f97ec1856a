//! A pod's user namespace (user_namespaces(7), KEP-127). A helper process creates it, so that the daemon and the
//! monitor stay outside. The helper is cloned into the user namespace and the namespaces that belong to it, and ends
//! when its parent has joined these namespaces and has a descriptor of the user namespace.
//!
//! The kernel charges the memory of a new namespace to the memory cgroup of the process that calls clone. For a pod
//! that is the process that becomes its monitor, in the pod's cgroup.

use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, mount};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::Error;

/// A range of IDs in the namespace and the corresponding range on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// First id in the namespace.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// Number of IDs in the range.
    pub length: u32,
}

impl IdRange {
    /// The host ID for the ID `id` in the namespace; `None` if `id` is not in the range.
    pub fn host_id(&self, id: u32) -> Option<u32> {
        let offset = id.checked_sub(self.inside).filter(|offset| *offset < self.length)?;
        self.outside.checked_add(offset)
    }
}

/// The mappings of a pod: one range of users and one of groups, each of which contains 0 (CRI 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserMappings {
    /// Mapping of user IDs.
    pub users: IdRange,
    /// Mapping of group IDs.
    pub groups: IdRange,
}

impl UserMappings {
    /// User and group ID on the host of the namespace's root.
    pub fn root(&self) -> (u32, u32) {
        let host = |range: &IdRange| range.host_id(0).unwrap_or(range.outside);
        (host(&self.users), host(&self.groups))
    }
}

/// Checks whether pods can have user namespaces: the kernel must support them and idmapped mounts of `directory`, which
/// contains the layers (Linux 5.19 for layers of an overlay; the file system must support idmapped mounts).
///
/// # Errors
/// [`Error::Kernel`] with the missing part.
pub fn check(directory: &Path) -> Result<(), Error> {
    let range = IdRange { inside: 0, outside: 65536, length: 65536 };
    let plan = Plan::new(&UserMappings { users: range, groups: range }, 0);
    let namespace = plan.make().map_err(|(part, errno)| plan.error(part, errno))?;
    let path = CString::new(directory.as_os_str().as_bytes())
        .map_err(|_| Error::invalid("directory", "holds a NUL"))?;
    let map = || {
        let tree = mount::clone_tree(FdRef::WORKING_DIRECTORY, &path, 0)?;
        let attributes = mount::Attributes {
            set: mount::MOUNT_ATTR_IDMAP,
            user_namespace: namespace.borrow().number() as u64,
            ..mount::Attributes::default()
        };
        mount::set_attributes(tree.borrow(), &attributes, 0)
    };
    map().map_err(|errno| {
        Error::kernel("map the owners of files in", directory.display(), Errno::from_raw(errno.0))
    })
}

/// A user namespace to create, and the namespaces that belong to it.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The line for the file `uid_map` (user_namespaces(7)).
    users: String,
    /// Content of the file `gid_map`.
    groups: String,
    /// CLONE_NEW… flags of the namespaces that belong to the user namespace.
    namespaces: u64,
}

/// The part of [`Plan::make`] that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Pipe,
    Clone,
    Open,
    UserMap,
    GroupMap,
    Join,
}

impl Part {
    /// All parts, in the order of their discriminants.
    pub(crate) const ALL: [Part; 6] =
        [Part::Pipe, Part::Clone, Part::Open, Part::UserMap, Part::GroupMap, Part::Join];
}

impl Plan {
    /// Plans a user namespace with these mappings, to which `namespaces` (CLONE_NEW… flags) belong.
    pub(crate) fn new(mappings: &UserMappings, namespaces: u64) -> Self {
        let line = |range: &IdRange| format!("{} {} {}\n", range.inside, range.outside, range.length);
        Self { users: line(&mappings.users), groups: line(&mappings.groups), namespaces }
    }

    /// Creates the namespaces, moves the caller into those that belong to the user namespace, and returns a descriptor of
    /// the user namespace, in which the caller is not. Allocates nothing, so that a cloned process can call it.
    pub(crate) fn make(&self) -> Result<Fd, (Part, sys::Errno)> {
        let failed = |part| move |errno| (part, errno);
        let helper = Helper::start(self.namespaces)?;
        let namespace = helper.open(c"ns/user", sys::fs::O_RDONLY).map_err(failed(Part::Open))?;
        for (name, line, part) in
            [(c"uid_map", &self.users, Part::UserMap), (c"gid_map", &self.groups, Part::GroupMap)]
        {
            helper
                .open(name, sys::fs::O_WRONLY)
                .and_then(|file| sys::fs::write(file.borrow(), line.as_bytes()))
                .map_err(failed(part))?;
        }
        if self.namespaces != 0 {
            process::setns(helper.process.borrow(), self.namespaces).map_err(failed(Part::Join))?;
        }
        Ok(namespace)
    }

    /// The error of a part that failed.
    pub(crate) fn error(&self, part: Part, errno: sys::Errno) -> Error {
        let (op, target) = match part {
            Part::Pipe => ("make pipe for", "user namespace".to_owned()),
            Part::Clone => ("clone process into", format!("user namespace{}", reached_limit(errno))),
            Part::Open => ("open", "user namespace".to_owned()),
            Part::UserMap => ("write", format!("uid_map {}", self.users.trim_end())),
            Part::GroupMap => ("write", format!("gid_map {}", self.groups.trim_end())),
            Part::Join => ("join", "namespaces of user namespace".to_owned()),
        };
        Error::kernel(op, target, Errno::from_raw(errno.0))
    }
}

/// The limit that an error of clone stands for (clone(2), namespaces(7)), because the error number does not name it.
fn reached_limit(errno: sys::Errno) -> &'static str {
    match errno {
        sys::Errno::EAGAIN => " (a limit of processes is reached, for example pids.max of the pod's cgroup)",
        sys::Errno::ENOSPC => " (a limit of namespaces is reached: sysctl user.max_*_namespaces)",
        _ => "",
    }
}

/// A child in new namespaces. It waits until it is killed, at the latest by a drop of this value, or until its parent
/// has ended.
struct Helper {
    pid: i32,
    process: Fd,
    /// End of a pipe: the kernel closes it when the parent ends, and the helper then exits.
    _release: Fd,
}

impl Helper {
    fn start(namespaces: u64) -> Result<Self, (Part, sys::Errno)> {
        let (wait, release) = sys::fs::pipe().map_err(|errno| (Part::Pipe, errno))?;
        match process::clone(process::CLONE_NEWUSER | namespaces, None) {
            Ok(Clone::Child) => {
                drop(release);
                let _ = sys::fs::read(wait.borrow(), &mut [0]);
                process::exit(0)
            }
            Ok(Clone::Parent { pid, pidfd }) => Ok(Self { pid, process: pidfd, _release: release }),
            Err(errno) => Err((Part::Clone, errno)),
        }
    }

    /// Opens a file of the helper's directory in /proc.
    fn open(&self, name: &CStr, flags: sys::fs::OFlags) -> Result<Fd, sys::Errno> {
        let mut path = [0; PROC_PATH_BYTES];
        let name = name.to_str().map_err(|_| sys::Errno::EINVAL)?;
        // The zero after the path ends the string.
        write!(&mut path[..PROC_PATH_BYTES - 1], "/proc/{}/{name}", self.pid)
            .map_err(|_| sys::Errno::EINVAL)?;
        let path = CStr::from_bytes_until_nul(&path).map_err(|_| sys::Errno::EINVAL)?;
        sys::fs::open(FdRef::WORKING_DIRECTORY, path, flags, 0)
    }
}

/// Length of the longest path of a file of the helper in bytes: `/proc/`, a PID, `/uid_map`, NUL.
const PROC_PATH_BYTES: usize = 6 + 10 + 8 + 1;

impl Drop for Helper {
    fn drop(&mut self) {
        end(self.pid, &self.process);
    }
}

/// Kills a child of this process and reaps it. A child that must not be signalled (by a security module) is not waited
/// for: it may never end.
pub(crate) fn end(pid: i32, pidfd: &Fd) {
    let kill = || process::pidfd_signal(pidfd.borrow(), process::SIGKILL);
    // A child that is not reaped keeps its pid.
    match kill().or_else(|_| process::kill(pid, process::SIGKILL)) {
        Ok(()) | Err(sys::Errno::ESRCH) => drop(process::wait(pid)),
        Err(_) => drop(process::reap(pid)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::{Clone, Fd, IdRange, end, process};

    /// Finding F11: an error of the signal left a wait without an end, in which a starting daemon neither served nor ended.
    #[test]
    fn a_child_is_ended_without_a_usable_pidfd() {
        let pid = match process::clone(0, None).unwrap() {
            Clone::Child => loop {
                process::sleep(process::Signals::MAX);
            },
            Clone::Parent { pid, .. } => pid,
        };
        let other = std::fs::File::open("/dev/null").unwrap();
        end(pid, &Fd::from(OwnedFd::from(other)));
        assert_eq!(process::kill(pid, 0), Err(coracle_sys::Errno::ESRCH), "it was reaped");
    }

    #[test]
    fn ids_are_mapped_to_those_of_the_host() {
        let range = IdRange { inside: 10, outside: 1000, length: 5 };
        let table = [(9, None), (10, Some(1000)), (14, Some(1004)), (15, None)];
        for (inside, outside) in table {
            assert_eq!(range.host_id(inside), outside, "{inside}");
        }
        assert_eq!(IdRange { outside: u32::MAX, ..range }.host_id(11), None);
    }
}
