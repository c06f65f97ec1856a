//! `convert`: an archive of the same images, whose layers have a table of contents.

use std::collections::BTreeMap;
use std::io::Seek;
use std::path::Path;

use coracle_chunked::toc::Location;
use serde_json::{Value, json};

use crate::archive::Archive;
use crate::failure::{Context, Failure};
use crate::layer::{self, MEDIA_TYPE};
use crate::source::{Source, aside, list};

/// Media type of an index.
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media type of the manifest of an image.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of the configuration of an image.
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media types of configurations of images.
const CONFIGS: [&str; 2] = [CONFIG, "application/vnd.docker.container.image.v1+json"];
/// Media types of layers. Others, such as encrypted ones and those that are not distributed, are left as they are.
const LAYERS: [&str; 5] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
];
/// Annotation of a buildkit attestation: the digest of the manifest that it is about.
const ABOUT: &str = "vnd.docker.reference.digest";
/// Maximum number of indexes in each other.
const DEPTH_MAX: usize = 8;

/// Converts all images of the archive or directory `from` to an archive `to`; `told` receives a line for each layer.
pub(crate) fn run(
    from: &Path,
    to: &Path,
    level: i32,
    told: &mut dyn FnMut(String) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let source = Source::open(from)?;
    let archive = Archive::create(to)?;
    let mut convert = Convert {
        source: &source,
        archive,
        to,
        level,
        layers: BTreeMap::new(),
        documents: BTreeMap::new(),
        images: 0,
        told,
    };
    let images =
        source.images.iter().map(|image| convert.document(image, 0)).collect::<Result<Vec<_>, _>>()?;
    match convert.images {
        0 => Err(Failure::new(format!("{}: it has no image", from.display()))),
        _ => convert.archive.finish(&images),
    }
}

struct Convert<'a> {
    source: &'a Source,
    archive: Archive,
    to: &'a Path,
    level: i32,
    /// New descriptors of layers by the digest of the old one and the diff ID.
    layers: BTreeMap<(String, String), Value>,
    /// New documents by the digest of the old one.
    documents: BTreeMap<String, Document>,
    /// Number of manifests of images that were converted.
    images: usize,
    told: &'a mut dyn FnMut(String) -> Result<(), Failure>,
}

/// A document that was written.
#[derive(Clone)]
struct Document {
    digest: String,
    bytes: usize,
    /// Media type of the document; `None`: that of the one before.
    media_type: Option<&'static str>,
}

impl Convert<'_> {
    /// Converts the index or manifest of a descriptor, and what it refers to; returns its new descriptor.
    fn document(&mut self, descriptor: &Value, depth: usize) -> Result<Value, Failure> {
        let digest = text(descriptor, "digest");
        if !self.source.has(digest) {
            return match depth {
                0 => Err(Failure::new(format!("{digest}: it is missing"))),
                // Archives of one platform lack the blobs of others.
                _ => Ok(descriptor.clone()),
            };
        }
        if depth > DEPTH_MAX {
            return Err(Failure::new(format!("{digest}: more than {DEPTH_MAX} indexes in each other")));
        }
        let new = match self.documents.get(digest) {
            Some(known) => known.clone(),
            None => {
                let new = self.write(digest, depth).context(|| digest)?;
                self.documents.insert(digest.to_owned(), new.clone());
                new
            }
        };
        let mut descriptor = descriptor.clone();
        if let Some(media_type) = new.media_type {
            descriptor["mediaType"] = json!(media_type);
        }
        Ok(pointing_to(descriptor, &new.digest, new.bytes as u64))
    }

    /// Writes the document that replaces the one with this digest.
    fn write(&mut self, digest: &str, depth: usize) -> Result<Document, Failure> {
        let bytes = self.source.document(digest)?;
        let mut document: Value = serde_json::from_slice(&bytes).context(|| "its JSON")?;
        let media_type = if document["manifests"].is_array() {
            let members = list(&document, "manifests");
            let new = members
                .iter()
                .map(|member| self.document(member, depth + 1))
                .collect::<Result<Vec<_>, _>>()?;
            document["manifests"] = new.into_iter().map(|member| self.about_new(member)).collect();
            INDEX
        } else if CONFIGS.contains(&text(&document["config"], "mediaType")) {
            self.manifest(&mut document)?;
            self.images += 1;
            MANIFEST
        } else {
            // Something else than an image: attestations, signatures.
            for blob in list(&document, "layers").iter().chain([&document["config"]]) {
                self.copy(blob)?;
            }
            let digest = self.archive.document(&bytes)?;
            return Ok(Document { digest, bytes: bytes.len(), media_type: None });
        };
        document["mediaType"] = json!(media_type);
        let bytes = document.to_string().into_bytes();
        let digest = self.archive.document(&bytes)?;
        Ok(Document { digest, bytes: bytes.len(), media_type: Some(media_type) })
    }

    /// An attestation refers to its manifest by the new digest.
    fn about_new(&self, mut member: Value) -> Value {
        let about = member["annotations"][ABOUT].as_str().and_then(|digest| self.documents.get(digest));
        if let Some(new) = about.cloned() {
            member["annotations"][ABOUT] = json!(new.digest);
        }
        member
    }

    /// Converts the layers of a manifest.
    fn manifest(&mut self, manifest: &mut Value) -> Result<(), Failure> {
        let config = self.source.document(text(&manifest["config"], "digest"))?;
        self.archive.document(&config)?;
        let config: Value = serde_json::from_slice(&config).context(|| "configuration")?;
        let diff_ids = list(&config["rootfs"], "diff_ids");
        let layers = list(manifest, "layers");
        if diff_ids.len() != layers.len() {
            return Err(Failure::new(format!("{} layers, {} diff IDs", layers.len(), diff_ids.len())));
        }
        let mut new = Vec::with_capacity(layers.len());
        for (layer, diff_id) in layers.iter().zip(&diff_ids) {
            new.push(self.layer(layer, diff_id.as_str().unwrap_or_default())?);
        }
        manifest["layers"] = Value::Array(new);
        manifest["config"]["mediaType"] = json!(CONFIG);
        Ok(())
    }

    /// Converts a layer; returns its new descriptor.
    fn layer(&mut self, old: &Value, diff_id: &str) -> Result<Value, Failure> {
        let digest = text(old, "digest");
        let key = (digest.to_owned(), diff_id.to_owned());
        if let Some(new) = self.layers.get(&key) {
            return Ok(new.clone());
        }
        if !matches!(old["annotations"], Value::Null | Value::Object(_)) {
            return Err(Failure::new(format!("layer {digest}: its annotations are no object")));
        }
        let is_layer = LAYERS.contains(&text(old, "mediaType"));
        if !is_layer || location(old).is_some() {
            self.copy(old)?;
            let why = if is_layer { "it has a table already" } else { "no layer of files" };
            (self.told)(format!("{digest}: left as it is: {why}"))?;
            return Ok(old.clone());
        }
        let archive = self.source.layer(digest, diff_id, self.to)?;
        let mut made = layer::make(&archive, aside(self.to)?, self.level)?;
        made.file.rewind().context(|| "read the blob")?;
        self.archive.blob(&made.digest, made.bytes, &made.file)?;
        let mut new = pointing_to(old.clone(), &made.digest, made.bytes);
        new["mediaType"] = json!(MEDIA_TYPE);
        for (key, value) in &made.annotations {
            new["annotations"][*key] = json!(value);
        }
        (self.told)(match &made.without {
            None => format!("{digest}: {} bytes, now {} of {}", old["size"], made.bytes, made.digest),
            Some(why) => {
                format!("{digest}: without a table of contents, now {} of {}: {why}", made.bytes, made.digest)
            }
        })?;
        self.layers.insert(key, new.clone());
        Ok(new)
    }

    /// Copies a blob unchanged.
    fn copy(&mut self, descriptor: &Value) -> Result<(), Failure> {
        let digest = text(descriptor, "digest");
        let bytes = descriptor["size"]
            .as_u64()
            .ok_or_else(|| Failure::new(format!("{digest}: its size is no number")))?;
        match self.source.has(digest) {
            true => self.archive.blob(digest, bytes, self.source.blob(digest)?),
            // What is not distributed is elsewhere.
            false if descriptor["urls"].is_array() => Ok(()),
            false => Err(Failure::new(format!("{digest}: it is missing"))),
        }
    }
}

/// The descriptor with another digest and size, and without what belonged to the old content.
fn pointing_to(mut descriptor: Value, digest: &str, bytes: u64) -> Value {
    if let Some(members) = descriptor.as_object_mut() {
        members.remove("data");
        members.remove("urls");
    }
    descriptor["digest"] = json!(digest);
    descriptor["size"] = json!(bytes);
    descriptor
}

/// The table of contents of a layer; `None` if it has none that nodes can use.
pub(crate) fn location(layer: &Value) -> Option<Location> {
    let annotation = |key: &str| layer["annotations"][key].as_str();
    Location::of(annotation, layer["size"].as_u64().unwrap_or(0))
}

/// A text member of an object; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}
