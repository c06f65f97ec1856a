//! Tests of processes, execs, pods and error texts.

use super::*;

#[test]
fn no_new_privs_moves_the_filter_to_the_end() {
    let mut main = ProcessPlan { tty: true, ..process_plan() };
    main.process.attributes.no_new_privileges = true;
    let record = compile(&container_plan(), &main).unwrap();
    let tail = &words(&record)[words(&record).len() - 10..];
    let expected = [
        "verify the mounts",
        "set umask 0022",
        "join the session keyring",
        "keep capabilities 0xff",
        "set 2 groups",
        "become user 1000:1000",
        "set capabilities 0x0",
        "set no_new_privs",
        "load a seccomp filter of 2 instructions",
        "exec sleep",
    ];
    assert_eq!(tail, expected);
    assert!(ops(&record).contains(&Op::Terminal));
}

#[test]
fn an_exec_joins_the_containers_cgroup_first() {
    let plan = ExecPlan {
        cgroup_joins: vec!["/c/exec-1/tasks".into()],
        process: process_plan(),
        user_namespace: None,
    };
    let record = exec(&plan, VERSION).unwrap();
    let expected = [
        "join cgroup /c/exec-1",
        "write \"-997\" to /proc/self/oom_score_adj",
        "set limit 7 to 1024:524288",
        "change directory to /work",
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
    assert!(ops(&record).contains(&Op::WorkingDirectory { path: Text::new(c"/work"), create: false }));
    let record =
        exec(&ExecPlan { process: ProcessPlan { tty: true, ..plan.process }, ..plan }, VERSION).unwrap();
    assert_eq!(words(&record)[3], "make the terminal");
}

/// The profile is set before any file of the image is accessible, and also for an exec.
#[test]
fn an_apparmor_profile_is_set_through_the_nodes_procfs() {
    let mut process = process_plan();
    process.confinement.apparmor = Some("my profile".into());
    let launch = compile(&container_plan(), &process).unwrap();
    let set = "write \"exec my profile\" to /proc/self/attr/apparmor/exec";
    let position = |what: &str| words(&launch).iter().position(|word| word == what);
    assert!(position(set).is_some() && position(set) < position("overlay root"), "{:?}", words(&launch));
    assert!(!words(&container(&container_plan()).unwrap()).iter().any(|word| word.contains("apparmor")));
    let exec = exec(&ExecPlan { cgroup_joins: vec![], process, user_namespace: None }, VERSION).unwrap();
    assert!(words(&exec).iter().any(|word| word == set));
}

/// The labels of the process and its keys are set through the node's procfs, the label of files on each of the
/// container's own file systems. An exec gets its container's label.
#[test]
fn selinux_labels_are_set_before_the_root_and_on_every_file_system_of_its_own() {
    let label = "system_u:system_r:container_t:s0:c1,c2";
    let file = "system_u:object_r:container_file_t:s0:c1,c2";
    let mut process = process_plan();
    process.confinement.selinux = Some(label.into());
    let mut plan = container_plan();
    plan.root.label = Some(file.into());
    let launch = compile(&plan, &process).unwrap();
    let set = format!("write {label:?} to /proc/self/attr/exec");
    let position = |what: &str| words(&launch).iter().position(|word| word == what);
    assert!(position(&set).is_some() && position(&set) < position("overlay root"), "{:?}", words(&launch));
    assert!(position(&format!("write {label:?} to /proc/self/attr/keycreate")) < position(&set));
    assert!(!words(&container(&container_plan()).unwrap()).contains(&set));
    let mut labelled = Vec::new();
    for op in ops(&launch) {
        if let Op::Filesystem { kind, options, .. } = op {
            let is_labelled =
                options.iter().any(|option| option.to_bytes() == format!("context={file}").as_bytes());
            labelled.push((kind.as_cstr().unwrap().to_str().unwrap().to_owned(), is_labelled));
        }
        if let Op::Overlay { options, .. } = op {
            let options = options.as_cstr().unwrap().to_str().unwrap().to_owned();
            assert!(options.ends_with(&format!(",context=\"{file}\"")), "{options}");
        }
    }
    labelled.sort();
    let expected = [("devpts", true), ("mqueue", false), ("proc", false), ("sysfs", false), ("tmpfs", true)];
    let expected: Vec<_> =
        expected.iter().map(|(kind, is_labelled)| (kind.to_string(), *is_labelled)).collect();
    assert_eq!(labelled.into_iter().filter(|(kind, _)| kind != "cgroup2").collect::<Vec<_>>(), expected);
    let exec = exec(&ExecPlan { cgroup_joins: vec![], process, user_namespace: None }, VERSION).unwrap();
    assert!(words(&exec).contains(&set));
    let pod = sandbox(&SandboxPlan { label: Some(file.into()), ..sandbox_plan() }).unwrap();
    let shm = ops(&pod).into_iter().find_map(|op| match op {
        Op::Tmpfs { options, .. } => Some(options.as_cstr().unwrap().to_str().unwrap().to_owned()),
        _ => None,
    });
    assert_eq!(shm, Some(format!("mode=1777,size=65536k,context=\"{file}\"")));
}

#[test]
fn a_command_is_searched_in_the_path_of_the_container() {
    let default: Vec<String> = PATH_DEFAULT.split(':').map(|directory| format!("{directory}/a")).collect();
    let default: Vec<&str> = default.iter().map(String::as_str).collect();
    let table: [(&str, &[&str], &[&str]); 8] = [
        ("/bin/a", &["PATH=/x"], &["/bin/a"]),
        ("./a", &[], &["/work/./a"]),
        ("b/a", &[], &["/work/b/a"]),
        ("a", &["PATH=/x:/y"], &["/x/a", "/y/a"]),
        ("a", &["PATH=/x", "PATH=/y"], &["/y/a"]),
        ("a", &["PATH=:/x::.:y:/z"], &["/x/a", "/z/a"]),
        ("a", &[], &default),
        ("a", &["PATH="], &default),
    ];
    for (command, environment, expected) in table {
        let mut process = process_plan();
        process.process.arguments = vec![command.into()];
        process.process.environment =
            environment.iter().map(|variable| variable.as_bytes().to_vec()).collect();
        let record =
            exec(&ExecPlan { cgroup_joins: vec![], process, user_namespace: None }, VERSION).unwrap();
        match ops(&record).last() {
            Some(Op::Exec { candidates, .. }) => {
                let found: Vec<_> = candidates.iter().map(|path| path.to_str().unwrap()).collect();
                assert_eq!(found, expected, "{command} {environment:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn invalid_processes_are_refused() {
    type Change = fn(&mut ProcessPlan);
    let table: [(&str, Change); 9] = [
        ("command", |p| p.process.arguments.clear()),
        ("command", |p| p.process.arguments[0].clear()),
        ("command", |p| p.process.arguments[1] = "a\0b".into()),
        ("command", |p| p.process.arguments[0] = "a".repeat(5000)),
        ("environment", |p| p.process.environment[0] = b"A=\0".to_vec()),
        ("oom_score_adj", |p| p.process.oom_score_adj = 1001),
        ("limits", |p| p.limits[0].soft = u64::MAX),
        ("seccomp", |p| p.confinement.seccomp = Some(Seccomp { program: vec![0; 12], flags: 0 })),
        ("environment", |p| p.process.environment = vec![vec![b'a'; 1 << 20]; 5]),
    ];
    for (expected, change) in table {
        let mut process = process_plan();
        change(&mut process);
        match exec(&ExecPlan { cgroup_joins: vec![], process, user_namespace: None }, VERSION) {
            Err(Error::Invalid { field, .. }) => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn a_pods_operations_are_in_order() {
    let record = sandbox(&sandbox_plan()).unwrap();
    let expected = [
        "write \"-998\" to /proc/self/oom_score_adj",
        "make the mounts slaves of the host's",
        "mount tmpfs on /p/shm",
        "set host name web-0",
        "bring up lo",
        "set sysctl net/ipv4/ping_group_range to \"0 2147483647\"",
        "set sysctl kernel/sem to \"1 2 3 4\"",
    ];
    assert_eq!(words(&record), expected);
    let plan = sandbox_plan();
    assert_eq!(
        network_sysctls(&plan.sysctls, plan.namespaces).unwrap(),
        [("/proc/sys/net/ipv4/ip_unprivileged_port_start".to_owned(), "80".to_owned())]
    );
    let shm =
        Op::Tmpfs { options: Text::new(c"mode=1777,size=65536k"), target: Text::new(c"/p/shm"), flags: 14 };
    assert!(ops(&record).contains(&shm));
}

#[test]
fn a_pod_in_the_hosts_namespaces_changes_nothing_there() {
    let plan = SandboxPlan {
        namespaces: PodNamespaces { network: false, ipc: false, uts: false },
        sysctls: vec![],
        oom_score_adj: None,
        ..sandbox_plan()
    };
    assert_eq!(words(&sandbox(&plan).unwrap()), ["make the mounts slaves of the host's"]);
    for name in ["", "a b", "a\n", &"a".repeat(65)] {
        let plan = SandboxPlan { host_name: name.into(), ..sandbox_plan() };
        assert!(sandbox(&plan).is_err(), "{name:?}");
    }
}

#[test]
fn errors_read_as_users_expect() {
    let mut plan = container_plan();
    plan.mounts = vec![Mount { read_only: true, recursive_read_only: true, ..mount("/srv/data", "/data") }];
    let mut main = process_plan();
    main.process.arguments = vec!["nope".into()];
    let record = compile(&plan, &main).unwrap();
    let at = |word: &str| words(&record).iter().position(|other| other == word).unwrap() as u16;
    let table = [
        (at("exec nope"), 2, "exec: \"nope\": executable file not found in $PATH"),
        (at("exec nope"), 13, "exec: \"nope\": permission denied"),
        (at("bind /srv/data on /data"), 2, "bind /srv/data on /data: no such file or directory"),
        (
            at("bind /srv/data on /data"),
            38,
            "bind /srv/data on /data: recursive read-only mounts need Linux 5.12",
        ),
        (at("change directory to /work"), 20, "change directory to /work: not a directory"),
        (
            at("exec nope") + 2,
            2,
            "exec: \"/usr/bin/nope\": no such file or directory: the file's interpreter or dynamic loader is missing",
        ),
        (9999, 22, "operation 9999 of the launch record: invalid argument"),
        (0, 0, "operation 0 of the launch record: not readable by this pod's monitor"),
    ];
    for (index, errno, expected) in table {
        assert_eq!(explain(&record, index, errno), expected);
    }
    main.process.arguments = vec!["/bin/nope".into()];
    let record = compile(&plan, &main).unwrap();
    let last = ops(&record).len() as u16 - 1;
    assert_eq!(explain(&record, last, 2), "exec: \"/bin/nope\": no such file or directory");
    // Damaged records are described without a panic.
    for cut in 0..record.len() {
        let _ = explain(&record[..cut], last, 2);
    }
}

#[test]
fn records_for_older_monitors_hold_what_those_know() {
    let plan = ExecPlan { cgroup_joins: vec![], process: process_plan(), user_namespace: None };
    let record = exec(&plan, VERSION).unwrap();
    let has_keyring = |record: &[u8]| walk(record).unwrap().any(|op| op.unwrap() == Op::Keyring);
    assert!(has_keyring(&record));
    let older = exec(&plan, 4).unwrap();
    assert!(!has_keyring(&older));
    let count = |record: &[u8]| walk(record).unwrap().count();
    assert!(walk(&older).unwrap().all(|op| op.unwrap().since() <= 4) && count(&older) == count(&record) - 1);
}
