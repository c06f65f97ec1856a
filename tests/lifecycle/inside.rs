//! The view of a container: its user, capabilities, mounts, files and environment, compared with the request.

use std::fs;
use std::path::Path;

use coracle_tests::cri::proto::{Capability, Int64Value, KeyValue, Mount, NamespaceMode};
use coracle_tests::host::namespace;
use coracle_tests::request::{bridge_pod, create, exec, security};

use coracle_tests::pod_fixture::PodFixture;

/// The value after `SECTION KEY ` in the probe's report.
fn value<'a>(report: &'a str, key: &str) -> &'a str {
    report
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))
        .unwrap_or_else(|| panic!("no {key} in\n{report}"))
}

/// The mount options of a path.
fn options<'a>(report: &'a str, path: &str) -> &'a str {
    value(report, &format!("mounts {path}"))
}

#[test]
fn defaults_are_root_with_the_default_capabilities_and_nothing_open() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "ids", "caps", "fds", "place"], |_| ());
    assert_eq!(value(&report, "ids Uid"), "0 0 0 0");
    // CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE
    // SYS_CHROOT KILL AUDIT_WRITE: the fourteen default capabilities of Docker.
    assert_eq!(value(&report, "caps CapBnd"), "00000000a80425fb");
    assert_eq!(value(&report, "caps CapEff"), "00000000a80425fb");
    assert_eq!(value(&report, "caps CapAmb"), "0000000000000000");
    let open: Vec<&str> = report.lines().filter(|line| line.starts_with("fds ")).collect();
    assert_eq!(open.len(), 3, "{open:?}");
    assert!(open[0].ends_with("/dev/null"), "{open:?}");
    assert_eq!(value(&report, "place cwd"), "/");
    fixture.node.stop();
}

#[test]
fn capabilities_are_added_and_dropped() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "caps"], |config| {
        let capabilities = Capability {
            drop_capabilities: vec!["ALL".into()],
            add_capabilities: vec!["CHOWN".into()],
            ..Default::default()
        };
        security(config).capabilities = Some(capabilities);
    });
    assert_eq!(value(&report, "caps CapBnd"), "0000000000000001");
    let report = fixture.output(&["see", "caps"], |config| {
        let capabilities = Capability { drop_capabilities: vec!["CAP_CHOWN".into()], ..Default::default() };
        security(config).capabilities = Some(capabilities);
    });
    assert_eq!(value(&report, "caps CapEff"), "00000000a80425fa");
    fixture.node.stop();
}

#[test]
fn users_are_resolved_by_number_by_name_and_from_groups() {
    let fixture = PodFixture::start();
    /// Requested uid, gid, name and supplementary groups; expected uid, gid and groups.
    type Case =
        (Option<i64>, Option<i64>, &'static str, &'static [i64], &'static str, &'static str, &'static str);
    let cases: [Case; 4] = [
        (Some(1000), None, "", &[], "1000", "1000", "1000 2000 2001"),
        (Some(1000), Some(5), "", &[77], "1000", "5", "5 77 2000 2001"),
        (Some(4242), None, "", &[], "4242", "0", "0"),
        (None, None, "bob", &[], "1001", "1001", "1001 2001"),
    ];
    for (uid, gid, name, more, want_uid, want_gid, want_groups) in cases {
        let report = fixture.output(&["see", "ids"], |config| {
            let context = security(config);
            context.run_as_user = uid.map(|value| Int64Value { value });
            context.run_as_group = gid.map(|value| Int64Value { value });
            context.run_as_username = name.into();
            context.supplemental_groups = more.to_vec();
        });
        let what = format!("{uid:?} {gid:?} {name:?} {more:?}");
        assert!(value(&report, "ids Uid").starts_with(want_uid), "{what}: {report}");
        assert!(value(&report, "ids Gid").starts_with(want_gid), "{what}: {report}");
        assert_eq!(value(&report, "ids Groups"), want_groups, "{what}");
    }
    fixture.node.stop();
}

#[test]
fn no_new_privileges_is_set_on_request() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "ids"], |config| security(config).no_new_privs = true);
    assert_eq!(value(&report, "ids NoNewPrivs"), "1");
    let report = fixture.output(&["see", "ids"], |_| ());
    assert_eq!(value(&report, "ids NoNewPrivs"), "0");
    fixture.node.stop();
}

#[test]
fn the_environment_of_the_request_overrides_that_of_the_image() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "env"], |config| {
        // An empty HOME is filled as a missing one is.
        let asked = [("OVERRIDDEN", "first"), ("OVERRIDDEN", "request"), ("EMPTY", ""), ("HOME", "")];
        for (key, value) in asked {
            config.envs.push(KeyValue { key: key.into(), value: value.into() });
        }
    });
    for line in ["env FROM_IMAGE=yes", "env OVERRIDDEN=request", "env EMPTY=", "env HOME=/root"] {
        assert_eq!(report.lines().filter(|have| *have == line).count(), 1, "{line} in\n{report}");
    }
    assert!(report.contains("env PATH=/usr/local/sbin:"), "{report}");
    assert!(report.contains("env HOSTNAME="), "{report}");
    fixture.node.stop();
}

#[test]
fn a_missing_working_directory_is_made() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "place"], |config| config.working_dir = "/work/deep".into());
    assert_eq!(value(&report, "place cwd"), "/work/deep");
    let about = fixture.output(&["stat", "/work/deep"], |config| config.working_dir = "/work/deep".into());
    assert!(about.starts_with("40755 0 0 "), "{about}");
    fixture.node.stop();
}

#[test]
fn the_standard_mounts_and_devices_are_there() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "mounts"], |_| ());
    for path in [
        "/",
        "/proc",
        "/sys",
        "/dev",
        "/dev/pts",
        "/dev/shm",
        "/etc/hosts",
        "/etc/hostname",
        "/etc/resolv.conf",
    ] {
        options(&report, path);
    }
    assert!(options(&report, "/sys").starts_with("ro,"), "{report}");
    // What runc shows as their devices.
    for (path, device) in [
        ("/proc", "proc proc"),
        ("/sys", "sysfs sysfs"),
        ("/dev", "tmpfs tmpfs"),
        ("/dev/pts", "devpts devpts"),
        ("/dev/shm", "tmpfs shm"),
        ("/dev/mqueue", "mqueue mqueue"),
    ] {
        assert!(options(&report, path).contains(&format!(" {device} ")), "{device} in {report}");
    }
    assert!(options(&report, "/dev/shm").contains("nosuid,nodev,noexec"), "as in containerd: {report}");
    let devices = fixture.output(&["ls", "/dev"], |_| ());
    for name in
        ["fd", "full", "null", "ptmx", "random", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    {
        assert!(devices.lines().any(|have| have == name), "{name} in\n{devices}");
    }
    let has_core = devices.lines().any(|have| have == "core");
    assert_eq!(has_core, Path::new("/proc/kcore").exists(), "it leads to the kernel's file, if there is one");
    assert!(fixture.output(&["stat", "/dev/null"], |_| ()).starts_with("20666 0 0"));
    fixture.node.stop();
}

/// Makes the pod's configuration, as CreateContainer brings it, one with a privileged container.
fn say_privileged(fixture: &mut PodFixture) {
    let linux = fixture.pod.linux.as_mut().expect("set");
    linux.security_context.as_mut().expect("set").privileged = true;
}

/// `kubectl debug --profile=sysadmin --target=…`: the sandbox was made for a pod without privileged containers, and what
/// counts is the pod's configuration that comes with the container, as with containerd.
#[test]
fn a_debug_container_may_be_the_first_privileged_one_of_its_pod() {
    let mut fixture = PodFixture::start();
    let target = fixture.run(&fixture.config("target", &["sleep", "forever"]));
    let mut config = fixture.config("debug", &["sleep", "forever"]);
    let context = security(&mut config);
    context.privileged = true;
    let namespaces = context.namespace_options.as_mut().expect("set");
    (namespaces.pid, namespaces.target_id) = (NamespaceMode::Target.into(), target.clone());
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("refused");
    assert!(refused.message().contains("the pod sandbox is not privileged"), "{refused}");
    say_privileged(&mut fixture);
    let debug = fixture.run(&config);
    let answer = fixture.node.exec_sync(exec(&debug, &["see", "caps", "mounts"], 10)).expect("exec");
    let report = String::from_utf8(answer.stdout).expect("text");
    let own = fs::read_to_string("/proc/self/status").expect("it lives");
    let bounding = own.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).expect("a set");
    assert_eq!(value(&report, "caps CapEff"), bounding, "all that the daemon has");
    assert!(value(&report, "mounts /sys").starts_with("rw"), "{report}");
    let pid = |container: &str| namespace(fixture.node.container_pid(container), "pid");
    assert_eq!(pid(&debug), pid(&target));
    assert!(fs::metadata(format!("/proc/{}/root/dev/kmsg", fixture.node.container_pid(&debug))).is_ok());
    fixture.node.stop();
}

/// Each hierarchy of cgroup v1 has one line in the container's mount table, and the cgroup2 of a hybrid host none: programs
/// take a node for one with v2 if they find a mount of that type.
#[test]
fn cgroup_hierarchies_are_mounted_once_and_cgroup2_not_beside_v1() {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let count_v1 = mounts.lines().filter(|line| line.contains(" - cgroup ")).count();
    let mut fixture = PodFixture::start();
    say_privileged(&mut fixture);
    for is_privileged in [false, true] {
        let report = fixture.output(&["see", "mounts"], |config| security(config).privileged = is_privileged);
        let lines: Vec<&str> = report.lines().filter(|line| line.contains(" /sys/fs/cgroup")).collect();
        let of_kind = |kind: &str| lines.iter().filter(|line| line.contains(&format!(" {kind} "))).count();
        let paths: std::collections::HashSet<_> = lines.iter().map(|line| line.split(' ').nth(1)).collect();
        assert_eq!(paths.len(), lines.len(), "each once: {lines:#?}");
        match count_v1 {
            0 => assert_eq!(of_kind("cgroup2"), 1, "{lines:#?}"),
            _ => assert_eq!((of_kind("cgroup2"), of_kind("tmpfs")), (0, 1), "{lines:#?}"),
        }
        let are_read_only =
            lines.iter().all(|line| line.split(' ').nth(2).is_some_and(|flags| flags.starts_with("ro")));
        assert_eq!(are_read_only, !is_privileged, "{lines:#?}");
    }
    fixture.node.stop();
}

#[test]
fn a_read_only_root_is_read_only_and_dev_shm_is_not() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("ro", &["write", "/tmp/x", "y"]);
    security(&mut config).readonly_rootfs = true;
    let id = fixture.run(&config);
    assert_ne!(fixture.node.exited(&id).exit_code, 0);
    fixture.output(&["write", "/dev/shm/x", "y"], |config| security(config).readonly_rootfs = true);
    fixture.node.stop();
}

#[test]
fn bind_mounts_come_in_order_and_read_only_ones_are() {
    let fixture = PodFixture::start();
    let host = fixture.node.folder().join("volume");
    fs::create_dir_all(&host).expect("a volume");
    fs::write(host.join("file"), "from the host\n").expect("a file");
    let mount = |path: &str, readonly: bool| Mount {
        container_path: path.into(),
        host_path: host.display().to_string(),
        readonly,
        ..Default::default()
    };
    let mounts = vec![mount("/data", false), mount("/fixed", true)];
    let text = fixture.output(&["cat", "/fixed/file"], |config| config.mounts = mounts.clone());
    assert_eq!(text, "from the host\n");
    fixture.output(&["write", "/data/back", "hello"], |config| config.mounts = mounts.clone());
    assert_eq!(fs::read_to_string(host.join("back")).expect("written through"), "hello");
    let mut config = fixture.config("fixed", &["write", "/fixed/no", "x"]);
    config.mounts = mounts.clone();
    let id = fixture.run(&config);
    assert_ne!(fixture.node.exited(&id).exit_code, 0);
    assert_eq!(fixture.node.container(&id).mounts, mounts, "the request's mounts, in order, nothing else");
    fixture.node.stop();
}

#[test]
fn a_mount_over_a_symlink_stays_in_the_root() {
    let fixture = PodFixture::start();
    let target = fixture.node.folder().join("target");
    fs::create_dir_all(&target).expect("a folder");
    let image = coracle_tests::image::Image::probe(&fixture.node.probe(), "links").plus(
        coracle_tests::layer::Layer::new(
            &[coracle_tests::layer::Entry::symlink("escape", "/../../../../../../var/tmp")],
            coracle_tests::layer::Compression::Gzip,
        ),
    );
    fixture.node.try_import(&image.oci_archive("localhost/links:1")).expect("import");
    let mut config =
        coracle_tests::request::container("links", "localhost/links:1", &["ls", "/var/tmp"], &fixture.pod);
    config.mounts = vec![Mount {
        container_path: "/escape/inner".into(),
        host_path: target.display().to_string(),
        ..Default::default()
    }];
    let id = fixture.run(&config);
    assert_eq!((fixture.node.exited(&id).exit_code, fixture.node.output(&id).as_str()), (0, "inner\n"));
    assert!(!Path::new("/var/tmp/inner").exists(), "it was made on the host");
    fixture.node.stop();
}

#[test]
fn masked_paths_are_empty_and_read_only_paths_are_read_only() {
    let fixture = PodFixture::start();
    let usual = |config: &mut coracle_tests::cri::proto::ContainerConfig| {
        let context = security(config);
        context.masked_paths =
            ["/proc/kcore", "/proc/keys", "/proc/nowhere", "/sys/firmware"].map(String::from).into();
        context.readonly_paths = vec!["/proc/sys".into()];
    };
    assert_eq!(fixture.output(&["cat", "/proc/keys"], usual), "");
    assert_eq!(fixture.output(&["ls", "/sys/firmware"], usual), "");
    let report = fixture.output(&["see", "mounts"], usual);
    assert!(options(&report, "/proc/sys").starts_with("ro"), "{report}");
    fixture.node.stop();
}

#[test]
fn host_name_hosts_and_resolver_come_from_the_pod() {
    // Without CNI a pod has no network of its own, so this one is on the bridge.
    let node = coracle_tests::node::Node::with_bridge();
    let image = node.import_probe();
    let mut pod = bridge_pod("named");
    pod.log_directory = node.log_directory("named");
    let dns = pod.dns_config.as_mut().expect("set");
    dns.searches = vec!["cluster.local".into()];
    dns.options = vec!["ndots:5".into()];
    let pod_id = node.run_pod(&pod);
    let read = |path: &str| {
        let config = coracle_tests::request::container(&path.replace('/', "-"), &image, &["cat", path], &pod);
        let id = node.run_container(&pod_id, &config, &pod);
        assert_eq!(node.exited(&id).exit_code, 0);
        node.output(&id)
    };
    assert_eq!(read("/etc/hostname").trim(), "named");
    assert_eq!(read("/proc/sys/kernel/hostname").trim(), "named");
    let resolver = read("/etc/resolv.conf");
    for line in ["nameserver 192.0.2.53", "search cluster.local", "options ndots:5"] {
        assert!(resolver.lines().any(|have| have == line), "{line} in\n{resolver}");
    }
    assert!(read("/etc/hosts").contains("127.0.0.1"));
    node.stop();
}

#[test]
fn command_and_args_replace_entrypoint_and_cmd() {
    let fixture = PodFixture::start();
    let image = coracle_tests::image::Image::probe(&fixture.node.probe(), "cmd")
        .with("Cmd", serde_json::json!(["print", "from", "cmd"]));
    fixture.node.try_import(&image.oci_archive("localhost/cmd:1")).expect("import");
    let run = |command: &[&str], args: &[&str]| {
        let name = format!("c{}", coracle_tests::request::fresh());
        let mut config = coracle_tests::request::container(&name, "localhost/cmd:1", args, &fixture.pod);
        config.command = command.iter().map(|word| (*word).to_owned()).collect();
        let id = fixture.run(&config);
        (fixture.node.exited(&id).exit_code, fixture.node.output(&id))
    };
    assert_eq!(run(&[], &[]), (0, "from cmd\n".into()));
    assert_eq!(run(&[], &["print", "args"]), (0, "args\n".into()));
    assert_eq!(
        run(&["/probe", "print", "command"], &[]),
        (0, "command\n".into()),
        "the image's Cmd is dropped"
    );
    assert_eq!(run(&["/probe"], &["print", "both"]), (0, "both\n".into()));
    fixture.node.stop();
}
