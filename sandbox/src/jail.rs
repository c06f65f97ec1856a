//! Jails for processes that read untrusted data: the process is started in a PID namespace of its own, then confines
//! itself step by step, and cannot undo any step.
//!
//! ```text
//!   start              clone into a new PID namespace, exec with the descriptors that are named and no environment
//!   close_descriptors  what else was inherited
//!   shut_in            mount, network, IPC, UTS and cgroup namespaces; one directory, or nothing, as the root
//!   keep_capabilities  the rest is gone for good, with no_new_privs
//!   allow_only, deny   system calls
//! ```
//! Each step reports what it could not do. A caller that reads untrusted data treats any such error as fatal: a process
//! that is confined in part must not start reading.

use std::ffi::CString;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;

use coracle_sys::process::{Clone, Control, Pointers, Status};
use coracle_sys::{Fd, FdRef, bpf, fs, mount, process};
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::sched::CloneFlags;

use crate::Error;
use crate::seccomp::{Action, Architecture, Compare, Condition, Profile, Rule, compile};

/// More capabilities than any kernel has.
const CAPABILITIES_MAX: u32 = 64;

fn refused(op: &'static str, target: &str) -> impl Fn(coracle_sys::Errno) -> Error {
    let target = target.to_owned();
    move |errno| Error::kernel(op, &target, Errno::from_raw(errno.0))
}

/// What to start in a PID namespace of its own.
#[derive(Debug)]
pub struct Start<'a> {
    /// The program, by descriptor: its name may mean nothing where it runs.
    pub program: BorrowedFd<'a>,
    /// All arguments, its name included. The environment is empty: it may hold the password of a proxy.
    pub arguments: &'a [CString],
    /// Its working directory.
    pub directory: BorrowedFd<'a>,
    /// Its descriptors 0 and 1.
    pub streams: [BorrowedFd<'a>; 2],
    /// Its descriptor 3, if any. Descriptor 2 is the caller's.
    pub output: Option<BorrowedFd<'a>>,
}

/// A process that was started by [`start`]; dropping it kills and reaps it.
#[derive(Debug)]
pub struct Jailed {
    pid: i32,
    pidfd: Fd,
    is_reaped: bool,
}

/// Starts the program as pid 1 of a new PID namespace: it cannot name any other process, and what it might start ends with
/// it. The calling thread is its parent: a parent-death signal follows that thread.
///
/// # Errors
/// [`Error::Kernel`]: this process is not root, the kernel has no PID namespaces (CONFIG_PID_NS), or memory is short. That
/// the program could not be executed shows as [`Ended::Code`] 127.
pub fn start(start: &Start<'_>) -> Result<Jailed, Error> {
    const EXEC_FAILED: u8 = 127;
    let no_memory = refused("map", "arguments of a jailed process");
    let mut arguments = Pointers::with_capacity(start.arguments.len()).map_err(&no_memory)?;
    start.arguments.iter().try_for_each(|argument| arguments.push(argument)).map_err(&no_memory)?;
    let environment = Pointers::with_capacity(0).map_err(&no_memory)?;
    match process::clone(process::CLONE_NEWPID, None).map_err(refused("clone", "into a new PID namespace"))? {
        Clone::Parent { pid, pidfd } => Ok(Jailed { pid, pidfd, is_reaped: false }),
        // The caller may have threads: from here on system calls only.
        Clone::Child => {
            let _ = become_program(start, &arguments, &environment);
            process::exit(EXEC_FAILED)
        }
    }
}

/// Comes back only with the reason why not.
fn become_program(
    start: &Start<'_>,
    arguments: &Pointers<'_>,
    environment: &Pointers<'_>,
) -> Result<(), coracle_sys::Errno> {
    const ABOVE_PLACES: i32 = 16;
    // First out of the way: a source may have the number that is another's place.
    let copy = |file: BorrowedFd<'_>| fs::duplicate(FdRef::from(file), ABOVE_PLACES);
    let program = copy(start.program)?;
    let [stdin, stdout] = [copy(start.streams[0])?, copy(start.streams[1])?];
    let output = start.output.map(copy).transpose()?;
    fs::change_directory(FdRef::from(start.directory))?;
    fs::duplicate_to(stdin.borrow(), 0, false)?;
    fs::duplicate_to(stdout.borrow(), 1, false)?;
    if let Some(output) = &output {
        fs::duplicate_to(output.borrow(), 3, false)?;
    }
    Err(process::exec_fd(program.borrow(), arguments, environment))
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Code(u8),
    /// This signal ended it.
    Signal(u8),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

impl Jailed {
    /// Its process id, as the caller sees it.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Kills it; one that has ended already is left as it is.
    pub fn kill(&self) {
        // ESRCH: it has ended. Nothing else can be the matter with a child and SIGKILL.
        let _ = process::pidfd_signal(self.pidfd.borrow(), process::SIGKILL);
    }

    /// Waits until it has ended and says how. For one that was killed, or has closed its output for good.
    ///
    /// # Errors
    /// [`Error::Kernel`] for what the kernel refuses.
    pub fn wait(mut self) -> Result<Ended, Error> {
        self.is_reaped = true;
        match process::wait_status(self.pid).map_err(refused("wait for", "a jailed process"))? {
            Status::Code(code) => Ok(Ended::Code(code)),
            Status::Signal(signal) => Ok(Ended::Signal(signal)),
        }
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        if !self.is_reaped {
            self.kill();
            // It was killed, so this ends; where it is no child any more there is nothing to reap.
            let _ = process::wait(self.pid);
        }
    }
}

/// What a jailed process sees of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// Its working directory, writable.
    WorkingDirectory,
    /// An empty, read-only tmpfs.
    Empty,
}

/// Makes `root` the root of a mount namespace in which nothing else is mounted. There devices cannot be opened, programs
/// cannot be run and set-user-ID bits do nothing. The network, System V IPC, host names and the view of cgroups are its own,
/// empty ones. For a process that [`start`] made only, as its own check of that.
///
/// # Errors
/// [`Error::Invalid`] outside of a PID namespace of its own; [`Error::Kernel`] where this process is not root, or the kernel
/// lacks a namespace (CONFIG_NET_NS, CONFIG_IPC_NS, CONFIG_UTS_NS, CONFIG_CGROUPS) or tmpfs (CONFIG_TMPFS).
pub fn shut_in(root: Root) -> Result<(), Error> {
    if process::pid() != 1 {
        return Err(Error::invalid("jail", "this process is not the first of a PID namespace of its own"));
    }
    let path = std::env::current_dir().map_err(|error| Error::io("read", "the current directory", &error))?;
    let shown = path.display().to_string();
    let path = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid("directory", "its path holds a NUL"))?;
    for (namespace, name) in [
        (process::CLONE_NEWNS, "the mount namespace"),
        (process::CLONE_NEWNET, "the network namespace"),
        (process::CLONE_NEWIPC, "the IPC namespace"),
        (process::CLONE_NEWUTS, "the UTS namespace"),
        (process::CLONE_NEWCGROUP, "the cgroup namespace"),
    ] {
        process::unshare(namespace).map_err(refused("unshare", name))?;
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount::mount(None, c"/", None, private.bits(), None).map_err(refused("make private", "/"))?;
    let bare = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    match root {
        Root::WorkingDirectory => {
            let bind = MsFlags::MS_BIND;
            mount::mount(Some(&path), &path, None, bind.bits(), None).map_err(refused("bind", &shown))?;
            let remount = bind | MsFlags::MS_REMOUNT | bare;
            mount::mount(None, &path, None, remount.bits(), None).map_err(refused("remount", &shown))?;
        }
        Root::Empty => {
            let (kind, options) = (c"tmpfs", c"size=4k,nr_inodes=2,mode=555");
            let flags = (bare | MsFlags::MS_RDONLY).bits();
            mount::mount(Some(kind), &path, Some(kind), flags, Some(options))
                .map_err(refused("mount tmpfs at", &shown))?;
        }
    }
    // Into the mount on top, in place of the one below.
    std::env::set_current_dir(&shown).map_err(|error| Error::io("change to", &shown, &error))?;
    mount::pivot_root(c".", c".").map_err(refused("pivot_root to", &shown))?;
    let detach = nix::mount::MntFlags::MNT_DETACH.bits() as usize;
    mount::unmount(c".", detach).map_err(refused("detach", "the old root"))?;
    std::env::set_current_dir("/").map_err(|error| Error::io("change to", "/", &error))
}

/// Closes every descriptor from `first` up: what a parent of our parents left open without O_CLOEXEC.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn close_descriptors(first: u8) -> Result<(), Error> {
    fs::close_from(i32::from(first)).map_err(refused("close", "inherited descriptors"))
}

/// A network namespace of its own, with nothing in it.
///
/// # Errors
/// [`Error::Kernel`]: this process is not root, or the kernel has none.
pub fn leave_network() -> Result<(), Error> {
    process::unshare(CloneFlags::CLONE_NEWNET.bits() as u64).map_err(refused("unshare", "the network"))
}

/// Gives up all capabilities but these (`CAP_…`) for good, and all ways to get any (`no_new_privs`).
///
/// With them goes what kept others from tracing this process: whoever has its user id and no capability less may trace it
/// (ptrace(2)), as root of a container in the node's PID namespace has. So it is made not dumpable before.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn keep_capabilities(names: &[&str]) -> Result<(), Error> {
    let keep = names.iter().filter_map(|name| crate::capability::bit(name)).fold(0, |set, bit| set | bit);
    process::control(Control::NotDumpable).map_err(refused("forbid", "tracing"))?;
    process::control(Control::NoNewPrivileges).map_err(refused("set", "no_new_privs"))?;
    for capability in (0..CAPABILITIES_MAX).filter(|capability| keep >> capability & 1 == 0) {
        match process::control(Control::DropBounding(capability)) {
            Ok(()) => {}
            // Beyond the last that this kernel has.
            Err(errno) if Errno::from_raw(errno.0) == Errno::EINVAL => break,
            Err(errno) => return Err(refused("drop", "capabilities")(errno)),
        }
    }
    let held = caps::read(None, caps::CapSet::Permitted)
        .map_err(|_| Error::kernel("read", "capabilities", Errno::last()))?;
    let keep = held.iter().fold(0, |set, one| set | one.bitmask()) & keep;
    process::set_capabilities(keep, keep, 0).map_err(refused("set", "capabilities"))
}

/// Only these system calls from now on, of this machine's own convention, and for [`start`]ed processes what abort(3) does:
/// a signal to itself, which is 1 in its PID namespace, and to nobody else. Any other call is EPERM.
///
/// # Errors
/// [`Error::Invalid`] for a name that is no call of any architecture: a rule about it would have no effect.
/// [`Error::Kernel`]: no seccomp, or neither root nor `no_new_privs`.
pub fn allow_only(calls: &[&str]) -> Result<(), Error> {
    set(&only(calls))
}

/// The profile of [`allow_only`].
pub(crate) fn only(calls: &[&str]) -> Profile {
    const PID: u64 = 1;
    let to_itself = |argument| Condition { argument, compare: Compare::Equal, value: PID };
    // abort(3) of musl; the process has one thread, whose id is the process's.
    let rules = vec![
        rule(calls, Vec::new(), Action::Allow),
        rule(&["getpid", "gettid", "exit"], Vec::new(), Action::Allow),
        rule(&["tkill"], vec![to_itself(0)], Action::Allow),
        rule(&["tgkill"], vec![to_itself(0), to_itself(1)], Action::Allow),
    ];
    profile(Action::Errno(Errno::EPERM as u16), rules)
}

/// All system calls but these from now on, of this machine's own convention; these are EPERM.
///
/// # Errors
/// As [`allow_only`].
pub fn deny(calls: &[&str]) -> Result<(), Error> {
    set(&profile(Action::Allow, vec![rule(calls, Vec::new(), Action::Errno(Errno::EPERM as u16))]))
}

fn rule(calls: &[&str], conditions: Vec<Condition>, action: Action) -> Rule {
    Rule { names: calls.iter().map(|name| (*name).to_owned()).collect(), conditions, action }
}

fn profile(default: Action, rules: Vec<Rule>) -> Profile {
    Profile {
        default,
        unknown: Action::Errno(Errno::ENOSYS as u16),
        architectures: vec![Architecture::HERE[0]],
        rules,
        flags: 0,
    }
}

fn set(profile: &Profile) -> Result<(), Error> {
    if let Some(name) = profile.unknown_names().next() {
        return Err(Error::invalid("seccomp", format!("{name:?} is no system call")));
    }
    bpf::set_filter(&compile(profile)?.program, 0).map_err(refused("set", "a seccomp filter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before, the rule was dropped and the rest installed: a name with a typing error denied nothing. The check comes
    /// before the filter is set, so this process stays as it is.
    #[test]
    fn a_rule_about_a_call_that_does_not_exist_is_an_error() {
        for refused in [deny(&["mount", "no_such_call"]), allow_only(&["read", "no_such_call"])] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("\"no_such_call\" is no system call"), "{error}");
        }
    }
}
