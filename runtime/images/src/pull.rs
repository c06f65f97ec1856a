//! PullImage (CRI 2.30). A pull is a task of its own; callers wait for it. Whoever asks for the same reference with
//! the same credentials meanwhile joins; whoever goes away leaves the others undisturbed; when all are gone, the pull gets
//! a grace time in which a retry can take it up again, and then its worker is killed. Parts of blobs stay for the next
//! try.
//!
//! Table of the RPC: `cri/pull_image` validates → here: reference, credentials, join or start → `workers` → publish → reply.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::reactor;
use coracle_job::{Job, Outcome, PullJob};
use smol::channel::{Receiver, Sender};

use super::credentials::Auth;
use super::pulling::{Pulling, Tracker};
use super::reference::{Reference, Version};
use super::trash::Candidates;
use super::{ImageId, Images, Unpublished, builtin};

/// How long a pull runs on when nobody waits for it: a client that was cut off is back within this, and a download that
/// nobody wants costs no more than this.
const ABANDONED_GRACE: Duration = Duration::from_secs(10);

/// Different pulls at once, running or in the queue. A kubelet starts as many as pods it has to start, 110 on a full node.
const PULLS_MAX: usize = 256;

/// Callers of one pull.
const WAITERS_MAX: usize = 256;

/// How often a pull starts over because something it counted on was thrown away meanwhile. Twice takes two removals, each
/// timed to one pull of one image.
const TRIES_MAX: u32 = 3;

/// The pulls under way.
pub(super) struct Pulls {
    running: RefCell<Vec<Rc<Running>>>,
    /// [`ABANDONED_GRACE`], but for tests.
    pub(super) grace: Cell<Duration>,
}

impl Default for Pulls {
    fn default() -> Pulls {
        Pulls { running: RefCell::default(), grace: Cell::new(ABANDONED_GRACE) }
    }
}

impl Pulls {
    /// How far each is.
    pub(super) fn views(&self, now: Instant) -> Vec<Pulling> {
        self.running.borrow().iter().map(|running| running.tracker.view(&running.reference, now)).collect()
    }

    /// How many run or wait for a place.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.running.borrow().len()
    }
}

struct Running {
    reference: Reference,
    auth: Auth,
    waiters: RefCell<Vec<Sender<Result<ImageId, Error>>>>,
    /// Tells the task that a waiter left.
    left: Sender<()>,
    tracker: Tracker,
}

impl Running {
    fn is_abandoned(&self) -> bool {
        self.waiters.borrow().iter().all(Sender::is_closed)
    }
}

/// A caller's place. Dropping it is leaving.
struct Place {
    answer: Option<Receiver<Result<ImageId, Error>>>,
    left: Sender<()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // First the place is given up, so that the task, once told, sees it empty. A signal that waits already is enough.
        self.answer = None;
        let _ = self.left.try_send(());
    }
}

/// A worker that fills the store, as long as this lives; the last one to end sees to what killed ones left.
pub(super) struct Fill<'a>(&'a Images);

impl<'a> Fill<'a> {
    pub(super) fn start(images: &'a Images) -> Fill<'a> {
        images.fills.set(images.fills.get() + 1);
        Fill(images)
    }
}

impl Drop for Fill<'_> {
    fn drop(&mut self) {
        self.0.fills.set(self.0.fills.get() - 1);
        self.0.filled.set(self.0.filled.get() + 1);
    }
}

impl Images {
    /// The pulls under way.
    pub fn pulling(&self) -> Vec<Pulling> {
        self.pulls.views(Instant::now())
    }

    /// Pulls `name` and gives the image's id. A digest that is here already, and the built-in image, need no network; a
    /// tag is always asked for at its registry.
    ///
    /// # Errors
    /// Not a reference; malformed credentials; what the registry, the network or the disk said. Where no endpoint could
    /// be reached the text starts with `RegistryUnavailable:`, which a kubelet parses (CRI 1.3).
    pub async fn pull(self: &Rc<Self>, name: &str, auth: Auth) -> Result<ImageId, Error> {
        let reference = Reference::parse(name).map_err(|invalid| {
            Error::new(Kind::InvalidArgument, format!("pull image {name:?}: {invalid}"))
        })?;
        if let Some(id) = self.present(&reference) {
            return Ok(id);
        }
        // Before anyone waits, so that a malformed one costs nothing.
        auth.credentials(reference.registry())
            .map_err(|error| error.context(format!("pull image {reference}")))?;
        let place = self.join_or_start(reference, auth)?;
        let answer = match &place.answer {
            Some(answer) => answer.recv().await.ok(),
            None => None,
        };
        answer.unwrap_or_else(|| {
            Err(Error::new(Kind::Unavailable, format!("pull image {name}: coracle is stopping")))
        })
    }

    /// The image that `reference` means whatever its registry says.
    fn present(&self, reference: &Reference) -> Option<ImageId> {
        let name = reference.to_string();
        if name == builtin::TAG {
            return Some(builtin::ID);
        }
        match reference.version() {
            Version::Digest(_) => self.find(&name).ok().flatten().map(|view| view.id),
            Version::Tag(_) => None,
        }
    }

    fn join_or_start(self: &Rc<Self>, reference: Reference, auth: Auth) -> Result<Place, Error> {
        let mut all = self.pulls.running.borrow_mut();
        let same = all.iter().find(|running| running.reference == reference && running.auth == auth);
        let running = match same {
            Some(running) => running.clone(),
            None if all.len() >= PULLS_MAX => {
                let text = format!("pull image {reference}: {PULLS_MAX} other pulls are under way");
                return Err(Error::new(Kind::ResourceExhausted, text));
            }
            None => {
                let (left, has_left) = smol::channel::bounded(1);
                let running = Rc::new(Running {
                    reference,
                    auth,
                    waiters: RefCell::default(),
                    left,
                    tracker: Tracker::new(Instant::now()),
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
            let text = format!("pull image {}: {WAITERS_MAX} callers wait for it already", running.reference);
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        let (sender, answer) = smol::channel::bounded(1);
        waiters.push(sender);
        Ok(Place { answer: Some(answer), left: running.left.clone() })
    }

    /// Runs workers until the image is published.
    async fn fetch(&self, running: &Running) -> Result<ImageId, Error> {
        let Running { reference, auth, tracker, .. } = running;
        let mut tries = 1;
        loop {
            let credentials = auth.credentials(reference.registry())?;
            let job = self.job(reference, credentials);
            let note = |progress| tracker.note(reference, progress, Instant::now());
            let outcome = self.workers.run_reporting(job, note).await?;
            let Outcome::Pulled(image) = outcome else {
                return Err(Error::new(Kind::Internal, "the worker did another job"));
            };
            match self.publish(image) {
                Ok(id) => {
                    let (progress, since) = (tracker.progress(), tracker.since());
                    log::info!(
                        "image pulled";
                        image = id,
                        name = reference,
                        bytes = progress.bytes_done,
                        fetched = progress.bytes_fetched,
                        layers = progress.layers_total,
                        ms = since.as_millis()
                    );
                    return Ok(id);
                }
                Err(Unpublished::Missing(why)) if tries < TRIES_MAX => {
                    log::info!("image was removed while it was pulled: once more"; name = reference, reason = why);
                    tries += 1;
                }
                Err(Unpublished::Missing(why)) => return Err(Error::new(Kind::Internal, why)),
                Err(Unpublished::Error(error)) => return Err(error),
            }
        }
    }

    fn job(&self, reference: &Reference, credentials: coracle_job::Credentials) -> Job {
        let (tag, digest) = match reference.version() {
            Version::Tag(tag) => (tag.clone(), String::new()),
            Version::Digest(digest) => (String::new(), digest.clone()),
        };
        Job::Pull(PullJob {
            root: self.disk.root().to_owned(),
            registry: reference.registry().into(),
            repository: reference.repository().into(),
            tag,
            digest,
            registries: self.registries.borrow().clone(),
            credentials,
            limits: self.limits,
            keep_blobs: self.keep_blobs.get(),
        })
    }

    /// Once no worker fills the store, throws away what killed ones left unfinished in it; on a full disk also what the next
    /// try could have used.
    pub(super) fn sweep_after(&self, error: &Error) {
        if self.fills.get() == 0 {
            let is_full = error.kind() == Kind::ResourceExhausted && self.is_complete();
            self.dispose(if is_full { Candidates::EVERYTHING } else { Candidates::Unfinished });
        }
    }
}

/// One pull, from start to answer.
async fn drive(images: Rc<Images>, running: Rc<Running>, has_left: Receiver<()>) {
    let fill = Fill::start(&images);
    let fetched = images.fetch(&running);
    let result = smol::future::or(fetched, async {
        abandoned(&running, &has_left, images.pulls.grace.get()).await;
        Err(Error::new(Kind::Cancelled, "nobody waited for it any more"))
    })
    .await;
    drop(fill);
    images.look_at_registries();
    images.pulls.running.borrow_mut().retain(|other| !Rc::ptr_eq(other, &running));
    if let Err(error) = &result {
        if running.is_abandoned() {
            // Else whoever waits is told.
            log::info!("image not pulled"; name = running.reference, error = error);
        }
        images.sweep_after(error);
    }
    let result = result.map_err(|error| name_it(error, &running.reference));
    for waiter in running.waiters.take() {
        // Whoever left does not hear it.
        let _ = waiter.try_send(result.clone());
    }
}

/// Ends once nobody waited at the beginning and at the end of a grace time.
async fn abandoned(running: &Running, has_left: &Receiver<()>, grace: Duration) {
    // It cannot be closed: `running` holds a sender.
    while has_left.recv().await.is_ok() {
        if running.is_abandoned() {
            reactor::sleep(grace).await;
            if running.is_abandoned() {
                return;
            }
        }
    }
}

/// What a kubelet reads in the text before the first colon of a message of code UNKNOWN (CRI 1.3).
const REGISTRY_UNAVAILABLE: &str = "RegistryUnavailable";

/// Says which pull failed; [`Kind::Unavailable`] is a worker's word for endpoints that do not answer.
fn name_it(error: Error, reference: &Reference) -> Error {
    let is_unavailable = error.kind() == Kind::Unavailable;
    let error = error.context(format!("pull image {reference}"));
    if is_unavailable { error.context(REGISTRY_UNAVAILABLE).with_kind(Kind::Unknown) } else { error }
}
