//! Looks at paths of the node that others control, without ever waiting for them: sources of volumes, profiles, devices, logs.
//!
//! ```text
//!   known to the kernel, on a local file system ─► done here, some microseconds
//!   anything else ─► a worker looks, for at most LOOK_LIMIT ─► it hangs: DEADLINE_EXCEEDED, and the worker is left to the kernel
//! ```
//! A worker that sleeps in the kernel cannot be killed; nobody waits for it, it holds no place, and it ends when its file system
//! answers. How many there may be is bounded, for each path and in all. Why so: docs/notes/011-paths-that-do-not-answer.md.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_job::{FailureKind, HostAnswer, HostDevice, HostQuestion};
use coracle_sandbox::hostpath::{self, HostFile, Mounts};
use coracle_sandbox::{device, plan};

use crate::error::{Error, Kind};
use crate::log;
use crate::workers::{self, LOOK_LIMIT, Workers};

/// Workers that may hang on one path: a retry asks again while the first still hangs, since the answer to that one may never come.
const STUCK_ON_A_PATH_MAX: usize = 3;

/// Workers that may hang in all: 16 processes of a megabyte.
const STUCK_MAX: usize = 16;

/// Looks, and remembers what hangs.
pub struct HostPaths {
    workers: Rc<Workers>,
    limit: Duration,
    /// File systems that the daemon itself stands on, by the mounts of these: whatever their type, it cannot do without.
    own: Vec<(HostFile, u64)>,
    looks: RefCell<Vec<Weak<Look>>>,
}

/// A worker that looks at a path, until it is reaped.
struct Look {
    path: PathBuf,
    /// Nobody waits for it any more.
    is_given_up: Cell<bool>,
}

/// Marks a look as given up where its call goes before the answer.
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
    /// Looks through `workers`. The file systems that `root` and `/` are on are always looked at directly: the daemon cannot do
    /// without them.
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

    /// The source of a mount, without links; with `is_made`, a directory is made where there is nothing.
    ///
    /// # Errors
    /// `DeadlineExceeded` where its file system does not answer, `ResourceExhausted` where too many looks hang, else what the
    /// kernel says; never `NotFound`.
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

    /// The devices that a path stands for.
    ///
    /// # Errors
    /// As [`HostPaths::source`]; `InvalidArgument` for what is no device and no directory of devices.
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

    /// A regular file of at most `bytes_max`.
    ///
    /// # Errors
    /// As [`HostPaths::source`]; `InvalidArgument` for what is no regular file, or is longer.
    pub async fn read(self: &Rc<Self>, path: &Path, bytes_max: u64) -> Result<Vec<u8>, Error> {
        if let Some(place) = self.local(path, &mut Mounts::default()) {
            return Ok(place.read(path, bytes_max)?);
        }
        match self.ask(HostQuestion::File { path: path.to_owned(), bytes_max }).await? {
            (HostAnswer::File(bytes), _) => Ok(bytes),
            other => Err(unexpected(&other.0)),
        }
    }

    /// A log, opened for appending; made with its directory where it is missing.
    ///
    /// # Errors
    /// As [`HostPaths::source`]; `InvalidArgument` for what is no regular file.
    pub async fn open_log(self: &Rc<Self>, path: &Path, mounts: &mut Mounts) -> Result<OwnedFd, Error> {
        if let Some((directory, name)) = hostpath::split(path)
            && let Some(place) = self.local(directory, mounts)
        {
            return Ok(place.open_log(name, path)?);
        }
        match self.ask(HostQuestion::Log { path: path.to_owned() }).await? {
            (HostAnswer::Log, Some(log)) => Ok(log),
            other => Err(unexpected(&other.0)),
        }
    }

    /// Held where it can be looked at without waiting.
    fn local(&self, path: &Path, mounts: &mut Mounts) -> Option<HostFile> {
        let place = HostFile::cached(path)?;
        let mount = place.mount()?;
        let is_own = self.own.iter().any(|(_, own)| *own == mount);
        (is_own || place.is_local(mounts)).then_some(place)
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
                log::warn!("a path of the node does not answer"; path = path.display());
                let text = format!("{}: its file system did not answer within {limit:?}", path.display());
                Error::new(Kind::DeadlineExceeded, text)
            }
            // Not NotFound: to a kubelet that means the pod or container is gone.
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
                "{}: its file system still does not answer; {here} workers wait for it",
                path.display()
            );
            return Err(Error::new(Kind::DeadlineExceeded, text));
        }
        if stuck.len() >= STUCK_MAX {
            let mut paths: Vec<_> = stuck.iter().map(|look| look.path.display().to_string()).collect();
            paths.sort();
            paths.dedup();
            let text = format!(
                "{}: not looked at, {STUCK_MAX} workers wait for file systems that do not answer: {}",
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
    Error::new(Kind::Internal, format!("the worker answered something else: {answer:?}"))
}
