//! RuntimeDefault: what containers may call when nobody says otherwise. The decisions are those that container runtimes
//! have made for years (CRI 3.4), so that images which work elsewhere work here; the data are ours.
//!
//! What is held back stands here, each with its reason and the capability that gives it back; what is allowed without a
//! condition is listed in `allowed`. Every call of the table is in exactly one of the lists, which a unit test checks, so
//! that a new number in the table is a decision. Calls that are newer than this build answer ENOSYS.
//!
//! i386's `socketcall` is allowed, as in containerd: the address family is behind a pointer, where no filter sees it, and
//! 32-bit C libraries make every socket by that call (moby refused it for some days in 2026 and took that back). There an
//! LSM has to refuse AF_ALG.

use super::allowed::ALLOWED;
use super::{Action, Architecture, Compare, Condition, Profile, Rule};
use crate::capability::bit;

/// A reason to hold calls back.
struct Restricted {
    /// Any of these capabilities gives them back; none: nothing does.
    allowed_with: &'static [&'static str],
    names: &'static [&'static str],
}

const ADMIN: &str = "CAP_SYS_ADMIN";

static RESTRICTED: &[Restricted] = &[
    // The mount tree, and namespaces with rights over it.
    Restricted {
        allowed_with: &[ADMIN],
        names: &[
            "fsconfig",
            "fsmount",
            "fsopen",
            "fspick",
            "mount",
            "mount_setattr",
            "move_mount",
            "open_tree",
            "open_tree_attr",
            "setns",
            "umount",
            "umount2",
            "unshare",
        ],
    },
    Restricted { allowed_with: &[], names: &["pivot_root"] },
    Restricted { allowed_with: &["CAP_SYS_CHROOT"], names: &["chroot"] },
    // A file by its handle is a file past every path that was masked.
    Restricted { allowed_with: &["CAP_DAC_READ_SEARCH"], names: &["open_by_handle_at"] },
    Restricted {
        allowed_with: &[ADMIN],
        names: &["fanotify_init", "quotactl", "quotactl_fd", "lookup_dcookie"],
    },
    // Names that belong to the pod.
    Restricted { allowed_with: &[ADMIN], names: &["setdomainname", "sethostname"] },
    // Code in the kernel, and holes into it.
    Restricted {
        allowed_with: &["CAP_SYS_MODULE"],
        names: &["delete_module", "finit_module", "init_module"],
    },
    Restricted { allowed_with: &["CAP_BPF", ADMIN], names: &["bpf"] },
    Restricted { allowed_with: &["CAP_PERFMON", ADMIN], names: &["perf_event_open"] },
    Restricted {
        allowed_with: &[],
        names: &["io_uring_enter", "io_uring_register", "io_uring_setup", "userfaultfd"],
    },
    Restricted { allowed_with: &[], names: &["kexec_file_load", "kexec_load", "vm86", "vm86old"] },
    Restricted {
        allowed_with: &["CAP_SYS_RAWIO"],
        names: &["ioperm", "iopl", "pciconfig_iobase", "pciconfig_read", "pciconfig_write"],
    },
    // The kernel's keyrings know no namespaces.
    Restricted { allowed_with: &[], names: &["add_key", "keyctl", "request_key"] },
    // Other processes' memory and descriptors; ptrace itself checks well since Linux 4.8.
    Restricted { allowed_with: &["CAP_SYS_PTRACE"], names: &["kcmp", "pidfd_getfd", "process_madvise"] },
    // The node as a whole.
    Restricted { allowed_with: &["CAP_SYS_BOOT"], names: &["reboot"] },
    Restricted { allowed_with: &[], names: &["swapoff", "swapon"] },
    Restricted { allowed_with: &["CAP_SYS_PACCT"], names: &["acct"] },
    Restricted {
        allowed_with: &["CAP_SYS_TIME"],
        names: &["clock_settime", "clock_settime64", "settimeofday", "stime"],
    },
    Restricted { allowed_with: &["CAP_SYS_TTY_CONFIG"], names: &["vhangup"] },
    Restricted { allowed_with: &["CAP_SYSLOG", ADMIN], names: &["syslog"] },
    Restricted {
        allowed_with: &["CAP_SYS_NICE"],
        names: &["get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"],
    },
    Restricted { allowed_with: &[], names: &["migrate_pages", "move_pages"] },
    // i386 had them before C libraries used their successors; containerd does not allow them.
    Restricted {
        allowed_with: &[],
        names: &[
            "nice",
            "oldfstat",
            "oldlstat",
            "oldolduname",
            "oldstat",
            "olduname",
            "readdir",
            "sgetmask",
            "sigaction",
            "signal",
            "sigpending",
            "sigsuspend",
            "ssetmask",
        ],
    },
    // Dead, or never alive.
    Restricted {
        allowed_with: &[],
        names: &[
            "_sysctl",
            "afs_syscall",
            "bdflush",
            "break",
            "create_module",
            "epoll_ctl_old",
            "epoll_wait_old",
            "ftime",
            "get_kernel_syms",
            "getpmsg",
            "gtty",
            "idle",
            "lock",
            "mpx",
            "nfsservctl",
            "prof",
            "profil",
            "putpmsg",
            "query_module",
            "security",
            "stty",
            "sysfs",
            "tuxcall",
            "ulimit",
            "uselib",
            "ustat",
            "vserver",
        ],
    },
];

/// Calls that the table knows and containerd's profile does not yet: they answer ENOSYS, as runc answers calls that are
/// newer than a profile, and programs fall back on the ioctl that these two replace (Linux 6.17).
const NEWER: [&str; 2] = ["file_getattr", "file_setattr"];

/// Namespaces that clone(2) makes: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;
/// What personality(2) may set: Linux, Linux as 2.6, 32 bits of either, and asking.
const PERSONALITIES: [u64; 5] = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
/// Address families that no container may have a socket of, whatever its capabilities: AF_ALG (the kernel's crypto API,
/// which had CVE-2026-31431) and AF_VSOCK (to the hypervisor, past every network namespace).
const FAMILIES: [u64; 2] = [38, 40];
/// The family is an `int`: the kernel ignores the argument's upper half, so the filter must, too.
const INT: u64 = 0xffff_ffff;
/// `errno`, as filters answer it.
const EPERM: u16 = 1;
const ENOSYS: u16 = 38;

/// The profile for a container that may have these capabilities (bit n is capability n).
pub fn runtime_default(capabilities: u64) -> Profile {
    let has = |name: &&str| bit(name).is_some_and(|bit| capabilities & bit != 0);
    let given = RESTRICTED
        .iter()
        .filter(|restricted| restricted.allowed_with.iter().any(has))
        .flat_map(|restricted| restricted.names);
    let mut allowed: Vec<&str> = ALLOWED.iter().chain(given).copied().collect();
    let mut rules = Vec::new();
    if has(&ADMIN) {
        allowed.extend(["clone", "clone3"]);
    } else {
        let no_namespaces = Compare::Masked { mask: CLONE_NAMESPACES };
        rules.push(rule(&["clone"], Some((no_namespaces, 0)), Action::Allow));
        // Its flags are behind a pointer, where no filter sees them: programs fall back to clone.
        rules.push(rule(&["clone3"], None, Action::Errno(ENOSYS)));
    }
    for personality in PERSONALITIES {
        rules.push(rule(&["personality"], Some((Compare::Equal, personality)), Action::Allow));
    }
    for family in FAMILIES {
        let family = Some((Compare::Masked { mask: INT }, family));
        rules.push(rule(&["socket"], family, Action::Errno(EPERM)));
    }
    allowed.push("socket");
    rules.push(rule(&NEWER, None, Action::Errno(ENOSYS)));
    rules.push(rule(&allowed, None, Action::Allow));
    Profile {
        default: Action::Errno(EPERM),
        unknown: Action::Errno(ENOSYS),
        architectures: Architecture::HERE.to_vec(),
        rules,
        flags: 0,
    }
}

/// Every call that is not in [`ALLOWED`].
#[cfg(test)]
pub(super) fn not_allowed() -> impl Iterator<Item = &'static str> {
    let restricted = RESTRICTED.iter().flat_map(|restricted| restricted.names).chain(&NEWER).copied();
    restricted.chain(["clone", "clone3", "personality", "socket"])
}

/// A rule with at most one condition, on the first argument.
fn rule(names: &[&str], first: Option<(Compare, u64)>, action: Action) -> Rule {
    let condition = |(compare, value)| Condition { argument: 0, compare, value };
    let conditions = first.map(condition).into_iter().collect();
    Rule { names: names.iter().map(|name| (*name).to_owned()).collect(), conditions, action }
}
