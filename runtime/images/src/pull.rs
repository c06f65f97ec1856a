//! PullImage (CRI 2.30). A pull is a task; callers wait for it. A caller with the same reference and the same
//! credentials joins a running pull; a caller that disconnects does not affect other callers. When all
//! callers have disconnected, the pull continues for a grace time, in which a retry can join it; then its
//! worker is killed. Partly downloaded blobs are kept for the next attempt.
//!
//! Steps of the RPC: `cri/pull_image` validates → this module: reference, credentials, join or start →
//! `workers` → publish → reply.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{counters, log, reactor, workers};
use coracle_job::{FailureKind, ImagePolicy, Job, Outcome, Progress, PullJob};
use smol::channel::{Receiver, Sender};

use super::credentials::Auth;
use super::policy_state::VALIDATION_FAILED;
use super::progress::{Import, Pulling, Tracker};
use super::trash::Candidates;
use super::{ImageId, Images, Unpublished, builtin, unexpected};
use coracle_reference::{Reference, Version};
use coracle_sandbox::collect::ordered;

/// Time for which a pull continues without callers: a client that has lost its connection retries within this
/// time.
const ABANDONED_GRACE: Duration = Duration::from_secs(10);

/// Maximum number of pulls, running or queued. A kubelet starts one per pod, at most 110 on a full node.
const PULLS_MAX: usize = 256;

/// Maximum number of callers of one pull.
const WAITERS_MAX: usize = 256;

/// Maximum number of attempts if a part of the image is removed, or the policy is changed, during the pull. More than one retry is
/// needed only if that happens during each attempt.
pub(super) const TRIES_MAX: u32 = 3;

/// The pulls in progress, one for each reference.
pub(super) struct Pulls {
    running: RefCell<Vec<Rc<Running>>>,
    /// Time for which a pull continues without callers: [`ABANDONED_GRACE`], except in tests.
    pub(super) grace: Cell<Duration>,
    /// The running imports.
    pub(super) imports: RefCell<Vec<Rc<Import>>>,
}

impl Default for Pulls {
    fn default() -> Pulls {
        Pulls { running: RefCell::default(), grace: Cell::new(ABANDONED_GRACE), imports: RefCell::default() }
    }
}

impl Pulls {
    /// The progress of all pulls.
    pub(super) fn views(&self, now: Instant) -> Vec<Pulling> {
        self.running.borrow().iter().map(|running| running.tracker.view(&running.reference, now)).collect()
    }

    /// Number of pulls, running or queued.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.running.borrow().len()
    }
}

/// The image of a pull, and the bytes that it moved.
type Answer = Result<(ImageId, Progress), Error>;

struct Running {
    reference: Reference,
    auth: Auth,
    waiters: RefCell<Vec<Sender<Answer>>>,
    /// Notifies the task that a caller disconnected.
    left: Sender<()>,
    tracker: Tracker,
    /// The outcome of the pull in one word, for metrics.
    outcome: Cell<&'static str>,
}

impl Running {
    fn is_abandoned(&self) -> bool {
        self.waiters.borrow().iter().all(Sender::is_closed)
    }
}

/// One caller of a pull. Dropping the value means that the caller has disconnected.
struct Caller {
    answer: Option<Receiver<Answer>>,
    left: Sender<()>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        // The slot is freed before the task is notified, so that the task sees it free. One pending
        // notification is sufficient.
        self.answer = None;
        let _ = self.left.try_send(());
    }
}

/// A worker that writes to the store, in the counter of such workers. When the last one is dropped,
/// incomplete data of killed workers is removed.
pub(super) struct Fill<'a>(&'a Images);

impl<'a> Fill<'a> {
    pub(super) fn start(images: &'a Images) -> Fill<'a> {
        // The operation then fails with the name of what it lacks.
        if let Err(error) = images.disk.make_directories() {
            log::warn!("cannot make the directories of images"; error = error);
        }
        images.measured.fills.set(images.measured.fills.get() + 1);
        Fill(images)
    }
}

impl Drop for Fill<'_> {
    fn drop(&mut self) {
        self.0.measured.fills.set(self.0.measured.fills.get() - 1);
        self.0.measured.filled.set(self.0.measured.filled.get() + 1);
    }
}

impl Images {
    /// The running pulls and imports.
    pub fn pulling(&self) -> Vec<Pulling> {
        let now = Instant::now();
        let mut views = self.pulls.views(now);
        views.extend(self.pulls.imports.borrow().iter().map(|import| import.tracker.view(&import.name, now)));
        views
    }

    /// Pulls `name` and returns the image's ID. An image that is in the store and is given by its digest, and
    /// the built-in image, need no network; a tag is always resolved by its registry.
    ///
    /// # Errors
    /// An invalid reference; malformed credentials; an error of the registry, the network or the disk. If no
    /// endpoint could be reached, the text starts with `RegistryUnavailable:`, which the kubelet parses (CRI
    /// 1.3).
    pub async fn pull(self: &Rc<Self>, name: &str, auth: Auth) -> Result<ImageId, Error> {
        Ok(self.pull_counted(name, auth).await?.0)
    }

    /// Pulls `name` like [`Images::pull`]; returns also the bytes that the pull moved, none for an image that was there.
    ///
    /// # Errors
    /// Those of [`Images::pull`].
    pub async fn pull_counted(self: &Rc<Self>, name: &str, auth: Auth) -> Result<(ImageId, Progress), Error> {
        let reference = Reference::parse(name).map_err(|invalid| {
            Error::new(Kind::InvalidArgument, format!("pull image {name:?}: {invalid}"))
        })?;
        if let Some(id) = self.present(&reference)
            && self.is_accepted(&id, &reference).await.map_err(|error| name_it(error, &reference, ""))?
            // It may have been removed while it was judged.
            && self.present(&reference) == Some(id)
        {
            return Ok((id, Progress::default()));
        }
        // Before a pull is started, so that malformed credentials cost nothing.
        auth.credentials(reference.registry())
            .map_err(|error| error.context(format!("pull image {reference}")))?;
        let pull = self.join_or_start(reference, auth)?;
        let answer = match &pull.answer {
            Some(answer) => answer.recv().await.ok(),
            None => None,
        };
        answer.unwrap_or_else(|| {
            Err(Error::new(Kind::Unavailable, format!("pull image {name}: coracle is shutting down")))
        })
    }

    /// The ID of the image for `reference` if it is known without a request to the registry, and no program has to be asked about each pull.
    fn present(&self, reference: &Reference) -> Option<ImageId> {
        let name = reference.to_string();
        if name == builtin::TAG {
            return Some(builtin::ID);
        }
        match reference.version() {
            _ if self.sources.policy.configured.borrow().verifiers.is_some() => None,
            Version::Digest(_) => self.find(&name).ok().flatten().map(|view| view.id),
            Version::Tag(_) => None,
        }
    }

    fn join_or_start(self: &Rc<Self>, reference: Reference, auth: Auth) -> Result<Caller, Error> {
        let mut all = self.pulls.running.borrow_mut();
        let same = all.iter().find(|running| running.reference == reference && running.auth == auth);
        let running = match same {
            Some(running) => running.clone(),
            None if all.len() >= PULLS_MAX => {
                let text =
                    format!("pull image {reference}: the maximum of {PULLS_MAX} concurrent pulls is reached");
                return Err(Error::new(Kind::ResourceExhausted, text));
            }
            None => {
                let (left, has_left) = smol::channel::bounded(1);
                let running = Rc::new(Running {
                    reference,
                    auth,
                    waiters: RefCell::default(),
                    left,
                    tracker: Tracker::new("pulling image", Instant::now()),
                    outcome: Cell::new("internal"),
                });
                all.push(running.clone());
                reactor::spawn(drive(self.clone(), running.clone(), has_left)).detach();
                running
            }
        };
        drop(all);
        let mut waiters = running.waiters.borrow_mut();
        waiters.retain(|waiter| !waiter.is_closed());
        if waiters.len() >= WAITERS_MAX {
            let text =
                format!("pull image {}: the maximum of {WAITERS_MAX} callers is reached", running.reference);
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        let (sender, answer) = smol::channel::bounded(1);
        waiters.push(sender);
        Ok(Caller { answer: Some(answer), left: running.left.clone() })
    }

    /// Runs workers until the image is published.
    async fn fetch(&self, running: &Running) -> Result<ImageId, Error> {
        let Running { reference, auth, tracker, .. } = running;
        let mut tries = 1;
        loop {
            let credentials = auth.credentials(reference.registry())?;
            let in_force = self.in_force().await.inspect_err(|_| running.outcome.set(REFUSED))?;
            let mut job = self.pull_job(reference, credentials, in_force.policy.clone());
            job.verifiers.clone_from(&in_force.verifiers);
            let mut note = |progress| tracker.note(reference, progress, Instant::now());
            let outcome =
                self.workers.run_reporting(Job::Pull(job), &mut note).await.inspect_err(|error| {
                    running.outcome.set(outcome_of(error));
                })?;
            let Outcome::Pulled(image, signed) = outcome else {
                return Err(unexpected());
            };
            let published = match self.is_in_force(&in_force) {
                true => self.publish(image),
                // Its layers are there: the next attempt judges and downloads little.
                false => Err(Unpublished::Missing("the image policy was changed during the pull".to_owned())),
            };
            match published {
                Ok(id) => {
                    let (progress, since) = (tracker.progress(), tracker.since());
                    log::info!(
                        "image pulled";
                        image = id,
                        name = reference,
                        bytes = progress.bytes_done,
                        fetched = progress.bytes_fetched.saturating_sub(progress.bytes_from_neighbours),
                        neighbours = progress.bytes_from_neighbours,
                        reused = progress.bytes_reused,
                        layers = progress.layers_total,
                        ms = since.as_millis()
                    );
                    for line in signed {
                        log::info!("image accepted by the policy"; image = id, name = reference, rule = line);
                    }
                    return Ok(id);
                }
                Err(Unpublished::Missing(why)) if tries < TRIES_MAX => {
                    log::info!("the image changed during the pull, will retry"; name = reference, reason = why);
                    tries += 1;
                }
                Err(Unpublished::Missing(why)) => return Err(Error::new(Kind::Internal, why)),
                Err(Unpublished::Error(error)) => return Err(error),
            }
        }
    }

    pub(super) fn pull_job(
        &self,
        reference: &Reference,
        credentials: coracle_job::Credentials,
        policy: Option<ImagePolicy>,
    ) -> PullJob {
        let (tag, digest) = match reference.version() {
            Version::Tag(tag) => (tag.clone(), String::new()),
            Version::Digest(digest) => (String::new(), digest.clone()),
        };
        PullJob {
            root: self.disk.root().to_owned(),
            registry: reference.registry().into(),
            repository: reference.repository().into(),
            tag,
            digest,
            registries: self.sources.registries.borrow().clone(),
            credentials,
            limits: self.sources.limits,
            keep_blobs: self.sources.keep_blobs.get(),
            relatives: self.relatives(reference),
            policy,
            verifiers: None,
            remake: None,
        }
    }

    /// The layers of the images with a name in the repository of `reference`, for [`PullJob::relatives`]: the newest image first, and
    /// its upper layers first.
    fn relatives(&self, reference: &Reference) -> Option<Vec<String>> {
        const LAYERS_MAX: usize = 256;
        let repository = format!("{}/{}", reference.registry(), reference.repository());
        let is_relative =
            |name: &String| name.strip_prefix(&repository).is_some_and(|rest| rest.starts_with([':', '@']));
        let index = self.index.borrow();
        let images = index.iter().filter(|entry| entry.tags.iter().chain(&entry.digests).any(is_relative));
        let images: BTreeMap<_, _> = ordered(images.map(|entry| (Reverse(entry.sequence), entry)));
        let mut seen = BTreeSet::new();
        let layers = images.values().flat_map(|entry| entry.layers.iter().rev());
        let layers = layers.filter(|layer| seen.insert(*layer)).map(ToString::to_string).take(LAYERS_MAX);
        self.sources.partial_pulls.get().then(|| layers.collect())
    }

    /// Removes incomplete data of killed workers if no worker writes to the store. If `error` is a full disk,
    /// data that a retry could use is removed, too.
    pub(super) fn sweep_after(&self, error: &Error) {
        if self.measured.fills.get() == 0 {
            let is_full = error.kind() == Kind::ResourceExhausted && self.is_complete();
            self.dispose(if is_full { Candidates::EVERYTHING } else { Candidates::Unfinished });
        }
    }
}

/// Runs one pull from its start until its callers are answered.
async fn drive(images: Rc<Images>, running: Rc<Running>, has_left: Receiver<()>) {
    let fill = Fill::start(&images);
    let fetched = images.fetch(&running);
    let result = smol::future::or(fetched, async {
        abandoned(&running, &has_left, images.pulls.grace.get()).await;
        Err(Error::new(Kind::Cancelled, "all callers disconnected"))
    })
    .await;
    drop(fill);
    images.look_at_registries();
    images.pulls.running.borrow_mut().retain(|other| !Rc::ptr_eq(other, &running));
    let outcome = match &result {
        Ok(_) => "ok",
        Err(error) if error.kind() == Kind::Cancelled => "cancelled",
        Err(_) => running.outcome.get(),
    };
    let progress = running.tracker.progress();
    counters::pull(outcome, &progress);
    if let Err(error) = &result {
        if running.is_abandoned() {
            // Otherwise the callers receive the error, and their calls are logged.
            log::warn!("image not pulled"; image = running.reference, error = error);
        }
        images.sweep_after(error);
    }
    let result = result.map(|id| (id, progress));
    let result = result.map_err(|error| name_it(error, &running.reference, outcome));
    for waiter in running.waiters.take() {
        // Fails if the caller has disconnected.
        let _ = waiter.try_send(result.clone());
    }
}

/// The outcome of a failed pull in one word, for metrics.
fn outcome_of(error: &workers::Error) -> &'static str {
    let workers::Error::Failed(failure) = error else { return "internal" };
    match failure.kind {
        FailureKind::Unavailable => "unavailable",
        FailureKind::RateLimited => "rate_limited",
        FailureKind::Certificate => "certificate",
        FailureKind::NameResolution => "dns",
        FailureKind::Denied => "unauthorized",
        FailureKind::NotFound => "not_found",
        FailureKind::Invalid => "invalid",
        FailureKind::NoSpace => "no_space",
        FailureKind::Signature => REFUSED,
        FailureKind::Plugin | FailureKind::Internal => "internal",
    }
}

/// Returns when the pull has had no callers at the start and at the end of a grace time.
async fn abandoned(running: &Running, has_left: &Receiver<()>, grace: Duration) {
    // It cannot be closed, because `running` has a sender.
    while has_left.recv().await.is_ok() {
        if running.is_abandoned() {
            reactor::sleep(grace).await;
            if running.is_abandoned() {
                return;
            }
        }
    }
}

/// Text before the first colon of a message with code UNKNOWN, which the kubelet parses (CRI 1.3).
const REGISTRY_UNAVAILABLE: &str = "RegistryUnavailable";

/// The outcome of a pull that the policy refused.
const REFUSED: &str = "signature";

/// Adds the reference to the error's text, and the kubelet's prefix to errors of kind [`Kind::Unavailable`],
/// with which workers report unreachable endpoints, and to those of a pull that the policy refused.
fn name_it(error: Error, reference: &Reference, outcome: &str) -> Error {
    let prefix = match error.kind() {
        Kind::Unavailable => Some(REGISTRY_UNAVAILABLE),
        _ if outcome == REFUSED => Some(VALIDATION_FAILED),
        _ => None,
    };
    // The policy itself cannot be read: the prefix is there already.
    if error.message().starts_with(VALIDATION_FAILED) {
        return error;
    }
    let error = error.context(format!("pull image {reference}"));
    prefix.map_or(error.clone(), |prefix| error.context(prefix).with_kind(Kind::Unknown))
}
