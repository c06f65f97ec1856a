//! Worker processes: short-lived processes for jobs for which the daemon's single thread must not wait. This
//! module starts, cancels and reaps workers; it only uses the types of the jobs.
//!
//! ```text
//! run(job) ── lane ──> spawn ──> job on stdin ──> answers on stdout ──> kill the process group ──> reap
//!                                    └── stderr: log lines
//! ```
//!
//! The module guarantees: dropping the future of [`Workers::run`] kills the worker with its process group and
//! reaps it; no worker remains as a zombie; a worker that is silent, writes too much or writes malformed
//! answers causes an error and uses bounded memory.

mod answers;
mod process;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
#[cfg(feature = "simulation")]
use std::pin::Pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_job::{
    Failure, FailureKind, HostAnswer, HostQuestion, Job, MessageError, Outcome, Progress, Serve,
    write_message,
};
use smol::channel::{Receiver, Sender};
use smol::lock::{Semaphore, SemaphoreGuard};

use crate::counters;
use crate::error::{self, Kind, describe_io};
use crate::reactor::{self, Watched};
use crate::waits::{self, Wait};
pub use process::LogLines;
use process::{Process, Remains};

/// Maximum time without output of a pull or an import. Other runtimes abort a pull after 5 minutes without
/// data; this limit is longer, because it also covers the sync of a big layer on a slow SD card.
const FILL_SILENCE: Duration = Duration::from_secs(15 * 60);

/// Maximum time without output of a removal: a million files on a slow SD card.
const REMOVE_SILENCE: Duration = Duration::from_secs(60 * 60);

/// Maximum time without output of a job for a few files of a few kilobytes, or a few netlink messages.
const DEVICES_SILENCE: Duration = Duration::from_secs(60);

/// Maximum time without output of a walk of all writable layers on flash with a cold cache.
const MEASURE_SILENCE: Duration = Duration::from_secs(300);

/// Maximum time without output of the relabelling of a volume: a million files on a slow SD card, which
/// happens once. The kubelet waits for two minutes and retries.
const RELABEL_SILENCE: Duration = Duration::from_secs(110);

/// Maximum time without output of a request to systemd; the worker's own limit is shorter.
const SCOPE_SILENCE: Duration = Duration::from_secs(70);

/// Time that is added to the limits of a CNI job, which the worker enforces: one for the command, and one for
/// the DEL after a failed ADD.
const CNI_GRACE: Duration = Duration::from_secs(10);

/// Time that is added to the limit of a hook, which the worker enforces.
const HOOK_GRACE: Duration = Duration::from_secs(10);

/// Time limit of an access to a host path. The kubelet's limit for a call is two minutes, and a container may
/// have a dozen paths; the first one that blocks ends the call. A slow but working network file system
/// responds within a second.
pub const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// A process that serves neighbours; dropping the value ends it.
pub struct Serving {
    /// The process ends when this is closed.
    _control: Watched,
    /// Closed when the process has ended.
    ended: Receiver<()>,
}

impl Serving {
    /// Waits until the process has ended, also after the value was dropped.
    pub fn ended(&self) -> impl Future<Output = ()> + use<> {
        let ended = self.ended.clone();
        async move {
            // It is closed without a message.
            let _ = ended.recv().await;
        }
    }
}

/// The reason why a worker returned no outcome.
#[derive(Debug)]
pub enum Error {
    /// The program could not be started.
    Start {
        /// Path of the program.
        program: PathBuf,
        /// The error of the attempt.
        error: io::Error,
    },
    /// A pipe of the worker failed.
    Pipe(io::Error),
    /// The worker's answer could not be decoded.
    Garbled(MessageError),
    /// The worker ended without an answer; the text has its exit status and its last log line.
    Ended(String),
    /// The worker was killed because it had no output for this time.
    Silent(Duration),
    /// The worker answered that the job failed.
    Failed(Failure),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { program, error } => {
                write!(out, "start worker {}: {}", program.display(), describe_io(error))
            }
            Self::Pipe(error) => write!(out, "worker: {}", describe_io(error)),
            Self::Garbled(error) => write!(out, "the worker answered {error}"),
            Self::Ended(how) => write!(out, "the worker exited without an answer: {how}"),
            Self::Silent(limit) => {
                write!(out, "the worker was killed after {} s without an answer", limit.as_secs())
            }
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
                FailureKind::Unavailable
                | FailureKind::RateLimited
                | FailureKind::Certificate
                | FailureKind::NameResolution => Kind::Unavailable,
                FailureKind::Denied => Kind::PermissionDenied,
                FailureKind::NotFound => Kind::NotFound,
                FailureKind::Invalid => Kind::InvalidArgument,
                FailureKind::NoSpace => Kind::ResourceExhausted,
                FailureKind::Signature => Kind::FailedPrecondition,
                FailureKind::Plugin | FailureKind::Internal => Kind::Internal,
            },
        };
        error::Error::new(kind, error.to_string())
    }
}

/// Starts workers and limits their number.
pub struct Workers {
    /// Path of the worker program.
    program: PathBuf,
    lanes: [(Lane, Semaphore); 9],
    reaper: Sender<Remains>,
    #[cfg(feature = "simulation")]
    simulated: Option<Box<Simulated>>,
}

/// A function that executes the jobs of a simulation.
#[cfg(feature = "simulation")]
pub type Simulated = dyn Fn(Job) -> Pin<Box<dyn Future<Output = Result<Outcome, Error>>>>;

/// Groups of jobs with separate limits, so that a pod's network setup never waits for a pull.
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
    Checks,
}

/// Maximum number of concurrent pulls and imports: two use the network and both cores of a small node; a
/// third one uses the times in which these wait.
const FILLS_MAX: usize = 3;
/// Maximum number of concurrent removals: a higher number is not faster on a flash disk.
const REMOVALS_MAX: usize = 1;
/// Maximum number of concurrent CNI jobs. Each consists of a worker and a Go plugin of some 10 MiB.
const NETWORKS_MAX: usize = 8;

/// Maximum number of concurrent measurements: one measures all writable layers.
const MEASURES_MAX: usize = 1;

/// Maximum number of concurrent device look-ups, which take milliseconds each.
const DEVICES_MAX: usize = 4;

/// Maximum number of concurrent requests to systemd, which handles them one after the other.
const SCOPES_MAX: usize = 4;

/// Maximum number of concurrent OCI hooks.
const HOOKS_MAX: usize = 8;

/// Maximum number of concurrent accesses to host paths. A blocked access no longer counts after its time
/// limit.
const LOOKS_MAX: usize = 8;

/// Maximum number of concurrent checks in the background, for which no pull waits.
const CHECKS_MAX: usize = 1;

/// Name of a job's kind, for metrics.
fn name(job: &Job) -> &'static str {
    match job {
        Job::Pull(_) => "pull",
        Job::Import(_) => "import",
        Job::ListContainerd(_) => "list_containerd",
        Job::Check(_) => "check",
        Job::CheckLayer(_) => "check_layer",
        Job::Export(_) => "export",
        Job::Explain(_) => "explain",
        Job::CheckRegistries { .. } => "registries",
        Job::ReadPolicy { .. } => "read_policy",
        Job::Judge(_) => "judge",
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

/// Records the wait for a job that should take only a moment. `None` for pulls and imports, which report
/// their progress, and for removals and measurements of trees, which may take long.
fn wait_for(job: &Job) -> Option<Wait> {
    match job {
        Job::Cni(cni) => {
            let argument = |wanted: &str| {
                let found = cni.attachment.arguments.iter().find(|(key, _)| key == wanted);
                found.map_or("", |(_, value)| value.as_str())
            };
            let name = format!("{}/{}", argument("K8S_POD_NAMESPACE"), argument("K8S_POD_NAME"));
            Some(waits::begin(&cni.attachment.container_id, name, "a worker for CNI plugins"))
        }
        Job::Cdi { .. } | Job::TakeNetDevices { .. } | Job::Scope(_) | Job::Relabel { .. } => {
            Some(waits::begin("", "", format!("a worker ({})", name(job))))
        }
        // A hook is noted by its caller, who knows the container.
        Job::Hook(_)
        | Job::Pull(_)
        | Job::Import(_)
        | Job::ListContainerd(_)
        | Job::Check(_)
        | Job::CheckLayer(_)
        | Job::Export(_)
        | Job::Explain(_)
        | Job::CheckRegistries { .. }
        | Job::ReadPolicy { .. }
        | Job::Judge(_)
        | Job::RemoveTrees { .. }
        | Job::RemoveLink { .. }
        | Job::MeasureTrees { .. }
        | Job::LookAtHost(_) => None,
    }
}

impl Workers {
    /// Creates the pool and starts the task that reaps workers. Workers are started per job.
    ///
    /// # Panics
    /// Outside of [`reactor::run`].
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
            (Lane::Checks, CHECKS_MAX),
        ];
        let lanes = lanes.map(|(lane, permits)| (lane, Semaphore::new(permits)));
        // Unbounded, because a destructor sends to it; each entry was a running worker, whose number is
        // limited.
        let (reaper, dead) = smol::channel::unbounded();
        reactor::spawn(process::reap_all(dead)).detach();
        Rc::new(Workers {
            program,
            lanes,
            reaper,
            #[cfg(feature = "simulation")]
            simulated: None,
        })
    }

    /// Creates a pool that starts no process: `answer` executes the jobs.
    ///
    /// # Panics
    /// Outside of [`reactor::run`].
    #[cfg(feature = "simulation")]
    pub fn simulated(answer: Box<Simulated>) -> Rc<Workers> {
        let workers = Rc::try_unwrap(Self::new(PathBuf::new())).ok();
        Rc::new(Workers { simulated: Some(answer), ..workers.expect("it was just created") })
    }

    /// Runs one job in a new worker; waits first if the limit of its group is reached. Dropping the future kills the worker and its
    /// child processes.
    ///
    /// # Errors
    /// [`Error`] if the worker could not be started, did not answer, or answered with a failure.
    pub async fn run(&self, job: Job) -> Result<Outcome, Error> {
        // Boxed, because otherwise each caller would hold this future, which has a job and an answer in it, within its own.
        Box::pin(self.run_reporting(job, &mut |_| ())).await
    }

    /// Runs one job like [`Workers::run`], and passes the progress reports of the worker to `on_progress`.
    ///
    /// # Errors
    /// Those of [`Workers::run`].
    pub async fn run_reporting(
        &self,
        job: Job,
        on_progress: &mut dyn FnMut(Progress),
    ) -> Result<Outcome, Error> {
        let (lane, silence_max) = match &job {
            Job::Pull(_) | Job::Import(_) | Job::Check(_) | Job::Export(_) => (Lane::Fill, FILL_SILENCE),
            Job::CheckLayer(_) => (Lane::Checks, FILL_SILENCE),
            Job::RemoveTrees { .. } => (Lane::Remove, REMOVE_SILENCE),
            Job::Hook(hook) => (Lane::Hooks, Duration::from_millis(hook.limit_ms).saturating_add(HOOK_GRACE)),
            Job::Cdi { .. }
            | Job::TakeNetDevices { .. }
            | Job::RemoveLink { .. }
            | Job::Explain(_)
            | Job::ListContainerd(_)
            | Job::ReadPolicy { .. }
            | Job::Judge(_)
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
        let wait = wait_for(&job);
        let _permit = self.permit(lane).await;
        let begun = Instant::now();
        #[cfg(feature = "simulation")]
        if let Some(answer) = &self.simulated {
            return answer(job).await;
        }
        let mut process = Process::start(&self.program, self.reaper.clone())?;
        let outcome = process
            .converse(&job, silence_max, on_progress, &mut |what| {
                if let Some(wait) = &wait {
                    wait.now(what);
                }
            })
            .await;
        counters::worker(name(&job), outcome.is_ok(), begun.elapsed());
        outcome
    }

    /// Accesses a host path for at most `limit`, not counting the wait for a free worker. An answer may
    /// include a descriptor. `held` is dropped when the worker is reaped, which may be long after `limit`.
    ///
    /// # Errors
    /// Those of [`Workers::run`]; [`Error::Silent`] when `limit` has passed.
    pub async fn look(
        &self,
        question: HostQuestion,
        held: Rc<dyn Any>,
        limit: Duration,
    ) -> Result<(HostAnswer, Option<OwnedFd>), Error> {
        let _permit = self.permit(Lane::Looks).await;
        let begun = Instant::now();
        let job = Job::LookAtHost(question);
        let mut process = Process::start_looking(&self.program, self.reaper.clone(), held)?;
        let outcome = process.converse(&job, limit, &mut |_| (), &mut |_| ()).await;
        counters::worker(name(&job), outcome.is_ok(), begun.elapsed());
        match outcome? {
            Outcome::Looked(answer) => Ok((answer, process.take_file()?)),
            other => Err(Error::Ended(format!("unexpected answer: {other:?}"))),
        }
    }

    async fn permit(&self, lane: Lane) -> Option<SemaphoreGuard<'_>> {
        match self.lanes.iter().find(|(own, _)| *own == lane) {
            Some((_, permits)) => Some(permits.acquire().await),
            None => None,
        }
    }

    /// Starts a process that terminates TLS on a client's connection, so that the daemon contains neither
    /// keys nor the TLS implementation. Returns the descriptor of the decrypted stream. The process exits
    /// when either side closes.
    ///
    /// # Errors
    /// [`Error::Start`] if the process could not be started.
    pub fn terminate_tls(&self, client: OwnedFd, certificate: &Path, key: &Path) -> Result<OwnedFd, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::Pipe)?;
        let ends = (client, OwnedFd::from(theirs));
        let arguments = [OsStr::new("tls"), certificate.as_os_str(), key.as_os_str()];
        process::start_on_sockets(&self.program, &self.reaper, ends, &arguments, None)?;
        Ok(ours.into())
    }

    /// Starts a process that serves neighbours on a listening socket, so that the daemon contains no HTTP server for them. The
    /// process ends by itself when no one asks.
    ///
    /// # Errors
    /// [`Error::Start`] if the process could not be started, [`Error::Pipe`] if it ended before it had its settings.
    pub async fn serve_neighbours(&self, socket: OwnedFd, settings: &Serve) -> Result<Serving, Error> {
        let mut message = Vec::new();
        write_message(&mut message, settings).map_err(Error::Garbled)?;
        let (ours, theirs) = UnixStream::pair().map_err(Error::Pipe)?;
        let control = Watched::new(OwnedFd::from(ours)).map_err(Error::Pipe)?;
        let (held, ended) = smol::channel::bounded::<()>(1);
        let ends = (socket, OwnedFd::from(theirs));
        let arguments = [OsStr::new("mirror")];
        process::start_on_sockets(&self.program, &self.reaper, ends, &arguments, Some(Rc::new(held)))?;
        control.write_all(&message).await.map_err(Error::Pipe)?;
        Ok(Serving { _control: control, ended })
    }
}
