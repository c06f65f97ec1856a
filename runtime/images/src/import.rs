//! Import of archives: docker-archive or OCI layout (CRI 8.2). The worker reads them; here their names are brought
//! into normal form, and each image is published.

use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, workers};
use coracle_job::{ImageRecord, ImportJob, Job, Outcome};

use super::pull::Fill;
use super::reference::Reference;
use super::{Images, Unpublished, View};

/// Images of an archive as they are now, and the first that could not be imported.
pub(super) type Imported = (Vec<View>, Result<(), Error>);

impl Images {
    /// Imports every image of the archive (an absolute path) that can be, and gives them as they are now.
    ///
    /// # Errors
    /// The archive cannot be read, is none, or has no image of this platform; the disk.
    pub async fn import(&self, archive: &Path) -> Result<Imported, Error> {
        self.import_as(archive, false).await
    }

    /// The same, giving way to everything else on the node.
    pub(super) async fn import_in_background(&self, archive: &Path) -> Result<Imported, Error> {
        self.import_as(archive, true).await
    }

    async fn import_as(&self, archive: &Path, is_background: bool) -> Result<Imported, Error> {
        let imported = self.import_all(archive, is_background).await;
        if let Some(error) = imported.as_ref().map_or_else(Some, |(_, rest)| rest.as_ref().err()) {
            self.sweep_after(error);
        }
        let tried = |error: Error| error.context(format!("import {}", archive.display()));
        imported.map(|(views, rest)| (views, rest.map_err(tried))).map_err(tried)
    }

    async fn import_all(&self, archive: &Path, is_background: bool) -> Result<Imported, Error> {
        let _fill = Fill::start(self);
        let job = Job::Import(ImportJob {
            root: self.disk.root().to_owned(),
            archive: archive.to_owned(),
            limits: self.limits,
            keep_blobs: self.keep_blobs.get(),
            is_background,
        });
        let Outcome::Imported(images, refused) = self.workers.run(job, |_, _| {}).await? else {
            return Err(Error::new(Kind::Internal, "the worker did another job"));
        };
        let mut rest = Ok(());
        for failure in refused {
            rest = rest.and(Err(Error::from(workers::Error::Failed(failure))));
        }
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
        Ok((views, rest))
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
