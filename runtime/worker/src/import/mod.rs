//! Importing archives: what `docker save` and OCI tools write, for nodes without an uplink (CRI 8.2,
//! AIR-2, AIR-3, AIR-8).
//!
//! ```text
//!   archive ─► spool ─► index.json (OCI) or manifest.json (docker) ─► images of this platform ─► layers, users ─► records
//! ```
//! An archive that breaks off, or lies about a digest, leaves nothing that is seen: records are the daemon's to write.

mod spool;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use coracle_job::{Failure, FailureKind, ImageRecord, ImportJob};
use serde::Deserialize;

use crate::failure::{Context, failure, invalid, io_failure};
use crate::image_config::{self, digest_of};
use crate::pull::manifest::{self, ARCHITECTURE, Descriptor, Document};
use crate::pull::platform;
use crate::store::{Move, Store};
use crate::unpack::Aside;
use crate::users;
pub(crate) use spool::{Piece, digest_of_file, scatter};
use spool::{Spool, Spooled, missing};

/// Indexes below indexes, as nested as nobody makes them.
const INDEX_DEPTH_MAX: u32 = 3;

/// Where tools put a whole reference.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// Where the specification puts a name, mostly only a tag.
const OCI_NAME: &str = "org.opencontainers.image.ref.name";

/// Images of an archive, and why others of it are none.
type Imported = (Vec<ImageRecord>, Vec<Failure>);

/// Imports every image of this platform that can be; `progress` hears of bytes read of the archive. An archive of which
/// nothing can be imported is a failure.
pub(crate) fn run(job: &ImportJob, progress: &mut (dyn FnMut(u64, u64) + Send)) -> Result<Imported, Failure> {
    let store = Store::open(&job.root)?;
    let mut import = || -> Result<Imported, Failure> {
        let spool = Spool::read(&store, &job.archive, job.limits.layer_bytes_max, progress)?;
        let import = Import { job, store: &store, spool: &spool, progress: Mutex::new(progress) };
        let (records, mut refused) = match (spool.get("index.json"), spool.get("manifest.json")) {
            (Some(_), _) => import.oci()?,
            (None, Some(_)) => import.docker()?,
            (None, None) => return Err(invalid("archive: neither index.json nor manifest.json is in it")),
        };
        match records.is_empty() {
            true if !refused.is_empty() => Err(refused.swap_remove(0)),
            true => {
                let text = format!("no match for platform in manifest: linux/{ARCHITECTURE}: not found");
                Err(failure(FailureKind::NotFound, text))
            }
            false => Ok((records, refused)),
        }
    };
    import().context(|| format!("import {}", job.archive.display()))
}

struct Import<'a> {
    job: &'a ImportJob,
    store: &'a Store,
    spool: &'a Spool,
    /// Also called by the thread that decompresses.
    progress: Mutex<&'a mut (dyn FnMut(u64, u64) + Send)>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Vec<Named>,
}

/// A descriptor of the top index, with its annotations.
#[derive(Deserialize)]
struct Named {
    #[serde(flatten)]
    descriptor: Descriptor,
    #[serde(default)]
    annotations: HashMap<String, String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

/// What one image is made of, whichever form it came in.
struct Parts<'a> {
    config: Vec<u8>,
    /// Lowest first; the digest where it is known.
    layers: Vec<(&'a Spooled, Option<String>)>,
    /// Manifests and indexes that lead to it.
    documents: Vec<(String, Vec<u8>)>,
    tags: Vec<String>,
    digests: Vec<String>,
}

impl Import<'_> {
    fn oci(&self) -> Result<Imported, Failure> {
        let index: Index = serde_json::from_slice(&self.spool.document("index.json")?)
            .map_err(|error| invalid(format!("archive: index.json: {error}")))?;
        let (mut records, mut refused): Imported = Default::default();
        for named in &index.manifests {
            let record = match self.oci_parts(named).and_then(|parts| self.image(parts)) {
                Ok(Some(record)) => record,
                Ok(None) => continue,
                Err(error) => {
                    one_of_many(error, &mut refused)?;
                    continue;
                }
            };
            // The same image under several names.
            match records.iter_mut().find(|known| known.id == record.id) {
                Some(known) => {
                    known.tags.extend(
                        record.tags.into_iter().filter(|tag| !known.tags.contains(tag)).collect::<Vec<_>>(),
                    );
                    known.digests.extend(record.digests);
                    known.digests.sort();
                    known.digests.dedup();
                    known.blobs.extend(record.blobs);
                    known.blobs.sort();
                    known.blobs.dedup();
                }
                None => records.push(record),
            }
        }
        Ok((records, refused))
    }

    /// `None`: nothing for this platform.
    fn oci_parts(&self, named: &Named) -> Result<Option<Parts<'_>>, Failure> {
        if !named.descriptor.may_be_ours() {
            return Ok(None); // unread: what others' manifests point to need not be layers
        }
        let annotation = |key: &str| named.annotations.get(key).filter(|name| is_full_reference(name));
        let name = annotation(CONTAINERD_NAME).or_else(|| annotation(OCI_NAME));
        let mut documents = Vec::new();
        let mut descriptor = named.descriptor.clone();
        for _ in 0..=INDEX_DEPTH_MAX {
            let Some(bytes) = self.spool.blob_document(&descriptor.digest)? else {
                return Ok(None); // archives of one platform leave the others' blobs out
            };
            let document = manifest::parse(&bytes)?;
            documents.push((descriptor.digest.clone(), bytes));
            match document {
                // An index of one image, or of one more index, need not say for which platform: the config does.
                Document::Index(manifests) => {
                    let unsaid = || manifests.iter().find(|manifest| manifest.may_be_ours());
                    match manifest::choose(&manifests).ok().or_else(unsaid) {
                        Some(chosen) => descriptor = chosen.clone(),
                        None => return Ok(None),
                    }
                }
                Document::Manifest { config, layers } => {
                    let config_bytes =
                        self.spool.blob_document(&config.digest)?.ok_or_else(|| missing(&config.digest))?;
                    if !is_ours(&config_bytes)? {
                        return Ok(None);
                    }
                    let mut files = Vec::with_capacity(layers.len());
                    for layer in layers {
                        let file = self.spool.blob(&layer.digest)?.ok_or_else(|| missing(&layer.digest))?;
                        files.push((file, Some(layer.digest)));
                    }
                    let digest =
                        name.map(|name| format!("{}@{}", repository_of(name), named.descriptor.digest));
                    // With a digest in the name, that decides and the tag is ignored (CRI 2.27).
                    let tag = name.filter(|name| !name.contains('@'));
                    return Ok(Some(Parts {
                        config: config_bytes,
                        layers: files,
                        documents,
                        tags: tag.into_iter().cloned().collect(),
                        digests: digest.into_iter().collect(),
                    }));
                }
            }
        }
        Err(invalid(format!("archive: indexes nested deeper than {INDEX_DEPTH_MAX}")))
    }

    fn docker(&self) -> Result<Imported, Failure> {
        let images: Vec<DockerImage> = serde_json::from_slice(&self.spool.document("manifest.json")?)
            .map_err(|error| invalid(format!("archive: manifest.json: {error}")))?;
        let (mut records, mut refused): Imported = Default::default();
        for image in images {
            match self.docker_parts(image).and_then(|parts| self.image(parts)) {
                Ok(record) => records.extend(record),
                Err(error) => one_of_many(error, &mut refused)?,
            }
        }
        Ok((records, refused))
    }

    /// `None`: it is for another platform.
    fn docker_parts(&self, image: DockerImage) -> Result<Option<Parts<'_>>, Failure> {
        let config = self.spool.document(&image.config)?;
        if !is_ours(&config)? {
            return Ok(None);
        }
        let mut layers = Vec::new();
        for name in image.layers.unwrap_or_default() {
            layers.push((self.spool.get(&name).ok_or_else(|| missing(&name))?, None));
        }
        let tags = image.repo_tags.unwrap_or_default();
        Ok(Some(Parts { config, layers, documents: Vec::new(), tags, digests: Vec::new() }))
    }

    fn image(&self, parts: Option<Parts<'_>>) -> Result<Option<ImageRecord>, Failure> {
        let Some(parts) = parts else { return Ok(None) };
        let id = digest_of(&parts.config);
        let parsed = image_config::parse(&parts.config)?;
        let (count, max) = (parsed.layers.len(), self.job.limits.layers_max as usize);
        if count != parts.layers.len() || count > max {
            return Err(invalid(format!(
                "image {id}: {} layers, {count} diff IDs, at most {max}",
                parts.layers.len()
            )));
        }
        let mut aside = Aside::new(self.store, &parsed.layers, &self.job.limits);
        for (number, (file, _)) in parts.layers.iter().enumerate() {
            let pulse = &mut |bytes| {
                self.progress.lock().unwrap_or_else(PoisonError::into_inner)(bytes, file.bytes);
            };
            let unpacked = aside.unpack(number, &file.path, pulse);
            unpacked.context(|| format!("image {id}: layer {}", parsed.layers[number].diff_id))?;
        }
        let ready = aside.settle().context(|| format!("image {id}"))?;
        let mut moves: Vec<Move> =
            users::extract(self.store, &id, &aside.directories())?.into_iter().collect();
        let size_bytes = parts.config.len() as u64
            + parts.documents.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
            + parts.layers.iter().map(|(file, _)| file.bytes).sum::<u64>();
        let mut blobs = vec![id.clone()];
        moves.extend(self.store.keep(&id, &parts.config)?);
        for (digest, bytes) in &parts.documents {
            moves.extend(self.store.keep(digest, bytes)?);
            blobs.push(digest.clone());
        }
        blobs.extend(self.keep_layers(&parts.layers, &mut moves)?);
        aside.publish(&ready, moves)?;
        drop(aside);
        Ok(Some(ImageRecord {
            id,
            tags: parts.tags,
            digests: parts.digests,
            size_bytes,
            layers: parsed.layers,
            blobs,
            config: parsed.config,
        }))
    }

    /// Compressed layers that are to stay, by a second name: the spool's goes with the spool.
    fn keep_layers(
        &self,
        layers: &[(&Spooled, Option<String>)],
        moves: &mut Vec<Move>,
    ) -> Result<Vec<String>, Failure> {
        let mut kept = Vec::new();
        for (file, digest) in layers {
            let Some(digest) = digest.as_ref().filter(|_| self.job.keep_blobs) else { continue };
            let (part, path) = (self.store.aside(digest)?, self.store.blob(digest)?);
            if !path.exists() && !kept.contains(digest) {
                std::fs::hard_link(&file.path, &part).map_err(|error| io_failure("link", &part, &error))?;
                moves.push((part, path));
            }
            kept.push(digest.clone());
        }
        Ok(kept)
    }
}

/// An image that is bad costs itself only; what ails the node ends it all.
fn one_of_many(failure: Failure, refused: &mut Vec<Failure>) -> Result<(), Failure> {
    match failure.kind {
        FailureKind::Invalid | FailureKind::NotFound => {
            refused.push(failure);
            Ok(())
        }
        _ => Err(failure),
    }
}

/// Whether an image is for this node; old images do not say.
fn is_ours(config: &[u8]) -> Result<bool, Failure> {
    let document = image_config::parse(config)?;
    Ok(platform::is_ours(&document.os, &document.architecture))
}

/// More than a tag: `registry/path:tag` or `name:tag`.
fn is_full_reference(name: &str) -> bool {
    name.contains(['/', ':']) && !name.starts_with(':')
}

/// The name without tag and digest.
fn repository_of(name: &str) -> &str {
    let tagged = name.split_once('@').map_or(name, |(tagged, _)| tagged);
    match tagged.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => tagged,
    }
}

#[cfg(test)]
mod tests;
