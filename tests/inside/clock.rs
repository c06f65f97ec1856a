//! A clock in 1970, as a board without a real-time clock has it until NTP answers. The clock of a machine has no namespace,
//! so this runs in a guest only.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{container, host_pod, pull};

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

fn set_clock(seconds: u64) {
    let set = Command::new("date").args(["-s", &format!("@{seconds}")]).output().expect("date");
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
}

/// Fails unless the first five lines have all of these parts.
#[track_caller]
fn names(node: &Node, words: &[&str], parts: &[&str]) {
    let output = node.tool(words);
    let text = String::from_utf8_lossy(&output.stdout);
    let head: Vec<_> = text.lines().take(5).collect();
    for part in parts {
        assert!(head.join("\n").contains(part), "{part:?} is not in the first five lines of:\n{text}");
    }
}

/// `coracle check` and `coracle why` name the clock and the cure; pods of images that are there run, and once the clock is
/// set the same daemon pulls.
#[test]
fn a_clock_in_1970_is_named_with_its_cure() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "clock"), "x", "1");
    let nginx = Nginx::start(node.folder(), "tls", registry.address(), Wants::default());
    let (address, ca) = (nginx.address(), nginx.file("ca.pem"));
    let name = format!("{address}/x:1");
    fs::write(
        node.folder().join("registries.yaml"),
        format!(
            "mirrors: {{\"{address}\": {{endpoint: [\"https://{address}\"]}}}}\n\
             configs: {{\"{address}\": {{tls: {{ca_file: {}}}}}}}\n",
            ca.display()
        ),
    )
    .expect("registries.yaml");
    let image = node.import_probe();
    let now = seconds();
    set_clock(3600);
    node.pull_image(pull(&name)).expect_err("the certificate begins in half a century");
    names(&node, &["why", &name], &[&name, "not valid yet", "set the clock"]);
    names(&node, &["check"], &["degraded  clock", "it is before 2026", "NTP, or a real-time clock"]);
    let pod = host_pod("early");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["true"], &pod), &pod);
    assert_eq!(node.exited(&id).exit_code, 0);
    set_clock(now);
    node.pull_image(pull(&name)).expect("the clock is right");
    node.stop();
}
