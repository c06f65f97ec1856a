//! One pod at a time: set-up, execs, teardown, and CPU time; each followed by a pod of the floor, so that both
//! are measured under the same conditions.

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    PodSandboxConfig, RemoveContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::floor::Floor;
use coracle_tests::host;
use coracle_tests::node::{self, Node};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, exec, host_pod};

use crate::time::{Percentiles, median};
use crate::{Row, guest, measure};

/// Number of pods of a series; at least fifty, for a meaningful p50.
pub(crate) const RUNS: usize = 60;
/// Number of series, whose median is reported, so that a disturbed one has no effect.
pub(crate) const SERIES: usize = 3;

/// Times of the operations of a series.
#[derive(Default)]
pub(crate) struct Lives {
    /// RunPodSandbox, CreateContainer, StartContainer.
    pub(crate) up: Vec<Duration>,
    /// ExecSync of a program that does nothing, three times a pod.
    pub(crate) execs: Vec<Duration>,
    /// Stop and remove of the container and of the pod.
    pub(crate) down: Vec<Duration>,
}

impl Lives {
    /// Creates, uses and removes one pod.
    pub(crate) fn one(&mut self, cri: &Cri, pod: &PodSandboxConfig, image: &str) {
        let (pod_id, container_id) = self.up(cri, pod, image);
        self.execs(cri, &container_id);
        self.down(cri, pod_id, container_id);
    }

    /// Creates one pod with a container; returns the IDs of both.
    pub(crate) fn up(&mut self, cri: &Cri, pod: &PodSandboxConfig, image: &str) -> (String, String) {
        let config = container("one", image, &["sleep", "forever"], pod);
        let begin = Instant::now();
        let pod_id = cri.run_pod(pod);
        let container_id = cri.run_container(&pod_id, &config, pod);
        self.up.push(begin.elapsed());
        (pod_id, container_id)
    }

    /// Runs three execs in a container.
    pub(crate) fn execs(&mut self, cri: &Cri, container_id: &str) {
        for _ in 0..3 {
            let begin = Instant::now();
            cri.exec_sync(exec(container_id, &["true"], 10)).expect("exec");
            self.execs.push(begin.elapsed());
        }
    }

    /// Stops and removes a container and its pod.
    pub(crate) fn down(&mut self, cri: &Cri, pod_id: String, container_id: String) {
        let begin = Instant::now();
        let stop = StopContainerRequest { container_id: container_id.clone(), timeout: 0 };
        cri.stop_container(stop).expect("stop");
        cri.remove_container(RemoveContainerRequest { container_id }).expect("remove");
        cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() }).expect("stop");
        cri.remove_pod(&pod_id);
        self.down.push(begin.elapsed());
    }
}

/// A node with the built-in default network.
pub(crate) fn bridged() -> Node {
    measure::node(DEFAULT_NETWORK)
}

/// A kind of pod: how the request is made, and the word for its network in requests to the floor.
pub(crate) type Kind = (fn(&str) -> PodSandboxConfig, &'static str);

/// A series of both sides.
#[derive(Default)]
struct Series {
    lives: Lives,
    /// CPU time of one life, in seconds.
    cpu: f64,
    floor: Lives,
    floor_cpu: f64,
}

/// Measures one pod at a time on the host's network and on the built-in bridge, by turns with the floor.
pub(crate) fn alone() -> Vec<Row> {
    let node = bridged();
    let image = node.import_probe();
    let program = Path::new(env!("CARGO_BIN_EXE_coracle-floor"));
    let beside = node::binaries().join("coracle-floor");
    let mut floor = Floor::start(if guest::is_one() { &beside } else { program });
    let (mut host, mut bridge) = (Vec::new(), Vec::new());
    for _ in 0..SERIES {
        host.push(series(&node, &mut floor, &image, (host_pod, "host")));
        bridge.push(series(&node, &mut floor, &image, (bridge_pod, "bridge")));
    }
    floor.stop();
    node.stop();
    vec![
        row("pod up, host network, p50 / p99", "6 ms", &host, |lives| &lives.up),
        row("pod up, bridge network built in, p50 / p99", "10 ms", &bridge, |lives| &lives.up),
        row("pod down, host network, p50 / p99", "7 ms", &host, |lives| &lives.down),
        row("pod down, bridge network built in, p50 / p99", "", &bridge, |lives| &lives.down),
        row("ExecSync(true), p50 / p99", "1 ms", &host, |lives| &lives.execs),
        cpu_row(&host),
    ]
}

fn row(
    what: &'static str,
    budget: &'static str,
    series: &[Series],
    pick: fn(&Lives) -> &Vec<Duration>,
) -> Row {
    let middle = |side: fn(&Series) -> &Lives| {
        let times: Vec<Vec<Duration>> = series.iter().map(|one| pick(side(one)).clone()).collect();
        Percentiles::middle(&times)
    };
    let (measured, floor) = (middle(|one| &one.lives), middle(|one| &one.floor));
    let ratio = format!("{:.2} x ({floor})", measured.p50 / floor.p50);
    Row { what, budget, measured: measured.to_string(), floor: Some(ratio) }
}

fn cpu_row(series: &[Series]) -> Row {
    let cpu = median(series.iter().map(|one| one.cpu).collect());
    let floor = median(series.iter().map(|one| one.floor_cpu).collect());
    Row {
        what: "CPU of one pod's life with 3 execs, host network",
        budget: "0.02 s",
        measured: format!("{cpu:.4} s (daemon and the children it waited for)"),
        floor: Some(format!("{:.2} x ({floor:.4} s)", cpu / floor)),
    }
}

fn series(node: &Node, floor: &mut Floor, image: &str, (make, network): Kind) -> Series {
    let mut series = Series::default();
    let before = host::cpu_time(node.pid());
    for run in 0..RUNS {
        series.lives.one(node, &make(&format!("life{run}")), image);
        let life = floor.life(network);
        series.floor.up.push(life.up);
        series.floor.execs.extend(life.execs);
        series.floor.down.push(life.down);
        series.floor_cpu += life.cpu.as_secs_f64() / RUNS as f64;
    }
    series.cpu = (host::cpu_time(node.pid()) - before).as_secs_f64() / RUNS as f64;
    series
}
