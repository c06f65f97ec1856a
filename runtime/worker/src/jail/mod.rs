//! Confinement of workers that process untrusted data. Such a worker drops all privileges that its job does
//! not need. Decompressors and archive parsers are its child processes in their own PID namespace
//! ([`confined`], [`pipeline`]), and so are the process that contacts registries
//! ([`coracle_fetch`]) and the one that serves neighbours ([`mirror`], [`crate::mirror`]).
//!
//! | | worker of a pull, an import, a list of containerd's images, a check, an export | of a removal, a measurement | fetcher child | decompressor child | archive parser child | serving child |
//! |---|---|---|---|---|---|---|
//! | user | root | root | 65534 | root | root | root |
//! | file system | the host's | the host's | copies of /etc/resolv.conf and /etc/hosts, read-only | nothing | one directory, nodev and noexec | the directories of blobs, parts, outlines and layers, read-only |
//! | network | none; for a pull also no sockets | no sockets | the host's, TCP and UDP only | none, no sockets | none, no sockets | none, but the listening socket that it inherited |
//! | processes | the host's | the host's | itself | itself | itself | itself |
//! | capabilities | [`FILL`]; for a pull also KILL | [`TREES`] | none | none | [`UNPACK`] | none |
//! | system calls | all except [`NEVER`] | all except [`NEVER`] | only [`RUNTIME_CALLS`](jail::RUNTIME_CALLS) and those of its job | RUNTIME_CALLS and [`DECOMPRESS_CALLS`] | RUNTIME_CALLS and [`UNPACK_CALLS`] | RUNTIME_CALLS and [`mirror::CALLS`] |
//!
//! If this host does not permit a step, the job fails with an error that names it: a partly confined process
//! never reads untrusted data. Scheduling priorities are not part of the confinement: errors are only logged.

pub(crate) mod confined;
pub(crate) mod mirror;
#[cfg(not(test))]
mod pipeline;
#[cfg(not(test))]
mod start;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use coracle_job::{Failure, FailureKind, Job};
use coracle_sandbox::jail::Root;
use coracle_sandbox::{Error, jail, sched};

use coracle_fetch::Fetcher;

/// Capabilities of a worker that writes the store: to set owners, modes and attributes of trees, and the
/// capabilities of its children. CAP_SYS_ADMIN creates the children's namespaces and sets overlayfs
/// attributes, which are `trusted.*`.
const FILL: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_MKNOD",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_SYS_ADMIN",
    // Priorities, which a child of an import inherits.
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
];

/// Capabilities to read and remove trees of any owner.
const TREES: [&str; 3] = ["CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER"];

/// Capabilities to create the entries of an archive.
const UNPACK: [&str; 6] =
    ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD", "CAP_SETFCAP"];

/// System calls that no job needs and that attackers use.
const NEVER: [&str; 34] = [
    "acct",
    "add_key",
    "bpf",
    "delete_module",
    "finit_module",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "name_to_handle_at",
    "open_by_handle_at",
    "perf_event_open",
    "personality",
    "process_madvise",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "clock_settime",
    "swapoff",
    "swapon",
    "syslog",
    "userfaultfd",
    "vhangup",
];

/// System calls that open or connect sockets.
const SOCKETS: [&str; 4] = ["socket", "socketpair", "connect", "bind"];

/// System calls of a decompressor in addition to [`jail::RUNTIME_CALLS`].
const DECOMPRESS_CALLS: &[&str] = &["sigaltstack"];

/// System calls of an archive parser in addition to [`jail::RUNTIME_CALLS`]: time, descriptors, and paths below its
/// root.
const UNPACK_CALLS: &[&str] = &[
    // Time.
    "time",
    "nanosleep",
    "clock_nanosleep",
    // Descriptors.
    "pread64",
    "pwrite64",
    "dup",
    "dup2",
    "dup3",
    "fcntl",
    "copy_file_range",
    "sendfile",
    "splice",
    "fsync",
    "fdatasync",
    // Paths below the root directory.
    "open",
    "openat",
    "openat2",
    "stat",
    "lstat",
    "newfstatat",
    "statx",
    "statfs",
    "fstatfs",
    "access",
    "faccessat",
    "faccessat2",
    "getdents64",
    "mkdir",
    "mkdirat",
    "mknod",
    "mknodat",
    "symlinkat",
    "linkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "rename",
    "renameat",
    "renameat2",
    "readlink",
    "readlinkat",
    "fchdir",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "fchown",
    "fchownat",
    "utimensat",
    "ftruncate",
    "fadvise64",
    "fadvise64_64",
    "arm_fadvise64_64",
    "fallocate",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
];

/// Drops the privileges of this worker that `job` does not need; returns the fetcher if the job pulls an
/// image.
///
/// # Errors
/// The step that this host does not permit; the job must not be started.
pub(crate) fn confine(job: &Job) -> Result<Option<Fetcher>, Failure> {
    let fetcher = match job {
        Job::Pull(pull) => {
            note(sched::set_background());
            // Started first, because it needs the network and the privileges that this worker drops next.
            Some(Fetcher::start(pull.registries.timeouts)?)
        }
        _ => None,
    };
    take_away(job).map_err(|error| {
        Failure::new(FailureKind::Internal, format!("jail: {error}: the job is not started without it"))
    })?;
    Ok(fetcher)
}

fn take_away(job: &Job) -> Result<(), Error> {
    match job {
        Job::Import(_)
        | Job::ListContainerd(_)
        | Job::Check(_)
        | Job::CheckLayer(_)
        | Job::Export(_)
        | Job::ReadPolicy { .. }
        | Job::Judge(_)
        | Job::CheckRegistries { .. } => {
            let is_wanted_now = match job {
                Job::Import(import) => !import.is_background,
                // A pull may wait for a judgement, and the start for the policy.
                job => matches!(job, Job::ListContainerd(_) | Job::ReadPolicy { .. } | Job::Judge(_)),
            };
            if !is_wanted_now {
                note(sched::set_idle());
            }
            jail::leave_network()?;
            jail::keep_capabilities(&FILL)?;
            jail::deny(&NEVER)
        }
        Job::Pull(_) => {
            jail::leave_network()?;
            // The fetcher runs as another user: without CAP_KILL neither this process nor the parent-death
            // signal could end it.
            jail::keep_capabilities(&[&FILL[..], &["CAP_KILL"]].concat())?;
            // Abstract and bound sockets of other services are reachable without network access.
            jail::deny(&[&NEVER[..], &SOCKETS].concat())
        }
        Job::RemoveTrees { .. } | Job::MeasureTrees { .. } => {
            note(sched::set_background());
            jail::keep_capabilities(&TREES)?;
            jail::deny(&[&NEVER[..], &SOCKETS].concat())
        }
        // These jobs execute external programs, or configure the node's network and devices.
        _ => Ok(()),
    }
}

/// Confines this child permanently, because its input may compromise it. `calls` are permitted in addition to
/// [`jail::RUNTIME_CALLS`].
fn shut_in(root: Root, capabilities: &[&str], calls: &[&str]) -> Result<(), Error> {
    jail::shut_in(root)?;
    jail::keep_capabilities(capabilities)?;
    jail::allow_only(calls)
}

/// The failure of a child that could not confine itself, and that therefore does not parse archives.
fn not_without(why: &str) -> Failure {
    Failure::new(FailureKind::Internal, format!("jail: {why}: archives are not parsed without it"))
}

/// Logs an error of setting the scheduling priority, which only affects the duration of the job.
fn note(ranked: Result<(), Error>) {
    if let Err(error) = ranked {
        eprintln!("cannot set the priority, the job continues without: {error}");
    }
}
