//! The validated requests for pods and containers in the engine's types. They are stored in records and
//! returned by status and list calls. CRI types are used only in `cri/`.
//!
//! Values that clients must get back unchanged (labels, annotations, mounts, resources) are stored unchanged.
//! The types are part of the records: a change of a field changes the version of records (`record`).

use coracle_job::PortMapping;
use coracle_sandbox::cgroup::Resources;
use coracle_sandbox::plan::Attributes;
use coracle_sandbox::userns::{IdRange, UserMappings};
use serde::{Deserialize, Serialize};

/// Pairs of name and value in the order in which they are stored; maps of the CRI have no order.
pub type Pairs = Vec<(String, String)>;

/// The key of a sandbox (CRI 2.0), of which there is at most one per key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// Name of the pod.
    pub name: String,
    /// Kubernetes namespace of the pod.
    pub namespace: String,
    /// Kubernetes UID of the pod.
    pub uid: String,
    /// How often the kubelet has created a sandbox for the pod.
    pub attempt: u32,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} (uid {}, attempt {})", self.namespace, self.name, self.uid, self.attempt)
    }
}

impl PodName {
    /// The pod's name in log messages: `namespace/name`.
    pub fn short(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The key of a container inside its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerName {
    /// Name of the container in its pod.
    pub name: String,
    /// How often the kubelet has created the container.
    pub attempt: u32,
}

impl std::fmt::Display for ContainerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (attempt {})", self.name, self.attempt)
    }
}

/// The owner of a network or IPC namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// The pod has its own namespace.
    Pod,
    /// The namespace of the node.
    Node,
}

/// The PID namespaces of a pod's containers (CRI 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPid {
    /// One PID namespace that all containers of the pod share.
    Pod,
    /// Each container has its own PID namespace.
    Container,
    /// The namespace of the node.
    Node,
}

/// The namespaces of a pod sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNamespaces {
    /// The network namespace; the UTS namespace has the same owner.
    pub network: Sharing,
    /// The owner of the IPC namespace.
    pub ipc: Sharing,
    /// The PID namespaces of the pod's containers.
    pub pid: PodPid,
}

/// Content of /etc/resolv.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// Addresses of name servers.
    pub servers: Vec<String>,
    /// Search domains for host names.
    pub searches: Vec<String>,
    /// Resolver options (resolv.conf(5)).
    pub options: Vec<String>,
}

/// A validated request for a pod sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodSpec {
    /// The unique key of the sandbox.
    pub name: PodName,
    /// Host name; empty: the node's.
    pub hostname: String,
    /// Directory of container logs; empty: output is not logged.
    pub log_directory: String,
    /// DNS configuration; `None`: a copy of the node's resolv.conf.
    pub dns: Option<Dns>,
    /// Port mappings. Entries without a host port have no effect; status and plugins show them.
    pub ports: Vec<PortMapping>,
    /// Labels, for lists and statuses.
    pub labels: Pairs,
    /// Annotations, for statuses and plugins.
    pub annotations: Pairs,
    /// The requested runtime handler; empty: the default.
    pub runtime_handler: String,
    /// The requested cgroup parent; empty: the configured default.
    pub cgroup_parent: String,
    /// The owners of the pod's namespaces.
    pub namespaces: PodNamespaces,
    /// Whether the pod may have privileged containers.
    pub privileged: bool,
    /// Kernel parameters (sysctls) of the pod's namespaces: name, value.
    pub sysctls: Pairs,
    /// User namespace; `None`: the node's.
    pub user_namespace: Option<UserNamespace>,
    /// Resources of the sandbox in addition to those of its containers; the kubelet includes them in the
    /// limits of the pod's cgroup. `None`: not sent.
    pub overhead: Option<Resources>,
    /// The sum of the resources of the pod's containers, as last sent by the kubelet; `None`: not sent.
    pub resources: Option<Resources>,
    /// The requested SELinux label of the sandbox, whose level applies to its containers; `None`: not
    /// requested.
    pub selinux: Option<SelinuxLabel>,
}

/// A user namespace of the pod (CRI 3.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespace {
    /// Mappings of user IDs.
    pub uids: Vec<IdMapping>,
    /// Mappings of group IDs.
    pub gids: Vec<IdMapping>,
}

impl PodSpec {
    /// The namespaces that are created for the pod. The UTS namespace has the same owner as the network
    /// namespace.
    pub(crate) fn own_namespaces(&self) -> coracle_sandbox::plan::PodNamespaces {
        let network = self.namespaces.network == Sharing::Pod;
        let ipc = self.namespaces.ipc == Sharing::Pod;
        coracle_sandbox::plan::PodNamespaces { network, ipc, uts: network }
    }

    /// The mappings in the sandbox crate's type; validation has ensured one range of each kind.
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

/// A mapping of an ID range (user_namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First ID in the container.
    pub container_id: u32,
    /// First ID on the host.
    pub host_id: u32,
    /// Number of IDs in the range.
    pub length: u32,
}

/// Propagation of mounts between the host and the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountPropagation {
    /// Private: mounts are not propagated.
    Private,
    /// New mounts of the host appear in the container.
    HostToContainer,
    /// New mounts on either side appear on the other.
    Bidirectional,
}

/// A mount of the container: a host directory, or an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Absolute path in the container.
    pub container_path: String,
    /// Source path on the host.
    pub host_path: String,
    /// Whether the mount is read-only.
    pub readonly: bool,
    /// Whether the files of the mount get the container's SELinux label.
    pub selinux_relabel: bool,
    /// Propagation of mounts that are created below this mount later.
    pub propagation: MountPropagation,
    /// Whether mounts below this mount are also read-only (KEP-3857).
    pub recursive_read_only: bool,
    /// Image that is the source of the mount; the host path is then empty (KEP-4639). `None`: a host path is
    /// the source.
    pub image: Option<ImageVolume>,
    /// User ID mappings of an idmapped mount; empty: not idmapped.
    pub uid_mappings: Vec<IdMapping>,
    /// Group ID mappings of an idmapped mount; empty: not idmapped.
    pub gid_mappings: Vec<IdMapping>,
    /// Validated mount options such as `noexec`.
    pub options: Vec<String>,
}

/// The source of an image volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// The requested image: an ID, a tag or a digest.
    pub image: String,
    /// Image name in the pod specification.
    pub user_specified_image: String,
    /// Path below the image's root; empty: the whole image.
    pub sub_path: String,
}

/// A device of the host, or a directory of devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Path in the container.
    pub container_path: String,
    /// Path on the host: a device or a directory of devices.
    pub host_path: String,
    /// Permissions: a subset of `rwm`.
    pub permissions: String,
}

/// The PID namespace of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerPid {
    /// The PID namespace that the pod's containers share.
    Pod,
    /// A PID namespace of the container's own.
    Own,
    /// The namespace of the node.
    Node,
    /// The PID namespace of another container of the pod.
    Target(coracle_sandbox::ContainerId),
}

/// How supplementary groups are determined (KEP-3619).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupsPolicy {
    /// The groups of the user in the image's /etc/group and the requested groups.
    Merge,
    /// Only the requested groups.
    Strict,
}

/// User, capabilities and confinement of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// User ID; `None`: determined by the user name or the image.
    pub run_as_user: Option<u32>,
    /// User name in the image; empty: the user ID, or the image's user.
    pub run_as_username: String,
    /// Primary group ID; `None`: the user's group.
    pub run_as_group: Option<u32>,
    /// Supplementary group IDs.
    pub supplemental_groups: Vec<u32>,
    /// Policy for merging the supplementary groups with the image's.
    pub groups_policy: GroupsPolicy,
    /// Capabilities in addition to the default ones; `ALL` means all capabilities.
    pub add_capabilities: Vec<String>,
    /// Capabilities to be removed; `ALL`: all.
    pub drop_capabilities: Vec<String>,
    /// Names of the requested ambient capabilities.
    pub ambient_capabilities: Vec<String>,
    /// Whether the container is privileged: all capabilities and devices, no confinement.
    pub privileged: bool,
    /// Whether the container's root file system is read-only.
    pub readonly_rootfs: bool,
    /// Attributes of the processes.
    pub attributes: Attributes,
    /// Whether the runtime's default seccomp profile was requested.
    pub wants_default_seccomp: bool,
    /// Container paths that are masked.
    pub masked_paths: Vec<String>,
    /// Container paths that are read-only.
    pub readonly_paths: Vec<String>,
    /// Host path of a Localhost seccomp profile; empty: none requested.
    pub localhost_seccomp: String,
    /// Name of an AppArmor profile, [`APPARMOR_UNCONFINED`] or [`APPARMOR_RUNTIME_DEFAULT`]; empty: no
    /// profile requested.
    pub apparmor: String,
    /// SELinux label of the container's processes; `None`: not requested.
    pub selinux: Option<SelinuxLabel>,
}

/// Name for running without an AppArmor profile; no profile has this name.
pub const APPARMOR_UNCONFINED: &str = "unconfined";

/// Name of the runtime's default AppArmor profile. If it is requested explicitly, it must exist; without a
/// request it may be missing.
pub const APPARMOR_RUNTIME_DEFAULT: &str = "runtime/default";

/// An SELinux label; empty parts are replaced by the runtime's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelinuxLabel {
    /// The user of the label.
    pub user: String,
    /// The role of the label.
    pub role: String,
    /// The type of the label.
    pub kind: String,
    /// The level of the label, including categories.
    pub level: String,
}

/// A validated request for a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerSpec {
    /// The key of the container, unique within its pod.
    pub name: ContainerName,
    /// The requested image: an ID, a tag or a digest.
    pub image: String,
    /// Image name in the pod specification.
    pub user_specified_image: String,
    /// Command that replaces the image's entrypoint; empty: the image's entrypoint.
    pub command: Vec<String>,
    /// Arguments that replace the image's cmd; if both arguments and command are empty, the image's cmd is
    /// used.
    pub arguments: Vec<String>,
    /// Working directory; empty: the image's.
    pub working_directory: String,
    /// Environment variables; values are bytes.
    pub environment: Vec<(String, Vec<u8>)>,
    /// Volumes, in the order of the request.
    pub mounts: Vec<Mount>,
    /// Host devices given by path.
    pub devices: Vec<Device>,
    /// Labels, for lists and statuses.
    pub labels: Pairs,
    /// Annotations, for statuses and plugins.
    pub annotations: Pairs,
    /// Log path relative to the pod's log directory; empty: no log.
    pub log_path: String,
    /// Whether the container has a standard input for attached clients.
    pub stdin: bool,
    /// Whether the container's standard input is closed when the first attached client disconnects.
    pub stdin_once: bool,
    /// Whether the container has a terminal.
    pub tty: bool,
    /// Stop signal as the CRI's `Signal` number; 0: the image's, or SIGTERM.
    pub stop_signal: i32,
    /// PID namespace of the container.
    pub pid: ContainerPid,
    /// User, capabilities and confinement of the container.
    pub security: Security,
    /// Requested limits of the container.
    pub resources: Resources,
    /// CDI device names: `vendor/class=device`.
    pub cdi_devices: Vec<String>,
}

#[cfg(feature = "testing")]
impl ContainerSpec {
    /// A request for a container of `image` that requests nothing else, for tests. Unlike a request without a security
    /// context, it has no masked paths.
    pub fn plain(name: &str, image: &str) -> Self {
        Self {
            name: ContainerName { name: name.to_owned(), attempt: 0 },
            image: image.to_owned(),
            user_specified_image: String::new(),
            command: Vec::new(),
            arguments: Vec::new(),
            working_directory: String::new(),
            environment: Vec::new(),
            mounts: Vec::new(),
            devices: Vec::new(),
            labels: Vec::new(),
            annotations: Vec::new(),
            log_path: String::new(),
            stdin: false,
            stdin_once: false,
            tty: false,
            stop_signal: 0,
            pid: ContainerPid::Pod,
            security: Security {
                run_as_user: None,
                run_as_username: String::new(),
                run_as_group: None,
                supplemental_groups: Vec::new(),
                groups_policy: GroupsPolicy::Merge,
                add_capabilities: Vec::new(),
                drop_capabilities: Vec::new(),
                ambient_capabilities: Vec::new(),
                privileged: false,
                readonly_rootfs: false,
                attributes: Attributes::default(),
                wants_default_seccomp: false,
                masked_paths: Vec::new(),
                readonly_paths: Vec::new(),
                localhost_seccomp: String::new(),
                apparmor: String::new(),
                selinux: None,
            },
            resources: Resources::default(),
            cdi_devices: Vec::new(),
        }
    }
}
