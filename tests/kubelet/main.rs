//! A real standalone kubelet with coracle as its runtime: static pods, probes, restarts, log rotation, and
//! its read-only API. There is no API server; only functions that work without one are tested. Requires root,
//! a cgroup hierarchy of its own and the kubelet that `make test` builds. `k3s` plays the part of k3s' agent.

mod k3s;
mod namespaces;

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use coracle_tests::cri::proto::{ContainerState, PodSandboxState};
use coracle_tests::host::{self, wait_within};
use coracle_tests::http;
use coracle_tests::node::{Node, Options};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A kubelet checks its files every second, and delays restarts.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two paths that cannot be configured, so that only one kubelet can run at a time.
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
const LOG_LINKS: &str = "/var/log/containers";

/// Directory in which cAdvisor looks for containerd's socket.
const CONTAINERD: &str = "/run/containerd";

struct Kubelet {
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

#[track_caller]
fn wait<T>(kubelet: &Kubelet, what: &str, condition: impl FnMut() -> Option<T>) -> T {
    wait_within(PATIENCE, condition).unwrap_or_else(|| {
        let log = fs::read_to_string(kubelet.folder.join("kubelet.log")).unwrap_or_default();
        let errors: Vec<_> = log.lines().filter(|line| line.starts_with('E')).rev().take(10).collect();
        panic!("timeout: {what}; the kubelet's last errors:\n{}", errors.join("\n"))
    })
}

/// The kubelet's program: `CORACLE_KUBELET`, otherwise the one that `make test` builds.
fn kubelet() -> PathBuf {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/bin/kubelet");
    std::env::var_os("CORACLE_KUBELET").map_or(usual, PathBuf::from)
}

/// The kubelet's source of `/metrics/cadvisor`.
enum Numbers<'a> {
    /// ListPodSandboxMetrics.
    Cri,
    /// The kubelet's cAdvisor, which finds the container of a cgroup through the socket in this directory.
    Cadvisor(&'a Path),
}

impl Kubelet {
    fn start(node: &Node, numbers: &Numbers<'_>) -> Kubelet {
        let turn = turn();
        let folder = node.folder().join("kubelet");
        for name in ["static", "root", "logs", "certs"] {
            fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        let (port, read_only_port, health) = (free_port(), free_port(), free_port());
        let parent = node.cgroup_parent();
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
             evictionHard: {{\"memory.available\": \"1Mi\"}}\ncontainerLogMaxSize: 10Ki\ncontainerLogMaxFiles: 3\n\
             containerLogMonitorInterval: 3s\nfeatureGates: {{PodAndContainerStatsFromCRI: {}}}\n",
            node.socket().display(),
            matches!(numbers, Numbers::Cri)
        );
        fs::write(folder.join("config.yaml"), config).expect("a file");
        let program = kubelet();
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

    fn get(&self, path: &str) -> Option<String> {
        get(self.read_only_port, path)
    }

    /// The status of the first container of a pod in the kubelet's API.
    fn container(&self, pod: &str) -> Option<Value> {
        container(self.read_only_port, pod)
    }

    fn write(&self, name: &str, image: &str, words: &str, more: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  hostNetwork: true\n  \
             terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: {image}\n    \
             imagePullPolicy: Never\n    args: [{words}]\n    \
             resources: {{limits: {{memory: 64Mi, cpu: 200m}}}}\n{more}"
        );
        fs::write(self.folder.join("static").join(format!("{name}.yaml")), text).expect("a manifest");
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.folder.join("static").join(format!("{name}.yaml"))).expect("ours");
    }

    fn stop(mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).expect("ours");
        self.child.wait().expect("our child");
    }
}

/// The answer of a kubelet's read-only port to a GET request.
fn get(port: u16, path: &str) -> Option<String> {
    http::get((Ipv4Addr::LOCALHOST, port).into(), path)
}

/// The status of the first container of a static pod, from a kubelet's read-only port.
fn container(port: u16, pod: &str) -> Option<Value> {
    let pods: Value = serde_json::from_str(&get(port, "/pods")?).ok()?;
    let pod =
        pods["items"].as_array()?.iter().find(|one| one["metadata"]["name"] == format!("{pod}-node"))?;
    Some(pod["status"]["containerStatuses"][0].clone()).filter(|status| !status.is_null())
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

/// The removal of a manifest removes the pod. The kubelet removes the rest with its next garbage collection,
/// within a minute.
fn wait_until_nothing_runs(kubelet: &Kubelet, node: &Node) {
    wait(kubelet, "no container runs and no pod is ready", || {
        let containers = node.list_containers(Default::default()).ok()?.containers;
        let pods = node.list_pod_sandbox(Default::default()).ok()?.items;
        let runs = containers.iter().any(|one| one.state() == ContainerState::ContainerRunning);
        let ready = pods.iter().any(|one| one.state() == PodSandboxState::SandboxReady);
        (!runs && !ready).then_some(())
    });
}

#[test]
fn a_standalone_kubelet_runs_static_pods() {
    let node = Node::start();
    let image = node.import_probe();
    let kubelet = Kubelet::start(&node, &Numbers::Cri);
    let probe = "    livenessProbe: {exec: {command: [/probe, stat, /tmp/alive]}, periodSeconds: 1, failureThreshold: 2}\n";
    kubelet.write("web", &image, "ticks, \"5\"", "");
    kubelet.write("dies", &image, "sleep, \"1\"", "");
    kubelet.write("sick", &image, "fill, /tmp/file, \"1\"", probe);
    // Running and ready in its API.
    let status = wait(&kubelet, "the pod is ready", || {
        kubelet.container("web").filter(|status| status["ready"] == true)
    });
    assert_eq!(status["restartCount"], 0);
    let id = status["containerID"].as_str().expect("an id").trim_start_matches("coracle://").to_owned();
    assert_eq!(node.container(&id).id, id);
    let resources = node.container(&id).resources.and_then(|resources| resources.linux).expect("resources");
    assert_eq!((resources.memory_limit_in_bytes, resources.cpu_quota), (64 << 20, 20_000));
    // A container that exits, and one whose probe fails, are restarted.
    for pod in ["dies", "sick"] {
        wait(&kubelet, &format!("{pod} is restarted"), || {
            kubelet.container(pod).filter(|status| status["restartCount"].as_u64() >= Some(1))
        });
    }
    // Its log is rotated and continues in a new file.
    let log = wait(&kubelet, "a log", || {
        let folder = fs::read_dir(kubelet.folder.join("logs")).ok()?.flatten().map(|entry| entry.path());
        folder
            .filter(|path| path.to_string_lossy().contains("default_web-node"))
            .map(|path| path.join("main"))
            .next()
    });
    wait(&kubelet, "the log is rotated", || (fs::read_dir(&log).ok()?.count() >= 2).then_some(()));
    let current = log.join("0.log");
    let before = fs::metadata(&current).map_or(0, |about| about.len());
    wait(&kubelet, "the new file grows", || {
        fs::metadata(&current).ok().filter(|about| about.len() != before && about.len() < 60_000)
    });
    for pod in ["web", "dies", "sick"] {
        kubelet.remove(pod);
    }
    wait_until_nothing_runs(&kubelet, &node);
    kubelet.stop();
    node.stop();
}

#[test]
fn the_kubelets_metrics_have_names_of_pods() {
    let node = Node::start();
    let image = node.import_probe();
    let kubelet = Kubelet::start(&node, &Numbers::Cri);
    kubelet.write("counted", &image, "sleep, forever", "");
    wait(&kubelet, "the pod is ready", || {
        kubelet.container("counted").filter(|status| status["ready"] == true)
    });
    let line = wait(&kubelet, "a metric of the container", || {
        let text = kubelet.get("/metrics/cadvisor")?;
        text.lines().find(|line| line.starts_with("container_memory_usage_bytes{")).map(str::to_owned)
    });
    for label in ["pod=\"counted-node\"", "namespace=\"default\"", "container=\"main\""] {
        assert!(line.contains(label), "{line}");
    }
    kubelet.remove("counted");
    wait_until_nothing_runs(&kubelet, &node);
    kubelet.stop();
    node.stop();
}

/// cAdvisor's own values, with the names that it requests from containerd: coracle answers instead.
#[test]
fn the_kubelets_cadvisor_finds_names_where_containerd_would_be() {
    let folder = PathBuf::from(format!("/run/coracle-test-containerd-{}", std::process::id()));
    let socket = folder.join("containerd.sock");
    let config = format!("[metrics]\ncontainerd_socket = \"{}\"\n", socket.display());
    let node = Node::with(Options { config, ..Options::default() });
    let image = node.import_probe();
    let kubelet = Kubelet::start(&node, &Numbers::Cadvisor(&folder));
    kubelet.write("named", &image, "sleep, forever", "");
    wait(&kubelet, "the pod is ready", || {
        kubelet.container("named").filter(|status| status["ready"] == true)
    });
    let line = wait(&kubelet, "a metric of the container with its name", || {
        let text = kubelet.get("/metrics/cadvisor")?;
        let of_container = |line: &&str| {
            line.starts_with("container_cpu_usage_seconds_total{container=\"main\"")
                || line.starts_with("container_memory_usage_bytes{container=\"main\"")
        };
        text.lines().find(of_container).map(str::to_owned)
    });
    for label in ["pod=\"named-node\"", "namespace=\"default\"", &format!("image=\"{image}\"")] {
        assert!(line.contains(label), "{line}");
    }
    kubelet.remove("named");
    wait_until_nothing_runs(&kubelet, &node);
    kubelet.stop();
    node.stop();
    fs::remove_dir_all(folder).expect("ours");
    // It stays if a containerd uses it.
    let _ = fs::remove_dir(CONTAINERD);
}
