//! The simulated node against the real one. `compared.txt` holds random histories of calls, with the answers and the lists after each
//! call as the engine gives them on the simulated node (`runtime/engine/tests/simulation/compared.rs`). Here the same calls go to the
//! daemon, with real pods and containers.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandboxConfig, PodSandboxState,
    RemoveContainerRequest, RemovePodSandboxRequest, StartContainerRequest, StopContainerRequest,
    StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, create, host_pod, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Status;

const HISTORIES: &str = include_str!("compared.txt");

/// The ID in a call about what was never made.
const NO_ID: &str = "00";

/// Two histories in a row may not see each other's names: each has its own configurations.
struct Course<'a> {
    node: &'a mut Node,
    image: &'a str,
    pods: [PodSandboxConfig; 2],
    /// The ID of each label: p0, p1, c0 to c3.
    ids: BTreeMap<String, String>,
}

fn answer<T>(result: Result<T, Status>) -> String {
    match result {
        Ok(_) => "Ok".to_owned(),
        Err(status) => format!("{:?}", status.code()),
    }
}

impl Course<'_> {
    fn of(&self, label: &str) -> String {
        self.ids.get(label).cloned().unwrap_or_else(|| NO_ID.repeat(32))
    }

    fn made(&mut self, label: &str, result: Result<String, Status>) -> String {
        match result {
            Ok(id) => {
                let before = self.ids.insert(label.to_owned(), id.clone());
                if before == Some(id) { "Ok, as before" } else { "Ok, new" }.to_owned()
            }
            Err(status) => format!("{:?}", status.code()),
        }
    }

    /// Pod p0 has a network of its own, p1 the node's; containers c2 and c3 exit by themselves.
    fn perform(&mut self, call: &str) -> String {
        let Some((verb, label)) = call.split_once(' ') else {
            assert_eq!(call, "restart");
            self.node.restart();
            return "Ok".to_owned();
        };
        let number: usize = label[1..].parse().expect("a number");
        let id = self.of(label);
        match verb {
            "run" => {
                let made = self.node.run_pod_sandbox(run(&self.pods[number]));
                self.made(label, made.map(|made| made.pod_sandbox_id))
            }
            "create" => {
                let (pod, pod_id) = (&self.pods[number % 2], self.of(&format!("p{}", number % 2)));
                let words: &[&str] = if number >= 2 { &["exit", "3"] } else { &["sleep", "forever"] };
                let config = container(label, self.image, words, pod);
                let made = self.node.create_container(create(&pod_id, &config, pod));
                self.made(label, made.map(|made| made.container_id))
            }
            "start" => answer(self.node.start_container(StartContainerRequest { container_id: id })),
            "stop" => answer(self.node.stop_container(StopContainerRequest { container_id: id, timeout: 0 })),
            "remove" => answer(self.node.remove_container(RemoveContainerRequest { container_id: id })),
            "stop-pod" => answer(self.node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id })),
            "remove-pod" => {
                answer(self.node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id }))
            }
            "kill-monitor" => self.kill_monitor(&id),
            other => panic!("no call is named {other}"),
        }
    }

    fn kill_monitor(&self, pod: &str) -> String {
        let file = std::fs::read_to_string(self.node.state().join("pods").join(pod).join("monitor.pid"));
        let pid = file.ok().and_then(|text| text.split_whitespace().next()?.parse::<i32>().ok());
        match pid.filter(|pid| self.node.monitors().iter().any(|monitor| monitor.pid == *pid)) {
            Some(pid) => {
                kill(Pid::from_raw(pid), Signal::SIGKILL).expect("root may");
                "Ok".to_owned()
            }
            None => "none".to_owned(),
        }
    }

    /// Lists pods and containers as `LABEL=STATE`.
    fn lists(&self) -> String {
        let mut listed = BTreeMap::new();
        let pods =
            self.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("the daemon lists pods");
        for pod in pods.items {
            let state = if pod.state() == PodSandboxState::SandboxReady { "ready" } else { "notready" };
            listed.insert(pod.id, state.to_owned());
        }
        let containers = self.node.list_containers(ListContainersRequest::default());
        for container in containers.expect("the daemon lists containers").containers {
            let state = match container.state() {
                ContainerState::ContainerCreated => "created".to_owned(),
                ContainerState::ContainerRunning => "running".to_owned(),
                ContainerState::ContainerExited => {
                    format!("exited:{}", self.node.container(&container.id).exit_code)
                }
                ContainerState::ContainerUnknown => "unknown".to_owned(),
            };
            listed.insert(container.id, state);
        }
        let known = self.ids.iter().filter_map(|(label, id)| Some(format!("{label}={}", listed.remove(id)?)));
        let mut words: Vec<String> = known.collect();
        words.extend(listed.values().map(|state| format!("other={state}")));
        words.join(" ")
    }

    /// Makes a call and compares. What happens after the answer is waited for: the exit of a program that ends by itself, and the
    /// end of a monitor.
    fn compare(&mut self, line: &str) {
        let (call, rest) = line.split_once(" -> ").expect("CALL -> ANSWER | LISTS");
        let (expected, lists) = rest.split_once(" |").expect("CALL -> ANSWER | LISTS");
        let answer = self.perform(call);
        assert_eq!(answer, expected, "{line}\n{}", self.node.log());
        let is_later = call.starts_with("start") || call.starts_with("kill-monitor");
        let mut found = self.lists();
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while is_later && found != lists.trim_start() && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            found = self.lists();
        }
        assert_eq!(found, lists.trim_start(), "{line}\n{}", self.node.log());
    }
}

#[test]
fn the_real_node_answers_like_the_simulated_one() {
    host::require_root();
    let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let image = node.import_probe();
    let (mut histories, mut calls) = (0, 0);
    for history in HISTORIES.split("\n\n") {
        let (title, lines) = history.split_once('\n').expect("a title and calls");
        println!("{title}");
        let pods = [bridge_pod("compared0"), host_pod("compared1")];
        let mut course = Course { node: &mut node, image: &image, pods, ids: BTreeMap::new() };
        for line in lines.lines() {
            println!("  {line}");
            course.compare(line);
            calls += 1;
        }
        let pods =
            node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("the daemon lists pods").items;
        pods.iter().for_each(|pod| node.remove_pod(&pod.id));
        histories += 1;
    }
    assert!(histories >= 20 && calls >= 500, "{histories} histories, {calls} calls");
    node.stop();
}
