//! Workers: short-lived processes that do what the daemon's one thread must not wait for. This module starts, cancels and reaps
//! them; it never does their work and knows none of it but the job types.
//!
//! ```text
//!   run(job) ── lane ──> spawn ──> job on stdin ──> answers on stdout ──> kill the group ──> reap
//!                                    └── stderr: log lines
//! ```
//!
//! Promises: dropping the future of [`Workers::run`] kills the worker with its whole process group, and reaps it; no
//! worker is ever left as a zombie; a worker that is silent, garrulous or garbled costs an error and bounded memory.

mod answers;
mod process;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, HostAnswer, HostQuestion, Job, MessageError, Outcome, Progress};
use smol::channel::Sender;
use smol::lock::{Semaphore, SemaphoreGuard};

use crate::counters;
use crate::error::{self, Kind, plain};
use crate::reactor;
pub use process::LogLines;
use process::{Process, Remains};

/// The worker's program.
pub const PROGRAM: &str = "coracle-worker";

/// How long a pull or an import may say nothing. Other runtimes give up on a pull after 5 minutes without a byte; this is
/// longer, because it also covers the sync of a big layer on a slow card.
const FILL_SILENCE: Duration = Duration::from_secs(15 * 60);

/// How long a removal may take in all: a million files on a slow card.
const REMOVE_SILENCE: Duration = Duration::from_secs(60 * 60);

/// A few files of a few kilobytes, a few messages to the kernel.
const DEVICES_SILENCE: Duration = Duration::from_secs(60);

/// A walk of every writable layer, on flash with a cold cache.
const MEASURE_SILENCE: Duration = Duration::from_secs(300);

/// A volume with a million files on a slow card is relabelled once; the kubelet waits for two minutes and asks again.
const RELABEL_SILENCE: Duration = Duration::from_secs(110);

/// What systemd may take: the worker gives up before.
const SCOPE_SILENCE: Duration = Duration::from_secs(70);

/// What a CNI job may take longer than its own limits, which the worker enforces: one for the command, and one for the
/// DEL that takes back a failed ADD.
const CNI_GRACE: Duration = Duration::from_secs(10);

/// What a hook's worker may take longer than the hook, which it ends itself.
const HOOK_GRACE: Duration = Duration::from_secs(10);

/// How long a path of the node may take to answer. The kubelet gives a call two minutes, and a container may name a dozen paths:
/// the first one that hangs ends the call. A network file system that is merely slow answers within a second.
pub const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// Why there is no outcome.
#[derive(Debug)]
pub enum Error {
    /// The program could not be started.
    Start {
        /// The program.
        program: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A pipe to or from it broke.
    Pipe(io::Error),
    /// What it answered is no answer.
    Garbled(MessageError),
    /// It ended without an answer: how, and the last it logged.
    Ended(String),
    /// It said nothing for so long, and was killed.
    Silent(Duration),
    /// Its answer: the job did not work.
    Failed(Failure),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { program, error } => write!(out, "start {}: {}", program.display(), plain(error)),
            Self::Pipe(error) => write!(out, "worker: {}", plain(error)),
            Self::Garbled(error) => write!(out, "the worker answered {error}"),
            Self::Ended(how) => write!(out, "the worker ended without an answer: {how}"),
            Self::Silent(limit) => write!(out, "the worker said nothing for {} s", limit.as_secs()),
            Self::Failed(failure) => out.write_str(&failure.message),
        }
    }
}

impl From<Error> for error::Error {
    fn from(error: Error) -> error::Error {
        let kind = match &error {
            Error::Start { .. } | Error::Pipe(_) | Error::Garbled(_) | Error::Ended(_) => Kind::Internal,
            Error::Silent(_) => Kind::DeadlineExceeded,
            Error::Failed(failure) => match failure.kind {
                FailureKind::Unavailable => Kind::Unavailable,
                FailureKind::Denied => Kind::PermissionDenied,
                FailureKind::NotFound => Kind::NotFound,
                FailureKind::Invalid => Kind::InvalidArgument,
                FailureKind::NoSpace => Kind::ResourceExhausted,
                FailureKind::Plugin | FailureKind::Internal => Kind::Internal,
            },
        };
        error::Error::new(kind, error.to_string())
    }
}

/// Starts workers, not too many at once.
pub struct Workers {
    /// Path of the worker program.
    program: PathBuf,
    lanes: [(Lane, Semaphore); 8],
    reaper: Sender<Remains>,
}

/// Jobs that wait for each other: a pod's network never waits for a pull.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    Fill,
    Remove,
    Network,
    Measure,
    Devices,
    Hooks,
    Scopes,
    Looks,
}

/// Pulls and imports at once: two share the uplink and both cores of a small node; a third hides their waits.
const FILLS_MAX: usize = 3;
/// Removals at once: a flash disk gains nothing from two.
const REMOVALS_MAX: usize = 1;
/// CNI jobs at once. Each is a worker and a Go plugin of some 10 MiB.
const NETWORKS_MAX: usize = 8;

/// Walks of writable layers at once: one walks them all.
const MEASURES_MAX: usize = 1;

/// Look-ups of devices at once: milliseconds each.
const DEVICES_MAX: usize = 4;

/// Calls of systemd at once: it does one after the other.
const SCOPES_MAX: usize = 4;

/// OCI hooks at once.
const HOOKS_MAX: usize = 8;

/// Looks at paths at once. One that hangs gives its place back after its limit.
const LOOKS_MAX: usize = 8;

/// A job's kind, for metrics.
fn name(job: &Job) -> &'static str {
    match job {
        Job::Pull(_) => "pull",
        Job::Import(_) => "import",
        Job::Check(_) => "check",
        Job::Export(_) => "export",
        Job::Explain(_) => "explain",
        Job::CheckRegistries { .. } => "registries",
        Job::RemoveTrees { .. } => "remove",
        Job::Cni(_) => "cni",
        Job::Cdi { .. } => "cdi",
        Job::TakeNetDevices { .. } => "net_devices",
        Job::RemoveLink { .. } => "remove_link",
        Job::Hook(_) => "hook",
        Job::Scope(_) => "scope",
        Job::MeasureTrees { .. } => "measure",
        Job::LookAtHost(_) => "look",
        Job::Relabel { .. } => "relabel",
    }
}

impl Workers {
    /// No worker is started yet, but the task that will reap them.
    ///
    /// # Panics
    /// Outside [`reactor::run`].
    pub fn new(program: PathBuf) -> Rc<Workers> {
        let lanes = [
            (Lane::Fill, FILLS_MAX),
            (Lane::Remove, REMOVALS_MAX),
            (Lane::Network, NETWORKS_MAX),
            (Lane::Measure, MEASURES_MAX),
            (Lane::Devices, DEVICES_MAX),
            (Lane::Hooks, HOOKS_MAX),
            (Lane::Scopes, SCOPES_MAX),
            (Lane::Looks, LOOKS_MAX),
        ];
        let lanes = lanes.map(|(lane, places)| (lane, Semaphore::new(places)));
        // Unbounded, because a destructor sends; what is in it was a running worker, and those are bounded.
        let (reaper, dead) = smol::channel::unbounded();
        reactor::spawn(process::reap_all(dead)).detach();
        Rc::new(Workers { program, lanes, reaper })
    }

    /// Does one job in a worker of its own, waiting for a place first. `on_progress` hears (bytes done, bytes in all).
    /// Dropping the future kills the worker and whatever it started.
    ///
    /// # Errors
    /// [`Error`]: it could not be started, did not answer, or its answer is a failure.
    pub async fn run(&self, job: Job, mut on_progress: impl FnMut(u64, u64)) -> Result<Outcome, Error> {
        self.run_reporting(job, |progress| on_progress(progress.bytes_done, progress.bytes_total)).await
    }

    /// Like [`Workers::run`], but `on_progress` gets everything that the worker reports meanwhile.
    ///
    /// # Errors
    /// As [`Workers::run`].
    pub async fn run_reporting(&self, job: Job, on_progress: impl FnMut(Progress)) -> Result<Outcome, Error> {
        let (lane, silence_max) = match &job {
            Job::Pull(_) | Job::Import(_) | Job::Check(_) | Job::Export(_) => (Lane::Fill, FILL_SILENCE),
            Job::RemoveTrees { .. } => (Lane::Remove, REMOVE_SILENCE),
            Job::Hook(hook) => (Lane::Hooks, Duration::from_millis(hook.limit_ms).saturating_add(HOOK_GRACE)),
            Job::Cdi { .. }
            | Job::TakeNetDevices { .. }
            | Job::RemoveLink { .. }
            | Job::Explain(_)
            | Job::CheckRegistries { .. } => (Lane::Devices, DEVICES_SILENCE),
            Job::MeasureTrees { .. } => (Lane::Measure, MEASURE_SILENCE),
            Job::Relabel { .. } => (Lane::Devices, RELABEL_SILENCE),
            Job::Scope(_) => (Lane::Scopes, SCOPE_SILENCE),
            Job::LookAtHost(_) => (Lane::Looks, LOOK_LIMIT),
            Job::Cni(cni) => (
                Lane::Network,
                Duration::from_millis(cni.timeout_ms).saturating_mul(2).saturating_add(CNI_GRACE),
            ),
        };
        let _place = self.place(lane).await;
        let begun = Instant::now();
        let mut process = Process::start(&self.program, self.reaper.clone())?;
        let outcome = process.converse(&job, silence_max, on_progress).await;
        counters::worker(name(&job), outcome.is_ok(), begun.elapsed());
        outcome
    }

    /// Asks about a path of the node, for at most `limit` once there is a place; a descriptor may come with the answer. `held`
    /// is dropped when the worker is reaped, which may be long after the limit.
    ///
    /// # Errors
    /// As [`Workers::run`]; [`Error::Silent`] once `limit` has passed.
    pub async fn look(
        &self,
        question: HostQuestion,
        held: Rc<dyn Any>,
        limit: Duration,
    ) -> Result<(HostAnswer, Option<OwnedFd>), Error> {
        let _place = self.place(Lane::Looks).await;
        let begun = Instant::now();
        let job = Job::LookAtHost(question);
        let mut process = Process::start_looking(&self.program, self.reaper.clone(), held)?;
        let outcome = process.converse(&job, limit, |_| ()).await;
        counters::worker(name(&job), outcome.is_ok(), begun.elapsed());
        match outcome? {
            Outcome::Looked(answer) => Ok((answer, process.take_file())),
            other => Err(Error::Ended(format!("it did another job: {other:?}"))),
        }
    }

    async fn place(&self, lane: Lane) -> Option<SemaphoreGuard<'_>> {
        match self.lanes.iter().find(|(own, _)| *own == lane) {
            Some((_, places)) => Some(places.acquire().await),
            None => None,
        }
    }

    /// Ends TLS on a client's connection in a process of its own, so that neither keys nor the protocol sit in the daemon;
    /// the descriptor is what comes out of it. The worker ends when either side does.
    ///
    /// # Errors
    /// The worker could not be started.
    pub fn terminate_tls(&self, client: OwnedFd, certificate: &Path, key: &Path) -> Result<OwnedFd, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::Pipe)?;
        let ends = (client, OwnedFd::from(theirs));
        process::start_tls(&self.program, &self.reaper, ends, (certificate, key))?;
        Ok(ours.into())
    }
}
