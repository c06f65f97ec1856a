//! `coracle image export`: a worker exports images as an archive for other nodes.

use std::path::Path;

use coracle_base::error::Error;
use coracle_job::{ExportJob, ExportedImage, Job, Outcome};

use super::pull::Fill;
use super::{Images, unexpected};
use coracle_reference::Reference;

impl Images {
    /// Exports the images with these names or IDs to `output`, an absolute path. An image that is given by a
    /// tag is exported with this tag only, otherwise with all its tags.
    ///
    /// # Errors
    /// Those of [`Images::resolve`]; a blob of an image was not kept; an I/O error.
    pub async fn export(&self, names: &[String], output: &Path) -> Result<(), Error> {
        let mut images = Vec::new();
        for name in names {
            let view = self.resolve(name)?;
            let tag = Reference::parse(name).map(|reference| reference.to_string());
            let tag = tag.ok().filter(|tag| view.tags.contains(tag));
            let names = tag.map_or_else(|| view.tags.clone(), |tag| vec![tag]);
            images.push(ExportedImage { names, image: self.record(&view.id)? });
        }
        let _fill = Fill::start(self);
        let job = ExportJob { root: self.disk.root().to_owned(), output: output.to_owned(), images };
        match self.workers.run(Job::Export(job)).await? {
            Outcome::Exported => Ok(()),
            _ => Err(unexpected()),
        }
    }
}
