//! Processes: clone, exec, wait, namespaces, identity, limits, signals, time.

use core::ffi::CStr;

use rustix::fd::AsFd;
use rustix::fs::{Gid, Mode, Uid};
use rustix::io::retry_on_intr;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};
use rustix::rand::GetRandomFlags;
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, ClockId, ThreadNameSpaceType, Timespec,
    UnshareFlags,
};

use crate::arch::call;
use crate::mark::Mark;
pub use crate::pointers::Pointers;
use crate::{Errno, Fd, FdRef, number};

/// Flag: new mount namespace.
pub const CLONE_NEWNS: u64 = 0x0002_0000;
/// Flag: new cgroup namespace.
pub const CLONE_NEWCGROUP: u64 = 0x0200_0000;
/// Flag: new UTS namespace.
pub const CLONE_NEWUTS: u64 = 0x0400_0000;
/// Flag: new IPC namespace.
pub const CLONE_NEWIPC: u64 = 0x0800_0000;
/// Flag: new user namespace.
pub const CLONE_NEWUSER: u64 = 0x1000_0000;
/// Flag: new PID namespace.
pub const CLONE_NEWPID: u64 = 0x2000_0000;
/// Flag: new network namespace.
pub const CLONE_NEWNET: u64 = 0x4000_0000;
const NAMESPACES: u64 =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;

/// Number of SIGKILL.
pub const SIGKILL: i32 = 9;
/// Number of SIGTERM.
pub const SIGTERM: i32 = 15;
/// Number of SIGCHLD.
pub const SIGCHLD: i32 = 17;
/// Highest signal number.
pub const SIGNAL_MAX: i32 = 64;

/// The result of [`clone`] in each of the two processes.
#[derive(Debug)]
pub enum Clone {
    /// The function returned in the new process.
    Child,
    /// The function returned in the calling process.
    Parent {
        /// PID of the new process.
        pid: i32,
        /// Descriptor of the new process, which refers to it even after its PID was reused.
        pidfd: Fd,
    },
}

/// `struct clone_args` up to `cgroup` (Linux 5.7).
#[repr(C, align(8))]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Clones the process (clone3, Linux 5.3) with the semantics of fork. `namespaces` may contain only CLONE_NEW… flags;
/// `cgroup` is the cgroup2 directory in which the child starts (CLONE_INTO_CGROUP, Linux 5.7). If the process has
/// several threads, the child has only the calling one and must not take a lock that another thread may hold.
pub fn clone(namespaces: u64, cgroup: Option<FdRef<'_>>) -> Result<Clone, Errno> {
    const CLONE_PIDFD: u64 = 0x1000;
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    if namespaces & !NAMESPACES != 0 {
        return Err(Errno::EINVAL);
    }
    let mut pidfd: i32 = -1;
    let arguments = CloneArguments {
        flags: namespaces | CLONE_PIDFD | if cgroup.is_some() { CLONE_INTO_CGROUP } else { 0 },
        pidfd: &raw mut pidfd as u64,
        exit_signal: SIGCHLD as u64,
        cgroup: cgroup.map_or(0, |cgroup| cgroup.number() as u64),
        ..CloneArguments::default()
    };
    let size = size_of::<CloneArguments>();
    // SAFETY: `arguments` lives across the call and `size` is its size, so the kernel reads only it; it writes one
    // i32 to `pidfd`, which lives as long. CLONE_VM cannot be set (see the check above), so the child owns a copy of
    // this stack and returns on it without touching the parent's.
    let pid = unsafe { call(number::CLONE3, [&raw const arguments as usize, size]) }?;
    if pid == 0 {
        return Ok(Clone::Child);
    }
    // SAFETY: `pidfd` is an initialised local; volatile because the compiler did not see the kernel's write.
    let pidfd = unsafe { (&raw const pidfd).read_volatile() };
    Ok(Clone::Parent { pid: pid as i32, pidfd: Fd::from_call(pidfd as usize) })
}

/// Executes a program (execve(2)); returns only on an error.
pub fn exec(path: &CStr, pointers: &Pointers<'_>) -> Errno {
    let [arguments, environment] = pointers.addresses();
    let registers = [path.as_ptr() as usize, arguments, environment];
    // SAFETY: `path` is NUL-terminated; both lists hold pointers to strings borrowed for `Pointers`' lifetime and end
    // with a null, because `List::push` never fills the last word of a list, and the memory starts as zeros.
    unsafe { call(number::EXECVE, registers) }.err().unwrap_or(Errno::EINVAL)
}

/// Executes the file to which `program` refers (execveat(2) with AT_EMPTY_PATH); returns only on an error.
pub fn exec_fd(program: FdRef<'_>, pointers: &Pointers<'_>) -> Errno {
    let [arguments, environment] = pointers.addresses();
    let registers = [program.argument(), c"".as_ptr() as usize, arguments, environment, 0x1000];
    // SAFETY: as for `exec`; the path is a static empty string.
    unsafe { call(number::EXECVEAT, registers) }.err().unwrap_or(Errno::EINVAL)
}

/// Exits with `code`; if a seccomp filter refuses the call, the process ends with an invalid instruction.
pub fn exit(code: u8) -> ! {
    loop {
        // SAFETY: exit_group reads no memory and does not return.
        let _ = unsafe { call(number::EXIT_GROUP, [usize::from(code)]) };
        // SAFETY: the instruction raises SIGILL, which ends a process without a handler; coracle installs none.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            core::arch::asm!("ud2");
            #[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
            core::arch::asm!("udf #0");
            #[cfg(target_arch = "riscv64")]
            core::arch::asm!("unimp");
        }
    }
}

/// Maximum number of stopped children that one call of [`reap`] detaches.
const DETACHED_MAX: u32 = 256;

/// Exit status of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The process exited with this code.
    Code(u8),
    /// This signal ended the process.
    Signal(u8),
}

impl Status {
    /// The end that a wait status reports; `None` if the process is stopped and has not ended.
    fn of_end(status: WaitStatus) -> Option<Self> {
        match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => Some(Self::Signal(signal as u8)),
            (None, code) => code.map(|code| Self::Code(code as u8)),
        }
    }
}

/// Reaps one child that has ended (wait4 with WNOHANG); `pid` -1 means any child. `None` if no child has ended; ECHILD
/// if there are no children. Repeated if it is interrupted, because the SIGCHLD of the child may already have been
/// consumed.
///
/// A child can make its parent its tracer (ptrace(2), PTRACE_TRACEME). Each signal then stops the child, and wait4 reports that
/// although it has not been asked for stops. Such a child is detached and gets its signal, so that it continues; one that is
/// stopped again and again is killed, so that the call ends.
pub fn reap(pid: i32) -> Result<Option<(i32, Status)>, Errno> {
    let wait = || match pid {
        -1 => rustix::process::wait(WaitOptions::NOHANG),
        pid => rustix::process::waitpid(Pid::from_raw(pid.max(0)), WaitOptions::NOHANG),
    };
    if pid != -1 {
        rustix_pid(pid)?;
    }
    let mut detached = 0;
    while let Some((child, status)) = retry_on_intr(wait)? {
        let child = child.as_raw_nonzero().get();
        detached += 1;
        match Status::of_end(status) {
            Some(end) => return Ok(Some((child, end))),
            None if detached > DETACHED_MAX => drop(kill(child, SIGKILL)),
            None => detach(child, status.stopping_signal().unwrap_or(0)),
        }
    }
    Ok(None)
}

/// Ends the tracing of a stopped child, which continues with the signal that has stopped it. SIGTRAP is dropped: the kernel
/// sends it at each exec of a traced process.
fn detach(pid: i32, signal: i32) {
    /// PTRACE_DETACH of include/uapi/linux/ptrace.h.
    const DETACH: usize = 17;
    const SIGTRAP: i32 = 5;
    let signal = if signal == SIGTRAP { 0 } else { signal };
    // SAFETY: the request reads and writes no memory of this process. ESRCH: the child was killed meanwhile.
    let _ = unsafe { call(number::PTRACE, [DETACH, pid as usize, 0, signal as usize]) };
}

/// Waits for the child `pid` and returns its exit status (wait4). Blocks, so only for a child that is known to end.
pub fn wait_status(pid: i32) -> Result<Status, Errno> {
    let pid = rustix_pid(pid)?;
    loop {
        let (_, status) = retry_on_intr(|| rustix::process::waitpid(Some(pid), WaitOptions::empty()))?
            .ok_or(Errno::ESRCH)?;
        if let Some(end) = Status::of_end(status) {
            return Ok(end);
        }
    }
}

/// Waits for the child `pid` and reaps it (wait4). Blocks, so only for a child that is known to end.
pub fn wait(pid: i32) -> Result<(), Errno> {
    wait_status(pid).map(drop)
}

/// Converts a PID for calls of rustix; ESRCH for a number that is not positive.
fn rustix_pid(pid: i32) -> Result<Pid, Errno> {
    Pid::from_raw(pid.max(0)).ok_or(Errno::ESRCH)
}

/// Joins namespaces (setns(2)); with a pidfd (Linux 5.8) several at once.
pub fn setns(target: FdRef<'_>, namespaces: u64) -> Result<(), Errno> {
    let kinds = ThreadNameSpaceType::from_bits_retain(namespaces as u32);
    Ok(rustix::thread::move_into_thread_name_spaces(target.as_fd(), kinds)?)
}

/// Moves the process to new namespaces (unshare(2)).
pub fn unshare(flags: u64) -> Result<(), Errno> {
    // SAFETY: the caller has one thread, or passes only namespaces, so no thread loses descriptors that it knows.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::from_bits_retain(flags as u32)) }?)
}

/// Sends a signal to a process (kill(2)).
pub fn kill(pid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::KILL, [pid as isize as usize, signal as usize]) }.map(drop)
}

/// Opens a pidfd of a process (pidfd_open, Linux 5.3).
pub fn pidfd_open(pid: i32) -> Result<Fd, Errno> {
    Ok(rustix::process::pidfd_open(rustix_pid(pid)?, PidfdFlags::empty())?.into())
}

/// Sends a signal to a process through its pidfd (pidfd_send_signal, Linux 5.1).
pub fn pidfd_signal(process: FdRef<'_>, signal: i32) -> Result<(), Errno> {
    // SAFETY: the signal's details are null, which asks for those kill(2) would send.
    unsafe { call(number::PIDFD_SEND_SIGNAL, [process.argument(), signal as usize, 0, 0]) }.map(drop)
}

/// The caller's PID in its own PID namespace.
pub fn pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Makes the process the leader of a new session (setsid(2)).
pub fn new_session() -> Result<(), Errno> {
    Ok(rustix::process::setsid().map(drop)?)
}

/// Makes the process the leader of a new session, as a marked call, for a process whose filter permits only marked
/// calls.
pub fn new_session_marked(mark: Mark) -> Result<(), Errno> {
    let [fourth, fifth] = mark.arguments();
    // SAFETY: the call takes nothing.
    unsafe { call(number::SETSID, [0, 0, 0, fourth, fifth]) }.map(drop)
}

/// Operations of prctl(2) whose arguments are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Makes the process not dumpable (PR_SET_DUMPABLE, 0): no ptrace, no core dump, /proc/PID belongs to root.
    NotDumpable,
    /// Keeps permitted capabilities at a change of user (PR_SET_KEEPCAPS, 1).
    KeepCapabilities,
    /// Whether capabilities stay unchanged when a user ID changes (PR_SET_SECUREBITS with SECBIT_NO_SETUID_FIXUP or 0;
    /// capabilities(7)).
    KeepEffective(bool),
    /// Drops this capability from the bounding set (PR_CAPBSET_DROP).
    DropBounding(u32),
    /// Clears the ambient set (PR_CAP_AMBIENT_CLEAR_ALL, Linux 4.3).
    ClearAmbient,
    /// Adds this capability to the ambient set (PR_CAP_AMBIENT_RAISE, Linux 4.3).
    RaiseAmbient(u32),
    /// Sets no_new_privs (PR_SET_NO_NEW_PRIVS, 1).
    NoNewPrivileges,
    /// Makes the process a child subreaper (PR_SET_CHILD_SUBREAPER, 1).
    Subreaper,
    /// Sends SIGKILL when the parent ends (PR_SET_PDEATHSIG). A change of IDs or capabilities clears it.
    KillWithParent,
}

/// Changes an attribute of this process.
pub fn control(control: Control) -> Result<(), Errno> {
    use rustix::process as of_process;
    use rustix::thread as of_thread;
    let capability = |number: u32| CapabilitySet::from_bits_retain(1_u64.checked_shl(number).unwrap_or(0));
    Ok(match control {
        Control::NotDumpable => of_process::set_dumpable_behavior(DumpableBehavior::NotDumpable),
        Control::KeepCapabilities => of_thread::set_keep_capabilities(true),
        Control::KeepEffective(keep) => {
            let bits =
                if keep { CapabilitiesSecureBits::NO_SETUID_FIXUP } else { CapabilitiesSecureBits::empty() };
            of_thread::set_capabilities_secure_bits(bits)
        }
        Control::DropBounding(number) => of_thread::remove_capability_from_bounding_set(capability(number)),
        Control::ClearAmbient => of_thread::clear_ambient_capability_set(),
        Control::RaiseAmbient(number) => {
            of_thread::configure_capability_in_ambient_set(capability(number), true)
        }
        Control::NoNewPrivileges => of_thread::set_no_new_privs(true),
        Control::Subreaper => of_process::set_child_subreaper(Some(Pid::INIT)),
        Control::KillWithParent => of_process::set_parent_process_death_signal(Some(Signal::KILL)),
    }?)
}

/// Sets the process name that `ps` shows (PR_SET_NAME), truncated to 15 bytes.
pub fn set_name(name: &CStr) -> Result<(), Errno> {
    Ok(rustix::thread::set_name(name)?)
}

/// Sets all three user IDs (setresuid(2)).
pub fn set_user(uid: u32) -> Result<(), Errno> {
    let uid = Uid::from_raw_unchecked(uid);
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

/// Sets all three group IDs (setresgid(2)).
pub fn set_group(gid: u32) -> Result<(), Errno> {
    let gid = Gid::from_raw_unchecked(gid);
    Ok(rustix::thread::set_thread_res_gid(gid, gid, gid)?)
}

/// Sets only the effective user and group, and with them the file system ids (setresuid(2), setresgid(2)).
pub fn set_effective(uid: u32, gid: u32) -> Result<(), Errno> {
    rustix::thread::set_thread_res_gid(None, Gid::from_raw_unchecked(gid), None)?;
    Ok(rustix::thread::set_thread_res_uid(None, Uid::from_raw_unchecked(uid), None)?)
}

/// Sets the supplementary groups (setgroups(2)); `gids` contains native-endian u32, four bytes each.
pub fn set_groups(gids: &[u8]) -> Result<(), Errno> {
    if !gids.len().is_multiple_of(4) {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the kernel copies `len / 4` numbers of four bytes from the slice borrowed above, bytewise, so their
    // alignment does not matter.
    unsafe { call(number::SETGROUPS, [gids.len() / 4, gids.as_ptr() as usize]) }.map(drop)
}

/// Sets the capability sets of the caller, as bit masks (capset(2), version 3).
pub fn set_capabilities(effective: u64, permitted: u64, inheritable: u64) -> Result<(), Errno> {
    let [effective, permitted, inheritable] =
        [effective, permitted, inheritable].map(CapabilitySet::from_bits_retain);
    Ok(rustix::thread::set_capabilities(None, CapabilitySets { effective, permitted, inheritable })?)
}

/// The permitted capability set of the caller, as a bit mask (capget(2), version 3).
pub fn permitted_capabilities() -> Result<u64, Errno> {
    Ok(rustix::thread::capabilities(None)?.permitted.bits())
}

/// Sets a resource limit of the caller (prlimit64(2)).
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> Result<(), Errno> {
    let limit = [soft, hard];
    // SAFETY: the kernel reads two u64 from `limit`, which lives across the call, and writes nothing (null).
    unsafe { call(number::PRLIMIT64, [0, resource as usize, limit.as_ptr() as usize, 0]) }.map(drop)
}

/// Sets the file mode creation mask (umask(2)).
pub fn set_umask(mask: u32) {
    rustix::process::umask(Mode::from_bits_retain(mask));
}

/// Sets the host name of the UTS namespace (sethostname(2)).
pub fn set_host_name(name: &[u8]) -> Result<(), Errno> {
    Ok(rustix::system::sethostname(name)?)
}

/// A set of signals: bit n-1 represents signal n.
pub type Signals = u64;

/// The set that contains only `signal`, a number from 1.
pub const fn signals(signal: i32) -> Signals {
    1 << (signal - 1)
}

/// Replaces the mask of blocked signals (rt_sigprocmask(2)).
pub fn set_signal_mask(blocked: Signals) -> Result<(), Errno> {
    const SIG_SETMASK: usize = 2;
    // SAFETY: the kernel reads one u64, the size given, and writes nothing (null).
    unsafe { call(number::RT_SIGPROCMASK, [SIG_SETMASK, &raw const blocked as usize, 0, 8]) }.map(drop)
}

/// Sleeps until a signal that is not in `blocked` has been handled (rt_sigsuspend(2)).
pub fn sleep(blocked: Signals) {
    // SAFETY: the kernel reads one u64, the size given. It always fails, with EINTR.
    let _ = unsafe { call(number::RT_SIGSUSPEND, [&raw const blocked as usize, 8]) };
}

/// `struct sigaction` of the kernel: handler, flags, restorer and a mask of 64 bits, 3 words of 64 bits (riscv64, which has no
/// restorer) to 5 of 32 bits (arm). The handler is the first word everywhere, and the others are 0 here.
type SignalAction = [usize; 5];

/// Ignores SIGCHLD, so that the kernel reaps children, including reparented ones, when they end (sigaction(2)).
pub fn leave_reaping_to_kernel() -> Result<(), Errno> {
    const SIG_IGN: usize = 1;
    let action: SignalAction = [SIG_IGN, 0, 0, 0, 0];
    // SAFETY: the kernel reads one `sigaction`, which is not longer than `action`, and writes nothing (null).
    unsafe { call(number::RT_SIGACTION, [SIGCHLD as usize, action.as_ptr() as usize, 0, 8]) }.map(drop)
}

/// Fills `bytes` from the kernel's random number generator (getrandom(2)).
///
/// # Errors
/// EAGAIN if the generator is not initialized yet, early during boot.
pub fn random(bytes: &mut [u8; 16]) -> Result<(), Errno> {
    let length = rustix::rand::getrandom(&mut *bytes, GetRandomFlags::NONBLOCK)?;
    if length == bytes.len() { Ok(()) } else { Err(Errno::EAGAIN) }
}

/// Resets every signal to its default disposition, because ignored signals stay ignored across exec (Rust's runtime
/// ignores SIGPIPE).
pub fn reset_signal_handlers() {
    // SIG_DFL, no flags, no restorer, empty mask.
    let action: SignalAction = [0; 5];
    for signal in 1..=SIGNAL_MAX {
        // SAFETY: the kernel reads one `sigaction`, which is not longer than `action`, and writes nothing (null).
        // SIGKILL and SIGSTOP are refused, which is as good.
        let _ = unsafe { call(number::RT_SIGACTION, [signal as usize, action.as_ptr() as usize, 0, 8]) };
    }
}

/// Clocks of clock_gettime(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// CLOCK_REALTIME: time since 1970; can be changed.
    Wall = 0,
    /// CLOCK_MONOTONIC: never goes backwards.
    Monotonic = 1,
}

/// The time of a clock in nanoseconds (clock_gettime(2)).
pub fn now_ns(clock: Clock) -> i64 {
    let mut time = [0_i64; 2];
    // SAFETY: the kernel writes a `timespec`, two i64 (on arm because of the call with 64-bit times), to a local that lives across the call.
    let _ = unsafe { call(number::CLOCK_GETTIME, [clock as usize, time.as_mut_ptr() as usize]) };
    time[0].saturating_mul(1_000_000_000).saturating_add(time[1])
}

/// Sleeps for this number of nanoseconds, or until a signal is handled (clock_nanosleep(2)).
pub fn pause(nanoseconds: i64) {
    let time = Timespec { tv_sec: nanoseconds / 1_000_000_000, tv_nsec: nanoseconds % 1_000_000_000 };
    let _ = rustix::thread::clock_nanosleep_relative(ClockId::Monotonic, &time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_lasts() {
        let before = now_ns(Clock::Monotonic);
        pause(2_000_000);
        assert!(now_ns(Clock::Monotonic) - before >= 2_000_000);
    }

    #[test]
    fn a_clone_is_reaped_with_its_code() {
        match clone(0, None).unwrap() {
            Clone::Child => exit(7),
            Clone::Parent { pid, .. } => loop {
                if let Some(ended) = reap(pid).unwrap() {
                    break assert_eq!(ended, (pid, Status::Code(7)));
                }
            },
        }
    }

    /// A child of another process group, as a container is.
    #[test]
    fn any_child_is_reaped() {
        let Clone::Parent { pid: parent, .. } = clone(0, None).unwrap() else {
            let Clone::Parent { pid: child, .. } = clone(0, None).unwrap() else {
                exit(if new_session().is_ok() { 7 } else { 8 });
            };
            loop {
                match reap(-1) {
                    Ok(None) => {}
                    Ok(Some(ended)) => exit(if ended == (child, Status::Code(7)) { 0 } else { 1 }),
                    Err(_) => exit(2),
                }
            }
        };
        assert_eq!(wait_status(parent), Ok(Status::Code(0)));
    }

    /// Regression: the stop was taken for the end.
    #[test]
    fn a_child_that_makes_its_parent_its_tracer_continues() {
        const TRACEME: usize = 0;
        const SIGCONT: i32 = 18;
        let Clone::Parent { pid: child, .. } = clone(0, None).unwrap() else {
            // SAFETY: the request has no further arguments.
            let traced = unsafe { call(number::PTRACE, [TRACEME, 0, 0, 0]) };
            // Ignored unless the process is traced, which stops it.
            let raised = kill(pid(), SIGCONT);
            exit(if traced.is_ok() && raised.is_ok() { 7 } else { 1 });
        };
        let ended = loop {
            if let Some(ended) = reap(child).unwrap() {
                break ended;
            }
        };
        assert_eq!(ended, (child, Status::Code(7)));
    }

    #[test]
    fn a_wait_says_how_the_child_ended() {
        for (code, signal, expected) in [(3, None, Status::Code(3)), (0, Some(SIGKILL), Status::Signal(9))] {
            match clone(0, None).unwrap() {
                Clone::Child => loop {
                    match signal {
                        Some(signal) => kill(pid(), signal).unwrap(),
                        None => exit(code),
                    }
                },
                Clone::Parent { pid, .. } => assert_eq!(wait_status(pid), Ok(expected)),
            }
        }
    }

    #[test]
    fn clone_refuses_what_would_share_memory() {
        const CLONE_VM: u64 = 0x100;
        assert!(matches!(clone(CLONE_VM, None), Err(Errno::EINVAL)));
    }
}
