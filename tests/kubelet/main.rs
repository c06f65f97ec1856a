//! A real standalone kubelet with coracle as its runtime: static pods, probes, restarts, log rotation, and
//! its read-only API. There is no API server; only functions that work without one are tested. Requires root,
//! a cgroup hierarchy of its own and the kubelet that `make test` builds. `k3s` plays the part of k3s' agent.

mod k3s;
mod namespaces;

use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::proto::{ContainerState, PodSandboxState};
use coracle_tests::kubelet::{CONTAINERD, Kubelet, Numbers, Place};
use coracle_tests::node::{Node, Options};

/// Starts a kubelet for a node.
fn start(node: &Node, numbers: &Numbers<'_>) -> Kubelet {
    let place = Place {
        folder: node.folder().join("kubelet"),
        socket: node.socket(),
        parent: node.cgroup_parent(),
        log_max: "10Ki",
    };
    Kubelet::start(&place, numbers)
}

/// The removal of a manifest removes the pod. The kubelet removes the rest with its next garbage collection,
/// within a minute.
fn wait_until_nothing_runs(kubelet: &Kubelet, node: &Node) {
    kubelet.wait("no container runs and no pod is ready", || {
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
    let kubelet = start(&node, &Numbers::Cri);
    let probe = "    livenessProbe: {exec: {command: [/probe, stat, /tmp/alive]}, periodSeconds: 1, failureThreshold: 2}\n";
    kubelet.write("web", &image, "ticks, \"5\"", "");
    kubelet.write("dies", &image, "sleep, \"1\"", "");
    kubelet.write("sick", &image, "fill, /tmp/file, \"1\"", probe);
    // Running and ready in its API.
    let status = kubelet
        .wait("the pod is ready", || kubelet.container("web").filter(|status| status["ready"] == true));
    assert_eq!(status["restartCount"], 0);
    let id = status["containerID"].as_str().expect("an id").trim_start_matches("coracle://").to_owned();
    assert_eq!(node.container(&id).id, id);
    let resources = node.container(&id).resources.and_then(|resources| resources.linux).expect("resources");
    assert_eq!((resources.memory_limit_in_bytes, resources.cpu_quota), (64 << 20, 20_000));
    // A container that exits, and one whose probe fails, are restarted.
    for pod in ["dies", "sick"] {
        kubelet.wait(&format!("{pod} is restarted"), || {
            kubelet.container(pod).filter(|status| status["restartCount"].as_u64() >= Some(1))
        });
    }
    // Its log is rotated and continues in a new file.
    let log = kubelet.wait("a log", || {
        let folder = fs::read_dir(kubelet.folder().join("logs")).ok()?.flatten().map(|entry| entry.path());
        folder
            .filter(|path| path.to_string_lossy().contains("default_web-node"))
            .map(|path| path.join("main"))
            .next()
    });
    kubelet.wait("the log is rotated", || (fs::read_dir(&log).ok()?.count() >= 2).then_some(()));
    let current = log.join("0.log");
    let before = fs::metadata(&current).map_or(0, |about| about.len());
    kubelet.wait("the new file grows", || {
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
    let kubelet = start(&node, &Numbers::Cri);
    kubelet.write("counted", &image, "sleep, forever", "");
    kubelet
        .wait("the pod is ready", || kubelet.container("counted").filter(|status| status["ready"] == true));
    let line = kubelet.wait("a metric of the container", || {
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
    let kubelet = start(&node, &Numbers::Cadvisor(&folder));
    kubelet.write("named", &image, "sleep, forever", "");
    kubelet.wait("the pod is ready", || kubelet.container("named").filter(|status| status["ready"] == true));
    let line = kubelet.wait("a metric of the container with its name", || {
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
