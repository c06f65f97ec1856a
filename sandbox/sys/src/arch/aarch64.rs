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
    pub(crate) const READ: usize = 63;
    pub(crate) const WRITE: usize = 64;
    pub(crate) const CLOSE: usize = 57;
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const DUP3: usize = 24;
    pub(crate) const FCNTL: usize = 25;
    pub(crate) const OPENAT: usize = 56;
    pub(crate) const OPENAT2: usize = 437;
    pub(crate) const PREAD64: usize = 67;
    pub(crate) const WRITEV: usize = 66;
    pub(crate) const LSEEK: usize = 62;
    pub(crate) const FTRUNCATE: usize = 46;
    pub(crate) const FSYNC: usize = 82;
    pub(crate) const FCHDIR: usize = 50;
    pub(crate) const MKDIRAT: usize = 34;
    pub(crate) const MKNODAT: usize = 33;
    pub(crate) const SYMLINKAT: usize = 36;
    pub(crate) const READLINKAT: usize = 78;
    pub(crate) const UNLINKAT: usize = 35;
    pub(crate) const RENAMEAT: usize = 38;
    pub(crate) const FCHOWN: usize = 55;
    pub(crate) const FCHOWNAT: usize = 54;
    pub(crate) const STATX: usize = 291;
    pub(crate) const GETDENTS64: usize = 61;
    pub(crate) const FSTATFS: usize = 44;
    pub(crate) const MMAP: usize = 222;
    pub(crate) const MUNMAP: usize = 215;
    pub(crate) const MADVISE: usize = 233;
    pub(crate) const MEMFD_CREATE: usize = 279;
    pub(crate) const PIPE2: usize = 59;
    pub(crate) const IOCTL: usize = 29;
    pub(crate) const CLONE: usize = 220;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const EXECVE: usize = 221;
    pub(crate) const EXECVEAT: usize = 281;
    pub(crate) const EXIT_GROUP: usize = 94;
    pub(crate) const WAIT4: usize = 260;
    pub(crate) const SETNS: usize = 268;
    pub(crate) const UNSHARE: usize = 97;
    pub(crate) const KILL: usize = 129;
    pub(crate) const PIDFD_OPEN: usize = 434;
    pub(crate) const PIDFD_SEND_SIGNAL: usize = 424;
    pub(crate) const PRCTL: usize = 167;
    pub(crate) const SETRESUID: usize = 147;
    pub(crate) const SETRESGID: usize = 149;
    pub(crate) const SETGROUPS: usize = 159;
    pub(crate) const CAPGET: usize = 90;
    pub(crate) const CAPSET: usize = 91;
    pub(crate) const PRLIMIT64: usize = 261;
    pub(crate) const SETSID: usize = 157;
    pub(crate) const SCHED_SETAFFINITY: usize = 122;
    pub(crate) const GETCPU: usize = 168;
    pub(crate) const SCHED_SETATTR: usize = 274;
    pub(crate) const SCHED_GETATTR: usize = 275;
    pub(crate) const IOPRIO_SET: usize = 30;
    pub(crate) const SET_MEMPOLICY: usize = 237;
    pub(crate) const UMASK: usize = 166;
    pub(crate) const GETPID: usize = 172;
    pub(crate) const SETHOSTNAME: usize = 161;
    pub(crate) const RT_SIGPROCMASK: usize = 135;
    pub(crate) const RT_SIGACTION: usize = 134;
    pub(crate) const RT_SIGSUSPEND: usize = 133;
    pub(crate) const CLOCK_GETTIME: usize = 113;
    pub(crate) const CLOCK_NANOSLEEP: usize = 115;
    pub(crate) const MOUNT: usize = 40;
    pub(crate) const UMOUNT2: usize = 39;
    pub(crate) const PIVOT_ROOT: usize = 41;
    pub(crate) const OPEN_TREE: usize = 428;
    pub(crate) const MOVE_MOUNT: usize = 429;
    pub(crate) const FSOPEN: usize = 430;
    pub(crate) const FSCONFIG: usize = 431;
    pub(crate) const FSMOUNT: usize = 432;
    pub(crate) const MOUNT_SETATTR: usize = 442;
    pub(crate) const SOCKET: usize = 198;
    pub(crate) const SOCKETPAIR: usize = 199;
    pub(crate) const SETSOCKOPT: usize = 208;
    pub(crate) const BIND: usize = 200;
    pub(crate) const LISTEN: usize = 201;
    pub(crate) const ACCEPT4: usize = 242;
    pub(crate) const CONNECT: usize = 203;
    pub(crate) const SENDMSG: usize = 211;
    pub(crate) const RECVMSG: usize = 212;
    pub(crate) const EPOLL_CREATE1: usize = 20;
    pub(crate) const EPOLL_CTL: usize = 21;
    pub(crate) const EPOLL_PWAIT: usize = 22;
    pub(crate) const SIGNALFD4: usize = 74;
    pub(crate) const KEYCTL: usize = 219;
    pub(crate) const GETRANDOM: usize = 278;
    pub(crate) const SECCOMP: usize = 277;
    pub(crate) const BPF: usize = 280;
}
