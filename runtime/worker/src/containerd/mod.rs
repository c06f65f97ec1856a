//! Lists the images in the store of a containerd, which a node leaves for coracle. [`crate::import`] imports
//! them, one in each job.
//!
//! ```text
//! ROOT/io.containerd.metadata.v1.bolt/meta.db (bolt, metadata) ─► names, digests of manifests
//! ROOT/io.containerd.content.v1.content/blobs/sha256/HEX (content) ─► manifest, config, layers ─► complete?
//! ```
//! Nothing of containerd is changed, and it may run meanwhile.

mod content;
mod metadata;
#[cfg(test)]
mod tests;

use coracle_manifest::{self as manifest, Descriptor, Resolution, Resolved, digest_of, resolve};
use coracle_sandbox::collect;
use std::collections::BTreeMap;
use std::ffi::OsString;

use coracle_job::{ContainerdImage, Failure, FailureKind, FoundImage, Job, ListContainerdJob};
use serde_json::{Value, json};

pub(crate) use content::ContentStore;
use metadata::Named;

/// Name of the subcommand `coracle-worker list-containerd STORE NAMESPACE`, which prints the images of a namespace as JSON: for
/// the command line, which would need the code for all jobs and answers otherwise.
pub(crate) const SUBCOMMAND: &str = "list-containerd";

/// The job of the subcommand; `None` if arguments are missing.
pub(crate) fn job_of(mut arguments: impl Iterator<Item = OsString>) -> Option<Job> {
    let (store, namespace) = (arguments.next()?, arguments.next()?);
    let namespace = namespace.into_string().ok()?;
    Some(Job::ListContainerd(ListContainerdJob { store: store.into(), namespace }))
}

/// The images as a JSON array of objects: names, digest, and the size in bytes or why the image cannot be imported.
pub(crate) fn as_json(images: &[ContainerdImage]) -> String {
    let object = |image: &ContainerdImage| {
        let (size_bytes, problem) = match &image.found {
            Ok(found) => (Some(found.size_bytes), None),
            Err(problem) => (None, Some(problem)),
        };
        json!({"names": image.names, "digest": image.digest, "size_bytes": size_bytes, "problem": problem})
    };
    Value::Array(images.iter().map(object).collect()).to_string()
}

/// Lists the images of a namespace, ordered by name. An image that cannot be imported has the reason.
///
/// # Errors
/// The metadata cannot be read, or lacks the namespace.
pub(crate) fn list(job: &ListContainerdJob) -> Result<Vec<ContainerdImage>, Failure> {
    let content = ContentStore::of(&job.store);
    let mut images: Vec<ContainerdImage> = Vec::new();
    for (digest, named) in by_digest(metadata::images(&job.store, &job.namespace)?) {
        let found = look(&content, &digest).map_err(|failure| failure.message);
        let is_pinned = named.iter().any(|image| image.is_pinned);
        let names = named.into_iter().map(|image| image.name).collect();
        images.push(ContainerdImage { names, digest, is_pinned, found });
    }
    collect::sort_by(&mut images, |one, other| one.names.cmp(&other.names));
    Ok(images)
}

/// The names of each image, by the digest of its manifest or index.
fn by_digest(images: Vec<Named>) -> BTreeMap<String, Vec<Named>> {
    let mut groups: BTreeMap<String, Vec<Named>> = BTreeMap::new();
    for image in images {
        groups.entry(image.digest.clone()).or_default().push(image);
    }
    groups
}

/// Checks whether all parts of an image for this platform exist. The digests of layers are verified when they
/// are imported.
fn look(content: &ContentStore, digest: &str) -> Result<FoundImage, Failure> {
    let Resolved { config, documents, layers, .. } = resolve_in(content, digest)?;
    let size_of = |layer: &Descriptor| match content.bytes(&layer.digest)? {
        Some(bytes) if bytes == layer.size => Ok(bytes),
        Some(bytes) => {
            Err(Failure::invalid(format!("layer {} has {bytes} bytes, not {}", layer.digest, layer.size)))
        }
        None => Err(absent_layer(&layer.digest)),
    };
    let mut size_bytes = config.len() as u64;
    size_bytes += documents.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    for layer in &layers {
        size_bytes = size_bytes.saturating_add(size_of(layer)?);
    }
    Ok(FoundImage { id: digest_of(&config), size_bytes })
}

/// Resolves an image of the content store.
///
/// # Errors
/// A manifest or the config is missing or invalid, or the image is for other platforms only.
pub(crate) fn resolve_in(content: &ContentStore, digest: &str) -> Result<Resolved, Failure> {
    let top = Descriptor::of(digest);
    match resolve(&top, &|document, _| content.document(&document.digest))? {
        Resolution::Found(resolved) => Ok(resolved),
        Resolution::NoManifest(digest) => Err(absent("manifest", &digest)),
        Resolution::NoConfig(digest) => Err(absent("config", &digest)),
        Resolution::Foreign(platforms) => Err(manifest::no_match(platforms.into_iter())),
    }
}

/// The failure for a layer that containerd does not have.
pub(crate) fn absent_layer(digest: &str) -> Failure {
    let absent = absent("layer", digest);
    let why = "containerd removes unpacked layers if its setting discard_unpacked_layers is on";
    Failure { message: format!("{}: {why}", absent.message), ..absent }
}

fn absent(what: &str, digest: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("{what} {digest} is missing in containerd's content store"))
}
