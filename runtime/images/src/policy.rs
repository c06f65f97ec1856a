//! The rules for images: the policy of signatures, which a worker reads with its keys at the start and by SIGHUP, and verifier programs.
//! Workers judge; the daemon keeps the policy as bytes, passes it to the jobs that judge, and remembers which images of the store a pull
//! would refuse. Without rules nothing of this is kept and no job does more.
//!
//! A policy that cannot be read refuses every pull and import, until it can be read. A reload with a mistake keeps the policy before.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_job::{ImagePolicy, Job, JudgeJob, Judged, Outcome, Verifiers};

use super::index::Found;
use super::reference::Reference;
use super::{ImageId, Images, builtin};

/// Beginning of the text of a refused pull, with code UNKNOWN, which the kubelet parses (CRI 1.3).
pub(super) const VALIDATION_FAILED: &str = "SignatureValidationFailed";

/// Maximum number of refused images that are named in Status.
const SHOWN_MAX: usize = 8;
/// Maximum number of refused images that are remembered.
const REFUSED_MAX: usize = 64;

/// The configured rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Path of the policy of signatures; `None`: there is none.
    pub file: Option<PathBuf>,
    /// Programs that judge each image; `None`: there are none.
    pub verifiers: Option<Verifiers>,
    /// The day by which certificates are judged at least; empty: none.
    pub minimum_time: String,
}

impl Rules {
    fn is_empty(&self) -> bool {
        self.file.is_none() && self.verifiers.is_none()
    }
}

/// The rules in force.
#[derive(Default)]
pub(super) struct Policy {
    configured: RefCell<Rules>,
    /// The policy with its keys, or the mistake; `None`: it was not read yet, or there is none.
    read: RefCell<Option<Result<Rc<[u8]>, String>>>,
    /// The mistake of the last reload, while the policy before is in force.
    mistake: RefCell<Option<String>>,
    /// Names of images that were in the store when they were judged, and that a pull would refuse.
    refused: RefCell<Vec<String>>,
}

impl Images {
    /// Sets the rules, reads the policy again, and then judges all images of the store. Returns at once.
    pub fn set_rules(self: &Rc<Self>, rules: Rules) {
        let policy = &self.sources.policy;
        let was_empty = policy.configured.borrow().is_empty();
        if rules.is_empty() {
            *policy.configured.borrow_mut() = rules;
            *policy.read.borrow_mut() = None;
            *policy.mistake.borrow_mut() = None;
            return policy.refused.borrow_mut().clear();
        }
        // The policy of another file is none of these rules.
        if was_empty || policy.configured.borrow().file != rules.file {
            *policy.read.borrow_mut() = None;
        }
        *policy.configured.borrow_mut() = rules;
        let images = Rc::clone(self);
        reactor::spawn(async move {
            images.read_policy().await;
            images.judge_all().await;
        })
        .detach();
    }

    /// Reads the policy. One that has a mistake replaces none that was read before.
    async fn read_policy(&self) {
        let policy = &self.sources.policy;
        let Some(path) = policy.configured.borrow().file.clone() else { return };
        let read = match self.workers.run(Job::ReadPolicy { path: path.clone() }, |_, _| {}).await {
            Ok(Outcome::PolicyRead(bytes, unsupported)) => Ok((bytes, unsupported)),
            Ok(_) => Err("unexpected answer of the worker".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        // Another reload may have named another file meanwhile.
        if policy.configured.borrow().file.as_ref() != Some(&path) {
            return;
        }
        match read {
            Ok((bytes, unsupported)) => {
                for text in unsupported {
                    log::warn!("a rule of the image policy is not supported, its images are refused"; rule = text);
                }
                log::info!("image policy read"; file = path.display());
                *policy.mistake.borrow_mut() = None;
                *policy.read.borrow_mut() = Some(Ok(bytes.into()));
            }
            Err(why) => {
                let has_older = matches!(*policy.read.borrow(), Some(Ok(_)));
                let consequence =
                    if has_older { "the one before stays in force" } else { "no image is pulled" };
                log::error!("cannot read the image policy"; error = why, consequence = consequence);
                *policy.mistake.borrow_mut() = Some(format!("{why}: {consequence}"));
                if !has_older {
                    *policy.read.borrow_mut() = Some(Err(why));
                }
            }
        }
    }

    /// The rules for a job; `None`: there are none.
    ///
    /// # Errors
    /// The policy cannot be read, so that no image can be accepted.
    pub(super) async fn rules(&self) -> Result<Option<ImagePolicy>, Error> {
        let policy = &self.sources.policy;
        if policy.configured.borrow().is_empty() {
            return Ok(None);
        }
        if policy.configured.borrow().file.is_some() && policy.read.borrow().is_none() {
            self.read_policy().await;
        }
        let configured = policy.configured.borrow().clone();
        let signatures = match (&configured.file, policy.read.borrow().as_ref()) {
            (None, _) => None,
            (Some(_), Some(Ok(bytes))) => Some(bytes.to_vec()),
            (Some(_), Some(Err(why))) => return Err(refused(why)),
            (Some(_), None) => return Err(refused("the image policy is being replaced, try again")),
        };
        Ok(Some(ImagePolicy {
            signatures,
            verifiers: configured.verifiers,
            minimum_time: configured.minimum_time,
        }))
    }

    /// Whether the rules accept an image of the store under this name, by the signatures that are stored with it.
    ///
    /// # Errors
    /// Those of [`Images::rules`].
    pub(super) async fn is_accepted(&self, id: &ImageId, reference: &Reference) -> Result<bool, Error> {
        let Some(policy) = self.rules().await?.filter(|_| *id != builtin::ID) else { return Ok(true) };
        let judged = self.judge(policy, vec![(id.to_string(), vec![reference.to_string()])]).await?;
        Ok(judged.iter().all(|judged| judged.judgement.is_ok()))
    }

    /// Judges all names of all images of the store by the signatures that are stored with them; `None`: there are no rules.
    ///
    /// # Errors
    /// Those of [`Images::rules`]; the worker failed.
    pub async fn judged(&self) -> Result<Option<Vec<Judged>>, Error> {
        let Some(policy) = self.rules().await? else { return Ok(None) };
        let images = {
            let index = self.index.borrow();
            let named = index.iter().filter(|entry| entry.id != builtin::ID).map(|entry| {
                let names = if entry.tags.is_empty() { &entry.digests } else { &entry.tags };
                (entry.id.to_string(), names.clone())
            });
            named.collect()
        };
        self.judge(policy, images).await.map(Some)
    }

    async fn judge(
        &self,
        policy: ImagePolicy,
        images: Vec<(String, Vec<String>)>,
    ) -> Result<Vec<Judged>, Error> {
        let job = JudgeJob { root: self.disk.root().to_owned(), policy, images };
        match self.workers.run(Job::Judge(job), |_, _| {}).await.map_err(Error::from) {
            Ok(Outcome::Judged(judged)) => Ok(judged),
            Ok(_) => Err(Error::new(Kind::Internal, "unexpected answer of the worker")),
            Err(error) => Err(error.context("judge the images of the store")),
        }
    }

    /// Remembers which images of the store a pull would refuse, for Status.
    async fn judge_all(&self) {
        let judged = match self.judged().await {
            Ok(judged) => judged.unwrap_or_default(),
            Err(error) => {
                log::warn!("cannot judge the images of the store"; error = error);
                return;
            }
        };
        let refused = || judged.iter().filter(|judged| judged.judgement.is_err());
        for judged in refused().take(REFUSED_MAX) {
            let why = judged.judgement.as_ref().err().map_or("", String::as_str);
            log::warn!("the image policy would refuse an image of the store"; image = judged.name, reason = why);
        }
        let names = refused().take(REFUSED_MAX).map(|judged| judged.name.clone()).collect();
        *self.sources.policy.refused.borrow_mut() = names;
    }

    /// Judges all images again after some were imported, or one was refused before. Returns at once.
    pub(super) fn judge_again(self: &Rc<Self>) {
        if self.sources.policy.configured.borrow().is_empty() {
            return;
        }
        let images = Rc::clone(self);
        reactor::spawn(async move { images.judge_all().await }).detach();
    }

    /// Whether Status says of an image with this name that a pull would refuse it.
    pub(super) fn is_refused(&self, name: &str) -> bool {
        self.sources.policy.refused.borrow().iter().any(|refused| refused == name)
    }

    /// The reason and a text about a policy that cannot be read, or images of the store that it would refuse; `None`: there are no
    /// rules, or nothing is wrong.
    pub fn policy_trouble(&self) -> Option<(&'static str, String)> {
        let policy = &self.sources.policy;
        if let Some(mistake) = &*policy.mistake.borrow() {
            return Some(("BrokenPolicy", mistake.clone()));
        }
        let (refused, index) = (policy.refused.borrow(), self.index.borrow());
        let is_there = |name: &&String| matches!(index.find(name), Ok(Found::One(_)));
        let names: Vec<&str> = refused.iter().filter(is_there).map(String::as_str).collect();
        let shown = &names[..names.len().min(SHOWN_MAX)];
        let more = if names.len() > SHOWN_MAX { ", and more" } else { "" };
        (!names.is_empty()).then(|| {
            let text = format!("the store has images that a pull would refuse: {}{more}", shown.join(", "));
            ("RefusedImages", text)
        })
    }

    /// Whether there are rules for images.
    pub fn has_rules(&self) -> bool {
        !self.sources.policy.configured.borrow().is_empty()
    }
}

/// The error of a pull or an import without a policy that can be applied.
fn refused(why: impl std::fmt::Display) -> Error {
    Error::new(Kind::FailedPrecondition, why.to_string()).context(VALIDATION_FAILED).with_kind(Kind::Unknown)
}
