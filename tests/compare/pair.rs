//! containerd and coracle side by side: the same requests, images and network plugins, and directories of their own.

use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{ContainerConfig, PodSandboxConfig};
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::peer::Peer;
use coracle_tests::registry::Registry;
use coracle_tests::request::{create, pull};
use tonic::Status;

/// Both runtimes, and the registry from which both pull.
pub(crate) struct Pair {
    ours: Node,
    theirs: Peer,
    pub(crate) registry: Registry,
    /// The scripted registry, whose proxy both have in their environment.
    pub(crate) odd: crate::registries::Server,
}

/// A value of each side.
#[derive(Debug, Clone, Default)]
pub(crate) struct Both<T> {
    pub(crate) ours: T,
    pub(crate) theirs: T,
}

impl Pair {
    /// Starts both.
    pub(crate) fn start() -> Pair {
        let odd = crate::registries::Server::start();
        let proxy = format!("http://{}", odd.proxy());
        let environment = ["HTTP_PROXY", "HTTPS_PROXY"].map(|name| (name.to_owned(), proxy.clone())).to_vec();
        let ours = Node::with(Options { bridge: true, environment, ..Options::default() });
        let registry = Registry::start(ours.folder());
        let theirs = Peer::beside(&ours, Some(&registry));
        Pair { ours, theirs, registry, odd }
    }

    /// The clients of both.
    pub(crate) fn both(&self) -> Both<&Cri> {
        Both { ours: &self.ours, theirs: &self.theirs }
    }

    /// Does the same with each side.
    pub(crate) fn each<T>(&self, mut act: impl FnMut(&Cri) -> T) -> Both<T> {
        let theirs = act(&self.theirs);
        Both { ours: act(&self.ours), theirs }
    }

    /// The node of coracle.
    pub(crate) fn ours(&self) -> &Node {
        &self.ours
    }

    /// The directories of both, each with a `certs.d` for hosts.toml.
    pub(crate) fn folders(&self) -> Both<PathBuf> {
        Both { ours: self.ours.folder().to_owned(), theirs: self.theirs.folder().to_owned() }
    }

    /// containerd.
    pub(crate) fn theirs(&self) -> &Peer {
        &self.theirs
    }

    /// The image of the probe, pulled by both; returns its name.
    pub(crate) fn probe(&self) -> String {
        let image = Image::probe(&self.ours.probe(), "compared");
        self.registry.push(&image, "probe", "1");
        let name = self.registry.name("probe", "1");
        let pulled = self.each(|cri| cri.pull_image(pull(&name)).map(|_| ()));
        pulled.ours.expect("coracle pulls");
        pulled.theirs.expect("containerd pulls");
        name
    }

    /// A directory for the logs of a pod.
    pub(crate) fn log_directory(&self, pod: &str) -> String {
        self.ours.log_directory(pod)
    }

    /// Removes all pods, ends both daemons, and fails if something of them is left.
    pub(crate) fn stop(self) {
        drop(self.registry);
        self.theirs.stop();
        let left = self.ours.folder().with_extension("peer");
        self.ours.stop();
        let _ = fs::remove_dir_all(left);
    }
}

/// Runs a pod with one container until it ends or `ready` says so; returns its id.
pub(crate) fn start(
    cri: &Cri,
    pod_id: &str,
    config: &ContainerConfig,
    pod: &PodSandboxConfig,
) -> Result<String, Status> {
    let id = cri.create_container(create(pod_id, config, pod))?.container_id;
    let request = coracle_tests::cri::proto::StartContainerRequest { container_id: id.clone() };
    cri.start_container(request)?;
    Ok(id)
}
