//! `coracle image check`: workers verify all parts of all images and repair what is possible; images with
//! other defects are removed, so that a pull restores them.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_job::{CheckJob, CheckedParts, Finding, Job, Outcome};

use super::pull::Fill;
use super::{ImageId, Images, builtin};

/// The result of the verification of an image.
pub enum Checked {
    /// No damage was found, or all damage was repaired.
    Whole {
        /// Names of the repaired parts of the image.
        repaired: Vec<String>,
        /// Number of layers that could be read, but not compared, because their blobs were not kept.
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
        let name = |entry: &super::Entry| entry.tags.first().or(entry.digests.first()).cloned();
        entries.map(|entry| (entry.id, name(entry).unwrap_or_else(|| entry.id.to_string()))).collect()
    }

    /// Verifies one image; with `repair`, also repairs or removes it.
    ///
    /// # Errors
    /// The image could not be verified, because it was removed or the disk is full.
    pub async fn check(self: &Rc<Self>, id: &ImageId, repair: bool) -> Result<Checked, Error> {
        let image = self.disk.read_unchecked(id)?.image;
        let in_use = self.index.borrow().in_use().map(|layer| layer.to_string()).collect();
        let fill = Fill::start(self);
        let job = CheckJob {
            root: self.disk.root().to_owned(),
            image,
            limits: self.sources.limits,
            parts: CheckedParts::All,
            repair,
            in_use,
        };
        let checked = self.run_check(job).await;
        drop(fill);
        let (findings, not_compared) = checked?;
        let is_whole = findings.iter().all(|finding| finding.is_repaired);
        let is_held = image_is_held(self, id);
        for finding in &findings {
            log::warn!("image is damaged"; image = id, part = finding.what, repaired = finding.is_repaired);
        }
        let findings = findings.into_iter().map(|finding| finding.what).collect();
        Ok(match (is_whole, repair && !is_held) {
            (true, _) => Checked::Whole { repaired: findings, not_compared },
            (false, false) => Checked::Broken(findings),
            (false, true) => {
                self.remove(&id.to_string())?;
                Checked::Dropped(findings)
            }
        })
    }

    /// Copies the image's files of users again from its layers.
    pub(super) async fn repair_users(&self, id: &ImageId) -> Result<(), Error> {
        let job = CheckJob {
            root: self.disk.root().to_owned(),
            image: self.disk.read_unchecked(id)?.image,
            limits: self.sources.limits,
            parts: CheckedParts::Users,
            repair: true,
            in_use: Vec::new(),
        };
        self.run_check(job).await.map(drop)
    }

    async fn run_check(&self, job: CheckJob) -> Result<(Vec<Finding>, u32), Error> {
        match self.workers.run(Job::Check(job)).await {
            Ok(Outcome::Checked { findings, not_compared }) => Ok((findings, not_compared)),
            Ok(_) => Err(Error::new(Kind::Internal, "unexpected answer of the worker")),
            Err(error) => {
                let error = Error::from(error);
                self.sweep_after(&error);
                Err(error)
            }
        }
    }
}

/// Whether a container uses a layer of the image: a damaged layer is then not replaced.
fn image_is_held(images: &Images, id: &ImageId) -> bool {
    let index = images.index.borrow();
    index.get(id).is_some_and(|entry| index.in_use().any(|layer| entry.layers.contains(&layer)))
}
