//! podman with the partial pulls of containers/storage, and skopeo, as the packages of Debian 13 have them, without their installation
//! (`podman` in `tests/tools/install`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

/// Runs a program in the root of the packages, which have a C library of their own: `ROOT FOLDER SECONDS PROGRAM [ARGUMENT…]`. In a mount
/// namespace, so that what is mounted here and by podman ends with it. The last line of standard error has the CPU seconds.
const INSIDE: &str = r#"
set -eu
packages=$1 folder=$2 seconds=$3 root=$2/root
shift 3
mount -t tmpfs tmpfs "$root"
mkdir -p "$root/usr" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp" "$root/var/tmp"
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$root/$name"; done
cp -r "$folder/etc" "$root/etc"
mount --bind -o ro "$packages/usr" "$root/usr"
for name in proc sys dev; do mount --rbind "/$name" "$root/$name"; done
# podman's locks are there.
mount -t tmpfs tmpfs "$root/dev/shm"
mkdir -p "$root$folder"
mount --bind "$folder" "$root$folder"
TIMEFORMAT='%U %S'
time timeout "$seconds" chroot "$root" "$@"
"#;

/// podman with a store of its own.
pub struct Podman {
    folder: PathBuf,
    packages: PathBuf,
}

impl Podman {
    /// Writes the configuration to a directory, where the store will be.
    pub fn new(folder: &Path) -> Podman {
        let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/guest/podman");
        let packages = packages.canonicalize().expect("tests/tools/install brings podman");
        fs::create_dir_all(folder).expect("a directory");
        let folder = folder.canonicalize().expect("it was made");
        let etc = folder.join("etc/containers");
        for directory in [&etc, &folder.join("root")] {
            fs::create_dir_all(directory).expect("a directory");
        }
        let at = folder.display();
        let storage = format!(
            "[storage]\ndriver = \"overlay\"\nrunroot = \"{at}/run\"\ngraphroot = \"{at}/store\"\n[storage.options]\n\
             pull_options = {{enable_partial_images = \"true\"}}\n"
        );
        let policy = r#"{"default":[{"type":"insecureAcceptAnything"}]}"#.to_owned();
        for (name, text) in [("storage.conf", storage), ("policy.json", policy)] {
            fs::write(etc.join(name), text).expect("a configuration");
        }
        Podman { folder, packages }
    }

    /// Pulls an image; returns the CPU seconds.
    ///
    /// # Panics
    /// If it fails.
    pub fn pull(&self, name: &str, limit: Duration) -> f64 {
        self.run(limit, &["podman", "pull", "--quiet", "--tls-verify=false", name])
    }

    /// Whether the layer with this diff ID was made by its table of contents, and its archive was verified with the tar-split data.
    pub fn has_used_table(&self, diff_id: &str) -> bool {
        let layers =
            fs::read(self.folder.join("store/overlay-layers/layers.json")).expect("a list of layers");
        let layers: Vec<Value> = serde_json::from_slice(&layers).expect("JSON");
        layers.iter().any(|layer| layer["diff-digest"] == diff_id && layer["toc-digest"].is_string())
    }

    /// Copies an image of a registry by skopeo, which decompresses its layers. Returns the directory with them, each with its digest as
    /// name.
    ///
    /// # Panics
    /// If it fails.
    pub fn copy(&self, name: &str) -> PathBuf {
        let into = self.folder.join("copied");
        let (from, to) = (format!("docker://{name}"), format!("dir:{}", into.display()));
        let words = ["skopeo", "copy", "--src-tls-verify=false", "--dest-decompress", &from, &to];
        self.run(Duration::from_secs(60), &words);
        into
    }

    /// Directory of the layers, each with its tree in `diff`.
    pub fn layers(&self) -> PathBuf {
        self.folder.join("store/overlay")
    }

    /// Runs a program of the packages; returns the CPU seconds.
    fn run(&self, limit: Duration, words: &[&str]) -> f64 {
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "bash", "-c", INSIDE, "bash"])
            .args([&self.packages, &self.folder])
            .arg(limit.as_secs().to_string())
            .args(words)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/tmp")
            .env("TMPDIR", &self.folder)
            .output()
            .expect("unshare of util-linux");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {text}");
        let times = text.lines().last().unwrap_or_default().split(' ');
        times.map(|time| time.parse::<f64>().expect("CPU seconds")).sum()
    }
}
