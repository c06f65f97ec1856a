//! Fixture images, created in memory: nothing is downloaded, and each test defines the content of its image.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::layer::{Compression, Entry, Layer, digest};
use crate::node::binaries;

/// The media type of an OCI manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of an OCI index (manifest list).
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The media type of an image's configuration.
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Architecture of this machine, as in GOARCH.
pub const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else if cfg!(target_arch = "arm") {
    "arm"
} else if cfg!(target_arch = "riscv64") {
    "riscv64"
} else {
    "amd64"
};

/// Content of /etc/passwd in the probe's image.
const PASSWD: &str =
    "root:x:0:0:root:/root:/probe\nalice:x:1000:1000::/home/alice:/probe\nbob:x:1001:1001::/:/probe\n";
/// Content of /etc/group in the probe's image: alice is in two groups in addition to her own.
const GROUP: &str = "root:x:0:\nalice:x:1000:\nbob:x:1001:\nboat:x:2000:alice\ncrew:x:2001:alice,bob\n";

/// An image: its layers and its `config` object.
#[derive(Debug, Clone)]
pub struct Image {
    /// Layers of the image, lowest first.
    pub layers: Vec<Layer>,
    /// The `config` member of the image configuration: Entrypoint, Cmd, Env, User, ...
    pub config: Value,
    /// Architecture of the image, as in GOARCH.
    pub architecture: String,
}

impl Image {
    /// The image of most tests: the probe, users, a few directories. `marker` makes its ID unique.
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

    /// Creates an image with these layers and an empty configuration.
    pub fn of(layers: Vec<Layer>) -> Image {
        Image { layers, config: json!({}), architecture: ARCHITECTURE.into() }
    }

    /// Adds a member to the image's `config`.
    pub fn with(mut self, key: &str, value: Value) -> Image {
        self.config[key] = value;
        self
    }

    /// Adds a layer on top of the others.
    pub fn plus(mut self, layer: Layer) -> Image {
        self.layers.push(layer);
        self
    }

    /// The configuration blob; its digest is the image's ID.
    pub fn config_blob(&self) -> Vec<u8> {
        let diff_ids: Vec<&str> = self.layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        json!({
            "architecture": self.architecture, "os": "linux", "created": "2026-01-01T00:00:00Z",
            "config": self.config, "rootfs": { "type": "layers", "diff_ids": diff_ids },
        })
        .to_string()
        .into_bytes()
    }

    /// Image ID `sha256:HEX`, as in ListImages.
    pub fn id(&self) -> String {
        digest(&self.config_blob())
    }

    /// The manifest as JSON.
    pub fn manifest(&self) -> Vec<u8> {
        let config = self.config_blob();
        let layer = |layer: &Layer| {
            let mut layer_descriptor = descriptor(layer.media_type(), &layer.blob);
            if !layer.annotations.is_null() {
                layer_descriptor["annotations"] = layer.annotations.clone();
            }
            layer_descriptor
        };
        let layers: Vec<Value> = self.layers.iter().map(layer).collect();
        json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config), "layers": layers,
        })
        .to_string()
        .into_bytes()
    }

    /// A tar archive with an OCI layout, in the format of `skopeo copy … oci-archive:`; the image has this
    /// name.
    pub fn oci_archive(&self, name: &str) -> Vec<u8> {
        self.oci_archive_with(name, &[], &[])
    }

    /// [`Image::oci_archive`] with further entries of its index, and further blobs.
    pub fn oci_archive_with(&self, name: &str, more: &[Value], further: &[Vec<u8>]) -> Vec<u8> {
        let manifest = self.manifest();
        let mut entry = descriptor(MANIFEST, &manifest);
        entry["annotations"] =
            json!({ "org.opencontainers.image.ref.name": name, "io.containerd.image.name": name });
        let entries = [&[entry], more].concat();
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries });
        let mut entries = vec![
            Entry::file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#),
            Entry::file("index.json", index.to_string().as_bytes()),
        ];
        let blobs = [self.config_blob(), manifest];
        let layers = self.layers.iter().map(|layer| layer.blob.clone());
        for blob in blobs.into_iter().chain(layers).chain(further.iter().cloned()) {
            // The name of a directory and 71 characters of digest fit into a plain tar header.
            entries.push(Entry::file(&format!("blobs/{}", digest(&blob).replace(':', "/")), &blob));
        }
        Layer::new(&entries, Compression::Plain).blob
    }

    /// An archive in the format of `docker save` with these names. Its layers are uncompressed.
    pub fn docker_archive(&self, names: &[&str]) -> Vec<u8> {
        docker_archive_of(&[(self, names)])
    }

    /// Replaces the image's layers by one layer with these entries and this compression.
    pub fn repacked(mut self, entries: &[Entry], compression: Compression) -> Image {
        self.layers = vec![Layer::new(entries, compression)];
        self
    }
}

/// An archive of several images in the format of `docker save`, each with its names. Their layers are
/// uncompressed.
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

/// The users and the program of [`Image::probe`] as entries, for tests that choose the compression.
pub fn probe_entries(program: &[u8]) -> Vec<Entry> {
    vec![
        Entry::directory("etc", 0o755),
        Entry::file("etc/passwd", PASSWD.as_bytes()),
        Entry::file("etc/group", GROUP.as_bytes()),
        Entry::program("probe", program),
    ]
}

/// A content descriptor of a blob.
pub fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(blob), "size": blob.len() })
}

/// The bytes of the built probe program.
pub fn program(binaries: &Path) -> Vec<u8> {
    let path = binaries.join("probe");
    std::fs::read(&path).unwrap_or_else(|error| {
        panic!(
            "{}: {error}; build it first: cargo build --release --target … -p coracle-probe",
            path.display()
        )
    })
}

/// Runs `coracle image bundle`, which makes an additional store; returns whether it succeeded, and its error text.
pub fn bundle(store: &Path, archives: &[PathBuf]) -> (bool, String) {
    let mut command = Command::new(binaries().join("coracle"));
    let output = command.args(["image", "bundle", "--store"]).arg(store).args(archives).output();
    let output = output.expect("the program runs");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}
