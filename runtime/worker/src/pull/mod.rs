//! Pulling an image from a registry (OCI distribution specification 1.1).
//!
//! ```text
//!   name ─► manifest (index ─► this platform's) ─► config ─► layers, lowest first: fetch, verify, unpack ─► record
//! ```
//! Nothing is used before its digest is verified. Each document is asked of the endpoints in their order; the first
//! that has it is then asked for all the rest first. What an aborted pull leaves are parts of blobs and whole layers,
//! which the next one does not fetch again.

mod blob;
mod challenge;
mod endpoint;
pub(crate) mod manifest;

use coracle_job::{Failure, FailureKind, ImageRecord, PullJob};

use crate::failure::{Context, failure, invalid};
use crate::image_config::{DOCUMENT_BYTES_MAX, digest_of};
use crate::registries::{self, Endpoint};
use crate::store::Store;
use crate::{image_config, unpack, users};
use endpoint::{Connection, Connections};
use manifest::{Descriptor, Document};

/// An index may name an index, as nested as nobody makes them.
const INDEX_DEPTH_MAX: u32 = 3;

/// Pulls the image; `progress` hears of compressed bytes done and in all.
pub(crate) fn run(job: &PullJob, progress: &mut dyn FnMut(u64, u64)) -> Result<ImageRecord, Failure> {
    let store = Store::open(&job.root)?;
    let reference = if job.digest.is_empty() { &job.tag } else { &job.digest };
    let name = format!("{}/{}:{reference}", job.registry, job.repository);
    let endpoints = registries::endpoints(job);
    Pull { job, store, endpoints: &endpoints, connections: Connections::new(), first: 0 }
        .image(reference, progress)
        .context(|| format!("pull {name}"))
}

struct Pull<'a> {
    job: &'a PullJob,
    store: Store,
    endpoints: &'a [Endpoint],
    connections: Connections<'a>,
    /// The endpoint that answered last: asked first for the next thing.
    first: usize,
}

/// A manifest with its bytes and digest.
struct Fetched {
    digest: String,
    bytes: Vec<u8>,
}

impl Pull<'_> {
    fn image(&mut self, reference: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<ImageRecord, Failure> {
        let top =
            self.document(&format!("manifests/{reference}"), manifest::ACCEPT, &self.job.digest.clone())?;
        let name_digest = top.digest.clone();
        let mut documents = vec![top];
        let (config, layers) = self.resolve(&mut documents)?;
        let total = layers.iter().map(|layer| layer.size).fold(config.size, u64::saturating_add);
        let document = self.document(&format!("blobs/{}", config.digest), "*/*", &config.digest)?;
        let parsed = image_config::parse(&document.bytes)?;
        if !matches!(parsed.os.as_str(), "" | "linux")
            || !matches!(parsed.architecture.as_str(), "" | manifest::ARCHITECTURE)
        {
            let text =
                format!("no match for platform in manifest: it is {}/{}", parsed.os, parsed.architecture);
            return Err(failure(FailureKind::NotFound, text));
        }
        if parsed.layers.len() != layers.len() || layers.len() > self.job.limits.layers_max as usize {
            let text = format!(
                "{} layers, {} diff IDs, at most {}",
                layers.len(),
                parsed.layers.len(),
                self.job.limits.layers_max
            );
            return Err(invalid(text));
        }
        let mut done = config.size;
        for (layer, blob) in parsed.layers.iter().zip(&layers) {
            self.layer(layer, blob, &mut |bytes| progress(done.saturating_add(bytes), total))
                .context(|| format!("layer {}", blob.digest))?;
            done = done.saturating_add(blob.size);
        }
        users::extract(&self.store, &config.digest, &parsed.layers)?;
        documents.push(Fetched { digest: config.digest.clone(), bytes: document.bytes });
        self.keep(&documents)?;
        let documents_bytes: u64 = documents.iter().map(|document| document.bytes.len() as u64).sum();
        // A layer that was there unpacked was not fetched: its blob may never have been here.
        let kept = layers.iter().map(|layer| layer.digest.clone());
        let kept = kept
            .filter(|digest| self.job.keep_blobs && self.store.blob(digest).is_ok_and(|path| path.exists()));
        let name = format!("{}/{}", self.job.registry, self.job.repository);
        Ok(ImageRecord {
            id: config.digest,
            tags: if self.job.digest.is_empty() {
                vec![format!("{name}:{}", self.job.tag)]
            } else {
                Vec::new()
            },
            digests: vec![format!("{name}@{name_digest}")],
            size_bytes: layers.iter().map(|layer| layer.size).fold(documents_bytes, u64::saturating_add),
            layers: parsed.layers,
            blobs: documents.into_iter().map(|document| document.digest).chain(kept).collect(),
            config: parsed.config,
        })
    }

    /// From the document a name led to, down to one image.
    fn resolve(&mut self, documents: &mut Vec<Fetched>) -> Result<(Descriptor, Vec<Descriptor>), Failure> {
        for _ in 0..=INDEX_DEPTH_MAX {
            let Some(last) = documents.last() else { break };
            match manifest::parse(&last.bytes)? {
                Document::Manifest { config, layers } => return Ok((config, layers)),
                Document::Index(manifests) => {
                    let chosen = manifest::choose(&manifests)?;
                    let what = format!("manifests/{}", chosen.digest);
                    documents.push(self.document(&what, manifest::ACCEPT, &chosen.digest)?);
                }
            }
        }
        Err(invalid(format!("manifest: indexes nested deeper than {INDEX_DEPTH_MAX}")))
    }

    /// A manifest or config, whole in memory and verified; an empty `digest` takes what the tag leads to.
    fn document(&mut self, what: &str, accept: &str, digest: &str) -> Result<Fetched, Failure> {
        self.ask(|connection, _| {
            let mut response = connection.get(what, accept, 0)?;
            let read = response.body_mut().with_config().limit(DOCUMENT_BYTES_MAX).read_to_vec();
            let bytes = read.map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(_) => {
                    invalid(format!("{what}: longer than {DOCUMENT_BYTES_MAX} bytes"))
                }
                error => failure(FailureKind::Unavailable, format!("{}: {what}: {error}", connection.name())),
            })?;
            let found = digest_of(&bytes);
            if !digest.is_empty() && found != digest {
                return Err(invalid(format!("{what}: its content has digest {found}")));
            }
            Ok(Fetched { digest: found, bytes })
        })
    }

    fn layer(
        &mut self,
        layer: &coracle_job::Layer,
        blob: &Descriptor,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        if self.store.layer(&layer.name).is_dir() {
            progress(blob.size);
            return Ok(());
        }
        self.ask(|connection, store| blob::fetch(connection, store, blob, progress))?;
        let path = self.store.blob(&blob.digest)?;
        unpack::unpack_layer(&self.store, &path, layer, &self.job.limits)?;
        if !self.job.keep_blobs {
            std::fs::remove_file(&path)
                .map_err(|error| crate::failure::io_failure("remove", &path, &error))?;
        }
        Ok(())
    }

    fn keep(&self, documents: &[Fetched]) -> Result<(), Failure> {
        for document in documents {
            let (part, path) = (self.store.aside(&document.digest)?, self.store.blob(&document.digest)?);
            if !path.exists() {
                let written = std::fs::write(&part, &document.bytes);
                written.map_err(|error| crate::failure::io_failure("write", &part, &error))?;
                self.store.publish(&part, &path)?;
            }
        }
        Ok(())
    }

    /// Asks the endpoints, the one that answered last first, until one gives what is asked. What they said is in the
    /// failure, and its kind is that of the last one, unless an earlier one says more than "not there".
    fn ask<T>(
        &mut self,
        mut ask: impl FnMut(&mut Connection<'_>, &Store) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let count = self.endpoints.len();
        let mut failures: Vec<Failure> = Vec::new();
        for index in (0..count).map(|step| (self.first + step) % count) {
            let connection = match self.connections.entry(index) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(place) => {
                    match Connection::new(&self.endpoints[index], &self.job.registry) {
                        Ok(connection) => place.insert(connection),
                        Err(error) => {
                            failures.push(error);
                            continue;
                        }
                    }
                }
            };
            match ask(connection, &self.store) {
                Ok(answer) => {
                    self.first = index;
                    return Ok(answer);
                }
                // A full disk is full for every endpoint.
                Err(error) if error.kind == FailureKind::NoSpace => return Err(error),
                Err(error) => failures.push(error),
            }
        }
        let kind =
            failures.iter().map(|failure| failure.kind).rev().find(|kind| *kind != FailureKind::NotFound);
        let kind = kind.unwrap_or(if failures.is_empty() {
            FailureKind::Unavailable
        } else {
            FailureKind::NotFound
        });
        let texts: Vec<String> = failures.into_iter().map(|failure| failure.message).collect();
        Err(failure(kind, if texts.is_empty() { "no endpoint to ask".to_owned() } else { texts.join("; ") }))
    }
}
