//! Confinement of the fetcher process, whose only access is to the network. Its root directory contains the
//! two files of the resolver, and its user owns no files.

use std::fs::File;

use coracle_sandbox::jail::{self, AllowedWith};
use nix::sys::resource::{Resource, setrlimit};

use crate::fetch;

/// Memory limit in bytes: stacks and buffers of 64 threads, and certificates.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
/// Limit of open files: a connection, a pipe and a resolver socket for each request, and idle connections.
const DESCRIPTORS_MAX: u64 = 256;

/// Allowed system calls in addition to [`super::RUNTIME_CALLS`].
pub(super) const CALLS: &[&str] = &[
    "nanosleep",
    "clock_nanosleep",
    "sigaltstack",
    // There is no other process in its PID namespace, and any thread may call abort(3).
    "tkill",
    "fcntl",
    // The files in its root directory.
    "pwrite64",
    "ftruncate",
    // Operations on open sockets.
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

/// The open flags O_ACCMODE, O_CREAT, O_TRUNC and the bit of O_TMPFILE: without them, open permits reading
/// only.
pub(super) const WRITES: u64 = 0o3 | 0o100 | 0o1000 | 0o20_000_000;
/// The flag CLONE_THREAD of clone(2).
pub(super) const THREAD: u64 = 0x1_0000;
/// The CLONE_NEW… flags of clone(2).
pub(super) const NAMESPACES: u64 = 0x7e02_0000;
const AF_INET: u64 = 2;
const AF_INET6: u64 = 10;
pub(super) const IPPROTO_TCP: u64 = 6;
const IPPROTO_UDP: u64 = 17;
const IPPROTO_IPV6: u64 = 41;
pub(super) const SOL_SOCKET: u64 = 1;
pub(super) const FIONBIO: u64 = 0x5421;
/// Mask of int arguments, of which the kernel uses 32 bits.
pub(super) const INT: u64 = 0xffff_ffff;

/// System calls that are permitted only with certain arguments.
pub(super) const CALLS_WITH: &[AllowedWith] = &[
    // Reading files: only /etc/resolv.conf and /etc/hosts exist.
    AllowedWith { calls: &["open"], arguments: &[(1, WRITES, 0)] },
    AllowedWith { calls: &["openat"], arguments: &[(2, WRITES, 0)] },
    // Threads of this process, but no processes.
    AllowedWith { calls: &["clone"], arguments: &[(0, THREAD | NAMESPACES, THREAD)] },
    // TCP and UDP over IPv4 and IPv6; no other protocol family.
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

/// Confines this process permanently before it reads any data; returns the files of its root directory,
/// opened for writing.
///
/// # Errors
/// The step that this host does not permit.
pub(crate) fn confine() -> Result<Vec<File>, String> {
    let tried = |error: coracle_sandbox::Error| error.to_string();
    jail::close_descriptors(3).map_err(tried)?;
    for (resource, most) in [
        (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, jail::FILES_BYTES_MAX),
    ] {
        setrlimit(resource, most, most)
            .map_err(|errno| format!("set {resource:?}: {}", coracle_sandbox::describe_errno(errno)))?;
    }
    let files = jail::shut_in_on_network(&fetch::FILES).map_err(tried)?;
    jail::become_nobody().map_err(tried)?;
    set_filter().map_err(tried)?;
    Ok(files)
}

/// Permits only [`super::RUNTIME_CALLS`], [`CALLS`] and [`CALLS_WITH`] from now on.
///
/// # Errors
/// Those of [`jail::allow_only_with`].
pub(super) fn set_filter() -> Result<(), coracle_sandbox::Error> {
    jail::allow_only_with(&[&super::RUNTIME_CALLS, CALLS].concat(), CALLS_WITH)
}
