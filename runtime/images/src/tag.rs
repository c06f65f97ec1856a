//! `coracle image tag` and `coracle image prune`: adds a name to an image in the store, and finds unused
//! images.

use coracle_base::error::{Error, Kind};
use coracle_base::log;

use super::index::Entry;
use super::{ImageId, Images, Unpublished, View, builtin};
use coracle_reference::Reference;

impl Images {
    /// Adds the tag `tag` to the image `name`. If another image has this tag, the tag is removed from it.
    ///
    /// # Errors
    /// Those of [`Images::resolve`]; `tag` is not a valid name with a tag; the policy does not accept the image under this name; an I/O
    /// error.
    pub async fn tag(&self, name: &str, tag: &str) -> Result<View, Error> {
        let view = self.resolve(name)?;
        let invalid = |why: String| Error::new(Kind::InvalidArgument, format!("tag {tag:?}: {why}"));
        let reference = Reference::parse(tag).map_err(|error| invalid(error.to_string()))?;
        if reference.has_digest() {
            return Err(invalid("a digest cannot be given as a name".to_owned()));
        }
        if let Some(why) = self.refusal(&view.id, &reference).await? {
            return Err(Error::new(Kind::FailedPrecondition, format!("tag {tag:?}: {why}")));
        }
        // Read after the judgement, during which the image may have been removed.
        let mut image = self.record(&view.id)?;
        image.tags = vec![reference.to_string()];
        let id = self.publish(image).map_err(|unpublished| match unpublished {
            Unpublished::Missing(why) => {
                Error::new(Kind::Internal, format!("image {name}: {why}: check the images"))
            }
            Unpublished::Error(error) => error,
        })?;
        log::info!("image tagged"; image = id, name = reference);
        self.resolve(&id.to_string())
    }

    /// The ID of each image that is not pinned and of which no container uses a layer, with a name, or the ID if it
    /// has none. A name may belong to another image later.
    pub fn unused(&self) -> Vec<(ImageId, String)> {
        let index = self.index.borrow();
        let entries = index.iter().filter(|entry| entry.id != builtin::ID && !self.view(entry).pinned);
        let unused = entries.filter(|entry| !index.in_use().any(|layer| entry.layers.contains(&layer)));
        let name = |entry: &Entry| entry.tags.first().or_else(|| entry.digests.first()).cloned();
        unused.map(|entry| (entry.id, name(entry).unwrap_or_else(|| entry.id.to_string()))).collect()
    }
}
