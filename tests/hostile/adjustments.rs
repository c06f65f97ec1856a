//! Adjustments of NRI plugins that contradict themselves, leave the container, or name what belongs to others. A plugin is
//! trusted with its own requests (docs/threat-model.md), but a faulty one must fail the creation of one container: it ends
//! no process of others, changes no file of the node, and the daemon stays as small as before.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, RemoveContainerRequest, StartContainerRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod};

use crate::restarted;

type Adjustment = api::ContainerAdjustment;

/// A plugin that adjusts the container of each name as the function says.
fn adjusting(node: &Node, adjust: impl Fn(&str) -> Adjustment + Send + 'static) -> Plugin {
    let handler = move |heard: &coracle_tests::nri::Heard| match heard.method.as_str() {
        "CreateContainer" => Answer::adjust(adjust(&heard.container().name)),
        _ => Answer::empty(),
    };
    Plugin::join(node, "10", "hostile", EVENTS, Box::new(move |_, heard| handler(heard)))
}

/// Creates and starts a container; returns its ID, or the error of the first step that was refused.
fn attempt(fixture: &PodFixture, config: &ContainerConfig) -> Result<String, String> {
    let request = create(&fixture.pod_id, config, &fixture.pod);
    let made =
        fixture.node.create_container(request).map_err(|error| format!("create: {}", error.message()))?;
    let start = StartContainerRequest { container_id: made.container_id.clone() };
    let started = fixture.node.start_container(start);
    started.map(|_| made.container_id).map_err(|error| format!("start: {}", error.message()))
}

fn linux(linux: api::LinuxContainerAdjustment) -> Adjustment {
    Adjustment { linux: Some(linux), ..Default::default() }
}

fn limited(resources: api::LinuxResources) -> Adjustment {
    linux(api::LinuxContainerAdjustment { resources: Some(resources), ..Default::default() })
}

fn mounted(destination: &str, kind: &str, source: &str, options: &[&str]) -> Adjustment {
    let mount = api::Mount {
        destination: destination.into(),
        r#type: kind.into(),
        source: source.into(),
        options: options.iter().map(|&option| option.into()).collect(),
    };
    Adjustment { mounts: vec![mount], ..Default::default() }
}

fn hooked(path: &str, timeout: i64) -> Adjustment {
    let timeout = Some(api::OptionalInt { value: timeout });
    let hook = api::Hook { path: path.into(), timeout, ..Default::default() };
    Adjustment {
        hooks: Some(api::Hooks { prestart: vec![hook], ..Default::default() }),
        ..Default::default()
    }
}

fn variable(key: &str, value: &str) -> Adjustment {
    let variable = api::KeyValue { key: key.into(), value: value.into() };
    Adjustment { env: vec![variable], ..Default::default() }
}

fn limit(kind: &str, soft: u64, hard: u64) -> Adjustment {
    Adjustment { rlimits: vec![api::PosixRlimit { r#type: kind.into(), soft, hard }], ..Default::default() }
}

fn scored(value: i64) -> Adjustment {
    linux(api::LinuxContainerAdjustment {
        oom_score_adj: Some(api::OptionalInt { value }),
        ..Default::default()
    })
}

fn device(path: &str, kind: &str, major: i64, minor: i64) -> Adjustment {
    let device =
        api::LinuxDevice { path: path.into(), r#type: kind.into(), major, minor, ..Default::default() };
    linux(api::LinuxContainerAdjustment { devices: vec![device], ..Default::default() })
}

/// A rule of the device cgroup.
fn allowed(major: i64, minor: i64) -> Adjustment {
    let number = |value| Some(api::OptionalInt64 { value });
    let rule = api::LinuxDeviceCgroup {
        allow: true,
        r#type: "b".into(),
        major: number(major),
        minor: number(minor),
        access: "rw".into(),
    };
    limited(api::LinuxResources { devices: vec![rule], ..Default::default() })
}

fn in_cgroup(path: &str) -> Adjustment {
    linux(api::LinuxContainerAdjustment { cgroups_path: path.into(), ..Default::default() })
}

fn in_namespace(kind: &str, path: &Path) -> Adjustment {
    let namespace = api::LinuxNamespace { r#type: kind.into(), path: path.display().to_string() };
    linux(api::LinuxContainerAdjustment { namespaces: vec![namespace], ..Default::default() })
}

fn sysctl(name: &str, value: &str) -> Adjustment {
    linux(api::LinuxContainerAdjustment {
        sysctl: [(name.to_owned(), value.to_owned())].into(),
        ..Default::default()
    })
}

fn unified(file: &str) -> Adjustment {
    let unified = [(file.to_owned(), "1".to_owned())].into();
    limited(api::LinuxResources { unified, ..Default::default() })
}

fn class(name: &str) -> Adjustment {
    let rdt =
        api::LinuxRdt { clos_id: Some(api::OptionalString { value: name.into() }), ..Default::default() };
    linux(api::LinuxContainerAdjustment { rdt: Some(rdt), ..Default::default() })
}

fn filtered(action: &str, listener: &str) -> Adjustment {
    let policy = api::LinuxSeccomp {
        default_action: action.into(),
        listener_path: listener.into(),
        ..Default::default()
    };
    linux(api::LinuxContainerAdjustment { seccomp_policy: Some(policy), ..Default::default() })
}

fn cdi(name: &str) -> Adjustment {
    Adjustment { cdi_devices: vec![api::CdiDevice { name: name.into() }], ..Default::default() }
}

fn interface(host: &str, name: &str) -> Adjustment {
    let device = api::LinuxNetDevice { name: name.into() };
    linux(api::LinuxContainerAdjustment {
        net_devices: [(host.to_owned(), device)].into(),
        ..Default::default()
    })
}

/// Adjustments that must be refused, each with the part of the error that says what is wrong; `|` separates alternatives.
type Cases = Vec<(Adjustment, &'static str)>;

/// Mounts over the kernel's files and the root, and mounts that cannot be made.
fn impossible_mounts(fixture: &PodFixture) -> Cases {
    let root = fixture.node.folder().display().to_string();
    let mut all = Vec::new();
    for target in ["/proc", "/proc/sys", "/proc/1/root", "/tmp/../proc", "/../proc/./sys", "//proc//"] {
        all.push((mounted(target, "bind", &root, &["rbind"]), "proc"));
        all.push((mounted(target, "tmpfs", "tmpfs", &[]), "proc"));
    }
    for target in ["/", "/.", "//", "/tmp/.."] {
        all.push((mounted(target, "bind", &root, &["rbind"]), "root of the container"));
    }
    all.extend([
        (mounted("../etc", "bind", &root, &[]), "not an absolute path"),
        (mounted("/a\0b", "bind", &root, &[]), "not an absolute path"),
        (mounted("/a", "bind", "../../etc", &[]), "is not absolute"),
        (mounted("/a", "bind", "/nowhere/at/all", &[]), "/nowhere/at/all"),
        (mounted("/a", "bind", &root, &["upperdir=/etc"]), "upperdir=/etc"),
        (mounted("/a", "tmpfs", "tmpfs", &["rbind"]), "mount source"),
        (mounted("/a", "overlay", "overlay", &["lowerdir=/"]), "\"overlay\""),
        (mounted("/a", "ext4", "/dev/vda", &[]), "\"ext4\""),
        // If the node's mounts are shared, the propagation itself could be given.
        (
            mounted("/a", "bind", &root, &["rro", "shared"]),
            "is not a shared mount|recursive_read_only needs readonly and private propagation",
        ),
    ]);
    all
}

/// Namespaces and cgroups of the node, and files that are none.
fn impossible_places(fixture: &PodFixture) -> Cases {
    let folder = fixture.node.folder();
    let (fifo, file) = (folder.join("fifo"), folder.join("file"));
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    fs::write(&file, "not a namespace").expect("a file");
    let mut all = vec![
        (interface("../x", "y"), "not a name"),
        (interface("lo", "../x"), "not a name"),
        (interface("lo", "eth7"), "the pod has the node's network"),
        (in_namespace("network", Path::new("self/ns/net")), "is not absolute"),
        (in_namespace("mount", Path::new("/proc/1/ns/mnt")), "cannot be given"),
        (in_namespace("user", Path::new("/proc/1/ns/user")), "cannot be given"),
        (in_namespace("pid", Path::new("/proc/1/ns/pid")), "cannot be given"),
        (in_namespace("network", &file), "join the namespace"),
        (in_namespace("network", &fifo), "join the namespace"),
        (in_namespace("network", Path::new("/proc/1/ns/uts")), "join the namespace"),
        (in_namespace("ipc", folder), "join the namespace"),
        (class("../../../tmp"), "is not a name"),
        (sysctl("kernel.core_pattern", "|/evil"), "kernel.core_pattern"),
        (sysctl("net/../kernel/core_pattern", "|/evil"), "core_pattern"),
        (sysctl("net.ipv4.ip_forward", "1\0"), "ip_forward"),
    ];
    for path in ["relative", "/", "//", "/a/../../b", "/..", "/a//b", "/a/", "/a\0b"] {
        all.push((in_cgroup(path), "cgroup"));
    }
    // On v1 these limits are ignored with a warning.
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        for file in
            ["../memory.max", "cgroup.procs", "cgroup.kill", "memory.max/../cgroup.procs", "/etc/passwd"]
        {
            all.push((unified(file), file));
        }
    }
    all
}

/// Values that contradict themselves or that the kernel does not have.
fn impossible_values() -> Cases {
    vec![
        (hooked("relative", 1), "not an absolute path"),
        (hooked("", 1), "not an absolute path"),
        (hooked("/a\0b", 1), "not an absolute path"),
        (hooked("/bin/true", 0), "a timeout of 0"),
        (hooked("/bin/true", i64::MIN), "a timeout of -"),
        (variable("A=B", "c"), "not a name"),
        (variable("A", "b\0c"), "not a name"),
        (variable("-", ""), "not a name"),
        (Adjustment { args: vec!["/probe".into(), "a\0b".into()], ..Default::default() }, "NUL"),
        (limit("RLIMIT_NOFILE", 2, 1), "is above hard"),
        (limit("RLIMIT_EVERYTHING", 1, 1), "unknown"),
        (scored(1001), "oom_score_adj 1001"),
        (scored(i64::MIN), "oom_score_adj -"),
        (device("dev/x", "c", 1, 3), "not an absolute path"),
        (device("/dev/x", "p", 1, 3), "type \"p\""),
        (device("/dev/x", "c", -1, 3), "is not a device"),
        (device("/dev/x", "b", 1 << 40, 0), "is not a device"),
        (allowed(1 << 40, 0), "is not a device"),
        (allowed(8, -2), "is not a device"),
        (filtered("SCMP_ACT_ALL", ""), "SCMP_ACT_ALL"),
        (filtered("SCMP_ACT_NOTIFY", "/run/listener"), "seccomp"),
        (cdi("../../etc/passwd"), "not vendor/class=name"),
        (cdi("vendor.test/..=../../passwd"), "vendor.test/..=../../passwd"),
    ]
}

#[test]
fn adjustments_that_contradict_themselves_or_leave_the_container_are_refused() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let core_pattern = fs::read("/proc/sys/kernel/core_pattern").expect("the node's");
    let cases = [impossible_mounts(&fixture), impossible_places(&fixture), impossible_values()].concat();
    let answers: Vec<Adjustment> = cases.iter().map(|(asked, _)| asked.clone()).collect();
    let number = |name: &str| name.strip_prefix("case").and_then(|number| number.parse::<usize>().ok());
    let _plugin = adjusting(&fixture.node, move |name| {
        number(name).and_then(|number| answers.get(number)).cloned().unwrap_or_default()
    });
    let mut accepted = Vec::new();
    for (at, (asked, expected)) in cases.iter().enumerate() {
        let begun = std::time::Instant::now();
        match attempt(&fixture, &fixture.config(&format!("case{at}"), &["sleep", "forever"])) {
            Err(error) if expected.split('|').any(|text| error.contains(text)) => {}
            other => accepted.push(format!("{asked:?}: expected {expected:?}: {other:?}")),
        }
        let took = begun.elapsed();
        if took > std::time::Duration::from_secs(10) {
            accepted.push(format!("{asked:?} took {took:?}"));
        }
    }
    assert!(accepted.is_empty(), "{accepted:#?}");
    assert_eq!(fs::read("/proc/sys/kernel/core_pattern").expect("the node's"), core_pattern);
    fixture.run(&fixture.config("well", &["sleep", "forever"]));
    fixture.node.stop();
}

/// A process of the node in a cgroup of its own, which ends with the test.
struct Bystander {
    child: Child,
    cgroup: String,
}

impl Bystander {
    fn new(cgroup: String) -> Bystander {
        let child = Command::new("sleep").arg("600").spawn().expect("a process");
        for root in host::cgroup_roots() {
            let directory = root.join(cgroup.trim_start_matches('/'));
            fs::create_dir_all(&directory).expect("a cgroup");
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let of_parent = directory.parent().expect("a parent").join(file);
                if let Ok(value) = fs::read_to_string(of_parent) {
                    let _ = fs::write(directory.join(file), value); // on v2 the empty value means the parent's
                }
            }
            fs::write(directory.join("cgroup.procs"), child.id().to_string()).expect("it joins");
        }
        Bystander { child, cgroup }
    }

    fn lives(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_none()
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have been killed
        let _ = self.child.wait();
        for root in host::cgroup_roots() {
            let directory = root.join(self.cgroup.trim_start_matches('/'));
            // Not a panic: the test may have failed already.
            let is_removed = || (fs::remove_dir(&directory).is_ok() || !directory.exists()).then_some(());
            if host::wait_within(host::patience(), is_removed).is_none() {
                eprintln!("{} is in use", directory.display());
            }
        }
    }
}

/// Regression: the container joined any cgroup, and its end killed every process there and removed it.
#[test]
fn a_cgroup_of_others_is_given_to_no_container() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let mut bystander = Bystander::new(format!("/coracle-bystander-{}", std::process::id()));
    let neighbour = fixture.run(&fixture.config("neighbour", &["sleep", "forever"]));
    let parent = format!("/{}", fixture.node.cgroup_parent());
    let (own, of_neighbour) = (format!("{parent}/its-own"), format!("{parent}/{neighbour}"));
    let foreign = [bystander.cgroup.clone(), of_neighbour.clone(), format!("{of_neighbour}/below"), parent];
    let (paths, first) = (foreign.clone(), own.clone());
    let _plugin =
        adjusting(&fixture.node, move |name| match name.strip_prefix("at").map(str::parse::<usize>) {
            Some(Ok(number)) => in_cgroup(&paths[number]),
            _ if name.starts_with("own") => in_cgroup(&first),
            _ => Adjustment::default(),
        });
    for (at, path) in foreign.iter().enumerate() {
        let tried = attempt(&fixture, &fixture.config(&format!("at{at}"), &["sleep", "forever"]));
        let error = tried.expect_err(path);
        assert!(error.starts_with("create: ") && error.contains(path), "{path}: {error}");
        assert!(bystander.lives(), "{path}");
        assert_eq!(fixture.node.container(&neighbour).state(), ContainerState::ContainerRunning, "{path}");
    }
    // One of its own is used, and not by two containers at once.
    let id = fixture.run(&fixture.config("own1", &["sleep", "forever"]));
    let cgroups =
        fs::read_to_string(format!("/proc/{}/cgroup", fixture.node.container_pid(&id))).expect("it runs");
    assert!(cgroups.lines().any(|line| line.ends_with(&format!(":{own}"))), "{cgroups}");
    let error = attempt(&fixture, &fixture.config("own2", &["sleep", "forever"])).expect_err("it is in use");
    assert!(error.contains(&own), "{error}");
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerRunning);
    fixture.node.stop();
}

/// Regression: after a restart of the daemon, the removal of a container that had ended killed the one that had been given
/// the same cgroup in its place.
#[test]
fn a_container_that_has_ended_does_not_end_its_successor_in_the_same_cgroup() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let own = format!("/{}/its-own", fixture.node.cgroup_parent());
    let plugin = adjusting(&fixture.node, move |_| in_cgroup(&own));
    let first = fixture.run(&fixture.config("first", &["true"]));
    fixture.node.exited(&first);
    let second = host::wait_for("the cgroup is free", || {
        attempt(&fixture, &fixture.config("second", &["sleep", "forever"])).ok()
    });
    drop(plugin);
    let fixture = restarted(fixture);
    fixture.node.remove_container(RemoveContainerRequest { container_id: first }).expect("it goes");
    assert_eq!(fixture.node.container(&second).state(), ContainerState::ContainerRunning);
    assert!(host::is_alive(fixture.node.container_pid(&second)));
    fixture.node.stop();
}
