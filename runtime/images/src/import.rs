//! Import of archives: docker-archive or OCI layout (CRI 8.2). A worker parses them; this module normalises
//! the names and publishes the images. Images of a containerd ([`super::containerd`]) take the same way.

use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, workers};
use coracle_job::{Failure, ImageRecord, ImportJob, ImportSource, Job, Outcome, Progress};
use coracle_sandbox::collect;

use super::index::Found;
use super::progress::{Import, Tracker};
use super::pull::{Fill, TRIES_MAX};
use super::{Entry, ImageId, Images, Unpublished, View, unexpected};
use coracle_reference::Reference;

/// Lists a running import until the value is dropped.
struct Running<'a> {
    images: &'a Images,
    import: Rc<Import>,
}

impl<'a> Running<'a> {
    fn start(images: &'a Images, name: String) -> Running<'a> {
        let import = Rc::new(Import { name, tracker: Tracker::new("importing images", Instant::now()) });
        images.pulls.imports.borrow_mut().push(Rc::clone(&import));
        Running { images, import }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.images.pulls.imports.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.import));
    }
}

/// The imported images, and the first failure of an image that could not be imported.
pub(super) type Imported = (Vec<View>, Result<(), Error>);

impl Images {
    /// Imports all valid images of the archive (an absolute path) and returns them.
    ///
    /// # Errors
    /// The archive cannot be read, is malformed, or has no image of this platform; an I/O error.
    pub async fn import(&self, archive: &Path) -> Result<Imported, Error> {
        self.import_as(ImportSource::Archive(archive.to_owned()), false, false).await
    }

    /// Imports an archive or an additional store with background scheduling priority. If `is_older`, names that other images have stay
    /// with them.
    pub(super) async fn import_in_background(
        &self,
        source: ImportSource,
        is_older: bool,
    ) -> Result<Imported, Error> {
        self.import_as(source, true, is_older).await
    }

    async fn import_as(
        &self,
        source: ImportSource,
        is_background: bool,
        is_older: bool,
    ) -> Result<Imported, Error> {
        let name = source.path().display().to_string();
        let imported = self.import_all(source, is_background, is_older).await;
        let tried = |error: Error| error.context(format!("import {name}"));
        let (views, refused) = imported.map_err(tried)?;
        for view in &views {
            log::info!("image imported"; image = view.id, archive = name);
        }
        Ok((views, refused.map_or(Ok(()), |error| Err(tried(error)))))
    }

    /// Imports all valid images of a source; returns them and the first failure of another image. After a
    /// failure, incomplete data is removed.
    pub(super) async fn import_all(
        &self,
        source: ImportSource,
        is_background: bool,
        is_older: bool,
    ) -> Result<(Vec<View>, Option<Error>), Error> {
        let imported = self.fill_and_publish(source, is_background, is_older).await;
        if let Some(error) = imported.as_ref().map_or_else(Some, |(_, refused)| refused.as_ref()) {
            self.sweep_after(error);
        }
        imported
    }

    async fn fill_and_publish(
        &self,
        source: ImportSource,
        is_background: bool,
        is_older: bool,
    ) -> Result<(Vec<View>, Option<Error>), Error> {
        let _fill = Fill::start(self);
        let name = source.path().display().to_string();
        let (images, refused, damaged) =
            self.fill(source, is_background, &Running::start(self, name)).await?;
        let first = refused.into_iter().next().map(|failure| Error::from(workers::Error::Failed(failure)));
        let mut views = Vec::new();
        // No await up to the last publication: the policy that judged the images is in force.
        for mut image in images {
            normalise_names(&mut image);
            if is_older {
                self.leave_names(&mut image);
            }
            let id = self.publish(image).map_err(|unpublished| match unpublished {
                Unpublished::Missing(why) => {
                    Error::new(Kind::Unavailable, format!("{why}: an image was removed meanwhile, try again"))
                }
                Unpublished::Error(error) => error,
            })?;
            views.extend(self.index.borrow().get(&id).map(|entry| self.view(entry)));
        }
        self.drop_damaged(&damaged)?;
        Ok((views, first))
    }

    /// Runs workers until the images are in the store and the policy that judged them is still in force; returns the records of the
    /// images, the failures of the others, and the names of damaged layers of the additional store.
    async fn fill(
        &self,
        source: ImportSource,
        is_background: bool,
        running: &Running<'_>,
    ) -> Result<(Vec<ImageRecord>, Vec<Failure>, Vec<String>), Error> {
        for _ in 0..TRIES_MAX {
            let in_force = self.in_force().await?;
            let job = Job::Import(ImportJob {
                root: self.disk.root().to_owned(),
                source: source.clone(),
                limits: self.sources.limits,
                keep_blobs: self.sources.keep_blobs.get(),
                serves_neighbours: self.sources.registries.borrow().neighbours.port.is_some(),
                is_background,
                policy: in_force.policy.clone(),
            });
            let mut note = |progress: Progress| {
                // All bytes come from the archive, and determine the rate.
                let progress = Progress { bytes_fetched: progress.bytes_done, ..progress };
                running.import.tracker.note(&running.import.name, progress, Instant::now());
            };
            let Outcome::Imported { images, refused, damaged } =
                self.workers.run_reporting(job, &mut note).await?
            else {
                return Err(unexpected());
            };
            if self.is_in_force(&in_force) {
                return Ok((images, refused, damaged));
            }
            log::info!("the image policy was changed during the import, will retry"; name = running.import.name);
        }
        Err(Error::new(Kind::Unavailable, "the image policy was changed during each attempt, try again"))
    }

    /// Removes the images with damaged layers of an additional store, and the links to these layers, so that a pull makes them again.
    /// Containers that run have their files open.
    fn drop_damaged(&self, layers: &[String]) -> Result<(), Error> {
        for layer in layers.iter().filter_map(|name| name.parse().ok()) {
            let has_layer = |entry: &&Entry| entry.layers.contains(&layer);
            let images: Vec<ImageId> =
                self.index.borrow().iter().filter(has_layer).map(|entry| entry.id).collect();
            for id in images {
                log::warn!("image removed, because a layer of its additional store is damaged"; image = id, layer = layer);
                self.remove(&id.to_string())?;
            }
            self.disk.remove_link(&layer)?;
            // An archive of an import directory may have such an image.
            self.sources.bundles.look_again();
        }
        Ok(())
    }

    /// Drops the names that other images have: those were imported or pulled later, so they are newer.
    fn leave_names(&self, image: &mut ImageRecord) {
        let index = self.index.borrow();
        let is_free = |name: &String| match index.find(name) {
            Ok(Found::One(id)) => id.to_string() == image.id,
            Ok(Found::None | Found::Ambiguous) | Err(_) => true,
        };
        let tags: Vec<String> = image.tags.iter().filter(|tag| is_free(tag)).cloned().collect();
        image.tags = tags;
    }
}

/// Normalises the names in an archive. An invalid name is dropped, because the image can be used by its ID.
pub(super) fn normalise_names(image: &mut ImageRecord) {
    for (names, are_digests) in [(&mut image.tags, false), (&mut image.digests, true)] {
        let normalise = |name: &String| match Reference::parse(name) {
            Ok(reference) => (reference.has_digest() == are_digests).then(|| reference.to_string()),
            Err(invalid) => {
                log::warn!("invalid name of an imported image ignored"; image = image.id, name = name, error = invalid);
                None
            }
        };
        let mut normal: Vec<String> = names.iter().filter_map(normalise).collect();
        collect::sort(&mut normal);
        normal.dedup();
        *names = normal;
    }
}
