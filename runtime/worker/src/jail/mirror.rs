//! Confinement of the process that serves neighbours. It sees the directories of blobs and parts, read-only, and has no network
//! but the listening socket that it inherited.

use std::fs::File;

use coracle_sandbox::jail::{self, AllowedWith, Root};
use nix::sys::resource::{Resource, setrlimit};

use super::network::{FIONBIO, INT, IPPROTO_TCP, NAMESPACES, SOL_SOCKET, THREAD, WRITES};

/// Memory limit in bytes: the program, and stacks and buffers of 64 threads.
const MEMORY_BYTES_MAX: u64 = 128 << 20;
/// Limit of open files: a connection, a blob and an announcement for each thread.
const DESCRIPTORS_MAX: u64 = 256;
/// The descriptor of the settings, by its path: in this process nothing else owns it.
const SETTINGS: &str = "/proc/self/fd/3";

/// Allowed system calls in addition to [`super::RUNTIME_CALLS`].
pub(super) const CALLS: &[&str] = &[
    "nanosleep",
    "clock_nanosleep",
    "sigaltstack",
    // There is no other process in its PID namespace, and any thread may call abort(3).
    "tkill",
    "fcntl",
    "flock",
    "pread64",
    "stat",
    "newfstatat",
    "statx",
    // Operations on sockets that are connected.
    "accept4",
    "sendto",
    "recvfrom",
    "getsockname",
    "getpeername",
    "getsockopt",
    "shutdown",
];

/// System calls that are permitted only with certain arguments.
pub(super) const CALLS_WITH: &[AllowedWith] = &[
    AllowedWith { calls: &["open"], arguments: &[(1, WRITES, 0)] },
    AllowedWith { calls: &["openat"], arguments: &[(2, WRITES, 0)] },
    // Threads of this process, but no processes.
    AllowedWith { calls: &["clone"], arguments: &[(0, THREAD | NAMESPACES, THREAD)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, SOL_SOCKET)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["ioctl"], arguments: &[(1, INT, FIONBIO)] },
];

/// Confines this process permanently before it accepts a connection; returns the settings of its parent.
///
/// # Errors
/// The step that this host does not permit.
pub(crate) fn confine() -> Result<File, String> {
    let tried =
        |error: coracle_sandbox::Error| format!("jail: {error}: neighbours are not served without it");
    jail::close_descriptors(4).map_err(tried)?;
    let settings = File::open(SETTINGS)
        .map_err(|error| format!("open {SETTINGS}: {}", coracle_sandbox::describe_io(&error)))?;
    for (resource, most) in [
        (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, 0),
    ] {
        setrlimit(resource, most, most)
            .map_err(|errno| format!("set {resource:?}: {}", coracle_sandbox::describe_errno(errno)))?;
    }
    jail::shut_in(Root::DirectoriesReadOnly(&["blobs", "parts"])).map_err(tried)?;
    jail::keep_capabilities(&[]).map_err(tried)?;
    jail::allow_only_with(&[&super::RUNTIME_CALLS, CALLS].concat(), CALLS_WITH).map_err(tried)?;
    Ok(settings)
}
