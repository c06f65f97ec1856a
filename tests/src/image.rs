//! Fixture images, made in memory: nothing is downloaded, and each test says what is in its image.

use std::path::Path;

use serde_json::{Value, json};

use crate::layer::{Compression, Entry, Layer, digest};

/// The media type of an OCI manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of an OCI index, which others call a manifest list.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The media type of an image's configuration.
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// What GOARCH calls this machine.
pub const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// The users of the probe's image.
const PASSWD: &str =
    "root:x:0:0:root:/root:/probe\nalice:x:1000:1000::/home/alice:/probe\nbob:x:1001:1001::/:/probe\n";
/// Its groups: alice is in two more than her own.
const GROUP: &str = "root:x:0:\nalice:x:1000:\nbob:x:1001:\nboat:x:2000:alice\ncrew:x:2001:alice,bob\n";

/// An image: layers from the bottom up, and its `config` object.
#[derive(Debug, Clone)]
pub struct Image {
    /// From the bottom up.
    pub layers: Vec<Layer>,
    /// The `config` member of the image configuration: Entrypoint, Cmd, Env, User, ...
    pub config: Value,
    /// Whose machine code it is.
    pub architecture: String,
}

impl Image {
    /// The image of most tests: the probe, users, a few directories. `marker` makes its id unlike any other's.
    pub fn probe(program: &[u8], marker: &str) -> Image {
        let entries = [
            Entry::directory("etc", 0o755),
            Entry::file("etc/passwd", PASSWD.as_bytes()),
            Entry::file("etc/group", GROUP.as_bytes()),
            Entry::file("etc/marker", marker.as_bytes()),
            Entry::directory("home", 0o755),
            Entry::directory("home/alice", 0o750).owned(1000, 1000),
            Entry::directory("root", 0o700),
            Entry::directory("tmp", 0o1777),
            Entry::file("plain", b"not a program\n"),
            Entry::program("probe", program),
        ];
        Image::of(vec![Layer::new(&entries, Compression::Gzip)])
            .with("Entrypoint", json!(["/probe"]))
            .with("Env", json!(["FROM_IMAGE=yes", "OVERRIDDEN=image"]))
    }

    /// An image of these layers with an empty configuration.
    pub fn of(layers: Vec<Layer>) -> Image {
        Image { layers, config: json!({}), architecture: ARCHITECTURE.into() }
    }

    /// The same image with one more member in its `config`.
    pub fn with(mut self, key: &str, value: Value) -> Image {
        self.config[key] = value;
        self
    }

    /// The same image with one more layer on top.
    pub fn plus(mut self, layer: Layer) -> Image {
        self.layers.push(layer);
        self
    }

    /// The configuration blob; its digest is the image's id.
    pub fn config_blob(&self) -> Vec<u8> {
        let diff_ids: Vec<&str> = self.layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        json!({
            "architecture": self.architecture, "os": "linux", "created": "2026-01-01T00:00:00Z",
            "config": self.config, "rootfs": { "type": "layers", "diff_ids": diff_ids },
        })
        .to_string()
        .into_bytes()
    }

    /// `sha256:HEX`, as ListImages shows it.
    pub fn id(&self) -> String {
        digest(&self.config_blob())
    }

    /// The manifest.
    pub fn manifest(&self) -> Vec<u8> {
        let config = self.config_blob();
        let layers: Vec<Value> =
            self.layers.iter().map(|layer| descriptor(layer.media_type(), &layer.blob)).collect();
        json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config), "layers": layers,
        })
        .to_string()
        .into_bytes()
    }

    /// An OCI layout in a tar, as `skopeo copy … oci-archive:` writes it, under this name.
    pub fn oci_archive(&self, name: &str) -> Vec<u8> {
        let manifest = self.manifest();
        let mut entry = descriptor(MANIFEST, &manifest);
        entry["annotations"] =
            json!({ "org.opencontainers.image.ref.name": name, "io.containerd.image.name": name });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] });
        let mut entries = vec![
            Entry::file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#),
            Entry::file("index.json", index.to_string().as_bytes()),
        ];
        let blobs = [self.config_blob(), manifest];
        let layers = self.layers.iter().map(|layer| layer.blob.clone());
        for blob in blobs.into_iter().chain(layers) {
            // 71 characters of digest and the folder fit a plain header.
            entries.push(Entry::file(&format!("blobs/{}", digest(&blob).replace(':', "/")), &blob));
        }
        Layer::new(&entries, Compression::Plain).blob
    }

    /// What `docker save` writes, under these names. Its layers are plain tars.
    pub fn docker_archive(&self, names: &[&str]) -> Vec<u8> {
        docker_archive_of(&[(self, names)])
    }

    /// The same image with its layers repacked.
    pub fn repacked(mut self, entries: &[Entry], compression: Compression) -> Image {
        self.layers = vec![Layer::new(entries, compression)];
        self
    }
}

/// What `docker save` writes of several images, each under its names. Their layers are plain tars.
pub fn docker_archive_of(images: &[(&Image, &[&str])]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut manifest = Vec::new();
    for (number, (image, names)) in images.iter().enumerate() {
        let mut files = Vec::new();
        for (index, layer) in image.layers.iter().enumerate() {
            assert!(layer.compression == Compression::Plain, "docker save does not compress layers");
            let file = format!("{number}-{index}/layer.tar");
            entries.push(Entry::file(&file, &layer.blob));
            files.push(file);
        }
        let config = image.config_blob();
        let config_name = format!("{}.json", digest(&config).trim_start_matches("sha256:"));
        entries.push(Entry::file(&config_name, &config));
        manifest.push(json!({ "Config": config_name, "RepoTags": names, "Layers": files }));
    }
    entries.push(Entry::file("manifest.json", Value::from(manifest).to_string().as_bytes()));
    Layer::new(&entries, Compression::Plain).blob
}

/// The same users and program as [`Image::probe`], as entries: for tests that choose the packing.
pub fn probe_entries(program: &[u8]) -> Vec<Entry> {
    vec![
        Entry::directory("etc", 0o755),
        Entry::file("etc/passwd", PASSWD.as_bytes()),
        Entry::file("etc/group", GROUP.as_bytes()),
        Entry::program("probe", program),
    ]
}

/// A content descriptor.
pub fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(blob), "size": blob.len() })
}

/// The built probe's bytes.
pub fn program(binaries: &Path) -> Vec<u8> {
    let path = binaries.join("probe");
    std::fs::read(&path).unwrap_or_else(|error| {
        panic!(
            "{}: {error}; build it first: cargo build --release --target … -p coracle-probe",
            path.display()
        )
    })
}
