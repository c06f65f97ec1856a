//! Processes that another program has moved out of their cgroups, as a privileged container with the node's cgroups or an
//! administrator's tool can: they end with their container and pod all the same. And monitors that no file identifies.

use std::fs;
use std::path::Path;

use coracle_tests::cri::proto::{
    NamespaceMode, PodSandboxConfig, RemovePodSandboxRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{container, host_pod, pod_namespaces, run, share_pids};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A pod with a running container.
struct Life {
    pod_id: String,
    id: String,
    /// The monitor, and the container's processes.
    monitor: i32,
    processes: Vec<i32>,
}

impl Life {
    /// `words`: what the container executes; `count`: how many processes it has then.
    fn begin(node: &Node, image: &str, pod: &PodSandboxConfig, words: &[&str], count: usize) -> Life {
        let pod_id = node.run_pod(pod);
        let monitor = node.monitors().iter().map(|monitor| monitor.pid).max().expect("it runs");
        let id = node.run_container(&pod_id, &container("one", image, words, pod), pod);
        let main = node.container_pid(&id);
        let processes = host::wait_for("all processes run", || {
            let mut processes = vec![main];
            processes.extend(host::children(main));
            (processes.len() == count).then_some(processes)
        });
        Life { pod_id, id, monitor, processes }
    }

    fn are_gone(&self) -> bool {
        !self.processes.iter().any(|pid| host::is_alive(*pid))
    }

    fn remove(&self, node: &Node) {
        let ask = StopPodSandboxRequest { pod_sandbox_id: self.pod_id.clone() };
        node.stop_pod_sandbox(ask).expect("stop");
        assert!(self.are_gone() && !host::is_alive(self.monitor), "{:?}, {}", self.processes, self.monitor);
        let ask = RemovePodSandboxRequest { pod_sandbox_id: self.pod_id.clone() };
        node.remove_pod_sandbox(ask).expect("remove");
    }
}

/// Kills what a failed test leaves.
impl Drop for Life {
    fn drop(&mut self) {
        for pid in self.processes.iter().chain([&self.monitor]).filter(|_| std::thread::panicking()) {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
    }
}

/// Moves a process to the root of all hierarchies, or only of the one by which coracle finds processes.
fn move_away(pid: i32, from_all: bool) {
    let roots = host::cgroup_roots();
    let is_unified = |root: &&std::path::PathBuf| root.join("cgroup.controllers").exists();
    let tracking = roots.iter().find(is_unified).or(roots.first()).expect("cgroups").clone();
    for root in roots.iter().filter(|root| from_all || **root == tracking) {
        fs::write(root.join("cgroup.procs"), pid.to_string()).expect("root may move processes");
    }
}

fn stop(node: &Node, life: &Life) {
    let ask = StopContainerRequest { container_id: life.id.clone(), timeout: 1 };
    node.stop_container(ask).unwrap_or_else(|error| panic!("{error}\n{}", node.log()));
}

/// The kinds of PID namespaces, each with its pod.
fn pods() -> Vec<(&'static str, PodSandboxConfig)> {
    let (mut shared, mut of_node) = (host_pod("shared"), host_pod("node"));
    share_pids(&mut shared);
    pod_namespaces(&mut of_node).pid = NamespaceMode::Node.into();
    vec![("own", host_pod("own")), ("shared", shared), ("node", of_node)]
}

/// Regression: StopContainer failed again and again, and RemovePodSandbox succeeded beside the running process.
#[test]
fn containers_whose_processes_were_moved_end_with_stop_container_and_with_their_pod() {
    let mut node = Node::start();
    let image = node.import_probe();
    for (what, pod) in pods() {
        for (from_all, is_stopped_first) in [(true, true), (false, true), (true, false)] {
            // A child process that outlives the main one, except in a PID namespace of the container.
            let life = Life::begin(&node, &image, &pod, &["tree", "1000"], 2);
            for pid in life.processes.iter().copied().filter(|pid| host::is_alive(*pid)) {
                move_away(pid, from_all);
            }
            if is_stopped_first {
                stop(&node, &life);
                assert!(life.are_gone(), "{what}, all hierarchies: {from_all}");
            } else {
                node.restart();
            }
            life.remove(&node);
        }
    }
    node.stop();
}

/// Regression: the first StopPodSandbox failed, and the next one succeeded because the daemon had forgotten the monitor.
#[test]
fn monitors_that_were_moved_end_with_their_pod() {
    let mut node = Node::start();
    let image = node.import_probe();
    for restarts in [false, true] {
        let life = Life::begin(&node, &image, &host_pod("moved"), &["sleep", "forever"], 1);
        move_away(life.monitor, true);
        if restarts {
            node.restart();
        }
        life.remove(&node);
    }
    node.stop();
}

/// Nothing but the root of the process leads to it: its monitor has ended, and it is in no cgroup of the pod.
#[test]
fn a_moved_container_ends_after_its_monitor() {
    let mut node = Node::start();
    let image = node.import_probe();
    for is_daemon_down in [false, true] {
        let life = Life::begin(&node, &image, &host_pod("alone"), &["sleep", "forever"], 1);
        if is_daemon_down {
            node.kill9();
        }
        move_away(life.processes[0], true);
        kill(Pid::from_raw(life.monitor), Signal::SIGKILL).expect("it runs");
        if is_daemon_down {
            node.launch();
        }
        host::wait_until("the container is ended", || life.are_gone());
        life.remove(&node);
    }
    node.stop();
}

/// Regression: the monitor of such a pod ran on until the pod was removed, and with a PID file that cannot be read the pod
/// could not be removed at all; without the pod's record no other pod was created, either.
#[test]
fn a_monitor_whose_files_are_lost_is_ended_with_its_containers() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("no PID file", |state| fs::remove_file(state.join("monitor.pid")).expect("a file")),
        ("zeros", |state| fs::write(state.join("monitor.pid"), [0; 8]).expect("a file")),
        ("a directory", |state| {
            fs::remove_file(state.join("monitor.pid")).expect("a file");
            fs::create_dir(state.join("monitor.pid")).expect("a directory");
        }),
        ("no socket", |state| fs::remove_file(state.join("monitor.sock")).expect("a socket")),
    ];
    let mut node = Node::start();
    let image = node.import_probe();
    for (what, damage) in damages {
        for has_record in [true, false] {
            let life = Life::begin(&node, &image, &host_pod("lost"), &["sleep", "forever"], 1);
            node.kill9();
            damage(&node.state().join("pods").join(&life.pod_id));
            if !has_record {
                fs::remove_dir_all(node.root().join("pods").join(&life.pod_id)).expect("the record");
            }
            node.launch();
            host::wait_until(&format!("{what}, record: {has_record}: all end"), || {
                life.are_gone() && !host::is_alive(life.monitor)
            });
            // The recovery of a pod without a record ends a moment later.
            let other = host::wait_for(&format!("{what}, record: {has_record}: a new pod"), || {
                node.run_pod_sandbox(run(&host_pod("other"))).ok()
            });
            node.remove_pod(&other.pod_sandbox_id);
            if has_record {
                life.remove(&node);
            }
        }
    }
    node.stop();
}
