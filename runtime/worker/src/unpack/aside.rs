//! The layers of one image during a pull: each is unpacked into a temporary directory, in any order, and
//! several layers are published together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_job::{Failure, Layer, Limits};

use super::{parents, unpack_verified};
use crate::store::{Move, Store};

/// The image's layers. Unpublished layers are removed on drop.
pub(crate) struct Aside<'a> {
    store: &'a Store,
    /// All layers of the image, lowest first.
    layers: &'a [Layer],
    limits: &'a Limits,
    /// Complete and verified layers by their index in the image.
    waiting: BTreeMap<usize, Waiting>,
}

struct Waiting {
    directory: PathBuf,
    /// Paths of the directories without an entry of their own; see [`parents`].
    implied: Vec<Vec<u8>>,
}

impl<'a> Aside<'a> {
    pub(crate) fn new(store: &'a Store, layers: &'a [Layer], limits: &'a Limits) -> Self {
        Self { store, layers, limits, waiting: BTreeMap::new() }
    }

    /// Unpacks `blob` as layer `number`, unless the layer already exists; `pulse` receives the number of
    /// bytes that were read.
    pub(crate) fn unpack(
        &mut self,
        number: usize,
        blob: &Path,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), Failure> {
        let layer = &self.layers[number];
        if self.has(number) {
            return Ok(());
        }
        let directory = self.store.new_layer()?;
        match unpack_verified(&directory, blob, layer, self.limits, pulse) {
            Ok(implied) => {
                self.waiting.insert(number, Waiting { directory, implied });
                Ok(())
            }
            Err(failure) => {
                // A second error would hide the first one; the daemon removes such directories when it
                // starts.
                let _ = crate::remove_trees::run(&[directory]);
                Err(self.store.explain(failure))
            }
        }
    }

    /// Whether the layer has been unpacked: for this image, or before.
    pub(crate) fn has(&self, number: usize) -> bool {
        self.is_waiting(number) || self.is_published(number)
    }

    pub(crate) fn is_waiting(&self, number: usize) -> bool {
        self.waiting.contains_key(&number)
    }

    fn is_published(&self, number: usize) -> bool {
        self.store.layer(&self.layers[number].name).is_dir()
    }

    /// The current directory of each layer, topmost first.
    pub(crate) fn directories(&self) -> Vec<PathBuf> {
        self.below(self.layers.len())
    }

    fn below(&self, number: usize) -> Vec<PathBuf> {
        (0..number).rev().map(|number| self.directory(number)).collect()
    }

    fn directory(&self, number: usize) -> PathBuf {
        match self.waiting.get(&number) {
            Some(waiting) => waiting.directory.clone(),
            None => self.store.layer(&self.layers[number].name),
        }
    }

    /// Copies the attributes of implied directories from lower layers, and returns the unpublished layers
    /// that can be published: a layer with implied directories requires all layers below it.
    pub(crate) fn complete(&self) -> Result<Vec<usize>, Failure> {
        let mut ready = Vec::new();
        let mut has_all_below = true;
        for number in 0..self.layers.len() {
            match self.waiting.get(&number) {
                Some(waiting) if waiting.implied.is_empty() || has_all_below => {
                    parents::copy_attributes(&waiting.directory, &waiting.implied, &self.below(number))?;
                    ready.push(number);
                }
                Some(_) => has_all_below = false,
                None => has_all_below &= self.is_published(number),
            }
        }
        Ok(ready)
    }

    /// Publishes the layers `ready`, which [`Aside::complete`] returned, and then `others`, with one sync.
    pub(crate) fn publish(
        &mut self,
        ready: &[usize],
        others: impl IntoIterator<Item = Move>,
    ) -> Result<(), Failure> {
        let layers = ready
            .iter()
            .map(|number| (self.directory(*number), self.store.layer(&self.layers[*number].name)));
        let moves: Vec<Move> = layers.chain(others).collect();
        self.store.publish_all(&moves)?;
        self.waiting.retain(|number, _| !ready.contains(number));
        Ok(())
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        let directories: Vec<PathBuf> =
            std::mem::take(&mut self.waiting).into_values().map(|waiting| waiting.directory).collect();
        // The daemon removes a directory that cannot be removed here.
        let _ = crate::remove_trees::run(&directories);
    }
}
