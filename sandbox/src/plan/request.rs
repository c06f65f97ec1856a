//! What plans are made from: plain values, all public, filled in by the daemon from the CRI request, the image's
//! configuration and the adjustments of plugins. Host paths are [`PathBuf`], container paths are [`String`]; both are
//! checked when the plan is compiled.

use std::path::PathBuf;

use coracle_wire::Propagation;

use crate::capability::Capabilities;
use crate::identity::Identity;
use crate::userns::UserMappings;

/// Which namespaces the pod has of its own; the others are the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodNamespaces {
    /// Network.
    pub network: bool,
    /// IPC, and with it /dev/shm.
    pub ipc: bool,
    /// UTS: the host name.
    pub uts: bool,
}

/// A pod's setup.
#[derive(Clone, Debug)]
pub struct SandboxPlan {
    /// Namespaces of its own.
    pub namespaces: PodNamespaces,
    /// Containers share a PID namespace of the pod's own.
    pub shares_pids: bool,
    /// Existing host directory that gets the pod's /dev/shm, where the IPC namespace is its own. The mount lives in
    /// the monitor's mount namespace only.
    pub shm_directory: PathBuf,
    /// Set where the UTS namespace is its own; at most 64 bytes.
    pub host_name: String,
    /// Names with dots or slashes, and values (CRI 3.12).
    pub sysctls: Vec<(String, String)>,
    /// With a network namespace: let every user bind low ports and send pings, unless `sysctls` says otherwise.
    pub convenience_sysctls: bool,
    /// -998 as the kubelet expects of a pod's infrastructure, or left alone.
    pub oom_score_adj: Option<i32>,
    /// Of the pod's user namespace, which owns the others; `None`: the host's.
    pub user_namespace: Option<UserMappings>,
    /// SELinux label of /dev/shm.
    pub label: Option<String>,
}

/// The root file system: layers below, what the container writes above.
#[derive(Clone, Debug)]
pub struct Root {
    /// What the names in `lowers` are relative to, so that many layers fit in one page of options.
    pub layers_directory: PathBuf,
    /// Highest layer first; at least one.
    pub lowers: Vec<String>,
    /// What the container writes.
    pub upper: PathBuf,
    /// OverlayFS's own, on the same file system as `upper`.
    pub work: PathBuf,
    /// Empty directory to mount on.
    pub mountpoint: PathBuf,
    /// `readonly_rootfs`.
    pub read_only: bool,
    /// SELinux label of all files of it, and of the file systems that are mounted for the container alone.
    pub label: Option<String>,
}

/// Where a mount's files come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Host path, existing, links already followed: bound with all that is mounted below.
    Host(PathBuf),
    /// A file system that is mounted afresh: a plugin's wish.
    Fresh {
        /// tmpfs, proc, sysfs, mqueue, devpts.
        kind: FreshKind,
        /// Options of the file system itself, one each.
        options: Vec<String>,
    },
    /// An image's layers, put together (KEP-4639).
    Image {
        /// Names below [`Root::layers_directory`], highest layer first; at least one.
        lowers: Vec<String>,
        /// Below the image's root, resolved inside it; empty is all of it.
        sub_path: String,
        /// An empty directory of the host: an overlay that nobody writes needs two layers.
        empty: PathBuf,
    },
}

/// File systems that may be mounted afresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreshKind {
    /// In memory.
    Tmpfs,
    /// Processes of the container's pid namespace.
    Proc,
    /// Devices, those of the pod's network among them.
    Sysfs,
    /// POSIX message queues.
    Mqueue,
    /// Terminals.
    Devpts,
}

/// A mount that was asked for.
#[derive(Clone, Debug)]
pub struct Mount {
    /// Where its files come from.
    pub source: Source,
    /// Container path; a relative one starts at `/`.
    pub target: String,
    /// Read-only at its root; what is mounted below keeps its own state.
    pub read_only: bool,
    /// Read-only all the way down (KEP-3857): needs `read_only` and private propagation.
    pub recursive_read_only: bool,
    /// PRIVATE, HOST_TO_CONTAINER (slave), BIDIRECTIONAL (shared).
    pub propagation: Propagation,
    /// Mount option `noexec`.
    pub no_exec: bool,
    /// Mount option `nosuid`.
    pub no_suid: bool,
    /// Mount option `nodev`.
    pub no_dev: bool,
    /// Owners as the pod's user namespace maps them.
    pub maps_owners: bool,
}

/// What stands at /sys/fs/cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupMount {
    /// Nothing: the host has no cgroup file system.
    None,
    /// v2 with a cgroup namespace: a fresh mount shows the container's own part only.
    Namespaced,
    /// v2 with the host's cgroup namespace: this host directory bound, as a fresh mount would reset the options
    /// (`nsdelegate`, `memory_recursiveprot`) of the host's (CRI E-20).
    Host(PathBuf),
    /// v1 and hybrid: a tmpfs with the container's own directory of every hierarchy.
    Legacy {
        /// Name below /sys/fs/cgroup, and the container's directory on the host.
        directories: Vec<(String, PathBuf)>,
        /// Name and content of links, for controllers mounted together: `cpu` → `cpu,cpuacct`.
        links: Vec<(String, String)>,
    },
}

/// The pod's generated files on the host.
#[derive(Clone, Debug)]
pub struct Files {
    /// For /etc/hosts.
    pub hosts: PathBuf,
    /// For /etc/hostname.
    pub host_name: PathBuf,
    /// For /etc/resolv.conf.
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

/// A device node beside the default ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Container path.
    pub path: String,
    /// Kind.
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
    /// Soft.
    pub soft: u64,
    /// Hard.
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
    /// argv, at least the name.
    pub arguments: Vec<String>,
    /// `NAME=value` each; where a name comes twice the last one wins for `PATH`.
    pub environment: Vec<Vec<u8>>,
    /// Container path; empty is `/`.
    pub working_directory: String,
    /// User and groups.
    pub identity: Identity,
    /// Its five sets.
    pub capabilities: Capabilities,
    /// `no_new_privs`.
    pub no_new_privileges: bool,
    /// -1000..=1000. `None` leaves what is inherited, which is the monitor's own: give 0 where nothing is asked for.
    pub oom_score_adj: Option<i32>,
    /// Resource limits.
    pub limits: Vec<Limit>,
    /// A terminal of its own from the container's devpts, also for an exec; its master side goes to the monitor.
    pub tty: bool,
    /// Filter; `None` is unconfined.
    pub seccomp: Option<Seccomp>,
    /// AppArmor profile that exec brings into force.
    pub apparmor: Option<String>,
    /// SELinux label that exec brings into force.
    pub selinux: Option<String>,
    /// What else of it the kernel schedules by.
    pub scheduling: Scheduling,
}

/// How a process is scheduled; `None` leaves what is inherited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// CPU.
    pub cpu: Option<CpuScheduling>,
    /// Class (1 realtime, 2 best effort, 3 idle) and priority (0 to 7) of its I/O.
    pub io: Option<(u32, u32)>,
    /// MPOL_… with its flags, and nodes 0 to 127 as a bit set.
    pub memory: Option<(u32, [u64; 2])>,
}

/// sched_setattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuScheduling {
    /// SCHED_…
    pub policy: u32,
    /// SCHED_FLAG_…
    pub flags: u64,
    /// -20 to 19.
    pub nice: i32,
    /// Of realtime policies.
    pub priority: u32,
    /// Runtime, deadline and period of SCHED_DEADLINE in nanoseconds.
    pub times: [u64; 3],
}

/// A namespace that a container is in instead of the pod's.
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
    /// CLONE_NEW…
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
    /// A cgroup namespace of its own (v2, not privileged).
    pub has_cgroup_namespace: bool,
    /// What /sys/fs/cgroup shows.
    pub cgroup_mount: CgroupMount,
    /// Whether it can be written; privileged containers can.
    pub is_cgroup_mount_writable: bool,
    /// In the order asked for.
    pub mounts: Vec<Mount>,
    /// Paths that the image declares as volumes: directories of the container's writable layer that are mounted on
    /// themselves, so that they stay writable below a read-only root. A mount on the path or above it replaces one.
    pub image_volumes: Vec<String>,
    /// Bound into /etc unless a mount covers them.
    pub files: Files,
    /// Host directory for /dev/shm: the pod's tmpfs, or the host's /dev/shm.
    pub shm: PathBuf,
    /// Besides the default nodes; where a path comes twice the first one wins.
    pub devices: Vec<DeviceNode>,
    /// Main process.
    pub process: Process,
    /// Covered. Ignored when privileged.
    pub masked_paths: Vec<String>,
    /// Made read-only. Ignored when privileged.
    pub readonly_paths: Vec<String>,
    /// /sys and /sys/fs/cgroup writable, nothing masked.
    pub privileged: bool,
    /// Of the pod's user namespace; `None`: the host's.
    pub user_namespace: Option<UserMappings>,
    /// Default mounts that are left out, by their targets.
    pub without_mounts: Vec<String>,
    /// Namespaces in place of the pod's, by files of the host; an empty path is a new one.
    pub namespaces: Vec<(NamespaceKind, PathBuf)>,
    /// Names and values, for the container's namespaces.
    pub sysctls: Vec<(String, String)>,
    /// Which namespaces are not the host's: what sysctls may be about.
    pub own_namespaces: PodNamespaces,
}

/// An exec in a running container.
#[derive(Clone, Debug)]
pub struct ExecPlan {
    /// As in [`ContainerPlan`].
    pub cgroup_joins: Vec<PathBuf>,
    /// The process; mostly a copy of the container's with other arguments.
    pub process: Process,
    /// As in [`ContainerPlan`].
    pub user_namespace: Option<UserMappings>,
}

/// Where a command is searched when the environment has no usable `PATH`, and the value it is then given (CRI 2.10).
pub const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Masked where the request has no security context at all (CRI 4.3; the kubelet always sends its own).
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

/// Read-only where the request has no security context at all (CRI 4.3).
pub const READONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
