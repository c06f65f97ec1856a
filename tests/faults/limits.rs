//! Limits of a pod: containers that have exited do not count, and a start or exec beyond the limit says so. The limit of descriptors of a
//! daemon that serves.

use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ListPodSandboxRequest, PodSandboxState, StartContainerRequest, StopContainerRequest,
    VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{container, create, exec, host_pod, run};
use tonic::Code;

/// Entries in the table of a monitor: `CONTAINERS_MAX` of sandbox/wire.
const CONTAINERS_MAX: usize = 64;

/// Regression: exited containers that were not removed yet filled the monitor's table, and the pod could not start another:
/// with many containers that restart, the kubelet's garbage collection once a minute is too late.
#[test]
fn exited_containers_that_are_not_removed_do_not_prevent_a_start() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("restarts");
    let pod_id = node.run_pod(&pod);
    let start = |node: &Node, number: usize, args: &[&str]| {
        node.run_container(&pod_id, &container(&format!("c{number}"), &image, args, &pod), &pod)
    };
    let lasting = start(&node, 0, &["sleep", "forever"]);
    let mut ended = Vec::new();
    for number in 1..=CONTAINERS_MAX + 10 {
        let id = start(&node, number, &["exit", "7"]);
        assert_eq!(node.exited(&id).exit_code, 7);
        ended.push(id);
    }
    let all_are_listed = |node: &Node| {
        for id in &ended {
            let status = node.container(id);
            assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 7), "{id}");
        }
        assert_eq!(node.container(&lasting).state(), ContainerState::ContainerRunning);
        node.exec_sync(exec(&lasting, &["true"], 5)).expect("it runs");
    };
    all_are_listed(&node);
    node.restart();
    all_are_listed(&node);
    let last = start(&node, 1000, &["exit", "7"]);
    node.exited(&last);
    node.remove_pod(&pod_id);
    node.stop();
}

#[test]
fn a_start_beyond_the_containers_of_a_pod_is_refused_with_the_limit() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("many");
    let pod_id = node.run_pod(&pod);
    let config = |number: usize| container(&format!("c{number}"), &image, &["sleep", "forever"], &pod);
    let ids: Vec<String> =
        (0..CONTAINERS_MAX).map(|number| node.run_container(&pod_id, &config(number), &pod)).collect();
    let refused = node.create_container(create(&pod_id, &config(1000), &pod)).expect("a container");
    let refused = node
        .start_container(StartContainerRequest { container_id: refused.container_id })
        .expect_err("the limit");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("has 64 containers that run, the maximum"), "{refused}");
    node.stop_container(StopContainerRequest { container_id: ids[0].clone(), timeout: 0 }).expect("a stop");
    let next = node.run_container(&pod_id, &config(1001), &pod);
    assert_eq!(node.container(&next).state(), ContainerState::ContainerRunning);
    node.remove_pod(&pod_id);
    node.stop();
}

/// Sets the soft limit of descriptors of a daemon that runs.
fn limit_descriptors(node: &Node, limit: usize) {
    let words = [format!("--pid={}", node.pid()), format!("--nofile={limit}:")];
    assert!(Command::new("prlimit").args(words).status().expect("prlimit of util-linux").success());
}

/// A call that needs a descriptor fails with a text that says so, one that needs none is answered, and nothing is lost. Afterwards
/// clients that connected meanwhile are served.
#[test]
fn a_daemon_that_serves_and_has_no_descriptor_left_loses_nothing() {
    const PAUSE: Duration = Duration::from_secs(2);
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("witness");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let pid = node.container_pid(&id);
    limit_descriptors(&node, 3);
    let says_so = |what: &str, error: tonic::Status| {
        let text = error.message();
        let is_named = text.contains("descriptor") || text.contains("open files");
        assert!(is_named && error.code() != Code::NotFound, "{what}: {error}");
    };
    let other = host_pod("other");
    says_so("RunPodSandbox", node.run_pod_sandbox(run(&other)).expect_err("no descriptor"));
    says_so("ExecSync", node.exec_sync(exec(&id, &["true"], 20)).expect_err("no descriptor"));
    assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning);
    // A client whose connection cannot be accepted waits, and the daemon does not try all the time.
    let client = node.another();
    let waiting = std::thread::spawn(move || client.version(VersionRequest::default()));
    let before = host::cpu_time(node.pid());
    std::thread::sleep(PAUSE);
    let took = host::cpu_time(node.pid()).saturating_sub(before);
    assert!(took < PAUSE / 4, "{took:?} of {PAUSE:?}");
    limit_descriptors(&node, 1024);
    waiting.join().expect("no panic").expect("the client that waited is served");
    assert_eq!(node.exec_sync(exec(&id, &["true"], 20)).expect("an exec").exit_code, 0);
    assert_eq!(node.container_pid(&id), pid);
    // The pod that could neither be made nor undone is listed, so that a kubelet removes it.
    let failed = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
    let failed = failed.iter().find(|item| item.id != pod_id).expect("it is listed");
    assert_eq!(failed.state(), PodSandboxState::SandboxNotready);
    node.remove_pod(&failed.id);
    let made = node.run_pod(&other);
    node.remove_pod(&made);
    node.remove_pod(&pod_id);
    node.stop();
}
