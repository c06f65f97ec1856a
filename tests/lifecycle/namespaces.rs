//! The namespaces that a container shares with its pod, its node and other containers, compared by identity.

use coracle_tests::cri::proto::NamespaceMode;
use coracle_tests::host::namespace;
use coracle_tests::request::{host_pod, security};

use coracle_tests::pod_fixture::PodFixture;

#[test]
fn containers_of_a_pod_share_ipc_and_network_and_not_pids_or_mounts() {
    let fixture = PodFixture::start();
    let pids: Vec<i32> = ["one", "two"]
        .map(|name| fixture.run(&fixture.config(name, &["sleep", "forever"])))
        .map(|id| fixture.node.container_pid(&id))
        .into();
    for (kind, is_shared) in [("ipc", true), ("net", true), ("uts", true), ("pid", false), ("mnt", false)] {
        let same = namespace(pids[0], kind) == namespace(pids[1], kind);
        assert_eq!(same, is_shared, "{kind}");
    }
    let me = std::process::id() as i32;
    assert_eq!(namespace(pids[0], "net"), namespace(me, "net"), "host network");
    assert_ne!(namespace(pids[0], "ipc"), namespace(me, "ipc"));
    assert!(
        fixture.output(&["see", "place"], |_| ()).contains("place pid 1\n"),
        "first in its own pid namespace"
    );
    fixture.node.stop();
}

#[test]
fn a_pod_may_use_the_namespaces_of_the_node() {
    let mut pod = host_pod("node");
    let linux = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    let options = linux.and_then(|context| context.namespace_options.as_mut()).expect("set");
    options.pid = NamespaceMode::Node.into();
    options.ipc = NamespaceMode::Node.into();
    let fixture = PodFixture::with(pod);
    let pid = fixture.node.container_pid(&fixture.run(&fixture.config("one", &["sleep", "forever"])));
    for kind in ["pid", "ipc", "net", "uts"] {
        assert_eq!(namespace(pid, kind), namespace(std::process::id() as i32, kind), "{kind}");
    }
    fixture.node.stop();
}

#[test]
fn a_pods_pid_namespace_is_shared_and_its_first_process_reaps() {
    let mut pod = host_pod("shared");
    let linux = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    linux.and_then(|context| context.namespace_options.as_mut()).expect("set").pid =
        NamespaceMode::Pod.into();
    let fixture = PodFixture::with(pod);
    let first = fixture.node.container_pid(&fixture.run(&fixture.config("one", &["sleep", "forever"])));
    let second = fixture.node.container_pid(&fixture.run(&fixture.config("two", &["orphan", "0"])).clone());
    assert!(second >= 0);
    let third = fixture.node.container_pid(&fixture.run(&fixture.config("three", &["sleep", "forever"])));
    assert_eq!(namespace(first, "pid"), namespace(third, "pid"));
    assert_ne!(namespace(first, "pid"), namespace(std::process::id() as i32, "pid"));
    fixture.node.stop();
}

#[test]
fn a_container_can_join_the_pid_namespace_of_another() {
    let fixture = PodFixture::start();
    let target = fixture.run(&fixture.config("target", &["sleep", "forever"]));
    let mut config = fixture.config("debug", &["sleep", "forever"]);
    let options = security(&mut config).namespace_options.as_mut().expect("set");
    options.pid = NamespaceMode::Target.into();
    options.target_id = target.clone();
    let debug = fixture.run(&config);
    let (target, debug) = (fixture.node.container_pid(&target), fixture.node.container_pid(&debug));
    assert_eq!(namespace(target, "pid"), namespace(debug, "pid"));
    fixture.node.stop();
}
