//! Access to host paths (sources of volumes, profiles, devices, logs) without ever blocking on a file system
//! that does not respond.
//!
//! ```text
//! in the dentry cache and on a local file system ─► accessed directly, within some microseconds
//! anything else ─► accessed by a worker within LOOK_LIMIT ─► it blocks: DEADLINE_EXCEEDED, the worker is
//! abandoned
//! ```
//! A worker that sleeps in the kernel cannot be killed. The daemon does not wait for it and does not count it
//! against the limit of concurrent workers; it ends when its file system responds. The number of blocked
//! workers is limited per path and in total. Reasons: docs/notes/011-paths-that-do-not-answer.md.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_job::{FailureKind, HostAnswer, HostDevice, HostQuestion};
use coracle_sandbox::collect;
use coracle_sandbox::hostpath::{self, HostFile, Mounts};
use coracle_sandbox::{device, plan};

use crate::error::{Error, Kind};
use crate::log;
use crate::workers::{self, LOOK_LIMIT, Workers};

/// Maximum number of blocked workers per path. A retry starts a new worker, because the blocked one may never
/// complete.
const STUCK_ON_A_PATH_MAX: usize = 3;

/// Maximum number of blocked workers in total: 16 processes of a megabyte.
const STUCK_MAX: usize = 16;

/// Accesses host paths and tracks blocked workers.
pub struct HostPaths {
    workers: Rc<Workers>,
    limit: Duration,
    /// The file systems that the daemon itself uses: a file on each, and its mount ID. They are accessed
    /// directly, whatever their type, because the daemon cannot work without them.
    own: Vec<(HostFile, u64)>,
    looks: RefCell<Vec<Weak<Look>>>,
}

/// An access of a path by a worker; exists until the worker is reaped.
struct Look {
    path: PathBuf,
    /// Whether the caller no longer waits for the answer.
    is_given_up: Cell<bool>,
}

/// Marks an operation as abandoned if its caller is dropped before the result arrives.
struct Waiting {
    look: Rc<Look>,
    is_answered: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.look.is_given_up.set(!self.is_answered);
    }
}

impl HostPaths {
    /// Creates the accessor, which starts workers through `workers`. The file systems of `root` and `/` are
    /// always accessed directly, because the daemon cannot work without them.
    pub fn new(workers: Rc<Workers>, root: &Path) -> Rc<Self> {
        Self::with_limit(workers, root, LOOK_LIMIT)
    }

    fn with_limit(workers: Rc<Workers>, root: &Path, limit: Duration) -> Rc<Self> {
        let own = [root, Path::new("/")].into_iter().filter_map(|path| {
            let place = HostFile::open(path).ok()?;
            let mount = place.mount()?;
            Some((place, mount))
        });
        Rc::new(Self { workers, limit, own: own.collect(), looks: RefCell::default() })
    }

    /// Resolves the source of a mount to a path without symbolic links. If `is_made` is set, a missing path
    /// is created as a directory.
    ///
    /// # Errors
    /// `DeadlineExceeded` if the file system does not respond; `ResourceExhausted` if too many workers are
    /// blocked; otherwise the kernel's error, but never `NotFound`.
    pub async fn source(
        self: &Rc<Self>,
        path: &Path,
        is_made: bool,
        mounts: &mut Mounts,
    ) -> Result<PathBuf, Error> {
        if let Some(place) = self.local(path, mounts) {
            return Ok(place.real_path()?);
        }
        match self.ask(HostQuestion::Source { path: path.to_owned(), is_made }).await? {
            (HostAnswer::Source(real), _) => Ok(real),
            other => Err(unexpected(&other.0)),
        }
    }

    /// Lists the devices of a path: the device itself, or all devices in the directory.
    ///
    /// # Errors
    /// Those of [`HostPaths::source`], and `InvalidArgument` if the path is neither a device nor a directory
    /// with devices.
    pub async fn devices(
        self: &Rc<Self>,
        path: &Path,
        container: &str,
        mounts: &mut Mounts,
    ) -> Result<Vec<plan::DeviceNode>, Error> {
        if self.local(path, mounts).is_some() {
            return Ok(device::resolve(path, container)?);
        }
        let question = HostQuestion::Devices { path: path.to_owned(), container: container.to_owned() };
        match self.ask(question).await? {
            (HostAnswer::Devices(nodes), _) => Ok(nodes.into_iter().map(node).collect()),
            other => Err(unexpected(&other.0)),
        }
    }

    /// Reads a regular file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// Those of [`HostPaths::source`], and `InvalidArgument` if the path is not a regular file or is larger.
    pub async fn read(self: &Rc<Self>, path: &Path, bytes_max: u64) -> Result<Vec<u8>, Error> {
        if let Some(place) = self.local(path, &mut Mounts::default()) {
            return Ok(place.read(path, bytes_max)?);
        }
        match self.ask(HostQuestion::File { path: path.to_owned(), bytes_max }).await? {
            (HostAnswer::File(bytes), _) => Ok(bytes),
            other => Err(unexpected(&other.0)),
        }
    }

    /// Opens a log file for appending; creates it and its directory if missing. No part of its path from the pod's directory
    /// of logs on may be a link.
    ///
    /// # Errors
    /// Those of [`HostPaths::source`], and `InvalidArgument` if the path is not a regular file or has a link.
    pub async fn open_log(
        self: &Rc<Self>,
        path: &Path,
        pod_directory: &Path,
        mounts: &mut Mounts,
    ) -> Result<OwnedFd, Error> {
        if let Some((above, beneath, name)) = hostpath::split(path, pod_directory)
            && let Some(above) = HostFile::cached(above)
            && let Some(place) = above.cached_beneath(beneath).filter(|place| self.is_local(place, mounts))
        {
            return Ok(place.open_log(name, path)?);
        }
        let (path, pod_directory) = (path.to_owned(), pod_directory.to_owned());
        match self.ask(HostQuestion::Log { path, pod_directory }).await? {
            (HostAnswer::Log, Some(log)) => Ok(log),
            other => Err(unexpected(&other.0)),
        }
    }

    /// Opens a path if it can be accessed without blocking; otherwise `None`.
    fn local(&self, path: &Path, mounts: &mut Mounts) -> Option<HostFile> {
        HostFile::cached(path).filter(|place| self.is_local(place, mounts))
    }

    fn is_local(&self, place: &HostFile, mounts: &mut Mounts) -> bool {
        let is_own = |mount| self.own.iter().any(|(_, own)| *own == mount);
        place.mount().is_some_and(is_own) || place.is_local(mounts)
    }

    async fn ask(self: &Rc<Self>, question: HostQuestion) -> Result<(HostAnswer, Option<OwnedFd>), Error> {
        let path = question.path().to_owned();
        self.refuse_if_stuck(&path)?;
        let look = Rc::new(Look { path: path.clone(), is_given_up: Cell::new(false) });
        self.looks.borrow_mut().push(Rc::downgrade(&look));
        let mut waiting = Waiting { look: Rc::clone(&look), is_answered: false };
        let answer = self.workers.look(question, look, self.limit).await;
        waiting.is_answered = !matches!(answer, Err(workers::Error::Silent(_)));
        answer.map_err(|error| match error {
            workers::Error::Silent(limit) => {
                log::warn!("a host path does not respond"; path = path.display());
                let text = format!("{}: the file system did not respond within {limit:?}", path.display());
                Error::new(Kind::DeadlineExceeded, text)
            }
            // Not NotFound, which the kubelet takes to mean that the pod or container was removed.
            workers::Error::Failed(failure) if failure.kind == FailureKind::NotFound => {
                Error::new(Kind::Internal, failure.message)
            }
            error => Error::from(error).context(path.display()),
        })
    }

    fn refuse_if_stuck(&self, path: &Path) -> Result<(), Error> {
        let mut looks = self.looks.borrow_mut();
        looks.retain(|look| look.strong_count() > 0);
        let stuck: Vec<_> =
            looks.iter().filter_map(Weak::upgrade).filter(|look| look.is_given_up.get()).collect();
        let here = stuck.iter().filter(|look| look.path == path).count();
        if here >= STUCK_ON_A_PATH_MAX {
            let text = format!(
                "{}: the file system still does not respond; {here} workers are blocked on it",
                path.display()
            );
            return Err(Error::new(Kind::DeadlineExceeded, text));
        }
        if stuck.len() >= STUCK_MAX {
            let mut paths: Vec<_> = stuck.iter().map(|look| look.path.display().to_string()).collect();
            collect::sort(&mut paths);
            paths.dedup();
            let text = format!(
                "{}: not accessed, because {STUCK_MAX} workers are blocked on file systems that do not respond: {}",
                path.display(),
                paths.join(", ")
            );
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        Ok(())
    }
}

fn node(device: HostDevice) -> plan::DeviceNode {
    let HostDevice { path, is_block, major, minor, mode } = device;
    let kind = if is_block { plan::DeviceKind::Block } else { plan::DeviceKind::Character };
    plan::DeviceNode { path, kind, major, minor, mode, owner: (0, 0) }
}

fn unexpected(answer: &HostAnswer) -> Error {
    Error::new(Kind::Internal, format!("unexpected answer of the worker: {answer:?}"))
}
