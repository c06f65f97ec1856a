//! RuntimeDefault: what containers may call when nobody says otherwise. The decisions are those that container runtimes
//! have made for years (CRI section 3.4), so that images which work elsewhere work here; the data are ours.
//!
//! Written as what is held back, each with its reason and the capability that gives it back: what a container does not
//! need is a short list, and it is the list that one wants to review. Calls that are newer than this build answer ENOSYS.

use super::{Action, Architecture, Compare, Condition, Profile, Rule, calls};
use crate::capability::bit;

/// A reason to hold calls back.
struct Held {
    /// Any of these capabilities gives them back; none: nothing does.
    unless: &'static [&'static str],
    names: &'static [&'static str],
}

const ADMIN: &str = "CAP_SYS_ADMIN";

static HELD: &[Held] = &[
    // The mount tree, and namespaces with rights over it.
    Held {
        unless: &[ADMIN],
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
    Held { unless: &[], names: &["pivot_root"] },
    Held { unless: &["CAP_SYS_CHROOT"], names: &["chroot"] },
    // A file by its handle is a file past every path that was masked.
    Held { unless: &["CAP_DAC_READ_SEARCH"], names: &["open_by_handle_at"] },
    Held { unless: &[ADMIN], names: &["fanotify_init", "quotactl", "quotactl_fd", "lookup_dcookie"] },
    // Names that belong to the pod.
    Held { unless: &[ADMIN], names: &["setdomainname", "sethostname"] },
    // Code in the kernel, and holes into it.
    Held { unless: &["CAP_SYS_MODULE"], names: &["delete_module", "finit_module", "init_module"] },
    Held { unless: &["CAP_BPF", ADMIN], names: &["bpf"] },
    Held { unless: &["CAP_PERFMON", ADMIN], names: &["perf_event_open"] },
    Held { unless: &[], names: &["io_uring_enter", "io_uring_register", "io_uring_setup", "userfaultfd"] },
    Held { unless: &[], names: &["kexec_file_load", "kexec_load", "vm86", "vm86old"] },
    Held {
        unless: &["CAP_SYS_RAWIO"],
        names: &["ioperm", "iopl", "pciconfig_iobase", "pciconfig_read", "pciconfig_write"],
    },
    // The kernel's keyrings know no namespaces.
    Held { unless: &[], names: &["add_key", "keyctl", "request_key"] },
    // Other processes' memory and descriptors; ptrace itself checks well since Linux 4.8.
    Held { unless: &["CAP_SYS_PTRACE"], names: &["kcmp", "pidfd_getfd"] },
    // The node as a whole.
    Held { unless: &["CAP_SYS_BOOT"], names: &["reboot"] },
    Held { unless: &[], names: &["swapoff", "swapon"] },
    Held { unless: &["CAP_SYS_PACCT"], names: &["acct"] },
    Held { unless: &["CAP_SYS_TIME"], names: &["clock_settime", "clock_settime64", "settimeofday", "stime"] },
    Held { unless: &["CAP_SYS_TTY_CONFIG"], names: &["vhangup"] },
    Held { unless: &["CAP_SYSLOG", ADMIN], names: &["syslog"] },
    Held {
        unless: &["CAP_SYS_NICE"],
        names: &["get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"],
    },
    Held { unless: &[], names: &["migrate_pages", "move_pages"] },
    // Dead, or never alive.
    Held {
        unless: &[],
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

/// Namespaces that clone(2) makes: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;
/// What personality(2) may set: Linux, Linux as 2.6, 32 bits of either, and asking.
const PERSONALITIES: [u64; 5] = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
/// Sockets to the hypervisor, past every network namespace.
const AF_VSOCK: u64 = 40;
/// `errno`, as filters answer it.
const EPERM: u16 = 1;
const ENOSYS: u16 = 38;

/// The profile for a container that may have these capabilities (bit n is capability n).
pub fn runtime_default(capabilities: u64) -> Profile {
    let has = |name: &&str| bit(name).is_some_and(|bit| capabilities & bit != 0);
    let mut held: Vec<&str> = HELD
        .iter()
        .filter(|held| !held.unless.iter().any(has))
        .flat_map(|held| held.names.iter().copied())
        .collect();
    let mut rules = Vec::new();
    let condition = |argument, compare, value| Condition { argument, compare, value };
    if !has(&ADMIN) {
        held.extend(["clone", "clone3"]);
        rules.push(Rule {
            names: vec!["clone".to_owned()],
            conditions: vec![condition(0, Compare::Masked { mask: CLONE_NAMESPACES }, 0)],
            action: Action::Allow,
        });
        // Its flags are behind a pointer, where no filter sees them: programs fall back to clone.
        rules.push(Rule {
            names: vec!["clone3".to_owned()],
            conditions: Vec::new(),
            action: Action::Errno(ENOSYS),
        });
    }
    for personality in PERSONALITIES {
        rules.push(Rule {
            names: vec!["personality".to_owned()],
            conditions: vec![condition(0, Compare::Equal, personality)],
            action: Action::Allow,
        });
    }
    held.push("personality");
    rules.push(Rule {
        names: vec!["socket".to_owned()],
        conditions: vec![condition(0, Compare::NotEqual, AF_VSOCK)],
        action: Action::Allow,
    });
    held.push("socket");
    let free = calls::CALLS.iter().map(|(name, _)| *name).filter(|name| !held.contains(name));
    rules.push(Rule {
        names: free.map(str::to_owned).collect(),
        conditions: Vec::new(),
        action: Action::Allow,
    });
    Profile {
        default: Action::Errno(EPERM),
        unknown: Action::Errno(ENOSYS),
        architectures: Architecture::HERE.to_vec(),
        rules,
        flags: 0,
    }
}
