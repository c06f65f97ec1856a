//! What confines workers that read untrusted data. The worker of such a job gives up what the job does not need; whatever
//! decompresses or reads an archive is a child of it, in a PID namespace of its own ([`inmate`], [`pipeline`]), and so is what
//! speaks to registries ([`network`], [`crate::fetch`]).
//!
//! | | worker of a pull, an import, a check, an export | of a removal, a measurement | child that speaks to registries | that decompresses | that reads an archive |
//! |---|---|---|---|---|---|
//! | user | root | root | nobody | root | root |
//! | file system | the host's | the host's | copies of /etc/resolv.conf and /etc/hosts, read-only | nothing | one directory: no device opens, no program runs |
//! | network | none; of a pull also no sockets | no sockets | the host's, by TCP and UDP | none, no sockets | none, no sockets |
//! | processes | the host's | the host's | itself | itself | itself |
//! | capabilities | [`FILL`]; of a pull also KILL | [`TREES`] | none | none | [`UNPACK`] |
//! | system calls | not [`NEVER`] | not [`NEVER`] | only [`network::CALLS`] | only [`DECOMPRESS_CALLS`] | only [`UNPACK_CALLS`] |
//!
//! A step that this host does not allow is an error that names it, and the job fails: nothing is read by a process that is
//! confined in part. Priorities are no part of this: where they are refused, the log says so.

pub(crate) mod inmate;
pub(crate) mod network;
#[cfg(not(test))]
mod pipeline;
#[cfg(not(test))]
mod start;
#[cfg(test)]
mod tests;

use coracle_job::{Failure, FailureKind, Job};
use coracle_sandbox::jail::Root;
use coracle_sandbox::{Error, jail, sched};

use crate::failure::failure;
use crate::fetch::Fetcher;

/// What a worker needs that fills the store: owners, modes and marks of trees, and what its child is to have. CAP_SYS_ADMIN
/// makes the child's namespaces, and sets overlayfs' marks, which are `trusted.`.
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

/// To look into trees and delete them, whoever owns them.
const TREES: [&str; 3] = ["CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER"];

/// To make what an archive describes.
const UNPACK: [&str; 6] =
    ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD", "CAP_SETFCAP"];

/// What no job has a use for, and breaking out has.
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

/// What reaches a network.
const SOCKETS: [&str; 4] = ["socket", "socketpair", "connect", "bind"];

/// What decompressing is made of: memory, the descriptors that it has, and its end.
const DECOMPRESS_CALLS: &[&str] = &[
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "futex",
    "clock_gettime",
    "gettimeofday",
    "getrandom",
    "sched_yield",
    "read",
    "write",
    "readv",
    "writev",
    "lseek",
    "close",
    "poll",
    "ppoll",
    "fstat",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "sigaltstack",
    "exit_group",
];

/// What unpacking is made of: memory, its own descriptors, names below its root, and its end.
const UNPACK_CALLS: &[&str] = &[
    // Memory and time.
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "futex",
    "clock_gettime",
    "gettimeofday",
    "time",
    "getrandom",
    "sched_yield",
    "nanosleep",
    "clock_nanosleep",
    // Descriptors.
    "read",
    "write",
    "readv",
    "writev",
    "pread64",
    "pwrite64",
    "lseek",
    "close",
    "dup",
    "dup2",
    "dup3",
    "fcntl",
    "poll",
    "ppoll",
    "copy_file_range",
    "sendfile",
    "splice",
    "fsync",
    "fdatasync",
    // Names below the root.
    "open",
    "openat",
    "openat2",
    "stat",
    "lstat",
    "fstat",
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
    "fallocate",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    // Signals and the end.
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "exit_group",
];

/// Takes away from this worker what `job` does not need; gives the child that speaks to registries, for a job that pulls.
///
/// # Errors
/// The step that this host does not allow: the job is not to be begun.
pub(crate) fn confine(job: &Job) -> Result<Option<Fetcher>, Failure> {
    let fetcher = match job {
        Job::Pull(pull) => {
            note(sched::set_background());
            // It is to have the network that is left below, and rights that are given up there.
            Some(Fetcher::start(pull.registries.patience)?)
        }
        _ => None,
    };
    take_away(job).map_err(|error| {
        failure(FailureKind::Internal, format!("jail: {error}: the job is not begun without it"))
    })?;
    Ok(fetcher)
}

fn take_away(job: &Job) -> Result<(), Error> {
    match job {
        Job::Import(_) | Job::Check(_) | Job::Export(_) | Job::CheckRegistries { .. } => {
            let is_wanted_now = matches!(job, Job::Import(import) if !import.is_background);
            if !is_wanted_now {
                note(sched::set_idle());
            }
            jail::leave_network()?;
            jail::keep_capabilities(&FILL)?;
            jail::deny(&NEVER)
        }
        Job::Pull(_) => {
            jail::leave_network()?;
            // Its fetcher is another user: without CAP_KILL neither this process nor its end (the parent-death signal) ends it.
            jail::keep_capabilities(&[&FILL[..], &["CAP_KILL"]].concat())?;
            // Sockets of other services have names in the file system, too.
            jail::deny(&[&NEVER[..], &SOCKETS].concat())
        }
        Job::RemoveTrees { .. } | Job::MeasureTrees { .. } => {
            note(sched::set_background());
            jail::keep_capabilities(&TREES)?;
            jail::deny(&[&NEVER[..], &SOCKETS].concat())
        }
        // These run other people's programs, or act on the node's network and devices: that is their job.
        _ => Ok(()),
    }
}

/// Confines this child for good: what it reads from now on may take it over.
fn shut_in(root: Root, capabilities: &[&str], calls: &[&str]) -> Result<(), Error> {
    jail::shut_in(root)?;
    jail::keep_capabilities(capabilities)?;
    jail::allow_only(calls)
}

/// A child that this host does not let confine itself does not begin; `then` is what does not happen.
pub(crate) fn not_without(why: &str, then: &str) -> Failure {
    failure(FailureKind::Internal, format!("jail: {why}: {then} without it"))
}

/// A priority that this host does not give changes when the job is done, not what it may do.
fn note(ranked: Result<(), Error>) {
    if let Err(error) = ranked {
        eprintln!("priority: the job goes on with its parent's: {error}");
    }
}
