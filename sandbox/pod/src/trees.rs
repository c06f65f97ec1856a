//! Detached trees of mounts between their opening, in the pod's or the host's mount namespace, and their attachment in the
//! container.

use core::ffi::CStr;

use coracle_sys::mount::{self, Attributes};
use coracle_sys::{Errno, Fd, FdRef, fs, process};

/// Number of slots for detached trees (`Op::OpenTree`).
const TREES_MAX: usize = 256;

/// A detached tree of mounts.
pub(crate) struct Tree {
    pub(crate) mounts: Fd,
    /// The directory of the host of which the tree is a copy, if the tree includes submounts; otherwise `None`.
    pub(crate) source: Option<Fd>,
}

/// The slots of a launch record.
pub(crate) struct Trees {
    slots: [Option<Tree>; TREES_MAX],
    /// The process's own mount namespace; `None` until the process has entered the host's.
    own_namespace: Option<Fd>,
}

impl Trees {
    pub(crate) fn new() -> Self {
        Self { slots: [const { None }; TREES_MAX], own_namespace: None }
    }

    /// Returns the tree in a slot and empties the slot.
    pub(crate) fn take(&mut self, slot: u16) -> Result<Tree, Errno> {
        self.slots.get_mut(usize::from(slot)).and_then(Option::take).ok_or(Errno::EINVAL)
    }

    /// Stores a tree in a slot.
    pub(crate) fn keep(&mut self, slot: u16, tree: Tree) -> Result<(), Errno> {
        *self.slots.get_mut(usize::from(slot)).ok_or(Errno::EINVAL)? = Some(tree);
        Ok(())
    }

    /// Clones the tree at `path`, in the mount namespace `host` if there is one.
    pub(crate) fn open(
        &mut self,
        slot: u16,
        path: &CStr,
        is_recursive: bool,
        host: Option<FdRef<'_>>,
    ) -> Result<(), Errno> {
        let tree = match host {
            Some(host) => self.on_the_host(host, || open_on_the_host(path, is_recursive))?,
            None => Tree { mounts: clone_tree(path, is_recursive)?, source: None },
        };
        self.keep(slot, tree)
    }

    /// Makes the tree in a slot idmapped.
    #[inline(never)]
    pub(crate) fn idmap(
        &mut self,
        slot: u16,
        user_namespace: FdRef<'_>,
        host: FdRef<'_>,
    ) -> Result<(), Errno> {
        let Tree { mounts, source } = self.take(slot)?;
        let mounts = match (map_owners(&mounts, user_namespace, true), source) {
            // Bound namespaces cannot be idmapped.
            (Err(Errno::EINVAL), Some(source)) => {
                let mounts = self.clone_without_namespaces(&source, host)?;
                map_owners(&mounts, user_namespace, true)?;
                mounts
            }
            (Err(errno), _) => return Err(errno),
            (Ok(()), _) => mounts,
        };
        // Without the source: a tree that `Op::Attach` would clone again would not be idmapped.
        self.keep(slot, Tree { mounts, source: None })
    }

    /// Records that the process is in a new mount namespace, to which no path refers once the root has changed.
    pub(crate) fn has_own_namespace(&mut self) -> Result<(), Errno> {
        if self.own_namespace.is_some() { self.open_own_namespace() } else { Ok(()) }
    }

    /// Records that the process joins another mount namespace.
    pub(crate) fn forget_own_namespace(&mut self) {
        self.own_namespace = None;
    }

    /// Calls `open` in the mount namespace `host`, for files that do not exist in the pod's.
    pub(crate) fn on_the_host<T>(
        &mut self,
        host: FdRef<'_>,
        open: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        if self.own_namespace.is_none() {
            self.open_own_namespace()?;
        }
        process::setns(host, process::CLONE_NEWNS)?;
        let opened = open();
        let own = self.own_namespace.as_ref().ok_or(Errno::EINVAL)?;
        process::setns(own.borrow(), process::CLONE_NEWNS)?;
        opened
    }

    fn open_own_namespace(&mut self) -> Result<(), Errno> {
        let path = c"/proc/self/ns/mnt";
        self.own_namespace = Some(fs::open(FdRef::WORKING_DIRECTORY, path, fs::O_RDONLY, 0)?);
        Ok(())
    }

    /// Clones the directory `source` of the host with the mounts below it, but without mount namespaces that are bound
    /// to files below it (`unshare --mount=FILE`, snapd's `/run/snapd/ns/*.mnt`). The kernel refuses to attach a tree
    /// that contains an older mount namespace (ELOOP), so that namespaces cannot hold each other.
    ///
    /// The kernel omits such mounts when it copies a whole mount namespace. The function makes such a copy, in which
    /// the working directory is moved to the same directory. No path is resolved, so this works after pivot_root, too.
    #[inline(never)]
    pub(crate) fn clone_without_namespaces(&mut self, source: &Fd, host: FdRef<'_>) -> Result<Fd, Errno> {
        self.on_the_host(host, || {
            fs::change_directory(source.borrow())?;
            process::unshare(process::CLONE_NEWNS)?;
            clone_tree(c".", true)
        })
    }
}

/// Makes the detached `tree` idmapped with `user_namespace`.
pub(crate) fn map_owners(tree: &Fd, user_namespace: FdRef<'_>, is_recursive: bool) -> Result<(), Errno> {
    let attributes = Attributes {
        set: mount::MOUNT_ATTR_IDMAP,
        user_namespace: user_namespace.number() as u64,
        ..Attributes::default()
    };
    mount::set_attributes(tree.borrow(), &attributes, if is_recursive { mount::AT_RECURSIVE } else { 0 })
}

/// Clones the mount tree at a path of the host.
fn open_on_the_host(path: &CStr, is_recursive: bool) -> Result<Tree, Errno> {
    if is_recursive {
        match fs::open(FdRef::WORKING_DIRECTORY, path, fs::O_PATH | fs::O_DIRECTORY, 0) {
            Ok(source) => {
                let flags = mount::AT_EMPTY_PATH | mount::AT_RECURSIVE;
                let mounts = mount::clone_tree(source.borrow(), c"", flags)?;
                return Ok(Tree { mounts, source: Some(source) });
            }
            // Nothing is mounted below a file.
            Err(Errno::ENOTDIR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(Tree { mounts: clone_tree(path, is_recursive)?, source: None })
}

fn clone_tree(path: &CStr, is_recursive: bool) -> Result<Fd, Errno> {
    let flags = if is_recursive { mount::AT_RECURSIVE } else { 0 };
    mount::clone_tree(FdRef::WORKING_DIRECTORY, path, flags)
}
