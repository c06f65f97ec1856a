//! Publishes the layers of an image in batches. A sync writes all dirty data of the disk, including
//! incomplete downloads, whereas a blob that is removed before a sync is never written to the disk. Therefore
//! unpacked layers are published after at most half a minute and not immediately, unless neighbours wait for one.
//!
//! | a blob was downloaded | it is removed | cost of a kill after its layer was published and before the image |
//! |---|---|---|
//! | within half a minute | before the sync of its layer, unwritten | the download of half a minute is repeated |
//! | more slowly: it is already written | with the whole image | none: orphaned layers are removed, their blobs are unpacked again |

use std::time::Instant;

use coracle_job::{Failure, FailureKind, Layer, Limits};

use super::blob::{Part, WRITTEN_BACK};
use super::unpacked::UnpackedBlob;
use crate::store::{Move, Store};
use crate::unpack::Aside;

/// Layers are delayed only if the free space is this multiple of the download size: on a smaller disk each
/// layer is published, and its blob removed, before the next one is unpacked.
const ROOM_FACTOR: u64 = 6;

/// The image's layers and the blobs that contain them.
pub(super) struct Batch<'a> {
    store: &'a Store,
    aside: Aside<'a>,
    keep_blobs: bool,
    /// Unpacked blobs, each with the indices of its layers.
    spent: Vec<(Blob, Vec<usize>)>,
    /// Blobs of published layers, kept until the image is complete.
    held: Vec<Blob>,
    /// Time at which the first delayed layer was unpacked; `None` if no layer is delayed.
    since: Option<Instant>,
    /// Whether layers are published immediately, because the disk is small.
    is_tight: bool,
    /// Whether neighbours wait for a layer, so that the layers are published now.
    is_awaited: bool,
}

/// A downloaded and locked blob, and its digest.
type Blob = (Part, String);

impl<'a> Batch<'a> {
    pub(super) fn new(store: &'a Store, layers: &'a [Layer], limits: &'a Limits, keep_blobs: bool) -> Self {
        let aside = Aside::new(store, layers, limits);
        let (spent, held) = (Vec::new(), Vec::new());
        Self { store, aside, keep_blobs, spent, held, since: None, is_tight: false, is_awaited: false }
    }

    /// Announces the number of bytes that will be downloaded, which determines whether layers are delayed.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.is_tight = !self.store.has_room(bytes.saturating_mul(ROOM_FACTOR));
    }

    /// Adds the layers of the blob `digest`.
    pub(super) fn add(&mut self, digest: String, blob: UnpackedBlob) {
        let numbers = blob.layers.iter().map(|(number, _)| *number).collect();
        for (number, layer) in blob.layers {
            self.aside.add(number, layer);
        }
        self.since.get_or_insert_with(Instant::now);
        if let Some(part) = blob.part {
            self.is_awaited |= part.is_announced() && !part.is_complete();
            self.spent.push(((part, digest), numbers));
        }
    }

    /// Publishes the unpacked layers if the first one has been delayed for long enough.
    pub(super) fn publish_if_due(&mut self) -> Result<(), Failure> {
        match self.since {
            Some(since) if self.is_tight || self.is_awaited || since.elapsed() >= WRITTEN_BACK => {
                self.publish(Vec::new())?;
                match self.is_tight && !self.keep_blobs {
                    true => std::mem::take(&mut self.held).into_iter().try_for_each(remove),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Publishes the unpacked layers together with `moves`.
    fn publish(&mut self, moves: Vec<Move>) -> Result<(), Failure> {
        let ready = self.aside.complete()?;
        let is_ready = |number: &usize| ready.contains(number) || !self.aside.is_waiting(*number);
        let (spent, rest) = std::mem::take(&mut self.spent)
            .into_iter()
            .partition(|(_, numbers): &(Blob, Vec<usize>)| numbers.iter().all(is_ready));
        self.spent = rest;
        for (blob, _) in spent {
            // One that is not complete was pulled in part, and is announced until the layer is published.
            match !self.keep_blobs && blob.0.is_young() && blob.0.is_complete() {
                true => remove(blob)?,
                false => self.held.push(blob),
            }
        }
        self.aside.publish(&ready, moves)?;
        self.since = (!self.spent.is_empty()).then(Instant::now);
        self.is_awaited = false;
        Ok(())
    }

    /// Publishes all layers and `moves`, including kept blobs; removes the other blobs.
    pub(super) fn finish(mut self, mut moves: Vec<Move>) -> Result<(), Failure> {
        if !self.keep_blobs {
            self.publish(moves)?;
            return self.held.into_iter().try_for_each(remove);
        }
        // The part of a layer that was pulled in part is empty.
        let is_blob = |(part, _): &&Blob| part.is_complete();
        for (part, digest) in self.spent.iter().map(|(blob, _)| blob).chain(&self.held).filter(is_blob) {
            moves.push((part.path().to_owned(), self.store.blob(digest)?));
        }
        self.publish(moves)?;
        self.held.into_iter().filter(|blob| !is_blob(&blob)).try_for_each(remove)
    }

    /// Ends a failed pull: publishes complete layers for the next attempt, unless the disk is full. Returns
    /// the failure.
    pub(super) fn give_up(mut self, failure: Failure) -> Failure {
        if failure.kind != FailureKind::NoSpace {
            // The first failure is returned.
            let _ = self.publish(Vec::new());
        }
        failure
    }

    /// The current directory of each layer, topmost first.
    pub(super) fn directories(&self) -> Vec<std::path::PathBuf> {
        self.aside.directories()
    }
}

fn remove((part, _): Blob) -> Result<(), Failure> {
    part.remove()
}
