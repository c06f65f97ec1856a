//! The inodes of the node that containers have, by kind of pod: what root in a container changes of them. The list of
//! those that are shared on purpose is [`is_meant`].

use std::collections::BTreeSet;
use std::fs;

use coracle_tests::cri::proto::{NamespaceMode, PodSandboxConfig};
use coracle_tests::node::Node;
use coracle_tests::request::{self, bridge_pod, host_pod, pod_namespaces, security};

use crate::{Rights, mapped, shared};

/// The kinds of pods and containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    ReadOnlyRoot,
    Privileged,
    HostNetwork,
    HostPid,
    HostIpc,
    SharedPid,
    UserNamespace,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Plain,
        Kind::ReadOnlyRoot,
        Kind::Privileged,
        Kind::HostNetwork,
        Kind::HostPid,
        Kind::HostIpc,
        Kind::SharedPid,
        Kind::UserNamespace,
    ];

    fn pod(self) -> PodSandboxConfig {
        let mut pod = bridge_pod("shares");
        match self {
            Kind::Plain | Kind::ReadOnlyRoot => {}
            Kind::Privileged => {
                let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
                context.expect("set").privileged = true;
            }
            Kind::HostNetwork => return host_pod("shares"),
            Kind::HostPid => pod_namespaces(&mut pod).pid = NamespaceMode::Node.into(),
            Kind::HostIpc => pod_namespaces(&mut pod).ipc = NamespaceMode::Node.into(),
            Kind::SharedPid => return shared(pod),
            Kind::UserNamespace => return mapped(pod),
        }
        pod
    }

    /// Whether a container of this kind may change the attributes of what is mounted at `path` although its file
    /// system is one of the node's.
    fn is_meant(self, path: &str) -> bool {
        let is_of = |top: &str| path == top || path.starts_with(&format!("{top}/"));
        match path {
            // Files of the pod, on the disk with the root directory.
            "/etc/hosts" | "/etc/hostname" | "/etc/resolv.conf" => self != Kind::ReadOnlyRoot,
            // The node's procfs, in which a process has to write to its own files.
            "/proc" => self == Kind::HostPid,
            "/dev/shm" | "/dev/mqueue" => self == Kind::HostIpc,
            _ => self == Kind::Privileged && is_of("/sys"),
        }
    }
}

/// The device numbers of the node's file systems.
fn devices_of_the_node(node: &Node) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", node.pid())).expect("the daemon runs");
    text.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect()
}

/// Fails without the defence: `GOT chmod 0:6 /proc/keys` (chown, utimes), of a plain container with the default
/// capabilities, and `GOT chmod 0:6 /proc/self/fd/0` in its execs and in itself: both are the node's /dev/null. On its read-only mount
/// `GOT lock 0:6 /proc/keys` remained.
#[test]
fn a_container_changes_no_attribute_of_a_file_of_the_node() {
    let node = Node::with_bridge();
    let nodes = devices_of_the_node(&node);
    let image = node.import_probe();
    for kind in Kind::ALL {
        let mut pod = kind.pod();
        pod.log_directory = node.log_directory(&format!("{kind:?}"));
        let pod_id = node.run_pod(&pod);
        let container = |name: &str, words: &[&str]| {
            let mut config = request::container(name, &image, words, &pod);
            Rights::Default.give(&mut config);
            security(&mut config).readonly_rootfs = kind == Kind::ReadOnlyRoot;
            security(&mut config).privileged = kind == Kind::Privileged;
            node.run_container(&pod_id, &config, &pod)
        };
        let itself = container("itself", &["attack", "attributes"]);
        assert_eq!(node.exited(&itself).exit_code, 0, "{kind:?}");
        let other = container("other", &["sleep", "forever"]);
        let exec = node.exec_sync(request::exec(&other, &["attack", "attributes"], 60)).expect("exec");
        for report in [node.output(&itself), String::from_utf8_lossy(&exec.stdout).into_owned()] {
            let attacks: Vec<Vec<&str>> = report.lines().map(|line| line.split(' ').collect()).collect();
            // The attacker works: its own files are its own.
            let own = if kind == Kind::ReadOnlyRoot { "/dev" } else { "/" };
            let works = |words: &Vec<&str>| words[..2] == ["GOT", "chmod"] && words.last() == Some(&own);
            assert!(attacks.iter().any(works), "{kind:?}: {report}");
            assert!(report.contains("/proc/self/fd/0"), "{kind:?}: {report}");
            let reached: Vec<_> = attacks
                .iter()
                .filter(|words| {
                    matches!(words[..], ["GOT", _, device, path]
                    if nodes.contains(device) && !kind.is_meant(path))
                })
                .collect();
            assert!(reached.is_empty(), "{kind:?} reached {reached:#?}\nthe whole report:\n{report}");
        }
        node.remove_pod(&pod_id);
    }
    node.stop();
}
