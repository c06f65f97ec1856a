//! The jail of the process that speaks to registries: it has the network, and nothing else that could be taken over. Its root
//! holds the two files that a resolver reads, and it is a user that owns nothing.

use std::fs::File;

use coracle_sandbox::jail::{self, AllowedWith};
use nix::sys::resource::{Resource, setrlimit};

use crate::fetch;

/// Most memory: stacks and buffers of 64 threads, and certificates many times over.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
/// Open files: a connection, a pipe and a resolver's socket for each request, and connections that are kept.
const DESCRIPTORS_MAX: u64 = 256;

/// Memory, threads, time, and the descriptors that it has.
pub(super) const CALLS: &[&str] = &[
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "futex",
    "clock_gettime",
    "gettimeofday",
    "nanosleep",
    "clock_nanosleep",
    "getrandom",
    "sched_yield",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "sigaltstack",
    "exit_group",
    // In its PID namespace there is nobody else, and abort(3) may be called by any of its threads.
    "tkill",
    "read",
    "write",
    "readv",
    "writev",
    "close",
    "fcntl",
    "poll",
    "ppoll",
    "fstat",
    "lseek",
    // The files of its root.
    "pwrite64",
    "ftruncate",
    // Sockets, once they are made.
    "connect",
    "bind",
    "sendto",
    "sendmsg",
    "recvfrom",
    "recvmsg",
    "getsockname",
    "getpeername",
    "getsockopt",
    "shutdown",
];

/// O_ACCMODE, O_CREAT, O_TRUNC and the bit of O_TMPFILE: an open without them only reads.
const WRITES: u64 = 0o3 | 0o100 | 0o1000 | 0o20_000_000;
/// CLONE_THREAD.
const THREAD: u64 = 0x1_0000;
/// CLONE_NEW…, as clone(2) takes them.
const NAMESPACES: u64 = 0x7e02_0000;
const AF_INET: u64 = 2;
const AF_INET6: u64 = 10;
const IPPROTO_TCP: u64 = 6;
const IPPROTO_UDP: u64 = 17;
const IPPROTO_IPV6: u64 = 41;
const SOL_SOCKET: u64 = 1;
const FIONBIO: u64 = 0x5421;
/// Arguments are int: the kernel looks at 32 bits of these.
const INT: u64 = 0xffff_ffff;

/// Calls that are allowed for some arguments only.
pub(super) const CALLS_WITH: &[AllowedWith] = &[
    // Reading: /etc/resolv.conf and /etc/hosts are all there is.
    AllowedWith { calls: &["open"], arguments: &[(1, WRITES, 0)] },
    AllowedWith { calls: &["openat"], arguments: &[(2, WRITES, 0)] },
    // Threads of this process, no other process.
    AllowedWith { calls: &["clone"], arguments: &[(0, THREAD | NAMESPACES, THREAD)] },
    // TCP and UDP, over IPv4 and IPv6; no other family of protocols.
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, 0)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, IPPROTO_UDP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, 0)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, IPPROTO_UDP)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, SOL_SOCKET)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, IPPROTO_IPV6)] },
    AllowedWith { calls: &["ioctl"], arguments: &[(1, INT, FIONBIO)] },
];

/// Confines this process for good, before it reads a byte of anybody; gives the files of its root, to be written to.
///
/// # Errors
/// The step that this host does not allow.
pub(crate) fn confine() -> Result<Vec<File>, String> {
    let tried = |error: coracle_sandbox::Error| error.to_string();
    jail::close_descriptors(3).map_err(tried)?;
    for (resource, most) in [
        (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, jail::FILES_BYTES_MAX),
    ] {
        setrlimit(resource, most, most).map_err(|errno| format!("set {resource:?}: {errno}"))?;
    }
    let files = jail::shut_in_on_network(&fetch::FILES).map_err(tried)?;
    jail::become_nobody().map_err(tried)?;
    jail::allow_only_with(CALLS, CALLS_WITH).map_err(tried)?;
    Ok(files)
}
