//! Detects kernel features for `coracle check`: one row per requirement, with the consequence if it is missing and the
//! option that enables it. Everything is read from /proc and /sys, so the check changes nothing on the host.

use std::fs;
use std::path::Path;

use caps::Capability;

use crate::cgroup::{Cgroups, Version};
use crate::{Error, capability, lsm, userns};

/// Whether a requirement is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The feature is present.
    Have,
    /// The feature is missing.
    Missing,
    /// The feature cannot be detected on this host.
    Unknown,
}

/// One requirement of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// Short name of the feature.
    pub name: &'static str,
    /// Whether pods cannot run without the feature.
    pub is_required: bool,
    /// Whether the feature is present.
    pub state: State,
    /// The observed value; may be empty.
    pub found: String,
    /// Consequence if the feature is missing.
    pub without: &'static str,
    /// The way to enable the feature: kernel option, boot parameter, sysctl, file.
    pub fix: &'static str,
}

/// All requirements on the kernel, required ones first. `config` is the kernel's configuration if the caller has read
/// it from the kernel; otherwise the distribution's file is read.
///
/// # Errors
/// [`Error::Kernel`] if the kernel's version cannot be read.
pub fn needs(config: Option<String>) -> Result<Vec<Need>, Error> {
    let mut kernel = Kernel::look()?;
    if let Some(config) = config {
        kernel.config = config;
    }
    let needs = ROWS.iter().map(|row| {
        let state = (row.state)(&kernel);
        Need {
            name: row.name,
            is_required: row.is_required,
            state,
            found: kernel.found(row, state),
            without: row.without,
            fix: row.fix,
        }
    });
    Ok(needs.collect())
}

/// Whether mounts can be made read-only recursively (`mount_setattr`, Linux 5.12).
///
/// # Errors
/// [`Error::Kernel`] if the kernel's version cannot be read.
pub fn has_recursive_read_only() -> Result<bool, Error> {
    Ok(kernel_version(&release()?) >= (5, 12))
}

/// Checks whether pods can have user namespaces with layers in the directory `layers`.
///
/// # Errors
/// A description of the missing feature.
pub fn user_namespaces(layers: &Path) -> Result<(), String> {
    let release = release().map_err(|error| error.to_string())?;
    // Older kernels do not support idmapped layers in OverlayFS.
    if kernel_version(&release) < (5, 19) {
        return Err("they need Linux 5.19".to_owned());
    }
    userns::check(layers).map_err(|error| error.to_string())
}

/// Whether pods can run: no required feature is missing.
pub fn can_run(needs: &[Need]) -> bool {
    !needs.iter().any(|need| need.is_required && need.state == State::Missing)
}

/// One row of the table; the page docs/kernel.md has one row for each.
struct Row {
    name: &'static str,
    is_required: bool,
    without: &'static str,
    fix: &'static str,
    state: fn(&Kernel) -> State,
}

const fn required(
    name: &'static str,
    fix: &'static str,
    without: &'static str,
    state: fn(&Kernel) -> State,
) -> Row {
    Row { name, is_required: true, without, fix, state }
}

const fn optional(
    name: &'static str,
    fix: &'static str,
    without: &'static str,
    state: fn(&Kernel) -> State,
) -> Row {
    Row { name, is_required: false, without, fix, state }
}

/// All rows, required ones first, in the order in which a pod needs them.
#[rustfmt::skip]
static ROWS: [Row; 40] = [
    required("Linux 5.10", "a newer kernel", "calls that every pod needs are missing",
        |kernel| kernel.since(5, 10)),
    required("CAP_SYS_ADMIN", "run as root, outside a container", "no mounts and no namespaces can be made",
        |kernel| kernel.capability(Capability::CAP_SYS_ADMIN)),
    required("cgroups", "mount cgroup2 at /sys/fs/cgroup", "no pod can be made",
        |kernel| have(kernel.cgroups.is_some())),
    required("overlayfs", "CONFIG_OVERLAY_FS", "no container has a root",
        |kernel| kernel.filesystem("overlay", "OVERLAY_FS")),
    required("tmpfs", "CONFIG_TMPFS", "no container has a /dev",
        |kernel| kernel.filesystem("tmpfs", "TMPFS")),
    required("devpts", "CONFIG_UNIX98_PTYS", "no container has a /dev/pts",
        |kernel| kernel.filesystem("devpts", "UNIX98_PTYS")),
    required("mqueue", "CONFIG_POSIX_MQUEUE", "no container has a /dev/mqueue",
        |kernel| kernel.filesystem("mqueue", "POSIX_MQUEUE")),
    required("mnt namespaces", "CONFIG_NAMESPACES", "no container has a root of its own",
        |_| namespace("mnt")),
    required("pid namespaces", "CONFIG_PID_NS", "containers would see each other's processes",
        |_| namespace("pid")),
    required("net namespaces", "CONFIG_NET_NS", "pods would all share the node's network",
        |_| namespace("net")),
    required("ipc namespaces", "CONFIG_IPC_NS", "pods would share the node's IPC",
        |_| namespace("ipc")),
    required("uts namespaces", "CONFIG_UTS_NS", "pods would share the node's name",
        |_| namespace("uts")),
    required("cgroup device programs", "CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF", "on cgroup v2 no container is given its devices",
        Kernel::device_programs),
    optional("cgroup v2", "boot with systemd.unified_cgroup_hierarchy=1", "no memory QoS, no PSI, no limits in `unified`",
        |kernel| have(kernel.is_v2())),
    optional("cgroup controller cpu", "CONFIG_CGROUP_SCHED, CONFIG_CFS_BANDWIDTH", "CPU limits do not hold",
        |kernel| kernel.controller("cpu")),
    optional("cgroup controller memory", "CONFIG_MEMCG, boot with cgroup_enable=memory", "memory limits do not hold",
        |kernel| kernel.controller("memory")),
    optional("cgroup controller pids", "CONFIG_CGROUP_PIDS", "limits on processes do not hold",
        |kernel| kernel.controller("pids")),
    optional("cgroup controller cpuset", "CONFIG_CPUSETS", "containers cannot be bound to CPUs",
        |kernel| kernel.controller("cpuset")),
    optional("cgroup controller io", "CONFIG_BLK_CGROUP", "no shares of the disk; plugins' limits of it are refused",
        |kernel| kernel.controller(if kernel.is_v2() { "io" } else { "blkio" })),
    optional("cgroup controller hugetlb", "CONFIG_CGROUP_HUGETLB", "limits on huge pages are not applied",
        |kernel| kernel.controller("hugetlb")),
    optional("cgroup namespaces", "CONFIG_CGROUPS, Linux 4.6", "containers see the node's cgroup paths",
        |_| namespace("cgroup")),
    optional("cgroup.kill", "Linux 5.14", "processes are killed one by one",
        |kernel| kernel.since(5, 14)),
    optional("PSI", "CONFIG_PSI, boot with psi=1", "statistics say nothing about pressure",
        |_| exists("/proc/pressure/cpu")),
    optional("seccomp", "CONFIG_SECCOMP_FILTER", "containers with a profile are refused",
        |_| exists("/proc/sys/kernel/seccomp/actions_avail")),
    optional("AppArmor", "CONFIG_SECURITY_APPARMOR, boot with apparmor=1", "no default profile; containers that name one are refused",
        |_| have(lsm::apparmor().is_some())),
    optional("mount_setattr", "Linux 5.12", "no recursive read-only mounts",
        |kernel| kernel.since(5, 12)),
    optional("user namespaces", "CONFIG_USER_NS, sysctl user.max_user_namespaces", "no pods with hostUsers=false",
        |_| both(have(number("/proc/sys/user/max_user_namespaces").is_some_and(|most| most > 0)), namespace("user"))),
    optional("idmapped overlayfs", "Linux 5.19", "no pods with hostUsers=false",
        |kernel| kernel.since(5, 19)),
    optional("inotify", "CONFIG_INOTIFY_USER", "changes of the CNI configuration are seen late",
        |_| exists("/proc/sys/fs/inotify")),
    optional("veth", "CONFIG_VETH", "most CNI plugins cannot attach a pod",
        |kernel| kernel.module("veth", "VETH")),
    optional("bridge", "CONFIG_BRIDGE", "the CNI plugin bridge, and flannel with it, do not work",
        |kernel| kernel.module("bridge", "BRIDGE")),
    optional("br_netfilter", "CONFIG_BRIDGE_NETFILTER", "services do not reach pods of their own node",
        |kernel| kernel.module("br_netfilter", "BRIDGE_NETFILTER")),
    optional("vxlan", "CONFIG_VXLAN", "flannel has no vxlan backend, the default of k3s",
        |kernel| kernel.module("vxlan", "VXLAN")),
    optional("nftables", "CONFIG_NF_TABLES", "no masquerading and no host ports by nftables",
        |kernel| kernel.module("nf_tables", "NF_TABLES")),
    optional("nftables NAT", "CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4",
        "no masquerading and no host ports by the built-in network",
        |kernel| {
            let nat = both(kernel.module("nft_nat", "NFT_NAT"), kernel.module("nft_masq", "NFT_MASQ"));
            both(nat, kernel.module("nft_fib_ipv4", "NFT_FIB_IPV4"))
        }),
    optional("nftables for bridges", "CONFIG_NF_TABLES_BRIDGE, CONFIG_NFT_BRIDGE_META",
        "pods of the built-in network can answer for the addresses of their neighbours",
        |kernel| kernel.option("NF_TABLES_BRIDGE")),
    optional("NAT", "CONFIG_NF_NAT", "no masquerading, no host ports, no services",
        |kernel| kernel.module("nf_nat", "NF_NAT")),
    optional("conntrack", "CONFIG_NF_CONNTRACK", "no masquerading, no host ports, no services",
        |kernel| kernel.module("nf_conntrack", "NF_CONNTRACK")),
    optional("CAP_SYS_RESOURCE", "run outside a container", "limits cannot be raised, oom_score_adj cannot be lowered",
        |kernel| kernel.capability(Capability::CAP_SYS_RESOURCE)),
    optional("fast joining of cgroups", "Linux 5.15", "on cgroup v1 each container takes some 20 ms longer to start",
        |kernel| if kernel.is_v2() { State::Have } else { kernel.since(5, 15) }),
];

/// The kernel's release, as printed by `uname -r`.
///
/// # Errors
/// [`Error::Kernel`] if the kernel does not answer.
pub fn release() -> Result<String, Error> {
    let name =
        nix::sys::utsname::uname().map_err(|errno| Error::kernel("ask", "the kernel's version", errno))?;
    Ok(name.release().to_string_lossy().into_owned())
}

/// Data about this kernel that is read only once.
struct Kernel {
    version: (u32, u32),
    filesystems: String,
    cgroups: Option<Cgroups>,
    /// Content of `modules.builtin` and `modules.dep` of the running kernel; empty on hosts without modules.
    modules: String,
    /// Content of /boot/config-RELEASE; empty if it does not exist.
    config: String,
    capabilities: u64,
    /// The kernel's release, as printed by `uname -r`.
    release: String,
}

impl Kernel {
    fn look() -> Result<Self, Error> {
        let release = release()?;
        let listed = |list: &str| text(&format!("/lib/modules/{release}/modules.{list}"));
        Ok(Self {
            version: kernel_version(&release),
            filesystems: text("/proc/filesystems"),
            cgroups: Cgroups::probe().ok(),
            modules: listed("builtin") + &listed("dep"),
            config: text(&format!("/boot/config-{release}")),
            capabilities: capability::effective().unwrap_or_default(),
            release: release.clone(),
        })
    }

    fn since(&self, major: u32, minor: u32) -> State {
        have(self.version >= (major, minor))
    }

    /// Text about what the host has for the row; empty if the row's name is sufficient.
    fn found(&self, row: &Row, state: State) -> String {
        let is_missing = state == State::Missing;
        if row.name.starts_with("Linux ") || is_missing && row.fix.starts_with("Linux ") {
            format!("this is Linux {}", self.release)
        } else if is_missing && row.name.starts_with("CAP_") {
            format!("not in effect for user {}", nix::unistd::geteuid())
        } else {
            String::new()
        }
    }

    fn is_v2(&self) -> bool {
        self.cgroups.as_ref().is_some_and(|cgroups| cgroups.version() == Version::V2)
    }

    fn controller(&self, name: &str) -> State {
        have(self.cgroups.as_ref().is_some_and(|cgroups| cgroups.has_controller(name)))
    }

    /// State of device restrictions: v1 has a controller for devices; v2 uses eBPF programs, which only the kernel's
    /// configuration shows.
    fn device_programs(&self) -> State {
        if self.is_v2() { self.option("CGROUP_BPF") } else { State::Have }
    }

    /// State of a configuration option; `Unknown` if the configuration is not available.
    fn option(&self, option: &str) -> State {
        let line = format!("CONFIG_{option}=");
        match self.config.lines().any(|one| one.starts_with(&line)) {
            true => State::Have,
            false if self.config.is_empty() => State::Unknown,
            false => State::Missing,
        }
    }

    fn capability(&self, capability: Capability) -> State {
        have(self.capabilities & capability.bitmask() != 0)
    }

    /// State of a file system: if it is not listed, because its module is not loaded, the module is searched.
    fn filesystem(&self, name: &str, option: &str) -> State {
        let is_listed = self.filesystems.split_ascii_whitespace().any(|word| word == name);
        if is_listed { State::Have } else { self.module(name, option) }
    }

    /// State of a module: loaded, built in with parameters, on disk, or set in the configuration. `Unknown` if none of
    /// these files exist.
    fn module(&self, name: &str, option: &str) -> State {
        let on_disk = self.modules.lines().any(|line| {
            let path = line.split(':').next().unwrap_or_default();
            let file = path.rsplit('/').next().unwrap_or_default();
            file.split('.').next().is_some_and(|stem| stem.replace('-', "_") == name)
        });
        if Path::new("/sys/module").join(name).exists() || on_disk {
            return State::Have;
        }
        match self.option(option) {
            State::Unknown if !self.modules.is_empty() => State::Missing,
            told => told,
        }
    }
}

/// Parses `6.1.0-18-arm64` as (6, 1); an invalid version counts as older than all others.
pub(crate) fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers =
        release.split(|character: char| !character.is_ascii_digit()).map(|part| part.parse().ok());
    (numbers.next().flatten().unwrap_or(0), numbers.next().flatten().unwrap_or(0))
}

/// Reads a file as text; empty if it cannot be read. Lists of modules have up to 1 MiB.
fn text(path: &str) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn number(path: &str) -> Option<u64> {
    text(path).trim().parse().ok()
}

fn have(is_there: bool) -> State {
    if is_there { State::Have } else { State::Missing }
}

fn exists(path: &str) -> State {
    have(Path::new(path).exists())
}

fn namespace(name: &str) -> State {
    have(Path::new("/proc/self/ns").join(name).exists())
}

fn both(one: State, other: State) -> State {
    if one == State::Have { other } else { one }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_parsed() {
        let table = [
            ("5.10.0", (5, 10)),
            ("6.18.44-fc-v509", (6, 18)),
            ("6.1-rc3", (6, 1)),
            ("10", (10, 0)),
            ("", (0, 0)),
            ("odd", (0, 0)),
            ("99999999999.1", (0, 1)),
        ];
        for (release, expected) in table {
            assert_eq!(kernel_version(release), expected, "{release}");
        }
    }

    #[test]
    fn a_host_that_runs_this_test_can_run_pods_as_root() {
        let mut needs = needs(None).unwrap();
        assert!(can_run(&needs), "{needs:#?}");
        needs[0].state = State::Missing;
        assert!(!can_run(&needs), "{needs:#?}");
    }

    /// The page has a row for each requirement and no others.
    #[test]
    fn the_page_on_kernels_lists_every_requirement() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernel.md");
        let page = fs::read_to_string(path).unwrap();
        let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).collect();
        let row = |row: &Row| {
            let weight = if row.is_required { "yes" } else { "" };
            format!("| {} | {weight} | {} | {} |", row.name, row.fix, row.without).replace("  ", " ")
        };
        let expected: Vec<String> = ROWS.iter().map(row).collect();
        assert_eq!(listed[1..], expected, "what it should be:\n{}", expected.join("\n"));
    }

    #[test]
    fn modules_are_found_by_their_file_names() {
        let mut kernel = Kernel::look().unwrap();
        kernel.config.clear();
        kernel.modules.clear();
        assert_eq!(kernel.module("no_such", "NO_SUCH"), State::Unknown);
        kernel.modules = "kernel/net/no-such.ko.zst: kernel/x.ko\n".into();
        assert_eq!(kernel.module("no_such", "NO_SUCH"), State::Have);
        assert_eq!(kernel.module("no_other", "NO_OTHER"), State::Missing);
        kernel.config = "# CONFIG_A is not set\nCONFIG_NO_OTHER=m\n".into();
        assert_eq!(kernel.module("no_other", "NO_OTHER"), State::Have);
    }
}
