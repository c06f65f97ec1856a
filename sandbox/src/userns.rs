//! A pod's user namespace (user_namespaces(7), KEP-127). A helper process creates it, so that the daemon and the
//! monitor stay outside. The helper is cloned into the user namespace and the namespaces that belong to it, and exits
//! when the monitor has joined these namespaces and has a descriptor of the user namespace.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, mount};
use nix::errno::Errno;

use crate::Error;

/// A range of IDs in the namespace and the corresponding range on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The helper process in the new namespaces; ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Owner {
    pid: i32,
    process: Fd,
    namespace: Fd,
    joined: u64,
    /// End of a pipe: closing it, also by the end of this process, ends the helper.
    _release: Fd,
}

/// Creates a user namespace, and `namespaces` (CLONE_NEW…) that belong to it.
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
    // From here on a drop ends the helper.
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
    /// Joins the namespaces that belong to the user namespace; the caller stays in its own user namespace.
    pub(crate) fn join(&self) -> Result<(), sys::Errno> {
        match self.joined {
            0 => Ok(()),
            joined => process::setns(self.process.borrow(), joined),
        }
    }

    /// The descriptor of the user namespace.
    pub(crate) fn namespace(&self) -> FdRef<'_> {
        self.namespace.borrow()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        end(self.pid, &self.process);
    }
}

/// Kills a child of this process and reaps it.
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
