//! `convert`: an archive of the same images, whose layers have a table of contents.

use std::collections::BTreeMap;
use std::io::Seek;
use std::path::Path;

use serde_json::{Value, json};

use crate::archive::Archive;
use crate::failure::{Context, Failure};
use crate::layer::{self, MEDIA_TYPE};
use crate::source::{Source, aside, list};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media types of configurations of images.
const CONFIGS: [&str; 2] = [CONFIG, "application/vnd.docker.container.image.v1+json"];
/// Beginnings of the media types of layers. Those that are not distributed have URLs and are left as they are.
const LAYERS: [&str; 2] =
    ["application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"];
/// Annotation of a buildkit attestation: the digest of the manifest that it is about.
const ABOUT: &str = "vnd.docker.reference.digest";
/// Maximum number of indexes in each other.
const DEPTH_MAX: usize = 8;

/// Converts all images of the archive or directory `from` to an archive `to`; `told` receives a line for each layer.
pub(crate) fn run(from: &Path, to: &Path, level: i32, told: &mut dyn FnMut(String)) -> Result<(), Failure> {
    let source = Source::open(from)?;
    let archive = Archive::create(to)?;
    let mut convert = Convert {
        source: &source,
        archive,
        to,
        level,
        layers: BTreeMap::new(),
        documents: BTreeMap::new(),
        told,
    };
    let images =
        source.images.iter().map(|image| convert.document(image, 0)).collect::<Result<Vec<_>, _>>()?;
    convert.archive.finish(&images)
}

struct Convert<'a> {
    source: &'a Source,
    archive: Archive,
    to: &'a Path,
    level: i32,
    /// New descriptors of layers by the digest of the old one.
    layers: BTreeMap<String, Value>,
    /// Digests and sizes of new documents by the old one.
    documents: BTreeMap<String, (String, usize)>,
    told: &'a mut dyn FnMut(String),
}

impl Convert<'_> {
    /// Converts the index or manifest of a descriptor, and what it refers to; returns its new descriptor.
    fn document(&mut self, descriptor: &Value, depth: usize) -> Result<Value, Failure> {
        let digest = text(descriptor, "digest");
        // Archives of one platform lack the blobs of others.
        if !self.source.has(digest) {
            return Ok(descriptor.clone());
        }
        if depth > DEPTH_MAX {
            return Err(Failure::new(format!("{digest}: more than {DEPTH_MAX} indexes in each other")));
        }
        let bytes = self.source.document(digest)?;
        let mut document: Value = serde_json::from_slice(&bytes).context(|| digest)?;
        if document["manifests"].is_array() {
            let members = list(&document, "manifests");
            let new = members
                .iter()
                .map(|member| self.document(member, depth + 1))
                .collect::<Result<Vec<_>, _>>()?;
            document["manifests"] = new.into_iter().map(|member| self.about_new(member)).collect();
            document["mediaType"] = json!(INDEX);
            return self.replaced(descriptor, INDEX, &document);
        }
        let config = &document["config"];
        if CONFIGS.contains(&text(config, "mediaType")) {
            self.manifest(&mut document)?;
            return self.replaced(descriptor, MANIFEST, &document);
        }
        // Something else than an image: attestations, signatures.
        for blob in list(&document, "layers").iter().chain([config]) {
            self.copy(blob)?;
        }
        self.archive.document(&bytes)?;
        Ok(descriptor.clone())
    }

    /// An attestation refers to its manifest by the new digest.
    fn about_new(&self, mut member: Value) -> Value {
        let about = member["annotations"][ABOUT].as_str().and_then(|digest| self.documents.get(digest));
        if let Some((digest, _)) = about {
            member["annotations"][ABOUT] = json!(digest);
        }
        member
    }

    /// Adds a document; returns the old descriptor with its digest, size and media type.
    fn replaced(&mut self, old: &Value, media_type: &str, document: &Value) -> Result<Value, Failure> {
        let bytes = document.to_string().into_bytes();
        let digest = self.archive.document(&bytes)?;
        self.documents.insert(text(old, "digest").to_owned(), (digest.clone(), bytes.len()));
        let mut new = old.clone();
        new["mediaType"] = json!(media_type);
        new["digest"] = json!(digest);
        new["size"] = json!(bytes.len());
        Ok(new)
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
        manifest["mediaType"] = json!(MANIFEST);
        Ok(())
    }

    /// Converts a layer; returns its new descriptor.
    fn layer(&mut self, old: &Value, diff_id: &str) -> Result<Value, Failure> {
        let digest = text(old, "digest");
        if let Some(new) = self.layers.get(digest) {
            return Ok(new.clone());
        }
        let is_layer = LAYERS.iter().any(|begin| text(old, "mediaType").starts_with(begin));
        if !is_layer || has_table(old) {
            self.copy(old)?;
            let why = if is_layer { "it has a table already" } else { "no layer of files" };
            (self.told)(format!("{digest}: left as it is: {why}"));
            return Ok(old.clone());
        }
        let archive = self.source.layer(digest, diff_id, self.to)?;
        let mut made = layer::make(&archive, aside(self.to)?, self.level)?;
        made.file.rewind().context(|| "read the blob")?;
        self.archive.blob(&made.digest, made.bytes, &made.file)?;
        let mut new = old.clone();
        new["mediaType"] = json!(MEDIA_TYPE);
        new["digest"] = json!(made.digest);
        new["size"] = json!(made.bytes);
        for (key, value) in &made.annotations {
            new["annotations"][*key] = json!(value);
        }
        (self.told)(match &made.without {
            None => format!("{digest}: {} bytes, now {} of {}", old["size"], made.bytes, made.digest),
            Some(why) => {
                format!("{digest}: without a table of contents, now {} of {}: {why}", made.bytes, made.digest)
            }
        });
        self.layers.insert(digest.to_owned(), new.clone());
        Ok(new)
    }

    /// Copies a blob as it is, if the archive has it.
    fn copy(&mut self, descriptor: &Value) -> Result<(), Failure> {
        let digest = text(descriptor, "digest");
        match descriptor["size"].as_u64() {
            Some(bytes) if self.source.has(digest) => {
                let from = self.source.blob(digest)?;
                self.archive.blob(digest, bytes, from)
            }
            _ => Ok(()),
        }
    }
}

/// Whether a layer has a table of contents that nodes can use.
fn has_table(layer: &Value) -> bool {
    let annotation = |key: &str| layer["annotations"][key].as_str();
    coracle_chunked::toc::Location::of(annotation, layer["size"].as_u64().unwrap_or(0)).is_some()
}

/// A text member of an object; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}
