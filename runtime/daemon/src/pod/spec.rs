//! What a pod and a container were asked to be: the request, validated and in our own types, as it is kept in the
//! record and given back by status and list calls. CRI types end in `cri/`; from here on there are only these.
//!
//! Values that clients must get back byte for byte (labels, annotations, mounts, resources) are kept as they came.
//! Formats on disk only grow: fields are appended, never reordered.

use coracle_job::PortMapping;
use coracle_sandbox::userns::{IdRange, UserMappings};
use serde::{Deserialize, Serialize};

/// Pairs in the order they are stored; CRI maps have none.
pub(crate) type Pairs = Vec<(String, String)>;

/// The key of a sandbox (CRI 2.0): one live sandbox for each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct PodName {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uid: String,
    pub(crate) attempt: u32,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} (uid {}, attempt {})", self.namespace, self.name, self.uid, self.attempt)
    }
}

/// The key of a container inside its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ContainerName {
    pub(crate) name: String,
    pub(crate) attempt: u32,
}

impl std::fmt::Display for ContainerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (attempt {})", self.name, self.attempt)
    }
}

/// Whose network, IPC or (for a pod) pid namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Sharing {
    /// The pod has one of its own.
    Pod,
    /// The node's.
    Node,
}

/// The pid namespaces of a pod's containers (CRI 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PodPid {
    /// One for the pod; the monitor is its pid 1.
    Pod,
    /// Each container its own.
    Container,
    /// The node's.
    Node,
}

/// The namespaces of a pod sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PodNamespaces {
    pub(crate) network: Sharing,
    pub(crate) ipc: Sharing,
    pub(crate) pid: PodPid,
}

/// Contents of /etc/resolv.conf, line by line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dns {
    pub(crate) servers: Vec<String>,
    pub(crate) searches: Vec<String>,
    pub(crate) options: Vec<String>,
}

/// A pod sandbox as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PodSpec {
    pub(crate) name: PodName,
    /// Empty: the node's.
    pub(crate) hostname: String,
    /// Empty: containers' output is not logged.
    pub(crate) log_directory: String,
    /// `None`: a copy of the node's resolv.conf.
    pub(crate) dns: Option<Dns>,
    /// One without a host port is kept, too, for whoever asks.
    pub(crate) ports: Vec<PortMapping>,
    pub(crate) labels: Pairs,
    pub(crate) annotations: Pairs,
    pub(crate) runtime_handler: String,
    /// As asked; empty: the configured default.
    pub(crate) cgroup_parent: String,
    pub(crate) namespaces: PodNamespaces,
    /// Whether privileged containers are allowed in it.
    pub(crate) privileged: bool,
    pub(crate) sysctls: Pairs,
    /// `None`: the node's.
    #[serde(skip)]
    pub(crate) user_namespace: Option<UserNamespace>,
    /// What the sandbox takes beside its containers; the kubelet has counted it into the pod's cgroup.
    #[serde(skip)]
    pub(crate) overhead: Option<Resources>,
    /// The sum over its containers, as the kubelet gave it last.
    #[serde(skip)]
    pub(crate) resources: Option<Resources>,
    /// The label that was asked for the sandbox: its level is that of the pod's containers.
    #[serde(skip)]
    pub(crate) selinux: Option<SelinuxLabel>,
}

/// A user namespace of the pod's own (CRI 3.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserNamespace {
    pub(crate) uids: Vec<IdMapping>,
    pub(crate) gids: Vec<IdMapping>,
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
pub(crate) struct IdMapping {
    pub(crate) container_id: u32,
    pub(crate) host_id: u32,
    pub(crate) length: u32,
}

/// Memory, CPU and what else a cgroup limits, exactly as last given (0 and empty: not specified).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Resources {
    pub(crate) cpu_period_us: i64,
    pub(crate) cpu_quota_us: i64,
    pub(crate) cpu_shares: i64,
    pub(crate) memory_limit_bytes: i64,
    pub(crate) oom_score_adj: i64,
    pub(crate) cpuset_cpus: String,
    pub(crate) cpuset_mems: String,
    /// Page size (`2MB`) and limit in bytes.
    pub(crate) hugepage_limits: Vec<(String, u64)>,
    pub(crate) unified: Pairs,
    /// Memory and swap together.
    pub(crate) memory_swap_limit_bytes: i64,
}

/// How mounts travel between host and container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MountPropagation {
    Private,
    HostToContainer,
    Bidirectional,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mount {
    pub(crate) container_path: String,
    pub(crate) host_path: String,
    pub(crate) readonly: bool,
    pub(crate) selinux_relabel: bool,
    pub(crate) propagation: MountPropagation,
    pub(crate) recursive_read_only: bool,
    #[serde(skip)]
    pub(crate) later: MountLater,
}

/// What came to mounts after 0.1.0 (record/later.rs).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct MountLater {
    /// An image in place of the host path, which is empty then (KEP-4639).
    pub(crate) image: Option<ImageVolume>,
    /// An idmapped mount's; empty: the source's owners are seen as they are.
    pub(crate) uid_mappings: Vec<IdMapping>,
    /// As `uid_mappings`.
    pub(crate) gid_mappings: Vec<IdMapping>,
    /// `noexec` and the like, checked.
    pub(crate) options: Vec<String>,
}

/// An image as a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageVolume {
    /// As asked: an id, a tag, a digest.
    pub(crate) image: String,
    /// As in the pod specification.
    pub(crate) user_specified_image: String,
    /// Below the image's root; empty: all of it.
    pub(crate) sub_path: String,
}

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) container_path: String,
    pub(crate) host_path: String,
    /// A subset of `rwm`.
    pub(crate) permissions: String,
}

/// Which pid namespace a container lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ContainerPid {
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
pub(crate) enum GroupsPolicy {
    /// Those of the image's /etc/group and those given.
    Merge,
    /// Only those given.
    Strict,
}

/// Who the container runs as, and what it may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Security {
    pub(crate) run_as_user: Option<u32>,
    pub(crate) run_as_username: String,
    pub(crate) run_as_group: Option<u32>,
    pub(crate) supplemental_groups: Vec<u32>,
    pub(crate) groups_policy: GroupsPolicy,
    pub(crate) add_capabilities: Vec<String>,
    pub(crate) drop_capabilities: Vec<String>,
    pub(crate) ambient_capabilities: Vec<String>,
    pub(crate) privileged: bool,
    pub(crate) readonly_rootfs: bool,
    pub(crate) no_new_privileges: bool,
    /// The runtime's default filter was asked for.
    pub(crate) wants_default_seccomp: bool,
    pub(crate) masked_paths: Vec<String>,
    pub(crate) readonly_paths: Vec<String>,
    /// Path of a Localhost filter's profile on the host; empty: none asked for.
    #[serde(skip)]
    pub(crate) localhost_seccomp: String,
    /// Name of an AppArmor profile, [`APPARMOR_UNCONFINED`] or [`APPARMOR_RUNTIME_DEFAULT`]; empty: nothing was asked for.
    #[serde(skip)]
    pub(crate) apparmor: String,
    /// The label of its processes.
    #[serde(skip)]
    pub(crate) selinux: Option<SelinuxLabel>,
}

/// No AppArmor profile, although the kernel may have some: no profile has this name.
pub(crate) const APPARMOR_UNCONFINED: &str = "unconfined";

/// The runtime's default profile, asked for by name: unlike where nothing is asked for, it must be there.
pub(crate) const APPARMOR_RUNTIME_DEFAULT: &str = "runtime/default";

/// An SELinux context; empty parts take the runtime's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SelinuxLabel {
    pub(crate) user: String,
    pub(crate) role: String,
    pub(crate) kind: String,
    pub(crate) level: String,
}

/// A container as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerSpec {
    pub(crate) name: ContainerName,
    /// As asked: an id, a tag, a digest.
    pub(crate) image: String,
    /// As in the pod specification.
    pub(crate) user_specified_image: String,
    pub(crate) command: Vec<String>,
    pub(crate) arguments: Vec<String>,
    pub(crate) working_directory: String,
    /// Values are bytes.
    pub(crate) environment: Vec<(String, Vec<u8>)>,
    pub(crate) mounts: Vec<Mount>,
    pub(crate) devices: Vec<Device>,
    pub(crate) labels: Pairs,
    pub(crate) annotations: Pairs,
    /// Relative to the pod's log directory; empty: no log.
    pub(crate) log_path: String,
    pub(crate) stdin: bool,
    pub(crate) stdin_once: bool,
    pub(crate) tty: bool,
    /// CRI's `Signal` number; 0: the image's, or SIGTERM.
    pub(crate) stop_signal: i32,
    pub(crate) pid: ContainerPid,
    pub(crate) security: Security,
    pub(crate) resources: Resources,
    /// Fully qualified names, `vendor/class=device`.
    #[serde(skip)]
    pub(crate) cdi_devices: Vec<String>,
}
