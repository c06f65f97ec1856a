//! Clients that vanish in the middle of RunPodSandbox: the pod ends whole and the retry gets its id, or wholly undone.

use std::time::Duration;

use coracle_tests::cri::proto::ListPodSandboxRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, run};

/// After how much time the client hangs up, in microseconds: before, during and after everything a pod needs.
const PATIENCE_MICROSECONDS: [u64; 12] =
    [1, 100, 500, 1000, 2000, 4000, 8000, 12_000, 20_000, 40_000, 80_000, 160_000];

#[test]
fn the_retry_gets_the_pod_and_there_is_only_one() {
    let node = Node::with_bridge();
    for microseconds in PATIENCE_MICROSECONDS {
        let pod = bridge_pod(&format!("gone{microseconds}"));
        let answer = node.another().abandon(run(&pod), Duration::from_micros(microseconds));
        // An answer that came is no lost one, and needs no retry.
        let id = match answer {
            Some(first) => first.expect("run").pod_sandbox_id,
            None => node.run_pod(&pod),
        };
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        assert_eq!(pods.len(), 1, "{microseconds}");
        assert_eq!(pods[0].id, id, "{microseconds}");
        node.remove_pod(&id);
        host::wait_until("nothing of it is left", || node.rests().is_empty());
    }
    node.stop();
}

#[test]
fn a_pod_nobody_asked_for_again_can_be_found_and_removed() {
    let node = Node::with_bridge();
    let pod = bridge_pod("forgotten");
    node.another().abandon(run(&pod), Duration::from_millis(3));
    let settled = || {
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        // Whole and listed, or undone.
        !pods.is_empty() || node.rests().is_empty()
    };
    host::wait_until("it is one or the other", settled);
    node.stop();
}
