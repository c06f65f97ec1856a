//! Pulls of a layer only what the node does not have, if the layer has a table of contents (zstd:chunked).
//!
//! ```text
//! annotations ─► table, tar-split data (one range of the blob) ─► chunks ─► those in layers of the node: donors
//!                                                                      └──► the others: ranges of the blob, downloaded
//! archive = headers of the tar-split data + chunks of files ─► unpacked as always ─► the digest is the diff ID
//! ```
//! | what | is verified by |
//! |---|---|
//! | table | its digest in the manifest |
//! | tar-split data | its digest in the table |
//! | a chunk, from the registry or from a file of another layer | its digest in the table |
//! | the archive, and so all of the layer | the diff ID in the image config |
//!
//! The layer is the same as if the whole blob were unpacked, because its archive is. If anything of this is not possible (a registry
//! without ranges, a table that is wrong, little to be saved), the whole blob is pulled, and the worker's log says why. A registry
//! that cannot be reached is a failure of the pull, and the next one resumes: the whole blob would be many more bytes on a bad line.
//! Tables and chunks are decompressed by confined processes ([`crate::jail::stream`]).

mod donors;
mod rebuild;
mod table;

use coracle_chunked::{Plan, Wanted as Chunks};
use coracle_job::{Failure, FailureKind, Layer};

use super::blob::{Part, Wanted};
use super::transfer::Transfer;
use crate::store::Move;
use crate::unpack::VerifiedLayer;
pub(super) use donors::Donors;
use rebuild::{Rebuild, Source, Stopped};
pub(super) use table::keep_index_of;

/// Maximum number of attempts: after each, files of other layers that are not what their index says are left out.
const ATTEMPTS_MAX: u32 = 8;

/// A pull is partial if it saves at least this part of the blob.
const SAVED_MIN: f64 = 0.1;

/// The reason why a layer cannot be pulled in part.
enum Obstacle {
    /// The whole blob is pulled; the text says why.
    Whole(String),
    /// The pull fails.
    Pull(Failure),
}

impl From<Failure> for Obstacle {
    fn from(failure: Failure) -> Self {
        match failure.kind {
            FailureKind::Invalid | FailureKind::NotFound | FailureKind::Internal | FailureKind::Plugin => {
                Self::Whole(failure.message)
            }
            FailureKind::Unavailable
            | FailureKind::RateLimited
            | FailureKind::Certificate
            | FailureKind::NameResolution
            | FailureKind::Denied
            | FailureKind::NoSpace => Self::Pull(failure),
        }
    }
}

impl Transfer {
    /// Pulls the blob's layer in part; `None` if the whole blob has to be pulled. The move publishes the layer's index.
    pub(super) fn partial(
        &self,
        wanted: &Wanted,
        layer: &Layer,
    ) -> Result<Option<(VerifiedLayer, Option<Move>)>, Failure> {
        let donors = self.donors.layers(&self.store, &self.report);
        if wanted.blob.contents.is_none() || donors.is_empty() {
            return Ok(None);
        }
        let (mut sources, mut reused) = (Vec::new(), 0);
        match self.try_partial(wanted, layer, donors, &mut sources, &mut reused) {
            Ok(pulled) => Ok(Some(pulled)),
            Err(Obstacle::Pull(failure)) => Err(failure),
            Err(Obstacle::Whole(why)) => {
                eprintln!("layer {} is pulled whole: {why}", wanted.blob.digest);
                self.reuse(&mut reused, 0);
                for part in sources.into_iter().filter_map(|source| source.part) {
                    self.report.update(|progress| {
                        progress.bytes_done = progress.bytes_done.saturating_sub(part.length());
                    });
                    part.remove()?;
                }
                Ok(None)
            }
        }
    }

    fn try_partial(
        &self,
        wanted: &Wanted,
        layer: &Layer,
        donors: &[donors::Layer],
        sources: &mut Vec<Source>,
        reused: &mut u64,
    ) -> Result<(VerifiedLayer, Option<Move>), Obstacle> {
        let whole = |why: &str| Obstacle::Whole(why.to_owned());
        let (table, split) = table::fetch(self, &wanted.blob)?;
        let contents = table.contents;
        if contents.bytes() > self.limits.layer_bytes_max {
            return Err(whole("its files are longer than the limit of a layer"));
        }
        let mut known = Chunks::new(&contents);
        donors::find(&self.store, donors, &mut known);
        let mut bytes = 0;
        for _ in 0..ATTEMPTS_MAX {
            let chunks = contents.chunks();
            let is_missing = |index: usize| {
                known.place(index).is_none()
                    && !chunks[index].is_zeros()
                    && sources.iter().all(|source| source.plan.position(index).is_none())
            };
            let plan = Plan::new(&contents, is_missing);
            bytes += plan.bytes();
            if bytes as f64 > wanted.blob.size as f64 * (1.0 - SAVED_MIN) {
                return Err(whole("the node has little of it"));
            }
            self.reuse(reused, wanted.blob.size.saturating_sub(bytes));
            let part = match plan.bytes() {
                0 => None,
                _ => {
                    let Some(part) = self.part(wanted, layer, &plan)? else {
                        return Err(whole("another pull has unpacked it"));
                    };
                    Some(part)
                }
            };
            sources.push(Source { plan, part });
            let rebuild = Rebuild { contents: &contents, known: &known, donors, split: &split };
            match rebuild.layer(self, wanted, layer, sources) {
                Ok(unpacked) => {
                    eprintln!(
                        "layer {}: {reused} of {} bytes were on the node",
                        wanted.blob.digest, wanted.blob.size
                    );
                    std::mem::take(sources)
                        .into_iter()
                        .filter_map(|source| source.part)
                        .try_for_each(Part::remove)?;
                    let index = table::keep_index(&self.store, &wanted.blob, layer, &contents);
                    return Ok((unpacked, index));
                }
                Err(Stopped::Damaged(index)) => {
                    let Some(place) = known.place(index) else {
                        return Err(whole("data of the registry does not have the digest of its table"));
                    };
                    let path = String::from_utf8_lossy(place.path);
                    let name = donors.get(usize::from(place.layer)).map_or("", |donor| &donor.name);
                    eprintln!(
                        "layer {name}: {path:?} is not what it was: `coracle image check` finds damage"
                    );
                    known.forget_file_of(index);
                }
                Err(Stopped::Failed(failure)) => return Err(failure.into()),
            }
        }
        Err(whole("too many files of the node's layers are not what they were"))
    }

    /// Opens the part for the ranges of `plan`; `None` if the layer is there.
    fn part(&self, wanted: &Wanted, layer: &Layer, plan: &Plan) -> Result<Option<Part>, Failure> {
        let path = self.store.ranges(&wanted.blob.digest, plan.extents())?;
        let is_unpacked = || self.store.layer(&layer.name).is_dir();
        let part = Part::open(path, plan.extents().to_vec(), false, &is_unpacked, &self.report)?;
        if let Some(part) = &part {
            self.report.update(|progress| progress.bytes_done += part.length());
        }
        Ok(part)
    }

    /// Changes the number of bytes that are not downloaded, which count as done.
    fn reuse(&self, counted: &mut u64, bytes: u64) {
        let before = std::mem::replace(counted, bytes);
        self.report.update(|progress| {
            progress.bytes_done = (progress.bytes_done + bytes).saturating_sub(before);
            progress.bytes_reused = (progress.bytes_reused + bytes).saturating_sub(before);
        });
    }
}
