//! Images of an additional store, a directory with the layout of `--root` that is only read. Each image is verified like those below
//! `--root` ([`crate::check`]); then links lead to its layers, and its documents, which have some kilobytes, are copied.

use std::path::{Path, PathBuf};

use coracle_job::{
    CheckJob, CheckedParts, Failure, ImageRecord, STORE_INDEX, STORE_INDEX_BYTES_MAX, StoreIndex,
};
use coracle_sandbox::disk::read_up_to;

use super::{Import, Imported, Parts, one_of_many};
use crate::failure::io_failure;
use crate::store::Store;
use crate::{check, policy, users};

impl Import<'_> {
    /// Takes all images of the store at `directory`.
    ///
    /// # Errors
    /// The store has no index, or none of its images can be used.
    pub(super) fn additional(&self, directory: &Path) -> Result<Imported, Failure> {
        let path = directory.join(STORE_INDEX);
        let bytes =
            read_up_to(&path, STORE_INDEX_BYTES_MAX).map_err(|error| io_failure("read", &path, &error))?;
        let index = StoreIndex::decode(&bytes)
            .map_err(|why| Failure::invalid(format!("read {}: {why}", path.display())))?;
        let (mut records, mut refused): Imported = Default::default();
        for image in index.images {
            match self.stored(directory, image) {
                Ok(record) => records.push(record),
                Err(failure) => refused.push(one_of_many(failure)?),
            }
        }
        match records.is_empty() && !refused.is_empty() {
            true => Err(refused.swap_remove(0)),
            false => Ok((records, refused)),
        }
    }

    fn stored(&self, directory: &Path, image: ImageRecord) -> Result<ImageRecord, Failure> {
        let id = image.id.clone();
        let job = CheckJob {
            root: directory.to_owned(),
            image,
            limits: self.job.limits,
            parts: CheckedParts::All,
            repair: false,
            in_use: Vec::new(),
        };
        let (findings, _) = check::run(&job, &mut |bytes| self.pulse(bytes, 0))?;
        if let Some(finding) = findings.first() {
            return Err(Failure::invalid(format!("image {id} is damaged: {}", finding.what)));
        }
        let (source, image) = (Store::open(directory)?, job.image);
        let document = |digest: &String| {
            let absent = || Failure::invalid(format!("image {id}: blob {digest} is no document"));
            Ok((digest.clone(), source.document(digest).ok_or_else(absent)?))
        };
        let documents: Vec<(String, Vec<u8>)> = image.blobs.iter().map(document).collect::<Result<_, _>>()?;
        let parts = Parts {
            config: Vec::new(),
            layers: Vec::new(),
            documents: documents.iter().filter(|(digest, _)| *digest != id).cloned().collect(),
            are_documents_of_source: true,
            tags: image.tags.clone(),
            digests: image.digests.clone(),
            foreign: None,
        };
        let accepted = self.judge(&parts)?;
        policy::keep(self.store, &id, accepted.kept)?;
        let mut moves = Vec::new();
        for layer in image.layers.iter().filter(|layer| !self.store.layer(&layer.name).is_dir()) {
            moves.push((self.store.new_link(&source, &layer.name)?, self.store.layer(&layer.name)));
        }
        let trees: Vec<PathBuf> = image.layers.iter().rev().map(|layer| source.layer(&layer.name)).collect();
        moves.extend(users::extract(self.store, &id, &trees)?);
        for (digest, bytes) in &documents {
            moves.extend(self.store.keep(digest, bytes)?);
        }
        self.store.publish_all(&moves)?;
        let digests = image.digests.into_iter().filter(|name| !accepted.refused.contains(name)).collect();
        Ok(ImageRecord { digests, ..image })
    }
}
