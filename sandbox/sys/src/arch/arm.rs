//! arm: `svc 0`, number in r7, arguments in r0 to r5, result in r0; no other register is changed (Linux,
//! arch/arm/kernel/entry-common.S). Only the EABI in ARM mode: in Thumb mode r7 is the frame pointer.

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
        asm!("svc 0", in("r7") number, inlateout("r0") a as isize => result, in("r1") b, in("r2") c, in("r3") d,
            in("r4") e, in("r5") f, options(nostack));
    }
    result
}

/// Drops `BYTES` of memory before the page of the stack pointer (madvise, MADV_DONTNEED).
///
/// # Safety
/// Nothing but this thread's stack is mapped there, and `BYTES` is a multiple of the kernel's page size.
pub(crate) unsafe fn forget_stack<const BYTES: usize>() {
    // SAFETY: nothing is kept below the stack pointer (AAPCS32, 6.2.1.2), the end of the range is not above it, and the block
    // uses no stack itself: no byte that the program reads again changes.
    unsafe {
        asm!("lsr r0, sp, #12", "lsl r0, r0, #12", "sub r0, r0, r1", "svc 0", in("r7") number::MADVISE, out("r0") _,
            in("r1") BYTES, in("r2") super::MADV_DONTNEED, options(nostack));
    }
}

/// Value of this architecture in seccomp's input (include/uapi/linux/audit.h, AUDIT_ARCH_ARM).
pub(crate) const AUDIT: u32 = 0x4000_0028;

/// System call numbers, from arch/arm/tools/syscall.tbl.
pub(crate) mod number {
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const DUP3: usize = 358;
    pub(crate) const MADVISE: usize = 220;
    pub(crate) const GETDENTS64: usize = 217;
    pub(crate) const IOCTL: usize = 54;
    pub(crate) const CLONE: usize = 120;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const EXECVE: usize = 11;
    pub(crate) const EXECVEAT: usize = 387;
    pub(crate) const EXIT_GROUP: usize = 248;
    pub(crate) const KILL: usize = 37;
    pub(crate) const PTRACE: usize = 26;
    pub(crate) const PIDFD_SEND_SIGNAL: usize = 424;
    /// setgroups32: the call without the suffix takes 16-bit groups.
    pub(crate) const SETGROUPS: usize = 206;
    pub(crate) const PRLIMIT64: usize = 369;
    pub(crate) const SETSID: usize = 66;
    pub(crate) const SCHED_SETAFFINITY: usize = 241;
    pub(crate) const GETCPU: usize = 345;
    pub(crate) const SCHED_SETATTR: usize = 380;
    pub(crate) const SCHED_GETATTR: usize = 381;
    pub(crate) const IOPRIO_SET: usize = 314;
    pub(crate) const SET_MEMPOLICY: usize = 321;
    pub(crate) const RT_SIGPROCMASK: usize = 175;
    pub(crate) const RT_SIGACTION: usize = 174;
    pub(crate) const RT_SIGSUSPEND: usize = 179;
    /// clock_gettime64: the call without the suffix has 32-bit seconds, which end in 2038.
    pub(crate) const CLOCK_GETTIME: usize = 403;
    pub(crate) const MOUNT_SETATTR: usize = 442;
    pub(crate) const SETSOCKOPT: usize = 294;
    pub(crate) const SENDMSG: usize = 296;
    pub(crate) const RECVMSG: usize = 297;
    pub(crate) const SIGNALFD4: usize = 355;
    pub(crate) const KEYCTL: usize = 311;
    pub(crate) const SECCOMP: usize = 383;
    pub(crate) const BPF: usize = 386;
}
