//! What of an image is whole and not published yet. A sync writes all that is unfinished on the disk, the beginnings of
//! blobs that are still coming included, and a blob that goes before one is never written at all: so layers wait for each
//! other, half a minute at most.
//!
//! | a blob came | it goes | what a kill costs, once its layer is there and the image is not |
//! |---|---|---|
//! | within that half minute | before the sync of its layer, unwritten | the download of half a minute, again |
//! | more slowly: it is written already | with the whole image | nothing: orphaned layers go, their blobs are unpacked again |

use std::time::Instant;

use coracle_job::{Failure, FailureKind, Layer, Limits};

use super::blob::{Fetched, Part, WRITTEN_BACK};
use crate::store::{Move, Store};
use crate::unpack::Aside;

/// Layers wait only on a disk that has so many times the bytes of the download free: on a smaller one each layer is
/// published, and its blob gone, before the next is unpacked.
const ROOM_FACTOR: u64 = 6;

/// The image's layers, and blobs that they came from.
pub(super) struct Batch<'a> {
    store: &'a Store,
    aside: Aside<'a>,
    keep_blobs: bool,
    /// Each with the places in the image of the layers that came out of it.
    spent: Vec<(Blob, Vec<usize>)>,
    /// Of layers that are published; the image is not.
    held: Vec<Blob>,
    /// The first that waits began to.
    since: Option<Instant>,
    /// No layer waits for the next.
    is_tight: bool,
}

/// A blob that came, locked, and its digest.
type Blob = (Part, String);

impl<'a> Batch<'a> {
    pub(super) fn new(store: &'a Store, layers: &'a [Layer], limits: &'a Limits, keep_blobs: bool) -> Self {
        let aside = Aside::new(store, layers, limits);
        Self { store, aside, keep_blobs, spent: Vec::new(), held: Vec::new(), since: None, is_tight: false }
    }

    /// So many bytes are going to come.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.is_tight = !self.store.has_room(bytes.saturating_mul(ROOM_FACTOR));
    }

    /// Unpacks a blob as the layers of these numbers.
    pub(super) fn unpack(
        &mut self,
        digest: String,
        fetched: Fetched,
        numbers: Vec<usize>,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), Failure> {
        let path = match &fetched {
            Fetched::Kept(path) => path,
            Fetched::Part(part) => part.path(),
            Fetched::Unpacked => return Ok(()),
        };
        for number in &numbers {
            self.aside.unpack(*number, path, pulse)?;
        }
        self.since.get_or_insert_with(Instant::now);
        if let Fetched::Part(part) = fetched {
            self.spent.push(((part, digest), numbers));
        }
        Ok(())
    }

    /// Publishes what is ready, where it has waited long enough.
    pub(super) fn publish_if_due(&mut self) -> Result<(), Failure> {
        match self.since {
            Some(since) if self.is_tight || since.elapsed() >= WRITTEN_BACK => {
                self.publish(Vec::new())?;
                match self.is_tight && !self.keep_blobs {
                    true => std::mem::take(&mut self.held).into_iter().try_for_each(remove),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Publishes what is ready, and then the others.
    fn publish(&mut self, moves: Vec<Move>) -> Result<(), Failure> {
        let ready = self.aside.settle()?;
        let is_ready = |number: &usize| ready.contains(number) || !self.aside.is_waiting(*number);
        let (spent, rest) = std::mem::take(&mut self.spent)
            .into_iter()
            .partition(|(_, numbers): &(Blob, Vec<usize>)| numbers.iter().all(is_ready));
        self.spent = rest;
        for (blob, _) in spent {
            match !self.keep_blobs && blob.0.is_young() {
                true => remove(blob)?,
                false => self.held.push(blob),
            }
        }
        self.aside.publish(&ready, moves)?;
        self.since = (!self.spent.is_empty()).then(Instant::now);
        Ok(())
    }

    /// Publishes all of it, blobs that are to be kept included; the others go.
    pub(super) fn finish(mut self, mut moves: Vec<Move>) -> Result<(), Failure> {
        if !self.keep_blobs {
            self.publish(moves)?;
            return self.held.into_iter().try_for_each(remove);
        }
        for (part, digest) in self.spent.iter().map(|(blob, _)| blob).chain(&self.held) {
            moves.push((part.path().to_owned(), self.store.blob(digest)?));
        }
        self.publish(moves)
    }

    /// The image does not come: what is whole stays for the next try, but on a full disk.
    pub(super) fn give_up(mut self, failure: Failure) -> Failure {
        if failure.kind != FailureKind::NoSpace {
            // The first failure says more.
            let _ = self.publish(Vec::new());
        }
        failure
    }

    /// Where every layer is for the moment, topmost first.
    pub(super) fn directories(&self) -> Vec<std::path::PathBuf> {
        self.aside.directories()
    }
}

fn remove((part, _): Blob) -> Result<(), Failure> {
    part.remove()
}
