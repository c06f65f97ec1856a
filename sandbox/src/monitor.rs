//! The daemon's side of a pod's monitor: starts `coracle-pod` in the pod's namespaces, reconnects to it after a
//! restart, and exchanges frames. The module has no knowledge of the states of pods.
//!
//! ```text
//!   DIR/monitor.sock   its socket, bound here before the monitor starts
//!   DIR/monitor.pid    "PID START CRC\n": its process; the clone waits until this file is written
//!   DIR/exits/ID       exit records, written by the monitor
//! ```
//! All paths are derived from the pod's state directory, so a daemon that was killed between any two steps finds the
//! monitor again; without a pid file there is no monitor. The program is executed from a sealed memfd: a container that
//! opens /proc/PID/exe can neither write to it nor reach a file of the host (CVE-2019-5736).

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

use coracle_sys::process::{self, Clone};
use coracle_sys::{self as sys, Fd, FdRef, socket};
use coracle_wire::{DESCRIPTORS_MAX, FRAME_BYTES_MAX, FromMonitor, ToMonitor};
use nix::errno::Errno;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::base_mount_ns::BaseMountNamespace;
use crate::error::describe_errno;
use crate::userns::{self, UserMappings};
use crate::{Error, crc32, disk};

mod child;

use child::{Child, Inherited};

const SOCKET: &str = "monitor.sock";
const PID_FILE: &str = "monitor.pid";
const PID_FILE_NEW: &str = "monitor.pid~";

/// Backlog of the listening socket; at most one daemon connects.
const BACKLOG: i32 = 4;

/// The monitor's program in a sealed memfd.
#[derive(Debug)]
pub struct Program {
    file: Fd,
}

impl Program {
    /// Copies the program at `path` into a sealed memfd.
    ///
    /// # Errors
    /// [`Error::Kernel`] if the program cannot be read or memory is exhausted.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::io("read", path.display(), &error))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Executable regardless of `vm.memfd_noexec`.
        let file = match memfd_create(c"coracle-pod", flags | MemfdFlags::EXEC) {
            // Before Linux 6.3 the flag does not exist and is not needed.
            Err(rustix::io::Errno::INVAL) => memfd_create(c"coracle-pod", flags),
            made => made,
        };
        let file = file.map_err(|errno| kernel("make memfd", "coracle-pod", errno.into()))?;
        Ok(Self { file: Fd::from(fill(file, &bytes)?) })
    }
}

/// Parameters for starting a monitor.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// The monitor's program in a memfd.
    pub program: &'a Program,
    /// The mount namespace of which the monitor gets a copy.
    pub base: &'a BaseMountNamespace,
    /// The pod's state directory, which must exist.
    pub directory: &'a Path,
    /// Whether to create a network namespace for the pod.
    pub network: bool,
    /// Whether to create an IPC namespace for the pod.
    pub ipc: bool,
    /// Whether to create a UTS namespace (host name) for the pod.
    pub uts: bool,
    /// Mappings of a user namespace for the containers, which owns the other namespaces of the pod; `None`: no user
    /// namespace. The monitor stays outside of it.
    pub user: Option<&'a UserMappings>,
    /// The setup record; see [`coracle_wire::Op`].
    pub setup: &'a [u8],
    /// The cgroup2 directory in which the monitor starts; `None` on v1.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Files `tasks` of v1 hierarchies that the monitor joins before exec.
    pub cgroup_joins: &'a [PathBuf],
}

/// A running monitor and the connection to it.
#[derive(Debug)]
pub struct Monitor {
    /// The connection, a non-blocking socket.
    pub socket: Rc<OwnedFd>,
    /// PID in the daemon's PID namespace.
    pub pid: i32,
    /// pidfd of the monitor, readable when it has ended.
    pub pidfd: Rc<OwnedFd>,
}

/// The end of a monitor's program before it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The program ended with this error.
    Error(Errno),
    /// This signal killed the process.
    Killed(u8),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error(errno) => write!(f, "the pod's monitor cannot start: {}", describe_errno(*errno)),
            // The kernel log has the line of an OOM kill.
            Self::Killed(signal) => write!(
                f,
                "signal {signal} killed the pod's monitor while it started, as at a memory limit of the pod's cgroup that is too small"
            ),
        }
    }
}

/// Errors of [`connect`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// There is no monitor: it was never started, or has ended.
    NotThere,
    /// The connection failed for another reason.
    Failed(Error),
}

/// Errors of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkError {
    /// The socket is full: retry when it is writable.
    WouldBlock,
    /// The connection was closed by the monitor or replaced by a newer one.
    Closed,
    /// An error that is neither a full socket nor a closed connection. After an error of receiving, the connection must
    /// not be used any more.
    Failed(Error),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotThere => f.write_str("no monitor runs"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::fmt::Display for LinkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WouldBlock => f.write_str("the monitor does not read its frames"),
            Self::Closed => f.write_str("the monitor closed the connection"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConnectError {}
impl std::error::Error for LinkError {}

/// Starts a monitor, in this process's PID namespace and in its own copy of the base mount namespace, and connects to
/// it. The reply to the first Hello contains the result of its set-up. `meanwhile` is called while the process executes
/// its program, which takes about a millisecond on another CPU.
///
/// # Errors
/// [`Error::Kernel`]; everything is cleaned up except files in the directory.
pub fn spawn(spawn: &Spawn<'_>, meanwhile: impl FnOnce()) -> Result<Monitor, Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        let mut meanwhile = Some(meanwhile);
        return node.spawn_monitor(spawn, &mut || {
            if let Some(meanwhile) = meanwhile.take() {
                meanwhile();
            }
        });
    }
    let directory = open_directory(spawn.directory)?;
    let inherited = Inherited {
        listener: listen(spawn.directory, &directory)?,
        null: open("/dev/null", true)?,
        setup: Fd::from(memfd(spawn.setup)?),
        directory: Fd::from(OwnedFd::from(directory)),
    };
    let pipes = || sys::fs::pipe().map_err(|errno| kernel("make pipe", "for the monitor", errno));
    let (go, release) = pipes()?;
    let (outcome, report) = pipes()?;
    let child = Child::prepare(spawn)?;
    let cloned = process::clone(0, spawn.cgroup.map(FdRef::from));
    let (pid, pidfd) =
        match cloned.map_err(|errno| kernel("clone monitor", spawn.directory.display(), errno))? {
            Clone::Child => {
                drop(release);
                child.run(&inherited, &go, &report)
            }
            Clone::Parent { pid, pidfd } => (pid, pidfd),
        };
    drop((go, report));
    let started = write_pid_file(spawn.directory, pid).and_then(|()| {
        match sys::fs::write(release.borrow(), b"g") {
            // The process could not read, and its outcome says why.
            Ok(_) | Err(sys::Errno::EPIPE) => {}
            Err(errno) => return Err(kernel("release monitor of", spawn.directory.display(), errno)),
        }
        meanwhile();
        child.read_outcome(spawn.directory, &outcome)?;
        dial(spawn.directory)
            .map_err(|errno| kernel("connect", spawn.directory.join(SOCKET).display(), errno))
    });
    match started {
        Ok(socket) => Ok(Monitor { socket: socket.into(), pid, pidfd: Rc::new(pidfd.into()) }),
        Err(error) => {
            // The process has ended or ends now, so the pid file is removed.
            userns::end(pid, &pidfd);
            let _ = fs::remove_file(spawn.directory.join(PID_FILE));
            Err(error)
        }
    }
}

/// Makes the files of a running monitor again in its state directory, which must exist; returns the descriptors of
/// [`coracle_wire::Request::ReplaceState`]. Until the monitor has them, a connection to the new socket is not accepted.
///
/// # Errors
/// [`Error::Kernel`] if the socket or the PID file cannot be made, or the monitor has ended.
pub fn remake_files(directory: &Path, pid: i32) -> Result<[OwnedFd; 2], Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.remake_monitor_files(directory, pid);
    }
    let opened = open_directory(directory)?;
    let listener = listen(directory, &opened)?;
    write_pid_file(directory, pid)?;
    Ok([listener.into(), opened.into()])
}

/// Removes the files of [`remake_files`], which the monitor did not take.
pub fn remove_files(directory: &Path) {
    for name in [PID_FILE, SOCKET] {
        let _ = disk::remove_file(&directory.join(name)); // missing ones do not lead to the monitor either
    }
}

/// Whether the monitor of the state directory `directory` can be found by a later daemon: its socket and its PID file are
/// there.
///
/// # Errors
/// The I/O error, if this is not known.
pub fn has_files(directory: &Path) -> io::Result<bool> {
    Ok(disk::exists(&directory.join(SOCKET))? && disk::exists(&directory.join(PID_FILE))?)
}

/// Reconnects to the monitor of the state directory `directory`.
///
/// # Errors
/// [`ConnectError::NotThere`] if the monitor has ended or was never started.
pub fn connect(directory: &Path) -> Result<Monitor, ConnectError> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.connect_monitor(directory);
    }
    let recorded = read_pid_file(directory).map_err(ConnectError::Failed)?;
    let (pid, start) = recorded.ok_or(ConnectError::NotThere)?;
    // The pidfd is opened before the check, so that a reused pid is detected.
    let pidfd = match process::pidfd_open(pid) {
        Err(sys::Errno::ESRCH | sys::Errno::EINVAL) => return Err(ConnectError::NotThere),
        opened => opened.map_err(|errno| ConnectError::Failed(kernel("pidfd_open", pid, errno)))?,
    };
    match start_time(pid) {
        Ok(Some(found)) if found == start => {}
        Ok(_) => return Err(ConnectError::NotThere),
        // It may run, so it is not treated as ended.
        Err(error) => return Err(ConnectError::Failed(error)),
    }
    match dial(directory) {
        Ok(socket) => Ok(Monitor { socket: socket.into(), pid, pidfd: Rc::new(pidfd.into()) }),
        Err(sys::Errno::ENOENT | sys::Errno::ECONNREFUSED) => Err(ConnectError::NotThere),
        Err(errno) => Err(ConnectError::Failed(kernel("connect", directory.join(SOCKET).display(), errno))),
    }
}

/// The PID of the monitor of the state directory `directory` if it is running, whether or not it answers; otherwise
/// `None`, also if the PID file is damaged.
///
/// # Errors
/// The PID file or `/proc` cannot be read for the moment: the monitor may be running.
pub fn pid(directory: &Path) -> Result<Option<i32>, Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.monitor_pid(directory);
    }
    let (pid, start) = match read_pid_file(directory) {
        Ok(Some(recorded)) => recorded,
        Ok(None) | Err(Error::Invalid { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((start_time(pid)? == Some(start)).then_some(pid))
}

/// Sends SIGKILL to the monitor of the state directory `directory`, which this process is not connected to, and reaps it
/// if it is a child of this process. Returns its PID if it still runs.
///
/// # Errors
/// Those of [`pid`] and [`crate::process::kill`].
pub fn kill(directory: &Path) -> Result<Option<i32>, Error> {
    let Some(pid) = pid(directory)? else { return Ok(None) };
    crate::process::kill(pid, || matches!(self::pid(directory), Ok(Some(found)) if found == pid))?;
    let _ = process::reap(pid);
    self::pid(directory)
}

impl Monitor {
    /// Sends a frame with its descriptors.
    ///
    /// # Errors
    /// [`LinkError::WouldBlock`] if the socket is full; the frame is then not sent.
    pub fn send(&self, frame: &ToMonitor, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            node.sends(self.pid)?;
        }
        let mut buffer = [0; FRAME_BYTES_MAX];
        let too_long = |_| LinkError::Failed(Error::invalid("frame", "is too long"));
        let bytes = postcard::to_slice(frame, &mut buffer).map_err(too_long)?;
        let descriptors: Vec<FdRef<'_>> = descriptors.iter().map(|fd| FdRef::from(*fd)).collect();
        match socket::send(self.socket.as_fd().into(), bytes, &descriptors) {
            Ok(()) => Ok(()),
            Err(sys::Errno::EAGAIN) => Err(LinkError::WouldBlock),
            Err(sys::Errno::EPIPE | sys::Errno::ECONNRESET) => Err(LinkError::Closed),
            Err(errno) => Err(LinkError::Failed(kernel("send frame", "to monitor", errno))),
        }
    }

    /// Receives a frame with its descriptors; `None` if none has arrived. If this process has no free descriptor, the
    /// frame is returned without descriptors.
    ///
    /// # Errors
    /// [`LinkError::Closed`] at the end of the connection.
    pub fn receive(&self) -> Result<Option<(FromMonitor, Vec<OwnedFd>)>, LinkError> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            node.receives(self.pid)?;
        }
        let mut buffer = [0; FRAME_BYTES_MAX];
        let received = loop {
            match socket::receive(self.socket.as_fd().into(), &mut buffer) {
                Err(sys::Errno::EINTR) => {}
                received => break received,
            }
        };
        let received = match received {
            Err(sys::Errno::EAGAIN) => return Ok(None),
            Err(sys::Errno::ECONNRESET) => return Err(LinkError::Closed),
            Err(sys::Errno::EMSGSIZE) => socket::Received { length: buffer.len(), ..Default::default() },
            Err(errno) => return Err(LinkError::Failed(kernel("receive frame", "from monitor", errno))),
            Ok(received) if received.length == 0 => return Err(LinkError::Closed),
            Ok(received) => received,
        };
        // Fields that a newer monitor has appended are ignored.
        let (frame, _) = postcard::take_from_bytes(&buffer[..received.length])
            .map_err(|_| LinkError::Failed(Error::invalid("frame", "cannot be read")))?;
        Ok(Some((frame, received.descriptors.into_iter().flatten().map(OwnedFd::from).collect())))
    }

    /// Whether the monitor has ended; reaps it if it is a child of this process.
    pub fn is_gone(&self) -> bool {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.is_monitor_gone(self.pid);
        }
        matches!(process::reap(self.pid), Ok(Some(_)))
            || process::pidfd_signal(self.pidfd.as_fd().into(), 0) == Err(sys::Errno::ESRCH)
    }

    /// Reaps a monitor that has ended, if it is a child of this process. Returns why its program ended, if that is an
    /// error. `None` if it cannot be reaped yet: a traced process is first reaped by its tracer, and its pidfd becomes
    /// readable before that.
    pub fn reap(&self) -> Option<Option<Failure>> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            node.is_monitor_gone(self.pid);
            return Some(None);
        }
        match process::reap(self.pid) {
            Ok(Some((_, process::Status::Code(code)))) if code != 0 => {
                Some(Some(Failure::Error(Errno::from_raw(code.into()))))
            }
            Ok(Some((_, process::Status::Signal(signal)))) => Some(Some(Failure::Killed(signal))),
            Ok(None) => None,
            Ok(Some(_)) | Err(_) => Some(None),
        }
    }

    /// Sends SIGKILL to the monitor.
    ///
    /// # Errors
    /// [`Error::Kernel`]; none if it has ended.
    pub fn kill(&self) -> Result<(), Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.kill_process(self.pid);
        }
        crate::process::kill_by(self.pidfd.as_fd())
    }

    /// Sends a signal to the monitor: SIGTERM ends it and all its children.
    ///
    /// # Errors
    /// [`Error::Kernel`]; ESRCH if it has ended.
    pub fn signal(&self, signal: i32) -> Result<(), Error> {
        process::pidfd_signal(self.pidfd.as_fd().into(), signal)
            .map_err(|errno| kernel("signal monitor", self.pid, errno))
    }
}

/// Creates a sealed memfd with these bytes, for launch records.
///
/// # Errors
/// [`Error::Kernel`] if memory is exhausted.
pub fn memfd(bytes: &[u8]) -> Result<OwnedFd, Error> {
    let file = sys::memory::memory_file(c"record").map_err(|errno| kernel("make memfd", "record", errno))?;
    fill(OwnedFd::from(file), bytes)
}

/// The PID of the process to which a pidfd refers, in this process's PID namespace; `None` after the process was
/// reaped.
pub fn pid_of(pidfd: BorrowedFd<'_>) -> Option<i32> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return node.pid_of(pidfd);
    }
    let path = PathBuf::from(format!("/proc/self/fdinfo/{}", FdRef::from(pidfd).number()));
    // Read again after an error, because a container would be shown without its process until the next start of the daemon.
    let text = disk::read_to_string(&path).or_else(|_| disk::read_to_string(&path)).ok()?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}

/// The socket's path through the directory's descriptor, because a socket address is limited to 107 bytes and a pod's
/// path may be longer.
fn socket_address(directory: &File) -> Vec<u8> {
    format!("/proc/self/fd/{}/{SOCKET}", FdRef::from(directory.as_fd()).number()).into_bytes()
}

fn listen(path: &Path, directory: &File) -> Result<Fd, Error> {
    let socket_path = path.join(SOCKET);
    match fs::remove_file(&socket_path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("remove", socket_path.display(), &error));
        }
        _ => {}
    }
    let listen = || {
        let listener = seqpacket()?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket_address(directory))?)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Fd::from(listener))
    };
    listen().map_err(|errno| kernel("listen on", socket_path.display(), errno))
}

fn dial(path: &Path) -> Result<OwnedFd, sys::Errno> {
    let errno = |error: io::Error| sys::Errno(error.raw_os_error().unwrap_or(sys::Errno::EIO.0));
    let directory = File::open(path).map_err(errno)?;
    let socket = seqpacket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(socket_address(&directory))?)?;
    Ok(socket)
}

fn seqpacket() -> Result<OwnedFd, rustix::io::Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn open_directory(path: &Path) -> Result<File, Error> {
    File::open(path).map_err(|error| Error::io("open", path.display(), &error))
}

fn open(path: &str, for_writing: bool) -> Result<Fd, Error> {
    let file = fs::OpenOptions::new().read(true).write(for_writing).open(path);
    file.map(|file| Fd::from(OwnedFd::from(file))).map_err(|error| Error::io("open", path, &error))
}

/// Writes `bytes` to a memfd and seals it.
fn fill(file: OwnedFd, bytes: &[u8]) -> Result<OwnedFd, Error> {
    let mut file = File::from(file);
    file.write_all(bytes).map_err(|error| Error::io("write", "memfd", &error))?;
    let file = OwnedFd::from(file);
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&file, all).map_err(|errno| kernel("seal", "memfd", errno.into()))?;
    Ok(file)
}

/// Writes the pid file under a temporary name and renames it. The directory does not survive a reboot, so nothing is
/// synced.
fn write_pid_file(directory: &Path, pid: i32) -> Result<(), Error> {
    let (new, path) = (directory.join(PID_FILE_NEW), directory.join(PID_FILE));
    let start = start_time(pid)?.ok_or_else(|| Error::kernel("read start time of", pid, Errno::ESRCH))?;
    fs::write(&new, pid_file(pid, start)).map_err(|error| Error::io("write", new.display(), &error))?;
    fs::rename(&new, &path).map_err(|error| Error::io("rename", path.display(), &error))
}

/// PID and start time in the PID file; `None` if there is no file.
///
/// # Errors
/// [`Error::Invalid`] if the file is damaged: it has another content, or is not a file that can be read.
fn read_pid_file(directory: &Path) -> Result<Option<(i32, u64)>, Error> {
    let path = directory.join(PID_FILE);
    let damaged = || Error::invalid(path.display().to_string(), "is not a file with `PID START CRC`");
    match disk::read_to_string(&path) {
        Ok(text) => parse_pid_file(&text).map(Some).ok_or_else(damaged),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => match (error.kind(), error.raw_os_error().map(Errno::from_raw)) {
            (ErrorKind::InvalidData, _) | (_, Some(Errno::EISDIR | Errno::ENOTDIR | Errno::ELOOP)) => {
                Err(damaged())
            }
            _ => Err(Error::io("read", path.display(), &error)),
        },
    }
}

/// Content of a PID file. Without the checksum, one flipped bit could name another process that was started within the same tick.
fn pid_file(pid: i32, start: u64) -> String {
    let text = format!("{pid} {start}");
    let checksum = crc32(text.as_bytes());
    format!("{text} {checksum:08x}\n")
}

fn parse_pid_file(text: &str) -> Option<(i32, u64)> {
    let parse = |identity: &str| {
        let (pid, start) = identity.split_once(' ')?;
        Some((pid.parse().ok().filter(|pid| *pid > 0)?, start.parse().ok()?))
    };
    // An earlier build wrote no checksum.
    parse(text.strip_suffix('\n')?).or_else(|| {
        let (identity, _) = text.rsplit_once(' ')?;
        parse(identity).filter(|(pid, start)| pid_file(*pid, *start) == text)
    })
}

/// Start time of a process in clock ticks since boot; together with the pid it identifies a process uniquely. `None` if there is
/// no such process, or if it has ended and only has not been reaped.
fn start_time(pid: i32) -> Result<Option<u64>, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    match disk::read_to_string(&path) {
        Ok(text) => Ok(parse_start_time(&text)),
        // ESRCH: it was reaped after the file was opened.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(None),
        Err(error) => Err(Error::io("read", path.display(), &error)),
    }
}

/// Parses field 22 of proc_pid_stat(5); `None` for the states Z and X in field 3. Field 2, the name, may contain spaces and
/// parentheses.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    if after_name.starts_with(['Z', 'X']) {
        return None;
    }
    after_name.split(' ').nth(22 - 3)?.trim().parse().ok()
}

fn kernel(op: &'static str, target: impl std::fmt::Display, errno: sys::Errno) -> Error {
    Error::kernel(op, target, Errno::from_raw(errno.0))
}

// A message can carry as many descriptors as a frame may have.
const _: () = assert!(DESCRIPTORS_MAX == socket::DESCRIPTORS_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_pid_files_are_accepted() {
        let valid = pid_file(12, 345);
        assert_eq!(parse_pid_file(&valid), Some((12, 345)));
        let short = valid.strip_suffix('\n').unwrap();
        assert_eq!(parse_pid_file("12 345\n"), Some((12, 345)), "of an earlier build");
        let invalid = [
            short,
            "12 345",
            "12 345 0\n",
            "0 345\n",
            &pid_file(0, 345),
            &pid_file(-1, 345),
            "12\n",
            "12 x\n",
            "",
        ];
        for text in invalid {
            assert_eq!(parse_pid_file(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_pid_file_with_a_flipped_bit_names_no_process() {
        let valid = pid_file(4_194_303, 98_765_432);
        for bit in 0..valid.len() * 8 {
            let mut bytes = valid.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let text = String::from_utf8_lossy(&bytes);
            assert_eq!(parse_pid_file(&text), None, "{text:?}");
        }
    }

    #[test]
    fn the_start_time_is_parsed_after_any_process_name() {
        let rest: String = (4..=52).map(|field| format!(" {field}")).collect();
        assert_eq!(parse_start_time(&format!("7 (a) b (c) S{rest}\n")), Some(22));
        assert_eq!(parse_start_time("7 (a"), None);
        assert_eq!(parse_start_time(&format!("7 (a) Z{rest}\n")), None, "it has ended");
        assert!(start_time(std::process::id() as i32).unwrap().is_some());
        assert_eq!(start_time(i32::MAX).unwrap(), None);
    }

    #[test]
    fn the_pid_of_a_pidfd_is_found() {
        let pidfd = OwnedFd::from(process::pidfd_open(process::pid()).unwrap());
        assert_eq!(pid_of(pidfd.as_fd()), Some(process::pid()));
        assert_eq!(pid_of(memfd(b"x").unwrap().as_fd()), None);
    }
}
