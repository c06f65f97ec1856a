//! What goes wrong between the daemon and a monitor that lives: the pod and its containers go on.

use std::fs::File;
use std::os::fd::AsRawFd;

use coracle_tests::cri::proto::{ContainerState, PodSandboxState, PodSandboxStatusRequest};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{container, exec, host_pod};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::Pid;

fn is_ready(node: &Node, pod_id: &str) -> bool {
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.to_owned(), verbose: false };
    let status = node.pod_sandbox_status(ask).expect("status").status.expect("a status");
    status.state() == PodSandboxState::SandboxReady
}

/// Sets the soft limit of open files of another process.
fn limit_files(pid: i32, limit: u64) {
    let set = std::process::Command::new("prlimit")
        .args([format!("--pid={pid}"), format!("--nofile={limit}:")])
        .status()
        .expect("prlimit of util-linux");
    assert!(set.success(), "the limit of {pid}");
}

/// Without the fix the monitor ends the connection, and the daemon kills the pod for that.
#[test]
fn a_monitor_without_a_free_descriptor_refuses_and_goes_on() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("full");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let (pid, monitor) = (node.container_pid(&id), node.monitors()[0].pid);
    limit_files(monitor, 3);
    let refused = node.exec_sync(exec(&id, &["true"], 5)).expect_err("no descriptor is free");
    assert!(refused.message().contains("too many open files"), "{refused}");
    limit_files(monitor, 1024);
    node.exec_sync(exec(&id, &["true"], 5)).expect("the monitor serves");
    assert!(host::is_alive(pid) && is_ready(&node, &pod_id), "{}", node.log());
    assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning);
    node.remove_pod(&pod_id);
    node.stop();
}

/// Without the fix the end of the connection is taken for the end of the monitor, and the pod is killed.
#[test]
fn a_connection_that_is_lost_is_made_again() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("cut");
    let pod_id = node.run_pod(&pod);
    let ends = node.run_container(&pod_id, &container("ends", &image, &["sleep", "forever"], &pod), &pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let (pid, monitor) = (node.container_pid(&id), node.monitors()[0].pid);
    let ends_pid = node.container_pid(&ends);
    // A monitor has one daemon: the newest connection. Its path is longer than a socket's may be.
    let directory = File::open(node.state().join("pods").join(&pod_id)).expect("the pod's state");
    let place = format!("/proc/self/fd/{}/monitor.sock", directory.as_raw_fd());
    let place = UnixAddr::new(place.as_str()).expect("a path");
    for _ in 0..3 {
        let other =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
        connect(other.as_raw_fd(), &place).expect("the monitor listens");
        // Again each time: it is dead from the first on.
        let _ = kill(Pid::from_raw(ends_pid), Signal::SIGKILL);
        host::wait_until("the connection is made again", || node.exec_sync(exec(&id, &["true"], 5)).is_ok());
    }
    assert_eq!(node.exited(&ends).exit_code, 137, "an end that the lost connection should have told");
    assert!(host::is_alive(pid) && is_ready(&node, &pod_id), "{}", node.log());
    assert_eq!(node.container_pid(&id), pid);
    assert_eq!(node.monitors()[0].pid, monitor);
    node.remove_pod(&pod_id);
    node.stop();
}
