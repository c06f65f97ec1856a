//! A fixture for tests of containers: a node with one pod.

use crate::cri::proto::{ContainerConfig, PodSandboxConfig};
use crate::node::Node;
use crate::request;

/// A node with the probe's image and one host-network pod.
pub struct PodFixture {
    /// The node on which the pod runs.
    pub node: Node,
    /// Name of the probe's image.
    pub image: String,
    /// The configuration of the pod.
    pub pod: PodSandboxConfig,
    /// ID of the pod sandbox.
    pub pod_id: String,
}

impl PodFixture {
    /// Creates a fixture with a host-network pod.
    #[track_caller]
    pub fn start() -> PodFixture {
        PodFixture::with(request::host_pod("fixture"))
    }

    /// Creates a fixture with this pod on a new node.
    #[track_caller]
    pub fn with(pod: PodSandboxConfig) -> PodFixture {
        PodFixture::on(Node::start(), pod)
    }

    /// Creates a fixture with this pod on an existing node.
    #[track_caller]
    pub fn on(node: Node, mut pod: PodSandboxConfig) -> PodFixture {
        let image = node.import_probe();
        pod.log_directory = node.log_directory("fixture");
        let pod_id = node.run_pod(&pod);
        PodFixture { node, image, pod, pod_id }
    }

    /// Configuration of a container that runs the probe with these arguments.
    pub fn config(&self, name: &str, words: &[&str]) -> ContainerConfig {
        request::container(name, &self.image, words, &self.pod)
    }

    /// Creates a container; returns its ID.
    #[track_caller]
    pub fn create(&self, config: &ContainerConfig) -> String {
        self.node.create(&self.pod_id, config, &self.pod)
    }

    /// Creates and starts a container; returns its ID.
    #[track_caller]
    pub fn run(&self, config: &ContainerConfig) -> String {
        self.node.run_container(&self.pod_id, config, &self.pod)
    }

    /// Runs the probe with these arguments in a new container until it ends; returns its output.
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
