//! A containerd 2 as the writer of a store of images: a daemon with its own directories, used through its client
//! and its CRI. It runs no pods; [`crate::peer`] is the containerd of the comparisons. Its programs are in
//! `target/tools/bin` (`containerd` in `tests/tools/install`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cri::Cri;
use crate::cri::proto::VersionRequest;
use crate::host::{self, wait_for, wait_until};
use crate::request;

/// A containerd with its own directories.
pub struct Containerd {
    folder: PathBuf,
    daemon: Option<Child>,
}

impl Containerd {
    /// Starts a containerd in a new directory below `folder`.
    pub fn start(folder: &Path) -> Containerd {
        host::require_root();
        let folder = folder.join(format!("containerd-{}", request::fresh()));
        fs::create_dir_all(&folder).expect("containerd's folder");
        let place = folder.display();
        let config = format!(
            r#"version = 3
root = "{place}/root"
state = "{place}/state"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
address = "{place}/cri.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{place}/opt"
"#
        );
        fs::write(folder.join("config.toml"), config).expect("containerd's configuration");
        let mut started = Containerd { folder, daemon: None };
        started.spawn();
        started
    }

    fn spawn(&mut self) {
        let log = fs::File::create(self.folder.join("log")).expect("containerd's log");
        let child = Command::new("containerd-2")
            .arg("--config")
            .arg(self.folder.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("containerd-2: {error}; tests/tools/install test brings it"));
        self.daemon = Some(child);
        wait_until(&format!("containerd answers; its log is {}/log", self.folder.display()), || {
            let child = self.daemon.as_mut().expect("just started");
            assert!(child.try_wait().expect("it is our child").is_none(), "containerd has ended");
            self.cri().version(VersionRequest::default()).is_ok()
        });
    }

    /// containerd's root directory, which contains its store.
    pub fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// Path of a blob in the content store.
    pub fn blob(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").expect("a digest");
        self.root().join("io.containerd.content.v1.content/blobs/sha256").join(hex)
    }

    /// A client of its CRI.
    pub fn cri(&self) -> Cri {
        Cri::new(&self.folder.join("cri.sock"))
    }

    /// Runs containerd's client in the namespace of the CRI; returns the output.
    #[track_caller]
    pub fn ctr(&self, words: &[&str]) -> String {
        let output = Command::new("ctr-2")
            .arg("--address")
            .arg(self.folder.join("cri.sock"))
            .args(["--namespace", "k8s.io"])
            .args(words)
            .output()
            .expect("ctr-2 runs");
        assert!(output.status.success(), "ctr {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Imports an archive.
    #[track_caller]
    pub fn import(&self, archive: &[u8]) {
        let file = self.folder.join("import.tar");
        fs::write(&file, archive).expect("the archive");
        self.ctr(&["images", "import", "--no-unpack", file.to_str().expect("UTF-8")]);
        fs::remove_file(file).expect("the archive is ours");
    }

    /// Ends the daemon with SIGTERM; the store stays.
    pub fn terminate(&mut self) {
        let Some(mut child) = self.daemon.take() else { return };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the daemon is ours to stop");
        wait_for("containerd ends after SIGTERM", || child.try_wait().expect("it is our child"));
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for line in host::mounts(&format!("{}/", self.folder.display())).iter().rev() {
            let place = line.split(' ').nth(4).unwrap_or_default();
            let _ = nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
