//! Input of plans: public fields that the daemon fills from the CRI request, the image's configuration and the
//! adjustments of plugins. Host paths are [`PathBuf`], container paths are [`String`]; both are validated when the plan
//! is compiled.

use std::path::PathBuf;

use coracle_wire::Propagation;
use serde::{Deserialize, Serialize};

use crate::capability::Capabilities;
use crate::identity::Identity;
use crate::userns::UserMappings;

/// Encodes a path as its bytes: a path of serde has to be UTF-8.
mod path_bytes {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(path.as_os_str().as_bytes())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        <&[u8]>::deserialize(deserializer).map(|bytes| OsStr::from_bytes(bytes).into())
    }
}

/// Kinds of namespaces that the pod does not share with the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNamespaces {
    /// Whether the pod has its own network namespace.
    pub network: bool,
    /// Whether the pod has its own IPC namespace and /dev/shm.
    pub ipc: bool,
    /// Whether the pod has its own UTS namespace (host name).
    pub uts: bool,
}

/// The plan of a pod's set-up.
#[derive(Clone, Debug)]
pub struct SandboxPlan {
    /// The pod's own namespaces.
    pub namespaces: PodNamespaces,
    /// Whether the pod has a PID namespace that its containers share.
    pub shares_pids: bool,
    /// Existing host directory on which the pod's /dev/shm is mounted, if the pod has its own IPC namespace. The mount
    /// exists only in the monitor's mount namespace.
    pub shm_directory: PathBuf,
    /// Host name, for a pod with its own UTS namespace; at most 64 bytes.
    pub host_name: String,
    /// Names of sysctls, with dots or slashes, and their values (CRI 3.12).
    pub sysctls: Vec<(String, String)>,
    /// Whether every user of a pod with its own network namespace may bind low ports and send pings, unless
    /// `sysctls` overrides it.
    pub convenience_sysctls: bool,
    /// OOM score adjustment of the monitor: -998, as the kubelet expects for a pod's infrastructure; `None`: unchanged.
    pub oom_score_adj: Option<i32>,
    /// Mappings of the pod's user namespace, which owns its other namespaces; `None`: the host's user namespace.
    pub user_namespace: Option<UserMappings>,
    /// SELinux label of the files in the pod's /dev/shm; `None`: not set.
    pub label: Option<String>,
}

/// The root file system: read-only layers and a writable layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Root {
    /// Base directory of the names in `lowers`; short names allow many layers in one page of options.
    pub layers_directory: PathBuf,
    /// Names of the layers, highest first; at least one.
    pub lowers: Vec<String>,
    /// Directory of the writable layer (OverlayFS upperdir).
    pub upper: PathBuf,
    /// Work directory of OverlayFS, on the same file system as `upper`.
    pub work: PathBuf,
    /// Empty directory on which the root file system is mounted.
    pub mountpoint: PathBuf,
    /// Whether the root file system is read-only (`readonly_rootfs`).
    pub read_only: bool,
    /// SELinux label of all files of the root file system, and of file systems that are mounted only for this
    /// container; `None`: not set.
    pub label: Option<String>,
}

/// Source of a mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Source {
    /// An existing host path with resolved links: bind-mounted with all submounts. The target of a link may be no UTF-8.
    Host(#[serde(with = "path_bytes")] PathBuf),
    /// A new file system, requested by a plugin.
    Fresh {
        /// Type of the file system.
        kind: FreshKind,
        /// Options of the file system.
        options: Vec<String>,
    },
    /// The layers of an image, for an image volume (KEP-4639).
    Image {
        /// Names of the layers below [`Root::layers_directory`], highest first; at least one.
        lowers: Vec<String>,
        /// Path below the image's root, resolved inside it; empty: the root.
        sub_path: String,
        /// An empty directory of the host, because a read-only overlay needs two layers.
        empty: PathBuf,
    },
}

/// Types of new file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FreshKind {
    /// tmpfs: a new file system in memory.
    Tmpfs,
    /// procfs of the container's PID namespace.
    Proc,
    /// sysfs, with the devices of the pod's network namespace.
    Sysfs,
    /// mqueue: POSIX message queues.
    Mqueue,
    /// devpts: an instance that only the container uses.
    Devpts,
}

/// A requested mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mount {
    /// Source of the mounted files.
    pub source: Source,
    /// Container path; a relative one starts at `/`.
    pub target: String,
    /// Whether the mount is read-only; submounts keep their own state.
    pub read_only: bool,
    /// Whether the mount and its submounts are read-only (KEP-3857); requires `read_only` and private propagation.
    pub recursive_read_only: bool,
    /// Propagation: the CRI's PRIVATE, HOST_TO_CONTAINER (slave) or BIDIRECTIONAL (shared).
    pub propagation: Propagation,
    /// Whether the mount has the option `noexec`.
    pub no_exec: bool,
    /// Whether the mount has the option `nosuid`.
    pub no_suid: bool,
    /// Whether the mount has the option `nodev`.
    pub no_dev: bool,
    /// Whether the mount is idmapped with the pod's user namespace.
    pub maps_owners: bool,
}

/// The mount at /sys/fs/cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupMount {
    /// No mount: the host has no cgroup file system.
    None,
    /// cgroup v2 with a cgroup namespace: a new mount, which shows only the container's own subtree.
    Namespaced,
    /// cgroup v2 with the host's cgroup namespace: a bind mount of this host directory, because a new mount would reset
    /// the options (`nsdelegate`, `memory_recursiveprot`) of the host's mount (CRI E-20).
    Host(PathBuf),
    /// cgroup v1 and hybrid: a tmpfs with the container's directory in every v1 hierarchy.
    Legacy {
        /// Name below /sys/fs/cgroup, and the container's directory on the host.
        directories: Vec<(String, PathBuf)>,
        /// Name and target of links, for controllers that share a mount: `cpu` → `cpu,cpuacct`.
        links: Vec<(String, String)>,
    },
}

/// Host paths of the pod's generated files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Files {
    /// Host path of the file for /etc/hosts.
    pub hosts: PathBuf,
    /// Host path of the file for /etc/hostname.
    pub host_name: PathBuf,
    /// Host path of the file for /etc/resolv.conf.
    pub resolv_conf: PathBuf,
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// Character device (`c`).
    Character,
    /// Block device (`b`).
    Block,
}

/// A device node in addition to the default ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Container path of the node.
    pub path: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Major number, below 4096.
    pub major: u32,
    /// Minor number, below 2^20.
    pub minor: u32,
    /// Permission bits of the node.
    pub mode: u32,
    /// User and group ID of the owner in the container.
    pub owner: (u32, u32),
}

/// One resource limit (setrlimit(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// The resource, a number RLIMIT_….
    pub resource: u32,
    /// Soft limit.
    pub soft: u64,
    /// Hard limit.
    pub hard: u64,
}

/// A compiled seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seccomp {
    /// The program: instructions of type `struct sock_filter`, 8 bytes each, at most 4096.
    pub program: Vec<u8>,
    /// Flags of the filter (SECCOMP_FILTER_FLAG_…).
    pub flags: u32,
}

/// A resolved process: what a container's record keeps of its main process, and what an exec has in common with it. Its
/// encoding in postcard is part of the record's, so each change of a field needs another version of the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Program and arguments (argv), at least one element.
    pub arguments: Vec<String>,
    /// Environment as `NAME=value`; if `PATH` occurs several times, the last one is used for the search.
    pub environment: Vec<Vec<u8>>,
    /// Working directory as a container path; empty means `/`.
    pub working_directory: String,
    /// User and groups of the process.
    pub identity: Identity,
    /// The capability sets of the process.
    pub capabilities: Capabilities,
    /// Attributes that are taken from the request unchanged.
    pub attributes: Attributes,
    /// OOM score adjustment, -1000 to 1000. It is always set, because a process would otherwise inherit the adjustment
    /// of the monitor.
    pub oom_score_adj: i32,
}

/// Attributes of a process that are taken from the request unchanged: they depend neither on the image nor on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Whether `no_new_privs` is set.
    pub no_new_privileges: bool,
}

/// The confinement of all processes of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Seccomp filter; `None`: no filter.
    pub seccomp: Option<Seccomp>,
    /// AppArmor profile, applied at exec; `None`: no profile.
    pub apparmor: Option<String>,
    /// SELinux label, applied at exec; `None`: not set.
    pub selinux: Option<String>,
}

/// The plan of one process: the main process of a container, or that of an exec.
#[derive(Clone, Debug, Default)]
pub struct ProcessPlan {
    /// The resolved process.
    pub process: Process,
    /// Resource limits of the process.
    pub limits: Vec<Limit>,
    /// Whether the process gets a terminal in the container's devpts, also for an exec; the monitor gets the master
    /// side.
    pub tty: bool,
    /// The confinement of the process.
    pub confinement: Confinement,
}

/// Scheduling attributes of a process; `None` keeps the inherited value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduling {
    /// CPU scheduling; `None`: inherited.
    pub cpu: Option<CpuScheduling>,
    /// I/O class (1 realtime, 2 best effort, 3 idle) and level (0 to 7); `None`: inherited.
    pub io: Option<(u32, u32)>,
    /// Memory policy: MPOL_… with its flags, and nodes 0 to 127 as a bit set; `None`: inherited.
    pub memory: Option<(u32, [u64; 2])>,
}

/// Attributes of CPU scheduling, for sched_setattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuScheduling {
    /// The scheduling policy (SCHED_…).
    pub policy: u32,
    /// Scheduling flags (SCHED_FLAG_…).
    pub flags: u64,
    /// Nice value, -20 to 19.
    pub nice: i32,
    /// Priority for realtime policies.
    pub priority: u32,
    /// Runtime, deadline and period of SCHED_DEADLINE in nanoseconds.
    pub times: [u64; 3],
}

/// Kinds of namespaces that can replace the pod's namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceKind {
    /// Network namespace.
    Network,
    /// IPC namespace.
    Ipc,
    /// UTS namespace.
    Uts,
}

impl NamespaceKind {
    /// The CLONE_NEW… flag of the kind.
    pub(super) fn flag(self) -> u32 {
        match self {
            Self::Network => 0x4000_0000,
            Self::Ipc => 0x0800_0000,
            Self::Uts => 0x0400_0000,
        }
    }
}

/// The plan of a container without its main process. Its encoding in postcard is kept from the creation of the container to its
/// start, so each change of a field needs another version of that file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerPlan {
    /// Root file system of the container.
    pub root: Root,
    /// Cgroup files to which the process writes to join its cgroups (`cgroup::Entry::join_files`).
    pub cgroup_joins: Vec<PathBuf>,
    /// Whether the container gets its own cgroup namespace (cgroup v2, not privileged).
    pub has_cgroup_namespace: bool,
    /// Whether the kernel has /proc/kcore, the target of /dev/core.
    pub has_kcore: bool,
    /// The mount at /sys/fs/cgroup.
    pub cgroup_mount: CgroupMount,
    /// Whether the mount at /sys/fs/cgroup is writable, as in privileged containers.
    pub is_cgroup_mount_writable: bool,
    /// Requested mounts, in their order.
    pub mounts: Vec<Mount>,
    /// Paths that the image declares as volumes: directories of the writable layer that are bind-mounted on themselves,
    /// so that they stay writable below a read-only root. A mount on the path or above it replaces an image volume.
    pub image_volumes: Vec<String>,
    /// Files that are bind-mounted in /etc, unless a requested mount replaces them.
    pub files: Files,
    /// Host directory for /dev/shm: the pod's tmpfs, or the host's /dev/shm.
    pub shm: PathBuf,
    /// Device nodes in addition to the default ones; if a path occurs twice, the first one is used.
    pub devices: Vec<DeviceNode>,
    /// Scheduling attributes of the main process.
    pub scheduling: Scheduling,
    /// Masked paths; ignored for privileged containers.
    pub masked_paths: Vec<String>,
    /// Read-only paths; ignored for privileged containers.
    pub readonly_paths: Vec<String>,
    /// Whether the container is privileged: /sys and /sys/fs/cgroup are writable, and no path is masked or read-only.
    pub privileged: bool,
    /// Mappings of the pod's user namespace; `None`: the host's user namespace.
    pub user_namespace: Option<UserMappings>,
    /// Targets of default mounts that are omitted.
    pub without_mounts: Vec<String>,
    /// Kinds of namespaces that replace the pod's, with files of the host; an empty path means a new namespace.
    pub namespaces: Vec<(NamespaceKind, PathBuf)>,
    /// Names and values of sysctls in the container's namespaces.
    pub sysctls: Vec<(String, String)>,
    /// Namespaces of the container that are not the host's, in which sysctls may be set.
    pub own_namespaces: PodNamespaces,
}

/// Points at which the process of a container waits for `Request::Resume` before it continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// The process does not wait.
    Never,
    /// Before the change to the requested user: the container is complete, and its program does not run.
    BeforeUser,
    /// Before the change to the requested user, and before pivot_root, when the namespaces have been created and everything is
    /// mounted except the masks and the terminal; with a monitor before version 8 of the frames only the root is mounted. At the
    /// latter point the process has access to all of the host's files, which hooks in its namespaces need (OCI runtime-spec,
    /// config.md, createContainer).
    BeforeRootAndUser,
}

/// The plan of an exec in a running container.
#[derive(Clone, Debug)]
pub struct ExecPlan {
    /// Cgroup files to which the process writes, as [`ContainerPlan::cgroup_joins`].
    pub cgroup_joins: Vec<PathBuf>,
    /// The process: usually a copy of the container's with other arguments.
    pub process: ProcessPlan,
    /// Mappings of the pod's user namespace, as [`ContainerPlan::user_namespace`].
    pub user_namespace: Option<UserMappings>,
}

/// Default `PATH`, for the search of the command and for the environment (CRI 2.10).
pub const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Masked paths if the request has no security context (CRI 4.3; the kubelet always sends its own).
pub const MASKED_PATHS: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// Read-only paths if the request has no security context (CRI 4.3).
pub const READONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Kernel files that the lists of kubelets do not contain and that root may write without any capability:
/// /proc/dynamic_debug/control (CONFIG_DYNAMIC_DEBUG_CORE, enabled in Debian's kernels) enables messages of all
/// subsystems in the kernel log of the whole node.
pub const KERNEL_CONTROLS: &[&str] = &["/proc/dynamic_debug"];
