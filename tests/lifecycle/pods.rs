//! Pods: run, status, list, stop, remove; and idempotency.

use std::fs;
use std::path::Path;

use coracle_tests::cri::proto::{
    ListPodSandboxRequest, Mount, PodSandboxFilter, PodSandboxState, PodSandboxStateValue,
    PodSandboxStatusRequest, RemovePodSandboxRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, container, host_pod, run};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tonic::Code;

fn list(node: &Node, filter: PodSandboxFilter) -> Vec<String> {
    let request = ListPodSandboxRequest { filter: Some(filter) };
    node.list_pod_sandbox(request).expect("list").items.into_iter().map(|pod| pod.id).collect()
}

#[test]
fn a_pod_is_ready_after_run_not_ready_after_stop_and_gone_after_remove() {
    let node = Node::start();
    let mut pod = host_pod("boat");
    pod.annotations.insert("key with space".into(), "value\nwith newline".into());
    let id = node.run_pod(&pod);
    assert!(id.len() == 64 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')), "{id}");

    let ask = PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: true };
    let answer = node.pod_sandbox_status(ask.clone()).expect("status");
    let status = answer.status.expect("a status");
    assert_eq!(status.state(), PodSandboxState::SandboxReady);
    assert_eq!(status.metadata, pod.metadata);
    assert_eq!((&status.labels, &status.annotations), (&pod.labels, &pod.annotations));
    assert!(status.created_at > 0);
    assert_eq!(status.network.unwrap_or_default().ip, "", "the host's network has no pod address");
    let info: serde_json::Value = serde_json::from_str(&answer.info["info"]).expect("info is JSON");
    assert!(host::is_alive(info["pid"].as_i64().expect("a pid") as i32));

    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).expect("stop");
    let status = node.pod_sandbox_status(ask.clone()).expect("status").status.expect("a status");
    assert_eq!(status.state(), PodSandboxState::SandboxNotready);
    node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id }).expect("remove");
    let gone = node.pod_sandbox_status(ask).expect_err("it was removed");
    assert_eq!(gone.code(), Code::NotFound, "{gone}");
    node.stop();
}

#[test]
fn stop_and_remove_are_idempotent_and_do_not_know_unknown_ids() {
    let node = Node::start();
    let id = node.run_pod(&host_pod("twice"));
    for _ in 0..2 {
        node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).expect("stop");
    }
    for _ in 0..2 {
        node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() }).expect("remove");
    }
    let unknown = "f".repeat(64);
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: unknown.clone() }).expect("stop");
    node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: unknown }).expect("remove");
    node.stop();
}

#[test]
fn remove_without_stop_is_a_full_stop() {
    let node = Node::start();
    let id = node.run_pod(&host_pod("hasty"));
    node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id }).expect("remove");
    assert!(node.rests().is_empty(), "{:?}", node.rests());
    node.stop();
}

#[test]
fn a_status_and_a_stop_take_a_unique_prefix_of_the_id() {
    let node = Node::start();
    let id = node.run_pod(&host_pod("prefix"));
    let ask = PodSandboxStatusRequest { pod_sandbox_id: id[..13].into(), verbose: false };
    assert_eq!(node.pod_sandbox_status(ask).expect("status").status.expect("a status").id, id);
    assert_eq!(
        list(&node, PodSandboxFilter { id: id[..13].into(), ..Default::default() }),
        std::slice::from_ref(&id)
    );
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id[..13].into() }).expect("stop");
    node.stop();
}

#[test]
fn an_ambiguous_prefix_of_an_id_is_refused_by_status_and_stop() {
    let node = Node::start();
    for index in 0..17 {
        node.run_pod(&host_pod(&format!("many{index}")));
    }
    // Seventeen IDs and sixteen digits: two start with the same digit.
    let ids = list(&node, PodSandboxFilter::default());
    let shared = (0..16)
        .map(|digit| format!("{digit:x}"))
        .find(|digit| ids.iter().filter(|id| id.starts_with(digit)).count() > 1)
        .expect("seventeen ids");
    let ask = PodSandboxStatusRequest { pod_sandbox_id: shared, verbose: false };
    let refused = node.pod_sandbox_status(ask).expect_err("which one?");
    assert!(matches!(refused.code(), Code::NotFound | Code::InvalidArgument), "{refused}");
    node.stop();
}

#[test]
fn lists_are_filtered_by_state_label_and_id_together() {
    let node = Node::start();
    let (mut red, mut blue) = (host_pod("red"), host_pod("blue"));
    red.labels.insert("colour".into(), "red".into());
    blue.labels.insert("colour".into(), "blue".into());
    let (red, blue) = (node.run_pod(&red), node.run_pod(&blue));
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: blue.clone() }).expect("stop");

    let state = |state: PodSandboxState| Some(PodSandboxStateValue { state: state.into() });
    let colour = |colour: &str| [("colour".to_owned(), colour.to_owned())].into();
    let ready = state(PodSandboxState::SandboxReady);
    assert_eq!(
        list(&node, PodSandboxFilter { state: ready, ..Default::default() }),
        std::slice::from_ref(&red)
    );
    let blues = PodSandboxFilter { label_selector: colour("blue"), ..Default::default() };
    assert_eq!(list(&node, blues), std::slice::from_ref(&blue));
    let both = PodSandboxFilter { label_selector: colour("blue"), state: ready, ..Default::default() };
    assert_eq!(list(&node, both), Vec::<String>::new());
    let nobody = PodSandboxFilter { id: "0".repeat(64), ..Default::default() };
    assert_eq!(list(&node, nobody), Vec::<String>::new());
    assert_eq!(list(&node, PodSandboxFilter::default()).len(), 2);
    node.stop();
}

#[test]
fn a_second_run_of_one_attempt_makes_no_second_pod() {
    let node = Node::start();
    let pod = host_pod("retry");
    let id = node.run_pod(&pod);
    // No client has used the ID, so the answer may have been lost: the retry gets it again.
    assert_eq!(node.run_pod(&pod), id);
    // After its use, another request for the attempt is an error.
    let ask = PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: false };
    assert_eq!(node.pod_sandbox_status(ask).expect("status").status.expect("a status").id, id);
    let refused = node.run_pod_sandbox(run(&pod)).expect_err("the name is taken");
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    assert!(refused.message().contains(&id[..13]), "{refused}");
    assert_eq!(list(&node, PodSandboxFilter::default()), std::slice::from_ref(&id));
    let mut other = pod.clone();
    other.annotations.insert("now".into(), "different".into());
    let refused = node.run_pod_sandbox(run(&other)).expect_err("the name is taken");
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    node.remove_pod(&id);
    let free = node.run_pod(&other);
    assert_ne!(free, id, "a reserved name whose owner is gone is free");
    node.stop();
}

#[test]
fn created_times_rise_strictly_within_a_pod() {
    let node = Node::start();
    let mut pod = host_pod("clock");
    let mut last = 0;
    for attempt in 0..5 {
        pod.metadata.as_mut().expect("set").attempt = attempt;
        let id = node.run_pod(&pod);
        let ask = PodSandboxStatusRequest { pod_sandbox_id: id, verbose: false };
        let now = node.pod_sandbox_status(ask).expect("status").status.expect("a status").created_at;
        assert!(now > last, "{now} is not after {last}");
        last = now;
    }
    node.stop();
}

#[test]
fn mounts_of_containers_are_not_in_the_hosts_table() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("mounts");
    let pod_id = node.run_pod(&pod);
    let before = host::mounts(&node.folder().display().to_string()).len();
    let config = container("one", &image, &["sleep", "forever"], &pod);
    node.run_container(&pod_id, &config, &pod);
    assert_eq!(host::mounts(&node.folder().display().to_string()).len(), before);
    node.stop();
}

/// If the mount table grew with the host's, each pod would cost more (sandbox/src/base_mount_ns.rs).
#[test]
fn the_mounts_of_a_monitor_do_not_depend_on_the_hosts() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    // Like a kubelet's volume: neither below root nor below state.
    let disk = node.folder().join("disk");
    fs::create_dir(&disk).expect("a folder");
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("root");
    fs::write(disk.join("file"), "there").expect("write");
    let mut pods: Vec<String> = Vec::new();
    for name in ["one", "two"] {
        let mut pod = bridge_pod(name);
        pod.log_directory = node.log_directory(name);
        let pod_id = node.run_pod(&pod);
        let mut config = container("one", &image, &["sleep", "forever"], &pod);
        let volume = Mount {
            container_path: "/disk".into(),
            host_path: disk.display().to_string(),
            ..Mount::default()
        };
        config.mounts.push(volume);
        let id = node.run_container(&pod_id, &config, &pod);
        let inside = format!("/proc/{}/root/disk/file", node.container_pid(&id));
        assert_eq!(fs::read_to_string(inside).expect("the volume"), "there");
        pods.push(pod_id);
    }
    let kernels = ["/proc", "/sys", "/dev"].map(Path::new);
    let (root, state) = (node.root().to_owned(), node.state());
    let monitors = node.monitors();
    assert_eq!(monitors.len(), pods.len());
    for monitor in &monitors {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", monitor.pid)).expect("a monitor");
        let places = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
        let all = [&kernels[..], &[root.as_path(), state.as_path()]].concat();
        let others: Vec<&Path> = places
            .filter(|place| *place != Path::new("/") && !all.iter().any(|known| place.starts_with(known)))
            .collect();
        assert!(others.is_empty(), "{others:?}");
        assert!(table.contains("/shm "), "its own: {table}");
    }
    pods.iter().for_each(|id| node.remove_pod(id));
    umount2(&disk, MntFlags::empty()).expect("not in use");
    node.stop();
}

/// The daemon, monitors and starting containers have short scheduler slices (sandbox/src/sched.rs); a
/// container's program does not.
#[test]
fn a_containers_program_has_default_scheduling() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["sleep", "forever"]));
    let container = host::scheduling(fixture.node.container_pid(&id));
    let everybody = host::scheduling(std::process::id() as i32);
    assert_eq!(container, everybody);
    let ours = [fixture.node.pid(), fixture.node.monitors()[0].pid].map(host::scheduling);
    // Linux 6.12 and later report slices, in nanoseconds.
    if everybody.contains("slice") {
        for one in &ours {
            assert!(one.contains("se.slice 100000\n"), "{one}");
        }
    } else {
        assert_eq!(ours, [everybody.clone(), everybody], "there are no slices before Linux 6.12");
    }
    fixture.node.stop();
}
