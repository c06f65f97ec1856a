//! riscv64: `ecall`, number in a7, arguments in a0 to a5, result in a0; no other register is changed (Linux,
//! arch/riscv/kernel/entry.S).

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
        asm!("ecall", in("a7") number, inlateout("a0") a as isize => result, in("a1") b, in("a2") c, in("a3") d,
            in("a4") e, in("a5") f, options(nostack));
    }
    result
}

/// Drops `BYTES` of memory before the page of the stack pointer (madvise, MADV_DONTNEED).
///
/// # Safety
/// Nothing but this thread's stack is mapped there, and `BYTES` is a multiple of the kernel's page size.
pub(crate) unsafe fn forget_stack<const BYTES: usize>() {
    // SAFETY: nothing is kept below the stack pointer (RISC-V ELF psABI, "Integer Calling Convention"), the end of the range
    // is not above it, and the block uses no stack itself: no byte that the program reads again changes.
    unsafe {
        asm!("srli a0, sp, 12", "slli a0, a0, 12", "sub a0, a0, a1", "ecall", in("a7") super::number::MADVISE, out("a0") _,
            in("a1") BYTES, in("a2") super::MADV_DONTNEED, options(nostack));
    }
}

/// Value of this architecture in seccomp's input (include/uapi/linux/audit.h, AUDIT_ARCH_RISCV64).
pub(crate) const AUDIT: u32 = 0xc000_00f3;
