//! Scheduling of the caller: policy, slices, CPUs, I/O priority, memory policy.

use crate::arch::call;
use crate::mark::Mark;
use crate::{Errno, number};

/// Scheduling attributes, for sched_setattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// The scheduling policy (SCHED_…).
    pub policy: u32,
    /// Scheduling flags (SCHED_FLAG_…).
    pub flags: u64,
    /// Nice value, -20 to 19.
    pub nice: i32,
    /// Priority for realtime policies.
    pub priority: u32,
    /// Runtime of SCHED_DEADLINE in nanoseconds; for the other policies the slice (Linux 6.12), where 0 is the default.
    pub runtime: u64,
    /// Deadline of SCHED_DEADLINE in nanoseconds.
    pub deadline: u64,
    /// Period of SCHED_DEADLINE in nanoseconds.
    pub period: u64,
}

/// `struct sched_attr`, the first version.
#[repr(C)]
#[derive(Default)]
struct SchedulingAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    times: [u64; 3],
}

/// Size of the structure in bytes: 48.
const SCHEDULING_BYTES: usize = size_of::<SchedulingAttributes>();

/// Sets the scheduling attributes of the caller (sched_setattr(2)).
pub fn set_scheduling(scheduling: Scheduling) -> Result<(), Errno> {
    let Scheduling { policy, flags, nice, priority, runtime, deadline, period } = scheduling;
    let size = SCHEDULING_BYTES as u32;
    let times = [runtime, deadline, period];
    let attributes = SchedulingAttributes { size, policy, flags, nice, priority, times };
    // SAFETY: the kernel reads as many bytes as `size` says, which is the struct's own size.
    unsafe { call(number::SCHED_SETATTR, [0, (&raw const attributes) as usize, 0]) }.map(drop)
}

/// Returns the scheduling attributes of the caller (sched_getattr(2)).
pub fn scheduling() -> Result<Scheduling, Errno> {
    let mut attributes = SchedulingAttributes::default();
    let arguments = [0, (&raw mut attributes) as usize, SCHEDULING_BYTES, 0];
    // SAFETY: the kernel writes at most the given size, which is that of the struct, to a local that lives across the call.
    unsafe { call(number::SCHED_GETATTR, arguments) }?;
    // SAFETY: an initialised local; volatile because the compiler did not see the kernel's write.
    let attributes = unsafe { (&raw const attributes).read_volatile() };
    let SchedulingAttributes { policy, flags, nice, priority, times: [runtime, deadline, period], .. } =
        attributes;
    Ok(Scheduling { policy, flags, nice, priority, runtime, deadline, period })
}

/// Whether children inherit a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InheritOnFork {
    /// Descendants inherit the slice.
    Yes,
    /// Children start with the default slice, and with nice value 0 if it was negative (SCHED_FLAG_RESET_ON_FORK).
    No,
}

/// Sets the length of the caller's EEVDF slices in nanoseconds, at least 100 000; 0 is the default. The caller's share
/// of CPU time does not change. A process with a short slice that wakes up preempts one with a long slice instead of
/// waiting for its end, up to 4 ms (sched(7); **Linux 6.12**: no effect before). Has no effect under a policy other
/// than SCHED_OTHER.
pub fn set_slice(nanoseconds: u64, inherit: InheritOnFork) -> Result<(), Errno> {
    const USUAL: u32 = 0;
    const RESET_ON_FORK: u64 = 1;
    let mut scheduling = scheduling()?;
    if scheduling.policy != USUAL {
        return Ok(());
    }
    scheduling.runtime = nanoseconds;
    if inherit == InheritOnFork::No {
        scheduling.flags |= RESET_ON_FORK;
    }
    set_scheduling(scheduling)
}

/// Number of CPUs in the masks of this module; the kernel's highest number is 8192 (`NR_CPUS_RANGE_END`).
const CPUS_MAX: usize = 8192;
/// Length of a mask of CPUs in words.
const CPU_WORDS: usize = CPUS_MAX / u64::BITS as usize;
/// The length in bytes that [`use_all_cpus`] passes to sched_setaffinity(2), which seccomp filters may examine.
pub const CPU_MASK_BYTES: usize = CPUS_MAX / 8;

/// Restricts the caller, and children that it creates from then on, to the CPU that it runs on (sched_setaffinity(2)).
/// A child then starts on this CPU as soon as the caller exits or sleeps; otherwise the kernel wakes an idle CPU for it,
/// which takes longer. [`use_all_cpus`] undoes it.
///
/// # Errors
/// EINVAL if the caller may no longer use this CPU.
pub fn stay_on_this_cpu() -> Result<(), Errno> {
    let mut cpu = 0_u32;
    // SAFETY: the kernel writes one u32 to a local that lives across the call.
    unsafe { call(number::GETCPU, [(&raw mut cpu) as usize, 0, 0]) }?;
    // SAFETY: an initialised local; volatile because the compiler did not see the kernel's write.
    let cpu = unsafe { (&raw const cpu).read_volatile() } as usize;
    let mut mask = [0; CPU_WORDS];
    let word = mask.get_mut(cpu / u64::BITS as usize).ok_or(Errno::EINVAL)?;
    *word = 1 << (cpu % u64::BITS as usize);
    set_affinity(&mask, Mark::NONE)
}

/// Permits the caller to use all CPUs of its cpuset (sched_setaffinity(2)), also those that are added to the cpuset
/// later. `mark` is that of a filter which may refuse the call.
pub fn use_all_cpus(mark: Mark) -> Result<(), Errno> {
    set_affinity(&[u64::MAX; CPU_WORDS], mark)
}

fn set_affinity(mask: &[u64; CPU_WORDS], mark: Mark) -> Result<(), Errno> {
    let [fourth, fifth] = mark.arguments();
    let arguments = [0, size_of_val(mask), mask.as_ptr() as usize, fourth, fifth];
    // SAFETY: the kernel reads as many bytes as the length says from an array that lives across the call.
    unsafe { call(number::SCHED_SETAFFINITY, arguments) }.map(drop)
}

/// Sets the I/O priority of the caller (ioprio_set(2)): class 1 to 3, level 0 to 7.
pub fn set_io_priority(class: u32, level: u32) -> Result<(), Errno> {
    const IOPRIO_WHO_PROCESS: usize = 1;
    let value = (class << 13 | level) as usize;
    // SAFETY: the call reads no memory.
    unsafe { call(number::IOPRIO_SET, [IOPRIO_WHO_PROCESS, 0, value]) }.map(drop)
}

/// Sets the memory policy of the caller (set_mempolicy(2)); `nodes` is a bit set.
pub fn set_memory_policy(mode: u32, nodes: &[u64]) -> Result<(), Errno> {
    // The kernel uses one bit less than `maxnode`.
    let bits = if nodes.is_empty() { 0 } else { nodes.len() * 64 + 1 };
    // SAFETY: the kernel reads that many bits, rounded up to words, of the slice (null where there are none); the one too
    // many is never read (mm/mempolicy.c, get_nodes: `--maxnode`).
    unsafe { call(number::SET_MEMPOLICY, [mode as usize, nodes.as_ptr() as usize, bits]) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_stays_on_its_cpu_may_use_all_again() {
        let allowed = || {
            let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
        };
        let before = allowed();
        stay_on_this_cpu().unwrap();
        assert!(allowed().parse::<u32>().is_ok(), "{}", allowed());
        use_all_cpus(Mark::NONE).unwrap();
        assert_eq!(allowed(), before);
    }
}
