//! The inodes of the node that containers have, by kind of pod: what root in a container changes of them. The list of
//! those that are shared on purpose is [`is_meant`].

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{
    CdiDevice, ContainerConfig, Device, ExecRequest, Mount, NamespaceMode, PodSandboxConfig,
};
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{self, bridge_pod, host_pod, pod_namespaces, security};
use coracle_tests::spdy::Client;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::{Rights, beside, mapped, shared};

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
    Terminal,
    Volume,
    ReadOnlyVolume,
    ImageVolume,
    Device,
    DeviceInUserNamespace,
    CdiDevice,
    TargetPid,
    Unmasked,
    HostNetworkInUserNamespace,
}

impl Kind {
    const ALL: [Kind; 18] = [
        Kind::Plain,
        Kind::ReadOnlyRoot,
        Kind::Privileged,
        Kind::HostNetwork,
        Kind::HostPid,
        Kind::HostIpc,
        Kind::SharedPid,
        Kind::UserNamespace,
        Kind::Terminal,
        Kind::Volume,
        Kind::ReadOnlyVolume,
        Kind::ImageVolume,
        Kind::Device,
        Kind::DeviceInUserNamespace,
        Kind::CdiDevice,
        Kind::TargetPid,
        Kind::Unmasked,
        Kind::HostNetworkInUserNamespace,
    ];

    fn pod(self) -> PodSandboxConfig {
        let mut pod = bridge_pod("shares");
        match self {
            Kind::Privileged => {
                let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
                context.expect("set").privileged = true;
            }
            Kind::HostNetwork => return host_pod("shares"),
            Kind::HostNetworkInUserNamespace => return mapped(host_pod("shares")),
            Kind::HostPid => pod_namespaces(&mut pod).pid = NamespaceMode::Node.into(),
            Kind::HostIpc => pod_namespaces(&mut pod).ipc = NamespaceMode::Node.into(),
            Kind::SharedPid => return shared(pod),
            Kind::UserNamespace | Kind::DeviceInUserNamespace => return mapped(pod),
            _ => {}
        }
        pod
    }

    /// Adds to a container what its kind has. `folder` is a directory of the node with a device and a file.
    fn equip(self, config: &mut ContainerConfig, folder: &Path) {
        let mount = |path: &str, readonly| Mount {
            container_path: path.into(),
            host_path: folder.display().to_string(),
            readonly,
            ..Default::default()
        };
        let device = Device {
            container_path: "/dev/given".into(),
            host_path: folder.join("device").display().to_string(),
            permissions: "rwm".into(),
        };
        match self {
            Kind::Terminal => (config.tty, config.stdin) = (true, true),
            Kind::Volume => config.mounts.push(mount("/volume", false)),
            Kind::ReadOnlyVolume => config.mounts.push(mount("/volume", true)),
            Kind::ImageVolume => config.mounts.push(Mount {
                container_path: "/volume".into(),
                image: config.image.clone(),
                readonly: true,
                ..Default::default()
            }),
            Kind::Device | Kind::DeviceInUserNamespace => config.devices.push(device),
            Kind::CdiDevice => config.cdi_devices.push(CdiDevice { name: "vendor.test/shared=x".into() }),
            Kind::ReadOnlyRoot => security(config).readonly_rootfs = true,
            Kind::Privileged => security(config).privileged = true,
            Kind::Unmasked => {
                security(config).masked_paths.clear();
                security(config).readonly_paths.clear();
            }
            _ => {}
        }
    }

    /// The paths of what [`Kind::equip`] adds.
    fn has(self) -> &'static [&'static str] {
        match self {
            Kind::Terminal => &["/dev/console"],
            Kind::Volume | Kind::ReadOnlyVolume | Kind::ImageVolume => &["/volume"],
            Kind::Device | Kind::DeviceInUserNamespace => &["/dev/given"],
            Kind::CdiDevice => &["/dev/given", "/volume"],
            _ => &[],
        }
    }

    /// Whether a container of this kind may do this to what is mounted at `path` although its file system is one of the node's. A
    /// lock of what it may read cannot be refused by a read-only mount; no process of the node locks these.
    fn is_meant(self, what: &str, path: &str) -> bool {
        let is_lock = is_lock(what);
        let is_of = |top: &str| path == top || path.starts_with(&format!("{top}/"));
        match path {
            // Files of the pod, on the disk with the root directory.
            "/etc/hosts" | "/etc/hostname" | "/etc/resolv.conf" => self != Kind::ReadOnlyRoot || is_lock,
            // The node's procfs, in which a process has to write to its own files.
            "/proc" => self == Kind::HostPid,
            "/dev/shm" | "/dev/mqueue" => self == Kind::HostIpc,
            "/volume" => self == Kind::Volume || is_lock,
            // The sysfs of the network that they share.
            "/sys" if matches!(self, Kind::HostNetwork | Kind::HostNetworkInUserNamespace) => is_lock,
            // Its own cgroup in each hierarchy of v1.
            _ if is_of("/sys/fs/cgroup") && is_lock => true,
            _ => self == Kind::Privileged && is_of("/sys"),
        }
    }
}

fn is_lock(what: &str) -> bool {
    matches!(what, "lock" | "lock-range")
}

/// The device numbers of the node's file systems and their mount points.
fn mounts_of_the_node(node: &Node) -> BTreeSet<(String, String)> {
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", node.pid())).expect("the daemon runs");
    let words = text.lines().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
    words.map(|words| (words[2].clone(), words[4].clone())).collect()
}

/// A node with a directory of the test on its disk: a device, a file, and a CDI device of both.
fn node() -> (Node, PathBuf) {
    let name = format!("coracle-shared-{}-{}", std::process::id(), request::fresh());
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).expect("a directory");
    mknod(&folder.join("device"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
        .expect("a device");
    let config = format!("[cdi]\nspec_dirs = [{folder:?}]\n");
    let place = folder.display();
    let edits = format!(
        "deviceNodes: [{{path: /dev/given, hostPath: {place}/device}}], \
         mounts: [{{hostPath: {place}, containerPath: /volume, options: [bind, ro]}}]"
    );
    let text = format!(
        "cdiVersion: 0.6.0\nkind: vendor.test/shared\ndevices: [{{name: x, containerEdits: {{{edits}}}}}]\n"
    );
    fs::write(folder.join("shared.yaml"), text).expect("a file");
    (Node::with(Options { config, bridge: true, ..Options::default() }), folder)
}

/// The output of the probe in a terminal of its own in a running container.
fn in_terminal(node: &Node, id: &str, words: &[&str]) -> String {
    let ask = ExecRequest {
        container_id: id.into(),
        cmd: [&["/probe"], words].concat().into_iter().map(str::to_owned).collect(),
        tty: true,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let mut client = Client::connect(&node.exec(ask).expect("a token").url, "v4.channel.k8s.io");
    let streams = client.open_stdio(&["error", "stdin", "stdout", "resize"]);
    String::from_utf8(client.finish_session(&streams, None).stdout).expect("text")
}

/// Finding S1. Fails without the defence: `GOT chmod 0:6 /proc/keys` (chown, utimes), of a plain container with the default
/// capabilities, and `GOT chmod 0:6 /proc/self/fd/0` in its execs and in itself: both are the node's /dev/null. On its read-only mount
/// `GOT lock 0:6 /proc/keys` remained.
#[test]
fn a_container_changes_no_attribute_of_a_file_of_the_node() {
    const ATTACK: [&str; 3] = ["attack", "attributes", "/dev/given"];
    let (node, folder) = node();
    let before = mounts_of_the_node(&node);
    let image = node.import_probe();
    let mut reached = Vec::new();
    for kind in Kind::ALL {
        let mut pod = kind.pod();
        pod.log_directory = node.log_directory(&format!("{kind:?}"));
        let pod_id = node.run_pod(&pod);
        let container = |name: &str, words: &[&str], target: Option<&str>| {
            let mut config = request::container(name, &image, words, &pod);
            Rights::Default.give(&mut config);
            kind.equip(&mut config, &folder);
            if let (Kind::TargetPid, Some(target)) = (kind, target) {
                beside(&mut config, target);
            }
            node.run_container(&pod_id, &config, &pod)
        };
        let other = container("other", &["sleep", "forever"], None);
        let itself = container("itself", &ATTACK, Some(&other));
        assert_eq!(node.exited(&itself).exit_code, 0, "{kind:?}");
        let exec = node.exec_sync(request::exec(&other, &ATTACK, 60)).expect("exec");
        let exec = String::from_utf8_lossy(&exec.stdout).into_owned();
        // The number of a file system that another program has unmounted meanwhile may be that of one of the pod's.
        let now = mounts_of_the_node(&node);
        let nodes: BTreeSet<&str> = before.intersection(&now).map(|(device, _)| device.as_str()).collect();
        // The exec has removed the container's device.
        let terminal = (in_terminal(&node, &other, &ATTACK), &[][..]);
        for (report, has) in [(node.output(&itself), kind.has()), (exec, kind.has()), terminal] {
            let attacks: Vec<Vec<&str>> = report.lines().map(|line| line.split(' ').collect()).collect();
            // The attacker works: its own files are its own.
            let own = if kind == Kind::ReadOnlyRoot { "/dev" } else { "/" };
            let works = |words: &Vec<&str>| words[..2] == ["GOT", "chmod"] && words.last() == Some(&own);
            assert!(attacks.iter().any(works), "{kind:?}: {report}");
            let tried = |path: &str| {
                attacks.iter().any(|words| words[1] == "lock" && words[3].trim_end_matches(':') == path)
            };
            for path in ["/proc/self/fd/0"].iter().chain(has) {
                assert!(tried(path), "{kind:?}: {report}");
            }
            reached.extend(attacks.iter().filter_map(|words| match words[..] {
                ["GOT", what, device, path] if nodes.contains(device) && !kind.is_meant(what, path) => {
                    Some(format!("{kind:?}: {what} {path} on {device}"))
                }
                _ => None,
            }));
        }
        node.remove_pod(&pod_id);
    }
    assert!(reached.is_empty(), "{reached:#?}");
    node.stop();
    fs::remove_dir_all(folder).expect("ours");
}

/// An inode that the containers of two pods both have can be locked only: coracle's own null device under masked files and as standard
/// stream. Volumes and namespaces of the node are not among these kinds.
#[test]
fn containers_of_two_pods_share_only_what_masks_and_is_read_only() {
    let (node, folder) = node();
    let image = node.import_probe();
    let kinds = [Kind::Plain, Kind::Plain, Kind::ReadOnlyRoot, Kind::UserNamespace];
    let reports = kinds.map(|kind| {
        let pod = kind.pod();
        let pod_id = node.run_pod(&pod);
        let mut config = request::container("one", &image, &["sleep", "forever"], &pod);
        Rights::Default.give(&mut config);
        kind.equip(&mut config, &folder);
        let id = node.run_container(&pod_id, &config, &pod);
        let exec = node.exec_sync(request::exec(&id, &["attack", "attributes"], 60)).expect("exec");
        String::from_utf8(exec.stdout).expect("text")
    });
    let (mut shared, mut reached) = (BTreeSet::new(), Vec::new());
    for (at, one) in reports.iter().enumerate() {
        for other in &reports[at + 1..] {
            let others: BTreeSet<_> = inodes(other).into_iter().map(|(inode, _)| inode).collect();
            let both = inodes(one).into_iter().filter(|(inode, _)| others.contains(inode));
            let paths: BTreeSet<&str> = both.map(|(_, path)| path).collect();
            for line in one.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                if let ["GOT", what, _, path] = words[..]
                    && paths.contains(path)
                    && !is_lock(what)
                {
                    reached.push(format!("{:?}: {line}", kinds[at]));
                }
            }
            shared.extend(paths);
        }
    }
    println!("shared: {shared:?}");
    assert!(reached.is_empty(), "{reached:#?}");
    assert!(shared.contains("/proc/self/fd/0"), "the comparison finds what is shared: {shared:?}");
    node.stop();
    fs::remove_dir_all(folder).expect("ours");
}

/// File system and inode of each path of a report.
fn inodes(report: &str) -> Vec<((&str, &str), &str)> {
    let words = report.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    words
        .filter_map(|words| match words[..] {
            ["saw", "inode", device, inode, path] => Some(((device, inode), path)),
            _ => None,
        })
        .collect()
}
