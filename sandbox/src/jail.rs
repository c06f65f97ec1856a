//! Jails for processes that read untrusted data: the process is started in a PID namespace of its own, then confines
//! itself step by step, and cannot undo any step.
//!
//! ```text
//!   start              clone into a new PID namespace, exec with the descriptors that are named and no environment
//!   close_descriptors  what else was inherited
//!   shut_in            mount, network, IPC, UTS and cgroup namespaces; one directory, or nothing, as the root
//!   shut_in_on_network the same, but in the caller's network namespace; a few files of its own as the root
//!   keep_capabilities  the rest is gone for good, with no_new_privs
//!   become_nobody      no capability at all, and another user
//!   allow_only, deny   system calls
//! ```
//! Each step reports what it could not do. A caller that reads untrusted data treats any such error as fatal: a process
//! that is confined in part must not start reading.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use coracle_sys::process::{Clone, Control, Pointers, Status};
use coracle_sys::{Fd, FdRef, bpf, fs, mount, process};
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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
    // The caller may have threads, one of which may hold the allocator's lock: the child makes system calls only, and neither
    // allocates nor frees.
    let cloned = process::clone(process::CLONE_NEWPID, None);
    match cloned {
        Ok(Clone::Child) => {
            let _ = become_program(start, &arguments, &environment);
            process::exit(EXEC_FAILED)
        }
        Ok(Clone::Parent { pid, pidfd }) => Ok(Jailed { pid, pidfd, is_reaped: false }),
        Err(errno) => Err(refused("clone", "into a new PID namespace")(errno)),
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

    /// Kills it; one that has ended already is left as it is. One that has become another user ([`become_nobody`]) is killed
    /// only by a caller with CAP_KILL.
    pub fn kill(&self) {
        self.try_kill();
    }

    /// Whether it has ended or is going to.
    fn try_kill(&self) -> bool {
        match process::pidfd_signal(self.pidfd.borrow(), process::SIGKILL) {
            Ok(()) => true,
            Err(errno) => Errno::from_raw(errno.0) == Errno::ESRCH,
        }
    }

    /// Waits for at most `limit` until it has ended, reaps it and says how it ended; `None`: it still runs.
    ///
    /// # Errors
    /// [`Error::Kernel`] for what the kernel refuses.
    pub fn wait_within(&mut self, limit: Duration) -> Result<Option<Ended>, Error> {
        let until = std::time::Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Ok(0) if left.is_zero() => return Ok(None),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(Error::kernel("wait for", "a jailed process", errno)),
            }
        }
        self.reap().map(Some)
    }

    /// Waits until it has ended and says how. For one that was killed, or has closed its output for good.
    ///
    /// # Errors
    /// [`Error::Kernel`] for what the kernel refuses.
    pub fn wait(mut self) -> Result<Ended, Error> {
        self.reap()
    }

    fn reap(&mut self) -> Result<Ended, Error> {
        self.is_reaped = true;
        match process::wait_status(self.pid).map_err(refused("wait for", "a jailed process"))? {
            Status::Code(code) => Ok(Ended::Code(code)),
            Status::Signal(signal) => Ok(Ended::Signal(signal)),
        }
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        if !self.is_reaped && self.try_kill() {
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
    let place = leave_namespaces(&[NETWORK])?;
    match root {
        Root::WorkingDirectory => place.bind(BARE)?,
        Root::Empty => place.mount_tmpfs(MsFlags::MS_RDONLY, c"size=4k,nr_inodes=2,mode=555")?,
    }
    place.become_root()
}

/// Most bytes of all files that [`shut_in_on_network`] makes.
pub const FILES_BYTES_MAX: u64 = 8 << 20;

/// As [`shut_in`], but this process stays in the network namespace that it is in. Its root is a read-only tmpfs that holds
/// empty files of these names in `/etc`, for everybody to read, and nothing else. The files that are returned, in the order of
/// the names, are the only way to write to them: they were opened through a mount that is gone afterwards.
///
/// # Errors
/// As [`shut_in`].
pub fn shut_in_on_network(names: &[&str]) -> Result<Vec<File>, Error> {
    let place = leave_namespaces(&[])?;
    let options = CString::new(format!("size={FILES_BYTES_MAX},nr_inodes={},mode=755", names.len() + 2));
    let options = options.map_err(|_| Error::invalid("options", "hold a NUL"))?;
    place.mount_tmpfs(MsFlags::empty(), &options)?;
    place.enter()?;
    let files = {
        let _mask = crate::umask::Public::begin();
        std::fs::create_dir("etc").map_err(|error| Error::io("make directory", "etc", &error))?;
        let make = |name: &&str| {
            let path = format!("etc/{name}");
            let file = File::options().write(true).create_new(true).open(&path);
            file.map_err(|error| Error::io("make", path, &error))
        };
        names.iter().map(make).collect::<Result<Vec<File>, Error>>()?
    };
    // A mount with files that are open for writing does not become read-only: a second one of the same file system does.
    place.bind(BARE | MsFlags::MS_RDONLY)?;
    place.become_root()?;
    Ok(files)
}

/// The namespaces that every jail has of its own.
const NAMESPACES: [(u64, &str); 4] = [
    (process::CLONE_NEWNS, "the mount namespace"),
    (process::CLONE_NEWIPC, "the IPC namespace"),
    (process::CLONE_NEWUTS, "the UTS namespace"),
    (process::CLONE_NEWCGROUP, "the cgroup namespace"),
];
const NETWORK: (u64, &str) = (process::CLONE_NEWNET, "the network namespace");

/// What no jail needs of a mount.
const BARE: MsFlags = MsFlags::MS_NODEV.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NOEXEC);

/// New namespaces, `more` included, with mounts that nobody else sees; gives the working directory, where the root is made.
fn leave_namespaces(more: &[(u64, &'static str)]) -> Result<Place, Error> {
    if process::pid() != 1 {
        return Err(Error::invalid("jail", "this process is not the first of a PID namespace of its own"));
    }
    let path = std::env::current_dir().map_err(|error| Error::io("read", "the current directory", &error))?;
    let shown = path.display().to_string();
    let path = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid("directory", "its path holds a NUL"))?;
    for (namespace, name) in NAMESPACES.iter().chain(more) {
        process::unshare(*namespace).map_err(refused("unshare", name))?;
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount::mount(None, c"/", None, private.bits(), None).map_err(refused("make private", "/"))?;
    Ok(Place { path, shown })
}

/// A directory that becomes the root.
struct Place {
    path: CString,
    shown: String,
}

impl Place {
    fn mount_tmpfs(&self, flags: MsFlags, options: &std::ffi::CStr) -> Result<(), Error> {
        let kind = c"tmpfs";
        mount::mount(Some(kind), &self.path, Some(kind), (BARE | flags).bits(), Some(options))
            .map_err(refused("mount tmpfs at", &self.shown))
    }

    /// Mounts what is there once more on top, with these flags.
    fn bind(&self, flags: MsFlags) -> Result<(), Error> {
        let bind = MsFlags::MS_BIND;
        mount::mount(Some(&self.path), &self.path, None, bind.bits(), None)
            .map_err(refused("bind", &self.shown))?;
        let remount = bind | MsFlags::MS_REMOUNT | flags;
        mount::mount(None, &self.path, None, remount.bits(), None).map_err(refused("remount", &self.shown))
    }

    /// Into the mount on top, in place of the one below.
    fn enter(&self) -> Result<(), Error> {
        std::env::set_current_dir(&self.shown).map_err(|error| Error::io("change to", &self.shown, &error))
    }

    fn become_root(&self) -> Result<(), Error> {
        self.enter()?;
        mount::pivot_root(c".", c".").map_err(refused("pivot_root to", &self.shown))?;
        let detach = nix::mount::MntFlags::MNT_DETACH.bits() as usize;
        mount::unmount(c".", detach).map_err(refused("detach", "the old root"))?;
        std::env::set_current_dir("/").map_err(|error| Error::io("change to", "/", &error))
    }
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
    bound_capabilities(keep)?;
    let held = caps::read(None, caps::CapSet::Permitted)
        .map_err(|_| Error::kernel("read", "capabilities", Errno::last()))?;
    let keep = held.iter().fold(0, |set, one| set | one.bitmask()) & keep;
    process::set_capabilities(keep, keep, 0).map_err(refused("set", "capabilities"))
}

/// What can be held at all from now on, and no way to get more; nobody may trace this process.
fn bound_capabilities(keep: u64) -> Result<(), Error> {
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
    Ok(())
}

/// The user and the group that own nothing, by convention.
const NOBODY: u32 = 65534;

/// Becomes user and group 65534 without supplementary groups, and gives up all capabilities for good, as
/// [`keep_capabilities`] of none. A change of ids clears the parent-death signal and makes a process dumpable, so both are set
/// again. The signal is subject to the parent's right to send it (kernel/exit.c, reparent_leader): the parent needs CAP_KILL.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn become_nobody() -> Result<(), Error> {
    bound_capabilities(0)?;
    process::set_groups(&[]).map_err(refused("set", "no supplementary groups"))?;
    process::set_group(NOBODY).map_err(refused("become", "group 65534"))?;
    process::set_user(NOBODY).map_err(refused("become", "user 65534"))?;
    process::set_capabilities(0, 0, 0).map_err(refused("set", "capabilities"))?;
    process::control(Control::NotDumpable).map_err(refused("forbid", "tracing"))?;
    process::control(Control::ParentDeathSignal(process::SIGKILL))
        .map_err(refused("set", "the parent-death signal"))
}

/// Only these system calls from now on, of this machine's own convention, and for [`start`]ed processes what abort(3) does:
/// a signal to itself, which is 1 in its PID namespace, and to nobody else. Any other call is EPERM.
///
/// # Errors
/// [`Error::Invalid`] for a name that is no call of any architecture: a rule about it would have no effect.
/// [`Error::Kernel`]: no seccomp, or neither root nor `no_new_privs`.
pub fn allow_only(calls: &[&str]) -> Result<(), Error> {
    set(&only(calls, &[]))
}

/// Calls that are allowed where an argument has one of some values.
#[derive(Clone, Copy, Debug)]
pub struct AllowedWith {
    /// Names.
    pub calls: &'static [&'static str],
    /// Each is a number of an argument, from 0, the bits of it that count, and what they must be. All must hold.
    pub arguments: &'static [(u8, u64, u64)],
}

/// As [`allow_only`], and these calls with these arguments.
///
/// # Errors
/// As [`allow_only`].
pub fn allow_only_with(calls: &[&str], more: &[AllowedWith]) -> Result<(), Error> {
    set(&only(calls, more))
}

/// The profile of [`allow_only_with`].
pub(crate) fn only(calls: &[&str], more: &[AllowedWith]) -> Profile {
    const PID: u64 = 1;
    let to_itself = |argument| Condition { argument, compare: Compare::Equal, value: PID };
    // abort(3) of musl; the process has one thread, whose id is the process's.
    let mut rules = vec![
        rule(calls, Vec::new(), Action::Allow),
        rule(&["getpid", "gettid", "exit"], Vec::new(), Action::Allow),
        rule(&["tkill"], vec![to_itself(0)], Action::Allow),
        rule(&["tgkill"], vec![to_itself(0), to_itself(1)], Action::Allow),
    ];
    for AllowedWith { calls, arguments } in more {
        let condition = |(argument, mask, value): &(u8, u64, u64)| Condition {
            argument: *argument,
            compare: Compare::Masked { mask: *mask },
            value: *value,
        };
        rules.push(rule(calls, arguments.iter().map(condition).collect(), Action::Allow));
    }
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
