//! A simulated node in place of the kernel, for tests of the lifecycle of pods: cgroups, monitors, network namespaces,
//! the daemon's files, and time. Only the feature `simulation` compiles it, which programs do not enable.
//!
//! ```text
//!   engine ──► disk, cgroup, netns, monitor ──┬──► the kernel
//!                                             └──► SimulatedNode, if this thread has one
//! ```
//! A test installs its node for its thread; every function of this crate that the engine calls then calls the node
//! instead of the kernel. Frames between the daemon and a simulated monitor pass through a real socket pair, so that
//! their encoding and the event loop are those of the programs.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use coracle_sys::{self as sys, Fd, FdRef, socket};
use coracle_wire::{EXIT_RECORD_BYTES_MAX, ExitRecord, FRAME_BYTES_MAX, FromMonitor, ToMonitor};

use crate::Error;
use crate::cgroup::{CgroupPath, Entry};
use crate::monitor::{ConnectError, LinkError, Monitor, Spawn};

thread_local! {
    static NODE: RefCell<Option<Rc<dyn SimulatedNode>>> = const { RefCell::new(None) };
}

/// Installs a simulated node for this thread; `None` removes it.
pub fn install(node: Option<Rc<dyn SimulatedNode>>) {
    NODE.set(node);
}

/// The simulated node of this thread; `None` if there is none.
pub fn node() -> Option<Rc<dyn SimulatedNode>> {
    NODE.with_borrow(Clone::clone)
}

/// The simulated node of this thread, if the path is on one of its file systems.
pub(crate) fn node_of(path: &Path) -> Option<Rc<dyn SimulatedNode>> {
    node().filter(|node| node.has_path(path))
}

/// The monitor's end of a connection.
#[derive(Debug)]
pub struct MonitorEnd(Fd);

/// Creates a connection: the daemon's end and the monitor's end.
///
/// # Errors
/// [`Error::Kernel`] if there is no free descriptor.
pub fn connection() -> Result<(OwnedFd, MonitorEnd), Error> {
    let made = socket::seqpacket_pair().map_err(|errno| failed("make socket pair", errno))?;
    Ok((OwnedFd::from(made.0), MonitorEnd(made.1)))
}

impl MonitorEnd {
    /// Receives a request with its descriptors; `None`: there is none yet.
    ///
    /// # Errors
    /// The daemon has closed its end.
    pub fn receive(&self) -> Result<Option<(ToMonitor, Vec<OwnedFd>)>, Error> {
        let mut buffer = [0; FRAME_BYTES_MAX];
        match socket::receive(self.0.borrow(), &mut buffer) {
            Err(sys::Errno::EAGAIN) => Ok(None),
            Err(errno) => Err(failed("receive frame", errno)),
            Ok(received) if received.length == 0 => Err(failed("receive frame", sys::Errno::EPIPE)),
            Ok(received) => {
                let frame = postcard::from_bytes(&buffer[..received.length])
                    .map_err(|_| Error::invalid("frame", "cannot be read"))?;
                Ok(Some((frame, received.descriptors.into_iter().flatten().map(OwnedFd::from).collect())))
            }
        }
    }

    /// Sends a frame with its descriptors.
    ///
    /// # Errors
    /// The daemon has closed its end, or does not read.
    pub fn send(&self, frame: &FromMonitor, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let mut buffer = [0; FRAME_BYTES_MAX];
        let bytes =
            postcard::to_slice(frame, &mut buffer).map_err(|_| Error::invalid("frame", "is too long"))?;
        let descriptors: Vec<FdRef<'_>> = descriptors.iter().map(|fd| FdRef::from(*fd)).collect();
        socket::send(self.0.borrow(), bytes, &descriptors).map_err(|errno| failed("send frame", errno))
    }
}

impl AsFd for MonitorEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The bytes of an exit record as a monitor writes them.
pub fn exit_record_bytes(record: &ExitRecord) -> Vec<u8> {
    coracle_wire::encode_exit(record, &mut [0; EXIT_RECORD_BYTES_MAX]).to_vec()
}

fn failed(op: &'static str, errno: sys::Errno) -> Error {
    Error::kernel(op, "of a simulated monitor", nix::errno::Errno::from_raw(errno.0))
}

/// A simulated node, in place of the kernel.
pub trait SimulatedNode: SimulatedTime + SimulatedFiles + SimulatedKernel {}

/// Time, randomness and the log of a simulated node.
pub trait SimulatedTime {
    /// Time since boot in nanoseconds; time passes only in the simulation.
    fn now_ns(&self) -> u64;
    /// Wall clock in nanoseconds since 1970.
    fn wall_ns(&self) -> u64;
    /// Called by the event loop after each group of tasks; the node may end the daemon by unwinding.
    fn turns(&self);
    /// Called by the event loop when no task is ready. The node lets simulated time pass and executes its events, until
    /// the daemon is woken or the next timer of the daemon at `until_ns`; `None`: the daemon has no timer.
    fn rest(&self, until_ns: Option<u64>);
    /// Whether [`SimulatedNode::log`] must be called with the daemon's log messages.
    fn wants_log(&self) -> bool;
    /// Receives one message of the daemon's log.
    fn log(&self, line: &str);
    /// Replaces [`crate::random_id`].
    fn random_id(&self) -> Result<[u8; 32], Error>;
}

/// The files of a simulated node. The documentation of each method names the function that it replaces.
pub trait SimulatedFiles {
    /// Whether a path is on one of the simulated file systems; all other paths are real.
    fn has_path(&self, path: &Path) -> bool;
    /// Replaces [`crate::disk::read`].
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Replaces [`crate::disk::write`], and with `is_synced` [`crate::disk::write_synced`].
    fn write(&self, path: &Path, bytes: &[u8], is_synced: bool) -> io::Result<()>;
    /// Replaces [`crate::disk::write_over`].
    fn write_over(&self, path: &Path, offset: u64, bytes: &[u8], is_synced: bool) -> io::Result<()>;
    /// Replaces [`crate::disk::rename`].
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::remove_file`].
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::remove_dir_all`].
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::create_dir_all`].
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::entries`]; returns names, and whether each is a directory.
    fn entries(&self, path: &Path) -> io::Result<Vec<(OsString, bool)>>;
    /// Replaces [`crate::disk::inspect`].
    fn inspect(&self, path: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::sync_dir`].
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Replaces [`crate::disk::sync_file_system`].
    fn sync_file_system(&self, path: &Path) -> io::Result<()>;
    /// Replaces the watch of `reactor::Removals`: the descriptor becomes readable when the directory, or a name in it,
    /// is removed.
    fn arm_removals(&self, directory: &Path) -> io::Result<OwnedFd>;
    /// Called before [`crate::disk::open_device`] opens the real device.
    fn open_device(&self, path: &Path) -> io::Result<()>;
}

/// The kernel objects of a simulated node. The documentation of each method names the function that it replaces.
pub trait SimulatedKernel {
    /// Replaces `Cgroups::make`.
    fn make_cgroup(&self, path: &CgroupPath) -> Result<(), Error>;
    /// Replaces `Cgroups::unmake`.
    fn unmake_cgroup(&self, path: &CgroupPath) -> Result<(), Error>;
    /// Replaces `Cgroups::unmake_if_unused`.
    fn unmake_cgroup_if_unused(&self, path: &CgroupPath) -> Result<(), Error>;
    /// Replaces `Cgroups::exists`.
    fn has_cgroup(&self, path: &CgroupPath) -> bool;
    /// Replaces `Cgroups::apply`.
    fn apply_limits(&self, path: &CgroupPath) -> Result<(), Error>;
    /// Replaces `Cgroups::kill`, with `in_all` `Cgroups::kill_in_all`.
    fn kill_cgroup(&self, path: &CgroupPath, in_all: bool) -> Result<bool, Error>;
    /// Replaces `Cgroups::entry`.
    fn enter_cgroup(&self, path: &CgroupPath) -> Result<Entry, Error>;
    /// Replaces `Cgroups::find`.
    fn find_cgroups(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<CgroupPath>, Error>;

    /// Replaces `netns::pin`.
    fn pin_netns(&self, pid: u32, path: &Path) -> Result<(), Error>;
    /// Replaces `netns::unpin`.
    fn unpin_netns(&self, path: &Path) -> Result<(), Error>;
    /// Replaces `netns::exists`.
    fn has_netns(&self, path: &Path) -> bool;

    /// Replaces `monitor::spawn`.
    fn spawn_monitor(&self, spawn: &Spawn<'_>, meanwhile: &mut dyn FnMut()) -> Result<Monitor, Error>;
    /// Replaces `monitor::connect`.
    fn connect_monitor(&self, directory: &Path) -> Result<Monitor, ConnectError>;
    /// Replaces `monitor::pid`.
    fn monitor_pid(&self, directory: &Path) -> Result<Option<i32>, Error>;
    /// Replaces `monitor::remake_files`.
    fn remake_monitor_files(&self, directory: &Path, pid: i32) -> Result<[OwnedFd; 2], Error>;
    /// Called before `Monitor::send` sends a frame.
    fn sends(&self, monitor: i32) -> Result<(), LinkError>;
    /// Called before `Monitor::receive` receives a frame.
    fn receives(&self, monitor: i32) -> Result<(), LinkError>;
    /// Replaces `Monitor::is_gone`.
    fn is_monitor_gone(&self, monitor: i32) -> bool;
    /// Replaces `process::kill` for a process that has been identified, and `Monitor::kill`.
    fn kill_process(&self, pid: i32) -> Result<(), Error>;
    /// Replaces `monitor::pid_of`.
    fn pid_of(&self, pidfd: BorrowedFd<'_>) -> Option<i32>;
}
