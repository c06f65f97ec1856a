//! The images of the cases in one OCI archive: one layer of Debian's packages, and a configuration for each case.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::image::{ARCHITECTURE, INDEX, MANIFEST, descriptor};
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use serde_json::{Value, json};

use crate::case::Case;

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A layer as the images refer to it.
struct Stored {
    descriptor: Value,
    diff_id: String,
}

/// The archive that is being collected, as the directory of an OCI layout.
struct Layout(PathBuf);

/// Writes the archive.
pub(crate) fn archive(folder: &Path, cases: &[Case]) -> PathBuf {
    let layout = Layout(folder.join("layout"));
    fs::create_dir_all(layout.0.join("blobs/sha256")).expect("a directory");
    let debian = cases.iter().any(|case| !case.is_program).then(|| layout.debian());
    let program = cases.iter().any(|case| case.is_program).then(|| layout.program());
    let mut manifests = Vec::new();
    for case in cases {
        let layer = if case.is_program { &program } else { &debian };
        manifests.push(layout.image(case, layer.as_ref().expect("just made")));
    }
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    fs::write(layout.0.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#).expect("a file");
    fs::write(layout.0.join("index.json"), index.to_string()).expect("a file");
    let archive = folder.join("workloads.tar");
    let output = run(Command::new("tar").arg("-chf").arg(&archive).arg("-C").arg(&layout.0).arg("."));
    assert!(output.is_empty(), "tar: {output}");
    fs::remove_dir_all(layout.0).expect("ours");
    archive
}

/// The output of a program that must succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A file that `tests/tools/install workloads` makes.
fn tool(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools").join(name);
    fs::canonicalize(&path).unwrap_or_else(|error| {
        panic!("{}: {error}: `tests/tools/install workloads` makes it", path.display())
    })
}

impl Layout {
    fn add(&self, blob: &[u8]) {
        fs::write(self.path(&digest(blob)), blob).expect("a file");
    }

    fn path(&self, digest: &str) -> PathBuf {
        self.0.join("blobs").join(digest.replace(':', "/"))
    }

    /// The layer of Debian's packages: a link, which tar follows.
    fn debian(&self) -> Stored {
        let file = tool("workloads/layer.tar.zst");
        let sum = run(Command::new("sha256sum").arg(&file));
        let digest = format!("sha256:{}", sum.split(' ').next().unwrap_or_default());
        symlink(&file, self.path(&digest)).expect("a link");
        let size = fs::metadata(&file).expect("just read").len();
        let diff_id = fs::read_to_string(tool("workloads/diff-id")).expect("a file");
        Stored {
            descriptor: json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar+zstd", "digest": digest, "size": size,
            }),
            diff_id: format!("sha256:{}", diff_id.trim()),
        }
    }

    /// A layer with one program, as tools for images of Go programs make it, and with root's home as Debian has it.
    fn program(&self) -> Stored {
        let program = fs::read(tool("bin/workload-serve")).expect("a file");
        let entries = [Entry::directory("root", 0o700), Entry::program("serve", &program)];
        let layer = Layer::new(&entries, Compression::Gzip);
        self.add(&layer.blob);
        Stored { descriptor: descriptor(layer.media_type(), &layer.blob), diff_id: layer.diff_id }
    }

    /// The image of a case; returns its entry of the index.
    fn image(&self, case: &Case, layer: &Stored) -> Value {
        let mut config = case.image.clone();
        let environment: Vec<Value> = config["Env"].as_array().cloned().unwrap_or_default();
        config["Env"] = [vec![PATH.into()], environment].concat().into();
        let image = json!({
            "architecture": ARCHITECTURE, "os": "linux", "created": "2026-01-01T00:00:00Z", "author": case.name,
            "config": config, "rootfs": { "type": "layers", "diff_ids": [layer.diff_id] },
        });
        let image = image.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &image), "layers": [layer.descriptor],
        });
        let manifest = manifest.to_string().into_bytes();
        self.add(&image);
        self.add(&manifest);
        let mut entry = descriptor(MANIFEST, &manifest);
        let name = case.image_name();
        entry["annotations"] =
            json!({ "org.opencontainers.image.ref.name": name, "io.containerd.image.name": name });
        entry
    }
}
