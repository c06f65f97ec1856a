//! Images of an additional store, a directory with the layout of `--root` that is only read. Each image is verified against the store's
//! index; then links lead to its layers, and its documents, which have some kilobytes, are copied. Links that an earlier index led to are
//! verified, too: an image that was pulled may use them. Later checks of such a layer compare it with the index again ([`check`]).
//!
//! | part | has to equal |
//! |---|---|
//! | manifests, config | their digests |
//! | layers and configuration in the index | those of the config |
//! | tree of a layer: names, types, modes, owners, links, devices, extended attributes, contents | its digest in the index ([`coracle_filelist::digest_of_tree`]) |

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use coracle_filelist::{Reader, Verdict, check_tree, drop_pages};
use coracle_job::{Failure, FailureKind, ImageRecord, STORE_INDEX, STORE_INDEX_BYTES_MAX, StoreIndex};
use coracle_manifest::{config as image_config, digest_of, foreign, foreign_image};
use coracle_sandbox::disk::read_up_to;

use super::{Import, Imported, Parts, one_of_many};
use crate::failure::io_failure;
use crate::store::Store;
use crate::{policy, users};

/// A store during an import.
struct Source {
    store: Store,
    index: StoreIndex,
    /// Layers that were compared, and what is wrong with them.
    compared: BTreeMap<String, Option<String>>,
}

impl Import<'_> {
    /// Takes all images of the store at `directory` that can be used; adds the names of the node's layers that lead to damaged ones.
    ///
    /// # Errors
    /// The store has no index, or was changed meanwhile; an error of the node.
    pub(super) fn additional(
        &self,
        directory: &Path,
        damaged: &mut Vec<String>,
    ) -> Result<Imported, Failure> {
        let mut index = read_index(directory)?;
        let images = std::mem::take(&mut index.images);
        let mut source = Source { store: Store::at(directory), index, compared: BTreeMap::new() };
        let (mut records, mut refused): Imported = Default::default();
        for image in images {
            match self.stored(&mut source, image) {
                Ok(record) => records.push(record),
                Err(failure) => refused.push(one_of_many(failure)?),
            }
        }
        for name in self.store.links_to(&source.store)? {
            if self.damage(&mut source, &name)?.is_some() {
                damaged.push(name);
            }
        }
        // A medium that was exchanged, unmounted or pulled out meanwhile is not damaged: the index is read from it again.
        let _ = File::open(directory.join(STORE_INDEX)).map(drop_pages);
        match read_index(directory)?.trees == source.index.trees {
            true => Ok((records, refused)),
            false => Err(is_not_there(directory)),
        }
    }

    fn stored(&self, source: &mut Source, image: ImageRecord) -> Result<ImageRecord, Failure> {
        let damaged = |what: String| Failure::invalid(format!("image {} is damaged: {what}", image.id));
        let document = |digest: &String| match source.store.document(digest) {
            Ok(Some(bytes)) if digest_of(&bytes) == *digest => Ok((digest.clone(), bytes)),
            Ok(Some(_)) => Err(damaged(format!("blob {digest}: its content has another digest"))),
            Ok(None) => Err(damaged(format!("blob {digest} is missing or too long"))),
            Err(failure) => Err(damaged(failure.message)),
        };
        let blobs: Vec<(String, Vec<u8>)> = image.blobs.iter().map(document).collect::<Result<_, _>>()?;
        let (config, documents): (Vec<_>, Vec<_>) =
            blobs.into_iter().partition(|(digest, _)| *digest == image.id);
        let config = config.into_iter().next().ok_or_else(|| damaged("it has no config".to_owned()))?;
        let parsed = image_config::parse(&config.1)?;
        if (&parsed.layers, &parsed.config) != (&image.layers, &image.config) {
            return Err(damaged("its record is not that of its config".to_owned()));
        }
        for layer in &image.layers {
            if let Some(why) = self.damage(source, &layer.name)? {
                return Err(damaged(format!("layer {}: {why}", layer.name)));
            }
        }
        let parts = Parts {
            config: config.1,
            // They are not unpacked.
            layers: Vec::new(),
            documents,
            are_documents_of_source: true,
            tags: image.tags.clone(),
            digests: image.digests.clone(),
            foreign: None,
        };
        let accepted = self.judge(&parts)?;
        policy::keep(self.store, &image.id, accepted.kept)?;
        let mut moves = Vec::new();
        for layer in image.layers.iter().filter(|layer| !self.store.layer(&layer.name).is_dir()) {
            moves.push((self.store.new_link(&source.store, &layer.name)?, self.store.layer(&layer.name)));
        }
        let layers = image.layers.iter().rev();
        let trees: Vec<PathBuf> = layers.map(|layer| source.store.layer(&layer.name)).collect();
        moves.extend(users::extract(self.store, &image.id, &trees)?);
        moves.extend(self.store.keep(&image.id, &parts.config)?);
        for (digest, bytes) in &parts.documents {
            moves.extend(self.store.keep(digest, bytes)?);
        }
        self.store.publish_all(&moves)?;
        if let Some(platform) = foreign(&parts.config)? {
            eprintln!("image {}: {}", image.id, foreign_image(&platform));
        }
        let digests = image.digests.iter().filter(|name| !accepted.refused.contains(name)).cloned().collect();
        Ok(ImageRecord { digests, ..image })
    }

    /// Compares a layer with the index, once for all images of the store; returns what is wrong with it. Its name is that of the config.
    fn damage(&self, source: &mut Source, name: &str) -> Result<Option<String>, Failure> {
        if let Some(known) = source.compared.get(name) {
            return Ok(known.clone());
        }
        let tree = source.store.layer(name);
        let check = || compare(&source.index, &tree, name, &mut Reader::new(0, &mut || self.pulse(0, 0)));
        let damage = match check()?.damage() {
            // Its medium may have failed to read once.
            Some(_) => check()?.damage(),
            None => None,
        };
        if damage.is_none() {
            // What a check has noted was of another version of the store.
            coracle_trees::remove::run(&[self.store.damage(name)])?;
        }
        source.compared.insert(name.to_owned(), damage.clone());
        Ok(damage)
    }
}

fn read_index(store: &Path) -> Result<StoreIndex, Failure> {
    let path = store.join(STORE_INDEX);
    let bytes =
        read_up_to(&path, STORE_INDEX_BYTES_MAX).map_err(|error| io_failure("read", &path, &error))?;
    StoreIndex::decode(&bytes).map_err(|why| Failure::invalid(format!("read {}: {why}", path.display())))
}

fn is_not_there(store: &Path) -> Failure {
    let text = format!("the additional store {} is not there, or was changed meanwhile", store.display());
    Failure::new(FailureKind::Internal, text)
}

fn compare(index: &StoreIndex, tree: &Path, name: &str, reader: &mut Reader<'_>) -> Result<Verdict, Failure> {
    match index.trees.iter().find(|(layer, _)| layer == name) {
        Some((_, digest)) => {
            check_tree(tree, digest, reader).map_err(|error| io_failure("check", tree, &error))
        }
        None => Ok(Verdict::Damaged("its store has no digest of it".to_owned())),
    }
}

/// The state of a layer that is that of an additional store; `None`: it is the node's own.
///
/// # Errors
/// The store is not there; an error that says nothing about the layer.
pub(crate) fn check(own: &Store, name: &str, reader: &mut Reader<'_>) -> Result<Option<Verdict>, Failure> {
    let Ok(tree) = fs::read_link(own.layer(name)) else { return Ok(None) };
    let store = tree.ancestors().nth(2).unwrap_or(&tree);
    let verdict = match read_index(store) {
        Err(failure) if failure.kind == FailureKind::Invalid => Ok(Verdict::Damaged(failure.message)),
        index => index.and_then(|index| compare(&index, &tree, name, reader)),
    };
    // Also if it was unmounted meanwhile.
    if !store.join(STORE_INDEX).is_file() {
        return Err(is_not_there(store));
    }
    Ok(Some(match verdict? {
        Verdict::Damaged(why) => Verdict::Damaged(format!(
            "{why}; its additional store {} is only read: replace the store, or remove the image and pull it",
            store.display()
        )),
        verdict => verdict,
    }))
}
