//! containerd with runc and CNI plugins from Debian's packages, for comparisons: a daemon with its own
//! directories like [`crate::node::Node`], used through the same client. Its programs are in `target/tools`
//! (`tests/tools/install bench-peers`); nothing is installed.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cri::Cri;
use crate::cri::proto::{ListPodSandboxRequest, VersionRequest};
use crate::host::{self, wait_for, wait_until};
use crate::image::{self, Image};
use crate::node::binaries;

/// Name of the image for containerd's pause container: the probe, sleeping.
const PAUSE: &str = "localhost/pause:1";
/// Directory of the sockets of containerd's shims, independent of its configuration (containerd 1.6 and 2.x:
/// `defaults.DefaultStateDir`).
const SHIM_SOCKETS: &str = "/run/containerd/s";

/// A running containerd.
pub struct Peer {
    folder: PathBuf,
    bridge: String,
    cri: Cri,
    daemon: Option<Child>,
    had_sockets: bool,
}

/// Gives access to the CRI client, which is that of a node.
impl Deref for Peer {
    type Target = Cri;

    fn deref(&self) -> &Cri {
        &self.cri
    }
}

/// Path of a program in the search path.
fn tool(name: &str) -> PathBuf {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .map(|folder| Path::new(folder).join(name))
        .find(|file| file.exists())
        .unwrap_or_else(|| panic!("{name}: not in PATH; tests/tools/install bench-peers brings it"))
}

impl Peer {
    /// Starts a containerd in a new directory. `conflist`: its network, which uses `bridge`.
    pub fn start(folder: &Path, bridge: &str, conflist: &str) -> Peer {
        host::require_root();
        fs::create_dir_all(folder.join("cni")).expect("the peer's folder");
        fs::write(folder.join("cni/10-peer.conflist"), conflist).expect("the network's configuration");
        fs::write(folder.join("config.toml"), configuration(folder)).expect("the peer's configuration");
        let mut peer = Peer {
            folder: folder.to_owned(),
            bridge: bridge.to_owned(),
            cri: Cri::new(&folder.join("cri.sock")),
            daemon: None,
            had_sockets: Path::new(SHIM_SOCKETS).exists(),
        };
        peer.spawn();
        peer.answers();
        let pause = Image::probe(&image::program(&binaries()), "pause")
            .with("Cmd", serde_json::json!(["sleep", "1000000"]));
        peer.import(&pause, PAUSE);
        peer
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        self.daemon.as_ref().expect("the peer runs").id() as i32
    }

    /// Path of containerd's CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("cri.sock")
    }

    /// The version according to `containerd --version`.
    pub fn version() -> String {
        let output = Command::new(tool("containerd")).arg("--version").output().expect("containerd runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace().nth(2).unwrap_or_default().to_owned()
    }

    /// Starts the daemon without waiting for its answer.
    pub fn spawn(&mut self) {
        let mut log = fs::File::options();
        let log = log.create(true).append(true).open(self.folder.join("log")).expect("the peer's log");
        let child = Command::new(tool("containerd"))
            .arg("--config")
            .arg(self.folder.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("containerd starts");
        self.daemon = Some(child);
    }

    /// Waits until the daemon answers.
    fn answers(&mut self) {
        wait_until(&format!("containerd answers; its log is {}/log", self.folder.display()), || {
            let child = self.daemon.as_mut().expect("just started");
            assert!(child.try_wait().expect("it is our child").is_none(), "containerd has ended");
            self.cri.version(VersionRequest::default()).is_ok()
        });
    }

    /// Kills the daemon; its pods continue.
    pub fn kill9(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            child.kill().expect("the daemon is ours to kill");
            child.wait().expect("the daemon is our child");
        }
    }

    /// Imports an image with this name.
    pub fn import(&self, image: &Image, name: &str) {
        let file = self.folder.join("import.tar");
        fs::write(&file, image.oci_archive(name)).expect("the archive");
        let output = self.import_command().arg(&file).output().expect("ctr runs");
        assert!(output.status.success(), "ctr images import: {}", String::from_utf8_lossy(&output.stderr));
        fs::remove_file(file).expect("the archive is ours");
    }

    /// A command that imports the archive of images that is its last argument.
    pub fn import_command(&self) -> Command {
        let mut command = Command::new(tool("ctr"));
        command.arg("--address").arg(self.socket()).args(["--namespace", "k8s.io", "images", "import"]);
        command
    }

    /// Removes all pods, ends the daemon, and fails if any object remains.
    pub fn stop(mut self) {
        let pods = self.list_pod_sandbox(ListPodSandboxRequest::default()).expect("containerd lists pods");
        for pod in pods.items {
            self.remove_pod(&pod.id);
        }
        let name = format!("{}/", self.folder.display());
        wait_until("shims have ended", || {
            host::processes(&name).iter().all(|process| !process.command.contains("shim"))
        });
        self.terminate();
        let mounts = host::mounts(&name);
        assert!(mounts.is_empty(), "left behind by containerd: {mounts:?}");
        self.sweep();
    }

    /// Ends the daemon with SIGTERM.
    fn terminate(&mut self) {
        let Some(mut child) = self.daemon.take() else { return };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the peer is ours to stop");
        wait_for("containerd ends after SIGTERM", || child.try_wait().expect("it is our child"));
    }

    /// Removes the files that containerd keeps for its next start.
    fn sweep(&self) {
        if Path::new("/sys/class/net").join(&self.bridge).exists() {
            let _ = Command::new("ip").args(["link", "delete", &self.bridge]).status();
        }
        if !self.had_sockets {
            // Each fails only if another containerd uses the directory.
            let _ = fs::remove_dir(SHIM_SOCKETS);
            let _ = Path::new(SHIM_SOCKETS).parent().map(fs::remove_dir);
        }
    }
}

/// Kills containerd's processes after a failure, shims first, because they would otherwise try to clean up
/// through the daemon.
impl Drop for Peer {
    fn drop(&mut self) {
        if self.daemon.is_none() {
            return;
        }
        eprintln!("containerd's folder, with its log, is left in {}", self.folder.display());
        let name = format!("{}/", self.folder.display());
        let pods = self.list_pod_sandbox(ListPodSandboxRequest::default());
        for pod in pods.map(|answer| answer.items).unwrap_or_default() {
            let id = pod.id.clone();
            let _ = self
                .stop_pod_sandbox(crate::cri::proto::StopPodSandboxRequest { pod_sandbox_id: id.clone() });
            let _ =
                self.remove_pod_sandbox(crate::cri::proto::RemovePodSandboxRequest { pod_sandbox_id: id });
        }
        self.kill9();
        for process in host::processes(&name) {
            if process.command.contains("containerd-shim") {
                let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
            }
        }
        for line in host::mounts(&name).iter().rev() {
            let place = line.split(' ').nth(4).unwrap_or_default();
            let _ = nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH);
        }
        self.sweep();
    }
}

/// containerd's configuration: its own directories, otherwise Debian's defaults. AppArmor is disabled,
/// because this machine may not have it; the change of OOM scores is disabled, because the test environment
/// may not permit it.
fn configuration(folder: &Path) -> String {
    let plugins = tool("cni");
    let (folder, plugins) = (folder.display(), plugins.display());
    format!(
        r#"version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/cri.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{folder}/runc"
"#
    )
}
