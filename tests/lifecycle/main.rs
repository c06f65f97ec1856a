//! The life of pods and containers as a kubelet lives it: every call over the real socket, every claim checked on real
//! kernel objects. Files stand in the order of life.
#![forbid(unsafe_code)]

mod containers;
mod exec;
mod inside;
mod limits;
mod logs;
mod namespaces;
mod pods;
mod refuse;
mod service;
mod stop;

use coracle_tests::cri::proto::{ContainerConfig, PodSandboxConfig};
use coracle_tests::node::Node;
use coracle_tests::request;

/// A node with the probe's image and one host-network pod, for tests that are about a container.
pub(crate) struct Stage {
    pub(crate) node: Node,
    pub(crate) image: String,
    pub(crate) pod: PodSandboxConfig,
    pub(crate) pod_id: String,
}

impl Stage {
    /// Set for a container.
    #[track_caller]
    pub(crate) fn set() -> Stage {
        Stage::with(request::host_pod("stage"))
    }

    /// Set with this pod.
    #[track_caller]
    pub(crate) fn with(mut pod: PodSandboxConfig) -> Stage {
        let node = Node::start();
        let image = node.import_probe();
        pod.log_directory = node.log_directory("stage");
        let pod_id = node.run_pod(&pod);
        Stage { node, image, pod, pod_id }
    }

    /// A configuration that runs the probe with these words.
    pub(crate) fn config(&self, name: &str, words: &[&str]) -> ContainerConfig {
        request::container(name, &self.image, words, &self.pod)
    }

    /// Creates a container.
    #[track_caller]
    pub(crate) fn create(&self, config: &ContainerConfig) -> String {
        self.node.create(&self.pod_id, config, &self.pod)
    }

    /// Creates and starts one.
    #[track_caller]
    pub(crate) fn run(&self, config: &ContainerConfig) -> String {
        self.node.run_container(&self.pod_id, config, &self.pod)
    }

    /// Runs the probe to its end in a container of its own; gives what it wrote.
    #[track_caller]
    pub(crate) fn output(&self, words: &[&str], change: impl FnOnce(&mut ContainerConfig)) -> String {
        let mut config = self.config(&format!("c{}", request::fresh()), words);
        change(&mut config);
        let id = self.run(&config);
        let status = self.node.exited(&id);
        assert_eq!(status.exit_code, 0, "{words:?} wrote: {}", self.node.output(&id));
        self.node.output(&id)
    }
}
