//! x86_64: `syscall`, number in rax, arguments in rdi, rsi, rdx, r10, r8, r9; rcx and r11 are overwritten (System V
//! ABI, AMD64 supplement, A.2.1).

use core::arch::asm;

/// Makes a system call; negative results are error numbers.
///
/// # Safety
/// The requirements of [`super::call`].
pub(crate) unsafe fn trap(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the registers are those of the kernel's calling convention, the two it clobbers are declared, and
    // memory counts as changed because `nomem` is not given. What the kernel does with the arguments is the
    // caller's promise.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Drops `BYTES` of memory before the page of the stack pointer (madvise, MADV_DONTNEED).
///
/// # Safety
/// Nothing but this thread's stack is mapped there, and `BYTES` is a multiple of the kernel's page size.
pub(crate) unsafe fn forget_stack<const BYTES: usize>() {
    // SAFETY: nothing is kept below the 128 bytes under the stack pointer (System V ABI, AMD64 supplement, 3.2.2), the end of
    // the range is not above them, and the block uses no stack itself: no byte that the program reads again changes.
    unsafe {
        asm!("lea rdi, [rsp - 128]", "and rdi, -4096", "sub rdi, rsi", "syscall", in("rsi") BYTES, in("rdx") super::MADV_DONTNEED,
            inlateout("rax") number::MADVISE => _, out("rdi") _, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
}

/// Value of this architecture in seccomp's input (include/uapi/linux/audit.h, AUDIT_ARCH_X86_64).
pub(crate) const AUDIT: u32 = 0xc000_003e;

/// System call numbers, from arch/x86/entry/syscalls/syscall_64.tbl.
pub(crate) mod number {
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const DUP3: usize = 292;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const GETDENTS64: usize = 217;
    pub(crate) const IOCTL: usize = 16;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const EXECVE: usize = 59;
    pub(crate) const EXECVEAT: usize = 322;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const KILL: usize = 62;
    pub(crate) const PTRACE: usize = 101;
    pub(crate) const PIDFD_SEND_SIGNAL: usize = 424;
    pub(crate) const SETGROUPS: usize = 116;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const SETSID: usize = 112;
    pub(crate) const SCHED_SETAFFINITY: usize = 203;
    pub(crate) const GETCPU: usize = 309;
    pub(crate) const SCHED_SETATTR: usize = 314;
    pub(crate) const SCHED_GETATTR: usize = 315;
    pub(crate) const IOPRIO_SET: usize = 251;
    pub(crate) const SET_MEMPOLICY: usize = 238;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const RT_SIGACTION: usize = 13;
    pub(crate) const RT_SIGSUSPEND: usize = 130;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const MOUNT_SETATTR: usize = 442;
    pub(crate) const SETSOCKOPT: usize = 54;
    pub(crate) const SENDMSG: usize = 46;
    pub(crate) const RECVMSG: usize = 47;
    pub(crate) const SIGNALFD4: usize = 289;
    pub(crate) const KEYCTL: usize = 250;
    pub(crate) const SECCOMP: usize = 317;
    pub(crate) const BPF: usize = 321;
}
