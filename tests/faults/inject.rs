//! Faults at the system calls of the operations of a pod's life, in the real programs: the daemon is killed ([`kill`]), or a call of
//! the daemon, of a monitor or of a worker fails ([`errors`]). `make test` tries some system calls of each operation, `make inject`
//! every one. Pulls of what changed are also killed, and lose their power, at random moments ([`partial`]), and have errors ([`pulls`]); so do
//! pulls that are judged, and additional stores ([`judged`]).

#[cfg(target_arch = "x86_64")]
mod errnos;
#[cfg(target_arch = "x86_64")]
mod errors;
mod judged;
mod kill;
#[cfg(target_arch = "x86_64")]
mod operations;
#[cfg(target_arch = "x86_64")]
mod others;
mod partial;
#[cfg(target_arch = "x86_64")]
mod pulls;
mod repairs;
mod trace;

use std::fmt::Display;

use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandboxConfig,
    PodSandboxState,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, host_pod, run};
use tonic::{Code, Status};

fn is_whole() -> bool {
    std::env::var_os("CORACLE_INJECT").is_some()
}

/// The client's retry. On a busy machine a monitor may take longer than a start waits for it; calls for its pod answer
/// UNAVAILABLE until then, and a kubelet repeats them. `what` names the case if the retry fails.
#[track_caller]
fn retry<T>(what: impl Display, mut call: impl FnMut() -> Result<T, Status>) -> T {
    let answer = host::wait_within(host::patience(), || match call() {
        Err(error) if error.code() == Code::Unavailable => None,
        answer => Some(answer),
    });
    answer.unwrap_or_else(call).unwrap_or_else(|error| panic!("{what}: the retry: {error}"))
}

/// A node with a pod that must not notice anything.
struct Fixture {
    node: Node,
    image: String,
    pod_of: fn(&str) -> PodSandboxConfig,
    bystander: String,
    bystander_pid: i32,
    /// The kernel objects of the machine while only the bystander exists.
    usual: Vec<String>,
    number: u64,
}

impl Fixture {
    fn with(node: Node, pod_of: fn(&str) -> PodSandboxConfig) -> Fixture {
        let image = node.import_probe();
        let pod = host_pod("bystander");
        let pod_id = node.run_pod(&pod);
        let config = container("one", &image, &["sleep", "forever"], &pod);
        let bystander = node.run_container(&pod_id, &config, &pod);
        let bystander_pid = node.container_pid(&bystander);
        let mut usual = node.rests();
        usual.sort();
        Fixture { node, image, pod_of, bystander, bystander_pid, usual, number: 0 }
    }

    /// A node whose pods are on the node's network.
    fn on_host() -> Fixture {
        Fixture::with(Node::start(), host_pod)
    }

    /// A node whose pods are on the default network.
    fn on_bridge() -> Fixture {
        let options = Options { config: DEFAULT_NETWORK.into(), ..Options::default() };
        Fixture::with(Node::with(options), bridge_pod)
    }

    fn fresh_pod(&mut self) -> PodSandboxConfig {
        self.number += 1;
        let name = format!("pod{}", self.number);
        let mut pod = (self.pod_of)(&name);
        pod.log_directory = self.node.log_directory(&name);
        pod
    }

    fn config(&self, pod: &PodSandboxConfig, words: &[&str]) -> ContainerConfig {
        container("one", &self.image, words, pod)
    }

    /// The bystander runs, and nothing else is left.
    fn check(&self, what: &str) {
        let status = self.node.container(&self.bystander);
        assert_eq!(status.state(), ContainerState::ContainerRunning, "{what}");
        assert_eq!(self.node.container_pid(&self.bystander), self.bystander_pid, "{what}");
        let is_usual = || {
            let mut rests = self.node.rests();
            rests.sort();
            (rests == self.usual).then_some(())
        };
        let is_clean = host::wait_within(host::patience(), is_usual).is_some();
        assert!(is_clean, "{what}: {:#?} instead of {:#?}", self.node.rests(), self.usual);
    }

    fn containers(&self, pod_id: &str) -> Vec<(String, ContainerState)> {
        let listed = self.node.list_containers(ListContainersRequest::default()).expect("list").containers;
        let own = listed.into_iter().filter(|container| container.pod_sandbox_id == pod_id);
        own.map(|container| (container.id.clone(), container.state())).collect()
    }

    /// The client's retry makes the pod, whatever an earlier daemon had created of it, and there is only one.
    fn is_made_again(&self, pod: &PodSandboxConfig, what: &str) {
        let made = self.node.run_pod_sandbox(run(pod));
        let id = made.unwrap_or_else(|error| panic!("{what}: the retry: {error}")).pod_sandbox_id;
        let name = &pod.metadata.as_ref().expect("a name").name;
        let pods = self.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        let named = pods.iter().filter(|pod| pod.metadata.as_ref().is_some_and(|other| other.name == *name));
        let named: Vec<_> = named.map(|pod| (pod.id.as_str(), pod.state())).collect();
        assert_eq!(named, [(id.as_str(), PodSandboxState::SandboxReady)], "{what}");
        self.node.remove_pod(&id);
    }
}
