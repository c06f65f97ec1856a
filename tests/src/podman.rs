//! podman with the partial pulls of containers/storage, and skopeo, as Debian's packages have them, without their installation (`podman`
//! in `tests/tools/install`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// podman with a store of its own.
pub struct Podman {
    folder: PathBuf,
    tools: PathBuf,
}

impl Podman {
    /// Writes the configuration to a directory, where the store will be.
    pub fn new(folder: &Path) -> Podman {
        fs::create_dir_all(folder).expect("a directory");
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/guest/podman");
        let tools = tools.canonicalize().expect("tests/tools/install brings podman");
        let (at, programs) = (folder.display(), tools.join("usr/bin"));
        let storage = format!(
            "[storage]\ndriver = \"overlay\"\nrunroot = \"{at}/run\"\ngraphroot = \"{at}/store\"\n[storage.options]\n\
             pull_options = {{enable_partial_images = \"true\", use_hard_links = \"false\", ostree_repos = \"\"}}\n"
        );
        let programs = programs.display();
        let containers = format!(
            "[engine]\nruntime = \"crun\"\nconmon_path = [\"{programs}/conmon\"]\n[engine.runtimes]\ncrun = [\"{programs}/crun\"]\n"
        );
        let policy = r#"{"default":[{"type":"insecureAcceptAnything"}]}"#.to_owned();
        for (name, text) in
            [("storage.conf", storage), ("containers.conf", containers), ("policy.json", policy)]
        {
            fs::write(folder.join(name), text).expect("a configuration");
        }
        Podman { folder: folder.to_owned(), tools }
    }

    /// Pulls an image; returns the CPU seconds.
    ///
    /// # Panics
    /// If it fails.
    pub fn pull(&self, name: &str, limit: Duration) -> f64 {
        let policy = self.folder.join("policy.json");
        let script = format!(
            "TIMEFORMAT='%U %S'; time timeout {} {} pull --quiet --tls-verify=false --signature-policy {} {name}",
            limit.as_secs(),
            self.tools.join("usr/bin/podman").display(),
            policy.display()
        );
        let output = self.command("bash").args(["-c", &script]).output().expect("bash");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "podman pull {name}: {text}");
        let times = text.lines().last().unwrap_or_default().split(' ');
        times.filter_map(|time| time.parse::<f64>().ok()).sum()
    }

    /// Copies an image of a registry to a directory by skopeo, which decompresses its layers: each is a file with the name of its digest.
    ///
    /// # Panics
    /// If it fails.
    pub fn copy(&self, name: &str, into: &Path) {
        let mut skopeo = self.command(&self.tools.join("usr/bin/skopeo").display().to_string());
        skopeo.arg("--policy").arg(self.folder.join("policy.json")).args([
            "copy",
            "--src-tls-verify=false",
            "--dest-decompress",
        ]);
        skopeo.arg(format!("docker://{name}")).arg(format!("dir:{}", into.display()));
        let output = skopeo.output().expect("tests/tools/install brings skopeo");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Directory of the layers, each with its tree in `diff`.
    pub fn layers(&self) -> PathBuf {
        self.folder.join("store/overlay")
    }

    /// Unmounts what its driver has mounted.
    pub fn stop(self) {
        let _ = Command::new("umount").arg(self.layers()).output();
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let of = |name: &str| self.folder.join(name);
        command
            .env("LD_LIBRARY_PATH", self.tools.join("usr/lib/x86_64-linux-gnu"))
            .env("CONTAINERS_STORAGE_CONF", of("storage.conf"))
            .env("CONTAINERS_CONF", of("containers.conf"))
            .env("CONTAINERS_REGISTRIES_CONF", self.tools.join("etc/containers/registries.conf"))
            .env("XDG_RUNTIME_DIR", &self.folder)
            .env("TMPDIR", &self.folder);
        command
    }
}
