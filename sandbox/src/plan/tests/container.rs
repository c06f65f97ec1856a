//! Tests of containers: order, mounts, devices, masks.

use super::*;

#[test]
fn a_containers_operations_are_in_order() {
    let record = container(&container_plan()).unwrap();
    let expected = [
        "join cgroup /sys/fs/cgroup/memory/x",
        "write \"-997\" to /proc/self/oom_score_adj",
        "open /p/shm",
        "open /p/hosts",
        "open /p/hostname",
        "open /p/resolv.conf",
        "open /dev/null",
        "make namespaces of its own",
        "make the mounts slaves of the host's",
        "overlay root",
        "change root to /pods/m",
        "mount proc on /proc",
        "mount tmpfs on /dev",
        "make device /dev/null",
        "make device /dev/zero",
        "make device /dev/full",
        "make device /dev/random",
        "make device /dev/urandom",
        "make device /dev/tty",
        "link /dev/fd to /proc/self/fd",
        "link /dev/stdin to /proc/self/fd/0",
        "link /dev/stdout to /proc/self/fd/1",
        "link /dev/stderr to /proc/self/fd/2",
        "link /dev/ptmx to pts/ptmx",
        "link /dev/core to /proc/kcore",
        "mount sysfs on /sys",
        "mount devpts on /dev/pts",
        "bind /p/shm on /dev/shm",
        "mount mqueue on /dev/mqueue",
        "bind /p/hosts on /etc/hosts",
        "bind /p/hostname on /etc/hostname",
        "bind /p/resolv.conf on /etc/resolv.conf",
        "mount cgroup2 on /sys/fs/cgroup",
        "mask /proc/kcore",
        "make /proc/sys read-only",
        "set limit 7 to 1024:524288",
        "change directory to /work",
        "verify the mounts",
        "set umask 0022",
        "join the session keyring",
        "keep capabilities 0xff",
        "set 2 groups",
        "load a seccomp filter of 2 instructions",
        "become user 1000:1000",
        "set capabilities 0x0",
        "exec sleep",
    ];
    assert_eq!(words(&record), expected);
}

/// Created files belong to the container's root, operations that need the node's root come before the user namespace is
/// entered, and all mounts exist by then, so that they are locked.
#[test]
fn a_user_namespace_is_entered_last() {
    let range = IdRange { inside: 0, outside: 100_000, length: 65_536 };
    let mappings = UserMappings { users: range, groups: range };
    let volume = Mount { maps_owners: true, ..mount("/srv", "/data") };
    let plan = ContainerPlan { user_namespace: Some(mappings), mounts: vec![volume], ..container_plan() };
    let words = words(&container(&plan).unwrap());
    let position = |what: &str| {
        words.iter().position(|word| word == what).unwrap_or_else(|| panic!("no {what:?} in {words:#?}"))
    };
    let order = [
        "open /srv",
        "map the owners of files in /srv",
        "make namespaces of its own",
        "map the owners of files in /layers",
        "overlay root",
        "change root to /pods/m",
        "act as 100000:100000",
        "mount proc on /proc",
        "make device /dev/null",
        "bind /srv on /data",
        "mask /proc/kcore",
        "make /proc/sys read-only",
        "set limit 7 to 1024:524288",
        "change directory to /work",
        "verify the mounts",
        "give the standard streams to 101000",
        "act as 0:0",
        "enter the pod's user namespace",
        "keep capabilities 0xff",
    ];
    let positions = order.map(position);
    assert!(positions.is_sorted(), "{words:#?}");
    let few = IdRange { length: 1000, ..range };
    for mappings in [UserMappings { users: few, ..mappings }, UserMappings { groups: few, ..mappings }] {
        let refused = container(&ContainerPlan { user_namespace: Some(mappings), ..plan.clone() });
        assert!(refused.unwrap_err().to_string().contains("1000 is not mapped"), "{mappings:?}");
    }
}

#[test]
fn operations_have_their_flags_and_values() {
    let record = container(&container_plan()).unwrap();
    let ops = ops(&record);
    let join = Text::new(c"/sys/fs/cgroup/memory/x/tasks");
    assert_eq!(ops[0], Op::WriteFile { path: join, data: b"0", optional: false });
    assert!(matches!(ops[1], Op::WriteFile { optional: true, .. }));
    assert!(ops.contains(&Op::Unshare { flags: 0x0202_0000 }));
    assert!(ops.contains(&Op::Overlay {
        directory: Text::new(c"/layers"),
        options: Text::new(c"lowerdir=b:a,upperdir=/pods/u,workdir=/pods/w,volatile"),
        target: Text::new(c"/pods/m"),
    }));
    assert!(ops.contains(&Op::Node { path: Text::new(c"/dev/null"), mode: 0o20666, device: 0x103 }));
    assert!(ops.contains(&Op::WorkingDirectory { path: Text::new(c"/work"), create: true }));
    let flags: Vec<(String, u64)> = ops
        .iter()
        .filter_map(|op| match op {
            Op::Filesystem { target, attributes, .. } => {
                Some((target.as_cstr().unwrap().to_str().unwrap().into(), *attributes))
            }
            _ => None,
        })
        .collect();
    let expected = [
        ("/proc", 14),
        ("/dev", 0x22),
        ("/sys", 15),
        ("/dev/pts", 10),
        ("/dev/mqueue", 14),
        ("/sys/fs/cgroup", 15),
    ];
    assert_eq!(flags, expected.map(|(target, flags)| (target.to_string(), flags)));
    match ops.last() {
        Some(Op::Exec { candidates, arguments, environment }) => {
            assert!(candidates.iter().eq([c"/bin/sleep", c"/usr/bin/sleep"]));
            assert!(arguments.iter().eq([c"sleep", c"1"]));
            assert!(environment.iter().eq([c"PATH=/bin:/usr/bin", c"A=\xff"]));
        }
        other => panic!("{other:?}"),
    }
}

/// Descriptions of the operations between pivot_root and the masks.
fn layout(plan: &ContainerPlan) -> Vec<String> {
    let record = container(plan).unwrap();
    words(&record)
        .into_iter()
        .filter(|word| {
            ["mount ", "bind ", "make device", "link /sys", "mask", "make /"]
                .iter()
                .any(|w| word.starts_with(w))
        })
        .filter(|word| !NODES_ALWAYS.contains(&word.as_str()))
        .collect()
}

const NODES_ALWAYS: [&str; 6] = [
    "make device /dev/null",
    "make device /dev/zero",
    "make device /dev/full",
    "make device /dev/random",
    "make device /dev/urandom",
    "make device /dev/tty",
];

#[test]
fn a_mount_replaces_the_default_of_the_same_path_and_parents_come_first() {
    let mut plan = container_plan();
    plan.mounts = vec![
        mount("/h/deep", "/data/a/b"),
        mount("/h/hosts", "/etc/../etc/hosts"),
        mount("/h/shm", "dev/shm/"),
        mount("/h/log", "/dev/termination-log"),
        mount("/h/data", "/data"),
        mount("/h/cg", "/sys/fs/cgroup"),
    ];
    let expected = [
        "mount proc on /proc",
        "mount tmpfs on /dev",
        "mount sysfs on /sys",
        "bind /h/data on /data",
        "mount devpts on /dev/pts",
        "mount mqueue on /dev/mqueue",
        "bind /p/hostname on /etc/hostname",
        "bind /p/resolv.conf on /etc/resolv.conf",
        "bind /h/hosts on /etc/hosts",
        "bind /h/shm on /dev/shm",
        "bind /h/log on /dev/termination-log",
        "bind /h/deep on /data/a/b",
        "bind /h/cg on /sys/fs/cgroup",
        "mask /proc/kcore",
        "make /proc/sys read-only",
    ];
    assert_eq!(layout(&plan), expected);
}

#[test]
fn a_mount_of_dev_replaces_all_default_mounts_and_devices_below_it() {
    let mut plan = container_plan();
    plan.mounts = vec![mount("/dev", "/dev")];
    plan.devices = vec![DeviceNode {
        path: "/dev/x".into(),
        kind: DeviceKind::Block,
        major: 8,
        minor: 1,
        mode: 0o660,
        owner: (0, 0),
    }];
    let record = container(&plan).unwrap();
    let in_dev: Vec<_> = words(&record)
        .into_iter()
        .filter(|word| word.contains(" /dev/") && !word.starts_with("open"))
        .collect();
    assert_eq!(in_dev, Vec::<String>::new());
    assert!(words(&record).contains(&"bind /dev on /dev".to_string()));
}

#[test]
fn invalid_mounts_are_refused() {
    let read_only_below = Mount { recursive_read_only: true, ..mount("/h", "/d") };
    let slave = Mount { read_only: true, propagation: Propagation::Slave, ..read_only_below.clone() };
    let table = [
        mount("/h", "/"),
        mount("/h", "/a/.."),
        mount("/h", "/proc"),
        mount("/h", "/proc/self"),
        mount("/h", "/x/../proc/sys"),
        mount("h", "/d"),
        mount("/h", "/d\0"),
        read_only_below,
        slave,
    ];
    for bad in table {
        let mut plan = container_plan();
        plan.mounts = vec![mount("/fine", "/fine"), bad.clone()];
        match container(&plan) {
            Err(Error::Invalid { field, .. }) => assert_eq!(field, "mounts[1]", "{bad:?}"),
            other => panic!("{bad:?}: {other:?}"),
        }
    }
    let mut plan = container_plan();
    plan.mounts = vec![mount("/lxcfs/cpuinfo", "/proc/cpuinfo"), mount("/h", "/process")];
    assert!(container(&plan).is_ok());
}

#[test]
fn mounts_get_their_propagation_and_flags() {
    let plain = mount("/h", "/d");
    let table = [
        (plain.clone(), 0, false),
        (Mount { read_only: true, ..plain.clone() }, 1, false),
        (Mount { read_only: true, recursive_read_only: true, ..plain.clone() }, 1, true),
        (Mount { propagation: Propagation::Slave, no_exec: true, ..plain.clone() }, 8, false),
        (Mount { propagation: Propagation::Shared, no_suid: true, no_dev: true, ..plain.clone() }, 6, false),
    ];
    for (mount, attributes, attributes_recursive) in table {
        let mut plan = container_plan();
        plan.mounts = vec![mount.clone()];
        let record = container(&plan).unwrap();
        let opened = ops(&record).into_iter().find_map(|op| match op {
            Op::OpenTree { slot, path, recursive, from_host } if path == Text::new(c"/h") => {
                Some((slot, recursive, from_host))
            }
            _ => None,
        });
        let (slot, recursive, is_from_host) = opened.unwrap();
        assert!(recursive && is_from_host, "{mount:?}");
        let attach = Op::Attach {
            slot,
            target: Text::new(c"/d"),
            attributes,
            attributes_recursive,
            propagation: mount.propagation,
            skip_missing: false,
        };
        assert!(ops(&record).contains(&attach), "{mount:?}");
        let shares_root = ops(&record).contains(&Op::RootPropagation { propagation: Propagation::Shared });
        assert_eq!(shares_root, mount.propagation == Propagation::Shared, "{mount:?}");
    }
}

#[test]
fn privileged_masks_nothing_and_may_write() {
    let mut plan = container_plan();
    plan.privileged = true;
    plan.has_cgroup_namespace = false;
    plan.cgroup_mount = CgroupMount::Host("/sys/fs/cgroup".into());
    let record = container(&plan).unwrap();
    let has = |word: &str| words(&record).iter().any(|other| other.starts_with(word));
    assert!(!has("mask") && !has("make /proc/sys") && !has("open /dev/null"));
    assert!(ops(&record).contains(&Op::Unshare { flags: 0x0002_0000 }));
    let sysfs = ops(&record).into_iter().find_map(|op| match op {
        Op::Filesystem { kind, attributes, .. } if kind == Text::new(c"sysfs") => Some(attributes),
        _ => None,
    });
    assert_eq!(sysfs, Some(14));
    assert!(has("bind /sys/fs/cgroup on /sys/fs/cgroup"));
}

#[test]
fn a_read_only_root_takes_the_pods_files_with_it_and_comes_after_all_that_is_made() {
    for read_only in [false, true] {
        let mut plan = container_plan();
        plan.root.read_only = read_only;
        plan.mounts = vec![mount("/h", "/made/here")];
        let record = container(&plan).unwrap();
        let ops = ops(&record);
        let files = ops.iter().filter(|op| {
            let target = match op {
                Op::Attach { target, attributes: 1, .. } => target.as_cstr(),
                _ => None,
            };
            target.is_some_and(|target| target.to_bytes().starts_with(b"/etc/"))
        });
        assert_eq!(files.count(), if read_only { 3 } else { 0 });
        let root = ops.iter().position(|op| *op == Op::ReadOnlyRoot);
        assert_eq!(root.is_some(), read_only);
        let last_made =
            ops.iter().rposition(|op| matches!(op, Op::Attach { .. } | Op::WorkingDirectory { .. }));
        assert!(root.is_none() || root > last_made);
    }
}

#[test]
fn cgroups_of_v1_are_binds_in_a_tmpfs_that_ends_read_only() {
    let mut plan = container_plan();
    plan.has_cgroup_namespace = false;
    plan.masked_paths.clear();
    plan.readonly_paths.clear();
    plan.cgroup_mount = CgroupMount::Legacy {
        directories: vec![
            ("cpu,cpuacct".into(), "/c/cpu,cpuacct/x".into()),
            ("memory".into(), "/c/memory/x".into()),
        ],
        links: vec![("cpu".into(), "cpu,cpuacct".into())],
    };
    let tail: Vec<_> =
        layout(&plan).into_iter().skip_while(|word| word != "mount tmpfs on /sys/fs/cgroup").collect();
    let expected = [
        "mount tmpfs on /sys/fs/cgroup",
        "bind /c/cpu,cpuacct/x on /sys/fs/cgroup/cpu,cpuacct",
        "bind /c/memory/x on /sys/fs/cgroup/memory",
        "link /sys/fs/cgroup/cpu to cpu,cpuacct",
        "make /sys/fs/cgroup read-only",
    ];
    assert_eq!(tail, expected);
    plan.privileged = true;
    assert!(!layout(&plan).contains(&"make /sys/fs/cgroup read-only".to_string()));
}

#[test]
fn requested_devices_are_created_beside_the_default_ones() {
    let node = |path: &str| DeviceNode {
        path: path.into(),
        kind: DeviceKind::Block,
        major: 8,
        minor: 300,
        mode: 0o660,
        owner: (0, 0),
    };
    let mut plan = container_plan();
    plan.devices = vec![
        node("/dev/null"),
        node("/dev/sda"),
        node("/dev/sda"),
        node("/dev/dri/card0"),
        node("/opt/disk"),
        node("/dev/ptmx"),
    ];
    let record = container(&plan).unwrap();
    let made: Vec<_> = words(&record)
        .into_iter()
        .filter(|word| word.starts_with("make d") && !NODES_ALWAYS.contains(&word.as_str()))
        .collect();
    let expected = [
        "make directory /opt",
        "make device /opt/disk",
        "make device /dev/sda",
        "make directory /dev/dri",
        "make device /dev/dri/card0",
    ];
    assert_eq!(made, expected);
    let sda = Op::Node { path: Text::new(c"/dev/sda"), mode: 0o60660, device: 0x0010_082c };
    assert!(ops(&record).contains(&sda));
    let at_null = |op: &&Op<'_>| matches!(op, Op::Node { path, .. } if *path == Text::new(c"/dev/null"));
    let ops = ops(&record);
    let null: Vec<_> = ops.iter().filter(at_null).collect();
    let asked = Op::Node { path: Text::new(c"/dev/null"), mode: 0o60660, device: 0x0010_082c };
    assert_eq!(null, [&asked], "the requested device replaces the default one");
    for bad in [
        node("/"),
        DeviceNode { major: 4096, ..node("/dev/a") },
        DeviceNode { mode: 0o60660, ..node("/dev/a") },
    ] {
        plan.devices = vec![bad.clone()];
        assert!(container(&plan).is_err(), "{bad:?}");
    }
}

#[test]
fn a_volume_replaces_the_default_link_at_its_path() {
    let links = |plan: &ContainerPlan| -> Vec<String> {
        let words = words(&container(plan).unwrap());
        words.into_iter().filter(|word| word.starts_with("link /dev/")).collect()
    };
    let mut plan = container_plan();
    let all = links(&plan);
    assert!(all.iter().any(|link| link.starts_with("link /dev/stdout")), "{all:?}");
    plan.mounts =
        vec![mount("/h/out", "/dev/stdout"), mount("/h/fd", "/dev/fd/3"), mount("/h/x", "/dev/std")];
    // A mask is no volume.
    plan.masked_paths = vec!["/dev/stdin".into()];
    let left = links(&plan);
    assert_eq!(left.len(), all.len() - 2, "{left:?}");
    assert!(left.iter().all(|link| !link.contains("/dev/stdout") && !link.contains("/dev/fd ")), "{left:?}");
}

#[test]
fn slots_are_bounded_and_no_mask_covers_the_root() {
    let mut plan = container_plan();
    // The kubelet masks one directory per CPU: 240 of them fit in addition to the default mounts.
    plan.masked_paths =
        (0..240).map(|cpu| format!("/sys/devices/system/cpu/cpu{cpu}/thermal_throttle")).collect();
    let record = container(&plan).unwrap();
    let mut slots: Vec<u16> = ops(&record)
        .iter()
        .filter_map(|op| match op {
            Op::Mask { slot, .. } | Op::Attach { slot, .. } => Some(*slot),
            _ => None,
        })
        .collect();
    slots.sort_unstable();
    assert!(slots.iter().copied().eq(0..244), "every tree is attached once: {slots:?}");
    plan.masked_paths = (0..253).map(|index| format!("/m{index}")).collect();
    assert!(container(&plan).is_err());
    plan.masked_paths = vec!["/".into()];
    assert!(container(&plan).is_err());
}

#[test]
fn what_plugins_change_is_in_the_record() {
    let mut plan = container_plan();
    plan.without_mounts = vec!["/dev/mqueue".into()];
    plan.namespaces =
        vec![(NamespaceKind::Uts, "/proc/1/ns/uts".into()), (NamespaceKind::Ipc, PathBuf::new())];
    plan.sysctls = vec![("net.ipv4.ip_forward".into(), "1".into())];
    plan.scheduling.io = Some((2, 7));
    plan.devices = vec![DeviceNode {
        path: "/dev/mine".into(),
        kind: DeviceKind::Character,
        major: 1,
        minor: 3,
        mode: 0o600,
        owner: (7, 8),
    }];
    let record = container(&plan).expect("it compiles");
    let words = words(&record);
    let at = |text: &str| {
        words.iter().position(|line| line == text).unwrap_or_else(|| panic!("{text}: {words:#?}"))
    };
    assert!(!words.iter().any(|line| line.ends_with("on /dev/mqueue")), "{words:#?}");
    assert!(at("join the namespace /proc/1/ns/uts") < at("set sysctl net/ipv4/ip_forward to \"1\""));
    assert!(at("set I/O class 2, priority 7") < at("join the namespace /proc/1/ns/uts"));
    assert_eq!(at("make device /dev/mine") + 1, at("give /dev/mine to 7:8"));
    // The record has the IDs of the host.
    let range = IdRange { inside: 0, outside: 65536, length: 65536 };
    plan.user_namespace = Some(UserMappings { users: range, groups: IdRange { outside: 131_072, ..range } });
    let mapped = self::words(&container(&plan).expect("it compiles"));
    assert!(mapped.contains(&"give /dev/mine to 65543:131080".to_owned()), "{mapped:#?}");
    plan.devices[0].owner = (7, 65536);
    let unmapped = container(&plan).unwrap_err().to_string();
    assert!(unmapped.contains("65536 is not mapped in the pod's user namespace"), "{unmapped}");
    plan.user_namespace = None;
    plan.sysctls = vec![("vm.swappiness".into(), "1".into())];
    assert!(container(&plan).unwrap_err().to_string().contains("would change the whole node"));
}

#[test]
fn a_record_waits_before_its_root_and_before_its_user() {
    let record = container(&container_plan()).expect("it compiles");
    let waits = |record: &[u8]| words(record).iter().filter(|line| *line == "wait for the daemon").count();
    assert_eq!(waits(&record), 0);
    let waiting = |waits| launch(&container_plan(), VERSION, waits);
    let once = waiting(Waits::BeforeUser).expect("it compiles");
    assert!(!once.needs_host);
    let words_once = words(&once.bytes);
    let wait = words_once.iter().position(|line| line == "wait for the daemon").expect("it waits");
    assert!(words_once[wait + 1].starts_with("set umask"), "{words_once:#?}");
    let twice = waiting(Waits::BeforeRootAndUser).expect("it compiles");
    assert!(twice.needs_host);
    assert_eq!(waits(&twice.bytes), 2);
    let all = words(&twice.bytes);
    let first = all.iter().position(|line| line == "wait for the daemon").expect("it waits");
    assert_eq!(all[first + 1], "change root to /pods/m");
    let joined =
        all.iter().position(|line| line == "join the namespace /proc/self/fd/5").expect("it is on the host");
    assert!(all[joined + 1].starts_with("make namespaces") && joined < first, "{all:#?}");
    assert!(!words_once.iter().any(|line| line.starts_with("join the namespace")), "{words_once:#?}");
}

/// Hooks before pivot_root find the mounts and devices (runc: prepareRootfs). Masks, which could hide them, and the root's flags
/// come later. All other containers have their root before their mounts, and so do those of an older monitor.
#[test]
fn hooks_before_the_root_find_the_mounts() {
    let shared = Mount { propagation: Propagation::Shared, ..mount("/srv", "/data") };
    let plan = ContainerPlan { mounts: vec![shared], ..container_plan() };
    let order = |version, waits, expected: &[&str]| {
        let words = words(&launch(&plan, version, waits).expect("it compiles").bytes);
        let positions: Vec<Option<usize>> =
            expected.iter().map(|what| words.iter().position(|word| word == what)).collect();
        assert!(
            positions.iter().all(Option::is_some) && positions.is_sorted(),
            "{positions:?} in {words:#?}"
        );
    };
    let [overlay, wait, pivot, shared] =
        ["overlay root", "wait for the daemon", "change root to /pods/m", "make the mounts shared"];
    let mounts = ["mount proc on /proc", "make device /dev/null", "bind /srv on /data"];
    let covers = ["mask /proc/kcore", "make /proc/sys read-only", "verify the mounts"];
    let with_hooks =
        [&[overlay, "open the root /pods/m"], &mounts[..], &[wait, pivot, shared], &covers].concat();
    order(VERSION, Waits::BeforeRootAndUser, &with_hooks);
    order(7, Waits::BeforeRootAndUser, &[&[overlay, wait, pivot, shared], &mounts[..], &covers].concat());
    order(VERSION, Waits::BeforeUser, &[&[overlay, pivot, shared], &mounts[..], &covers, &[wait]].concat());
}

#[test]
fn a_plan_is_the_same_after_its_encoding() {
    use std::os::unix::ffi::OsStringExt;
    let mut plan = container_plan();
    let path = std::ffi::OsString::from_vec(b"/srv/\xff".to_vec());
    plan.mounts = vec![Mount { source: Source::Host(path.into()), ..mount("/srv", "/data") }];
    let bytes = postcard::to_allocvec(&plan).expect("a path that is no UTF-8 is encoded");
    let decoded: ContainerPlan = postcard::from_bytes(&bytes).expect("it is a plan");
    assert_eq!(container(&decoded).expect("it compiles"), container(&plan).expect("it compiles"));
}
