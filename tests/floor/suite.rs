//! Tests of the floor: it does what its numbers claim, on both networks, and leaves nothing. No test compares
//! times.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_tests::floor::Floor;
use coracle_tests::{host, node};

const PROGRAM: &str = env!("CARGO_BIN_EXE_coracle-floor");

/// Objects of a floor that remain, as far as a name identifies them.
fn rests(pid: u32, folder: &Path) -> Vec<String> {
    let mut rests = host::mounts(&folder.display().to_string());
    let parent = format!("coracle-test-floor-{pid}");
    let parents = host::cgroup_roots().into_iter().map(|root| root.join(&parent));
    rests.extend(parents.filter(|path| path.exists()).map(|path| path.display().to_string()));
    rests.extend(host::links(&format!("ct{}bf", pid % 1_000_000)));
    rests.extend(folder.exists().then(|| folder.display().to_string()));
    let processes = host::processes("/probe sleep forever").into_iter();
    let own = processes.filter(|process| host::is_in_cgroup(process.pid, &parent));
    rests.extend(own.map(|process| process.command));
    rests
}

fn real_pods_and_nothing_left(network: &str) {
    let mut floor = Floor::start(Path::new(PROGRAM));
    floor.check(network);
    let life = floor.life(network);
    assert_eq!(life.execs.len(), 3);
    let times = life.execs.iter().chain([&life.up, &life.down, &life.cpu]);
    assert!(times.clone().all(|time| *time > Duration::ZERO), "{life:?}");
    let (pid, folder) = (floor.pid(), floor.folder().to_owned());
    assert_ne!(rests(pid, &folder), Vec::<String>::new(), "the names of its objects have changed");
    floor.stop();
    host::wait_until("everything of the floor is removed", || rests(pid, &folder).is_empty());
}

/// Each program sees PID 1 or the container's namespaces, the overlay, the layer's file and its capabilities.
#[test]
fn pods_on_the_nodes_network_are_real_and_leave_nothing() {
    real_pods_and_nothing_left("host");
}

/// In addition eth0 has the pod's address and the default route leads to the bridge.
#[test]
fn pods_on_a_bridge_are_real_and_leave_nothing() {
    real_pods_and_nothing_left("bridge");
}

/// After an error in the middle of a set-up the floor removes its objects, too: here a layer without a program.
#[test]
fn a_failed_pod_leaves_nothing() {
    let folder = node::base().join(format!("floor-failed-{}", std::process::id()));
    std::fs::create_dir_all(node::base()).expect("a directory for nodes");
    let floor = Command::new(PROGRAM)
        .arg(&folder)
        .arg("/etc/passwd") // Not a program, so that exec fails.
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the floor runs");
    let pid = floor.id();
    let mut requests = floor.stdin.as_ref().expect("its input is piped");
    std::io::Write::write_all(&mut requests, b"life bridge\n").expect("it reads requests");
    let output = floor.wait_with_output().expect("it is our child");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("execute /probe"), "{error}");
    host::wait_until("everything of the floor is removed", || rests(pid, &folder).is_empty());
}
