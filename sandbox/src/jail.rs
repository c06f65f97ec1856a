//! Confinement of processes that read untrusted data: the process is started in a new PID namespace, then
//! confines itself in several steps, none of which it can undo.
//!
//! ```text
//! start              clone into a new PID namespace, exec with only the given descriptors and no environment
//! close_descriptors  close all other inherited descriptors
//! limit              resource limits
//! shut_in            new mount, network, IPC, UTS and cgroup namespaces; one directory, or nothing, as the
//! root
//! shut_in_on_network like shut_in, but in the caller's network namespace; a few new files as the root
//! keep_capabilities  drop all other capabilities permanently, set no_new_privs
//! become_nobody      drop all capabilities, change to another user
//! allow_only, deny   filter system calls
//! ```
//! Each step returns an error if it fails. A caller that reads untrusted data must treat any such error as
//! fatal: a partly confined process must not start to read.

mod filter;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use coracle_sys::process::{Clone, Control, Pointers, Status};
use coracle_sys::{Fd, FdRef, fs, mount, process};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::CloneFlags;
use nix::sys::resource::{Resource, setrlimit};

use crate::Error;

#[cfg(test)]
pub(crate) use filter::only;
pub use filter::{
    AllowedWith, INT, OPEN_TO_READ, RUNTIME_CALLS, TCP_OPTIONS, THREADS, allow_only, allow_only_with, deny,
};

/// Upper bound of capability numbers, which no kernel reaches.
const CAPABILITIES_MAX: u32 = 64;

fn refused(op: &'static str, target: &str) -> impl Fn(coracle_sys::Errno) -> Error {
    let target = target.to_owned();
    move |errno| Error::kernel(op, &target, Errno::from_raw(errno.0))
}

/// The parameters of a process that [`start`] creates.
#[derive(Debug)]
pub struct Start<'a> {
    /// Descriptor of the program, because its path may not exist in the process's namespaces.
    pub program: BorrowedFd<'a>,
    /// All arguments, including `argv[0]`. The environment is empty, because it may contain the password of a
    /// proxy.
    pub arguments: &'a [CString],
    /// Working directory of the program.
    pub directory: BorrowedFd<'a>,
    /// Standard input and output of the program.
    pub streams: [BorrowedFd<'a>; 2],
    /// Descriptor 3 of the program; `None`: closed. Standard error is the caller's.
    pub output: Option<BorrowedFd<'a>>,
}

/// A process that [`start`] created; killed and reaped on drop.
#[derive(Debug)]
pub struct Jailed {
    pid: i32,
    pidfd: Fd,
    is_reaped: bool,
}

/// Starts the program as PID 1 of a new PID namespace: the process cannot signal any other process, and its children
/// end with it. The calling thread is the parent, so a parent-death signal is sent when that thread ends.
///
/// # Errors
/// [`Error::Kernel`] if this process is not root, the kernel has no PID namespaces (CONFIG_PID_NS), or there
/// is not enough memory. If the program cannot be executed, the process ends with [`Ended::Code`] 127.
pub fn start(start: &Start<'_>) -> Result<Jailed, Error> {
    const EXEC_FAILED: u8 = 127;
    let no_memory = refused("map", "arguments of a jailed process");
    let mut arguments = Pointers::with_capacity(start.arguments.len(), 0).map_err(&no_memory)?;
    start.arguments.iter().try_for_each(|argument| arguments.push_argument(argument)).map_err(&no_memory)?;
    // The caller may have other threads, one of which may hold the allocator's lock: the child makes system
    // calls only and neither allocates nor frees memory.
    let cloned = process::clone(process::CLONE_NEWPID, None);
    match cloned {
        Ok(Clone::Child) => {
            let _ = become_program(start, &arguments);
            process::exit(EXEC_FAILED)
        }
        Ok(Clone::Parent { pid, pidfd }) => Ok(Jailed { pid, pidfd, is_reaped: false }),
        Err(errno) => Err(refused("clone", "into a new PID namespace")(errno)),
    }
}

/// Executes the program; returns only on an error.
fn become_program(start: &Start<'_>, arguments: &Pointers<'_>) -> Result<(), coracle_sys::Errno> {
    const ABOVE_PLACES: i32 = 16;
    // The sources are duplicated first, because one may have the number of another's target.
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
    Err(process::exec_fd(program.borrow(), arguments))
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The process exited with this code.
    Code(u8),
    /// This signal ended the process.
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
    /// PID of the process in the caller's PID namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Kills the process; no effect if it has already ended. A process that changed its user ([`become_nobody`]) can be
    /// killed only by a caller with CAP_KILL.
    pub fn kill(&self) {
        self.try_kill();
    }

    /// Kills the process; returns whether it has ended or will end.
    fn try_kill(&self) -> bool {
        match process::pidfd_signal(self.pidfd.borrow(), process::SIGKILL) {
            Ok(()) => true,
            Err(errno) => Errno::from_raw(errno.0) == Errno::ESRCH,
        }
    }

    /// Waits for at most `limit` until the process ends, reaps it and returns its end; `None` if it is still running.
    ///
    /// # Errors
    /// [`Error::Kernel`] for an error of the kernel.
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

    /// Waits without a limit until the process ends; returns its end. Only for a process that was killed or has closed
    /// its output.
    ///
    /// # Errors
    /// [`Error::Kernel`] for an error of the kernel.
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

/// The descriptor is readable when the process has ended.
impl AsFd for Jailed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        if !self.is_reaped && self.try_kill() {
            // It was killed, so the wait ends; if it is not a child any more, there is nothing to reap.
            let _ = process::wait(self.pid);
        }
    }
}

/// The file system of a confined process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// The working directory of the program, writable.
    WorkingDirectory,
    /// A directory with these directories of the working directory of the program, read-only, and nothing else.
    DirectoriesReadOnly(&'static [&'static str]),
    /// An empty, read-only tmpfs.
    Empty,
}

/// Makes `root` the root directory of a new mount namespace without other mounts. The root is mounted nodev,
/// noexec and nosuid. The network, IPC, UTS and cgroup namespaces are new and empty. Only for a process that
/// [`start`] created, which is checked.
///
/// # Errors
/// [`Error::Invalid`] if this process is not PID 1 of a new PID namespace; [`Error::Kernel`] if this process
/// is not root, or the kernel lacks a namespace (CONFIG_NET_NS, CONFIG_IPC_NS, CONFIG_UTS_NS, CONFIG_CGROUPS)
/// or tmpfs (CONFIG_TMPFS).
pub fn shut_in(root: Root) -> Result<(), Error> {
    let new_root = leave_namespaces(&[NETWORK])?;
    match root {
        Root::WorkingDirectory => new_root.bind(BARE)?,
        Root::DirectoriesReadOnly(names) => new_root.mount_directories(names)?,
        Root::Empty => new_root.mount_tmpfs(mount::MS_RDONLY, c"size=4k,nr_inodes=2,mode=555")?,
    }
    new_root.become_root()
}

/// Resource limits of a confined process, which has no core dump (setrlimit(2)).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Address space in bytes.
    pub memory_bytes: u64,
    /// Number of open descriptors.
    pub descriptors: u64,
    /// Size in bytes of each file that it writes.
    pub file_bytes: u64,
}

/// Sets the limits of this process, which it cannot raise without CAP_SYS_RESOURCE.
///
/// # Errors
/// [`Error::Kernel`] if a hard limit of this process is lower.
pub fn limit(limits: Limits) -> Result<(), Error> {
    for (resource, most) in [
        (Resource::RLIMIT_AS, limits.memory_bytes),
        (Resource::RLIMIT_NOFILE, limits.descriptors),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, limits.file_bytes),
    ] {
        setrlimit(resource, most, most)
            .map_err(|errno| Error::kernel("set", format!("{resource:?}"), errno))?;
    }
    Ok(())
}

/// Maximum size in bytes of all files that [`shut_in_on_network`] creates.
pub const FILES_BYTES_MAX: u64 = 8 << 20;

/// Confines this process like [`shut_in`], except that it stays in its network namespace. Its root directory is a
/// read-only tmpfs with empty, world-readable files in `/etc` that have these names. The files can be written only
/// through the returned handles, in the order of the names: they were opened through a mount that has been removed.
///
/// # Errors
/// Those of [`shut_in`].
pub fn shut_in_on_network(names: &[&str]) -> Result<Vec<File>, Error> {
    let new_root = leave_namespaces(&[])?;
    let options = CString::new(format!("size={FILES_BYTES_MAX},nr_inodes={},mode=755", names.len() + 2));
    let options = options.map_err(|_| Error::invalid("options", "hold a NUL"))?;
    new_root.mount_tmpfs(0, &options)?;
    new_root.enter()?;
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
    // A mount with files that are open for writing cannot become read-only; a second mount of the same file
    // system can be read-only.
    new_root.bind(BARE | mount::MS_RDONLY)?;
    new_root.become_root()?;
    Ok(files)
}

/// The kinds of namespaces that are new for every confined process: flag, name.
const NAMESPACES: [(u64, &str); 4] = [
    (process::CLONE_NEWNS, "the mount namespace"),
    (process::CLONE_NEWIPC, "the IPC namespace"),
    (process::CLONE_NEWUTS, "the UTS namespace"),
    (process::CLONE_NEWCGROUP, "the cgroup namespace"),
];
const NETWORK: (u64, &str) = (process::CLONE_NEWNET, "the network namespace");

/// Mount flags for everything that a confined process sees: no devices, no setuid, no executables.
const BARE: u64 = mount::MS_NODEV | mount::MS_NOSUID | mount::MS_NOEXEC;

/// Unshares [`NAMESPACES`] and those of `more`, and makes all mounts private; returns the working directory, on which
/// the root is mounted.
fn leave_namespaces(more: &[(u64, &'static str)]) -> Result<NewRoot, Error> {
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
    let private = mount::MS_REC | mount::MS_PRIVATE;
    mount::mount(None, c"/", None, private, None).map_err(refused("make private", "/"))?;
    Ok(NewRoot { path, shown })
}

/// A directory that becomes the root directory.
struct NewRoot {
    path: CString,
    shown: String,
}

impl NewRoot {
    fn mount_tmpfs(&self, flags: u64, options: &CStr) -> Result<(), Error> {
        let kind = c"tmpfs";
        mount::mount(Some(kind), &self.path, Some(kind), BARE | flags, Some(options))
            .map_err(refused("mount tmpfs at", &self.shown))
    }

    /// Mounts the directory onto itself with these flags.
    fn bind(&self, flags: u64) -> Result<(), Error> {
        bind(&self.path, &self.path, flags)
    }

    /// Mounts a read-only tmpfs with these directories of the directory.
    fn mount_directories(&self, names: &[&str]) -> Result<(), Error> {
        // The tmpfs hides them.
        let open = |name: &&str| File::open(name).map_err(|error| Error::io("open", name, &error));
        let directories = names.iter().map(open).collect::<Result<Vec<File>, Error>>()?;
        self.mount_tmpfs(0, c"size=4k,nr_inodes=16,mode=555")?;
        self.enter()?;
        for (name, directory) in names.iter().zip(&directories) {
            std::fs::create_dir_all(name).map_err(|error| Error::io("make directory", name, &error))?;
            let path = |path: String| {
                CString::new(path).map_err(|_| Error::invalid("directory", "its path holds a NUL"))
            };
            let from = path(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
            bind(&from, &path((*name).to_owned())?, BARE | mount::MS_RDONLY)?;
        }
        remount(&self.path, BARE | mount::MS_RDONLY)
    }

    /// Changes the working directory to the topmost mount of the directory.
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

/// Mounts a directory at another one with these flags.
fn bind(from: &CStr, to: &CStr, flags: u64) -> Result<(), Error> {
    mount::mount(Some(from), to, None, mount::MS_BIND, None)
        .map_err(refused("bind", &to.to_string_lossy()))?;
    remount(to, flags)
}

/// Changes the flags of a mount.
fn remount(at: &CStr, flags: u64) -> Result<(), Error> {
    let remount = mount::MS_BIND | mount::MS_REMOUNT | flags;
    mount::mount(None, at, None, remount, None).map_err(refused("remount", &at.to_string_lossy()))
}

/// Closes all descriptors from `first` on, which ancestors of this process may have left open without
/// O_CLOEXEC.
///
/// # Errors
/// [`Error::Kernel`] for an error of the kernel.
pub fn close_descriptors(first: u8) -> Result<(), Error> {
    fs::close_from(i32::from(first)).map_err(refused("close", "inherited descriptors"))
}

/// Moves this process into a new, empty network namespace.
///
/// # Errors
/// [`Error::Kernel`] if this process is not root, or the kernel has no network namespaces.
pub fn leave_network() -> Result<(), Error> {
    process::unshare(CloneFlags::CLONE_NEWNET.bits() as u64).map_err(refused("unshare", "the network"))
}

/// Permanently drops all capabilities except these (`CAP_…`) and sets `no_new_privs`.
///
/// A process with fewer capabilities may be traced by any process with the same user ID that has at least
/// these (ptrace(2)), for example by root of a container in the node's PID namespace. Therefore the process
/// is made not dumpable first.
///
/// # Errors
/// [`Error::Kernel`] for an error of the kernel.
pub fn keep_capabilities(names: &[&str]) -> Result<(), Error> {
    let keep = names.iter().filter_map(|name| crate::capability::bit(name)).fold(0, |set, bit| set | bit);
    bound_capabilities(keep)?;
    let held = caps::read(None, caps::CapSet::Permitted)
        .map_err(|_| Error::kernel("read", "capabilities", Errno::last()))?;
    let keep = held.iter().fold(0, |set, one| set | one.bitmask()) & keep;
    process::set_capabilities(keep, keep, 0).map_err(refused("set", "capabilities"))
}

/// Limits the bounding set, sets no_new_privs, and makes the process not dumpable.
fn bound_capabilities(keep: u64) -> Result<(), Error> {
    process::control(Control::NotDumpable).map_err(refused("forbid", "tracing"))?;
    process::control(Control::NoNewPrivileges).map_err(refused("set", "no_new_privs"))?;
    for capability in (0..CAPABILITIES_MAX).filter(|capability| keep >> capability & 1 == 0) {
        match process::control(Control::DropBounding(capability)) {
            Ok(()) => {}
            // There are no further capabilities in this kernel.
            Err(errno) if Errno::from_raw(errno.0) == Errno::EINVAL => break,
            Err(errno) => return Err(refused("drop", "capabilities")(errno)),
        }
    }
    Ok(())
}

/// User and group ID of `nobody`, which own nothing by convention.
const NOBODY: u32 = 65534;

/// Changes to user and group 65534 without supplementary groups and permanently drops all capabilities, like
/// [`keep_capabilities`] without names. A change of the IDs clears the parent-death signal and makes a
/// process dumpable, so both are set again. The parent needs CAP_KILL for the signal to be sent
/// (kernel/exit.c, reparent_leader).
///
/// # Errors
/// [`Error::Kernel`] for an error of the kernel.
pub fn become_nobody() -> Result<(), Error> {
    bound_capabilities(0)?;
    process::set_groups(&[]).map_err(refused("set", "no supplementary groups"))?;
    process::set_group(NOBODY).map_err(refused("become", "group 65534"))?;
    process::set_user(NOBODY).map_err(refused("become", "user 65534"))?;
    process::set_capabilities(0, 0, 0).map_err(refused("set", "capabilities"))?;
    process::control(Control::NotDumpable).map_err(refused("forbid", "tracing"))?;
    process::control(Control::KillWithParent).map_err(refused("set", "the parent-death signal"))
}
