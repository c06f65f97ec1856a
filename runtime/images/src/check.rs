//! `coracle image check`: workers verify all parts of all images and repair what is possible; images with
//! other defects are removed, so that a pull restores them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_job::{CheckJob, CheckedParts, Finding, ImageRecord, Job, Outcome, PullJob, Remake, Severity};
use coracle_reference::Reference;

use super::credentials::Auth;
use super::disk::is_absent;
use super::index::LayerName;
use super::pull::Fill;
use super::trash::Candidates;
use super::{ImageId, Images, builtin, unexpected};

/// The result of the verification of an image.
pub enum Checked {
    /// No damage was found, or all damage was repaired.
    Whole {
        /// Names of the repaired parts of the image.
        repaired: Vec<String>,
        /// Number of layers that could be read, but not compared, because they have neither a list nor a blob.
        not_compared: u32,
    },
    /// The image has these defects and was kept.
    Broken(Vec<String>),
    /// The image has these defects and was removed.
    Dropped(Vec<String>),
}

impl Images {
    /// IDs of the images that can be verified, with their names.
    pub fn checkable(&self) -> Vec<(ImageId, String)> {
        let index = self.index.borrow();
        let entries = index.iter().filter(|entry| entry.id != builtin::ID);
        entries.map(|entry| (entry.id, entry.name())).collect()
    }

    /// Verifies one image; with `repair`, also repairs or removes it.
    ///
    /// # Errors
    /// The image could not be verified, because it was removed or the disk is full.
    pub async fn check(self: &Rc<Self>, id: &ImageId, repair: bool) -> Result<Checked, Error> {
        let is_repaired = |findings: &[Finding]| findings.iter().all(|finding| finding.is_repaired);
        let (mut findings, not_compared) = self.check_parts(id, CheckedParts::All, repair).await?;
        if repair && !is_repaired(&findings) && findings.iter().any(|finding| finding.is_repaired) {
            // With its layers repaired, other parts may be repaired or right, too.
            findings.retain(|finding| finding.is_repaired);
            findings.extend(self.check_parts(id, CheckedParts::All, true).await?.0);
        }
        let is_whole = is_repaired(&findings);
        let keeps_image =
            findings.iter().all(|finding| finding.is_repaired || finding.severity != Severity::Damaged);
        let is_kept = !repair || keeps_image || image_is_held(self, id);
        let findings = findings.into_iter().map(|finding| finding.what).collect();
        Ok(match (is_whole, is_kept) {
            (true, _) => Checked::Whole { repaired: findings, not_compared },
            (false, true) => Checked::Broken(findings),
            (false, false) => {
                self.remove(&id.to_string())?;
                Checked::Dropped(findings)
            }
        })
    }

    /// Verifies parts of an image; with `repair`, damaged layers are made again of their blobs, or by a pull, and replaced.
    pub(super) async fn check_parts(
        self: &Rc<Self>,
        id: &ImageId,
        parts: CheckedParts,
        repair: bool,
    ) -> Result<(Vec<Finding>, u32), Error> {
        let image = self.disk.read_unchecked(id)?.image;
        // Also if the check is cancelled.
        let made = Made { images: self, into: self.garbage.trash.new_directory(&self.disk.layers()) };
        // Until the layers are in their places, so that no sweep removes what is in the directory.
        let fill = Fill::start(self);
        let checked = self.check_into(&image, parts, repair, &made.into).await;
        drop(fill);
        drop(made);
        if let Err(error) = &checked {
            self.sweep_after(error);
        }
        checked
    }

    async fn check_into(
        self: &Rc<Self>,
        image: &ImageRecord,
        parts: CheckedParts,
        repair: bool,
        into: &Path,
    ) -> Result<(Vec<Finding>, u32), Error> {
        let job = CheckJob {
            root: self.disk.root().to_owned(),
            image: image.clone(),
            limits: self.sources.limits,
            parts: parts.clone(),
            repair,
            into: into.to_owned(),
        };
        let (mut findings, not_compared) = self.run_check(job).await?;
        for layer in image.layers.iter().filter(|layer| parts.have(&layer.name)) {
            let found = findings.iter().find(|finding| finding.layer == layer.name);
            let is_known = found.is_none_or(|finding| finding.severity != Severity::NotChecked);
            if let (true, Ok(name)) = (is_known, layer.name.parse()) {
                self.hear(name, found.map(|finding| finding.damage().to_owned()));
            }
        }
        // Those of additional stores are only read.
        let is_ours = |layer: &String| layer.parse().is_ok_and(|layer| self.disk.link(&layer).is_none());
        let damaged = findings.iter().filter(|finding| finding.severity != Severity::NotChecked);
        let damaged: Vec<String> = damaged.map(|finding| finding.layer.clone()).filter(is_ours).collect();
        let remake = Remake { layers: damaged, into: into.to_owned() };
        if repair
            && remake.layers.iter().any(|layer| remake.lacks(layer))
            && let Err(error) = self.pull_again(&remake).await
        {
            log::warn!("damaged layers cannot be pulled"; image = image.id, error = error);
        }
        for finding in &mut findings {
            if let (true, Ok(layer)) = (repair, finding.layer.parse::<LayerName>()) {
                let new = into.join(&finding.layer);
                // A directory that cannot be examined fails the replacement, with the reason.
                let replaced =
                    if is_absent(&new) { Ok(false) } else { self.replace(&layer, &new).map(|()| true) };
                finding.is_repaired = replaced.unwrap_or_else(|error| {
                    finding.what += &format!("; not replaced: {error}");
                    finding.severity = Severity::MayBeWhole;
                    false
                });
            }
            let message = match finding.severity {
                Severity::NotChecked => "part of an image is not checked",
                Severity::Damaged | Severity::MayBeWhole => "image is damaged",
            };
            log::warn!(message; image = image.id, part = finding.what, repaired = finding.is_repaired);
        }
        Ok((findings, not_compared))
    }

    /// Pulls layers again, by the digests of all images that have some of them. Names and images stay as they are.
    async fn pull_again(&self, remake: &Remake) -> Result<(), Error> {
        let is_wanted = |layer: &LayerName| remake.lacks(&layer.to_string());
        let names: Vec<String> = {
            let index = self.index.borrow();
            let images = index.iter().filter(|entry| entry.layers.iter().any(is_wanted));
            images.flat_map(|entry| entry.digests.clone()).collect()
        };
        let mut outcome = Err(Error::new(Kind::NotFound, "no image with it has a digest of a registry"));
        let mut unavailable = BTreeSet::new();
        for name in names {
            let reference =
                Reference::parse(&name).map_err(|invalid| Error::new(Kind::Internal, invalid.to_string()))?;
            if unavailable.contains(reference.registry()) {
                continue;
            }
            let pulled = async {
                let credentials = Auth::default().credentials(reference.registry())?;
                let job =
                    PullJob { remake: Some(remake.clone()), ..self.pull_job(&reference, credentials, None) };
                self.workers.run(Job::Pull(job)).await.map_err(Error::from)
            };
            outcome = pulled.await.map(drop).map_err(|error| {
                if error.kind() == Kind::Unavailable {
                    unavailable.insert(reference.registry().to_owned());
                }
                error.context(format!("pull {name}"))
            });
            if !remake.layers.iter().any(|layer| remake.lacks(layer)) {
                return Ok(());
            }
        }
        outcome
    }

    /// Copies the image's files of users again from its layers.
    pub(super) async fn repair_users(self: &Rc<Self>, id: &ImageId) -> Result<(), Error> {
        self.check_parts(id, CheckedParts::Users, true).await.map(drop)
    }

    async fn run_check(&self, job: CheckJob) -> Result<(Vec<Finding>, u32), Error> {
        match self.workers.run(Job::Check(job)).await? {
            Outcome::Checked { findings, not_compared } => Ok((findings, not_compared)),
            _ => Err(unexpected()),
        }
    }
}

/// The directory of layers that are made again, which is removed on drop.
struct Made<'a> {
    images: &'a Images,
    into: PathBuf,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // At the daemon's end there is no task for it; the next start removes the directory.
        if reactor::is_running() {
            self.images.dispose(Candidates::Path(self.into.clone()));
        }
    }
}

/// Whether a container uses a layer of the image, which then stays, or may use it.
fn image_is_held(images: &Images, id: &ImageId) -> bool {
    let index = images.index.borrow();
    images.garbage.keeps_everything.get()
        || index.get(id).is_some_and(|entry| index.in_use().any(|layer| entry.layers.contains(&layer)))
}
