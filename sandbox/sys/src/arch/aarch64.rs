//! aarch64: `svc 0`, number in x8, arguments in x0 to x5, result in x0; no other register is changed (Linux,
//! arch/arm64/kernel/entry.S).

use core::arch::asm;

/// Makes a system call; negative results are error numbers.
///
/// # Safety
/// The requirements of [`super::call`].
pub(crate) unsafe fn trap(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the registers are those of the kernel's calling convention, which keeps all others, and memory counts
    // as changed because `nomem` is not given. What the kernel does with the arguments is the caller's promise.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d,
            in("x4") e, in("x5") f, options(nostack));
    }
    result
}

/// Drops `BYTES` of memory before the page of the stack pointer (madvise, MADV_DONTNEED).
///
/// # Safety
/// Nothing but this thread's stack is mapped there, and `BYTES` is a multiple of the kernel's page size.
pub(crate) unsafe fn forget_stack<const BYTES: usize>() {
    // SAFETY: nothing is kept below the stack pointer (AAPCS64, 6.4.5), the end of the range is not above it, and the block
    // uses no stack itself: no byte that the program reads again changes.
    unsafe {
        asm!("mov x0, sp", "and x0, x0, #-4096", "sub x0, x0, x1", "svc 0", in("x8") super::number::MADVISE, out("x0") _,
            in("x1") BYTES, in("x2") super::MADV_DONTNEED, options(nostack));
    }
}

/// Value of this architecture in seccomp's input (include/uapi/linux/audit.h, AUDIT_ARCH_AARCH64).
pub(crate) const AUDIT: u32 = 0xc000_00b7;
