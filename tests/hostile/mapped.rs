//! Pods with user namespaces whose ids on the node are those of another pod: the kubelet gives each pod a range of its own, but
//! coracle uses what the request says (docs/security.md). Equal ids alone give no access; and after a pod's end no file with its
//! ids is left for the next pod that has them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coracle_tests::cri::proto::{NamespaceMode, PodSandboxConfig, StartContainerRequest};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{self, bridge_pod, container, exec};

use crate::{Rights, armed, reached_nothing, says};

/// The first id of the victim on the node; no other test has it.
const FIRST: u32 = 655_360;
const SECRET: &str = "of-another-pod";

/// Runs a pod with ids from `first` on, and in it a container with all capabilities; returns the pod's and the container's ID.
fn attacker(
    fixture: &PodFixture,
    name: &str,
    first: u32,
    change: impl FnOnce(&mut PodSandboxConfig),
) -> [String; 2] {
    let mut pod = request::mapped(bridge_pod(name), first);
    pod.log_directory = fixture.node.log_directory(name);
    change(&mut pod);
    let pod_id = fixture.node.run_pod(&pod);
    let mut config = container(name, &fixture.image, &["sleep", "forever"], &pod);
    Rights::AllUnfiltered.give(&mut config);
    let id = fixture.node.run_container(&pod_id, &config, &pod);
    [pod_id, id]
}

/// The files below a directory whose owner or group is one of the victim's ids.
fn owned(top: &Path) -> Vec<String> {
    let ids = FIRST..FIRST + request::id_mapping(FIRST).length;
    let mut found = Vec::new();
    let mut left = vec![top.to_owned()];
    while let Some(folder) = left.pop() {
        // What is removed meanwhile has no owner.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            if ids.contains(&about.uid()) || ids.contains(&about.gid()) {
                found.push(entry.path().display().to_string());
            }
            if about.is_dir() {
                left.push(entry.path());
            }
        }
    }
    found
}

/// The victim: a pod with a container that has written files to its writable layer and to its memory file system.
fn victim() -> (PodFixture, String) {
    let fixture = PodFixture::on(Node::with_bridge(), request::mapped(bridge_pod("victim"), FIRST));
    let id = fixture.run(&armed(&fixture, "victim", Rights::Default, &["sleep", "forever"]));
    for path in ["/tmp/secret", "/dev/shm/secret"] {
        assert_eq!(says(&fixture, &id, &["write", path, SECRET]), "");
    }
    (fixture, id)
}

#[test]
fn a_pod_with_the_ids_of_another_reaches_none_of_its_files_and_processes() {
    let (fixture, victim) = victim();
    let pid = fixture.node.container_pid(&victim).to_string();
    let inside = format!("/proc/{pid}/root/tmp/secret");
    assert_eq!(fs::read_to_string(&inside).expect("the victim's file"), SECRET);
    let paths: Vec<String> = owned(fixture.node.root()).into_iter().chain([inside]).collect();
    assert!(paths.iter().any(|path| path.ends_with("/tmp/secret")), "{paths:?}");
    // The same ids; and a range in whose middle they begin.
    for (name, first) in [("same", FIRST), ("overlapping", FIRST - 32_768)] {
        let [_, id] = attacker(&fixture, name, first, |_| ());
        for path in ["/tmp/secret", "/dev/shm/secret"].into_iter().chain(paths.iter().map(String::as_str)) {
            let said = says(&fixture, &id, &["cat", path]);
            assert!(!said.contains(SECRET), "{name} {path}: {said}");
        }
        // Its processes are not there; with the node's PID namespace they are, but not for a tracer of another user namespace.
        let said = says(&fixture, &id, &["attack", "hunt", &pid]);
        assert!(!said.contains("held trace"), "{name}: {said}");
        reached_nothing(&said);
    }
    let [_, id] = attacker(&fixture, "all-processes", FIRST, |pod| {
        request::pod_namespaces(pod).pid = NamespaceMode::Node.into();
    });
    let said = says(&fixture, &id, &["attack", "hunt", &pid]);
    assert!(said.contains("held trace"), "{said}");
    reached_nothing(&said);
    let answer = fixture.node.exec_sync(exec(&victim, &["cat", "/tmp/secret"], 10)).expect("exec");
    assert_eq!(answer.stdout, SECRET.as_bytes());
    fixture.node.stop();
}

/// A container adds keys until the quota of its user on the node is used up, without which no session keyring can be made for
/// another container of that user. Root in a pod with a user namespace has a quota of its own.
#[test]
fn used_up_keys_of_a_pod_with_a_user_namespace_hinder_only_that_pod() {
    /// Ids that no pod of another test has, which would have no key either.
    const OWN: u32 = FIRST + (1 << 24);
    let fixture = PodFixture::on(Node::with_bridge(), request::mapped(bridge_pod("greedy"), OWN));
    let greedy = fixture.run(&armed(&fixture, "greedy", Rights::Unfiltered, &["attack", "keys", "fill"]));
    crate::wait_for_line(&fixture, &greedy, "saw keys ");
    let said = fixture.node.output(&greedy);
    assert!(said.contains("EDQUOT"), "{said}");
    // Execs join the container's own keyring.
    assert_eq!(says(&fixture, &greedy, &["print", "fine"]), "fine\n");
    let second = fixture.create(&fixture.config("second", &["sleep", "forever"]));
    let start = StartContainerRequest { container_id: second.clone() };
    let refused = fixture.node.start_container(start.clone()).expect_err("no key is left");
    assert!(refused.message().contains("keyring"), "{refused}");
    // Pods with other ids, and without a user namespace.
    let [other, _] = attacker(&fixture, "other", OWN + 65_536, |_| ());
    let plain = fixture.node.run_pod(&bridge_pod("plain"));
    fixture.node.remove_pod(&other);
    fixture.node.remove_pod(&plain);
    fixture.node.stop();
}

#[test]
fn no_file_with_the_ids_of_a_removed_pod_is_left_for_the_next_one() {
    let (fixture, _) = victim();
    let all =
        || [fixture.node.root().to_owned(), fixture.node.state()].iter().flat_map(|top| owned(top)).collect();
    let before: Vec<String> = all();
    assert!(before.iter().any(|path| path.ends_with("/tmp/secret")), "{before:?}");
    fixture.node.remove_pod(&fixture.pod_id);
    let left = || -> Vec<String> { all() };
    host::wait_until("the writable layer is deleted", || left().is_empty());
    let [pod_id, id] = attacker(&fixture, "next", FIRST, |_| ());
    for path in ["/tmp/secret", "/dev/shm/secret"] {
        let said = says(&fixture, &id, &["cat", path]);
        assert!(said.contains("No such file"), "{path}: {said}");
    }
    fixture.node.remove_pod(&pod_id);
    host::wait_until("nothing of the next one either", || left().is_empty());
    fixture.node.stop();
}
