//! The stack of a process that waits for a long time: pages that earlier calls used are returned to the kernel.

use crate::arch;

/// The stack that the kernel created for a program's first thread. No other mapping is within 1 MiB below it
/// (mm/mmap.c, `stack_guard_gap`).
#[derive(Debug)]
pub struct FirstStack(());

impl FirstStack {
    /// Returns a handle of this program's stack.
    ///
    /// # Safety
    /// The caller runs on the stack that execve(2) created, the program has no other threads, and the kernel was not
    /// booted with a `stack_guard_gap` of less than 64 KiB.
    pub const unsafe fn claim() -> Self {
        Self(())
    }

    /// Returns the pages that deeper calls have used to the kernel (madvise, MADV_DONTNEED), up to 64 KiB below the
    /// caller. For a process that then waits for a long time; the next deep call has a page fault for each page.
    pub fn forget_deeper(&self) {
        // A multiple of every page size, because the kernel rounds a length up. Where kernel pages are larger than 4 KiB
        // the address may be no multiple of one: then the call fails and the pages stay.
        const BYTES: usize = 64 << 10;
        // SAFETY: `claim` promised that nothing else is below this stack, and the number is a multiple, as said above.
        unsafe { arch::forget_stack::<BYTES>() };
    }
}
