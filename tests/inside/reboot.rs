//! Two boots of one machine: the second must know and be able to remove everything that the first left.

use std::fs;
use std::path::Path;
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest, PodSandboxState,
    RemoveContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, container, host_pod};
use serde_json::{Value, json};
use tonic::Code;

use crate::{shelf, store};

/// Data of the first boot for the second.
const NOTE: &str = "/var/tmp/first-boot.json";
/// The lease directory; on the disk, which is host-local's default.
const LEASES: &str = "/var/lib/leases";

/// Writes a network configuration that is the same at every boot.
fn write_network(node: &Node) {
    let text = json!({
        "cniVersion": "1.0.0", "name": "boat",
        "plugins": [{ "type": "bridge", "bridge": "boat0", "isGateway": true,
            "ipam": { "type": "host-local", "dataDir": LEASES, "ranges": [[{ "subnet": "10.99.0.0/24" }]] } }],
    });
    fs::write(node.cni().join("10-boat.conflist"), text.to_string()).expect("a network");
    host::wait_until("the network is configured", || {
        let status = node.status(Default::default()).expect("status").status.expect("a status");
        status.conditions.iter().any(|condition| condition.r#type == "NetworkReady" && condition.status)
    });
}

fn leases() -> Vec<String> {
    let entries = fs::read_dir(Path::new(LEASES).join("boat")).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("10.")).collect()
}

fn images(node: &Node) -> Vec<(String, Vec<String>)> {
    let images = node.list_images(Default::default()).expect("list").images;
    let mut known: Vec<_> = images.into_iter().map(|image| (image.id, image.repo_tags)).collect();
    known.sort();
    known
}

/// Leaves a pod with a running, an exited and a created container, a pod on the bridge, and a stopped one.
/// Then the machine is powered off.
#[test]
fn pods_run_until_the_machine_is_powered_off() {
    shelf::serve();
    let node = store::start();
    write_network(&node);
    store::fetch(&node, 0);
    store::fetch(&node, 2);
    let (pod, wired, stopped) = (host_pod("plain"), bridge_pod("wired"), host_pod("stopped"));
    let image = store::name(0);
    let pods = [&pod, &wired, &stopped].map(|pod| node.run_pod(pod));
    let runs = node.run_container(&pods[0], &container("runs", &image, &["sleep", "forever"], &pod), &pod);
    let ended = node.run_container(&pods[0], &container("ended", &image, &["exit", "7"], &pod), &pod);
    node.exited(&ended);
    let created = node.create(&pods[0], &container("created", &image, &["true"], &pod), &pod);
    let other = container("wired", &store::name(2), &["sleep", "forever"], &wired);
    let wired = node.run_container(&pods[1], &other, &wired);
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pods[2].clone() }).expect("stop");
    assert_eq!(leases().len(), 1);
    let note = json!({
        "pods": pods, "runs": [runs, wired], "ended": ended, "created": created, "images": images(&node),
    });
    fs::write(NOTE, note.to_string()).expect("a note");
    // Neither the daemon nor the pods are stopped by this process.
    std::mem::forget(node);
}

/// The expected state after the second boot.
fn expect_truth(node: &Node, note: &Value, new_pod: &str) {
    let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
    let old: Vec<_> = pods.iter().filter(|pod| pod.id != new_pod).collect();
    assert_eq!(old.len(), 3);
    for pod in old {
        assert!(note["pods"].as_array().expect("pods").contains(&json!(pod.id)), "{}", pod.id);
        assert_eq!(pod.state(), PodSandboxState::SandboxNotready);
    }
    for id in note["runs"].as_array().expect("containers") {
        let status = node.container(id.as_str().expect("an id"));
        assert_eq!(status.state(), ContainerState::ContainerExited);
        assert_eq!(status.message, "the node was rebooted");
        assert_ne!(status.exit_code, 0, "how it ended is unknown, so not successfully");
        assert!(status.finished_at >= status.started_at);
    }
    let ended = node.container(note["ended"].as_str().expect("an id"));
    assert_eq!((ended.state(), ended.exit_code), (ContainerState::ContainerExited, 7));
    let created = note["created"].as_str().expect("an id");
    let status =
        node.container_status(ContainerStatusRequest { container_id: created.into(), verbose: false });
    assert_eq!(status.expect_err("it never ran: nothing is kept of it").code(), Code::NotFound);
    let pod = note["pods"][0].as_str().expect("an id");
    assert!(!node.root().join("pods").join(pod).join("containers").join(created).exists());
    assert_eq!(json!(images(node)), note["images"]);
    for number in store::present(node) {
        store::verify(node, number);
    }
    store::verify_blobs();
}

/// Measures the memory of the daemon some seconds after the last call.
fn measure_idle(node: &Node) {
    const PATIENCE: Duration = Duration::from_secs(40);
    let busy = host::pss_kib(node.pid());
    let settled = || Some(host::pss_kib(node.pid())).filter(|idle| *idle < busy * 9 / 10);
    let idle = host::wait_within(PATIENCE, settled).expect("the daemon settles");
    println!("MEASURED idle_daemon_pss_kib={idle} with_one_pod");
}

/// Time since the kernel's start in seconds.
fn uptime() -> f64 {
    let text = fs::read_to_string("/proc/uptime").expect("a clock");
    text.split(' ').next().and_then(|seconds| seconds.parse().ok()).expect("seconds")
}

/// Starts a new pod and measures it; then checks the old pods and removes them.
#[test]
fn pods_of_the_boot_before_can_be_removed() {
    // Kernel, modules and mounts are done, and the daemon is the next program.
    let begun = uptime();
    let node = store::start();
    write_network(&node);
    let pod = bridge_pod("new");
    let pod_id = node.run_pod(&pod);
    let config = container("new", &store::name(2), &["sleep", "forever"], &pod);
    let id = node.run_container(&pod_id, &config, &pod);
    let running = uptime();
    assert!(host::is_alive(node.container_pid(&id)));
    println!(
        "MEASURED pod_running_after_s={running:.2} since_the_daemon_was_started_s={:.2} daemon_pss_kib={}",
        running - begun,
        host::pss_kib(node.pid())
    );

    let note: Value = serde_json::from_slice(&fs::read(NOTE).expect("the first boot's")).expect("JSON");
    expect_truth(&node, &note, &pod_id);
    host::wait_until("the old pod's address is free", || leases().len() == 1);
    node.remove_container(RemoveContainerRequest {
        container_id: note["ended"].as_str().expect("an id").into(),
    })
    .expect("remove a container of an old pod");
    for pod in note["pods"].as_array().expect("pods") {
        node.remove_pod(pod.as_str().expect("an id"));
    }
    let containers = node.list_containers(ListContainersRequest::default()).expect("list").containers;
    assert_eq!(containers.iter().map(|container| &container.id).collect::<Vec<_>>(), [&id]);
    measure_idle(&node);
    node.stop();
    assert_eq!(leases(), Vec::<String>::new());
}
