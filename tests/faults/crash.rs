//! `kill -9` of the daemon at thirty moments of a pod's lifecycle. The moments are fractions of the time that
//! an undisturbed lifecycle takes, and not places in the code.

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandboxConfig, RemovePodSandboxRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, create, exec, host_pod, run};

/// Number of moments.
const MOMENTS: u32 = 30;

/// The complete lifecycle of a pod; returns the first error, which a killed daemon causes.
fn live(client: &Cri, image: &str, pod: &PodSandboxConfig) -> Result<(), tonic::Status> {
    let pod_sandbox_id = client.run_pod_sandbox(run(pod))?.pod_sandbox_id;
    let config = container("one", image, &["ticks", "1"], pod);
    let container_id = client.create_container(create(&pod_sandbox_id, &config, pod))?.container_id;
    client.start_container(StartContainerRequest { container_id: container_id.clone() })?;
    client.exec_sync(exec(&container_id, &["true"], 5))?;
    client.stop_container(StopContainerRequest { container_id, timeout: 0 })?;
    client.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() })?;
    client.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id }).map(drop)
}

fn thirty_moments(mut node: Node, pod_of: fn(&str) -> PodSandboxConfig) {
    let image = node.import_probe();
    // A pod that must not be affected.
    let mut bystander = host_pod("bystander");
    bystander.log_directory = node.log_directory("bystander");
    let bystander_id = node.run_pod(&bystander);
    let config = container("ticks", &image, &["ticks", "2"], &bystander);
    let watch = node.run_container(&bystander_id, &config, &bystander);
    let pid = node.container_pid(&watch);
    let born = host::start_time(pid);

    let begin = Instant::now();
    live(&node.another(), &image, &pod_of("calm")).expect("undisturbed");
    let whole = begin.elapsed();
    for moment in 0..MOMENTS {
        let pod = pod_of(&format!("moment{moment}"));
        let client = node.another();
        std::thread::scope(|scope| {
            let name = image.clone();
            let pod = pod.clone();
            scope.spawn(move || live(&client, &name, &pod));
            // The duration is the test's input, not a wait for a condition.
            std::thread::sleep(whole * moment / MOMENTS + Duration::from_micros(137 * u64::from(moment)));
            node.kill9();
        });
        node.launch();
        let containers = node.list_containers(ListContainersRequest::default()).expect("list").containers;
        let seen = containers.iter().find(|container| container.id == watch).expect("the bystander is known");
        assert_eq!(seen.state(), ContainerState::ContainerRunning, "moment {moment}");
        assert_eq!((node.container_pid(&watch), host::start_time(pid)), (pid, born), "moment {moment}");
        // Unfinished operations are completed or undone: the client's retry succeeds.
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        for other in pods.into_iter().filter(|pod| pod.id != bystander_id) {
            node.remove_pod(&other.id);
        }
        live(&node, &image, &pod).unwrap_or_else(|error| panic!("moment {moment}: {error}"));
        host::wait_until(&format!("moment {moment} leaves only the bystander"), || {
            node.monitors().len() == 1 && node.leases().is_empty()
        });
    }
    let stop = StopContainerRequest { container_id: watch.clone(), timeout: 0 };
    node.stop_container(stop).expect("stop");
    for (index, line) in node.output(&watch).lines().enumerate() {
        assert_eq!(line, format!("tick {index}"), "the bystander's log has no gap");
    }
    node.stop();
}

#[test]
#[ignore = "the same with another network: make test-all PARTS=slow"]
fn kill_at_thirty_moments_on_the_hosts_network() {
    thirty_moments(Node::start(), host_pod);
}

#[test]
#[ignore = "the same with another network: make test-all PARTS=slow"]
fn kill_at_thirty_moments_on_the_bridge() {
    thirty_moments(Node::with_bridge(), bridge_pod);
}

#[test]
fn kill_at_thirty_moments_on_the_default_network() {
    thirty_moments(Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() }), bridge_pod);
}

#[test]
fn an_exit_while_the_daemon_is_down_is_reported_afterwards() {
    let mut node = Node::start();
    let image = node.import_probe();
    let mut pod = host_pod("meanwhile");
    pod.log_directory = node.log_directory("meanwhile");
    let pod_id = node.run_pod(&pod);
    let config = container("one", &image, &["trap", "23"], &pod);
    let id = node.run_container(&pod_id, &config, &pod);
    let pid = node.container_pid(&id);
    host::wait_until("it waits for its signal", || node.output(&id).contains("trapping"));
    node.kill9();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM)
        .expect("root may");
    // Waits until the exit is recorded: the monitor determines the time when it reaps the process, and then
    // sleeps.
    let monitor = node.monitors()[0].pid;
    host::wait_until("it ends, and its monitor knows", || {
        let state = std::fs::read_to_string(format!("/proc/{monitor}/stat")).expect("the monitor lives");
        !Path::new(&format!("/proc/{pid}")).exists() && state.contains(") S ")
    });
    let ended = std::time::SystemTime::now();
    node.launch();
    let status = node.exited(&id);
    assert_eq!((status.exit_code, status.reason.as_str()), (23, "Error"));
    let late = ended.duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos() as i64;
    assert!(status.finished_at <= late, "the time of the exit, not of the question");
    node.stop();
}

#[test]
fn a_pod_whose_monitor_died_is_not_ready() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("headless");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let monitors = node.monitors();
    assert_eq!(monitors.len(), 1);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(monitors[0].pid), nix::sys::signal::Signal::SIGKILL)
        .expect("root may");
    host::wait_until("the loss is seen", || node.container(&id).state() != ContainerState::ContainerRunning);
    node.remove_pod(&pod_id);
    node.stop();
}

/// Regression: execs of a daemon had the numbers and the cgroups of those of its predecessor, so they failed as long
/// as these were running.
#[test]
fn execs_of_a_killed_daemon_do_not_disturb_those_of_the_next() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("numbers");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let monitor = node.monitors()[0].pid;
    let asked: Vec<_> = (0..3)
        .map(|_| {
            let (client, request) = (node.another(), exec(&id, &["sleep", "forever"], 0));
            std::thread::spawn(move || client.exec_sync(request))
        })
        .collect();
    host::wait_until("the commands run", || {
        let children = std::fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children"));
        let children = children.expect("the monitor runs");
        let is_program = |pid: &&str| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|words| words.ends_with(b"sleep\0forever\0"))
        };
        children.split_whitespace().filter(is_program).count() == 4
    });
    node.kill9();
    node.launch();
    for call in asked {
        call.join().expect("it ends").expect_err("the daemon was killed");
    }
    for _ in 0..5 {
        node.exec_sync(exec(&id, &["true"], 5)).expect("it has a number of its own");
    }
    node.stop();
}
