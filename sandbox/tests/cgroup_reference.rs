//! Compares limits with cgroups-rs on the real kernel: coracle sets each limit in one cgroup, cgroups-rs in another,
//! and then the files of both cgroups must be equal. Runs with the version of the host: v1 (also on a hybrid host) or
//! v2. Needs root.
//!
//! Intended differences are not tested: on v2 cgroups-rs writes CPU shares unconverted as the weight, while coracle
//! converts them as runc and crun do (`cgroup/resources_tests.rs`), it keeps the period if only a quota is set, while
//! coracle writes the default as runc does, and it has no device programs (`cgroup.rs`).

use std::collections::BTreeMap;
use std::fs;

use cgroups_rs::fs::cgroup::Cgroup;
use cgroups_rs::fs::cpu::CpuController;
use cgroups_rs::fs::cpuset::CpuSetController;
use cgroups_rs::fs::error::Result;
use cgroups_rs::fs::hierarchies;
use cgroups_rs::fs::hugetlb::HugeTlbController;
use cgroups_rs::fs::memory::MemController;
use cgroups_rs::fs::pid::PidController;
use cgroups_rs::fs::{Controller, MaxValue};
use coracle_sandbox::cgroup::{CgroupPath, Cgroups, Limits, Resources, Version};

const MIB: i64 = 1 << 20;

/// A limit, with the calls that set it in coracle and in cgroups-rs.
struct Limit {
    name: &'static str,
    ours: fn() -> Limits,
    theirs: fn(&Cgroup, is_v2: bool) -> Result<()>,
}

const LIMITS: [Limit; 10] = [
    Limit {
        name: "CPU quota",
        ours: || Resources { cpu_quota_us: 25_000, cpu_period_us: 50_000, ..Resources::default() }.into(),
        theirs: |theirs, _| cpu(theirs).set_cfs_quota_and_period(Some(25_000), Some(50_000)),
    },
    Limit {
        name: "no CPU quota",
        ours: || Resources { cpu_quota_us: -1, ..Resources::default() }.into(),
        // v2 has both values in one file: cgroups-rs keeps the earlier period there, coracle and runc write the default.
        theirs: |theirs, is_v2| match is_v2 {
            true => cpu(theirs).set_cfs_quota_and_period(Some(-1), Some(100_000)),
            false => cpu(theirs).set_cfs_quota(-1),
        },
    },
    Limit {
        name: "CPU shares",
        ours: || Resources { cpu_shares: 512, ..Resources::default() }.into(),
        // 512 shares are a weight of 59 by the formula of runc and crun.
        theirs: |theirs, is_v2| cpu(theirs).set_shares(if is_v2 { 59 } else { 512 }),
    },
    Limit {
        name: "CPUs and memory nodes",
        ours: || {
            Resources { cpuset_cpus: "0".into(), cpuset_mems: "0".into(), ..Resources::default() }.into()
        },
        theirs: |theirs, _| {
            let cpuset: &CpuSetController = theirs.controller_of().expect("cpuset");
            cpuset.set_cpus("0").and_then(|()| cpuset.set_mems("0"))
        },
    },
    Limit {
        name: "memory, without swap",
        ours: || Resources { memory_limit_bytes: 64 * MIB, ..Resources::default() }.into(),
        theirs: |theirs, is_v2| {
            memory(theirs).set_limit(64 * MIB)?;
            swap(theirs, is_v2, 64 * MIB, 0)
        },
    },
    Limit {
        name: "memory with swap",
        ours: || {
            Resources {
                memory_limit_bytes: 64 * MIB,
                memory_swap_limit_bytes: 96 * MIB,
                ..Resources::default()
            }
            .into()
        },
        theirs: |theirs, is_v2| swap(theirs, is_v2, 96 * MIB, 32 * MIB),
    },
    Limit {
        name: "reserved memory",
        ours: || Limits { memory_reservation_bytes: Some(16 * MIB), ..Limits::default() },
        theirs: |theirs, _| memory(theirs).set_soft_limit(16 * MIB),
    },
    Limit {
        name: "processes",
        ours: || Limits { pids_max: 77, ..Limits::default() },
        theirs: |theirs, _| pids(theirs).set_pid_max(MaxValue::Value(77)),
    },
    Limit {
        name: "any number of processes",
        ours: || Limits { pids_max: -1, ..Limits::default() },
        theirs: |theirs, _| pids(theirs).set_pid_max(MaxValue::Max),
    },
    Limit {
        name: "huge pages",
        ours: || {
            Resources { hugepage_limits: vec![("2MB".into(), 4 * MIB as u64)], ..Resources::default() }.into()
        },
        theirs: |theirs, _| {
            let hugetlb: &HugeTlbController = theirs.controller_of().expect("hugetlb");
            hugetlb.set_limit_in_bytes("2MB", 4 * MIB as u64)
        },
    },
];

/// The files of these limits, with their controllers on v1.
const FILES: [(&str, &str); 17] = [
    ("cpu", "cpu.cfs_period_us"),
    ("cpu", "cpu.cfs_quota_us"),
    ("cpu", "cpu.max"),
    ("cpu", "cpu.shares"),
    ("cpu", "cpu.weight"),
    ("cpuset", "cpuset.cpus"),
    ("cpuset", "cpuset.mems"),
    ("hugetlb", "hugetlb.2MB.limit_in_bytes"),
    ("hugetlb", "hugetlb.2MB.max"),
    ("memory", "memory.limit_in_bytes"),
    ("memory", "memory.low"),
    ("memory", "memory.max"),
    ("memory", "memory.memsw.limit_in_bytes"),
    ("memory", "memory.soft_limit_in_bytes"),
    ("memory", "memory.swap.max"),
    ("memory", "memory.swappiness"),
    ("pids", "pids.max"),
];

fn cpu(cgroup: &Cgroup) -> &CpuController {
    cgroup.controller_of().expect("cpu")
}

fn memory(cgroup: &Cgroup) -> &MemController {
    cgroup.controller_of().expect("memory")
}

fn pids(cgroup: &Cgroup) -> &PidController {
    cgroup.controller_of().expect("pids")
}

/// Sets the swap limit with cgroups-rs: v1 counts memory and swap together, v2 only swap. A kernel that does not
/// account swap has no file for it.
fn swap(cgroup: &Cgroup, is_v2: bool, together: i64, alone: i64) -> Result<()> {
    let file = if is_v2 { "memory.swap.max" } else { "memory.memsw.limit_in_bytes" };
    match memory(cgroup).path().join(file).exists() {
        true => memory(cgroup).set_memswap_limit(if is_v2 { alone } else { together }),
        false => Ok(()),
    }
}

/// The content of the existing files of [`FILES`] for a cgroup.
fn held(path: &str, is_v2: bool) -> BTreeMap<&'static str, String> {
    let value = |(controller, file): &(&str, &'static str)| {
        let folder = if is_v2 { String::new() } else { format!("/{controller}") };
        let text = fs::read_to_string(format!("/sys/fs/cgroup{folder}{path}/{file}")).ok()?;
        Some((*file, text.trim().to_owned()))
    };
    FILES.iter().filter_map(value).collect()
}

/// A cgroup of coracle and one of cgroups-rs below the test's parent; both are removed at the end of the test.
struct Both {
    cgroups: Cgroups,
    parent: CgroupPath,
    ours: CgroupPath,
    theirs: Option<Cgroup>,
}

impl Drop for Both {
    fn drop(&mut self) {
        if let Some(theirs) = self.theirs.take() {
            let _ = theirs.delete();
        }
        let _ = self.cgroups.unmake(&self.ours);
        let _ = self.cgroups.unmake(&self.parent);
    }
}

#[test]
fn each_limit_equals_that_of_cgroups_rs_as_root() {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let cgroups = Cgroups::from_mountinfo(&mountinfo).expect("cgroups: this test needs root");
    let is_v2 = hierarchies::is_cgroup2_unified_mode();
    assert_eq!(cgroups.version() == Version::V2, is_v2, "which version this host has");
    let parent = CgroupPath::parse(&format!("/coracle-test-reference-{}", std::process::id())).expect("path");
    let ours = parent.join("ours").expect("path");
    cgroups.make(&ours).unwrap();
    let mut both = Both { cgroups, parent, ours, theirs: None };
    let controllers = ["cpu", "cpuset", "hugetlb", "memory", "pids"];
    let controllers: Vec<String> =
        controllers.into_iter().filter(|name| both.cgroups.has_controller(name)).map(str::to_owned).collect();
    let path = format!("{}/theirs", &both.parent.as_str()[1..]);
    let theirs =
        Cgroup::new_with_specified_controllers(hierarchies::auto(), &path, Some(controllers.clone()));
    let theirs = both.theirs.insert(theirs.expect("a cgroup by cgroups-rs"));
    let mut compared = 0;
    for limit in LIMITS {
        if limit.name == "huge pages" && !controllers.iter().any(|name| name == "hugetlb") {
            continue; // a kernel without huge pages
        }
        let warnings = both.cgroups.apply(&both.ours, &(limit.ours)()).unwrap();
        assert_eq!(warnings, Vec::<String>::new(), "{}", limit.name);
        (limit.theirs)(theirs, is_v2).unwrap_or_else(|error| panic!("{}: {error:?}", limit.name));
        let (ours, theirs) = (held(both.ours.as_str(), is_v2), held(&format!("/{path}"), is_v2));
        assert_eq!(ours, theirs, "{}", limit.name);
        compared += ours.len();
    }
    assert!(compared >= 50, "only {compared} files are there: {controllers:?}");
}
