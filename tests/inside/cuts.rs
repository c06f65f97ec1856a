//! One boot between two power cuts: verifies the existing objects, then works until the power is cut. It
//! prints to the console for the harness, which keeps a list: `HAS THING` for each existing object and then
//! `CHECKED`; `DOING +THING` or `DOING -THING` before a change and `DID …` after it was acknowledged.

use std::collections::BTreeMap;
use std::io::Write as _;

use coracle_tests::cri::proto::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandboxState,
};
use coracle_tests::node::Node;
use coracle_tests::random::Random;
use coracle_tests::request::{container, host_pod};

use crate::{shelf, store};

/// Maximum number of concurrent pods.
const PODS_MAX: usize = 3;

/// Prints a separate line, bypassing the capture of the test's output.
fn say(line: &str) {
    let mut console = std::io::stdout();
    let said = console.write_all(format!("\n{line}\n").as_bytes()).and_then(|()| console.flush());
    said.expect("a console");
}

/// Makes a change and reports it to the harness.
fn change(what: &str, act: impl FnOnce()) {
    say(&format!("DOING {what}"));
    act();
    say(&format!("DID {what}"));
}

/// Pods of earlier boots by name: none is ready and none has running containers.
fn old_pods(node: &Node) -> BTreeMap<String, String> {
    let containers = node.list_containers(ListContainersRequest::default()).expect("list").containers;
    for container in containers {
        assert_eq!(container.state(), ContainerState::ContainerExited, "{container:?}");
    }
    let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
    for pod in &pods {
        assert_eq!(pod.state(), PodSandboxState::SandboxNotready, "{pod:?}");
    }
    pods.into_iter().map(|pod| (pod.metadata.expect("a name").name, pod.id)).collect()
}

/// Reports and verifies the existing objects; removes old pods.
fn check(node: &Node) {
    let (pods, images) = (old_pods(node), store::present(node));
    for name in pods.keys() {
        say(&format!("HAS pod {name}"));
    }
    for number in &images {
        say(&format!("HAS image {number}"));
    }
    let log = node.log();
    // There is no network here. Other warnings help to understand a failed boot.
    let is_telling = |line: &&str| line.contains("level=warn") && !line.contains("network configuration");
    log.lines().filter(is_telling).for_each(say);
    say("CHECKED");
    assert!(!log.contains("quarantine"), "{log}");
    store::verify_blobs();
    for (name, id) in pods {
        change(&format!("-pod {name}"), || node.remove_pod(&id));
    }
    for number in images {
        // The pod for the verification is removed at the end.
        change("-pod once", || store::verify(node, number));
    }
}

/// Imports, pulls and removes images, runs and removes pods.
fn work(node: &Node, boot: &str) {
    let mut random = Random::from_environment();
    let mut pods: Vec<(String, String)> = Vec::new();
    for step in 0_u64.. {
        let (number, present) = (random.below(store::IMAGES), store::present(node));
        match random.below(4) {
            0 if !present.contains(&number) => {
                change(&format!("+image {number}"), || store::fetch(node, number));
            }
            1 if present.contains(&number) => {
                change(&format!("-image {number}"), || store::remove(node, number));
            }
            2 if pods.len() < PODS_MAX => {
                let name = format!("{boot}-{step}");
                let pod = host_pod(&name);
                let mut id = String::new();
                change(&format!("+pod {name}"), || id = node.run_pod(&pod));
                if let Some(image) = present.first() {
                    let config = container("one", &store::name(*image), &["sleep", "forever"], &pod);
                    node.run_container(&id, &config, &pod);
                }
                pods.push((name, id));
            }
            3 if !pods.is_empty() => {
                let (name, id) = pods.swap_remove(random.below(pods.len() as u64) as usize);
                change(&format!("-pod {name}"), || node.remove_pod(&id));
            }
            _ => {}
        }
    }
}

/// All boots except the last: runs until the power is cut.
#[test]
fn images_and_pods_are_consistent_after_each_power_cut() {
    shelf::serve();
    let node = store::start();
    check(&node);
    let boot = std::env::var("CORACLE_BOOT").expect("the harness counts");
    say("WORKING");
    work(&node, &boot);
}

/// The last boot: all images can be fetched again, and after their removal nothing remains.
#[test]
fn images_can_be_fetched() {
    shelf::serve();
    let node = store::start();
    check(&node);
    for number in 0..store::IMAGES {
        store::fetch(&node, number);
        store::verify(&node, number);
    }
    for number in 0..store::IMAGES {
        store::remove(&node, number);
    }
    coracle_tests::host::wait_until("nothing of the images is left", || store::leftovers().is_empty());
    node.stop();
}
