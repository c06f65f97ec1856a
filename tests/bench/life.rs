//! One pod after the other: up, execs, down, and the CPU of it all.

use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    PodSandboxConfig, RemoveContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, exec, host_pod};

use crate::Row;
use crate::time::{Percentiles, median};

/// Pods of a series; at least fifty, so that a p50 means something.
pub(crate) const RUNS: usize = 60;
/// Series, of which the middle one counts: one that something else disturbs is left out.
pub(crate) const SERIES: usize = 3;

/// What each pod of a series took.
#[derive(Default)]
pub(crate) struct Lives {
    /// RunPodSandbox, CreateContainer, StartContainer.
    pub(crate) up: Vec<Duration>,
    /// ExecSync of a program that does nothing, three times a pod.
    pub(crate) execs: Vec<Duration>,
    /// Stop and remove, of the container and of the pod.
    pub(crate) down: Vec<Duration>,
}

impl Lives {
    /// One pod, from nothing to gone.
    pub(crate) fn one(&mut self, cri: &Cri, pod: &PodSandboxConfig, image: &str) {
        let config = container("one", image, &["sleep", "forever"], pod);
        let begin = Instant::now();
        let pod_id = cri.run_pod(pod);
        let container_id = cri.run_container(&pod_id, &config, pod);
        self.up.push(begin.elapsed());
        for _ in 0..3 {
            let begin = Instant::now();
            cri.exec_sync(exec(&container_id, &["true"], 10)).expect("exec");
            self.execs.push(begin.elapsed());
        }
        let begin = Instant::now();
        let stop = StopContainerRequest { container_id: container_id.clone(), timeout: 0 };
        cri.stop_container(stop).expect("stop");
        cri.remove_container(RemoveContainerRequest { container_id }).expect("remove");
        cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() }).expect("stop");
        cri.remove_pod(&pod_id);
        self.down.push(begin.elapsed());
    }
}

/// A node with the network that needs no configuration.
pub(crate) fn bridged() -> Node {
    Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() })
}

/// Rows of one pod at a time, on the host's network and on the built-in bridge.
pub(crate) fn alone() -> Vec<Row> {
    let node = bridged();
    let image = node.import_probe();
    let (mut cpu, mut host, mut bridge) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..SERIES {
        let before = host::cpu_time(node.pid());
        host.push(series(&node, &image, host_pod));
        cpu.push((host::cpu_time(node.pid()) - before).as_secs_f64() / RUNS as f64);
        bridge.push(series(&node, &image, bridge_pod));
    }
    node.stop();
    let row = |what, budget, series: &[Lives], pick: fn(&Lives) -> &Vec<Duration>| {
        let times: Vec<Vec<Duration>> = series.iter().map(|lives| pick(lives).clone()).collect();
        Row { what, budget, measured: Percentiles::middle(&times).to_string() }
    };
    let cpu = format!("{:.4} s (daemon and the children it waited for)", median(cpu));
    vec![
        row("pod up, host network, p50 / p99", "6 ms", &host, |lives| &lives.up),
        row("pod up, bridge network built in, p50 / p99", "10 ms", &bridge, |lives| &lives.up),
        row("pod down, host network, p50 / p99", "7 ms", &host, |lives| &lives.down),
        row("pod down, bridge network built in, p50 / p99", "", &bridge, |lives| &lives.down),
        row("ExecSync(true), p50 / p99", "1 ms", &host, |lives| &lives.execs),
        Row { what: "CPU of one pod's life with 3 execs, host network", budget: "0.02 s", measured: cpu },
    ]
}

fn series(node: &Node, image: &str, make: fn(&str) -> PodSandboxConfig) -> Lives {
    let mut lives = Lives::default();
    (0..RUNS).for_each(|run| lives.one(node, &make(&format!("life{run}")), image));
    lives
}
