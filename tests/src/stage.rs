//! A node with one pod, for tests that are about a container.

use crate::cri::proto::{ContainerConfig, PodSandboxConfig};
use crate::node::Node;
use crate::request;

/// A node with the probe's image and one host-network pod, for tests that are about a container.
pub struct Stage {
    /// The node.
    pub node: Node,
    /// The probe's image.
    pub image: String,
    /// The pod as it was asked for.
    pub pod: PodSandboxConfig,
    /// Its id.
    pub pod_id: String,
}

impl Stage {
    /// Set for a container.
    #[track_caller]
    pub fn set() -> Stage {
        Stage::with(request::host_pod("stage"))
    }

    /// Set with this pod.
    #[track_caller]
    pub fn with(pod: PodSandboxConfig) -> Stage {
        Stage::on(Node::start(), pod)
    }

    /// Set with this pod on this node.
    #[track_caller]
    pub fn on(node: Node, mut pod: PodSandboxConfig) -> Stage {
        let image = node.import_probe();
        pod.log_directory = node.log_directory("stage");
        let pod_id = node.run_pod(&pod);
        Stage { node, image, pod, pod_id }
    }

    /// A configuration that runs the probe with these words.
    pub fn config(&self, name: &str, words: &[&str]) -> ContainerConfig {
        request::container(name, &self.image, words, &self.pod)
    }

    /// Creates a container.
    #[track_caller]
    pub fn create(&self, config: &ContainerConfig) -> String {
        self.node.create(&self.pod_id, config, &self.pod)
    }

    /// Creates and starts one.
    #[track_caller]
    pub fn run(&self, config: &ContainerConfig) -> String {
        self.node.run_container(&self.pod_id, config, &self.pod)
    }

    /// Runs the probe to its end in a container of its own; gives what it wrote.
    #[track_caller]
    pub fn output(&self, words: &[&str], change: impl FnOnce(&mut ContainerConfig)) -> String {
        let mut config = self.config(&format!("c{}", request::fresh()), words);
        change(&mut config);
        let id = self.run(&config);
        let status = self.node.exited(&id);
        assert_eq!(status.exit_code, 0, "{words:?} wrote: {}", self.node.output(&id));
        self.node.output(&id)
    }
}
