//! Who goes first on a node whose processors are busy: what a kubelet waits for, the daemon, monitors and containers that
//! start, before pulls, and those before what nobody waits for. No weight is given for it that a container could miss.

use coracle_sys::process::{self, InheritOnFork, Scheduling};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::Error;

/// Nanoseconds; the least the kernel has.
const SHORT_SLICE: u64 = 100_000;
/// Nanoseconds; the most the kernel has. Next to it everybody's are short.
const LONG_SLICE: u64 = 100_000_000;

/// Has this process take its turn at once when it wakes, before who is in the middle of a long slice (Linux 6.12; before, the
/// kernel decides as it did). Its share stays what it was. What it starts begins as everybody does, and not with a nice value
/// below 0.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn set_short_slice() -> Result<(), Error> {
    refused("set", "the slice", process::set_slice(SHORT_SLICE, InheritOnFork::No))
}

/// The same for a monitor, and for what it starts until that becomes a container's program.
pub(crate) fn set_inherited_short_slice() -> Result<(), coracle_sys::Errno> {
    process::set_slice(SHORT_SLICE, InheritOnFork::Yes)
}

/// Comes behind what a node is for: a tenth of an equal share of the processors but one, never in the place of who runs
/// (SCHED_BATCH, sched(7)), in slices so long that whoever wakes takes its place (Linux 6.12), and last of those that do not idle at
/// the disk (ioprio_set(2)).
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn set_background() -> Result<(), Error> {
    const NICE: i32 = 10;
    /// IOPRIO_CLASS_BE, and its last level.
    const BEST_EFFORT: u32 = 2;
    const LAST: u32 = 7;
    // Both are tried: one that is refused takes nothing from the other.
    let scheduled = set(NICE, BEST_EFFORT, LAST);
    leave_one_cpu_free().and(scheduled)
}

/// The first of those this process may run on, where there are several: a few threads that compute would keep all of them
/// busy, and whoever wakes waits for a turn.
fn leave_one_cpu_free() -> Result<(), Error> {
    let this = Pid::from_raw(0);
    let failed = |errno| Error::kernel("set", "the processors", errno);
    let mut usable = sched_getaffinity(this).map_err(failed)?;
    let mut numbers = (0..CpuSet::count()).filter(|number| usable.is_set(*number).unwrap_or(false));
    let (Some(first), Some(_)) = (numbers.next(), numbers.next()) else { return Ok(()) };
    usable.unset(first).and_then(|()| sched_setaffinity(this, &usable)).map_err(failed)
}

/// Runs only when nothing else wants the processor, and reads and writes when nothing else wants the disk.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn set_idle() -> Result<(), Error> {
    /// The nicest there is (sched(7)).
    const NICE_MAX: i32 = 19;
    /// IOPRIO_CLASS_IDLE.
    const IDLE: u32 = 3;
    set(NICE_MAX, IDLE, 0)
}

fn set(nice: i32, io_class: u32, io_level: u32) -> Result<(), Error> {
    /// SCHED_BATCH.
    const BATCH: u32 = 3;
    let scheduling = Scheduling { policy: BATCH, nice, runtime: LONG_SLICE, ..Scheduling::default() };
    let scheduled = refused("set", "the scheduling", process::set_scheduling(scheduling));
    refused("set", "the I/O priority", process::set_io_priority(io_class, io_level)).and(scheduled)
}

fn refused(op: &'static str, target: &str, outcome: Result<(), coracle_sys::Errno>) -> Result<(), Error> {
    outcome.map_err(|errno| Error::kernel(op, target, Errno::from_raw(errno.0)))
}
