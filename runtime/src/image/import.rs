//! Import of archives: docker-archive or OCI layout (CRI facts §8.2). The worker reads them; here their names are brought
//! into normal form, and each image is published.

use std::path::Path;

use coracle_job::{ImageRecord, ImportJob, Job, Outcome};

use super::pull::Fill;
use super::reference::Reference;
use super::{Images, Unpublished, View};
use crate::error::{Error, Kind};
use crate::log;

impl Images {
    /// Imports every image of the archive (an absolute path) and gives them as they are now.
    ///
    /// # Errors
    /// The archive cannot be read, is none, or has no image of this platform; the disk.
    pub(crate) async fn import(&self, archive: &Path) -> Result<Vec<View>, Error> {
        let imported = self.import_all(archive).await;
        if imported.is_err() {
            self.sweep_unfinished();
        }
        imported.map_err(|error| error.context(format!("import {}", archive.display())))
    }

    async fn import_all(&self, archive: &Path) -> Result<Vec<View>, Error> {
        let _fill = Fill::start(self);
        let job = Job::Import(ImportJob {
            root: self.disk.root().to_owned(),
            archive: archive.to_owned(),
            limits: self.limits,
            keep_blobs: self.keep_blobs,
        });
        let Outcome::Imported(images) = self.workers.run(job, |_, _| {}).await? else {
            return Err(Error::new(Kind::Internal, "the worker did another job"));
        };
        let mut views = Vec::new();
        for mut image in images {
            normalise_names(&mut image);
            let id = self.publish(image).map_err(|unpublished| match unpublished {
                Unpublished::Missing(why) => {
                    Error::new(Kind::Unavailable, format!("{why}: an image was removed meanwhile, try again"))
                }
                Unpublished::Error(error) => error,
            })?;
            log::info!("image imported"; image = id, archive = archive.display());
            views.extend(self.index.borrow().get(&id).map(|entry| self.view(entry)));
        }
        Ok(views)
    }
}

/// Names in an archive are as people wrote them. One that is no reference is left out: the image has its id.
fn normalise_names(image: &mut ImageRecord) {
    for (names, are_digests) in [(&mut image.tags, false), (&mut image.digests, true)] {
        let normalise = |name: &String| match Reference::parse(name) {
            Ok(reference) => (reference.has_digest() == are_digests).then(|| reference.to_string()),
            Err(invalid) => {
                log::warn!("name of an imported image is left out"; image = image.id, name = name, error = invalid);
                None
            }
        };
        let mut normal: Vec<String> = names.iter().filter_map(normalise).collect();
        normal.sort_unstable();
        normal.dedup();
        *names = normal;
    }
}
