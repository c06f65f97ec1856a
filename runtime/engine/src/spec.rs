//! What a pod and a container were asked to be: the request, validated and in our own types, as it is kept in the
//! record and given back by status and list calls. CRI types end in `cri/`; from here on there are only these.
//!
//! Values that clients must get back byte for byte (labels, annotations, mounts, resources) are kept as they came.
//! These types are part of the records: a change of a field changes their version (`record`).

use coracle_job::PortMapping;
use coracle_sandbox::userns::{IdRange, UserMappings};
use serde::{Deserialize, Serialize};

/// Pairs in the order they are stored; CRI maps have none.
pub type Pairs = Vec<(String, String)>;

/// The key of a sandbox (CRI 2.0): one live sandbox for each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// Name of the pod.
    pub name: String,
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its Kubernetes UID.
    pub uid: String,
    /// How often the kubelet has made a sandbox for it.
    pub attempt: u32,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} (uid {}, attempt {})", self.namespace, self.name, self.uid, self.attempt)
    }
}

/// The key of a container inside its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerName {
    /// Name of the container in its pod.
    pub name: String,
    /// How often the kubelet has made it.
    pub attempt: u32,
}

impl std::fmt::Display for ContainerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (attempt {})", self.name, self.attempt)
    }
}

/// Whose network, IPC or (for a pod) pid namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// The pod has one of its own.
    Pod,
    /// The node's.
    Node,
}

/// The pid namespaces of a pod's containers (CRI 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPid {
    /// One for the pod; the monitor is its pid 1.
    Pod,
    /// Each container its own.
    Container,
    /// The node's.
    Node,
}

/// The namespaces of a pod sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNamespaces {
    /// The network namespace; the host name goes with it.
    pub network: Sharing,
    /// The IPC namespace.
    pub ipc: Sharing,
    /// PID namespaces of its containers.
    pub pid: PodPid,
}

/// Contents of /etc/resolv.conf, line by line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// Addresses of name servers.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Options as in resolv.conf(5).
    pub options: Vec<String>,
}

/// A pod sandbox as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodSpec {
    /// Its key: no other live sandbox has it.
    pub name: PodName,
    /// Empty: the node's.
    pub hostname: String,
    /// Empty: containers' output is not logged.
    pub log_directory: String,
    /// `None`: a copy of the node's resolv.conf.
    pub dns: Option<Dns>,
    /// One without a host port is kept, too, for whoever asks.
    pub ports: Vec<PortMapping>,
    /// Kept for lists and statuses.
    pub labels: Pairs,
    /// Kept for statuses and plugins.
    pub annotations: Pairs,
    /// The runtime handler as it was asked for; empty: the default.
    pub runtime_handler: String,
    /// As asked; empty: the configured default.
    pub cgroup_parent: String,
    /// Which namespaces are the pod's own.
    pub namespaces: PodNamespaces,
    /// Whether privileged containers are allowed in it.
    pub privileged: bool,
    /// Kernel parameters of its namespaces.
    pub sysctls: Pairs,
    /// `None`: the node's.
    pub user_namespace: Option<UserNamespace>,
    /// What the sandbox takes beside its containers; the kubelet has counted it into the pod's cgroup.
    pub overhead: Option<Resources>,
    /// The sum over its containers, as the kubelet gave it last.
    pub resources: Option<Resources>,
    /// The label that was asked for the sandbox: its level is that of the pod's containers.
    pub selinux: Option<SelinuxLabel>,
}

/// A user namespace of the pod's own (CRI 3.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespace {
    /// Ranges of user ids.
    pub uids: Vec<IdMapping>,
    /// Ranges of group ids.
    pub gids: Vec<IdMapping>,
}

impl PodSpec {
    /// Which namespaces are the pod's own. The host name goes with the network.
    pub(crate) fn own_namespaces(&self) -> coracle_sandbox::plan::PodNamespaces {
        let network = self.namespaces.network == Sharing::Pod;
        let ipc = self.namespaces.ipc == Sharing::Pod;
        coracle_sandbox::plan::PodNamespaces { network, ipc, uts: network }
    }

    /// As the sandbox wants them; they were checked to be one range of each kind.
    pub(crate) fn user_mappings(&self) -> Option<UserMappings> {
        let range = |mappings: &[IdMapping]| {
            mappings.first().map(|one| IdRange {
                inside: one.container_id,
                outside: one.host_id,
                length: one.length,
            })
        };
        let namespace = self.user_namespace.as_ref()?;
        Some(UserMappings { users: range(&namespace.uids)?, groups: range(&namespace.gids)? })
    }
}

/// A range of ids and what it is on the host (user_namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First id inside the container.
    pub container_id: u32,
    /// First id on the host.
    pub host_id: u32,
    /// How many ids.
    pub length: u32,
}

/// Memory, CPU and what else a cgroup limits, exactly as last given (0 and empty: not specified).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Period of the CPU quota in microseconds.
    pub cpu_period_us: i64,
    /// CPU time in each period in microseconds; negative: no limit.
    pub cpu_quota_us: i64,
    /// Relative weight of its CPU time, in shares of cgroup v1.
    pub cpu_shares: i64,
    /// Memory in bytes.
    pub memory_limit_bytes: i64,
    /// How willingly the kernel kills it when memory is short, from -1000 to 1000.
    pub oom_score_adj: i64,
    /// CPUs that it may run on, as cpuset(7) lists them.
    pub cpuset_cpus: String,
    /// Memory nodes that it may use, as cpuset(7) lists them.
    pub cpuset_mems: String,
    /// Page size (`2MB`) and limit in bytes.
    pub hugepage_limits: Vec<(String, u64)>,
    /// Files of cgroup v2 and what to write to them.
    pub unified: Pairs,
    /// Memory and swap together.
    pub memory_swap_limit_bytes: i64,
}

/// How mounts travel between host and container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountPropagation {
    /// Mounts travel in neither direction.
    Private,
    /// New mounts of the host are seen in the container.
    HostToContainer,
    /// New mounts are seen on both sides.
    Bidirectional,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where it is in the container, absolute.
    pub container_path: String,
    /// What is mounted, a path of the host.
    pub host_path: String,
    /// Whether the container cannot write to it.
    pub readonly: bool,
    /// Whether its files get the container's SELinux label.
    pub selinux_relabel: bool,
    /// How later mounts below it travel.
    pub propagation: MountPropagation,
    /// Whether mounts below it are read-only, too (KEP-3857).
    pub recursive_read_only: bool,
    /// An image in place of the host path, which is empty then (KEP-4639).
    pub image: Option<ImageVolume>,
    /// User ids of an idmapped mount; empty: the source's owners are seen as they are.
    pub uid_mappings: Vec<IdMapping>,
    /// Group ids of an idmapped mount; empty: the source's owners are seen as they are.
    pub gid_mappings: Vec<IdMapping>,
    /// `noexec` and the like, checked.
    pub options: Vec<String>,
}

/// An image as a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// As asked: an id, a tag, a digest.
    pub image: String,
    /// As in the pod specification.
    pub user_specified_image: String,
    /// Below the image's root; empty: all of it.
    pub sub_path: String,
}

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its path in the container.
    pub container_path: String,
    /// The device, or a directory of devices, on the host.
    pub host_path: String,
    /// A subset of `rwm`.
    pub permissions: String,
}

/// Which pid namespace a container lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerPid {
    /// The pod's shared one.
    Pod,
    /// Its own.
    Own,
    /// The node's.
    Node,
    /// That of another container of the pod.
    Target(coracle_sandbox::ContainerId),
}

/// How supplementary groups are put together (KEP-3619).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupsPolicy {
    /// Those of the image's /etc/group and those given.
    Merge,
    /// Only those given.
    Strict,
}

/// Who the container runs as, and what it may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// The user's id.
    pub run_as_user: Option<u32>,
    /// The user's name in the image; empty: by id, or the image's user.
    pub run_as_username: String,
    /// The primary group's id.
    pub run_as_group: Option<u32>,
    /// Ids of more groups.
    pub supplemental_groups: Vec<u32>,
    /// How they are put together with the image's.
    pub groups_policy: GroupsPolicy,
    /// Names of capabilities beside the default ones; `ALL`: every one.
    pub add_capabilities: Vec<String>,
    /// Names of capabilities that it does not get; `ALL`: every one.
    pub drop_capabilities: Vec<String>,
    /// Names of capabilities that survive an exec without root.
    pub ambient_capabilities: Vec<String>,
    /// Whether it has all capabilities and devices, and no confinement.
    pub privileged: bool,
    /// Whether its root file system cannot be written to.
    pub readonly_rootfs: bool,
    /// Whether exec can give it no rights.
    pub no_new_privileges: bool,
    /// The runtime's default filter was asked for.
    pub wants_default_seccomp: bool,
    /// Paths that are covered.
    pub masked_paths: Vec<String>,
    /// Paths that are made read-only.
    pub readonly_paths: Vec<String>,
    /// Path of a Localhost filter's profile on the host; empty: none asked for.
    pub localhost_seccomp: String,
    /// Name of an AppArmor profile, [`APPARMOR_UNCONFINED`] or [`APPARMOR_RUNTIME_DEFAULT`]; empty: nothing was asked for.
    pub apparmor: String,
    /// The label of its processes.
    pub selinux: Option<SelinuxLabel>,
}

/// No AppArmor profile, although the kernel may have some: no profile has this name.
pub const APPARMOR_UNCONFINED: &str = "unconfined";

/// The runtime's default profile, asked for by name: unlike where nothing is asked for, it must be there.
pub const APPARMOR_RUNTIME_DEFAULT: &str = "runtime/default";

/// An SELinux context; empty parts take the runtime's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelinuxLabel {
    /// The user part.
    pub user: String,
    /// The role part.
    pub role: String,
    /// The type part.
    pub kind: String,
    /// The level part, with categories.
    pub level: String,
}

/// A container as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerSpec {
    /// Its key in its pod: no other live container has it.
    pub name: ContainerName,
    /// As asked: an id, a tag, a digest.
    pub image: String,
    /// As in the pod specification.
    pub user_specified_image: String,
    /// In place of the image's entry point; empty: the image's.
    pub command: Vec<String>,
    /// In place of the image's arguments; empty: the image's, where there is no command either.
    pub arguments: Vec<String>,
    /// Empty: the image's.
    pub working_directory: String,
    /// Values are bytes.
    pub environment: Vec<(String, Vec<u8>)>,
    /// Volumes, in the order of the request.
    pub mounts: Vec<Mount>,
    /// Devices of the host by their paths.
    pub devices: Vec<Device>,
    /// Kept for lists and statuses.
    pub labels: Pairs,
    /// Kept for statuses and plugins.
    pub annotations: Pairs,
    /// Relative to the pod's log directory; empty: no log.
    pub log_path: String,
    /// Whether it has a stdin that can be attached to.
    pub stdin: bool,
    /// Whether its stdin ends with the first client that was attached to it.
    pub stdin_once: bool,
    /// Whether it has a terminal.
    pub tty: bool,
    /// CRI's `Signal` number; 0: the image's, or SIGTERM.
    pub stop_signal: i32,
    /// The PID namespace that it is in.
    pub pid: ContainerPid,
    /// Who it runs as, and what it may do.
    pub security: Security,
    /// Limits that were asked for.
    pub resources: Resources,
    /// Fully qualified names, `vendor/class=device`.
    pub cdi_devices: Vec<String>,
}
