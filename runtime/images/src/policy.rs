//! The policy of signatures, which a worker reads with its keys at the start and by SIGHUP. Workers judge; the daemon keeps the policy as
//! bytes, passes it to the jobs that judge, and remembers which images of the store it does not accept. Without a policy nothing of this
//! is kept and no job does more.
//!
//! Guarantees: a policy that cannot be read refuses every pull and import; it is read again until it can be. A reload with a mistake keeps
//! the policy before. What a worker judged by an earlier policy is not published ([`InForce`]).

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use coracle_base::error::Error;
use coracle_base::{log, reactor};
use coracle_job::{ImagePolicy, ImageRecord, Job, JudgeJob, Judged, Outcome};
use coracle_reference::Reference;

use super::index::Found;
use super::policy_state::{InForce, PolicyOptions};
use super::{ImageId, Images, builtin, unexpected};

/// Maximum number of refused images that are named in Status.
const SHOWN_MAX: usize = 8;
/// Maximum number of refused images that are remembered.
const REFUSED_MAX: usize = 64;
/// Pause before the second attempt to read a policy while there is none; each further pause is twice as long, up to a maximum. The medium of
/// the file may be mounted late.
const RETRY_FIRST: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(5 * 60);
/// Interval at which the images of the store are judged again: certificates expire.
const JUDGE_EVERY: Duration = Duration::from_secs(60 * 60);
/// Number of names of images for which a job is full: a worker reports nothing in between, and its answer has a maximum length.
const JUDGED_NAMES_MAX: usize = 100;
/// Maximum number of attempts while images are published.
const JUDGE_TRIES_MAX: u32 = 3;
/// Interval, instead of [`JUDGE_EVERY`], after a failure, and at which it is noticed that the clock of the node was set: it may begin in
/// 1970, or at the time at which the system was built.
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// Minimum time by which the clock was set forward, and not corrected.
const CLOCK_JUMP_MIN: Duration = Duration::from_secs(60 * 60);

impl Images {
    /// Sets the options, reads the policy again, and then judges all images of the store. Returns at once.
    pub fn set_policy(self: &Rc<Self>, options: PolicyOptions) {
        let policy = &self.sources.policy;
        let before = policy.configured.replace(options.clone());
        if before != options {
            self.note_changed_policy();
        }
        if before.file != options.file {
            // What was read is not of this file.
            *policy.read.borrow_mut() = None;
            *policy.mistake.borrow_mut() = None;
            policy.refused.borrow_mut().clear();
        }
        let follow = options.file.map(|path| {
            let images = Rc::clone(self);
            reactor::spawn(async move { images.follow_policy(path).await })
        });
        // Drops, and so ends, the task before.
        policy.task.replace(follow);
        policy.wake();
    }

    /// Records that the policy changed, so that earlier judgements do not count.
    fn note_changed_policy(&self) {
        let generation = &self.sources.policy.generation;
        generation.set(generation.get().wrapping_add(1));
        *self.sources.policy.not_judged.borrow_mut() = Some("the policy is new".to_owned());
        // An archive that was refused may be accepted now.
        self.sources.bundles.look_again();
    }

    /// Reads the policy, and judges the store from time to time. Runs until the next configuration.
    async fn follow_policy(&self, path: PathBuf) {
        let mut pause = RETRY_FIRST;
        while !self.read_policy(&path).await {
            reactor::sleep(pause).await;
            pause = RETRY_MAX.min(pause * 2);
        }
        loop {
            let is_judged = self.judge_all().await;
            let (judged, begun) = (SystemTime::now(), Instant::now());
            let mut is_due = false;
            while !is_due {
                reactor::sleep(CHECK_EVERY).await;
                let expected = judged + begun.elapsed();
                let is_set =
                    SystemTime::now().duration_since(expected).is_ok_and(|ahead| ahead > CLOCK_JUMP_MIN);
                // Certificates that were refused may be valid, and archives that have them are tried again.
                if is_set {
                    self.note_changed_policy();
                }
                is_due = is_set || !is_judged || begun.elapsed() >= JUDGE_EVERY;
            }
        }
    }

    /// Reads the policy. One that has a mistake replaces none that was read before. Returns whether there is a policy.
    async fn read_policy(&self, path: &Path) -> bool {
        let policy = &self.sources.policy;
        let read = match self.workers.run(Job::ReadPolicy { path: path.to_owned() }).await {
            Ok(Outcome::PolicyRead(bytes, unsupported)) => Ok((bytes, unsupported)),
            Ok(_) => Err("unexpected answer of the worker".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        match read {
            Ok((bytes, unsupported)) => {
                for text in unsupported {
                    log::warn!("a rule of the image policy is not supported, its images are refused"; rule = text);
                }
                log::info!("image policy read"; file = path.display());
                *policy.mistake.borrow_mut() = None;
                let is_same = matches!(&*policy.read.borrow(), Some(Ok(known)) if known[..] == bytes[..]);
                if !is_same {
                    *policy.read.borrow_mut() = Some(Ok(bytes.into()));
                    self.note_changed_policy();
                }
            }
            Err(why) => {
                let has_older = matches!(*policy.read.borrow(), Some(Ok(_)));
                let consequence =
                    if has_older { "the one before stays in force" } else { "no image is pulled" };
                let text = format!("{why}: {consequence}");
                if policy.mistake.replace(Some(text.clone())) != Some(text) {
                    log::error!("cannot read the image policy"; error = why, consequence = consequence);
                }
                if !has_older {
                    *policy.read.borrow_mut() = Some(Err(why));
                }
            }
        }
        policy.wake();
        matches!(*policy.read.borrow(), Some(Ok(_)))
    }

    /// The policy for a job. Waits while it is being read for the first time.
    ///
    /// # Errors
    /// The policy cannot be read, so that no image can be accepted.
    pub(super) async fn in_force(&self) -> Result<InForce, Error> {
        let policy = &self.sources.policy;
        loop {
            if let Some(found) = policy.look() {
                return found;
            }
            let (sender, read) = smol::channel::bounded(1);
            policy.waiting.borrow_mut().push(sender);
            // It cannot be closed: the list has a sender, and sends before it drops it.
            let _ = read.recv().await;
        }
    }

    /// Whether a judgement by this policy still counts. The caller must not await between this call and the publication.
    pub(super) fn is_in_force(&self, judged_by: &InForce) -> bool {
        let policy = &self.sources.policy;
        judged_by.generation == policy.generation.get()
            || *policy.configured.borrow() == PolicyOptions::default()
    }

    /// Whether the policy accepts an image of the store under this name, by the signatures that are stored with it.
    ///
    /// # Errors
    /// Those of [`Images::in_force`]; the worker failed.
    pub(super) async fn is_accepted(&self, id: &ImageId, reference: &Reference) -> Result<bool, Error> {
        Ok(self.refusal(id, reference).await?.is_none())
    }

    /// The reason why the policy does not accept an image of the store under this name; `None`: it does. The policy is the one in force
    /// when the answer comes.
    ///
    /// # Errors
    /// Those of [`Images::is_accepted`].
    pub(super) async fn refusal(&self, id: &ImageId, reference: &Reference) -> Result<Option<String>, Error> {
        loop {
            let in_force = self.in_force().await?;
            let Some(policy) = in_force.policy.clone().filter(|_| *id != builtin::ID) else {
                return Ok(None);
            };
            let judged = self.judge(policy, vec![(id.to_string(), vec![reference.to_string()])]).await?;
            if self.is_in_force(&in_force) {
                return Ok(judged.into_iter().find_map(|judged| judged.judgement.err()));
            }
        }
    }

    /// Judges all names of all images of the store by the signatures that are stored with them; `None`: there is no policy.
    ///
    /// # Errors
    /// Those of `Images::in_force`; the worker failed.
    pub async fn judged(&self) -> Result<Option<Vec<Judged>>, Error> {
        let Some(policy) = self.in_force().await?.policy else { return Ok(None) };
        let mut judged = Vec::new();
        for images in self.to_judge() {
            judged.extend(self.judge(policy.clone(), images).await?);
        }
        Ok(Some(judged))
    }

    /// The images of the store with their names, in groups of one job each.
    fn to_judge(&self) -> Vec<Vec<(String, Vec<String>)>> {
        let (mut jobs, mut room) = (Vec::<Vec<_>>::new(), 0);
        for entry in self.index.borrow().iter().filter(|entry| entry.id != builtin::ID) {
            let (id, mut names) = (entry.id.to_string(), [&entry.tags[..], &entry.digests].concat());
            if names.is_empty() {
                names.push(id.clone());
            }
            let count = names.len();
            match jobs.last_mut().filter(|_| room > 0) {
                Some(job) => job.push((id, names)),
                None => {
                    room = JUDGED_NAMES_MAX;
                    jobs.push(vec![(id, names)]);
                }
            }
            room = room.saturating_sub(count);
        }
        jobs
    }

    async fn judge(
        &self,
        policy: ImagePolicy,
        images: Vec<(String, Vec<String>)>,
    ) -> Result<Vec<Judged>, Error> {
        let job = JudgeJob { root: self.disk.root().to_owned(), policy, images };
        match self.workers.run(Job::Judge(job)).await.map_err(Error::from) {
            Ok(Outcome::Judged(judged)) => Ok(judged),
            Ok(_) => Err(unexpected()),
            Err(error) => Err(error.context("judge the images of the store")),
        }
    }

    /// Remembers which images of the store the policy does not accept, for Status. One that was known is not logged again. Returns whether
    /// all were judged.
    async fn judge_all(&self) -> bool {
        let mut judged = Vec::new();
        for _ in 0..JUDGE_TRIES_MAX {
            let before = self.index.borrow().sequence();
            judged = match self.judged().await {
                Ok(judged) => judged.unwrap_or_default(),
                Err(error) => {
                    log::warn!("cannot check the images of the store against the policy, will retry"; error = error);
                    *self.sources.policy.not_judged.borrow_mut() = Some(error.to_string());
                    return false;
                }
            };
            // An image that was published meanwhile may be one of those that were refused.
            if self.index.borrow().sequence() == before {
                break;
            }
        }
        let refused =
            judged.iter().filter_map(|judged| Some((&judged.name, judged.judgement.as_ref().err()?)));
        let refused: Vec<_> = refused.take(REFUSED_MAX).collect();
        let known =
            self.sources.policy.refused.replace(refused.iter().map(|(name, _)| (*name).clone()).collect());
        for (name, why) in refused.into_iter().filter(|(name, _)| !known.contains(name)) {
            log::warn!("the image policy does not accept an image of the store"; image = name, reason = why);
        }
        *self.sources.policy.not_judged.borrow_mut() = None;
        true
    }

    /// The names of an image that were refused before; the image is about to be published, and was judged for that.
    pub(super) fn refused_before(&self, image: &ImageRecord) -> Vec<String> {
        let is_of_image =
            |name: &&String| **name == image.id || image.tags.contains(name) || image.digests.contains(name);
        self.sources.policy.refused.borrow().iter().filter(is_of_image).cloned().collect()
    }

    /// Removes names from the refused ones, because their image was accepted and published.
    pub(super) fn note_accepted(&self, names: &[String]) {
        if !names.is_empty() {
            self.sources.policy.refused.borrow_mut().retain(|name| !names.contains(name));
        }
    }

    /// The reason and a text about a policy that cannot be read, or images of the store that it does not accept or that were not judged by
    /// it; `None`: there is no policy, or nothing is wrong.
    pub fn policy_trouble(&self) -> Option<(&'static str, String)> {
        let policy = &self.sources.policy;
        if let Some(mistake) = &*policy.mistake.borrow() {
            return Some(("BrokenPolicy", mistake.clone()));
        }
        if let Some(why) = &*policy.not_judged.borrow() {
            return Some(("NotJudged", format!("the images of the store are not judged yet: {why}")));
        }
        let (refused, index) = (policy.refused.borrow(), self.index.borrow());
        let is_there = |name: &&String| matches!(index.find(name), Ok(Found::One(_)));
        let names: Vec<&str> = refused.iter().filter(is_there).map(String::as_str).collect();
        let shown = &names[..names.len().min(SHOWN_MAX)];
        let more = if names.len() > SHOWN_MAX { ", and more" } else { "" };
        (!names.is_empty()).then(|| {
            let text = format!(
                "the policy does not accept, by what is stored with them: {}{more}",
                shown.join(", ")
            );
            ("RefusedImages", text)
        })
    }

    /// Whether there is a policy.
    pub fn has_policy(&self) -> bool {
        self.sources.policy.configured.borrow().file.is_some()
    }
}
