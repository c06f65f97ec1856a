//! CPU and I/O scheduling of coracle's processes on a busy node. The daemon, monitors and starting containers have
//! precedence over pulls, and pulls over background jobs. CPU weights are not raised, so containers lose no share of
//! CPU time.

use coracle_sys::sched::{self, InheritOnFork, Scheduling};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::Error;

/// The kernel's minimum slice in nanoseconds.
const SHORT_SLICE: u64 = 100_000;
/// The kernel's maximum slice in nanoseconds, longer than all default slices.
const LONG_SLICE: u64 = 100_000_000;

/// Sets the shortest scheduler slice for this process, so that it preempts processes with long slices when it wakes up
/// (Linux 6.12; no effect before). Its share of CPU time does not change. Children start with the default slice and
/// without a negative nice value.
///
/// # Errors
/// [`Error::Kernel`] if the kernel refuses the setting.
pub fn set_short_slice() -> Result<(), Error> {
    refused("set", "the slice", sched::set_slice(SHORT_SLICE, InheritOnFork::No))
}

/// Sets the shortest scheduler slice for a monitor and its children; a child resets it before it executes a container's
/// program.
pub(crate) fn set_inherited_short_slice() -> Result<(), coracle_sys::Errno> {
    sched::set_slice(SHORT_SLICE, InheritOnFork::Yes)
}

/// Makes this process run in the background: nice 10, about a tenth of an equal share, on all CPUs except one;
/// SCHED_BATCH, so that it preempts no running process (sched(7)); long slices, so that any process that wakes up
/// preempts it (Linux 6.12); and the lowest best-effort I/O priority (ioprio_set(2)).
///
/// # Errors
/// [`Error::Kernel`] if the kernel refuses a setting.
pub fn set_background() -> Result<(), Error> {
    const NICE: i32 = 10;
    /// I/O class IOPRIO_CLASS_BE.
    const BEST_EFFORT: u32 = 2;
    const LAST: u32 = 7;
    // Both are applied independently: an error of one does not prevent the other.
    let scheduled = set(NICE, BEST_EFFORT, LAST);
    leave_one_cpu_free().and(scheduled)
}

/// Removes the first CPU from this process's affinity mask if it has several. Otherwise a few busy threads would occupy
/// all CPUs, and a process that wakes up would have to wait.
fn leave_one_cpu_free() -> Result<(), Error> {
    let this = Pid::from_raw(0);
    let failed = |errno| Error::kernel("set", "the processors", errno);
    let mut usable = sched_getaffinity(this).map_err(failed)?;
    let mut numbers = (0..CpuSet::count()).filter(|number| usable.is_set(*number).unwrap_or(false));
    let (Some(first), Some(_)) = (numbers.next(), numbers.next()) else { return Ok(()) };
    usable.unset(first).and_then(|()| sched_setaffinity(this, &usable)).map_err(failed)
}

/// Makes this process run only when CPUs and disk are otherwise idle.
///
/// # Errors
/// [`Error::Kernel`] if the kernel refuses a setting.
pub fn set_idle() -> Result<(), Error> {
    /// The highest nice value, that is the lowest priority (sched(7)).
    const NICE_MAX: i32 = 19;
    /// I/O class IOPRIO_CLASS_IDLE.
    const IDLE: u32 = 3;
    set(NICE_MAX, IDLE, 0)
}

fn set(nice: i32, io_class: u32, io_level: u32) -> Result<(), Error> {
    /// Scheduling policy SCHED_BATCH.
    const BATCH: u32 = 3;
    let scheduling = Scheduling { policy: BATCH, nice, runtime: LONG_SLICE, ..Scheduling::default() };
    let scheduled = refused("set", "the scheduling", sched::set_scheduling(scheduling));
    refused("set", "the I/O priority", sched::set_io_priority(io_class, io_level)).and(scheduled)
}

fn refused(op: &'static str, target: &str, outcome: Result<(), coracle_sys::Errno>) -> Result<(), Error> {
    outcome.map_err(|errno| Error::kernel(op, target, Errno::from_raw(errno.0)))
}
