//! A pod's user namespace (user_namespaces(7), KEP-127): made by a process that does nothing else, so that the daemon and
//! the monitor stay outside. The process is born into the namespace with the others that shall belong to it, and lives
//! until the monitor has joined those and holds a descriptor of this one.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, mount};
use nix::errno::Errno;

use crate::Error;

/// A range of ids inside and what it is outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id in the namespace.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// How many.
    pub length: u32,
}

impl IdRange {
    /// What `id` is on the host, if it is in the range.
    pub fn host_id(&self, id: u32) -> Option<u32> {
        let offset = id.checked_sub(self.inside).filter(|offset| *offset < self.length)?;
        self.outside.checked_add(offset)
    }
}

/// The mappings of a pod: one range of each kind, which holds 0 (CRI 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserMappings {
    /// Of users.
    pub users: IdRange,
    /// Of groups.
    pub groups: IdRange,
}

impl UserMappings {
    /// Root's user and group on the host.
    pub fn root(&self) -> (u32, u32) {
        let host = |range: &IdRange| range.host_id(0).unwrap_or(range.outside);
        (host(&self.users), host(&self.groups))
    }
}

/// Whether pods can have user namespaces of their own here: the kernel makes them, and can map the owners of files below
/// `directory`, where layers are (Linux 5.19 for layers of an overlay; the file system must take part).
///
/// # Errors
/// [`Error::Kernel`]: which part it lacks.
pub fn check(directory: &Path) -> Result<(), Error> {
    let range = IdRange { inside: 0, outside: 65536, length: 65536 };
    let owner = make(&UserMappings { users: range, groups: range }, 0)?;
    let path = CString::new(directory.as_os_str().as_bytes())
        .map_err(|_| Error::invalid("directory", "holds a NUL"))?;
    let map = || {
        let tree = mount::clone_tree(FdRef::WORKING_DIRECTORY, &path, 0)?;
        let attributes = mount::Attributes {
            set: mount::MOUNT_ATTR_IDMAP,
            user_namespace: owner.namespace().number() as u64,
            ..mount::Attributes::default()
        };
        mount::set_attributes(tree.borrow(), &attributes, 0)
    };
    map().map_err(|errno| {
        Error::kernel("map the owners of files in", directory.display(), Errno::from_raw(errno.0))
    })
}

/// The process in the new namespaces. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Owner {
    pid: i32,
    process: Fd,
    namespace: Fd,
    joined: u64,
    /// Its end in any way, ours included, ends the process.
    _release: Fd,
}

/// Makes a user namespace, and `namespaces` (CLONE_NEW…) that belong to it.
pub(crate) fn make(mappings: &UserMappings, namespaces: u64) -> Result<Owner, Error> {
    let kernel = |op, errno: sys::Errno| Error::kernel(op, "user namespace", Errno::from_raw(errno.0));
    let (wait, release) = sys::fs::pipe().map_err(|errno| kernel("make pipe for", errno))?;
    let cloned = process::clone(process::CLONE_NEWUSER | namespaces, None);
    let (pid, pidfd) = match cloned.map_err(|errno| kernel("make", errno))? {
        Clone::Child => {
            drop(release);
            let _ = sys::fs::read(wait.borrow(), &mut [0]);
            process::exit(0)
        }
        Clone::Parent { pid, pidfd } => (pid, pidfd),
    };
    let path = format!("/proc/{pid}/ns/user");
    let opened = fs::File::open(&path).map_err(|error| Error::io("open", &path, &error));
    // From here on a drop ends the process; without its namespace there is nothing to hand out.
    let namespace = match opened {
        Ok(file) => Fd::from(OwnedFd::from(file)),
        Err(error) => {
            end(pid, &pidfd);
            return Err(error);
        }
    };
    let owner = Owner { pid, process: pidfd, namespace, joined: namespaces, _release: release };
    for (name, range) in [("uid_map", mappings.users), ("gid_map", mappings.groups)] {
        let path = format!("/proc/{pid}/{name}");
        let line = format!("{} {} {}\n", range.inside, range.outside, range.length);
        fs::write(&path, &line)
            .map_err(|error| Error::io("write", format!("{name} {}", line.trim()), &error))?;
    }
    Ok(owner)
}

impl Owner {
    /// Joins what belongs to it; the caller stays in its own user namespace.
    pub(crate) fn join(&self) -> Result<(), sys::Errno> {
        match self.joined {
            0 => Ok(()),
            joined => process::setns(self.process.borrow(), joined),
        }
    }

    /// The user namespace.
    pub(crate) fn namespace(&self) -> FdRef<'_> {
        self.namespace.borrow()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        end(self.pid, &self.process);
    }
}

/// Ends a child of this process and reaps it.
pub(crate) fn end(pid: i32, pidfd: &Fd) {
    let _ = process::pidfd_signal(pidfd.borrow(), process::SIGKILL);
    let _ = process::wait(pid);
}

#[cfg(test)]
mod tests {
    use super::IdRange;

    #[test]
    fn ids_of_the_host() {
        let range = IdRange { inside: 10, outside: 1000, length: 5 };
        let table = [(9, None), (10, Some(1000)), (14, Some(1004)), (15, None)];
        for (inside, outside) in table {
            assert_eq!(range.host_id(inside), outside, "{inside}");
        }
        assert_eq!(IdRange { outside: u32::MAX, ..range }.host_id(11), None);
    }
}
