//! `coracle why`: the history of pods, containers and images, with the daemon running or dead, of pods that are there or gone, and with
//! files that something has damaged.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Output;

use coracle_tests::cri::proto::{StartContainerRequest, StopPodSandboxRequest};
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{container, create, host_pod, run};
use nix::sys::stat::Mode;

fn history(node: &Node) -> PathBuf {
    node.state().join("history")
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails unless the parts are in the text in this order.
#[track_caller]
fn in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let Some((_, behind)) = rest.split_once(part) else { panic!("{part:?} does not follow in:\n{text}") };
        rest = behind;
    }
}

#[test]
fn the_steps_of_a_pod_are_shown_without_the_daemon_and_after_the_pod() {
    let mut fixture = PodFixture::start();
    let metadata = fixture.pod.metadata.clone().expect("a name");
    let name = format!("{}/{}", metadata.namespace, metadata.name);
    let id = fixture.create(&fixture.config("app", &["exit", "3"]));
    fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).expect("start");
    fixture.node.exited(&id);
    let steps = [
        &format!("pod {name}"),
        "cause: container app exited with code 3",
        "cure:  see its output",
        "pod sandbox ready (ms=",
        "monitor ",
        "app: container created",
        "! ",
        "app: container exited (code=3",
    ];
    for wanted in [name.as_str(), &metadata.name, &fixture.pod_id, &fixture.pod_id[..8]] {
        let why = fixture.node.tool(&["why", wanted]);
        assert!(why.status.success(), "{wanted}: {}", error(&why));
        in_order(&out(&why), &steps);
        // The exit may overtake the answer to the start.
        assert!(out(&why).contains("app: container started"), "{}", out(&why));
        assert!(out(&why).contains(": ready; containers: app exited (3, Error)"), "{}", out(&why));
    }
    for wanted in ["app", &format!("{name}/app"), &id, &id[..10]] {
        in_order(
            &out(&fixture.node.tool(&["why", wanted])),
            &[&format!("container {name}/app: exited"), "code 3"],
        );
    }
    fixture.node.kill9();
    let why = out(&fixture.node.tool(&["why", &name]));
    in_order(&why, &[&format!("pod {name}: the daemon does not answer ("), "code 3", "container exited"]);
    fixture.node.launch();
    fixture.node.remove_pod(&fixture.pod_id);
    let why = out(&fixture.node.tool(&["why", &name]));
    in_order(
        &why,
        &[&format!("pod {name}: gone"), "container exited", "pod sandbox stopped", "pod sandbox removed"],
    );
    let unknown = fixture.node.tool(&["why", "nobody/knows"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        error(&unknown).contains("neither a pod nor a container nor an image of the last hour"),
        "{}",
        error(&unknown)
    );
    assert_eq!(fixture.node.tool(&["why"]).status.code(), Some(2));
    fixture.node.stop();
}

/// A kubelet tries again with another sandbox: all attempts are one story.
#[test]
fn attempts_under_one_name_are_shown_together_and_two_pods_of_one_name_are_an_error() {
    let node = Node::start();
    let pod = host_pod("again");
    let metadata = pod.metadata.clone().expect("a name");
    let name = format!("{}/{}", metadata.namespace, metadata.name);
    let first = node.run_pod(&pod);
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: first.clone() }).expect("stop");
    let mut second = pod.clone();
    second.metadata.as_mut().expect("a name").attempt = 1;
    let second_id = node.run_pod(&second);
    let why = out(&node.tool(&["why", &name]));
    in_order(&why, &[&first[..13], "pod sandbox stopped", &second_id[..13], "pod sandbox ready"]);
    let mut other = pod;
    let metadata = other.metadata.as_mut().expect("a name");
    metadata.namespace = "elsewhere".into();
    metadata.uid = "another".into();
    let bare = metadata.name.clone();
    node.run_pod(&other);
    let ambiguous = node.tool(&["why", &bare]);
    assert_eq!(ambiguous.status.code(), Some(1));
    assert!(error(&ambiguous).contains("several pods are called so"), "{}", error(&ambiguous));
    node.stop();
}

#[test]
fn a_refused_pod_and_what_the_kubelet_was_told_are_there_without_a_sandbox() {
    let node = Node::start();
    let mut pod = host_pod("refused");
    pod.linux.as_mut().expect("set").cgroup_parent = "/../outside".into();
    let refused = node.run_pod_sandbox(run(&pod)).expect_err("a bad cgroup parent");
    let metadata = pod.metadata.expect("a name");
    let why = out(&node.tool(&["why", &format!("{}/{}", metadata.namespace, metadata.name)]));
    in_order(&why, &["cause: ", "told to the kubelet:", "run_pod_sandbox: INVALID_ARGUMENT: ", "UTC:"]);
    assert!(why.contains(refused.message()), "{why}");
    node.stop();
}

#[test]
fn a_file_stays_small_whatever_happens_and_text_of_others_is_escaped() {
    let fixture = PodFixture::start();
    for number in 0..60 {
        // Each call fails with another text, which others chose.
        let image = format!("localhost/\u{1b}[2J\u{202e}{number}");
        let config = container("busy", &image, &[], &fixture.pod);
        fixture
            .node
            .create_container(create(&fixture.pod_id, &config, &fixture.pod))
            .expect_err("no such image");
    }
    let path = history(&fixture.node).join("pods").join(&fixture.pod_id);
    let size = fs::metadata(&path).expect("its history").len();
    assert!((1..=4096).contains(&size), "{size} bytes");
    let why = out(&fixture.node.tool(&["why", &fixture.pod_id]));
    assert!(why.contains("\\u{1b}") && !why.contains('\u{1b}') && !why.contains('\u{202e}'), "{why}");
    assert!(why.contains("}59"), "the newest are kept: {why}");
    fixture.node.stop();
}

#[test]
fn damaged_files_are_named_and_stop_neither_the_daemon_nor_the_story() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("damaged");
    let pod_id = node.run_pod(&pod);
    let pods = history(&node).join("pods");
    let own = pods.join(&pod_id);
    let text = fs::read(&own).expect("its history");
    fs::write(&own, &text[..text.len() - 10]).expect("cut");
    let names: Vec<String> = ["a", "b", "c"].iter().map(|letter| letter.repeat(64)).collect();
    nix::unistd::mkfifo(&pods.join(&names[0]), Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO");
    symlink("/etc/passwd", pods.join(&names[1])).expect("a link");
    fs::write(pods.join(&names[2]), vec![0xff; 100_000]).expect("noise");
    let refused =
        node.create_container(create(&pod_id, &container("one", "localhost/absent:1", &[], &pod), &pod));
    refused.expect_err("no such image");
    let why = node.tool(&["why", &pod_id[..20]]);
    let said = out(&why);
    for expected in
        ["1 damaged lines", "not a regular file", "is longer than the daemon writes it", "localhost/absent:1"]
    {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(!said.contains("root:"), "{said}");
    // The daemon writes on, and what it cannot write it leaves out.
    fs::remove_file(&own).expect("ours");
    nix::unistd::mkfifo(&own, Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO");
    node.run_container(&pod_id, &container("two", &image, &["sleep", "forever"], &pod), &pod);
    fs::remove_dir_all(history(&node)).expect("ours");
    node.remove_pod(&pod_id);
    let nothing = node.tool(&["why", "damaged"]);
    assert!(error(&nothing).contains("no history in"), "{}", error(&nothing));
    node.stop();
}
