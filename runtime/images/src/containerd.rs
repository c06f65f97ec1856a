//! Take-over of the images of a containerd that the node used before: one job of a worker lists them, then one
//! job imports each, so that every image is published as soon as it is complete, and a failure concerns only
//! its image. An image that exists with its names costs nothing.

use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_job::{ContainerdImage, ImportSource, Job, ListContainerdJob, Outcome};

use super::{ImageId, Images, View, unexpected};
use coracle_reference::Reference;

impl Images {
    /// Lists the images in the store of a containerd, ordered by name. `store` is its root directory, an absolute
    /// path.
    ///
    /// # Errors
    /// The store cannot be read, or lacks the namespace.
    pub async fn list_containerd(
        &self,
        store: &Path,
        namespace: &str,
    ) -> Result<Vec<ContainerdImage>, Error> {
        let job = ListContainerdJob { store: store.to_owned(), namespace: namespace.to_owned() };
        match self.workers.run(Job::ListContainerd(job)).await? {
            Outcome::ContainerdImages(images) => Ok(images),
            _ => Err(unexpected()),
        }
    }

    /// The image that a containerd's image already is here; `None` if it, or one of its names, is missing. A name
    /// that another image has is not missing: it stays there.
    pub fn known(&self, image: &ContainerdImage) -> Option<View> {
        let id = &image.found.as_ref().ok()?.id;
        let view = self.find(id).ok().flatten().filter(|view| view.id.to_string() == *id)?;
        let has_name = |name: &String| match Reference::parse(name) {
            Ok(reference) if reference.has_digest() => {
                let digest = format!("{}/{}@{}", reference.registry(), reference.repository(), image.digest);
                view.digests.contains(&digest)
            }
            Ok(reference) => matches!(self.find(&reference.to_string()), Ok(Some(_))),
            // A name that no client can use.
            Err(_) => true,
        };
        let has_name = |name: &String| name.parse::<ImageId>().is_ok() || has_name(name);
        image.names.iter().all(has_name).then_some(view)
    }

    /// Imports one image of a containerd with its names; an image that is pinned there is pinned here.
    ///
    /// # Errors
    /// The image is incomplete or invalid; an I/O error. The text does not name the image.
    pub async fn import_from_containerd(&self, store: &Path, image: &ContainerdImage) -> Result<View, Error> {
        let source = ImportSource::Containerd {
            store: store.to_owned(),
            digest: image.digest.clone(),
            names: image.names.clone(),
        };
        let (views, refused) = self.import_all(source, false, true).await?;
        let view = match (views.into_iter().next(), refused) {
            (Some(view), _) => view,
            (None, Some(error)) => return Err(error),
            (None, None) => return Err(Error::new(Kind::Internal, "the worker imported no image")),
        };
        log::info!("image imported from containerd"; image = view.id, store = store.display());
        match image.is_pinned {
            true => self.pin(view.tags.first().unwrap_or(&view.id.to_string())),
            false => Ok(view),
        }
    }
}
