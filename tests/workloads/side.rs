//! A runtime with a kubelet of its own, and all that pods make on the machine: the namespaces have no other tenant.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{Container, ContainerState, PodSandbox, PodSandboxState};
use coracle_tests::host;
use coracle_tests::kubelet::{Kubelet, Numbers, Place};
use coracle_tests::node::Node;
use coracle_tests::peer::Peer;

/// A runtime and its kubelet.
pub(crate) struct Side<'a> {
    pub(crate) name: &'static str,
    pub(crate) cri: &'a Cri,
    pub(crate) kubelet: Kubelet,
    node: &'a Node,
}

impl<'a> Side<'a> {
    /// coracle.
    pub(crate) fn coracle(node: &'a Node) -> Side<'a> {
        Side::new("coracle", node, node, node.socket())
    }

    /// containerd, whose pods are below the node's cgroup, too.
    pub(crate) fn containerd(node: &'a Node, peer: &'a Peer) -> Side<'a> {
        Side::new("containerd", peer, node, peer.socket())
    }

    fn new(name: &'static str, cri: &'a Cri, node: &'a Node, socket: PathBuf) -> Side<'a> {
        let folder = node.folder().join(format!("kubelet-{name}"));
        let place = Place { folder, socket, parent: node.cgroup_parent(), log_max: "10Mi" };
        let kubelet = Kubelet::start(&place, &Numbers::Cri);
        kubelet.wait("the kubelet answers", || kubelet.get("/pods"));
        Side { name, cri, kubelet, node }
    }

    /// A directory for the files that pods of a case share with the node; other users may write there.
    pub(crate) fn data(&self, case: &str) -> PathBuf {
        let folder = self.node.folder().join(format!("data-{}-{case}", self.name));
        fs::create_dir_all(&folder).expect("a directory");
        folder
    }

    /// The sandboxes of a pod.
    pub(crate) fn sandboxes(&self, pod: &str) -> Vec<PodSandbox> {
        let items = self.cri.list_pod_sandbox(Default::default()).expect("a list").items;
        let name = format!("{pod}-node");
        items.into_iter().filter(|one| one.metadata.as_ref().is_some_and(|data| data.name == name)).collect()
    }

    /// The running containers of a pod, by name.
    pub(crate) fn running(&self, pod: &str) -> Vec<Container> {
        let sandboxes = self.sandboxes(pod);
        let is_of = |one: &Container| sandboxes.iter().any(|sandbox| sandbox.id == one.pod_sandbox_id);
        let containers = self.cri.list_containers(Default::default()).expect("a list").containers;
        let is_running = |one: &Container| one.state() == ContainerState::ContainerRunning;
        let mut running: Vec<_> =
            containers.into_iter().filter(|one| is_of(one) && is_running(one)).collect();
        running.sort_by_key(|one| one.metadata.as_ref().map(|data| data.name.clone()));
        running
    }

    /// Removes the sandboxes of a pod after its end; the kubelet would within a minute.
    pub(crate) fn remove(&self, pod: &str) {
        let is_ready = |one: &PodSandbox| one.state() == PodSandboxState::SandboxReady;
        self.kubelet.wait("the pod's end", || (!self.sandboxes(pod).iter().any(is_ready)).then_some(()));
        for sandbox in self.sandboxes(pod) {
            self.cri.remove_pod(&sandbox.id);
        }
    }

    /// Logs of the containers of a pod, including containers before a restart.
    pub(crate) fn log(&self, pod: &str) -> String {
        let mut text = String::new();
        let logs = self.kubelet.folder().join("logs");
        for folder in
            entries(&logs).filter(|path| path.display().to_string().contains(&format!("_{pod}-node_")))
        {
            for file in entries(&folder).flat_map(|container| entries(&container).collect::<Vec<_>>()) {
                text += &fs::read_to_string(file).unwrap_or_default();
            }
        }
        text
    }

    /// The last lines of these logs.
    pub(crate) fn log_end(&self, pod: &str) -> String {
        const LINES: usize = 20;
        let log = self.log(pod);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// All that pods make on the machine, as far as it exists now; bridges are kept for the next pod by design.
    pub(crate) fn objects(&self) -> BTreeSet<String> {
        let mut objects = BTreeSet::new();
        let mut add = |what: &str, name: String| objects.insert(format!("{what} {name}"));
        for line in host::mounts("/") {
            add("mount", line.split(' ').nth(4).unwrap_or_default().to_owned());
        }
        for link in host::links("").into_iter().filter(|link| !link.starts_with("ct")) {
            add("link", link);
        }
        for process in fs::read_dir("/proc").expect("proc").flatten() {
            let name = process.file_name().to_string_lossy().into_owned();
            if let (Ok(_), Ok(command)) =
                (name.parse::<i32>(), fs::read_to_string(process.path().join("comm")))
            {
                add("process", format!("{name} {}", command.trim()));
            }
        }
        for cgroup in host::cgroups_below(&self.node.cgroup_parent()) {
            let name = cgroup.display().to_string();
            if name.contains("/pod") {
                add("cgroup", name);
            }
        }
        let kubelet = self.kubelet.folder();
        let folders = [
            PathBuf::from("/run/netns"),
            kubelet.join("root/pods"),
            self.node.root().join("pods"),
            self.node.state().join("pods"),
        ];
        for path in folders.iter().flat_map(|folder| entries(folder).collect::<Vec<_>>()) {
            add("file", path.display().to_string());
        }
        for lease in self.node.leases() {
            add("lease", lease);
        }
        objects
    }
}

/// The entries of a directory, which may be missing.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}
