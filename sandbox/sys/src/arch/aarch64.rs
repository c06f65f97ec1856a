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
        asm!("mov x0, sp", "and x0, x0, #-4096", "sub x0, x0, x1", "svc 0", in("x8") number::MADVISE, out("x0") _,
            in("x1") BYTES, in("x2") super::MADV_DONTNEED, options(nostack));
    }
}

/// Value of this architecture in seccomp's input (include/uapi/linux/audit.h, AUDIT_ARCH_AARCH64).
pub(crate) const AUDIT: u32 = 0xc000_00b7;

/// System call numbers, from include/uapi/asm-generic/unistd.h.
pub(crate) mod number {
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const DUP3: usize = 24;
    pub(crate) const MADVISE: usize = 233;
    pub(crate) const GETDENTS64: usize = 61;
    pub(crate) const IOCTL: usize = 29;
    pub(crate) const CLONE: usize = 220;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const EXECVE: usize = 221;
    pub(crate) const EXECVEAT: usize = 281;
    pub(crate) const EXIT_GROUP: usize = 94;
    pub(crate) const KILL: usize = 129;
    pub(crate) const PTRACE: usize = 117;
    pub(crate) const PIDFD_SEND_SIGNAL: usize = 424;
    pub(crate) const SETGROUPS: usize = 159;
    pub(crate) const PRLIMIT64: usize = 261;
    pub(crate) const SETSID: usize = 157;
    pub(crate) const SCHED_SETAFFINITY: usize = 122;
    pub(crate) const GETCPU: usize = 168;
    pub(crate) const SCHED_SETATTR: usize = 274;
    pub(crate) const SCHED_GETATTR: usize = 275;
    pub(crate) const IOPRIO_SET: usize = 30;
    pub(crate) const SET_MEMPOLICY: usize = 237;
    pub(crate) const RT_SIGPROCMASK: usize = 135;
    pub(crate) const RT_SIGACTION: usize = 134;
    pub(crate) const RT_SIGSUSPEND: usize = 133;
    pub(crate) const CLOCK_GETTIME: usize = 113;
    pub(crate) const MOUNT_SETATTR: usize = 442;
    pub(crate) const SETSOCKOPT: usize = 208;
    pub(crate) const SENDMSG: usize = 211;
    pub(crate) const RECVMSG: usize = 212;
    pub(crate) const SIGNALFD4: usize = 74;
    pub(crate) const KEYCTL: usize = 219;
    pub(crate) const SECCOMP: usize = 277;
    pub(crate) const BPF: usize = 280;
}
