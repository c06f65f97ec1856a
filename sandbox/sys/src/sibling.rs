//! A process made in two steps: a child of the caller that, once it has done what its namespaces and rights allow, clones
//! the process it stands for and ends. The second is a child of the first one's parent (CLONE_PARENT), which learns its
//! pid from memory that it shares with the first one only: the second holds neither that memory nor a socket to the
//! parent, so nothing that takes hold of it can tell the parent anything.

use core::sync::atomic::{AtomicI32, Ordering};

use crate::arch::call;
use crate::mark::Mark;
use crate::{Errno, FdRef, number};

const PAGE_BYTES: usize = 4096;
/// CLONE_PARENT, CLONE_PARENT_SETTID, SIGCHLD: what [`clone_sibling`] asks for.
pub(crate) const CLONE_FLAGS: usize = 0x8000 | 0x10_0000 | crate::process::SIGCHLD as usize;

/// Memory that a process shares with its next child, for the pid of that child's [`clone_sibling`].
#[derive(Debug)]
pub struct SiblingPid {
    page: *const AtomicI32,
}

impl SiblingPid {
    /// Makes it, for one child; ENOMEM.
    pub fn new() -> Result<Self, Errno> {
        const PROT_READ_WRITE: usize = 3;
        const MAP_SHARED_ANONYMOUS: usize = 0x21;
        let arguments = [0, PAGE_BYTES, PROT_READ_WRITE, MAP_SHARED_ANONYMOUS, usize::MAX, 0];
        // SAFETY: address 0 without MAP_FIXED lets the kernel choose a free range, so no memory in use is replaced.
        let page = unsafe { call(number::MMAP, arguments) }?;
        Ok(Self { page: page as *const AtomicI32 })
    }

    /// Later children of the caller do not get this memory (madvise, MADV_DONTFORK).
    pub fn hide_from_children(&self) -> Result<(), Errno> {
        const MADV_DONTFORK: usize = 10;
        self.advise(MADV_DONTFORK)
    }

    /// Makes it usable for one more child, without the cost of a new mapping: the page reads as zero and takes no memory
    /// until it is written to (madvise, MADV_REMOVE), and later children share it again (MADV_DOFORK). Only for memory
    /// whose pid has been read: the child that wrote it writes once.
    pub fn renew(&self) -> Result<(), Errno> {
        const MADV_REMOVE: usize = 9;
        const MADV_DOFORK: usize = 11;
        self.advise(MADV_REMOVE)?;
        self.advise(MADV_DOFORK)
    }

    fn advise(&self, advice: usize) -> Result<(), Errno> {
        // SAFETY: the range is this value's own mapping. No reference to its contents outlives a call of `get`, and
        // that MADV_REMOVE makes the word zero is what an atomic allows for.
        unsafe { call(number::MADVISE, [self.page as usize, PAGE_BYTES, advice]) }.map(drop)
    }

    /// The pid in the pid namespace of whoever called [`clone_sibling`]; `None` before.
    pub fn get(&self) -> Option<i32> {
        // SAFETY: the mapping is page-aligned, starts as zeros and lives as long as `self`. Both processes and the kernel
        // access it as one aligned 32-bit word, which an atomic allows.
        let pid = unsafe { &*self.page }.load(Ordering::Acquire);
        (pid != 0).then_some(pid)
    }
}

impl Drop for SiblingPid {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and no reference to it outlives a call of `get`.
        let _ = unsafe { call(number::MUNMAP, [self.page as usize, PAGE_BYTES]) };
    }
}

/// Which of the two processes this is after [`clone_sibling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sibling {
    /// The new one.
    New,
    /// The one that called.
    Caller,
}

/// clone(2) as fork, with CLONE_PARENT: the new process is a child of the caller's parent, which gets its SIGCHLD, and
/// lives in the pid namespace for children of the caller (setns(2)). Its pid is in `pid` before it runs; it does not
/// have that memory. The caller is only to end then; `held` is closed in it at once, so that who waits for the other's end of
/// it does not wait for that. Not clone3, which container profiles refuse with ENOSYS. EINVAL for the first process of a pid
/// namespace.
pub fn clone_sibling(pid: &SiblingPid, held: FdRef<'_>, mark: Mark) -> Result<Sibling, Errno> {
    pid.hide_from_children()?;
    // Without CLONE_SETTLS and CLONE_CHILD_SETTID nobody looks at these.
    let [fourth, fifth] = mark.arguments();
    // SAFETY: without CLONE_VM the new process has a copy of this stack (a null stack pointer asks for that) and returns
    // on it without touching the caller's. The kernel writes one i32 to the start of a mapping that `pid` keeps alive.
    let made = unsafe { call(number::CLONE, [CLONE_FLAGS, 0, pid.page as usize, fourth, fifth]) }?;
    if made == 0 {
        return Ok(Sibling::New);
    }
    // SAFETY: the call reads no memory. The caller is told not to use `held` any more: it ends.
    let _ = unsafe { call(number::CLOSE, [held.argument()]) };
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
