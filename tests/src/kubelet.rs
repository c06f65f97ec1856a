//! A real standalone kubelet: static pods, probes, restarts and its read-only API, with coracle or another runtime. Without an
//! API server; `make test` builds the program.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::host::{self, wait_within};
use crate::http;

/// A kubelet checks its files every second, and delays restarts.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two paths that cannot be configured, so that only one kubelet can run at a time.
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
const LOG_LINKS: &str = "/var/log/containers";

/// Directory in which cAdvisor looks for containerd's socket.
pub const CONTAINERD: &str = "/run/containerd";

/// The directory, runtime and cgroup of a kubelet.
#[derive(Debug, Clone)]
pub struct Place {
    /// Directory of all files of the kubelet, which is created.
    pub folder: PathBuf,
    /// The runtime's socket.
    pub socket: PathBuf,
    /// The cgroup below which the kubelet creates the cgroups of pods.
    pub parent: String,
    /// Size at which the kubelet rotates a log, as in its configuration.
    pub log_max: &'static str,
}

/// A running kubelet.
#[derive(Debug)]
pub struct Kubelet {
    child: Child,
    parent: String,
    _turn: Flock<fs::File>,
    folder: PathBuf,
    read_only_port: u16,
}

/// A port that is currently free.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// The kubelet's program: `CORACLE_KUBELET`, otherwise the one that `make test` builds.
pub fn program() -> PathBuf {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/bin/kubelet");
    std::env::var_os("CORACLE_KUBELET").map_or(usual, PathBuf::from)
}

/// The kubelet's source of `/metrics/cadvisor`.
#[derive(Debug)]
pub enum Numbers<'a> {
    /// ListPodSandboxMetrics.
    Cri,
    /// The kubelet's cAdvisor, which finds the container of a cgroup through the socket in this directory.
    Cadvisor(&'a Path),
}

impl Kubelet {
    /// Starts a kubelet, once no other one runs.
    pub fn start(place: &Place, numbers: &Numbers<'_>) -> Kubelet {
        let turn = turn();
        let (folder, parent) = (place.folder.clone(), place.parent.clone());
        for name in ["static", "root", "logs", "certs"] {
            fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        let (port, read_only_port, health) = (free_port(), free_port(), free_port());
        host::make_kubelet_cgroups(&parent);
        let at = folder.display();
        let config = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: {at}/static\n\
             address: 127.0.0.1\nport: {port}\nreadOnlyPort: {read_only_port}\nhealthzPort: {health}\n\
             authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}\n\
             authorization: {{mode: AlwaysAllow}}\ncgroupDriver: cgroupfs\ncgroupRoot: /{parent}\n\
             failCgroupV1: false\nfailSwapOn: false\nenforceNodeAllocatable: []\nmakeIPTablesUtilChains: false\n\
             localStorageCapacityIsolation: false\ncontainerRuntimeEndpoint: unix://{}\npodLogsDir: {at}/logs\n\
             volumePluginDir: {at}/plugins\nresolvConf: \"\"\nfileCheckFrequency: 1s\n\
             evictionHard: {{\"memory.available\": \"1Mi\"}}\ncontainerLogMaxSize: {}\ncontainerLogMaxFiles: 3\n\
             containerLogMonitorInterval: 3s\nfeatureGates: {{PodAndContainerStatsFromCRI: {}}}\n",
            place.socket.display(),
            place.log_max,
            matches!(numbers, Numbers::Cri)
        );
        fs::write(folder.join("config.yaml"), config).expect("a file");
        let program = program();
        assert!(program.exists(), "{} is not there: `tests/tools/install test` makes it", program.display());
        let mut command = match numbers {
            Numbers::Cadvisor(folder) => {
                // cAdvisor asks at one path, which no flag changes since Kubernetes 1.37: this kubelet sees our directory there.
                const BIND: &str = "mount --bind \"$1\" /run/containerd && shift && exec \"$@\"";
                fs::create_dir_all(CONTAINERD).expect("a directory to mount on");
                let mut command = Command::new("unshare");
                command.args(["--mount", "--propagation", "slave", "sh", "-c", BIND, "sh"]);
                command.arg(folder).arg(program);
                command
            }
            _ => Command::new(program),
        };
        let child = command
            .args(["--hostname-override", "node", "--v", "2"])
            .arg(format!("--config={at}/config.yaml"))
            .arg(format!("--root-dir={at}/root"))
            .arg(format!("--cert-dir={at}/certs"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder.join("kubelet.log")).expect("a log"))
            .spawn()
            .expect("the kubelet runs");
        Kubelet { child, parent, _turn: turn, folder, read_only_port }
    }

    /// The directory of all its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The answer of its read-only port.
    pub fn get(&self, path: &str) -> Option<String> {
        get(self.read_only_port, path)
    }

    /// A pod in the kubelet's API.
    pub fn pod(&self, name: &str) -> Option<Value> {
        pod(self.read_only_port, name)
    }

    /// The status of the first container of a pod in the kubelet's API.
    pub fn container(&self, pod: &str) -> Option<Value> {
        container(self.read_only_port, pod)
    }

    /// Waits until `condition` returns a value; panics with the kubelet's last errors.
    #[track_caller]
    pub fn wait<T>(&self, what: &str, condition: impl FnMut() -> Option<T>) -> T {
        wait_within(PATIENCE, condition)
            .unwrap_or_else(|| panic!("timeout: {what}; the kubelet's last errors:\n{}", self.errors()))
    }

    /// The last errors of its log.
    pub fn errors(&self) -> String {
        let log = fs::read_to_string(self.folder.join("kubelet.log")).unwrap_or_default();
        let errors: Vec<_> = log.lines().filter(|line| line.starts_with('E')).rev().take(10).collect();
        errors.join("\n")
    }

    /// Writes the manifest of a static pod.
    pub fn apply(&self, name: &str, manifest: &str) {
        fs::write(self.folder.join("static").join(format!("{name}.yaml")), manifest).expect("a manifest");
    }

    /// Writes a pod on the node's network that runs the probe with these words.
    pub fn write(&self, name: &str, image: &str, words: &str, more: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  hostNetwork: true\n  \
             terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: {image}\n    \
             imagePullPolicy: Never\n    args: [{words}]\n    \
             resources: {{limits: {{memory: 64Mi, cpu: 200m}}}}\n{more}"
        );
        self.apply(name, &text);
    }

    /// Removes a manifest; the kubelet removes the pod.
    pub fn remove(&self, name: &str) {
        fs::remove_file(self.folder.join("static").join(format!("{name}.yaml"))).expect("ours");
    }

    /// Ends the kubelet; its pods continue.
    pub fn stop(mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).expect("ours");
        self.child.wait().expect("our child");
    }
}

/// The answer of a kubelet's read-only port to a GET request.
pub fn get(port: u16, path: &str) -> Option<String> {
    http::get((Ipv4Addr::LOCALHOST, port).into(), path)
}

/// The status of the first container of a static pod, from a kubelet's read-only port.
pub fn container(port: u16, name: &str) -> Option<Value> {
    Some(pod(port, name)?["status"]["containerStatuses"][0].clone()).filter(|status| !status.is_null())
}

/// A static pod, from a kubelet's read-only port.
pub fn pod(port: u16, name: &str) -> Option<Value> {
    let pods: Value = serde_json::from_str(&get(port, "/pods")?).ok()?;
    pods["items"].as_array()?.iter().find(|one| one["metadata"]["name"] == format!("{name}-node")).cloned()
}

/// Removes files that a kubelet leaves on a machine by design.
impl Drop for Kubelet {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
        let _ = nix::mount::umount2(&self.folder.join("root"), nix::mount::MntFlags::MNT_DETACH); // it binds it
        for folder in host::cgroups_below(&self.parent) {
            let _ = fs::remove_dir(folder); // those with pods are the node's to remove
        }
        let _ = fs::remove_file(Path::new(DEVICE_PLUGINS).join("kubelet.sock")); // a dead kubelet's
        for link in fs::read_dir(LOG_LINKS).into_iter().flatten().flatten() {
            if fs::read_link(link.path()).is_ok_and(|target| target.starts_with(&self.folder)) {
                let _ = fs::remove_file(link.path()); // the pod's own were removed with it
            }
        }
        for place in [DEVICE_PLUGINS, "/var/lib/kubelet", LOG_LINKS] {
            let _ = fs::remove_dir(place); // where others use it, it is not empty
        }
    }
}

/// Waits until no other kubelet test runs. The lock is on an existing directory, so that no file remains.
fn turn() -> Flock<fs::File> {
    let folder = fs::File::open("/var/log").expect("every machine has it");
    Flock::lock(folder, FlockArg::LockExclusive).map_err(|(_, errno)| errno).expect("a turn")
}
