//! Another runtime, for comparisons: a daemon with its own directories like [`crate::node::Node`], used through the same client. It
//! is containerd, or CRI-O if `CORACLE_PEER` is `crio`, of the search path, with the CNI plugins in the directory `cni` there.
//! `tests/tools/install bench-peers` brings Debian's containerd, runc and plugins into `target/tools`; nothing is installed.

mod containerd;
mod crio;

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
use crate::node::{Node, binaries};
use crate::registry::Registry;
use crate::request::pull;

/// Name of the image for the pause container: the probe, sleeping.
const PAUSE: &str = "localhost/pause:1";

/// A runtime, as far as it differs from others.
trait Runtime: Sync {
    /// The runtime's name.
    fn name(&self) -> &'static str;

    /// The version according to its program, and that of the program that makes containers.
    fn version(&self) -> String;

    /// A part of the name of the program that runs beside each pod, and ends after it.
    fn monitor(&self) -> &'static str;

    /// Files and directories that it makes outside of its own, children first.
    fn shared(&self) -> &'static [&'static str];

    /// Writes the configuration. `registry`: the address of a registry without TLS.
    fn configure(&self, folder: &Path, registry: Option<&str>);

    /// The command of the daemon, whose CRI socket is `cri.sock`.
    fn daemon(&self, folder: &Path) -> Command;

    /// How images reach it.
    fn import(&self, folder: &Path) -> Import;
}

/// How images reach a runtime.
enum Import {
    /// By a program that reads an archive, its last argument.
    Archive(Command),
    /// By a pull.
    Registry,
}

/// Word `index`, from 0, of what a program prints with one argument.
fn word_of(program: &str, argument: &str, index: usize) -> String {
    let output = Command::new(tool(program)).arg(argument).output();
    let output = output.unwrap_or_else(|error| panic!("{program} {argument}: {error}"));
    String::from_utf8_lossy(&output.stdout).split_whitespace().nth(index).unwrap_or_default().to_owned()
}

/// The version that `runc --version` prints.
fn runc_version() -> String {
    word_of("runc", "--version", 2)
}

fn chosen() -> &'static dyn Runtime {
    match std::env::var("CORACLE_PEER").as_deref() {
        Ok("crio") => &crio::Crio,
        Ok("containerd" | "containerd-2" | "") | Err(_) => &containerd::Containerd,
        Ok(other) => panic!("CORACLE_PEER={other}: containerd, containerd-2 or crio"),
    }
}

/// A running peer.
pub struct Peer {
    runtime: &'static dyn Runtime,
    folder: PathBuf,
    bridge: String,
    cri: Cri,
    daemon: Option<Child>,
    /// Variables added to the daemon's environment.
    environment: Vec<(String, String)>,
    /// Files and directories outside of its own that were not there before.
    made: Vec<&'static str>,
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
    /// Starts the runtime in a new directory. `conflist`: its network, which uses `bridge`. `registry`: where images may come from; without
    /// one it is containerd.
    pub fn start(folder: &Path, bridge: &str, conflist: &str, registry: Option<&Registry>) -> Peer {
        Peer::start_with(folder, bridge, conflist, registry, &[])
    }

    fn start_with(
        folder: &Path,
        bridge: &str,
        conflist: &str,
        registry: Option<&Registry>,
        environment: &[(String, String)],
    ) -> Peer {
        host::require_root();
        let runtime = if registry.is_some() { chosen() } else { &containerd::Containerd };
        fs::create_dir_all(folder.join("cni")).expect("the peer's folder");
        fs::write(folder.join("cni/10-peer.conflist"), conflist).expect("the network's configuration");
        runtime.configure(folder, registry.map(|registry| registry.address().to_string()).as_deref());
        let mut peer = Peer {
            runtime,
            folder: folder.to_owned(),
            bridge: bridge.to_owned(),
            cri: Cri::new(&folder.join("cri.sock")),
            daemon: None,
            environment: environment.to_vec(),
            made: runtime.shared().iter().copied().filter(|path| !Path::new(path).exists()).collect(),
        };
        peer.spawn();
        peer.answers();
        let pause = Image::probe(&image::program(&binaries()), "pause")
            .with("Cmd", serde_json::json!(["sleep", "1000000"]));
        peer.import(&pause, PAUSE, registry);
        peer
    }

    /// Starts the runtime beside a node that has a CNI bridge: with the same environment and network configuration, but another bridge,
    /// another lease directory, and the next range of addresses.
    pub fn beside(node: &Node, registry: Option<&Registry>) -> Peer {
        let bridge = format!("ct{}p", std::process::id() % 1_000_000);
        let conflist = fs::read_to_string(node.cni().join("10-boat.conflist")).expect("the node's network");
        let folder = node.folder().with_extension("peer");
        let subnet = node.subnet();
        let (network, third) = subnet.rsplit_once('.').expect("a subnet");
        let next = format!("{network}.{}", third.parse::<u8>().expect("a number") + 1);
        let conflist = conflist
            .replace(&node.bridge(), &bridge)
            .replace(&node.folder().display().to_string(), &folder.display().to_string())
            .replace(&format!("{subnet}.0/"), &format!("{next}.0/"));
        Peer::start_with(&folder, &bridge, &conflist, registry, node.environment())
    }

    /// Directory with all files of the runtime.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        self.daemon.as_ref().expect("the peer runs").id() as i32
    }

    /// Path of the CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("cri.sock")
    }

    /// Whether this is the runtime that the page's plots show.
    pub fn is_drawn() -> bool {
        std::env::var("CORACLE_PEER").as_deref() == Ok("containerd-2")
    }

    /// Name and version of the runtime in the search path.
    pub fn version() -> String {
        format!("{} {}", chosen().name(), chosen().version())
    }

    /// Starts the daemon without waiting for its answer.
    pub fn spawn(&mut self) {
        let mut log = fs::File::options();
        let log = log.create(true).append(true).open(self.folder.join("log")).expect("the peer's log");
        let mut command = self.runtime.daemon(&self.folder);
        command.envs(self.environment.iter().cloned());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        self.daemon = Some(child.expect("the peer starts"));
    }

    /// Waits until the daemon answers.
    fn answers(&mut self) {
        wait_until(&format!("the peer answers; its log is {}/log", self.folder.display()), || {
            let child = self.daemon.as_mut().expect("just started");
            assert!(child.try_wait().expect("it is our child").is_none(), "the peer has ended");
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

    /// Imports an image with the name `localhost/REPOSITORY:TAG`, through `registry` if that is how images reach the runtime.
    pub fn import(&self, image: &Image, name: &str, registry: Option<&Registry>) {
        let Import::Archive(mut command) = self.runtime.import(&self.folder) else {
            let (repository, tag) = name.trim_start_matches("localhost/").split_once(':').expect("a tag");
            registry.expect("a registry").push(image, repository, tag);
            self.pull_image(pull(name)).expect("the peer pulls");
            return;
        };
        let file = self.folder.join("import.tar");
        fs::write(&file, image.oci_archive(name)).expect("the archive");
        let output = command.arg(&file).output().expect("the importing program runs");
        assert!(output.status.success(), "import: {}", String::from_utf8_lossy(&output.stderr));
        fs::remove_file(file).expect("the archive is ours");
    }

    /// A command that imports the archive of images that is its last argument.
    ///
    /// # Panics
    /// The runtime has no such program.
    pub fn import_command(&self) -> Command {
        match self.runtime.import(&self.folder) {
            Import::Archive(command) => command,
            Import::Registry => panic!("{} has no program that imports archives", self.runtime.name()),
        }
    }

    /// Removes all pods, ends the daemon, and fails if any object remains.
    pub fn stop(mut self) {
        let pods = self.list_pod_sandbox(ListPodSandboxRequest::default()).expect("the peer lists pods");
        for pod in pods.items {
            self.remove_pod(&pod.id);
        }
        let name = format!("{}/", self.folder.display());
        wait_until("the processes beside pods have ended", || {
            host::processes(&name).iter().all(|process| !process.command.contains(self.runtime.monitor()))
        });
        self.terminate();
        let mounts = host::mounts(&name);
        assert!(mounts.is_empty(), "left behind by the peer: {mounts:?}");
        self.sweep();
    }

    /// Ends the daemon with SIGTERM.
    fn terminate(&mut self) {
        let Some(mut child) = self.daemon.take() else { return };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the peer is ours to stop");
        wait_for("the peer ends after SIGTERM", || child.try_wait().expect("it is our child"));
    }

    /// Removes what the runtime keeps outside of its directories.
    fn sweep(&self) {
        if Path::new("/sys/class/net").join(&self.bridge).exists() {
            let _ = Command::new("ip").args(["link", "delete", &self.bridge]).status();
        }
        for path in &self.made {
            // A directory is kept if another daemon uses it.
            let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
        }
    }
}

/// Kills the peer's processes after a failure.
impl Drop for Peer {
    fn drop(&mut self) {
        if self.daemon.is_none() {
            return;
        }
        eprintln!(
            "the folder of {}, with its log, is left in {}",
            self.runtime.name(),
            self.folder.display()
        );
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
            if process.command.contains(self.runtime.monitor()) {
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
