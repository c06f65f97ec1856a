//! Imports archives in the formats of `docker save` and of OCI tools, for nodes without internet access (CRI
//! 8.2, AIR-2, AIR-3, AIR-8).
//!
//! ```text
//! archive ─► spool ─► index.json (OCI) or manifest.json (docker) ─► images of this platform ─► layers, users
//! ─► records
//! ```
//! A truncated archive, or one with wrong digests, has no visible effect: the daemon writes the records.

mod archive;
mod spool;

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_job::{Failure, FailureKind, ImageRecord, ImportJob};
use serde::Deserialize;
use serde_json::json;

use crate::failure::{Context, invalid, io_failure};
use crate::image_config::{self, digest_of};
use crate::pull::manifest::{self, Descriptor, Document};
use crate::pull::platform;
use crate::store::{Move, Store, open_plain};
use crate::unpack::{Aside, Compression, MAGIC_BYTES};
use crate::users;
pub(crate) use archive::{Piece, scatter};
pub(crate) use spool::digest_of_file;
use spool::{Spool, Spooled, missing};

/// Maximum nesting of indexes; real archives have one level.
const INDEX_DEPTH_MAX: u32 = 3;

/// Annotation with the complete reference, written by containerd.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// Annotation with the name (OCI image specification), often only a tag.
const OCI_NAME: &str = "org.opencontainers.image.ref.name";

/// The imported images, and the failures of the images that could not be imported.
type Imported = (Vec<ImageRecord>, Vec<Failure>);

/// Imports all valid images for this platform; `progress` receives the number of archive bytes that were
/// read, and the total. Fails if no image can be imported.
pub(crate) fn run(job: &ImportJob, progress: &mut (dyn FnMut(u64, u64) + Send)) -> Result<Imported, Failure> {
    let store = Store::open(&job.root)?;
    let mut import = || -> Result<Imported, Failure> {
        let spool = Spool::read(&store, &job.archive, job.limits.layer_bytes_max, progress)?;
        let import = Import {
            job,
            store: &store,
            spool: &spool,
            progress: Mutex::new(progress),
            others: Mutex::default(),
        };
        let (records, mut refused) = match (spool.get("index.json"), spool.get("manifest.json")) {
            (Some(_), _) => import.oci()?,
            (None, Some(_)) => import.docker()?,
            (None, None) => return Err(invalid("archive: it contains neither index.json nor manifest.json")),
        };
        match records.is_empty() {
            true if !refused.is_empty() => Err(refused.swap_remove(0)),
            true => Err(manifest::no_match(import.others().drain(..))),
            false => Ok((records, refused)),
        }
    };
    import().context(|| format!("import {}", job.archive.display()))
}

struct Import<'a> {
    job: &'a ImportJob,
    store: &'a Store,
    spool: &'a Spool,
    /// Callback for the number of bytes read and their total. The decompression thread calls it, too.
    progress: Mutex<&'a mut (dyn FnMut(u64, u64) + Send)>,
    /// Platforms of the images that are not for this node.
    others: Mutex<Vec<String>>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Vec<Named>,
}

/// A descriptor of the top index with its annotations.
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

/// The parts of one image, independent of the archive's format.
struct Parts<'a> {
    config: Vec<u8>,
    /// Layers, lowest first, with the digest of the blob if it is known.
    layers: Vec<(&'a Spooled, Option<String>)>,
    /// Digest and content of the manifests and indexes that lead to the image.
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

    /// The parts of an image of an OCI layout; `None` if it has no image for this platform.
    fn oci_parts(&self, named: &Named) -> Result<Option<Parts<'_>>, Failure> {
        if !named.descriptor.may_be_ours() {
            self.others().push(named.descriptor.platform_name());
            return Ok(None); // unread: what others' manifests point to need not be layers
        }
        let annotation = |key: &str| named.annotations.get(key).filter(|name| is_full_reference(name));
        let name = annotation(CONTAINERD_NAME).or_else(|| annotation(OCI_NAME));
        let mut documents = Vec::new();
        let mut descriptor = named.descriptor.clone();
        for _ in 0..=INDEX_DEPTH_MAX {
            let Some(bytes) = self.spool.blob_document(&descriptor.digest)? else {
                return Ok(None); // archives of one platform lack the blobs of others
            };
            let document = manifest::parse(&bytes)?;
            documents.push((descriptor.digest.clone(), bytes));
            match document {
                // A nested index may omit the platform, which is then read from the config.
                Document::Index(manifests) => {
                    let unsaid = || manifests.iter().find(|manifest| manifest.may_be_ours());
                    match manifest::choose(&manifests).ok().or_else(unsaid) {
                        Some(chosen) => descriptor = chosen.clone(),
                        None => {
                            self.others().extend(manifests.iter().map(Descriptor::platform_name));
                            return Ok(None);
                        }
                    }
                }
                Document::Manifest { config, layers } => {
                    let config_bytes =
                        self.spool.blob_document(&config.digest)?.ok_or_else(|| missing(&config.digest))?;
                    if !self.is_ours(&config_bytes)? {
                        return Ok(None);
                    }
                    let mut files = Vec::with_capacity(layers.len());
                    for layer in layers {
                        let file = self.spool.blob(&layer.digest)?.ok_or_else(|| missing(&layer.digest))?;
                        files.push((file, Some(layer.digest)));
                    }
                    let digest =
                        name.map(|name| format!("{}@{}", repository_of(name), named.descriptor.digest));
                    // A name with a digest is recorded by digest, and its tag is ignored (CRI 2.27).
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

    /// The parts of an image in docker's format; `None` if it is for another platform.
    fn docker_parts(&self, image: DockerImage) -> Result<Option<Parts<'_>>, Failure> {
        let config = self.spool.document(&image.config)?;
        if !self.is_ours(&config)? {
            return Ok(None);
        }
        let mut layers = Vec::new();
        for name in image.layers.unwrap_or_default() {
            layers.push((self.spool.get(&name).ok_or_else(|| missing(&name))?, None));
        }
        let tags = image.repo_tags.unwrap_or_default();
        let documents = match self.job.keep_blobs {
            true => vec![write_manifest(&config, &mut layers)?],
            false => Vec::new(),
        };
        Ok(Some(Parts { config, layers, documents, tags, digests: Vec::new() }))
    }

    fn others(&self) -> MutexGuard<'_, Vec<String>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an image is for this node's platform; old images without a platform are accepted.
    fn is_ours(&self, config: &[u8]) -> Result<bool, Failure> {
        let document = image_config::parse(config)?;
        let is_ours = platform::is_ours(&document.os, &document.architecture);
        if !is_ours {
            self.others().push(format!("{}/{}", document.os, document.architecture));
        }
        Ok(is_ours)
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
        let ready = aside.complete().context(|| format!("image {id}"))?;
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

    /// Keeps compressed layers by a second hard link; the first link is removed with the spool. Returns the
    /// digests.
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

/// Creates an OCI manifest for an image without one, and computes the digests of its layers, so that the
/// image can be checked and exported like any other. Equal archives result in equal manifests.
fn write_manifest(
    config: &[u8],
    layers: &mut [(&Spooled, Option<String>)],
) -> Result<(String, Vec<u8>), Failure> {
    let mut descriptors = Vec::with_capacity(layers.len());
    for (file, digest) in layers {
        let found = digest_of_file(&file.path)?;
        let media_type = layer_type(&file.path)?;
        descriptors.push(json!({ "mediaType": media_type, "digest": found, "size": file.bytes }));
        *digest = Some(found);
    }
    let config = json!({ "mediaType": manifest::CONFIG, "digest": digest_of(config), "size": config.len() });
    let manifest = json!({
        "schemaVersion": 2, "mediaType": manifest::MANIFEST, "config": config, "layers": descriptors,
    });
    let bytes = manifest.to_string().into_bytes();
    Ok((digest_of(&bytes), bytes))
}

/// The media type of a layer, detected by its first bytes.
fn layer_type(path: &Path) -> Result<&'static str, Failure> {
    let mut magic = Vec::new();
    let read = open_plain(path)?.take(MAGIC_BYTES).read_to_end(&mut magic);
    read.map_err(|error| io_failure("read", path, &error))?;
    Ok(match Compression::of(&magic) {
        Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
        Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        Compression::None => "application/vnd.oci.image.layer.v1.tar",
    })
}

/// Adds the failure of an invalid image to `refused`, because it concerns only this image; returns an error
/// of the node, which ends the import.
fn one_of_many(failure: Failure, refused: &mut Vec<Failure>) -> Result<(), Failure> {
    match failure.kind {
        FailureKind::Invalid | FailureKind::NotFound => {
            refused.push(failure);
            Ok(())
        }
        _ => Err(failure),
    }
}

/// Whether the name is more than a tag: `registry/path:tag` or `name:tag`.
fn is_full_reference(name: &str) -> bool {
    name.contains(['/', ':']) && !name.starts_with(':')
}

/// The image name without tag and digest.
fn repository_of(name: &str) -> &str {
    let tagged = name.split_once('@').map_or(name, |(tagged, _)| tagged);
    match tagged.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => tagged,
    }
}

#[cfg(test)]
mod tests;
