//! Objects on the machine that belong to no pod of the runtime's lists. All pods of these clusters have a network
//! namespace, an address and a link, so that their numbers must be equal, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::proto::{
    Container, ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandbox, PodSandboxState,
};
use coracle_tests::host;

use crate::cluster::Cluster;

/// Length of the ID of a pod or container.
const ID_LENGTH: usize = 64;

/// Pods and containers of the runtime's lists.
pub(crate) struct Listed {
    /// Pods by UID and ID.
    pub(crate) sandboxes: Vec<(String, String)>,
    /// IDs of containers.
    pub(crate) containers: Vec<String>,
    /// Number of sandboxes that are ready.
    pub(crate) ready: usize,
    /// Descriptions of sandboxes that are not ready and of containers that do not run, if their pod has no other one. A
    /// kubelet keeps the last container of a pod that was replaced (its flag `--maximum-dead-containers-per-container`).
    pub(crate) ended: Vec<String>,
}

/// The lists of the runtime.
pub(crate) fn listed(cluster: &Cluster) -> Listed {
    let mut ended = Vec::new();
    let sandboxes = cluster.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("a list").items;
    let containers =
        cluster.node.list_containers(ListContainersRequest::default()).expect("a list").containers;
    let uid = |one: &PodSandbox| one.metadata.as_ref().map(|about| about.uid.clone());
    let is_ready = |one: &&PodSandbox| one.state() == PodSandboxState::SandboxReady;
    let ready: Vec<_> = sandboxes.iter().filter(is_ready).map(uid).collect();
    for one in sandboxes.iter().filter(|one| !ready.contains(&uid(one))) {
        let name = one.metadata.as_ref().map_or("", |about| &about.name);
        ended.push(format!("sandbox {:.13} of {name} is not ready", one.id));
    }
    let runs = |one: &&Container| one.state() == ContainerState::ContainerRunning;
    let uids: BTreeMap<&String, Option<String>> = sandboxes.iter().map(|one| (&one.id, uid(one))).collect();
    let pod_of = |one: &Container| uids.get(&one.pod_sandbox_id);
    let running: BTreeSet<_> = containers.iter().filter(runs).map(pod_of).collect();
    for one in containers.iter().filter(|one| !running.contains(&pod_of(one))) {
        ended.push(format!("container {:.13} is {}", one.id, one.state().as_str_name()));
    }
    let ready = ready.len();
    let sandboxes = sandboxes.into_iter().map(|one| (one.metadata.unwrap_or_default().uid, one.id)).collect();
    Listed { sandboxes, containers: containers.into_iter().map(|one| one.id).collect(), ready, ended }
}

/// Names of objects that belong to none of the listed pods and containers.
pub(crate) fn strays(cluster: &Cluster, listed: &Listed) -> Vec<String> {
    let node = &cluster.node;
    let ids: BTreeSet<&str> =
        listed.sandboxes.iter().map(|(_, id)| id).chain(&listed.containers).map(String::as_str).collect();
    let is_known = |text: &str| id_in(text).is_none_or(|id| ids.contains(id));
    let mut strays = Vec::new();
    let mut look = |kind: &str, found: Vec<String>| {
        strays.extend(found.into_iter().filter(|text| !is_known(text)).map(|text| format!("{kind} {text}")));
    };
    look("mount", host::mounts(&format!("{}/", node.folder().display())));
    let cgroups = host::cgroups_below(&node.cgroup_parent());
    look("cgroup", cgroups.iter().map(|path| path.display().to_string()).collect());
    look("network namespace", entries("/run/netns".into()));
    look("record", entries(node.root().join("pods")));
    look("state", entries(node.state().join("pods")));
    let pods = listed.ready;
    let links = host::links(&node.bridge()).into_iter().filter(|link| *link != node.bridge());
    let numbers = [
        ("network namespaces", entries("/run/netns".into()).len()),
        ("links of the bridge", links.count()),
        ("leases of addresses", node.leases().len()),
        ("monitors", node.monitors().len()),
    ];
    let differ = numbers.into_iter().filter(|(_, number)| *number != pods);
    strays.extend(differ.map(|(what, number)| format!("{number} {what} for {pods} pods")));
    strays
}

/// Directories that the kubelet keeps for pods: it cannot remove one while a volume is in use.
pub(crate) fn kubelet_pods() -> Vec<String> {
    entries("/var/lib/kubelet/pods".into())
}

fn entries(folder: PathBuf) -> Vec<String> {
    let Ok(entries) = fs::read_dir(&folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path().display().to_string()).collect()
}

/// The last ID in a path, or in a line of the mount table.
fn id_in(text: &str) -> Option<&str> {
    let is_id = |word: &&str| word.len() == ID_LENGTH && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.rsplit(|letter: char| !letter.is_ascii_alphanumeric()).find(is_id)
}
