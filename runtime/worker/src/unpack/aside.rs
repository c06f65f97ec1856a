//! The layers of one image on their way into the store: each is unpacked aside, in whatever order they come, and waits
//! there until several are published together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_job::{Failure, Layer, Limits};

use super::{parents, unpack_verified};
use crate::store::{Move, Store};

/// The image's layers. What is not published when this goes, goes too.
pub(crate) struct Aside<'a> {
    store: &'a Store,
    /// Lowest first.
    layers: &'a [Layer],
    limits: &'a Limits,
    /// Whole and verified, by their place in the image.
    waiting: BTreeMap<usize, Waiting>,
}

struct Waiting {
    directory: PathBuf,
    /// See [`parents`].
    implied: Vec<Vec<u8>>,
}

impl<'a> Aside<'a> {
    pub(crate) fn new(store: &'a Store, layers: &'a [Layer], limits: &'a Limits) -> Self {
        Self { store, layers, limits, waiting: BTreeMap::new() }
    }

    /// Unpacks `blob` as layer `number`, unless that is there already; `pulse` hears of bytes read while it goes on.
    pub(crate) fn unpack(
        &mut self,
        number: usize,
        blob: &Path,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), Failure> {
        let layer = &self.layers[number];
        if self.is_waiting(number) || self.is_published(number) {
            return Ok(());
        }
        let directory = self.store.new_layer()?;
        match unpack_verified(&directory, blob, layer, self.limits, pulse) {
            Ok(implied) => {
                self.waiting.insert(number, Waiting { directory, implied });
                Ok(())
            }
            Err(failure) => {
                // Its own failure would hide the first one; the daemon sweeps such directories at its start.
                let _ = crate::remove_trees::run(&[directory]);
                Err(self.store.explain(failure))
            }
        }
    }

    pub(crate) fn is_waiting(&self, number: usize) -> bool {
        self.waiting.contains_key(&number)
    }

    fn is_published(&self, number: usize) -> bool {
        self.store.layer(&self.layers[number].name).is_dir()
    }

    /// Where every layer is for the moment, topmost first.
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

    /// Which of those that wait can be published: where a layer implies directories, all below it have to be there.
    pub(crate) fn settle(&self) -> Result<Vec<usize>, Failure> {
        let mut ready = Vec::new();
        let mut has_all_below = true;
        for number in 0..self.layers.len() {
            match self.waiting.get(&number) {
                Some(waiting) if waiting.implied.is_empty() || has_all_below => {
                    parents::settle(&waiting.directory, &waiting.implied, &self.below(number))?;
                    ready.push(number);
                }
                Some(_) => has_all_below = false,
                None => has_all_below &= self.is_published(number),
            }
        }
        Ok(ready)
    }

    /// Publishes layers that are settled, and after them what else is to get its name, by one sync.
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
        // What cannot be removed is swept by the daemon.
        let _ = crate::remove_trees::run(&directories);
    }
}
