//! What this kernel has, for `coracle check`: one line per need, with what is lost without it and what to switch on.
//! Everything is read from /proc and /sys; nothing is tried out, so that asking changes nothing on the host.

use std::fs;
use std::path::Path;

use caps::Capability;

use crate::cgroup::{Cgroups, Version};
use crate::{Error, capability, userns};

/// Whether a need is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is there.
    Have,
    /// It is not there.
    Missing,
    /// This host does not tell without trying.
    Unknown,
}

/// One need of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// What, in a few words.
    pub name: String,
    /// Whether pods can run without it.
    pub is_required: bool,
    /// Is it met?
    pub state: State,
    /// What to switch on (kernel option, boot parameter), and what does not work otherwise.
    pub hint: &'static str,
}

/// Every need, required ones first.
///
/// # Errors
/// [`Error::Kernel`] where the kernel does not even tell its version.
pub fn needs() -> Result<Vec<Need>, Error> {
    let kernel = Kernel::look()?;
    let mut needs = required(&kernel);
    needs.extend(optional(&kernel));
    Ok(needs)
}

/// Whether mounts can be made read-only recursively (`mount_setattr`, Linux 5.12).
///
/// # Errors
/// [`Error::Kernel`] where the kernel does not tell its version.
pub fn has_recursive_read_only() -> Result<bool, Error> {
    Ok(Kernel::look()?.since(5, 12) == State::Have)
}

/// Whether pods can have user namespaces of their own, with layers in `layers`: `Err` says what is missing.
///
/// # Errors
/// The kernel's version, or what it cannot do.
pub fn user_namespaces(layers: &Path) -> Result<(), String> {
    let kernel = Kernel::look().map_err(|error| error.to_string())?;
    // Before, an overlay takes no layer whose owners are mapped.
    if kernel.since(5, 19) != State::Have {
        return Err("they need Linux 5.19".to_owned());
    }
    userns::check(layers).map_err(|error| error.to_string())
}

/// Whether pods can run: nothing required is missing.
pub fn can_run(needs: &[Need]) -> bool {
    !needs.iter().any(|need| need.is_required && need.state == State::Missing)
}

fn required(kernel: &Kernel) -> Vec<Need> {
    let need = |name: &str, state, hint| Need { name: name.into(), is_required: true, state, hint };
    let mut needs = vec![
        need("Linux 5.10", kernel.since(5, 10), "older kernels lack calls that every pod needs"),
        need(
            "overlayfs",
            kernel.filesystem("overlay", "OVERLAY_FS"),
            "CONFIG_OVERLAY_FS: no container has a root",
        ),
        need(
            "cgroups",
            have(kernel.cgroups.is_some()),
            "mount cgroup2 at /sys/fs/cgroup: no pod can be made",
        ),
    ];
    let namespaces = [
        ("mnt", "CONFIG_NAMESPACES: no container has a root of its own"),
        ("pid", "CONFIG_PID_NS: containers would see each other's processes"),
        ("net", "CONFIG_NET_NS: only pods on the host's network"),
        ("ipc", "CONFIG_IPC_NS: only pods with the host's IPC"),
        ("uts", "CONFIG_UTS_NS: only pods with the host's name"),
    ];
    for (name, hint) in namespaces {
        let state = have(Path::new("/proc/self/ns").join(name).exists());
        needs.push(need(&format!("{name} namespaces"), state, hint));
    }
    needs
}

fn optional(kernel: &Kernel) -> Vec<Need> {
    let need = |name: &str, state, hint| Need { name: name.into(), is_required: false, state, hint };
    let controllers = [
        ("cpu", "CONFIG_CGROUP_SCHED, CONFIG_CFS_BANDWIDTH: CPU limits do not hold"),
        ("memory", "CONFIG_MEMCG, boot with cgroup_enable=memory: memory limits do not hold"),
        ("pids", "CONFIG_CGROUP_PIDS: limits on processes do not hold"),
        ("cpuset", "CONFIG_CPUSETS: containers cannot be bound to CPUs"),
        ("hugetlb", "CONFIG_CGROUP_HUGETLB: limits on huge pages are refused"),
    ];
    let has = |name: &str| have(kernel.cgroups.as_ref().is_some_and(|cgroups| cgroups.has_controller(name)));
    let mut needs: Vec<Need> = controllers
        .into_iter()
        .map(|(name, hint)| need(&format!("cgroup controller {name}"), has(name), hint))
        .collect();
    let is_v2 = kernel.cgroups.as_ref().is_some_and(|cgroups| cgroups.version() == Version::V2);
    let user_namespaces = have(number("/proc/sys/user/max_user_namespaces").is_some_and(|most| most > 0));
    let apparmor = have(text("/sys/module/apparmor/parameters/enabled").trim() == "Y");
    needs.extend([
        need(
            "cgroup v2",
            have(is_v2),
            "boot with systemd.unified_cgroup_hierarchy=1: no memory QoS, no limits in `unified`",
        ),
        need(
            "cgroup namespaces",
            kernel.namespace("cgroup"),
            "CONFIG_CGROUPS: containers see the host's cgroup paths",
        ),
        need("cgroup.kill", kernel.since(5, 14), "Linux 5.14: processes are killed one by one"),
        need(
            "seccomp",
            have(Path::new("/proc/sys/kernel/seccomp/actions_avail").exists()),
            "CONFIG_SECCOMP_FILTER: containers with a profile are refused",
        ),
        need(
            "AppArmor",
            apparmor,
            "CONFIG_SECURITY_APPARMOR, boot with apparmor=1: localhost profiles are refused",
        ),
        need("mount_setattr", kernel.since(5, 12), "Linux 5.12: no recursive read-only mounts"),
        need(
            "user namespaces",
            both(user_namespaces, kernel.namespace("user")),
            "CONFIG_USER_NS, sysctl user.max_user_namespaces: no pods with hostUsers=false",
        ),
        need("idmapped overlayfs", kernel.since(5, 19), "Linux 5.19: no pods with hostUsers=false"),
        need("bridge", kernel.module("bridge", "BRIDGE"), "CONFIG_BRIDGE: no built-in pod network"),
        need("veth", kernel.module("veth", "VETH"), "CONFIG_VETH: no built-in pod network"),
        need(
            "nftables",
            kernel.module("nf_tables", "NF_TABLES"),
            "CONFIG_NF_TABLES: no masquerading, no host ports",
        ),
        need(
            "CAP_SYS_RESOURCE",
            kernel.capability(Capability::CAP_SYS_RESOURCE),
            "run outside a container: limits cannot be raised, oom_score_adj cannot be lowered",
        ),
    ]);
    needs
}

/// What was read of this kernel once.
struct Kernel {
    version: (u32, u32),
    filesystems: String,
    cgroups: Option<Cgroups>,
    /// `modules.builtin` and `modules.dep` of the running kernel; empty on hosts without modules.
    modules: String,
    /// /boot/config-RELEASE, where the distribution leaves it.
    config: String,
    capabilities: u64,
}

impl Kernel {
    fn look() -> Result<Self, Error> {
        let name = nix::sys::utsname::uname()
            .map_err(|errno| Error::kernel("ask", "the kernel's version", errno))?;
        let release = name.release().to_string_lossy().into_owned();
        let listed = |list: &str| text(&format!("/lib/modules/{release}/modules.{list}"));
        Ok(Self {
            version: parse_version(&release),
            filesystems: text("/proc/filesystems"),
            cgroups: Cgroups::probe().ok(),
            modules: listed("builtin") + &listed("dep"),
            config: text(&format!("/boot/config-{release}")),
            capabilities: capability::bounding().unwrap_or_default(),
        })
    }

    fn since(&self, major: u32, minor: u32) -> State {
        have(self.version >= (major, minor))
    }

    fn namespace(&self, name: &str) -> State {
        have(Path::new("/proc/self/ns").join(name).exists())
    }

    fn capability(&self, capability: Capability) -> State {
        have(self.capabilities & capability.bitmask() != 0)
    }

    /// A file system is listed once its module is loaded; before that it is a module like others.
    fn filesystem(&self, name: &str, option: &str) -> State {
        let is_listed = self.filesystems.split_ascii_whitespace().any(|word| word == name);
        if is_listed { State::Have } else { self.module(name, option) }
    }

    /// Loaded, built in with parameters, on disk, or set in the configuration. A kernel without any of these files
    /// may still have it.
    fn module(&self, name: &str, option: &str) -> State {
        let on_disk = self.modules.lines().any(|line| {
            let path = line.split(':').next().unwrap_or_default();
            let file = path.rsplit('/').next().unwrap_or_default();
            file.split('.').next().is_some_and(|stem| stem.replace('-', "_") == name)
        });
        let option = format!("CONFIG_{option}=");
        let configured = self.config.lines().any(|line| line.starts_with(&option));
        if Path::new("/sys/module").join(name).exists() || on_disk || configured {
            State::Have
        } else if self.modules.is_empty() && self.config.is_empty() {
            State::Unknown
        } else {
            State::Missing
        }
    }
}

/// `6.1.0-18-arm64` → (6, 1); what is not a version is older than everything.
fn parse_version(release: &str) -> (u32, u32) {
    let mut numbers =
        release.split(|character: char| !character.is_ascii_digit()).map(|part| part.parse().ok());
    (numbers.next().flatten().unwrap_or(0), numbers.next().flatten().unwrap_or(0))
}

/// Lists of modules have up to 1 MiB; a file that cannot be read tells nothing.
fn text(path: &str) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn number(path: &str) -> Option<u64> {
    text(path).trim().parse().ok()
}

fn have(is_there: bool) -> State {
    if is_there { State::Have } else { State::Missing }
}

fn both(one: State, other: State) -> State {
    if one == State::Have { other } else { one }
}

impl std::fmt::Display for Need {
    /// One line: `have     overlayfs`, or `missing  seccomp (optional): CONFIG_SECCOMP_FILTER: …`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = match self.state {
            State::Have => return write!(f, "have     {}", self.name),
            State::Missing => "missing",
            State::Unknown => "unknown",
        };
        let weight = if self.is_required { "required" } else { "optional" };
        write!(f, "{word:<8} {} ({weight}): {}", self.name, self.hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_all_kinds() {
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
            assert_eq!(parse_version(release), expected, "{release}");
        }
    }

    #[test]
    fn lines_say_what_to_do() {
        let mut need =
            Need { name: "veth".into(), is_required: false, state: State::Missing, hint: "CONFIG_VETH: x" };
        assert_eq!(need.to_string(), "missing  veth (optional): CONFIG_VETH: x");
        assert!(can_run(std::slice::from_ref(&need)));
        need.is_required = true;
        assert!(!can_run(std::slice::from_ref(&need)));
        need.state = State::Have;
        assert_eq!(need.to_string(), "have     veth");
    }

    #[test]
    fn a_host_that_runs_this_test_can_run_pods() {
        let needs = needs().unwrap();
        assert!(can_run(&needs), "{}", needs.iter().map(|need| format!("{need}\n")).collect::<String>());
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
