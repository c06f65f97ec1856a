//! The daemon under a real kubelet, which calls each second, so that it never rests: the memory that a node pays for.

use std::thread::sleep;
use std::time::Duration;

use coracle_tests::host::{self, wait_within};
use coracle_tests::kubelet::{Kubelet, Numbers, Place};
use coracle_tests::node::Node;

use crate::{Row, measure};

/// Number of pods of the node; one of `PROBED` has a probe.
const PODS: usize = 60;
const PROBED: usize = 5;
/// Time limit of the start of a pod.
const START: Duration = Duration::from_secs(300);
/// Time until the kubelet has settled after the start of the pods, and time of the measurement.
const SETTLE: Duration = Duration::from_secs(60);
const SECONDS: u64 = 180;

/// Starts a kubelet with this number of static pods that sleep, and waits until all run.
pub(crate) fn with_pods(node: &Node, pods: usize) -> Kubelet {
    let image = node.import_probe();
    let place = Place {
        folder: node.folder().join("kubelet"),
        socket: node.socket(),
        parent: node.cgroup_parent(),
        log_max: "10Ki",
    };
    let kubelet = Kubelet::start(&place, &Numbers::Cri);
    for number in 0..pods {
        // Without requests of CPU time, of which a small machine has too little for 60 pods.
        let probe = "    livenessProbe: {exec: {command: [/probe, \"true\"]}, periodSeconds: 10}\n";
        let name = format!("pod{number}");
        let pod = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  hostNetwork: true\n  \
             terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: {image}\n    \
             imagePullPolicy: Never\n    args: [sleep, forever]\n{}",
            if number % PROBED == 0 { probe } else { "" }
        );
        kubelet.apply(&name, &pod);
    }
    for number in 0..pods {
        let name = format!("pod{number}");
        let is_ready = || kubelet.container(&name).filter(|status| status["ready"] == true);
        assert!(wait_within(START, is_ready).is_some(), "{name} is not ready: {}", kubelet.errors());
    }
    kubelet
}

/// Stops the kubelet and removes its pods.
pub(crate) fn end(kubelet: Kubelet, node: Node) {
    kubelet.stop();
    for pod in node.list_pod_sandbox(Default::default()).expect("list").items {
        node.remove_pod(&pod.id);
    }
    node.stop();
}

/// Measures memory and CPU time while pods do nothing.
pub(crate) fn measure() -> Vec<Row> {
    let node = measure::node("");
    let kubelet = with_pods(&node, PODS);
    sleep(SETTLE);
    let before = host::cpu_time(node.pid());
    let (mut daemon, mut all) = (Vec::new(), Vec::new());
    for _ in 0..SECONDS {
        sleep(Duration::from_secs(1));
        let own = host::pss_kib(node.pid());
        daemon.push(own);
        all.push(own + measure::pss_of_pods(&node));
    }
    let used = (host::cpu_time(node.pid()) - before).as_secs_f64() * 100.0 / SECONDS as f64;
    end(kubelet, node);
    vec![
        row("daemon under a kubelet with 60 pods, PSS", "2.5 MB", memory(daemon)),
        row("all coracle processes then, PSS", "4.5 MB", memory(all)),
        row(
            "CPU of the daemon then, with the children it waited for",
            "0.3 %",
            format!("{used:.2} % of one CPU"),
        ),
    ]
}

fn row(what: &'static str, budget: &'static str, measured: String) -> Row {
    Row { what, budget, measured, floor: None }
}

/// The median and the highest of samples in KiB.
fn memory(mut samples: Vec<u64>) -> String {
    samples.sort_unstable();
    let mb = |kib: u64| kib as f64 / 1024.0;
    format!("{:.2} MB, at most {:.2}", mb(samples[samples.len() / 2]), mb(samples[samples.len() - 1]))
}
