//! Process creation in two steps: a first child does the part of the set-up that needs its privileges and namespaces,
//! clones a second process and exits. The second process is a child of the first one's parent (CLONE_PARENT). The
//! parent reads the second process's PID from memory that it shares only with the first child. The second process has
//! neither that memory nor a socket to the parent, so an attacker who controls the second process cannot send messages
//! to the parent.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::arch::call;
use crate::mark::Mark;
use crate::{Errno, FdRef, number};

const PAGE_BYTES: usize = 4096;
/// The flags of [`clone_sibling`], which seccomp filters may examine: CLONE_PARENT, CLONE_PARENT_SETTID, SIGCHLD.
pub const CLONE_FLAGS: usize = 0x8000 | 0x10_0000 | crate::process::SIGCHLD as usize;

/// Memory that a process shares with its next child; the child's [`clone_sibling`] writes the PID of the second process
/// to it.
#[derive(Debug)]
pub struct SiblingPid {
    page: *const AtomicI32,
}

impl SiblingPid {
    /// Allocates the memory, for one child.
    ///
    /// # Errors
    /// ENOMEM if there is no memory.
    pub fn new() -> Result<Self, Errno> {
        let readable = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null address without MAP_FIXED lets the kernel choose a free range, so no memory in use is replaced.
        let page = unsafe { mmap_anonymous(null_mut(), PAGE_BYTES, readable, MapFlags::SHARED) }?;
        Ok(Self { page: page.cast() })
    }

    /// Excludes this memory from later children of the caller (madvise, MADV_DONTFORK).
    pub fn hide_from_children(&self) -> Result<(), Errno> {
        self.advise(Advice::LinuxDontFork)
    }

    /// Prepares the memory for one more child: clears the PID, and shares the memory with later children again
    /// (MADV_DOFORK). Only for memory whose PID has been read: a child writes to it only once.
    ///
    /// # Errors
    /// ENOMEM if there is no memory.
    pub fn renew(&self) -> Result<(), Errno> {
        self.pid().store(0, Ordering::Release);
        self.advise(Advice::LinuxDoFork)
    }

    /// Returns the page to the kernel until the next PID is written to it (MADV_REMOVE). Only for memory whose PID has
    /// been read.
    pub fn give_back(&self) {
        // If it fails, the page stays.
        let _ = self.advise(Advice::LinuxRemove);
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this value's own mapping. No reference to its contents outlives a call of a method, and
        // an atomic allows that MADV_REMOVE makes the word zero.
        Ok(unsafe { madvise(self.page.cast_mut().cast(), PAGE_BYTES, advice) }?)
    }

    /// The PID of the second process in the PID namespace of the process that called [`clone_sibling`]; `None` before
    /// that call.
    pub fn get(&self) -> Option<i32> {
        let pid = self.pid().load(Ordering::Acquire);
        (pid != 0).then_some(pid)
    }

    fn pid(&self) -> &AtomicI32 {
        // SAFETY: the mapping is page-aligned, starts as zeros and lives as long as `self`. Both processes and the kernel
        // access it as one aligned 32-bit word, which an atomic allows.
        unsafe { &*self.page }
    }
}

impl Drop for SiblingPid {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and no reference to it outlives a call of a method.
        let _ = unsafe { munmap(self.page.cast_mut().cast(), PAGE_BYTES) };
    }
}

/// The result of [`clone_sibling`] in each of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sibling {
    /// The function returned in the new process.
    New,
    /// The function returned in the calling process.
    Caller,
}

/// clone(2) with the semantics of fork and CLONE_PARENT: the new process is a child of the caller's parent, which gets
/// its SIGCHLD, and is in the PID namespace for children of the caller (setns(2)). Its PID is in `pid` before it runs;
/// the new process does not have the memory of `pid`. The caller must exit afterwards; `held` is closed in it
/// immediately, so that a reader of the other end does not wait for the caller's exit. clone3 is not used, because
/// container profiles refuse it with ENOSYS.
///
/// # Errors
/// EINVAL if the caller is the first process of a PID namespace; otherwise the kernel's error.
pub fn clone_sibling(pid: &SiblingPid, held: FdRef<'_>, mark: Mark) -> Result<Sibling, Errno> {
    pid.hide_from_children()?;
    // These arguments are unused without CLONE_SETTLS and CLONE_CHILD_SETTID.
    let [fourth, fifth] = mark.arguments();
    // SAFETY: without CLONE_VM the new process has a copy of this stack (a null stack pointer asks for that) and returns
    // on it without touching the caller's. The kernel writes one i32 to the start of a mapping that `pid` keeps alive.
    let made = unsafe { call(number::CLONE, [CLONE_FLAGS, 0, pid.page as usize, fourth, fifth]) }?;
    if made == 0 {
        return Ok(Sibling::New);
    }
    // SAFETY: the caller must not use `held` any more.
    let _ = unsafe { rustix::io::try_close(held.number()) };
    Ok(Sibling::Caller)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{self, Clone, Status};

    #[test]
    fn a_sibling_is_reaped_by_the_parent_which_knows_its_pid() {
        let sibling = SiblingPid::new().unwrap();
        let Clone::Parent { pid: first, .. } = process::clone(0, None).unwrap() else {
            match clone_sibling(&sibling, FdRef::STANDARD_STREAMS[0], Mark::NONE) {
                Ok(Sibling::New) => process::exit(7),
                Ok(Sibling::Caller) => process::exit(3),
                Err(_) => process::exit(9),
            }
        };
        let end = |pid| loop {
            if let Some((_, status)) = process::reap(pid).unwrap() {
                return status;
            }
        };
        assert_eq!(end(first), Status::Code(3));
        let second = sibling.get().unwrap();
        assert_eq!(end(second), Status::Code(7));

        sibling.hide_from_children().unwrap();
        sibling.renew().unwrap();
        assert_eq!(sibling.get(), None);
        sibling.give_back();
        assert_eq!(sibling.get(), None);
        let Clone::Parent { pid: first, .. } = process::clone(0, None).unwrap() else {
            match clone_sibling(&sibling, FdRef::STANDARD_STREAMS[0], Mark::NONE) {
                Ok(Sibling::New) => process::exit(8),
                Ok(Sibling::Caller) => process::exit(4),
                Err(_) => process::exit(9),
            }
        };
        assert_eq!(end(first), Status::Code(4));
        assert_eq!(end(sibling.get().unwrap()), Status::Code(8));
    }
}
