//! Processes that another program has moved out of their cgroups, as a privileged container with the node's cgroups or an
//! administrator's tool can: they end with their container and pod all the same. And monitors that no file identifies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::{
    NamespaceMode, PodSandboxConfig, RemoveContainerRequest, RemovePodSandboxRequest, StopContainerRequest,
    StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{container, host_pod, pod_namespaces, run, share_pids};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Status;

use crate::lost::recovered;
use crate::records::Held;

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

/// Whether this is the hierarchy by which coracle finds processes.
fn is_tracking(root: &Path) -> bool {
    let roots = host::cgroup_roots();
    let unified = roots.iter().find(|root| root.join("cgroup.controllers").exists());
    unified.or(roots.first()).is_some_and(|tracking| root.starts_with(tracking))
}

/// Moves a process to the root of all hierarchies, or only of the one by which coracle finds processes.
pub(crate) fn move_away(pid: i32, from_all: bool) {
    for root in host::cgroup_roots().iter().filter(|root| from_all || is_tracking(root)) {
        fs::write(root.join("cgroup.procs"), pid.to_string()).expect("root may move processes");
    }
}

/// Moves a process into the cgroup of a pod or container, in the hierarchies that `is_wanted` selects; returns their number.
fn move_into(pid: i32, node: &Node, id: &str, is_wanted: impl Fn(&Path) -> bool) -> usize {
    let is_it = |path: &&PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().contains(id)) && is_wanted(path)
    };
    let cgroups = host::cgroups_below(&node.cgroup_parent());
    let moved = cgroups.iter().filter(is_it).map(|cgroup| {
        fs::write(cgroup.join("cgroup.procs"), pid.to_string()).expect("root may move processes");
    });
    moved.count()
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

/// Finding F1: StopContainer failed again and again, and RemovePodSandbox succeeded beside the running process.
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

/// A process that does not end after SIGKILL, as at a dead network file system, and that its cgroup does not show: each call that
/// should end it fails and names it, a condition has the cure, and the retries succeed when the process can end.
#[test]
fn calls_name_a_moved_process_until_it_has_ended() {
    /// Each call tries for ten seconds and more.
    const LIMIT: Duration = Duration::from_secs(100);
    let node = Node::start();
    let image = node.import_probe();
    // The first process of the container's own PID namespace; of a shared one the child, which outlives it.
    let lives: Vec<(Life, i32)> = pods()
        .into_iter()
        .take(2)
        .map(|(what, pod)| {
            let life = Life::begin(&node, &image, &pod, &["tree", "1000"], 2);
            life.processes.iter().for_each(|pid| move_away(*pid, true));
            let held = life.processes[usize::from(what == "shared")];
            (life, held)
        })
        .collect();
    let held = Held::hold(lives.iter().map(|(_, pid)| *pid).collect());
    std::thread::scope(|scope| {
        for (life, pid) in &lives {
            let client = node.another().within(LIMIT);
            scope.spawn(move || {
                let names = |refused: Result<(), Status>| {
                    let refused = refused.expect_err("a process lives").to_string();
                    assert!(refused.contains(&format!("process {pid} does not end")), "{refused}");
                    assert!(host::is_alive(*pid), "it is not held");
                };
                // Twice: the first process of the container may have ended with the first call.
                for _ in 0..2 {
                    let ask = StopContainerRequest { container_id: life.id.clone(), timeout: 0 };
                    names(client.stop_container(ask).map(drop));
                }
                let ask = RemovePodSandboxRequest { pod_sandbox_id: life.pod_id.clone() };
                names(client.remove_pod_sandbox(ask).map(drop));
            });
        }
    });
    let (is_recovered, message) = recovered(&node);
    let is_named = lives.iter().any(|(_, pid)| message.contains(&format!("process {pid} does not end")));
    let cure = "check what they wait for (`cat /proc/PID/stack`, dmesg)";
    assert!(!is_recovered && is_named && message.contains(cure), "{message}");
    held.release();
    for (life, _) in &lives {
        life.remove(&node);
    }
    host::wait_until("the state of all pods is known", || recovered(&node).0);
    node.stop();
}

/// Finding F2: the first StopPodSandbox failed, and the next one succeeded because the daemon had forgotten the monitor.
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

/// Regression: the ID in the name of the other pod's cgroup was taken for that of a container without a record, and all that was
/// in this cgroup was killed, the other pod's monitor too.
#[test]
fn a_process_in_the_cgroup_of_another_pod_does_not_end_it() {
    let mut node = Node::start();
    let image = node.import_probe();
    for restarts in [false, true] {
        let moved = Life::begin(&node, &image, &host_pod("moved"), &["sleep", "forever"], 1);
        let kept = Life::begin(&node, &image, &host_pod("kept"), &["sleep", "forever"], 1);
        let count = move_into(moved.processes[0], &node, &kept.pod_id, |_| true);
        assert_eq!(count, host::cgroup_roots().len(), "each hierarchy");
        if restarts {
            node.kill9();
            node.launch();
        }
        moved.remove(&node);
        assert!(host::is_alive(kept.monitor) && !kept.are_gone(), "restarts: {restarts}");
        kept.remove(&node);
    }
    node.stop();
}

/// Regression: the removal failed with EBUSY as long as the other container ran. On a node with v2 alone a process is in one
/// cgroup, whose kill ends it.
#[test]
fn a_container_ends_although_a_process_of_another_is_in_its_cgroup_of_another_hierarchy() {
    let node = Node::start();
    let image = node.import_probe();
    let moved = Life::begin(&node, &image, &host_pod("moved"), &["sleep", "forever"], 1);
    let ended = Life::begin(&node, &image, &host_pod("ended"), &["sleep", "forever"], 1);
    let count = move_into(moved.processes[0], &node, &ended.id, |path| !is_tracking(path));
    assert_eq!(count, host::cgroup_roots().len() - 1, "each hierarchy but one");
    stop(&node, &ended);
    let ask = RemoveContainerRequest { container_id: ended.id.clone() };
    node.remove_container(ask).unwrap_or_else(|error| panic!("{error}\n{}", node.log()));
    assert!(host::is_alive(moved.monitor));
    ended.remove(&node);
    moved.remove(&node);
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

/// Findings F6 and F9: the monitor of such a pod ran on until the pod was removed, and with a PID file that cannot be read the pod
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

/// Finding F6: the file may name another process, with that one's start time if both were started within one tick. Regression: such a
/// process was killed in place of the monitor.
#[test]
fn a_damaged_pid_file_ends_no_other_process() {
    type Damage = fn(&str, i32) -> String;
    let damages: [(&str, Damage); 2] = [
        ("one bit of the PID", |text, _| {
            let (pid, rest) = text.split_once(' ').expect("a PID");
            format!("{} {rest}", pid.parse::<i32>().expect("a number") ^ 1)
        }),
        ("another process", |text, other| {
            let (_, rest) = text.split_once(' ').expect("a PID");
            let rest = rest.split_once(' ').map_or("\n", |(_, rest)| rest);
            let start = host::start_time(other).expect("it runs");
            format!("{other} {start} {rest}").replace(" \n", "\n")
        }),
    ];
    let mut node = Node::start();
    let image = node.import_probe();
    let mut other = Command::new("sleep").arg("1000").spawn().expect("sleep");
    for (what, damage) in damages {
        for has_record in [true, false] {
            let life = Life::begin(&node, &image, &host_pod("damaged"), &["sleep", "forever"], 1);
            node.kill9();
            let file = node.state().join("pods").join(&life.pod_id).join("monitor.pid");
            let text = fs::read_to_string(&file).expect("a file");
            fs::write(&file, damage(&text, other.id() as i32)).expect("our file");
            if !has_record {
                fs::remove_dir_all(node.root().join("pods").join(&life.pod_id)).expect("the record");
            }
            node.launch();
            host::wait_until(&format!("{what}, record: {has_record}: all end"), || {
                life.are_gone() && !host::is_alive(life.monitor)
            });
            if has_record {
                life.remove(&node);
            }
            assert!(other.try_wait().expect("our child").is_none(), "{what}: it was killed\n{}", node.log());
        }
    }
    other.kill().expect("our child");
    other.wait().expect("our child");
    node.stop();
}
