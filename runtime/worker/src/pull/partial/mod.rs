//! Pulls of a layer only what the node does not have, if the layer has a table of contents (zstd:chunked, eStargz).
//!
//! ```text
//! annotations ─► table, tar-split data (one range of the blob) ─► chunks ─► those in layers of the node: donors
//!                                                                      └──► the others: ranges of the blob, downloaded
//! archive = headers of the tar-split data + chunks of files ─► unpacked as always ─► the digest is the diff ID
//! ```
//! A layer in eStargz has no tar-split data: its headers are downloaded, or those of another layer ([`members`]).
//!
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
//!
//! A layer without a table, or with one, is pulled in the same way from a neighbour that has it unpacked ([`neighbour`]).

mod donors;
mod members;
mod neighbour;
mod rebuild;
mod table;

use coracle_chunked::{Plan, REGISTRY_EXTENTS_MAX, Wanted as Chunks};
use coracle_job::{Failure, FailureKind, Layer, Limits};

use super::blob::{Part, Wanted};
use super::follow::unverified_max;
use super::lock;
use super::sources::{Need, is_passing};
use super::transfer::Transfer;
use crate::unpack::VerifiedLayer;
use coracle_fetch::Get;
pub(super) use donors::Donors;
use rebuild::{Layout, Rebuild, Source, Stopped};
pub(super) use table::{is_listed, keep_index_of};

/// Maximum number of attempts: after each, files of other layers that are not what their index says are left out.
const ATTEMPTS_MAX: u32 = 8;

/// The reason why a layer cannot be pulled in part.
enum Obstacle {
    /// The whole blob is pulled; the text says why.
    Whole(String),
    /// The registry answers ranges with an error of a server: it fails at this moment, or refuses ranges in this way.
    Unavailable(String),
    /// The pull fails.
    Pull(Failure),
}

/// The downloads of a partial pull, and its share of the progress.
#[derive(Default)]
struct Begun {
    sources: Vec<Source>,
    counted: Counted,
}

/// Bytes of the progress that are not part of requested ranges.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// Bytes of the table of contents and the tar-split data.
    table: u64,
    /// Bytes of chunks that are reused instead of downloaded.
    reused: u64,
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
            | FailureKind::Signature
            | FailureKind::NoSpace => Self::Pull(failure),
        }
    }
}

impl Obstacle {
    /// All endpoints refuse ranges, at last with this failure.
    fn refused(failure: Failure) -> Self {
        match failure.kind {
            FailureKind::Unavailable => Self::Unavailable(failure.message),
            _ => Self::Whole(failure.message),
        }
    }
}

impl Transfer {
    /// Pulls the blob's layer in part; `None` if the whole blob has to be pulled, of which `whole` has what was downloaded before.
    pub(super) fn partial(
        &self,
        wanted: &Wanted,
        layer: &Layer,
        whole: &Part,
    ) -> Result<Option<VerifiedLayer>, Failure> {
        // Before the layers are read, for which neighbours wait, too.
        whole.announce_change();
        let donors = self.donors.layers(&self.store);
        if donors.is_empty() {
            return Ok(None);
        }
        let mut begun = Begun::default();
        let mut is_available = false;
        loop {
            let obstacle = match self.try_partial(wanted, layer, donors, whole, &mut begun) {
                Ok(pulled) => {
                    let unused = whole.length();
                    self.report.update(|progress| {
                        progress.bytes_done = progress.bytes_done.saturating_sub(unused);
                    });
                    return Ok(Some(pulled));
                }
                Err(obstacle) => obstacle,
            };
            self.count(&mut begun.counted, Counted::default());
            let why = match obstacle {
                Obstacle::Pull(failure) => return Err(failure),
                Obstacle::Whole(why) => Some(why),
                Obstacle::Unavailable(why) => is_available.then_some(why),
            };
            self.discard(&mut begun.sources)?;
            if let Some(why) = why {
                eprintln!("layer {} is pulled whole: {why}", wanted.blob.digest);
                return Ok(None);
            }
            // A registry that does not send the config, either, is down: all of the blob is no way out.
            let what = format!("blobs/{}", self.config);
            let get = Get { what, accept: "*/*".to_owned(), ..Get::default() };
            match self.sources.once(Need::Pull, |connection| connection.get(get.clone()).map(drop)) {
                Err(failure) if is_passing(&failure) => return Err(failure),
                _ => is_available = true,
            }
        }
    }

    fn try_partial(
        &self,
        wanted: &Wanted,
        layer: &Layer,
        donors: &[donors::Layer],
        begun: &Part,
        Begun { sources, counted }: &mut Begun,
    ) -> Result<VerifiedLayer, Obstacle> {
        let size = wanted.blob.size;
        let rest = size.saturating_sub(begun.length());
        let saves = |bytes| coracle_chunked::saves(bytes, rest);
        let fetched = table::fetch(self, &wanted.blob, layer, donors, &saves)?;
        let table::Fetched { contents, layout, stored, room: _room } = &fetched;
        let stored = *stored;
        if contents.bytes() > self.limits.layer_bytes_max {
            return Err(whole("its files are longer than the limit of a layer"));
        }
        let transfer = &self.limited_for(layout, contents.bytes(), size);
        let mut known = self.donors.find(&self.store, contents, &self.report);
        for attempt in 1..=ATTEMPTS_MAX {
            let chunks = contents.chunks();
            let is_missing = |index: usize| {
                let has_place = known.place(index).is_some() || chunks[index].is_zeros();
                (!has_place || layout.needs(index)) && !has(sources, index)
            };
            let plan = Plan::new(contents, REGISTRY_EXTENTS_MAX, is_missing);
            let bytes = sources.iter().map(|source| source.plan.bytes()).sum::<u64>() + plan.bytes();
            if !saves(bytes) {
                return Err(whole("the node has little of it"));
            }
            let reused = size.saturating_sub(bytes).saturating_sub(stored);
            self.count(counted, Counted { table: stored, reused });
            let part = match plan.bytes() {
                0 => None,
                _ => {
                    let Some(part) = self.part(wanted, layer, &plan, begun)? else {
                        return Err(whole("another pull has unpacked it"));
                    };
                    Some(part)
                }
            };
            sources.push(Source { plan, part });
            let rebuild = Rebuild { contents, known: &known, donors, layout };
            match rebuild.layer(transfer, wanted, layer, sources) {
                Ok(unpacked) => {
                    eprintln!("layer {}: {reused} of {size} bytes were on the node", wanted.blob.digest);
                    sources.clear();
                    lock::forget(&self.store, &wanted.blob.digest);
                    let keep = || table::keep_index(&self.store, &wanted.blob, layer, contents);
                    let index = unpacked.needs_index().then(keep).flatten();
                    return Ok(unpacked.with_index(index));
                }
                Err(Stopped::Damaged(index)) if has(sources, index) => self.restart(sources)?,
                Err(Stopped::Damaged(index)) => {
                    forget(&mut known, donors, index, attempt >= ATTEMPTS_MAX / 2)?;
                }
                Err(Stopped::Closed) => return Err(whole("its archive was not read to the end")),
                Err(Stopped::Failed(failure)) => return Err(failure.into()),
                Err(Stopped::Refused(failure)) => return Err(Obstacle::refused(failure)),
            }
        }
        Err(whole("too many files of the node's layers are not what they were"))
    }

    /// The transfer of a layer with this layout, `bytes` bytes in files and `size` bytes in its blob. Headers in eStargz come from the
    /// registry without a digest of their own, so that they are limited.
    fn limited_for(&self, layout: &Layout<'_>, bytes: u64, size: u64) -> Self {
        let most = match layout {
            Layout::Members(_) => bytes.saturating_add(unverified_max(size)),
            Layout::Split(_) | Layout::Outline(_) => u64::MAX,
        };
        let layer_bytes_max = self.limits.layer_bytes_max.min(most);
        Self { limits: Limits { layer_bytes_max, ..self.limits }, ..self.clone() }
    }

    /// Discards what was downloaded and has other digests than the table says, if an earlier pull began it: a power cut may have
    /// left anything in its part.
    fn restart(&self, sources: &mut Vec<Source>) -> Result<(), Obstacle> {
        let is_ours = |source: &Source| source.part.as_ref().is_none_or(Part::is_all_ours);
        match sources.iter().all(is_ours) {
            true => Err(whole("data of the registry does not have the digest of its table")),
            false => Ok(self.discard(sources)?),
        }
    }

    /// Opens the part for the ranges of `plan`; `None` if the layer is there.
    fn part(
        &self,
        wanted: &Wanted,
        layer: &Layer,
        plan: &Plan,
        begun: &Part,
    ) -> Result<Option<Part>, Failure> {
        let path = self.store.ranges(&wanted.blob.digest, plan.extents())?;
        let is_unpacked = || self.store.layer(&layer.name).is_dir();
        let mut part = Part::open(path, plan.extents().to_vec(), false, &is_unpacked, &self.report)?;
        if let Some(part) = &mut part {
            part.announce_with(begun);
            self.report.update(|progress| progress.bytes_done += part.length());
        }
        Ok(part)
    }

    /// Removes what was downloaded; ranges that a registry refuses now are kept for the next pull.
    fn discard(&self, sources: &mut Vec<Source>) -> Result<(), Failure> {
        for part in sources.drain(..).filter_map(|source| source.part) {
            self.report.update(|progress| {
                progress.bytes_done = progress.bytes_done.saturating_sub(part.length());
            });
            if !part.is_range_refused() {
                part.remove()?;
            }
        }
        Ok(())
    }

    /// Changes the numbers of bytes that count as done without the download of ranges.
    fn count(&self, counted: &mut Counted, now: Counted) {
        let before = std::mem::replace(counted, now);
        self.report.update(|progress| {
            progress.bytes_done =
                (progress.bytes_done + now.table + now.reused).saturating_sub(before.table + before.reused);
            progress.bytes_reused = (progress.bytes_reused + now.reused).saturating_sub(before.reused);
        });
    }
}

fn whole(why: &str) -> Obstacle {
    Obstacle::Whole(why.to_owned())
}

/// Forgets the places in the file of chunk `index`, whose content is not what its index said; or in all of its layer, which
/// was removed, or of which much has changed.
fn forget(
    known: &mut Chunks,
    donors: &[donors::Layer],
    index: usize,
    is_whole_layer: bool,
) -> Result<(), Obstacle> {
    let place = known.place(index).ok_or_else(|| whole("a chunk has no place"))?;
    let path = String::from_utf8_lossy(place.path);
    let name = donors.get(usize::from(place.layer)).map_or("", |donor| &donor.name);
    eprintln!("layer {name}: {path:?} is not what it was: `coracle image check` finds damage");
    match is_whole_layer {
        true => known.forget_layer_of(index),
        false => known.forget_file_of(index),
    }
    Ok(())
}

/// Whether one of these sources has chunk `index`.
fn has(sources: &[Source], index: usize) -> bool {
    sources.iter().any(|source| source.plan.position(index).is_some())
}
