//! Many pods that are started by several clients, also in addition to existing ones.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{PodSandboxConfig, VersionRequest};
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, container};

use crate::Row;
use crate::life;
use crate::time::median;

/// Number of pods that are started concurrently.
pub(crate) const BURST: usize = 50;
/// Number of clients that start the pods of a burst.
pub(crate) const CLIENTS: usize = 8;
/// Number of bursts, whose median is reported: they differ by a fifth.
const BURSTS: usize = 5;
/// Number of existing pods.
const PRESENT: usize = 200;
/// Time until new pods cause no more traffic: IPv6 sends three router solicitations four seconds apart, each
/// of which reaches all pods on the bridge.
pub(crate) const SETTLED: Duration = Duration::from_secs(15);
/// Time until the kernel has removed the namespaces of a burst.
const TAKEN_DOWN: Duration = Duration::from_secs(2);

/// Starts `count` pods with [`CLIENTS`] clients; returns the time until the last one is running, and their
/// IDs.
pub(crate) fn burst(
    cri: &Cri,
    image: &str,
    count: usize,
    make: &(dyn Fn(&str) -> PodSandboxConfig + Sync),
) -> (Duration, Vec<String>) {
    let start = Barrier::new(CLIENTS + 1);
    thread::scope(|scope| {
        let client = |number: usize| {
            let (cri, start) = (cri.another(), &start);
            scope.spawn(move || {
                cri.version(VersionRequest::default()).expect("version");
                start.wait();
                let up = |index| {
                    let pod = make(&format!("burst{index}"));
                    let pod_id = cri.run_pod(&pod);
                    cri.run_container(&pod_id, &container("one", image, &["sleep", "forever"], &pod), &pod);
                    pod_id
                };
                (number..count).step_by(CLIENTS).map(up).collect::<Vec<String>>()
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        start.wait();
        let begin = Instant::now();
        let ids = clients.into_iter().flat_map(|client| client.join().expect("a client")).collect();
        (begin.elapsed(), ids)
    })
}

/// Starts and removes several bursts; returns the median time in seconds.
fn bursts(node: &Node, image: &str) -> f64 {
    let one = |_| {
        let (took, ids) = burst(node, image, BURST, &bridge_pod);
        ids.iter().for_each(|id| node.remove_pod(id));
        thread::sleep(TAKEN_DOWN);
        took.as_secs_f64()
    };
    median((0..BURSTS).map(one).collect())
}

/// Measures concurrent starts on an empty node and with two hundred existing pods.
pub(crate) fn at_once() -> Vec<Row> {
    let node = life::bridged();
    let image = node.import_probe();
    let empty = bursts(&node, &image);
    node.stop();
    // Another node with other files: ext4 does not reuse inodes for minutes and skips those of the earlier
    // bursts.
    let node = life::bridged();
    let image = node.import_probe();
    burst(&node, &image, PRESENT, &bridge_pod);
    thread::sleep(SETTLED);
    let beside = bursts(&node, &image);
    node.stop();
    vec![
        Row {
            what: "50 pods up, 8 clients, bridge network built in",
            budget: "0.6 s",
            measured: format!("{empty:.3} s"),
            floor: None,
        },
        Row {
            what: "the same with 200 pods present",
            budget: "no slower",
            measured: format!("{beside:.3} s ({:.2} x)", beside / empty),
            floor: None,
        },
    ]
}

/// How long `what` takes.
pub(crate) fn timed(what: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    what();
    begin.elapsed()
}
