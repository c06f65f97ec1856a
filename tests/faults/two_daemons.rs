//! Several daemons on one machine. Of those with the same directories one serves. Two with their own directories may put their pods below one
//! cgroup parent: each cgroup is named by the ID of its pod or container, and a daemon ends only what its own directories name, so neither
//! disturbs the other.

use std::process::{Child, Command, Stdio};

use coracle_tests::cri::proto::{ContainerState, RemoveContainerRequest, StopContainerRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::request::{container, exec, host_pod};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A pod with a running container: the IDs of both, and the PID.
fn life(node: &Node, image: &str, name: &str) -> (String, String, i32) {
    let pod = host_pod(name);
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", image, &["sleep", "forever"], &pod), &pod);
    let pid = node.container_pid(&id);
    (pod_id, id, pid)
}

#[test]
fn two_daemons_with_one_cgroup_parent_leave_each_others_pods_alone() {
    let mut first = Node::start();
    let parent = first.cgroup_parent();
    // The last flag counts.
    let words = ["sh", "-c", r#"exec "$@" --cgroup-parent "$0""#, &parent];
    let wrapper = words.map(str::to_owned).to_vec();
    let mut second = Node::with(Options { wrapper, ..Options::default() });
    let images = [first.import_probe(), second.import_probe()];
    let (own, other) = (life(&first, &images[0], "first"), life(&second, &images[1], "second"));
    for pid in [own.2, other.2] {
        assert!(host::is_in_cgroup(pid, &parent), "{pid} is below {parent}");
    }
    let runs = |node: &Node, (_, id, pid): &(String, String, i32)| {
        assert!(host::is_alive(*pid), "{}", node.log());
        assert_eq!(node.container(id).state(), ContainerState::ContainerRunning);
        let answer = node.exec_sync(exec(id, &["true"], 30)).expect("an exec");
        assert_eq!(answer.exit_code, 0);
    };
    // Each recovers from a crash, and has its own pods only.
    second.kill9();
    second.launch();
    runs(&first, &own);
    first.kill9();
    first.launch();
    runs(&second, &other);
    // The end of a container and of a pod of one of them.
    let more = life(&second, &images[1], "more");
    let stop = StopContainerRequest { container_id: more.1.clone(), timeout: 0 };
    second.stop_container(stop).expect("a stop");
    second.remove_container(RemoveContainerRequest { container_id: more.1 }).expect("a removal");
    second.remove_pod(&more.0);
    runs(&first, &own);
    // A daemon that stops removes the parent only if there is no pod below it.
    first.remove_pod(&own.0);
    first.restart();
    runs(&second, &other);
    second.remove_pod(&other.0);
    second.restart();
    let own = life(&first, &images[0], "again");
    assert!(host::is_in_cgroup(own.2, &parent), "the parent is made again");
    second.restart();
    runs(&first, &own);
    second.stop();
    runs(&first, &own);
    first.stop();
}

/// A service manager, an administrator and a script may each start one after a crash.
#[test]
fn of_six_daemons_that_start_at_once_one_serves_and_the_others_name_it() {
    const DAEMONS: usize = 6;
    const ROUNDS: usize = 5;
    let mut node = Node::start();
    let image = node.import_probe();
    let (_, id, pid) = life(&node, &image, "witness");
    for round in 0..ROUNDS {
        node.kill9();
        let start = |_| {
            let mut command = Command::new(binaries().join("coracled"));
            command.args(node.flags()).stdout(Stdio::null()).stderr(Stdio::piped());
            command.spawn().expect("a daemon")
        };
        let mut all: Vec<Child> = (0..DAEMONS).map(start).collect();
        host::wait_until("all but one have ended", || {
            let ended = all.iter_mut().filter_map(|daemon| daemon.try_wait().expect("our child"));
            ended.count() == DAEMONS - 1
        });
        let is_serving = |daemon: &mut Child| daemon.try_wait().expect("our child").is_none();
        let at = all.iter_mut().position(is_serving).expect("one serves");
        let serving = all.swap_remove(at);
        let client = node.another();
        let answer = host::wait_for("it serves", || client.exec_sync(exec(&id, &["true"], 30)).ok());
        assert_eq!((answer.exit_code, host::is_alive(pid)), (0, true), "round {round}");
        for ended in all {
            let output = ended.wait_with_output().expect("our child");
            let said = String::from_utf8_lossy(&output.stderr);
            let named = format!("another daemon runs on this state directory: process {}", serving.id());
            assert!(!output.status.success() && said.contains(&named), "round {round}: {said}");
        }
        kill(Pid::from_raw(serving.id() as i32), Signal::SIGTERM).expect("ours");
        assert!(serving.wait_with_output().expect("our child").status.success(), "round {round}");
        node.launch();
        assert_eq!(node.container_pid(&id), pid, "round {round}");
    }
    node.stop();
}
