//! Process attributes that survive exec. CNI plugins, OCI hooks and their children get from the worker those that the
//! daemon was started with; what daemon and worker set for themselves must not reach them.

use coracle_job::{Failure, FailureKind, Job};
use coracle_sandbox::{describe_errno, umask};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::SigSet;

/// Limit of the worker's address space in bytes: a zstd window of 128 MiB and the names of an archive.
const MEMORY_BYTES_MAX: u64 = 1 << 30;

/// Score by which the kernel chooses a process if memory is short: a worker with a zstd window of 512 MiB ends before pods, whose
/// scores are -997 to 1000, and before the daemon, whose score it would inherit (-999 in the unit). A small one does not end
/// before a pod with the score 1000.
const OOM_SCORE: &str = "500";

/// Prepares this process for `job`; `None`: a subcommand. The daemon blocks signals, so the mask is emptied. A job that
/// executes programs of others has the usual umask and no limit of memory: Go and glibc reserve 64 to 128 MiB of address
/// space for each thread. All others create private files, and what an archive can make them use is limited.
pub(crate) fn set_for(job: Option<&Job>) -> Result<(), Failure> {
    set_for_programs()?;
    if job.is_some_and(Job::runs_programs) {
        return Ok(());
    }
    umask::keep_private();
    end_before_pods();
    setrlimit(Resource::RLIMIT_AS, MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)
        .map_err(|errno| refused("limit the address space", errno))
}

/// Prepares this process for programs of others.
pub(crate) fn set_for_programs() -> Result<(), Failure> {
    SigSet::empty().thread_set_mask().map_err(|errno| refused("unblock signals", errno))?;
    umask::set_public();
    Ok(())
}

/// Sets the OOM score of this process and its children. Without it they are as before; a container without /proc has other problems.
pub(crate) fn end_before_pods() {
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
}

/// Gives this process back the daemon's limit of open files, after the start of programs that have a lower one.
pub(crate) fn raise_open_files() -> Result<(), Failure> {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    raised.map_err(|errno| refused("raise the limit of open files", errno))
}

fn refused(what: &str, errno: Errno) -> Failure {
    Failure::new(FailureKind::Internal, format!("{what}: {}", describe_errno(errno)))
}
