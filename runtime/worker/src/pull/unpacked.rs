//! Downloads one blob and unpacks its layers, in one of the threads of a pull. The first layer is unpacked while
//! the blob is being downloaded; an image in which several layers have the same blob is rare.

use std::path::Path;

use coracle_job::{Failure, FailureKind, Layer};

use super::blob::{self, Found, Part, Wanted};
use super::follow::Growing;
use super::neighbours::Round;
use super::partial::keep_index_of;
use super::transfer::Transfer;
use crate::failure::thread_failure;
use crate::store::open_plain;
use crate::unpack::VerifiedLayer;

/// Stack size in bytes of the unpacking thread, which waits for confined processes.
const STACK_BYTES: usize = 256 << 10;

/// A blob whose layers have been unpacked.
pub(super) struct UnpackedBlob {
    /// The part of the blob, which is locked so that other workers wait for the layers; it is empty if the layer was pulled in
    /// part. `None` if the blob was in the store, or another worker has unpacked it.
    pub(super) part: Option<Part>,
    /// The unpacked layers with their indices in the image, without those that another worker published.
    pub(super) layers: Vec<(usize, VerifiedLayer)>,
}

impl Transfer {
    /// Downloads the blob, or what the node does not have of it, unless it is in the store, and unpacks its layers.
    pub(super) fn run(&self, wanted: &Wanted) -> Result<UnpackedBlob, Failure> {
        let mut unpacked = UnpackedBlob { part: None, layers: Vec::new() };
        let result = match blob::find(&self.store, wanted, &self.report)? {
            Found::Unpacked => return Ok(unpacked),
            Found::Kept(path) => self.unpack(&mut unpacked, &path, &wanted.layers),
            Found::Part(mut part) => match wanted.layers.split_first() {
                None => return Ok(unpacked),
                Some(((number, layer), rest)) => {
                    let mut round = self.ask(&mut part, &wanted.blob, layer);
                    if rest.is_empty()
                        && let Some(layer) = self.only_what_changed(&mut part, wanted, layer, &mut round)?
                    {
                        return Ok(UnpackedBlob { part: Some(part), layers: vec![(*number, layer)] });
                    }
                    let verified = self.follow(&mut part, wanted, layer, round)?;
                    // Ranges that an earlier attempt has downloaded.
                    blob::forget(&self.store, &wanted.blob.digest);
                    let keep = || keep_index_of(&self.store, &wanted.blob, part.path(), layer);
                    let is_needed = self.donors.are_used() && verified.needs_index();
                    let index = is_needed.then(keep).flatten();
                    unpacked.layers.push((*number, verified.with_index(index)));
                    let unpacked_rest = self.unpack(&mut unpacked, part.path(), rest);
                    unpacked.part = Some(part);
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

    /// Pulls the layer from a neighbour that has it unpacked, or in part from the registry; `None` if the blob has to be pulled.
    fn only_what_changed(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        round: &mut Option<Round>,
    ) -> Result<Option<VerifiedLayer>, Failure> {
        if let Some(layer) = self.take_unpacked(part, wanted, layer, round)? {
            return Ok(Some(layer));
        }
        if wanted.blob.contents.is_none() || part.length() > 0 {
            return Ok(None);
        }
        part.stop_announcing();
        self.partial(wanted, layer)
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

    /// Downloads the rest of the blob and unpacks it meanwhile.
    fn follow(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        round: Option<Round>,
    ) -> Result<VerifiedLayer, Failure> {
        let (arrival, file, path) = (part.arrival(), part.handle()?, part.path().to_owned());
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
            let downloaded = self.download(part, &wanted.blob, round);
            arrival.end(downloaded.is_ok());
            let unpacked =
                unpacking.join().map_err(|_| internal("the thread that unpacks panicked".into()))?;
            match (downloaded, unpacked) {
                (Ok(()), Ok(Some(layer))) => Ok(layer),
                (Ok(()), Ok(None)) => Err(internal("a verified blob was not unpacked".into())),
                (Ok(()), Err(failure)) => Err(failure),
                (Err(failure), unpacked) => {
                    if let Ok(Some(layer)) = unpacked {
                        layer.discard();
                    }
                    Err(failure)
                }
            }
        })
    }
}
