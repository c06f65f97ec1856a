//! Images that `coracle-convert` made in tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::image::Image;
use crate::layer::{Compression, Layer, digest};
use crate::node;
use crate::request::fresh;

/// A directory for archives, which is removed.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the directory.
    pub fn new(name: &str) -> Folder {
        let path =
            std::env::temp_dir().join(format!("coracle-convert-{name}-{}-{}", std::process::id(), fresh()));
        fs::create_dir_all(&path).expect("a directory");
        Folder(path)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("a file");
        path
    }

    /// Converts an archive; returns the result.
    pub fn convert(&self, archive: &[u8]) -> Converted {
        let (from, to) = (self.write("in.tar", archive), self.0.join("out.tar"));
        let output = run(&["convert", &from.display().to_string(), &to.display().to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let archive = fs::read(&to).expect("the archive");
        Converted { files: files(&archive), archive, said }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let left: Vec<_> =
            fs::read_dir(&self.0).expect("ours").flatten().map(|entry| entry.file_name()).collect();
        let _ = fs::remove_dir_all(&self.0);
        let hidden = left.iter().filter(|name| {
            name.to_string_lossy().contains("coracle-convert") || name.to_string_lossy().contains("partial")
        });
        assert_eq!(hidden.count(), 0, "{left:?}");
    }
}

/// Runs `coracle-convert`.
pub fn run(words: &[&str]) -> Output {
    let program = node::binaries().join("coracle-convert");
    let output = Command::new(&program).args(words).output();
    output.unwrap_or_else(|error| panic!("{}: {error}; `make convert` builds it", program.display()))
}

/// An OCI archive.
pub struct Converted {
    /// Bytes of the archive.
    pub archive: Vec<u8>,
    /// Files of the archive by their names.
    files: BTreeMap<String, Vec<u8>>,
    /// Standard output.
    pub said: String,
}

impl Converted {
    /// The file that a descriptor refers to.
    fn blob(&self, descriptor: &Value) -> &[u8] {
        let digest = descriptor["digest"].as_str().expect("a digest");
        &self.files[&format!("blobs/{}", digest.replace(':', "/"))]
    }

    /// The document of a descriptor.
    pub fn document(&self, descriptor: &Value) -> Value {
        let bytes = self.blob(descriptor);
        assert_eq!(descriptor["size"], bytes.len());
        serde_json::from_slice(bytes).expect("JSON")
    }

    /// The descriptors of its images.
    pub fn images(&self) -> Vec<Value> {
        let index: Value = serde_json::from_slice(&self.files["index.json"]).expect("JSON");
        index["manifests"].as_array().expect("a list").clone()
    }

    /// The manifest of the only image.
    pub fn manifest(&self) -> Value {
        let images = self.images();
        assert_eq!(images.len(), 1, "{images:?}");
        self.document(&images[0])
    }

    /// The image with its layers as it is pushed.
    pub fn image(&self, of: &Image) -> Image {
        let manifest = self.manifest();
        assert_eq!(manifest["config"]["digest"], of.id(), "the ID of the image");
        let layers =
            manifest["layers"].as_array().expect("layers").iter().zip(&of.layers).map(|(layer, old)| Layer {
                blob: self.blob(layer).to_vec(),
                diff_id: old.diff_id.clone(),
                compression: Compression::Zstd,
                annotations: layer["annotations"].clone(),
            });
        Image { layers: layers.collect(), ..of.clone() }
    }
}

/// The files of an archive by their names; those that are named by a digest have it.
fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(archive);
    let mut files = BTreeMap::new();
    for entry in archive.entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut bytes).expect("its content");
        files.insert(entry.path().expect("a name").display().to_string(), bytes);
    }
    for (name, bytes) in
        files.iter().filter_map(|(name, bytes)| Some((name.strip_prefix("blobs/sha256/")?, bytes)))
    {
        assert_eq!(digest(bytes), format!("sha256:{name}"));
    }
    files
}
