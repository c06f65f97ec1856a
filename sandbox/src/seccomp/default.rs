//! RuntimeDefault, the default profile. It makes the same decisions as other container runtimes (CRI 3.4), so that
//! images that work elsewhere work here; the lists are coracle's own.
//!
//! This file lists the restricted calls, each with its reason and the capability that allows it; `allowed` lists the
//! calls that are always allowed. A unit test checks that every call of the table is in exactly one list, so that
//! adding a call requires a decision. Calls that are newer than this build give ENOSYS.
//!
//! i386's `socketcall` is allowed, as in containerd: the address family is behind a pointer, which a filter cannot
//! read, and 32-bit C libraries create all sockets with that call (moby refused it for some days in 2026 and reverted
//! the change). Only an LSM can refuse AF_ALG for such programs.

use super::allowed::ALLOWED;
use super::{Action, Architecture, Compare, Condition, Known, Profile, Rule};
use crate::capability::bit;

/// Restricted calls with a common reason and condition.
struct Restricted {
    /// Capabilities, any of which permits the calls; empty: the calls are never permitted.
    allowed_with: &'static [&'static str],
    names: &'static [&'static str],
}

const ADMIN: &str = "CAP_SYS_ADMIN";

static RESTRICTED: &[Restricted] = &[
    // Calls that change the mount tree, or create namespaces with privileges over it.
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
    // A file handle bypasses masked paths.
    Restricted { allowed_with: &["CAP_DAC_READ_SEARCH"], names: &["open_by_handle_at"] },
    Restricted {
        allowed_with: &[ADMIN],
        names: &["fanotify_init", "quotactl", "quotactl_fd", "lookup_dcookie"],
    },
    // The host name belongs to the pod.
    Restricted { allowed_with: &[ADMIN], names: &["setdomainname", "sethostname"] },
    // Loading code into the kernel, and calls with a history of kernel vulnerabilities.
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
    // The kernel's keyrings are not namespaced.
    Restricted { allowed_with: &[], names: &["add_key", "keyctl", "request_key"] },
    // Access to memory and descriptors of other processes; ptrace itself is safe with seccomp since Linux 4.8.
    Restricted { allowed_with: &["CAP_SYS_PTRACE"], names: &["kcmp", "pidfd_getfd", "process_madvise"] },
    // Calls that affect the whole node.
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
    // Old i386 calls that C libraries no longer use; containerd does not allow them either.
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
    // Obsolete or unimplemented calls.
    Restricted {
        allowed_with: &[],
        names: &[
            "_sysctl",
            "afs_syscall",
            "bdflush",
            "break",
            "create_module",
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

/// Calls that are in the table but not in containerd's profile yet. They return ENOSYS, as runc does for calls that are
/// newer than a profile, and programs fall back to the ioctl that these two calls replace (Linux 6.17).
const NEWER: [&str; 2] = ["file_getattr", "file_setattr"];

/// Namespace flags of clone(2): CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;
/// Allowed arguments of personality(2): Linux, Linux as 2.6, 32-bit variants of both, and the query.
const PERSONALITIES: [u64; 5] = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
/// Address families of which no container may create a socket, regardless of its capabilities: AF_ALG (the kernel's
/// crypto API, which had CVE-2026-31431) and AF_VSOCK (to the hypervisor, bypassing network namespaces).
const FAMILIES: [u64; 2] = [38, 40];
/// Mask of an `int` argument: the kernel ignores the upper half of the argument, so the filter must ignore it, too.
const INT: u64 = 0xffff_ffff;
/// EPERM as the result of a filter.
const EPERM: u16 = 1;
const ENOSYS: u16 = 38;

/// The profile for a container with these capabilities (bit n is capability n).
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
        // The flags of clone3 are behind a pointer, which a filter cannot read; after ENOSYS programs fall back to
        // clone.
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
        known: Known::Build,
        architectures: Architecture::HERE.to_vec(),
        rules,
        flags: 0,
    }
}

/// Names of all calls that are not in [`ALLOWED`].
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
