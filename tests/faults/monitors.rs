//! Failures between the daemon and a running monitor: the pod and its containers continue.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ContainerState, PodSandboxState, PodSandboxStatusRequest, StopContainerRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{container, exec, host_pod};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::Pid;

use crate::lost::recovered;

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

/// Connects to a pod's monitor as a daemon does, without waiting for room in the queue of its socket.
pub(crate) fn connection(node: &Node, pod_id: &str) -> nix::Result<OwnedFd> {
    let state = File::open(node.state().join("pods").join(pod_id)).expect("the pod's state");
    // The path of the socket is longer than an address.
    let path = format!("/proc/self/fd/{}/monitor.sock", state.as_raw_fd());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let other = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    connect(other.as_raw_fd(), &UnixAddr::new(path.as_str())?)?;
    Ok(other)
}

/// Regression: the monitor closed the connection, and the daemon then killed the pod.
#[test]
fn a_monitor_without_free_descriptors_refuses_requests_and_continues() {
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

/// Regression: the end of the connection was treated as the end of the monitor, and the pod was killed.
#[test]
fn a_lost_connection_to_a_monitor_is_restored() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("cut");
    let pod_id = node.run_pod(&pod);
    let ends = node.run_container(&pod_id, &container("ends", &image, &["sleep", "forever"], &pod), &pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let (pid, monitor) = (node.container_pid(&id), node.monitors()[0].pid);
    let ends_pid = node.container_pid(&ends);
    // A monitor has one daemon: the newest connection.
    for _ in 0..3 {
        let _other = connection(&node, &pod_id).expect("the monitor listens");
        // Repeated; the process is dead after the first signal.
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

/// How soon a daemon has to serve whose monitors do not answer; on a machine that tests in parallel.
const SERVES: Duration = Duration::from_secs(4);

/// Earlier builds took the silence for the end of the monitor and killed the pod.
#[test]
fn a_daemon_starts_while_a_monitor_is_stopped() {
    let mut node = Node::start();
    let image = node.import_probe();
    let lives: Vec<_> = ["held", "other"]
        .into_iter()
        .map(|name| {
            let pod = host_pod(name);
            let pod_id = node.run_pod(&pod);
            let id =
                node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
            let pid = node.container_pid(&id);
            (pod_id, id, pid)
        })
        .collect();
    let [(held_pod, held, held_pid), (_, other, other_pid)] = &lives[..] else { panic!("two") };
    let monitor = host::proc_value(*held_pid, "status", "PPid").expect("its parent is the monitor") as i32;
    node.kill9();
    let signal = |signal| kill(Pid::from_raw(monitor), signal).expect("the monitor lives");
    signal(Signal::SIGSTOP);
    let begun = Instant::now();
    node.launch();
    assert!(begun.elapsed() < SERVES, "{:?}", begun.elapsed());
    let (is_recovered, message) = recovered(&node);
    assert!(!is_recovered && message.contains(&held_pod[..13]), "{message}");
    for (id, pid) in [(held, held_pid), (other, other_pid)] {
        assert_eq!(node.container(id).state(), ContainerState::ContainerRunning);
        assert_eq!(node.container_pid(id), *pid, "as the kernel shows it");
    }
    assert!(is_ready(&node, held_pod));
    node.exec_sync(exec(other, &["true"], 5)).expect("the other pod is served");
    let stop = StopContainerRequest { container_id: held.clone(), timeout: 5 };
    let begun = Instant::now();
    let refused = [node.exec_sync(exec(held, &["true"], 5)).map(drop), node.stop_container(stop).map(drop)];
    for refused in refused {
        let refused = refused.expect_err("its monitor does not answer");
        assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
        assert!(refused.message().contains(&held_pod[..13]), "{refused}");
    }
    assert!(begun.elapsed() < SERVES, "{:?}", begun.elapsed());
    // Its socket holds no more connections when the daemon tries again.
    let mut others = Vec::new();
    while others.len() < 100
        && let Ok(other) = connection(&node, held_pod)
    {
        others.push(other);
    }
    assert!((1..100).contains(&others.len()), "{} connections wait", others.len());
    let tries = || node.log().matches("state of a pod is unknown, will retry").count();
    let before = tries();
    host::wait_until("the daemon is refused a connection", || tries() > before);
    assert!(host::is_alive(*held_pid) && host::is_alive(*other_pid), "{}", node.log());
    signal(Signal::SIGCONT);
    host::wait_until("the pod is adopted", || recovered(&node).0);
    node.exec_sync(exec(held, &["true"], 5)).expect("it is served again");
    assert_eq!(
        (node.container(held).state(), node.container_pid(held)),
        (ContainerState::ContainerRunning, *held_pid)
    );
    node.stop();
}

/// A pod whose monitor does not answer can be removed all the same.
#[test]
fn a_pod_whose_monitor_is_stopped_can_be_removed() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("held");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let pid = node.container_pid(&id);
    kill(Pid::from_raw(node.monitors()[0].pid), Signal::SIGSTOP).expect("the monitor lives");
    node.restart();
    node.remove_pod(&pod_id);
    assert!(!host::is_alive(pid));
    host::wait_until("it is no longer asked for", || recovered(&node).0);
    node.stop();
}
