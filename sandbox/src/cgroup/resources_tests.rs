//! Tests of limits as tables: requests and the resulting writes.

use super::*;

const MIB: i64 = 1 << 20;

fn listed(limits: &Limits, version: Version, now: Now) -> Vec<String> {
    let writes = writes(limits, version, now).unwrap();
    writes.iter().map(|write| format!("{} {}", write.file, write.value)).collect()
}

fn with(change: impl FnOnce(&mut Resources)) -> Limits {
    let mut resources = Resources::default();
    change(&mut resources);
    resources.into()
}

#[test]
fn a_request_without_limits_writes_nothing() {
    for version in [Version::V1, Version::V2] {
        assert_eq!(listed(&Limits::default(), version, Now::default()), Vec::<String>::new());
    }
}

#[test]
fn cpu_weights_rise_with_cpu_shares() {
    let table =
        [(0, 1), (1, 1), (2, 1), (1024, 100), (262_144, 10_000), (i64::MAX, 10_000), (512, 59), (2048, 174)];
    for (shares, expected) in table {
        assert_eq!(weight(shares), expected, "{shares}");
    }
    assert!((2..262_144).all(|shares| weight(shares) <= weight(shares + 1)));
}

#[test]
fn cpu_limits_are_written_for_both_cgroup_versions() {
    let table: [(Limits, &[&str], &[&str]); 5] = [
        (with(|r| r.cpu_shares = 1024), &["cpu.shares 1024"], &["cpu.weight 100"]),
        (with(|r| r.cpu_quota_us = 5000), &["cpu.cfs_quota_us 5000"], &["cpu.max 5000 100000"]),
        (with(|r| r.cpu_quota_us = -5), &["cpu.cfs_quota_us -1"], &["cpu.max max 100000"]),
        (with(|r| r.cpu_period_us = 20_000), &["cpu.cfs_period_us 20000"], &["cpu.max max 20000"]),
        (
            with(|r| (r.cpu_quota_us, r.cpu_period_us) = (5000, 20_000)),
            &["cpu.cfs_period_us 20000", "cpu.cfs_quota_us 5000"],
            &["cpu.max 5000 20000"],
        ),
    ];
    for (resources, v1, v2) in table {
        assert_eq!(listed(&resources, Version::V1, Now::default()), v1, "{resources:?}");
        assert_eq!(listed(&resources, Version::V2, Now::default()), v2, "{resources:?}");
    }
}

#[test]
fn swap_limits_of_v2_exclude_memory() {
    let m = 64 * MIB;
    let table = [
        (m, 0, vec!["memory.max 67108864", "memory.swap.max 0"]),
        (m, m, vec!["memory.max 67108864", "memory.swap.max 0"]),
        (m, m + MIB, vec!["memory.max 67108864", "memory.swap.max 1048576"]),
        (m, -1, vec!["memory.swap.max max", "memory.max 67108864"]),
        (-1, 0, vec!["memory.swap.max max", "memory.max max"]),
    ];
    for (memory, both, expected) in table {
        let resources = with(|r| (r.memory_limit_bytes, r.memory_swap_limit_bytes) = (memory, both));
        assert_eq!(listed(&resources, Version::V2, Now::default()), expected, "{memory} {both}");
    }
}

#[test]
fn memory_limits_of_v1_are_written_in_the_order_that_the_kernel_accepts() {
    let (limit, swap) = ("memory.limit_in_bytes 67108864", "memory.memsw.limit_in_bytes 67108864");
    let table = [
        (None, [limit, swap]),
        (Some(128), [limit, swap]),
        (Some(64), [limit, swap]),
        (Some(32), [swap, limit]),
    ];
    for (now_mib, expected) in table {
        let now = Now { memory_swap_limit: now_mib.map(|mib: u64| mib << 20), ..Now::default() };
        assert_eq!(
            listed(&with(|r| r.memory_limit_bytes = 64 * MIB), Version::V1, now),
            expected,
            "{now_mib:?}"
        );
    }
    let unlimited = listed(&with(|r| r.memory_limit_bytes = -1), Version::V1, Now::default());
    assert_eq!(unlimited, ["memory.memsw.limit_in_bytes -1", "memory.limit_in_bytes -1"]);
}

#[test]
fn impossible_memory_limits_are_refused() {
    let now = Now { memory_usage: Some(100 << 20), ..Now::default() };
    let table = [
        (1, 0, "not enough to start, the least is 524288"),
        (200 * MIB, 199 * MIB, "less than 209715200 of memory"),
        (0, MIB, "without a memory limit"),
        (-1, MIB, "without a memory limit"),
        (99 * MIB, 0, "less than the 104857600 in use"),
    ];
    for (memory, both, expected) in table {
        let resources = with(|r| (r.memory_limit_bytes, r.memory_swap_limit_bytes) = (memory, both));
        let error = writes(&resources, Version::V1, now).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(writes(&with(|r| r.memory_limit_bytes = 100 * MIB), Version::V2, now).is_ok());
}

#[test]
fn a_missing_swap_file_is_a_warning_only_if_swap_was_requested() {
    let table = [(64, 0, WhenMissing::Pass), (64, 64, WhenMissing::Pass), (64, 65, WhenMissing::Warn)];
    for (memory, both, expected) in table {
        let resources =
            with(|r| (r.memory_limit_bytes, r.memory_swap_limit_bytes) = (memory * MIB, both * MIB));
        for version in [Version::V1, Version::V2] {
            let swap = writes(&resources, version, Now::default()).unwrap().pop().unwrap();
            assert_eq!(swap.when_missing, expected, "{memory} {both} {version:?}");
        }
    }
}

#[test]
fn limits_of_huge_pages_have_a_file_for_each_size() {
    let page = |size: &str, limit_bytes| (size.to_owned(), limit_bytes);
    let resources = with(|r| r.hugepage_limits = vec![page("2MB", 0), page("1GB", 5)]);
    let expected_v1 = [
        "hugetlb.2MB.limit_in_bytes 0",
        "hugetlb.2MB.rsvd.limit_in_bytes 0",
        "hugetlb.1GB.limit_in_bytes 5",
        "hugetlb.1GB.rsvd.limit_in_bytes 5",
    ];
    assert_eq!(listed(&resources, Version::V1, Now::default()), expected_v1);
    let v2 = writes(&resources, Version::V2, Now::default()).unwrap();
    let missing: Vec<_> = v2.iter().map(|write| (write.file.as_str(), write.when_missing.clone())).collect();
    let expected = [
        ("hugetlb.2MB.max", WhenMissing::Pass),
        ("hugetlb.2MB.rsvd.max", WhenMissing::Pass),
        ("hugetlb.1GB.max", WhenMissing::WarnWithoutController),
        ("hugetlb.1GB.rsvd.max", WhenMissing::Pass),
    ];
    assert_eq!(missing, expected);
    for bad in ["", "MB", "2", "2mb", "../2MB", "2MB/x", "2TB", "2 MB", "éMB"] {
        let resources = with(|r| r.hugepage_limits = vec![page(bad, 1)]);
        assert!(writes(&resources, Version::V2, Now::default()).is_err(), "{bad:?}");
    }
}

#[test]
fn unified_is_written_last_and_checked() {
    let entry = |key: &str, value: &str| (key.to_string(), value.to_string());
    let resources = with(|r| {
        r.memory_limit_bytes = MIB;
        r.unified = vec![entry("memory.swap.max", "0"), entry("memory.oom.group", "1")];
    });
    let resources = Limits { pids_max: 5, ..resources };
    let expected =
        ["memory.max 1048576", "memory.swap.max 0", "pids.max 5", "memory.swap.max 0", "memory.oom.group 1"];
    assert_eq!(listed(&resources, Version::V2, Now::default()), expected);
    assert_eq!(listed(&resources, Version::V1, Now::default()).len(), 3);
    for bad in [
        "",
        "memory",
        "/memory.max",
        "memory./max",
        "../memory.max",
        "cgroup.procs",
        "cgroup.kill",
        "frob.x",
        "memory.m x",
    ] {
        let resources = with(|r| r.unified = vec![entry(bad, "1")]);
        let error = writes(&resources, Version::V2, Now::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("{bad:?}")), "{error}");
    }
}

#[test]
fn cpusets_are_lists() {
    let resources = with(|r| (r.cpuset_cpus, r.cpuset_mems) = (" 0-3,7 ".into(), "0".into()));
    assert_eq!(listed(&resources, Version::V2, Now::default()), ["cpuset.cpus 0-3,7", "cpuset.mems 0"]);
    for bad in ["a", "0\n1", "0;1"] {
        assert!(
            writes(&with(|r| r.cpuset_cpus = bad.into()), Version::V1, Now::default()).is_err(),
            "{bad:?}"
        );
    }
}

#[test]
fn devices_of_v1_are_denied_then_allowed_one_by_one() {
    let rule = |access: &str| DeviceRule {
        kind: DeviceKind::Block,
        major: Some(8),
        minor: None,
        access: access.into(),
    };
    let listed = |access: &DeviceAccess| -> Vec<String> {
        let writes = device_writes(access, &[]).unwrap();
        writes.iter().map(|write| format!("{} {}", write.file, write.value)).collect()
    };
    let only = listed(&DeviceAccess::Only(vec![rule("rw")]));
    assert_eq!(only.first().map(String::as_str), Some("devices.deny a"));
    assert_eq!(only.last().map(String::as_str), Some("devices.allow b 8:* rw"));
    assert_eq!(only.len(), 2 + devices::all(&[], &[]).unwrap().len());
    assert_eq!(listed(&DeviceAccess::All), ["devices.allow a"]);
    for bad in ["", "x", "rw m"] {
        assert!(device_writes(&DeviceAccess::Only(vec![rule(bad)]), &[]).is_err(), "{bad:?}");
    }
}

/// The limit of swap of a container that was promised some may be less than its new limit of memory.
#[test]
fn a_new_limit_of_memory_alone_takes_that_of_swap_with_it() {
    let old = Resources {
        memory_limit_bytes: 100 << 20,
        memory_swap_limit_bytes: 200 << 20,
        ..Resources::default()
    };
    let limits = |asked: Resources| {
        let updated = old.updated(&asked);
        (updated.memory_limit_bytes >> 20, updated.memory_and_swap_limit_bytes() >> 20)
    };
    let memory = |memory_limit_bytes| Resources { memory_limit_bytes, ..Resources::default() };
    assert_eq!(limits(memory(300 << 20)), (300, 300));
    assert_eq!(limits(Resources { memory_swap_limit_bytes: 400 << 20, ..memory(300 << 20) }), (300, 400));
    assert_eq!(limits(Resources { memory_swap_limit_bytes: 150 << 20, ..memory(0) }), (100, 150));
    assert_eq!(limits(Resources { cpu_shares: 2, ..memory(0) }), (100, 200));
}
