//! Starts pre-installed NRI plugins: every executable `NN-name` in the plugin directory, with one end of a socket pair as
//! descriptor 3 (NRI 2.2). One task per plugin starts, connects and restarts it.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use coracle_base::reactor::{self, Watched};
use coracle_base::workers::LogLines;
use coracle_base::{descriptors, log};
use coracle_nri::{Dispatcher, Launched};
use coracle_sandbox::collect;
use coracle_sandbox::{hostpath, umask};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use smol::channel::{Receiver, Sender};

use super::socket;
use coracle_config::{self as config, Restart};

/// Number of the descriptor of a plugin's socket.
const SOCKET: i32 = 3;

/// Source descriptors are duplicated to this number or above, so that they do not collide with target numbers.
const ABOVE_PLACES: i32 = 16;

/// Maximum size of a plugin's configuration in bytes, which is sent in one message.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;

/// Time between SIGTERM and SIGKILL when a plugin is ended.
const END_GRACE: Duration = Duration::from_secs(2);

/// Delay before the first restart of a failing plugin; each further delay is twice the previous one.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Magic number of WebAssembly files.
const WASM: [u8; 8] = [0, b'a', b's', b'm', 1, 0, 0, 0];

/// The plugins in the plugin directory.
#[derive(Default)]
pub(super) struct Launcher {
    restart: Cell<Restart>,
    is_stopping: Rc<Cell<bool>>,
    /// Channel that is closed to stop all plugins; `None` before the start.
    stopping: RefCell<Option<(Sender<()>, Receiver<()>)>>,
    tasks: RefCell<Vec<reactor::Task<()>>>,
}

/// A plugin file in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    index: String,
    name: String,
}

impl Launcher {
    /// Starts all plugins; returns when each plugin is active or has failed.
    pub(super) async fn start(self: &Rc<Self>, dispatcher: &Rc<Dispatcher>, settings: &config::Nri) {
        self.configure(settings);
        *self.stopping.borrow_mut() = Some(smol::channel::bounded(1));
        let mut joined = Vec::new();
        for candidate in candidates(&settings.plugin_path) {
            let (sender, first) = smol::channel::bounded::<()>(1);
            let (launcher, dispatcher) = (Rc::clone(self), Rc::clone(dispatcher));
            let configuration = settings.plugin_config_path.clone();
            self.tasks.borrow_mut().push(reactor::spawn(async move {
                launcher.keep(&candidate, &configuration, &dispatcher, sender).await;
            }));
            joined.push(first);
        }
        for first in joined {
            let _ = first.recv().await; // closed when the first try has ended
        }
    }

    pub(super) fn configure(&self, settings: &config::Nri) {
        self.restart.set(settings.restart);
    }

    /// Requests the end of all plugins.
    pub(super) fn stop(&self) {
        self.is_stopping.set(true);
        self.stopping.borrow_mut().take();
    }

    /// Waits until all plugins have ended; each has a time limit.
    pub(super) async fn ended(&self) {
        let tasks = self.tasks.take();
        for task in tasks {
            task.await;
        }
    }

    async fn stopped(&self) {
        let waiting = self.stopping.borrow().as_ref().map(|(_, receiver)| receiver.clone());
        if let Some(receiver) = waiting {
            let _ = receiver.recv().await;
        }
    }

    /// Runs one plugin, with restarts.
    async fn keep(
        &self,
        candidate: &Candidate,
        configuration: &Path,
        dispatcher: &Rc<Dispatcher>,
        first: Sender<()>,
    ) {
        let mut first = Some(first);
        let mut backoff = BACKOFF_MIN;
        while !self.is_stopping.get() {
            let begun = Instant::now();
            let has_failed = match Process::start(candidate) {
                Ok(process) => self.live(process, candidate, configuration, dispatcher, &mut first).await,
                Err(error) => {
                    log::error!("cannot start NRI plugin"; path = candidate.path.display(), error = error);
                    true
                }
            };
            first = None;
            if !has_failed || self.restart.get() == Restart::Never || self.is_stopping.get() {
                return;
            }
            if begun.elapsed() > BACKOFF_MAX {
                backoff = BACKOFF_MIN;
            }
            log::warn!("NRI plugin ended, will restart"; path = candidate.path.display(), after_s = backoff.as_secs());
            let _ = reactor::deadline(backoff, self.stopped()).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Runs a plugin once; returns whether the plugin failed.
    async fn live(
        &self,
        mut process: Process,
        candidate: &Candidate,
        configuration: &Path,
        dispatcher: &Rc<Dispatcher>,
        first: &mut Option<Sender<()>>,
    ) -> bool {
        let config = drop_in(configuration, candidate);
        let launched = Launched { index: candidate.index.clone(), name: candidate.name.clone(), config };
        let Some(stream) = process.stream.take() else { return true };
        let joined = dispatcher.launched(socket::split(stream), launched).await;
        first.take();
        match joined {
            Ok(running) => smol::future::or(running.ended(), self.stopped()).await,
            Err(why) => {
                log::error!("NRI plugin did not register"; path = candidate.path.display(), reason = why)
            }
        }
        let is_clean = process.end().await;
        log::info!("NRI plugin ended"; path = candidate.path.display(), clean = is_clean);
        !is_clean
    }
}

/// The plugins in a directory in the order of their names; empty if the directory is missing.
fn candidates(directory: &Path) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| candidate(&entry.path()))
        .collect();
    collect::sort_by(&mut found, |a, b| a.path.cmp(&b.path));
    found
}

fn candidate(path: &Path) -> Option<Candidate> {
    // Links are followed.
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return None;
    }
    let skip = |why: &str| {
        log::warn!("file in the NRI plugin directory ignored"; path = path.display(), reason = why);
        None
    };
    let name = path.file_name()?.to_str().unwrap_or_default();
    let Some((index, name)) = name.split_once('-').filter(|(index, name)| {
        index.len() == 2 && index.bytes().all(|byte| byte.is_ascii_digit()) && !name.is_empty()
    }) else {
        return skip("its name is not NN-name");
    };
    if std::fs::File::open(path).is_ok_and(|file| starts_with(file, WASM)) {
        return skip("WebAssembly plugins are not supported");
    }
    Some(Candidate { path: path.to_owned(), index: index.to_owned(), name: name.to_owned() })
}

fn starts_with<const N: usize>(mut file: std::fs::File, magic: [u8; N]) -> bool {
    let mut bytes = [0; N];
    std::io::Read::read_exact(&mut file, &mut bytes).is_ok_and(|()| bytes == magic)
}

/// The content of the plugin's configuration file: the file for its index and name, otherwise that for its name, otherwise
/// empty.
fn drop_in(directory: &Path, candidate: &Candidate) -> String {
    let Candidate { index, name, .. } = candidate;
    let names = [format!("{index}-{name}.conf"), format!("{name}.conf")];
    for path in names.map(|name| directory.join(name)) {
        match hostpath::read(&path, CONFIGURATION_BYTES_MAX) {
            Ok(text) => return String::from_utf8_lossy(&text).into_owned(),
            Err(error) if error.errno() == Some(Errno::ENOENT) => {}
            Err(error) => {
                log::error!("cannot read the configuration of an NRI plugin"; path = path.display(), error = error)
            }
        }
    }
    String::new()
}

/// A plugin process that is running.
struct Process {
    pid: Pid,
    pidfd: Watched,
    stream: Option<Watched>,
    _log: reactor::Task<()>,
    is_reaped: bool,
}

impl Process {
    fn start(candidate: &Candidate) -> Result<Self, Error> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
        let (output, written) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let pid = spawn(candidate, &theirs, &written)?;
        let raw = rustix::process::Pid::from_raw(pid.as_raw()).ok_or(Errno::ESRCH)?;
        descriptors::restore_limit_of(raw);
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty())
            .map_err(|errno| Error::from(std::io::Error::from(errno)))?;
        let output = Watched::new(output)?;
        let title = format!("{}-{}", candidate.index, candidate.name);
        let log = reactor::spawn(pass_on_log(output, title));
        let (pidfd, stream) = (Watched::new(pidfd)?, Watched::new(ours)?);
        Ok(Self { pid, pidfd, stream: Some(stream), _log: log, is_reaped: false })
    }

    /// Ends the process by SIGTERM, then SIGKILL; returns whether it exited with 0.
    async fn end(&mut self) -> bool {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            if self.is_gone() {
                break;
            }
            let _ = kill(self.pid, signal); // ESRCH: it is gone by itself
            let _ = reactor::deadline(END_GRACE, self.pidfd.readable()).await;
        }
        self.is_reaped = true;
        matches!(waitpid(self.pid, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::Exited(_, 0)))
    }

    fn is_gone(&self) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut files = [PollFd::new(self.pidfd.fd(), PollFlags::POLLIN)];
        poll(&mut files, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.is_reaped {
            // The daemon is shutting down: a killed process ends at once, so this wait does.
            let _ = kill(self.pid, Signal::SIGKILL);
            let _ = waitpid(self.pid, None);
        }
    }
}

/// Starts the plugin without arguments, with three environment variables, no blocked signals, and in a new process group.
fn spawn(candidate: &Candidate, socket: &OwnedFd, output: &OwnedFd) -> Result<Pid, Error> {
    let path = c_string(candidate.path.as_os_str().as_bytes())?;
    let environment = [
        format!("NRI_PLUGIN_NAME={}", candidate.name),
        format!("NRI_PLUGIN_IDX={}", candidate.index),
        format!("NRI_PLUGIN_SOCKET={SOCKET}"),
    ];
    let environment =
        environment.iter().map(|text| c_string(text.as_bytes())).collect::<Result<Vec<CString>, _>>()?;
    // Duplicated first, so that no descriptor is overwritten before it is used.
    let (socket, output) = (above(socket)?, above(output)?);
    let mut files = PosixSpawnFileActions::init()?;
    let null = above(&std::fs::File::open("/dev/null")?.into())?;
    files.add_dup2(null.as_raw_fd(), 0)?;
    for number in [1, 2] {
        files.add_dup2(output.as_raw_fd(), number)?;
    }
    files.add_dup2(socket.as_raw_fd(), SOCKET)?;
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
    )?;
    attributes.set_pgroup(Pid::from_raw(0))?;
    attributes.set_sigmask(&SigSet::empty())?;
    attributes.set_sigdefault(&SigSet::all())?;
    let arguments: [&CStr; 1] = [&path];
    let _mask = umask::Public::begin(); // what a plugin makes is its own affair
    Ok(posix_spawn(path.as_c_str(), &files, &attributes, &arguments, &environment)?)
}

fn above(file: &OwnedFd) -> Result<OwnedFd, Error> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, ABOVE_PLACES).map_err(std::io::Error::from)?)
}

fn c_string(bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes)
        .map_err(|_| Error::new(coracle_base::error::Kind::InvalidArgument, "a name holds a NUL"))
}

async fn pass_on_log(output: Watched, title: String) {
    let mut lines = LogLines::default();
    let mut buffer = vec![0; 1024];
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        lines.feed(&buffer[..count], |line| log::info!("NRI plugin output"; plugin = title, line = line));
        // Otherwise a plugin that writes without a pause would occupy the event loop.
        reactor::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_files_with_an_index_are_plugins() {
        let directory = std::env::temp_dir().join(format!("coracle-launch-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let write = |name: &str, mode: u32, text: &[u8]| {
            std::fs::write(directory.join(name), text).unwrap();
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(directory.join(name), mode).unwrap();
        };
        write("20-b", 0o755, b"#!/bin/sh");
        write("10-a-b", 0o711, b"x");
        write("30-no-program", 0o644, b"");
        write("1-short", 0o755, b"");
        write("ab-letters", 0o755, b"");
        write("40-web", 0o755, b"\0asm\x01\0\0\0more");
        let found = candidates(&directory);
        let titles: Vec<_> = found.iter().map(|one| format!("{} {}", one.index, one.name)).collect();
        assert_eq!(titles, ["10 a-b", "20 b"]);
        std::fs::write(directory.join("b.conf"), "of the name").unwrap();
        assert_eq!(drop_in(&directory, &found[1]), "of the name");
        std::fs::write(directory.join("20-b.conf"), "of both").unwrap();
        assert_eq!(drop_in(&directory, &found[1]), "of both");
        assert_eq!(drop_in(&directory, &found[0]), "");
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(candidates(&directory), []);
    }
}
