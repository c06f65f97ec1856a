//! The layers of one image during a pull or import: each is unpacked into a temporary directory, in any order
//! and by any thread, and several layers are published together.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use coracle_chunked::outline::{BYTES_MAX, Purpose};
use coracle_filelist::{Reader, Sums};
use coracle_job::{Failure, Layer, Limits};

use super::{parents, unpack_verified};
use crate::failure::io_failure;
use crate::store::{Move, Store, open_plain};

/// The image's layers. Unpublished layers are removed on drop.
pub(crate) struct Aside<'a> {
    store: &'a Store,
    /// All layers of the image, lowest first.
    layers: &'a [Layer],
    limits: &'a Limits,
    /// Complete and verified layers by their index in the image.
    waiting: BTreeMap<usize, VerifiedLayer>,
}

/// A layer that was unpacked into a temporary directory and has the required diff ID. The owner publishes or
/// discards it; the daemon removes the directories of a worker that was killed.
pub(crate) struct VerifiedLayer {
    directory: PathBuf,
    /// Paths of the directories without an entry of their own; see [`parents`].
    implied: Vec<Vec<u8>>,
    /// Publishes the outline of the layer.
    outline: Option<Move>,
    /// The purpose of the outline.
    purpose: Option<Purpose>,
    /// Publishes the index of the layer, whose place is that of the outline.
    index: Option<Move>,
    /// Checksums of its files.
    sums: Sums,
    /// Publishes the list of its files.
    list: Option<Move>,
    /// Whether the list of its files was written, or could not be.
    is_listed: bool,
}

impl VerifiedLayer {
    /// Unpacks `blob`, a file or a pipe, into a new directory and verifies that it is `layer`; `pulse` receives
    /// the number of bytes that were read, or 0 if `blob` has no position.
    pub(crate) fn unpack(
        store: &Store,
        layer: &Layer,
        limits: &Limits,
        blob: File,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Self, Failure> {
        let mut new = Self {
            directory: store.new_layer()?,
            implied: Vec::new(),
            outline: new_outline(store, layer),
            purpose: store.outlines(),
            index: None,
            sums: Sums::default(),
            list: None,
            is_listed: false,
        };
        // A layer without an outline is only not passed on.
        let file = new.outline.as_ref().and_then(|(path, _)| File::create(path).ok());
        let outline = file.as_ref().zip(store.outlines());
        match unpack_verified(&new.directory, blob, layer, limits, outline, pulse) {
            Ok(unpacked) => {
                let is_right = |file: File| file.metadata().is_ok_and(|about| about.len() <= BYTES_MAX);
                if !(unpacked.has_outline && file.is_some_and(is_right)) {
                    new.discard_outline();
                }
                Ok(Self { implied: unpacked.implied, sums: Sums::new(unpacked.sums), ..new })
            }
            Err(failure) => {
                new.discard();
                Err(store.explain(failure))
            }
        }
    }

    /// Whether the layer may have no outline when it is published: with implied directories it may lose it ([`Aside::complete`]).
    pub(crate) fn needs_index(&self) -> bool {
        self.outline.is_none() || !self.implied.is_empty()
    }

    /// The layer with its index, which is published with it. The layer's outline takes its place, unless there is none then.
    pub(crate) fn with_index(self, index: Option<Move>) -> Self {
        Self { index, ..self }
    }

    /// Removes the directory. An error is ignored, because it would hide the reason for the removal; the daemon
    /// removes what remains.
    pub(crate) fn discard(mut self) {
        self.discard_outline();
        discard_file(self.index.take());
        discard_file(self.list.take());
        let _ = coracle_trees::remove::run(&[self.directory]);
    }

    /// Writes the list of its files, when all attributes are set; reads none of them. The layer is used without a list, too: then damage is
    /// less likely to be found.
    fn write_list(&mut self, store: &Store, layer: &Layer) {
        // Only once: the checksums are gone then, and those of what the disk has now may be of something else.
        if std::mem::replace(&mut self.is_listed, true) {
            return;
        }
        let written = store.aside_of_layer(&layer.chain_id, "list").and_then(|path| {
            let file = File::create(&path).map_err(|error| io_failure("create", &path, &error))?;
            self.list = Some((path, Store::place(store.list(&layer.name))));
            let (mut pulse, into) = (|| (), BufWriter::new(file));
            let mut reader = Reader::new(0, &mut pulse);
            coracle_filelist::write(&self.directory, &self.implied, &self.sums, &mut reader, into)
                .map_err(|error| Failure::invalid(error.to_string()))
        });
        if let Err(failure) = written {
            eprintln!("layer {} gets no list: {}", layer.name, failure.message);
            discard_file(self.list.take());
        }
        self.sums = Sums::default();
    }

    fn discard_outline(&mut self) {
        discard_file(self.outline.take());
    }
}

fn discard_file(file: Option<Move>) {
    if let Some((path, _)) = file {
        // The daemon removes it otherwise.
        let _ = std::fs::remove_file(path);
    }
}

/// The move that publishes the outline of a layer, if layers get one.
fn new_outline(store: &Store, layer: &Layer) -> Option<Move> {
    store.outlines()?;
    let path = store.aside_of_layer(&layer.chain_id, "outline").ok()?;
    Some((path, store.place_of_index(&layer.name)))
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
        if !self.has(number) {
            let (layer, blob) = (&self.layers[number], open_plain(blob)?);
            self.add(number, VerifiedLayer::unpack(self.store, layer, self.limits, blob, pulse)?);
        }
        Ok(())
    }

    /// Adds layer `number`, which is discarded if the layer already exists.
    pub(crate) fn add(&mut self, number: usize, layer: VerifiedLayer) {
        match self.has(number) {
            true => layer.discard(),
            false => drop(self.waiting.insert(number, layer)),
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
    pub(crate) fn complete(&mut self) -> Result<Vec<usize>, Failure> {
        let (mut ready, mut hidden) = (Vec::new(), Vec::new());
        let mut has_all_below = true;
        for number in 0..self.layers.len() {
            match self.waiting.get(&number) {
                Some(waiting) if waiting.implied.is_empty() || has_all_below => {
                    let (directory, implied) = (&waiting.directory, &waiting.implied);
                    if !parents::copy_attributes(directory, implied, &self.below(number))? {
                        hidden.push(number);
                    }
                    ready.push(number);
                }
                Some(_) => has_all_below = false,
                None => has_all_below &= self.is_published(number),
            }
        }
        for number in &ready {
            let Some(waiting) = self.waiting.get_mut(number) else { continue };
            // The process that serves neighbours cannot read what is below such a directory.
            if hidden.contains(number) && waiting.purpose == Some(Purpose::Neighbours) {
                waiting.discard_outline();
            }
            waiting.write_list(self.store, &self.layers[*number]);
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
        let waiting = ready.iter().filter_map(|number| self.waiting.get(number));
        // An outline replaces the layer's index. A list without its layer does no harm.
        let (mut lists, mut indexes) = (Vec::new(), Vec::new());
        for layer in waiting {
            lists.extend(layer.list.clone());
            indexes.extend(layer.index.iter().chain(&layer.outline).cloned());
        }
        let moves: Vec<Move> = lists.into_iter().chain(layers).chain(indexes).chain(others).collect();
        self.store.publish_all(&moves)?;
        self.waiting.retain(|number, _| !ready.contains(number));
        Ok(())
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.waiting).into_values().for_each(VerifiedLayer::discard);
    }
}
