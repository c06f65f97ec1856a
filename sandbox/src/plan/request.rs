//! Input of plans: public fields that the daemon fills from the CRI request, the image's configuration and the
//! adjustments of plugins. Host paths are [`PathBuf`], container paths are [`String`]; both are validated when the plan
//! is compiled.

use std::path::PathBuf;

use coracle_wire::Propagation;

use crate::capability::Capabilities;
use crate::identity::Identity;
use crate::userns::UserMappings;

/// Namespaces that the pod has of its own; the others are the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodNamespaces {
    /// Network.
    pub network: bool,
    /// IPC and /dev/shm.
    pub ipc: bool,
    /// UTS: the host name.
    pub uts: bool,
}

/// A pod's setup.
#[derive(Clone, Debug)]
pub struct SandboxPlan {
    /// The pod's own namespaces.
    pub namespaces: PodNamespaces,
    /// Whether containers share a PID namespace of the pod.
    pub shares_pids: bool,
    /// Existing host directory on which the pod's /dev/shm is mounted, if the pod has its own IPC namespace. The mount
    /// exists only in the monitor's mount namespace.
    pub shm_directory: PathBuf,
    /// Host name, for a pod with its own UTS namespace; at most 64 bytes.
    pub host_name: String,
    /// Names with dots or slashes, and values (CRI 3.12).
    pub sysctls: Vec<(String, String)>,
    /// In a pod with its own network namespace, allow every user to bind low ports and send pings, unless `sysctls`
    /// overrides it.
    pub convenience_sysctls: bool,
    /// OOM score of the monitor: -998, as the kubelet expects for a pod's infrastructure; `None`: unchanged.
    pub oom_score_adj: Option<i32>,
    /// Mappings of the pod's user namespace, which owns the others; `None`: the host's.
    pub user_namespace: Option<UserMappings>,
    /// SELinux label of /dev/shm.
    pub label: Option<String>,
}

/// The root file system: read-only layers and a writable layer.
#[derive(Clone, Debug)]
pub struct Root {
    /// Base directory of the names in `lowers`; short names allow many layers in one page of options.
    pub layers_directory: PathBuf,
    /// Highest layer first; at least one.
    pub lowers: Vec<String>,
    /// The writable layer.
    pub upper: PathBuf,
    /// Work directory of OverlayFS, on the same file system as `upper`.
    pub work: PathBuf,
    /// Empty directory for the mount.
    pub mountpoint: PathBuf,
    /// `readonly_rootfs`.
    pub read_only: bool,
    /// SELinux label of all its files, and of file systems that are mounted for this container only.
    pub label: Option<String>,
}

/// Source of a mount.
#[derive(Clone, Debug)]
pub enum Source {
    /// An existing host path with resolved links: bind-mounted with all submounts.
    Host(PathBuf),
    /// A new file system, requested by a plugin.
    Fresh {
        /// Type of the file system.
        kind: FreshKind,
        /// Options of the file system.
        options: Vec<String>,
    },
    /// The layers of an image (KEP-4639).
    Image {
        /// Names below [`Root::layers_directory`], highest layer first; at least one.
        lowers: Vec<String>,
        /// Path below the image's root, resolved inside it; empty: the root.
        sub_path: String,
        /// An empty directory of the host, because a read-only overlay needs two layers.
        empty: PathBuf,
    },
}

/// Types of new file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreshKind {
    /// tmpfs.
    Tmpfs,
    /// procfs of the container's PID namespace.
    Proc,
    /// sysfs, with the devices of the pod's network namespace.
    Sysfs,
    /// POSIX message queues.
    Mqueue,
    /// Terminals.
    Devpts,
}

/// A requested mount.
#[derive(Clone, Debug)]
pub struct Mount {
    /// Source of its files.
    pub source: Source,
    /// Container path; a relative one starts at `/`.
    pub target: String,
    /// Mount read-only; submounts keep their own state.
    pub read_only: bool,
    /// Mount recursively read-only (KEP-3857); requires `read_only` and private propagation.
    pub recursive_read_only: bool,
    /// PRIVATE, HOST_TO_CONTAINER (slave), BIDIRECTIONAL (shared).
    pub propagation: Propagation,
    /// Mount option `noexec`.
    pub no_exec: bool,
    /// Mount option `nosuid`.
    pub no_suid: bool,
    /// Mount option `nodev`.
    pub no_dev: bool,
    /// Make it an idmapped mount with the pod's user namespace.
    pub maps_owners: bool,
}

/// The mount at /sys/fs/cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupMount {
    /// No mount: the host has no cgroup file system.
    None,
    /// v2 with a cgroup namespace: a new mount, which shows only the container's own subtree.
    Namespaced,
    /// v2 with the host's cgroup namespace: a bind mount of this host directory, because a new mount would reset the
    /// options (`nsdelegate`, `memory_recursiveprot`) of the host's mount (CRI E-20).
    Host(PathBuf),
    /// v1 and hybrid: a tmpfs with the container's directory in every hierarchy.
    Legacy {
        /// Name below /sys/fs/cgroup, and the container's directory on the host.
        directories: Vec<(String, PathBuf)>,
        /// Name and target of links, for controllers that share a mount: `cpu` → `cpu,cpuacct`.
        links: Vec<(String, String)>,
    },
}

/// The pod's generated files on the host.
#[derive(Clone, Debug)]
pub struct Files {
    /// Source of /etc/hosts.
    pub hosts: PathBuf,
    /// Source of /etc/hostname.
    pub host_name: PathBuf,
    /// Source of /etc/resolv.conf.
    pub resolv_conf: PathBuf,
}

/// Character or block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// `c`
    Character,
    /// `b`
    Block,
}

/// A device node in addition to the default ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Container path.
    pub path: String,
    /// Kind of device.
    pub kind: DeviceKind,
    /// Below 4096.
    pub major: u32,
    /// Below 2^20.
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    /// User and group in the container.
    pub owner: (u32, u32),
}

/// One resource limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// RLIMIT_…
    pub resource: u32,
    /// Soft limit.
    pub soft: u64,
    /// Hard limit.
    pub hard: u64,
}

/// A compiled seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// `struct sock_filter`, 8 bytes each, at most 4096 of them.
    pub program: Vec<u8>,
    /// SECCOMP_FILTER_FLAG_…
    pub flags: u32,
}

/// A process, of a container or an exec.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// argv, with at least the name.
    pub arguments: Vec<String>,
    /// Environment as `NAME=value`; if `PATH` occurs several times, the last one is used for the search.
    pub environment: Vec<Vec<u8>>,
    /// Container path; empty means `/`.
    pub working_directory: String,
    /// User and groups.
    pub identity: Identity,
    /// Its five sets.
    pub capabilities: Capabilities,
    /// `no_new_privs`.
    pub no_new_privileges: bool,
    /// -1000..=1000. `None` keeps the inherited score of the monitor, so pass 0 as the default.
    pub oom_score_adj: Option<i32>,
    /// Resource limits.
    pub limits: Vec<Limit>,
    /// Whether it gets a terminal in the container's devpts, also for an exec; the monitor gets the master side.
    pub tty: bool,
    /// Seccomp filter; `None`: unconfined.
    pub seccomp: Option<Seccomp>,
    /// AppArmor profile, applied at exec.
    pub apparmor: Option<String>,
    /// SELinux label, applied at exec.
    pub selinux: Option<String>,
    /// Scheduling attributes.
    pub scheduling: Scheduling,
}

/// Scheduling attributes of a process; `None` keeps the inherited ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// CPU.
    pub cpu: Option<CpuScheduling>,
    /// I/O class (1 realtime, 2 best effort, 3 idle) and level (0 to 7).
    pub io: Option<(u32, u32)>,
    /// Memory policy: MPOL_… with its flags, and nodes 0 to 127 as a bit set.
    pub memory: Option<(u32, [u64; 2])>,
}

/// sched_setattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuScheduling {
    /// SCHED_…
    pub policy: u32,
    /// SCHED_FLAG_…
    pub flags: u64,
    /// Nice value, -20 to 19.
    pub nice: i32,
    /// Priority for realtime policies.
    pub priority: u32,
    /// Runtime, deadline and period of SCHED_DEADLINE in nanoseconds.
    pub times: [u64; 3],
}

/// Kinds of namespaces that can replace the pod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceKind {
    /// Network.
    Network,
    /// IPC.
    Ipc,
    /// UTS.
    Uts,
}

impl NamespaceKind {
    /// The CLONE_NEW… flag.
    pub(super) fn flag(self) -> u32 {
        match self {
            Self::Network => 0x4000_0000,
            Self::Ipc => 0x0800_0000,
            Self::Uts => 0x0400_0000,
        }
    }
}

/// A container.
#[derive(Clone, Debug)]
pub struct ContainerPlan {
    /// Root file system.
    pub root: Root,
    /// Files of cgroups to join by writing (`cgroup::Entry::join_files`).
    pub cgroup_joins: Vec<PathBuf>,
    /// Whether it gets its own cgroup namespace (v2, not privileged).
    pub has_cgroup_namespace: bool,
    /// The mount at /sys/fs/cgroup.
    pub cgroup_mount: CgroupMount,
    /// Whether that mount is writable, as in privileged containers.
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
    /// Main process.
    pub process: Process,
    /// Masked paths. Ignored if privileged.
    pub masked_paths: Vec<String>,
    /// Read-only paths. Ignored if privileged.
    pub readonly_paths: Vec<String>,
    /// /sys and /sys/fs/cgroup writable, nothing masked.
    pub privileged: bool,
    /// Mappings of the pod's user namespace; `None`: the host's.
    pub user_namespace: Option<UserMappings>,
    /// Targets of default mounts that are left out.
    pub without_mounts: Vec<String>,
    /// Namespaces that replace the pod's, as files of the host; an empty path means a new namespace.
    pub namespaces: Vec<(NamespaceKind, PathBuf)>,
    /// Names and values of sysctls in the container's namespaces.
    pub sysctls: Vec<(String, String)>,
    /// Namespaces that are not the host's, in which sysctls may be set.
    pub own_namespaces: PodNamespaces,
}

/// An exec in a running container.
#[derive(Clone, Debug)]
pub struct ExecPlan {
    /// Same field of [`ContainerPlan`].
    pub cgroup_joins: Vec<PathBuf>,
    /// The process: usually a copy of the container's with other arguments.
    pub process: Process,
    /// Same field of [`ContainerPlan`].
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

/// Files of the kernel that the lists of kubelets do not name and that root may write without any capability:
/// /proc/dynamic_debug/control (CONFIG_DYNAMIC_DEBUG_CORE, Debian's kernels have it) switches messages of the kernel's log
/// on, from all subsystems, for the whole node.
pub const KERNEL_CONTROLS: &[&str] = &["/proc/dynamic_debug"];
