//! NRI-C16 to NRI-C20 from inside: what a plugin asks for is in the container, and what cannot be done fails it.

use std::fs;
use std::process::Command;

use coracle_tests::cri::proto::RemoveContainerRequest;
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Handler, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, create, exec, fresh, host_pod};

use super::updates::knob;
use super::{answers, node, refused};

/// A plugin that gives the container of each name its adjustment.
fn adjusting(adjust: impl Fn(&str) -> api::ContainerAdjustment + Send + 'static) -> Handler {
    answers("CreateContainer", move |heard| Answer::adjust(adjust(&heard.container().name)))
}

fn in_linux(linux: api::LinuxContainerAdjustment) -> api::ContainerAdjustment {
    api::ContainerAdjustment { linux: Some(linux), ..Default::default() }
}

fn limited(resources: api::LinuxResources) -> api::ContainerAdjustment {
    in_linux(api::LinuxContainerAdjustment { resources: Some(resources), ..Default::default() })
}

fn variable(key: &str, value: &str) -> api::KeyValue {
    api::KeyValue { key: key.into(), value: value.into() }
}

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> api::Mount {
    api::Mount {
        destination: destination.into(),
        r#type: kind.into(),
        source: source.into(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
    }
}

fn stage_with(adjust: impl Fn(&str) -> api::ContainerAdjustment + Send + 'static) -> (PodFixture, Plugin) {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let plugin = Plugin::join(&fixture.node, "10", "adjust", EVENTS, adjusting(adjust));
    (fixture, plugin)
}

/// Output of a container that runs the probe with these arguments.
#[track_caller]
fn output(fixture: &PodFixture, name: &str, words: &[&str]) -> String {
    let id = fixture.run(&fixture.config(name, words));
    let status = fixture.node.exited(&id);
    assert_eq!(status.exit_code, 0, "{}", fixture.node.output(&id));
    let text = fixture.node.output(&id);
    fixture.node.remove_container(RemoveContainerRequest { container_id: id }).expect("it goes");
    text
}

/// Requests a container and returns the error text.
#[track_caller]
fn error(fixture: &PodFixture, name: &str) -> String {
    let config = fixture.config(name, &["true"]);
    refused(fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)))
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn environment_arguments_and_rlimits_of_the_process_are_adjusted() {
    let (fixture, _plugin) = stage_with(|name| match name {
        "env" => api::ContainerAdjustment {
            env: vec![variable("ADDED", "1"), variable("-HOSTNAME", ""), variable("HOME", "/there")],
            ..Default::default()
        },
        "args" => api::ContainerAdjustment {
            args: ["", "/probe", "print", "other", "words"].map(str::to_owned).into(),
            ..Default::default()
        },
        _ => api::ContainerAdjustment {
            rlimits: vec![
                api::PosixRlimit { r#type: "RLIMIT_NOFILE".into(), soft: 77, hard: 88 },
                api::PosixRlimit { r#type: "RLIMIT_CORE".into(), soft: 0, hard: 0 },
            ],
            linux: Some(api::LinuxContainerAdjustment {
                oom_score_adj: Some(api::OptionalInt { value: 321 }),
                ..Default::default()
            }),
            ..Default::default()
        },
    });
    let seen = output(&fixture, "env", &["see", "env"]);
    assert!(seen.contains("env ADDED=1\n") && seen.contains("env HOME=/there\n"), "{seen}");
    assert!(!seen.contains("HOSTNAME"), "{seen}");
    assert_eq!(output(&fixture, "args", &["true"]), "other words\n");
    let id = fixture.run(&fixture.config("limits", &["sleep", "forever"]));
    let within = fixture.node.exec_sync(exec(&id, &["see", "limits", "place"], 10)).expect("an exec");
    let seen = String::from_utf8(within.stdout).expect("text");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<_> = seen.lines().map(words).collect();
    assert!(lines.iter().any(|line| line == "Max open files 77 88 files"), "{seen}");
    assert!(lines.iter().any(|line| line == "Max core file size 0 0 bytes"), "{seen}");
    assert!(seen.contains("oom_score_adj 321"), "{seen}");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn mounts_are_added_replaced_and_removed() {
    let folder = std::env::temp_dir().join(format!("coracle-nri-mount-{}-{}", std::process::id(), fresh()));
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("file"), "from the host").expect("a file");
    let source = folder.display().to_string();
    let (fixture, _plugin) = stage_with(move |name| {
        let mounts = match name {
            "bind" => vec![mount("/added", "bind", &source, &["rbind", "ro"])],
            "tmpfs" => vec![mount("/added", "tmpfs", "tmpfs", &["nosuid", "size=1m"])],
            "without" => vec![mount("-/dev/mqueue", "", "", &[])],
            // As the sample plugin writable-cgroups does it.
            "cgroups" => vec![
                mount("-/sys/fs/cgroup", "", "", &[]),
                mount("/sys/fs/cgroup", "cgroup", "cgroup", &["nosuid", "noexec", "nodev", "rw"]),
            ],
            "absent" => vec![mount("/added", "bind", "/nowhere/at/all", &["rbind"])],
            _ => vec![mount("/added", "nfs", "server:/x", &[])],
        };
        api::ContainerAdjustment { mounts, ..Default::default() }
    });
    assert_eq!(output(&fixture, "bind", &["cat", "/added/file"]).trim(), "from the host");
    let seen = output(&fixture, "bind", &["see", "mounts"]);
    assert!(seen.lines().any(|line| line.starts_with("mounts /added ro")), "{seen}");
    let seen = output(&fixture, "tmpfs", &["see", "mounts"]);
    assert!(
        seen.lines().any(|line| line.starts_with("mounts /added ") && line.contains("size=1024k")),
        "{seen}"
    );
    let usual = output(&fixture, "tmpfs", &["see", "mounts"]);
    assert!(usual.contains("mounts /dev/mqueue "), "{usual}");
    assert!(!output(&fixture, "without", &["see", "mounts"]).contains("/dev/mqueue"));
    let groups = |seen: &str| {
        // On v1 one of the hierarchies.
        let is_of = |line: &&str| line.starts_with("mounts /sys/fs/cgroup") && line.contains(" cgroup");
        let line = seen.lines().find(is_of).expect("a mount");
        line.split(' ').nth(2).expect("options").to_owned()
    };
    assert!(groups(&usual).starts_with("ro"), "{usual}");
    assert!(groups(&output(&fixture, "cgroups", &["see", "mounts"])).starts_with("rw"));
    let text = error(&fixture, "absent");
    assert!(text.contains("/nowhere/at/all"), "{text}");
    let text = error(&fixture, "foreign");
    assert!(text.contains("\"nfs\""), "{text}");
    fixture.node.stop();
    fs::remove_dir_all(&folder).expect("ours");
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn devices_are_created_allowed_and_removed() {
    let device = |path: &str, minor: i64| api::LinuxDevice {
        path: path.into(),
        r#type: "c".into(),
        major: 1,
        minor,
        file_mode: Some(api::OptionalFileMode { value: 0o640 }),
        uid: Some(api::OptionalUInt32 { value: 5 }),
        gid: Some(api::OptionalUInt32 { value: 6 }),
    };
    let (fixture, _plugin) = stage_with(move |name| match name {
        "zero" => in_linux(api::LinuxContainerAdjustment {
            devices: vec![device("/dev/mine", 5)],
            ..Default::default()
        }),
        "kmsg" => in_linux(api::LinuxContainerAdjustment {
            devices: vec![device("/dev/log", 11)],
            ..Default::default()
        }),
        "none" => {
            let gone = api::LinuxDevice { path: "-/dev/asked".into(), ..Default::default() };
            in_linux(api::LinuxContainerAdjustment { devices: vec![gone], ..Default::default() })
        }
        _ => in_linux(api::LinuxContainerAdjustment {
            devices: vec![api::LinuxDevice {
                path: "/dev/pipe".into(),
                r#type: "p".into(),
                ..Default::default()
            }],
            ..Default::default()
        }),
    });
    assert_eq!(output(&fixture, "zero", &["stat", "/dev/mine"]), "20640 5 6 0\n");
    // Without the rule the open itself would be refused; the buffer may be another matter, so only the node is looked at.
    assert_eq!(output(&fixture, "kmsg", &["stat", "/dev/log"]), "20640 5 6 0\n");
    let mut config = fixture.config("none", &["ls", "/dev"]);
    config.devices = vec![coracle_tests::cri::proto::Device {
        container_path: "/dev/asked".into(),
        host_path: "/dev/zero".into(),
        permissions: "rw".into(),
    }];
    let id = fixture.run(&config);
    fixture.node.exited(&id);
    assert!(!fixture.node.output(&id).contains("asked"));
    let text = error(&fixture, "pipe");
    assert!(text.contains("type \"p\""), "{text}");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16, NRI-C20.
#[test]
fn resource_limits_are_written_to_the_cgroup() {
    let number = |value| Some(api::OptionalInt64 { value });
    let (fixture, _plugin) = stage_with(move |name| match name {
        "all" => limited(api::LinuxResources {
            memory: Some(api::LinuxMemory {
                limit: number(64 << 20),
                reservation: number(32 << 20),
                ..Default::default()
            }),
            cpu: Some(api::LinuxCpu {
                shares: Some(api::OptionalUInt64 { value: 512 }),
                quota: number(30_000),
                period: Some(api::OptionalUInt64 { value: 60_000 }),
                cpus: "0".into(),
                ..Default::default()
            }),
            pids: Some(api::LinuxPids { limit: 55 }),
            ..Default::default()
        }),
        "blockio" => limited(api::LinuxResources {
            blockio_class: Some(api::OptionalString { value: "slow".into() }),
            ..Default::default()
        }),
        "rdt" => in_linux(api::LinuxContainerAdjustment {
            rdt: Some(api::LinuxRdt {
                clos_id: Some(api::OptionalString { value: "gold".into() }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        _ => limited(api::LinuxResources {
            memory: Some(api::LinuxMemory { limit: number(1000), ..Default::default() }),
            ..Default::default()
        }),
    });
    let id = fixture.run(&fixture.config("all", &["sleep", "forever"]));
    assert_eq!(knob(&fixture, &id, ["memory.limit_in_bytes", "memory.max"]), (64 << 20).to_string());
    assert_eq!(knob(&fixture, &id, ["memory.soft_limit_in_bytes", "memory.low"]), (32 << 20).to_string());
    assert_eq!(knob(&fixture, &id, ["pids.max", "pids.max"]), "55");
    let quota = knob(&fixture, &id, ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(quota.starts_with("30000"), "{quota}");
    let shown = fixture.node.container(&id).resources.and_then(|one| one.linux).expect("resources");
    assert_eq!((shown.cpu_shares, shown.cpu_period, shown.memory_limit_in_bytes), (512, 60_000, 64 << 20));
    for (name, expected) in [("blockio", "\"slow\""), ("rdt", "\"gold\""), ("tiny", "not enough")] {
        let text = error(&fixture, name);
        assert!(text.contains(expected), "{text}");
    }
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn scheduling_and_io_priority_apply_to_the_process() {
    let (fixture, _plugin) = stage_with(|_| {
        in_linux(api::LinuxContainerAdjustment {
            io_priority: Some(api::LinuxIoPriority {
                class: api::IoPrioClass::IoprioClassBe.into(),
                priority: 6,
            }),
            scheduler: Some(api::LinuxScheduler {
                policy: api::LinuxSchedulerPolicy::SchedBatch.into(),
                nice: 5,
                ..Default::default()
            }),
            memory_policy: Some(api::LinuxMemoryPolicy {
                mode: api::MpolMode::MpolPreferred.into(),
                nodes: "0".into(),
                ..Default::default()
            }),
            ..Default::default()
        })
    });
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let pid = fixture.node.container_pid(&id);
    let run = |program: &str, words: &[&str]| {
        let output =
            Command::new(program).args(words).arg(pid.to_string()).output().expect("util-linux is there");
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(run("ionice", &["-p"]).trim(), "best-effort: prio 6");
    let policy = run("chrt", &["-p"]);
    assert!(policy.contains("SCHED_BATCH"), "{policy}");
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let after_name = stat.rsplit_once(") ").expect("a name").1;
    assert_eq!(after_name.split(' ').nth(16), Some("5"), "nice: {stat}");
    let policy = fs::read_to_string(format!("/proc/{pid}/numa_maps")).unwrap_or_default();
    assert!(policy.is_empty() || policy.contains("prefer"), "{policy}");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn namespaces_and_sysctls_of_a_container_are_adjusted() {
    let node = Node::with_bridge();
    let fixture = PodFixture::on(node, bridge_pod("boat"));
    let handler = adjusting(|name| {
        let namespaces = |list: &[&str]| api::LinuxContainerAdjustment {
            namespaces: list
                .iter()
                .map(|kind| api::LinuxNamespace { r#type: (*kind).into(), path: String::new() })
                .collect(),
            ..Default::default()
        };
        in_linux(match name {
            "host" => namespaces(&["-network", "-uts"]),
            "own" => namespaces(&["ipc"]),
            "user" => namespaces(&["user"]),
            "tuned" => api::LinuxContainerAdjustment {
                sysctl: [("net.ipv4.ip_default_ttl".to_owned(), "77".to_owned())].into(),
                ..Default::default()
            },
            "unsafe" => api::LinuxContainerAdjustment {
                sysctl: [("vm.swappiness".to_owned(), "1".to_owned())].into(),
                ..Default::default()
            },
            _ => api::LinuxContainerAdjustment::default(),
        })
    });
    let _plugin = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let seen = |name: &str| {
        let text = output(&fixture, name, &["see", "namespaces"]);
        let of = |kind: &str| {
            let line =
                text.lines().find(|line| line.starts_with(&format!("namespaces {kind} "))).expect("a line");
            line.rsplit(' ').next().expect("a link").to_owned()
        };
        (of("net"), of("uts"), of("ipc"))
    };
    let ours =
        |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).expect("ours").display().to_string();
    let (usual, host, own) = (seen("usual"), seen("host"), seen("own"));
    assert_eq!((host.0, host.1, &host.2), (ours("net"), ours("uts"), &usual.2));
    assert_eq!((&own.0, own.2 != usual.2 && own.2 != ours("ipc")), (&usual.0, true));
    assert_eq!(output(&fixture, "tuned", &["cat", "/proc/sys/net/ipv4/ip_default_ttl"]), "77\n");
    for (name, expected) in [("user", "\"user\""), ("unsafe", "whole node")] {
        let text = error(&fixture, name);
        assert!(text.contains(expected), "{text}");
    }
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn a_seccomp_policy_replaces_the_profile() {
    let (fixture, _plugin) = stage_with(|_| {
        in_linux(api::LinuxContainerAdjustment {
            seccomp_policy: Some(api::LinuxSeccomp {
                default_action: "SCMP_ACT_ALLOW".into(),
                syscalls: vec![api::LinuxSyscall {
                    names: vec!["mkdir".into(), "mkdirat".into(), "sethostname".into()],
                    action: "SCMP_ACT_ERRNO".into(),
                    errno_ret: Some(api::OptionalUInt32 { value: 77 }),
                    args: Vec::new(),
                }],
                ..Default::default()
            }),
            ..Default::default()
        })
    });
    let seen = output(&fixture, "c1", &["see", "ids"]);
    assert!(seen.contains("ids Seccomp 2\n"), "{seen}");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn cdi_devices_are_injected_by_name() {
    let specs = std::env::temp_dir().join(format!("coracle-nri-cdi-{}-{}", std::process::id(), fresh()));
    fs::create_dir_all(&specs).expect("a folder");
    let text = r#"{"cdiVersion": "0.6.0", "kind": "vendor.test/radio", "devices": [{"name": "one", "containerEdits":
        {"env": ["RADIO=one"], "deviceNodes": [{"path": "/dev/radio", "hostPath": "/dev/zero"}]}}]}"#;
    fs::write(specs.join("radio.json"), text).expect("a file");
    let settings = format!("[cdi]\nspec_dirs = [\"{}\"]", specs.display());
    let fixture = PodFixture::on(node(&settings), host_pod("fixture"));
    let handler = adjusting(|name| {
        let name = if name == "absent" { "vendor.test/radio=none" } else { "vendor.test/radio=one" };
        api::ContainerAdjustment {
            cdi_devices: vec![api::CdiDevice { name: name.into() }],
            env: vec![variable("BESIDE", "it")],
            ..Default::default()
        }
    });
    let _plugin = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let seen = output(&fixture, "c1", &["see", "env"]);
    assert!(seen.contains("RADIO=one") && seen.contains("BESIDE=it"), "{seen}");
    assert!(output(&fixture, "c2", &["ls", "/dev"]).contains("radio"));
    let text = error(&fixture, "absent");
    assert!(text.contains("vendor.test/radio=none"), "{text}");
    fixture.node.stop();
    fs::remove_dir_all(&specs).expect("ours");
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn a_network_interface_is_moved_into_the_pod() {
    let node = Node::with_bridge();
    let link = format!("cn{}x{}", std::process::id() % 100_000, fresh());
    let ip = |words: &str| {
        let done = Command::new("ip").args(words.split(' ')).status().expect("iproute2 is there");
        assert!(done.success(), "ip {words}");
    };
    ip(&format!("link add {link} type veth peer name {link}p"));
    ip(&format!("addr add 192.0.2.77/24 dev {link}"));
    let fixture = PodFixture::on(node, bridge_pod("boat"));
    let given = link.clone();
    let handler = adjusting(move |name| {
        let host = if name == "absent" { "nothere0".to_owned() } else { given.clone() };
        let device = api::LinuxNetDevice { name: "radio0".into() };
        in_linux(api::LinuxContainerAdjustment { net_devices: [(host, device)].into(), ..Default::default() })
    });
    let _plugin = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let text = error(&fixture, "absent");
    assert!(text.contains("network interface nothere0: "), "{text}");
    let seen = output(&fixture, "c1", &["cat", "/proc/net/fib_trie"]);
    assert!(seen.contains("192.0.2.77"), "its address came with it: {seen}");
    assert!(!fs::exists(format!("/sys/class/net/{link}")).expect("sysfs"), "it left the node");
    fixture.node.stop();
}
