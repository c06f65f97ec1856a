//! Downloads one blob and unpacks its layers, in one of the threads of a pull. The first layer is unpacked while
//! the blob is being downloaded; an image in which several layers have the same blob is rare.

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, Layer};
use coracle_site::turn::{Step, Turn};

use super::blob::{self, Found, Part, Wanted};
use super::follow::Growing;
use super::lock;
use super::neighbours::Round;
use super::partial::{is_listed, keep_index_of};
use super::shared::{AGE_MAX, PAUSE};
use super::transfer::Transfer;
use crate::failure::thread_failure;
use crate::store::open_plain;
use crate::unpack::VerifiedLayer;

/// Stack size in bytes of the unpacking thread, which waits for confined processes.
const STACK_BYTES: usize = 256 << 10;

/// Maximum number of times that a blob with a table of contents is followed, and that its layer is taken from neighbours, before the
/// registry is asked for what changed.
const TRIES_MAX: u32 = 2;
/// Maximum pause between two queries of all neighbours: one may download what changed for long.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// A layer that was pulled.
enum Pulled {
    /// The blob is complete, too.
    Whole(VerifiedLayer),
    /// The layer was pulled without the blob.
    InPart(VerifiedLayer),
}

/// The end of a wait for neighbours.
enum Turned {
    /// A neighbour had the layer.
    Layer(Box<VerifiedLayer>),
    /// A neighbour has the blob, or downloads it.
    Follow,
    /// This node asks the registry.
    Ask,
}

/// A blob whose layers have been unpacked.
pub(super) struct UnpackedBlob {
    /// The part of the blob, which is locked so that other workers wait for the layers; it is not complete if the layer was pulled in
    /// part. `None` if the blob was in the store, or another worker has unpacked it.
    pub(super) part: Option<Part>,
    /// The unpacked layers with their indices in the image, without those that another worker published.
    pub(super) layers: Vec<(usize, VerifiedLayer)>,
}

impl Transfer {
    /// Downloads the blob, or what the node does not have of it, unless it is in the store, and unpacks its layers.
    pub(super) fn run(&self, wanted: &Wanted) -> Result<UnpackedBlob, Failure> {
        self.of(&wanted.blob).unpacked(wanted)
    }

    fn unpacked(&self, wanted: &Wanted) -> Result<UnpackedBlob, Failure> {
        let mut unpacked = UnpackedBlob { part: None, layers: Vec::new() };
        let result = match blob::find(&self.store, wanted, &self.report)? {
            Found::Unpacked => return Ok(unpacked),
            Found::Kept(path) => self.unpack(&mut unpacked, &path, &wanted.layers),
            Found::Part(mut part) => match wanted.layers.split_first() {
                None => return Ok(unpacked),
                Some(((number, layer), rest)) => {
                    let verified = match self.pull_layer(&mut part, wanted, layer, rest.is_empty())? {
                        Pulled::Whole(verified) => verified,
                        Pulled::InPart(verified) => {
                            if verified.needs_index() {
                                // Neighbours cannot take it.
                                part.stop_announcing();
                            }
                            return Ok(UnpackedBlob { part: Some(*part), layers: vec![(*number, verified)] });
                        }
                    };
                    // Ranges that an earlier attempt has downloaded.
                    lock::forget(&self.store, &wanted.blob.digest);
                    let keep = || keep_index_of(self, &wanted.blob, part.path(), layer);
                    let is_needed = self.donors.are_used() && verified.needs_index();
                    let index = is_needed.then(keep).flatten();
                    unpacked.layers.push((*number, verified.with_index(index)));
                    let unpacked_rest = self.unpack(&mut unpacked, part.path(), rest);
                    unpacked.part = Some(*part);
                    unpacked_rest
                }
            },
        };
        match result {
            Ok(()) => Ok(unpacked),
            Err(failure) => {
                unpacked.layers.into_iter().for_each(|(_, layer)| layer.discard());
                Err(failure)
            }
        }
    }

    /// Pulls a layer: from a neighbour, in part from the registry, or with the whole blob. `is_only`: the blob has no other layer.
    fn pull_layer(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        is_only: bool,
    ) -> Result<Pulled, Failure> {
        let mut round = self.ask(part, &wanted.blob, layer);
        let has_table = is_listed(&wanted.blob) && self.donors.are_used() && !part.is_complete();
        if is_only && has_table {
            for _ in 0..TRIES_MAX {
                match self.turn(part, wanted, layer, &mut round)? {
                    Turned::Layer(layer) => return Ok(Pulled::InPart(*layer)),
                    Turned::Follow => {
                        if let Some(layer) = self.follow(part, wanted, layer, round.take(), false)? {
                            return Ok(Pulled::Whole(layer));
                        }
                    }
                    Turned::Ask => break,
                }
            }
            if !part.is_complete() {
                if let Some(layer) = self.partial(wanted, layer, part)? {
                    return Ok(Pulled::InPart(layer));
                }
                self.announce(part);
            }
        } else if is_only && let Some(layer) = self.take_unpacked(part, wanted, layer, &mut round)? {
            return Ok(Pulled::InPart(layer));
        }
        let pulled = self.follow(part, wanted, layer, round, true)?;
        let missing = || Failure::new(FailureKind::Internal, "the registry was not asked for the blob");
        pulled.map(Pulled::Whole).ok_or_else(missing)
    }

    /// Waits until a neighbour has the layer or its blob, or it is this node that asks the registry for what changed ([`Turn`]). `round`
    /// are the answers before and after.
    fn turn(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        round: &mut Option<Round>,
    ) -> Result<Turned, Failure> {
        let (mut turn, mut tries, mut pause) = (Turn::new(wanted.blob.size), 0, PAUSE);
        loop {
            self.report.pulse();
            // A complete part is not verified if a neighbour was too slow at its end.
            let neighbours = self.sources.neighbours().filter(|_| !part.is_complete());
            let Some((neighbours, _)) = neighbours else { return Ok(Turned::Ask) };
            let is_fresh = |round: &Round| round.begun.elapsed() < AGE_MAX;
            *round = round.take().filter(is_fresh).or_else(|| self.ask(part, &wanted.blob, layer));
            if tries < TRIES_MAX
                && round.is_some()
                && let Some(layer) = self.take_unpacked(part, wanted, layer, round)?
            {
                return Ok(Turned::Layer(Box::new(layer)));
            }
            let Some(Round { begun, answers }) = round else {
                tries += 1;
                continue;
            };
            let order = neighbours.own_order(&wanted.blob.digest);
            let step = turn.step(answers, part.length(), order, *begun, Instant::now());
            if step == Step::Follow {
                return Ok(Turned::Follow);
            }
            *round = None;
            // A node that cannot take unpacked layers any more has nothing to wait for.
            if step == Step::Ask || tries >= TRIES_MAX {
                return Ok(Turned::Ask);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Unpacks the complete blob at `path`.
    fn unpack(
        &self,
        unpacked: &mut UnpackedBlob,
        path: &Path,
        layers: &[(usize, Layer)],
    ) -> Result<(), Failure> {
        for (number, layer) in layers {
            if self.store.layer(&layer.name).is_dir() {
                continue;
            }
            let pulse = &mut |_| self.report.pulse();
            let blob = open_plain(path)?;
            let verified = VerifiedLayer::unpack(&self.store, layer, &self.limits, blob, pulse)?;
            unpacked.layers.push((*number, verified));
        }
        Ok(())
    }

    /// Downloads the rest of the blob and unpacks it meanwhile; `None` if neighbours do not have it, and the registry is not asked.
    fn follow(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        round: Option<Round>,
        asks_registry: bool,
    ) -> Result<Option<VerifiedLayer>, Failure> {
        let (arrival, file, path) = (part.new_arrival(), part.handle()?, part.path().to_owned());
        let internal = |text: String| Failure::new(FailureKind::Internal, text);
        let size = wanted.blob.size;
        std::thread::scope(|scope| {
            let growing = Growing { file: &file, path: &path, arrival: &arrival };
            let unpacking = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || {
                    growing.unpack(&self.store, layer, size, &self.limits, &self.report)
                })
                .map_err(|error| thread_failure("unpacks", &error))?;
            let downloaded = self.download(part, &wanted.blob, round, asks_registry);
            arrival.end(matches!(downloaded, Ok(true)));
            let unpacked =
                unpacking.join().map_err(|_| internal("the thread that unpacks panicked".into()))?;
            match (downloaded, unpacked) {
                (Ok(true), Ok(Some(layer))) => Ok(Some(layer)),
                (Ok(true), Ok(None)) => Err(internal("a verified blob was not unpacked".into())),
                (Ok(true), Err(failure)) => Err(failure),
                (downloaded, unpacked) => {
                    if let Ok(Some(layer)) = unpacked {
                        layer.discard();
                    }
                    downloaded.map(|_| None)
                }
            }
        })
    }
}
