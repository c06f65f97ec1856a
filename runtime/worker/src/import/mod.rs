//! Imports archives in the formats of `docker save` and of OCI tools, for nodes without internet access (CRI
//! 8.2, AIR-2, AIR-3, AIR-8), and images of a containerd that the node used before.
//!
//! ```text
//! archive ─► spool ─► index.json (OCI) or manifest.json (docker) ─┬► images of this platform ─► layers, users
//! containerd's content store ─► spool of links to its blobs ──────┘  ─► records
//! additional store ─► check ─► links to its layers, documents ─► records
//! ```
//! A truncated archive, or one with wrong digests, has no visible effect: the daemon writes the records.

mod additional;
mod archive;
mod signatures;
mod spool;

use std::io::Read;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use coracle_chunked::outline::Purpose;
use coracle_decompress::{Compression, MAGIC_BYTES};
use coracle_job::{Failure, FailureKind, ImageRecord, ImportJob, ImportSource, Outcome};
use serde_json::json;

use crate::containerd::{ContentStore, absent_layer, resolve_in};
use crate::failure::{Context, io_failure};
use crate::policy;
use crate::store::{Move, Store, open_plain};
use crate::unpack::Aside;
use crate::users;
pub(crate) use additional::check as check_additional;
pub(crate) use archive::{Piece, scatter};
use coracle_json::{Object, Problem};
use coracle_judge::Attachments;
use coracle_manifest::{
    self as manifest, Descriptor, Resolution, config as image_config, digest_of, foreign, resolve,
};
use coracle_reference::Name;
pub(crate) use spool::digest_of_file;
use spool::{Spool, Spooled, link_or_copy, missing};

/// Annotation with the complete reference, written by containerd.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// Annotation with the name (OCI image specification), often only a tag.
const OCI_NAME: &str = "org.opencontainers.image.ref.name";

/// The imported images, and the failures of the images that could not be imported.
type Imported = (Vec<ImageRecord>, Vec<Failure>);

/// Imports all valid images for this platform; `progress` receives the number of archive bytes that were
/// read, and the total. Fails if no image can be imported.
pub(crate) fn run(job: &ImportJob, progress: &mut (dyn FnMut(u64, u64) + Send)) -> Result<Outcome, Failure> {
    let store = Store::open(&job.root)?.with_outlines(job.serves_neighbours.then_some(Purpose::Neighbours));
    let mut damaged = Vec::new();
    let (images, refused) = match &job.source {
        // The daemon adds the path to errors.
        ImportSource::Archive(path) => from_archive(job, &store, path, progress)?,
        ImportSource::Additional(directory) => {
            Import::new(job, &store, &Spool::empty(&store)?, progress).additional(directory, &mut damaged)?
        }
        ImportSource::Containerd { store: containerd, digest, names } => {
            let spool = Spool::of_content(&store, ContentStore::of(containerd))?;
            let import = Import::new(job, &store, &spool, progress);
            let record = import.parts_in_containerd(digest, names).and_then(|parts| import.image(parts))?;
            (vec![record], Vec::new())
        }
    };
    Ok(Outcome::Imported { images, refused, damaged })
}

fn from_archive(
    job: &ImportJob,
    store: &Store,
    path: &Path,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Imported, Failure> {
    let spool = Spool::read(store, path, job.limits.layer_bytes_max, progress)?;
    let import = Import::new(job, store, &spool, progress);
    let has = |name: &str| spool.get(name).is_some();
    let (records, mut refused) = match (has("index.json"), has("manifest.json")) {
        (true, false) => import.oci()?,
        (false, true) => import.docker()?,
        (false, false) => {
            return Err(Failure::invalid("archive: it contains neither index.json nor manifest.json"));
        }
        // Docker writes both. For an image without a name its index.json has no manifest.
        (true, true) => {
            match import.oci().or_else(|failure| Ok((Vec::new(), vec![one_of_many(failure)?])))? {
                // What the policy refuses is not tried in another form.
                (records, refused) if records.is_empty() && !refused.iter().any(is_refusal) => {
                    let (records, more) = import.docker()?;
                    let is_nothing = records.is_empty() && more.is_empty();
                    (records, if is_nothing { refused } else { more })
                }
                imported => imported,
            }
        }
    };
    match records.is_empty() {
        true if !refused.is_empty() => Err(refused.swap_remove(0)),
        true => Err(manifest::no_match(import.others().drain(..))),
        false => Ok((records, refused)),
    }
}

fn is_refusal(failure: &Failure) -> bool {
    failure.kind == FailureKind::Signature
}

struct Import<'a> {
    job: &'a ImportJob,
    store: &'a Store,
    spool: &'a Spool,
    /// Callback for the number of bytes read and their total. The decompression thread calls it, too.
    progress: Mutex<&'a mut (dyn FnMut(u64, u64) + Send)>,
    /// Platforms of the images that are not for this node.
    others: Mutex<Vec<String>>,
    /// Attachments of images, read once if the policy needs it.
    attachments: OnceLock<Attachments>,
}

/// The parts of one image, independent of where it comes from.
struct Parts {
    config: Vec<u8>,
    /// Layers, lowest first, with the digest of the blob if it is known.
    layers: Vec<(Spooled, Option<String>)>,
    /// Digest and content of the manifests and indexes that lead to the image.
    documents: Vec<(String, Vec<u8>)>,
    /// Whether the manifest and config are those of the source, so that signatures may cover them.
    are_documents_of_source: bool,
    tags: Vec<String>,
    digests: Vec<String>,
    /// The platform of the image, if this node does not support it.
    foreign: Option<String>,
}

impl<'a> Import<'a> {
    fn new(
        job: &'a ImportJob,
        store: &'a Store,
        spool: &'a Spool,
        progress: &'a mut (dyn FnMut(u64, u64) + Send),
    ) -> Self {
        Self {
            job,
            store,
            spool,
            progress: Mutex::new(progress),
            others: Mutex::default(),
            attachments: OnceLock::new(),
        }
    }

    /// The parts of an image in containerd's content store.
    fn parts_in_containerd(&self, digest: &str, names: &[String]) -> Result<Parts, Failure> {
        let resolved = resolve_in(self.spool.content()?, digest)?;
        let mut layers = Vec::with_capacity(resolved.layers.len());
        for layer in resolved.layers {
            let file = self.spool.blob(&layer.digest)?.ok_or_else(|| absent_layer(&layer.digest))?;
            layers.push((file, Some(layer.digest)));
        }
        // containerd's CRI names an image by its ID, too.
        let names = || names.iter().filter(|name| coracle_manifest::hex(name).is_err());
        Ok(Parts {
            config: resolved.config,
            layers,
            documents: resolved.documents,
            are_documents_of_source: true,
            tags: names().filter(|name| !name.contains('@')).cloned().collect(),
            digests: names().filter_map(|name| with_digest(name, digest)).collect(),
            foreign: resolved.foreign,
        })
    }

    fn oci(&self) -> Result<Imported, Failure> {
        self.check_layout()?;
        let bytes = self.spool.document("index.json")?;
        let text = String::from_utf8_lossy(&bytes);
        let wrong = |problem: Problem| Failure::invalid(format!("archive: index.json: {problem}"));
        let manifests = Object::parse(&text).and_then(|index| index.list("manifests")).map_err(wrong)?;
        let parts = |text: &str| {
            let entry = Object::parse(text).map_err(wrong)?;
            let descriptor = Descriptor::read(&entry).map_err(wrong)?;
            let annotations = entry.object("annotations").map_err(wrong)?.unwrap_or_default();
            self.oci_parts(&descriptor, &annotations)
        };
        self.images(manifests.unwrap_or_default().into_iter().map(parts))
    }

    /// Checks the version of the OCI layout, of which there is one (OCI image specification 1.1, "oci-layout file"). Some writers
    /// omit the file.
    fn check_layout(&self) -> Result<(), Failure> {
        const FILE: &str = "oci-layout";
        if self.spool.get(FILE).is_none() {
            return Ok(());
        }
        let bytes = self.spool.document(FILE)?;
        let version = Object::parse(&String::from_utf8_lossy(&bytes))
            .and_then(|layout| layout.text("imageLayoutVersion"))
            .map_err(|problem| Failure::invalid(format!("archive: {FILE}: {problem}")))?;
        match version.as_str() {
            "1.0.0" => Ok(()),
            other => Err(Failure::invalid(format!(
                "archive: {FILE}: imageLayoutVersion {other:?} is not supported"
            ))),
        }
    }

    /// Imports the images of an archive. Those that are named directly and are for another platform are imported if
    /// there is none for this node, as the node may run them by binfmt_misc.
    fn images(&self, all: impl Iterator<Item = Result<Option<Parts>, Failure>>) -> Result<Imported, Failure> {
        let (mut records, mut refused): Imported = Default::default();
        let mut foreign = Vec::new();
        for parts in all {
            match parts {
                Ok(None) => {}
                Ok(Some(parts)) if parts.foreign.is_some() => foreign.push(parts),
                parts => self.add(parts, &mut records, &mut refused)?,
            }
        }
        if records.is_empty() {
            for parts in foreign {
                self.add(Ok(Some(parts)), &mut records, &mut refused)?;
            }
        }
        Ok((records, refused))
    }

    /// Imports one image, and adds it to the records or its failure to `refused`.
    fn add(
        &self,
        parts: Result<Option<Parts>, Failure>,
        records: &mut Vec<ImageRecord>,
        refused: &mut Vec<Failure>,
    ) -> Result<(), Failure> {
        let record = match parts.and_then(|parts| parts.map(|parts| self.image(parts)).transpose()) {
            Ok(Some(record)) => record,
            Ok(None) => return Ok(()),
            Err(error) => {
                refused.push(one_of_many(error)?);
                return Ok(());
            }
        };
        // The same image under several names.
        match records.iter_mut().find(|known| known.id == record.id) {
            Some(known) => known.add(record),
            None => records.push(record),
        }
        Ok(())
    }

    /// The parts of an image of an OCI layout; `None` if it has no image for this platform.
    fn oci_parts(&self, descriptor: &Descriptor, annotations: &Object<'_>) -> Result<Option<Parts>, Failure> {
        // An annotation of another type is ignored.
        let annotation = |key: &str| annotations.text(key).ok().filter(|name| is_full_reference(name));
        let name = annotation(CONTAINERD_NAME).or_else(|| annotation(OCI_NAME));
        if self.is_signature(&descriptor.digest) {
            return Ok(None);
        }
        let read = |document: &Descriptor, _| self.spool.blob_document(&document.digest);
        let resolved = match resolve(descriptor, &read)? {
            Resolution::Found(resolved) => resolved,
            // Archives of one platform lack the blobs of others.
            Resolution::NoManifest(_) => return Ok(None),
            Resolution::NoConfig(digest) => return Err(missing(&digest)),
            Resolution::Foreign(platforms) => {
                self.others().extend(platforms);
                return Ok(None);
            }
        };
        let mut layers = Vec::with_capacity(resolved.layers.len());
        for layer in resolved.layers {
            let file = self.spool.blob(&layer.digest)?.ok_or_else(|| missing(&layer.digest))?;
            layers.push((file, Some(layer.digest)));
        }
        let digest = name.as_ref().and_then(|name| with_digest(name, &descriptor.digest));
        // A name with a digest is recorded by digest, and its tag is ignored (CRI 2.27).
        let tag = name.filter(|name| !name.contains('@'));
        Ok(Some(Parts {
            config: resolved.config,
            layers,
            documents: resolved.documents,
            are_documents_of_source: true,
            tags: tag.into_iter().collect(),
            digests: digest.into_iter().collect(),
            foreign: resolved.foreign,
        }))
    }

    fn docker(&self) -> Result<Imported, Failure> {
        let bytes = self.spool.document("manifest.json")?;
        let text = String::from_utf8_lossy(&bytes);
        let wrong = |problem: Problem| Failure::invalid(format!("archive: manifest.json: {problem}"));
        let images = coracle_json::list(&text).map_err(wrong)?;
        let parts = |text: &str| {
            let image = Object::parse(text).map_err(wrong)?;
            let layers = image.texts("Layers").map_err(wrong)?;
            let tags = image.texts("RepoTags").map_err(wrong)?;
            self.docker_parts(&image.text("Config").map_err(wrong)?, &layers, tags).map(Some)
        };
        self.images(images.into_iter().map(parts))
    }

    /// The parts of an image in docker's format.
    fn docker_parts(&self, config: &str, files: &[String], tags: Vec<String>) -> Result<Parts, Failure> {
        let config = self.spool.document(config)?;
        let foreign = foreign(&config)?;
        let mut layers = Vec::new();
        for name in files {
            layers.push((self.spool.get(name).ok_or_else(|| missing(name))?.clone(), None));
        }
        let documents = match self.job.keep_blobs {
            true => vec![write_manifest(&config, &mut layers, &mut |bytes| self.pulse(bytes, 0))?],
            false => Vec::new(),
        };
        // No one could sign a manifest that is written here.
        let are_documents_of_source = false;
        Ok(Parts { config, layers, documents, are_documents_of_source, tags, digests: Vec::new(), foreign })
    }

    fn others(&self) -> MutexGuard<'_, Vec<String>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a number of bytes, and their total.
    fn pulse(&self, bytes: u64, total: u64) {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)(bytes, total);
    }

    /// Unpacks and publishes the layers of an image; returns its record.
    fn image(&self, parts: Parts) -> Result<ImageRecord, Failure> {
        let id = digest_of(&parts.config);
        let parsed = image_config::parse(&parts.config)?;
        let (count, max) = (parsed.layers.len(), self.job.limits.layers_max as usize);
        if count != parts.layers.len() || count > max {
            return Err(Failure::invalid(format!(
                "image {id}: {} layers, {count} diff IDs, at most {max}",
                parts.layers.len()
            )));
        }
        let accepted = self.judge(&parts)?;
        let mut aside = Aside::new(self.store, &parsed.layers, &self.job.limits);
        for (number, (file, digest)) in parts.layers.iter().enumerate() {
            let pulse = &mut |bytes| self.pulse(bytes, file.bytes);
            if let Some(digest) = digest.as_ref().filter(|_| !file.is_verified) {
                // Nothing reads the blob of a layer that exists, unless it is kept.
                if aside.has(number) && !self.keeps(digest)? {
                    continue;
                }
                self.spool.verify(digest, file, pulse)?;
            }
            let unpacked = aside.unpack(number, &file.path, pulse);
            unpacked.context(|| format!("image {id}: layer {}", parsed.layers[number].diff_id))?;
        }
        let ready = aside.complete().context(|| format!("image {id}"))?;
        let mut moves: Vec<Move> =
            users::extract(self.store, &id, &aside.directories())?.into_iter().collect();
        policy::keep(self.store, &id, accepted.kept)?;
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
        if let Some(platform) = &parts.foreign {
            eprintln!("{}", manifest::foreign_image(platform));
        }
        Ok(ImageRecord {
            id,
            tags: parts.tags,
            digests: parts.digests.into_iter().filter(|name| !accepted.refused.contains(name)).collect(),
            size_bytes,
            layers: parsed.layers,
            blobs,
            config: parsed.config,
        })
    }

    /// Whether the blob of a layer will be kept, and is not yet.
    fn keeps(&self, digest: &str) -> Result<bool, Failure> {
        Ok(self.job.keep_blobs && !self.store.blob(digest)?.exists())
    }

    /// Keeps compressed layers by a second hard link; the first link is removed with the spool. Returns the
    /// digests.
    fn keep_layers(
        &self,
        layers: &[(Spooled, Option<String>)],
        moves: &mut Vec<Move>,
    ) -> Result<Vec<String>, Failure> {
        let mut kept = Vec::new();
        for (file, digest) in layers {
            let Some(digest) = digest.as_ref().filter(|_| self.job.keep_blobs) else { continue };
            let (part, path) = (self.store.aside(digest)?, self.store.blob(digest)?);
            if !path.exists() && !kept.contains(digest) {
                link_or_copy(self.store, file, &part, digest)?;
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
    layers: &mut [(Spooled, Option<String>)],
    pulse: &mut dyn FnMut(u64),
) -> Result<(String, Vec<u8>), Failure> {
    let mut descriptors = Vec::with_capacity(layers.len());
    for (file, digest) in layers {
        let found = digest_of_file(&file.path, pulse)?;
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
    let read = open_plain(path)?.take(MAGIC_BYTES as u64).read_to_end(&mut magic);
    read.map_err(|error| io_failure("read", path, &error))?;
    Ok(match Compression::of(&magic) {
        Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
        Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        Compression::None => "application/vnd.oci.image.layer.v1.tar",
    })
}

/// Returns the failure of an invalid image, which concerns only this image.
///
/// # Errors
/// The failure, if it is one of the node, which ends the import.
fn one_of_many(failure: Failure) -> Result<Failure, Failure> {
    match failure.kind {
        FailureKind::Invalid | FailureKind::NotFound | FailureKind::Signature => Ok(failure),
        _ => Err(failure),
    }
}

/// Whether the name is more than a tag: `registry/path:tag` or `name:tag`.
fn is_full_reference(name: &str) -> bool {
    name.contains(['/', ':']) && !name.starts_with(':')
}

/// The name of an image by this digest; `None` if the name of its source is none, which the daemon says.
fn with_digest(name: &str, digest: &str) -> Option<String> {
    Name::parse(name).ok().map(|name| format!("{}@{digest}", name.repository()))
}

#[cfg(test)]
mod tests;
