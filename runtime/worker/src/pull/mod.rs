//! Pulls an image from a registry (OCI distribution specification 1.1).
//!
//! ```text
//! name ─► manifest (index ─► this platform's) ─► config ─► judge ─► transfer: several blobs at once ─► users ─► record
//!                                                                   download ─► part ─► unpack
//! ```
//! A layer is unpacked while its blob is being downloaded ([`follow`]), and published when both digests are
//! verified. If the layer has a table of contents, only what the node does not have of it is downloaded ([`partial`]).
//! Before that the image is judged, if the node has a policy ([`signatures`]).
//! The endpoints are tried in order; the first one that has a
//! document is then preferred for all others. An aborted pull leaves parts of blobs and complete layers,
//! which the next pull reuses.

mod batch;
mod blob;
mod connection;
mod document;
mod follow;
mod lock;
mod neighbours;
mod partial;
mod shared;
mod signatures;
mod sources;
mod transfer;
mod unpacked;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use coracle_chunked::outline::Purpose;
use coracle_job::{Failure, FailureKind, ImageRecord, Layer, PullJob};

use crate::failure::{Context, thread_failure};
use crate::report::{self, Report};
use crate::store::{Move, Store};
use crate::{policy, users};
use batch::Batch;
use blob::Wanted;
use connection::Connection;
use coracle_fetch::{Fetcher, Get, RequestFailure};
use coracle_manifest::{
    self as manifest, DOCUMENT_BYTES_MAX, Descriptor, Kind, Resolution, Resolved, config as image_config,
    digest_of, hex, resolve,
};
use coracle_programs::{Candidate, Verifiers};
use document::read_document;
use neighbours::Neighbours;
use partial::Donors;
use sources::{Need, Sources, is_passing};
use transfer::Transfer;
use unpacked::UnpackedBlob;

/// Stack size in bytes of a thread that downloads and unpacks a blob.
const STACK_BYTES: usize = 256 << 10;

/// Pulls the image through `fetcher`, which is ended after the pull; `report` receives the progress. Returns the image's record, and
/// one line for each requirement of the node's policy that it meets.
pub(crate) fn run(
    job: &PullJob,
    fetcher: Option<Fetcher>,
    verifiers: Option<Verifiers>,
    report: &Arc<Report>,
) -> Result<(ImageRecord, Vec<String>), Failure> {
    let missing = || Failure::new(FailureKind::Internal, "the fetcher process was not started");
    let fetcher = Arc::new(fetcher.ok_or_else(missing)?);
    let pulled = pull(job, &fetcher, verifiers, report);
    fetcher.end();
    pulled
}

fn pull(
    job: &PullJob,
    fetcher: &Arc<Fetcher>,
    verifiers: Option<Verifiers>,
    report: &Arc<Report>,
) -> Result<(ImageRecord, Vec<String>), Failure> {
    let store = Store::open(&job.root)?
        .with_outlines(job.registries.neighbours.port.map(|_| Purpose::Neighbours))
        .remaking(job.remake.clone())?;
    let reference = if job.digest.is_empty() { &job.tag } else { &job.digest };
    let endpoints = coracle_registries::endpoints(
        &job.registries,
        &job.root,
        &job.registry,
        &job.repository,
        &job.credentials,
    );
    fetcher.set_up(&endpoints, &job.registry)?;
    let connection = |(index, endpoint)| Connection::new(index, endpoint, fetcher.clone());
    let connections = endpoints.into_iter().enumerate().map(connection).collect();
    // The daemon adds the name of the image to errors.
    let sources = Arc::new(Sources::new(connections, Neighbours::of(job, fetcher)));
    Pull { job, store, sources, report }.image(reference, verifiers)
}

struct Pull<'a> {
    job: &'a PullJob,
    store: Store,
    sources: Arc<Sources>,
    report: &'a Arc<Report>,
}

/// A blob's digest, the number of its layers, and the result of its transfer.
type Transferred = (String, u32, Result<UnpackedBlob, Failure>);

/// A manifest with its bytes and digest.
struct Fetched {
    digest: String,
    /// Media type of the answer.
    media_type: String,
    bytes: Vec<u8>,
    /// Whether the registry has further parts of a list.
    has_more: bool,
}

impl Pull<'_> {
    fn image(
        &self,
        reference: &str,
        verifiers: Option<Verifiers>,
    ) -> Result<(ImageRecord, Vec<String>), Failure> {
        let top = self.document(&format!("manifests/{reference}"), None, &self.job.digest)?;
        let name_digest = top.digest.clone();
        let candidate = self.candidate(&top);
        let resolved = self.resolve(top)?;
        let mut accepted = self.judge(&resolved)?;
        if let Some(verifiers) = verifiers {
            accepted.signed.extend(verifiers.ask(&candidate, &|| self.report.pulse())?);
        }
        let Resolved { id, config, documents, layers, foreign } = resolved;
        // Of layers only: documents are not counted where they come from.
        let total = layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        let parsed = image_config::parse(&config)?;
        // Also those of layers that are there already.
        layers.iter().try_for_each(|layer| hex(&layer.digest).map(drop)).context(|| "layer".to_owned())?;
        if let Some(platform) = foreign {
            eprintln!("{}", manifest::foreign_image(&platform));
        }
        if parsed.layers.len() != layers.len() || layers.len() > self.job.limits.layers_max as usize {
            let text = format!(
                "{} layers, {} diff IDs, at most {}",
                layers.len(),
                parsed.layers.len(),
                self.job.limits.layers_max
            );
            return Err(Failure::invalid(text));
        }
        self.report.update(|progress| {
            progress.bytes_total = total;
            progress.layers_total = layers.len() as u32;
        });
        let documents: Vec<(String, Vec<u8>)> = documents.into_iter().chain([(id.clone(), config)]).collect();
        let mut batch = Batch::new(&self.store, &parsed.layers, &self.job.limits, self.job.keep_blobs);
        if let Err(failure) = self.layers(&mut batch, &parsed.layers, &layers, &id) {
            return Err(batch.give_up(failure));
        }
        let mut moves: Vec<Move> =
            users::extract(&self.store, &id, &batch.directories())?.into_iter().collect();
        policy::keep(&self.store, &id, accepted.kept)?;
        for (digest, bytes) in &documents {
            moves.extend(self.store.keep(digest, bytes)?);
        }
        batch.finish(moves)?;
        let documents_bytes: u64 = documents.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        // The blob of a layer that was already unpacked may never have been downloaded.
        let kept = layers.iter().map(|layer| layer.digest.clone());
        let kept = kept
            .filter(|digest| self.job.keep_blobs && self.store.blob(digest).is_ok_and(|path| path.exists()));
        let name = format!("{}/{}", self.job.registry, self.job.repository);
        let record = ImageRecord {
            id,
            tags: if self.job.digest.is_empty() {
                vec![format!("{name}:{}", self.job.tag)]
            } else {
                Vec::new()
            },
            digests: Vec::from_iter(accepted.refused.is_empty().then(|| format!("{name}@{name_digest}"))),
            size_bytes: layers.iter().map(|layer| layer.size).fold(documents_bytes, u64::saturating_add),
            layers: parsed.layers,
            blobs: documents.into_iter().map(|(digest, _)| digest).chain(kept).collect(),
            config: parsed.config,
        };
        Ok((record, accepted.signed))
    }

    /// The image as verifiers see it.
    fn candidate(&self, top: &Fetched) -> Candidate {
        let PullJob { registry, repository, tag, digest, .. } = self.job;
        let version = if digest.is_empty() { format!(":{tag}") } else { format!("@{digest}") };
        let descriptor = coracle_programs::Descriptor {
            media_type: top.media_type.clone(),
            digest: top.digest.clone(),
            size: top.bytes.len() as u64,
        };
        Candidate { name: format!("{registry}/{repository}{version}"), descriptor }
    }

    /// Follows the document of a reference to the image for this platform.
    fn resolve(&self, top: Fetched) -> Result<Resolved, Failure> {
        let read = |descriptor: &Descriptor, kind| {
            let (folder, digest) = match kind {
                Kind::Manifest if descriptor.digest == top.digest => return Ok(Some(top.bytes.clone())),
                Kind::Manifest => ("manifests", &descriptor.digest),
                Kind::Config => ("blobs", &descriptor.digest),
            };
            hex(digest)?;
            // No document is empty, but that of a tag has no descriptor.
            let size = Some(descriptor.size).filter(|size| *size > 0 || kind == Kind::Config);
            self.document(&format!("{folder}/{digest}"), size, digest).map(|document| Some(document.bytes))
        };
        let mut stated = Descriptor::of(&top.digest);
        stated.media_type.clone_from(&top.media_type);
        match resolve(&stated, &read)? {
            Resolution::Found(found) => Ok(found),
            Resolution::Foreign(platforms) => Err(manifest::no_match(platforms.into_iter())),
            Resolution::NoManifest(digest) | Resolution::NoConfig(digest) => {
                Err(Failure::new(FailureKind::Internal, format!("{digest} was not requested")))
            }
        }
    }

    /// Downloads and verifies a manifest or config, whose `size` may be known. If `digest` is empty, the document is
    /// that of a tag.
    ///
    /// The registry is asked before neighbours: a tag may have moved, and a document is shorter than the questions to all of them. A
    /// neighbour's word for a tag counts only if the registry cannot be reached for as long as a pull tries.
    fn document(&self, what: &str, size: Option<u64>, digest: &str) -> Result<Fetched, Failure> {
        let need = if digest.is_empty() { Need::Resolve } else { Need::Pull };
        let accept = if what.starts_with("manifests/") { manifest::accept() } else { "*/*".to_owned() };
        let read = |connection: &Connection| read_verified(connection, what, &accept, size, digest);
        let of_registry = || self.sources.ask(need, &mut (), |()| 0, |connection, ()| read(connection));
        let neighbours = self.sources.neighbours().filter(|(neighbours, _)| neighbours.have_documents());
        let Some((neighbours, connection)) = neighbours else { return of_registry() };
        let first = if digest.is_empty() { of_registry() } else { self.sources.once(need, read) };
        let failure = match first {
            Err(failure) if is_passing(&failure) && failure.kind != FailureKind::RateLimited => failure,
            answer => return answer,
        };
        let from = |peer| {
            self.report.pulse();
            read(&connection.neighbour(neighbours, peer))
                .inspect_err(|failed| eprintln!("{}", failed.failure.message))
                .ok()
        };
        match neighbours.reachable().find_map(from) {
            Some(found) => {
                eprintln!("{what} is that of a neighbour: {}", failure.message);
                Ok(found)
            }
            None if digest.is_empty() => Err(failure),
            None => of_registry(),
        }
    }

    /// Downloads and unpacks several layers concurrently.
    fn layers(
        &self,
        batch: &mut Batch<'_>,
        layers: &[Layer],
        blobs: &[Descriptor],
        config: &str,
    ) -> Result<(), Failure> {
        let mut wanted: VecDeque<Wanted> = VecDeque::new();
        for (number, (layer, blob)) in layers.iter().zip(blobs).enumerate() {
            let known = wanted.iter_mut().find(|known| known.blob.digest == blob.digest);
            let is_there = self.store.layer(&layer.name).is_dir();
            if is_there || known.is_some() {
                self.report.update(|progress| {
                    progress.bytes_done = progress.bytes_done.saturating_add(blob.size);
                    progress.layers_done += u32::from(is_there);
                });
            }
            match known {
                _ if is_there => lock::forget(&self.store, &blob.digest),
                Some(known) => known.layers.push((number, layer.clone())),
                None => {
                    wanted.push_back(Wanted { blob: blob.clone(), layers: vec![(number, layer.clone())] });
                }
            }
        }
        self.make_sure_of_room(batch, &wanted)?;
        let transfers = self.transfer(wanted, config)?;
        while let Some((digest, count, blob)) = self.next(&transfers, batch)? {
            let blob = blob.context(|| format!("layer {digest}"))?;
            batch.add(digest, blob);
            self.report.update(|progress| {
                progress.layers_done = (progress.layers_done + count).min(progress.layers_total);
            });
            batch.publish_if_due()?;
        }
        Ok(())
    }

    /// Refuses an image, before the download, that cannot fit on the disk: an unpacked layer is not smaller
    /// than its archive, and the last blobs are removed only after they are unpacked.
    fn make_sure_of_room(&self, batch: &mut Batch<'_>, wanted: &VecDeque<Wanted>) -> Result<(), Failure> {
        let sizes = || wanted.iter().map(|wanted| wanted.blob.size);
        let unpacked = sizes().fold(0, u64::saturating_add);
        let blobs = if self.job.keep_blobs { unpacked } else { sizes().max().unwrap_or(0) };
        let part = |wanted: &Wanted| self.store.part(&wanted.blob.digest).ok()?.metadata().ok();
        let begun: u64 = wanted.iter().filter_map(part).map(|about| about.len()).sum();
        batch.expect(unpacked);
        // Space for a part and a directory of each layer.
        self.store.need(unpacked.saturating_add(blobs).saturating_sub(begun), 2 * wanted.len() as u64)
    }

    /// Waits for the next unpacked blob; `None` after the last one. Progress is reported also while a download
    /// is blocked.
    fn next(
        &self,
        transfers: &mpsc::Receiver<Transferred>,
        batch: &mut Batch<'_>,
    ) -> Result<Option<Transferred>, Failure> {
        loop {
            match transfers.recv_timeout(report::PAUSE) {
                Ok(transferred) => return Ok(Some(transferred)),
                Err(mpsc::RecvTimeoutError::Timeout) => self.report.catch_up(),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
            }
            batch.publish_if_due()?;
        }
    }

    /// Starts the threads that transfer the blobs, each one at a time. The channel is closed after the last
    /// blob. If the receiver is dropped, the threads end with the process, and the daemon removes incomplete
    /// layers.
    fn transfer(
        &self,
        wanted: VecDeque<Wanted>,
        config: &str,
    ) -> Result<mpsc::Receiver<Transferred>, Failure> {
        let (sender, transferred) = mpsc::channel();
        let threads = (self.job.registries.timeouts.connections as usize).clamp(1, wanted.len().max(1));
        let wanted = Arc::new(Mutex::new(wanted));
        let transfer = Transfer {
            sources: self.sources.clone(),
            store: self.store.clone(),
            limits: self.job.limits,
            report: self.report.clone(),
            announced_for: self.job.registries.neighbours.port.map(|_| self.job.registry.clone()),
            config: config.to_owned(),
            tables: Arc::default(),
            donors: Arc::new(Donors::new(self.job.relatives.clone())),
        };
        for _ in 0..threads {
            let (sender, wanted, transfer) = (sender.clone(), wanted.clone(), transfer.clone());
            let next = move || wanted.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let work = move || {
                while let Some(wanted) = next() {
                    let unpacked = transfer.run(&wanted);
                    let count = wanted.layers.len() as u32;
                    if sender.send((wanted.blob.digest, count, unpacked)).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn(work)
                .map_err(|error| thread_failure("downloads", &error))?;
        }
        Ok(transferred)
    }
}

/// Requests a document from one endpoint or neighbour and verifies it.
fn read_verified(
    connection: &Connection,
    what: &str,
    accept: &str,
    size: Option<u64>,
    digest: &str,
) -> Result<Fetched, RequestFailure> {
    let get = Get { what: what.to_owned(), accept: accept.to_owned(), size, ..Get::default() };
    let (head, bytes) = read_document(connection, get, DOCUMENT_BYTES_MAX, |_| true)?;
    let wrong = |text: String| Failure::invalid(format!("{}: {what}: {text}", connection.name()));
    let found = digest_of(&bytes);
    if !digest.is_empty() && found != digest {
        return Err(wrong(format!("its content has digest {found}")).into());
    }
    if digest.is_empty() && !connection.vouches_for(&head, &found) {
        return Err(wrong("no node of the site vouches for it".to_owned()).into());
    }
    // Nothing else tells whether the content of a tag arrived unchanged. A digest of another algorithm may be
    // ignored (OCI distribution specification 1.1, "Pulling manifests").
    if digest.is_empty() && hex(&head.digest).is_ok() && head.digest != found {
        return Err(wrong(format!("its content has digest {found}, not {}", head.digest)).into());
    }
    if let Some(size) = size.filter(|size| *size != bytes.len() as u64) {
        return Err(wrong(format!("{} bytes, but its descriptor says {size}", bytes.len())).into());
    }
    Ok(Fetched { digest: found, media_type: head.media_type, bytes, has_more: head.has_more })
}
