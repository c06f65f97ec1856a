//! `coracle image check`: has workers look at every part of every image, mend what the store itself can mend, and drops
//! what it cannot, so that a pull brings it whole.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_job::{CheckJob, Job, Outcome};

use super::pull::Fill;
use super::{ImageId, Images, builtin};

/// How an image was found.
pub enum Checked {
    /// With what was mended of it.
    Whole(Vec<String>),
    /// What is wrong with it; it is still there.
    Broken(Vec<String>),
    /// What was wrong with it; it is there no more.
    Dropped(Vec<String>),
}

impl Images {
    /// Ids of what can be checked, with the names people know them by.
    pub fn checkable(&self) -> Vec<(ImageId, String)> {
        let index = self.index.borrow();
        let entries = index.iter().filter(|entry| entry.id != builtin::ID);
        let name = |entry: &super::Entry| entry.tags.first().or(entry.digests.first()).cloned();
        entries.map(|entry| (entry.id, name(entry).unwrap_or_else(|| entry.id.to_string()))).collect()
    }

    /// Checks one image.
    ///
    /// # Errors
    /// It could not be looked at: it is gone, the disk is full.
    pub async fn check(self: &Rc<Self>, id: &ImageId, repair: bool) -> Result<Checked, Error> {
        let image = self.disk.read_unchecked(id)?.image;
        let in_use = self.index.borrow().in_use().map(|layer| layer.to_string()).collect();
        let fill = Fill::start(self);
        let job = CheckJob { root: self.disk.root().to_owned(), image, limits: self.limits, repair, in_use };
        let checked = self.workers.run(Job::Check(job), |_, _| {}).await;
        drop(fill);
        let findings = match checked {
            Ok(Outcome::Checked(findings)) => findings,
            Ok(_) => return Err(Error::new(Kind::Internal, "the worker did another job")),
            Err(error) => {
                let error = Error::from(error);
                self.sweep_after(&error);
                return Err(error);
            }
        };
        let is_whole = findings.iter().all(|finding| finding.is_mended);
        let is_held = image_is_held(self, id);
        for finding in &findings {
            log::warn!("image is damaged"; image = id, part = finding.what, mended = finding.is_mended);
        }
        let findings = findings.into_iter().map(|finding| finding.what).collect();
        Ok(match (is_whole, repair && !is_held) {
            (true, _) => Checked::Whole(findings),
            (false, false) => Checked::Broken(findings),
            (false, true) => {
                self.remove(&id.to_string())?;
                Checked::Dropped(findings)
            }
        })
    }
}

/// Whether a container needs a layer of it: what is broken stays where it is then.
fn image_is_held(images: &Images, id: &ImageId) -> bool {
    let index = images.index.borrow();
    index.get(id).is_some_and(|entry| index.in_use().any(|layer| entry.layers.contains(&layer)))
}
