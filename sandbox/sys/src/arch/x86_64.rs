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
    pub(crate) const READ: usize = 0;
    pub(crate) const WRITE: usize = 1;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const DUP3: usize = 292;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const OPENAT2: usize = 437;
    pub(crate) const PREAD64: usize = 17;
    pub(crate) const WRITEV: usize = 20;
    pub(crate) const LSEEK: usize = 8;
    pub(crate) const FTRUNCATE: usize = 77;
    pub(crate) const FSYNC: usize = 74;
    pub(crate) const FCHDIR: usize = 81;
    pub(crate) const MKDIRAT: usize = 258;
    pub(crate) const MKNODAT: usize = 259;
    pub(crate) const SYMLINKAT: usize = 266;
    pub(crate) const READLINKAT: usize = 267;
    pub(crate) const UNLINKAT: usize = 263;
    pub(crate) const RENAMEAT: usize = 264;
    pub(crate) const FCHOWN: usize = 93;
    pub(crate) const FCHOWNAT: usize = 260;
    pub(crate) const STATX: usize = 332;
    pub(crate) const GETDENTS64: usize = 217;
    pub(crate) const FSTATFS: usize = 138;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const MUNMAP: usize = 11;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const MEMFD_CREATE: usize = 319;
    pub(crate) const PIPE2: usize = 293;
    pub(crate) const IOCTL: usize = 16;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const EXECVE: usize = 59;
    pub(crate) const EXECVEAT: usize = 322;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const WAIT4: usize = 61;
    pub(crate) const SETNS: usize = 308;
    pub(crate) const UNSHARE: usize = 272;
    pub(crate) const KILL: usize = 62;
    pub(crate) const PIDFD_OPEN: usize = 434;
    pub(crate) const PIDFD_SEND_SIGNAL: usize = 424;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const SETRESUID: usize = 117;
    pub(crate) const SETRESGID: usize = 119;
    pub(crate) const SETGROUPS: usize = 116;
    pub(crate) const CAPGET: usize = 125;
    pub(crate) const CAPSET: usize = 126;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const SETSID: usize = 112;
    pub(crate) const UMASK: usize = 95;
    pub(crate) const SCHED_SETAFFINITY: usize = 203;
    pub(crate) const GETCPU: usize = 309;
    pub(crate) const SCHED_SETATTR: usize = 314;
    pub(crate) const SCHED_GETATTR: usize = 315;
    pub(crate) const IOPRIO_SET: usize = 251;
    pub(crate) const SET_MEMPOLICY: usize = 238;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const SETHOSTNAME: usize = 170;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const RT_SIGACTION: usize = 13;
    pub(crate) const RT_SIGSUSPEND: usize = 130;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const CLOCK_NANOSLEEP: usize = 230;
    pub(crate) const MOUNT: usize = 165;
    pub(crate) const UMOUNT2: usize = 166;
    pub(crate) const PIVOT_ROOT: usize = 155;
    pub(crate) const OPEN_TREE: usize = 428;
    pub(crate) const MOVE_MOUNT: usize = 429;
    pub(crate) const FSOPEN: usize = 430;
    pub(crate) const FSCONFIG: usize = 431;
    pub(crate) const FSMOUNT: usize = 432;
    pub(crate) const MOUNT_SETATTR: usize = 442;
    pub(crate) const SOCKET: usize = 41;
    pub(crate) const SOCKETPAIR: usize = 53;
    pub(crate) const SETSOCKOPT: usize = 54;
    pub(crate) const BIND: usize = 49;
    pub(crate) const LISTEN: usize = 50;
    pub(crate) const ACCEPT4: usize = 288;
    pub(crate) const CONNECT: usize = 42;
    pub(crate) const SENDMSG: usize = 46;
    pub(crate) const RECVMSG: usize = 47;
    pub(crate) const EPOLL_CREATE1: usize = 291;
    pub(crate) const EPOLL_CTL: usize = 233;
    pub(crate) const EPOLL_PWAIT: usize = 281;
    pub(crate) const SIGNALFD4: usize = 289;
    pub(crate) const KEYCTL: usize = 250;
    pub(crate) const GETRANDOM: usize = 318;
    pub(crate) const SECCOMP: usize = 317;
    pub(crate) const BPF: usize = 321;
}
