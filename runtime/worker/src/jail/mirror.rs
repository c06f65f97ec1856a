//! Confinement of the process that serves neighbours. It sees the directories of blobs, parts, outlines and layers, read-only and without
//! devices, and has no network but the listening socket that it inherited.

use std::fs::File;

use coracle_sandbox::jail::{self, AllowedWith, INT, Limits, OPEN_TO_READ, Root, TCP_OPTIONS, THREADS};

/// Descriptors are copied, and locks are looked at. The process cannot take a lock, by which it could hold up a pull, or let the
/// listening socket block, which it shares with the daemon.
const LOOK: [AllowedWith; 2] = [
    AllowedWith { calls: &["fcntl"], arguments: &[(1, INT, F_DUPFD_CLOEXEC)] },
    AllowedWith { calls: &["fcntl"], arguments: &[(1, INT, F_OFD_GETLK)] },
];
const F_DUPFD_CLOEXEC: u64 = 1030;
const F_OFD_GETLK: u64 = 36;

/// The directories that the process sees, below the root directory of the daemon.
const DIRECTORIES: &[&str] = &["images/blobs", "images/parts", "images/contents", "layers"];
/// Memory of the program, and stacks and buffers of 160 threads; for each thread a connection and an outline, and a file with the
/// directories of its path while these are opened.
const LIMITS: Limits = Limits { memory_bytes: 128 << 20, descriptors: 1024, file_bytes: 0 };
/// The descriptor of the settings, by its path: in this process nothing else owns it.
const SETTINGS: &str = "/proc/self/fd/3";

/// System calls in addition to [`jail::RUNTIME_CALLS`]; files can be read only, and there are threads but no processes.
pub(super) const CALLS: &[&str] = &[
    "nanosleep",
    "clock_nanosleep",
    "sigaltstack",
    // There is no other process in its PID namespace, and any thread may call abort(3).
    "tkill",
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
    jail::limit(LIMITS).map_err(tried)?;
    jail::shut_in(Root::DirectoriesReadOnly(DIRECTORIES)).map_err(tried)?;
    jail::keep_capabilities(&[]).map_err(tried)?;
    jail::allow_only_with(CALLS, &[&OPEN_TO_READ[..], &THREADS, &TCP_OPTIONS, &LOOK].concat())
        .map_err(tried)?;
    Ok(settings)
}
