//! Where workers that read what strangers wrote are shut in. Two walls: the worker of such a job gives up what the job does
//! not need; and whatever decompresses or reads an archive is a child of it that sees one unfinished directory and nothing
//! else, reads the archive from its stdin and says what it found on its stdout (see [`inmate`]).
//!
//! | | worker of a pull | of an import, a check, an export | of a removal, a measurement | child |
//! |---|---|---|---|---|
//! | file system | the host's | the host's | the host's | one directory: no device opens, no program runs |
//! | network | the host's | none | no sockets | none, no sockets |
//! | capabilities | [`FILL`] | [`FILL`] | [`TREES`] | [`UNPACK`] |
//! | system calls | not [`NEVER`] | not [`NEVER`] | not [`NEVER`] | only [`UNPACK_CALLS`] |
//!
//! A host that lacks one of them loses that one, with a line in the log.

pub(crate) mod inmate;
#[cfg(not(test))]
mod start;

use coracle_job::Job;
use coracle_sandbox::{jail, rank};

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

/// What unpacking is made of: memory, its own descriptors, names below its root, and its end.
const UNPACK_CALLS: [&str; 77] = [
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

/// What abort(3) does.
const ABORT_CALLS: [&str; 5] = ["getpid", "gettid", "tkill", "tgkill", "exit"];

/// Takes away from this worker what `job` does not need.
pub(crate) fn confine(job: &Job) {
    match job {
        Job::Import(_) | Job::Check(_) | Job::Export(_) | Job::CheckRegistries { .. } => {
            let is_wanted_now = matches!(job, Job::Import(import) if !import.is_background);
            if !is_wanted_now {
                note(rank::give_way());
            }
            note(jail::leave_network());
            note(jail::keep_capabilities(&FILL));
            note(jail::deny(&NEVER));
        }
        Job::Pull(_) => {
            note(rank::go_behind());
            note(jail::keep_capabilities(&FILL));
            note(jail::deny(&NEVER));
        }
        Job::RemoveTrees { .. } | Job::MeasureTrees { .. } => {
            note(rank::go_behind());
            note(jail::keep_capabilities(&TREES));
            note(jail::deny(&[&NEVER[..], &SOCKETS].concat()));
        }
        // These run other people's programs, or act on the node's network and devices: that is their job.
        _ => {}
    }
}

/// Shuts this process in for good: what it reads from now on may do with it what it wants.
fn shut_in() {
    note(jail::close_descriptors());
    note(jail::shut_in());
    note(jail::keep_capabilities(&UNPACK));
    note(jail::allow_only(&[&UNPACK_CALLS[..], &ABORT_CALLS].concat()));
}

fn note(done: Result<(), coracle_sandbox::Error>) {
    if let Err(error) = done {
        eprintln!("jail: it goes on without: {error}");
    }
}
