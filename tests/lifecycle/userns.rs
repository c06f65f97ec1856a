//! Pods with a user namespace (KEP-127): the IDs of a container on the node, the owners of its files, and the
//! privileges of its root.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{
    Capability, ContainerConfig, IdMapping, Int64Value, Mount, NamespaceMode, PodSandboxConfig,
    PodSandboxStatusRequest, StartContainerRequest, UserNamespace,
};
use coracle_tests::host::{cgroup_file, cgroup_roots, cgroups_below, make_kubelet_cgroups, wait_until};
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{self, bridge_pod, create, exec, host_pod, run, security};
use tonic::Code;

const HOST_ID: u32 = 200_000;

fn mapping() -> IdMapping {
    request::id_mapping(HOST_ID)
}

fn mapped(pod: PodSandboxConfig) -> PodSandboxConfig {
    request::mapped(pod, HOST_ID)
}

/// Mounts a directory of the node at /data.
fn volume(fixture: &PodFixture, name: &str, config: &mut ContainerConfig, is_mapped: bool) -> PathBuf {
    let path = fixture.node.folder().join(name);
    fs::create_dir_all(&path).expect("a directory");
    let mappings = if is_mapped { vec![mapping()] } else { Vec::new() };
    config.mounts.push(Mount {
        container_path: "/data".into(),
        host_path: path.display().to_string(),
        uid_mappings: mappings.clone(),
        gid_mappings: mappings,
        ..Default::default()
    });
    path
}

/// Output of the probe in the container.
#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 10)).expect("exec");
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    assert_eq!(answer.exit_code, 0, "{words:?}: {text}{}", String::from_utf8_lossy(&answer.stderr));
    text
}

/// Owner of a path in the container.
#[track_caller]
fn owner(fixture: &PodFixture, container: &str, path: &str) -> String {
    let text = says(fixture, container, &["stat", path]);
    text.split(' ').skip(1).take(2).collect::<Vec<_>>().join(":")
}

#[test]
fn root_inside_is_nobody_outside() {
    let fixture = PodFixture::on(Node::with_bridge(), mapped(bridge_pod("mapped")));
    let id = fixture.run(&fixture.config("one", &["sleep", "forever"]));
    let map = format!("0 {HOST_ID} 65536");
    let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(says(&fixture, &id, &["cat", "/proc/self/uid_map"])), map);
    assert_eq!(words(says(&fixture, &id, &["cat", "/proc/self/gid_map"])), map);
    assert!(says(&fixture, &id, &["see", "ids"]).contains("ids Uid 0 0 0 0"));
    let pid = fixture.node.container_pid(&id);
    let about = fs::metadata(format!("/proc/{pid}")).expect("it lives");
    assert_eq!((about.uid(), about.gid()), (HOST_ID, HOST_ID));
    // The monitor is in the node's user namespace, the pod's namespaces belong to that of its containers.
    let monitor = fixture.node.monitors().pop().expect("one").pid;
    let user = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/user")).expect("a namespace");
    assert_eq!(user(monitor), user(std::process::id() as i32));
    assert_ne!(user(pid), user(monitor));
    let status = PodSandboxStatusRequest { pod_sandbox_id: fixture.pod_id.clone(), ..Default::default() };
    let status = fixture.node.pod_sandbox_status(status).expect("status").status.expect("a status");
    let options = status.linux.and_then(|linux| linux.namespaces).and_then(|namespaces| namespaces.options);
    assert_eq!(options.expect("options").userns_options, Some(request::user_namespace(HOST_ID)));
    fixture.node.stop();
}

#[test]
fn files_belong_to_the_containers_root() {
    let fixture = PodFixture::with(mapped(host_pod("mapped")));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    let host = volume(&fixture, "volume", &mut config, true);
    let id = fixture.run(&config);
    for path in [
        "/",
        "/probe",
        "/data",
        "/dev",
        "/dev/null",
        "/dev/shm",
        "/dev/fd",
        "/etc/hosts",
        "/etc/hostname",
        "/etc/resolv.conf",
    ] {
        assert_eq!(owner(&fixture, &id, path), "0:0", "{path}");
    }
    says(&fixture, &id, &["write", "/made", "text"]);
    assert_eq!(owner(&fixture, &id, "/made"), "0:0");
    says(&fixture, &id, &["write", "/data/made", "text"]);
    assert_eq!(owner(&fixture, &id, "/data/made"), "0:0");
    let about = fs::metadata(host.join("made")).expect("it is there");
    assert_eq!((about.uid(), about.gid()), (0, 0), "an idmapped volume keeps the node's ids");
    // The pod's files are unchanged after a restart of the daemon.
    let PodFixture { mut node, image, pod, pod_id } = fixture;
    node.restart();
    let fixture = PodFixture { node, image, pod, pod_id };
    assert_eq!(owner(&fixture, &id, "/data/made"), "0:0");
    let id = fixture.run(&fixture.config("two", &["sleep", "forever"]));
    assert_eq!(owner(&fixture, &id, "/etc/hosts"), "0:0");
    fixture.node.stop();
}

#[test]
fn a_volume_without_mappings_has_unmapped_owners() {
    let fixture = PodFixture::with(mapped(host_pod("mapped")));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    let host = volume(&fixture, "volume", &mut config, false);
    let id = fixture.run(&config);
    assert_eq!(owner(&fixture, &id, "/data"), "65534:65534");
    let refused = fixture.node.exec_sync(exec(&id, &["write", "/data/made", "text"], 10)).expect("exec");
    assert_ne!(refused.exit_code, 0);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ermission denied"));
    chown(&host, Some(HOST_ID + 7), None).expect("it is ours");
    assert_eq!(owner(&fixture, &id, "/data"), "7:65534");
    fixture.node.stop();
}

/// Settings of its own namespaces can be changed, those of the node cannot.
#[test]
fn root_in_a_user_namespace_has_privileges_in_its_own_namespaces_only() {
    let mut pod = mapped(bridge_pod("mapped"));
    let linux = pod.linux.as_mut().expect("set");
    linux.sysctls =
        [("kernel.shm_rmid_forced".into(), "1".into()), ("net.ipv4.ip_forward".into(), "1".into())].into();
    let fixture = PodFixture::on(Node::with_bridge(), pod);
    let mut config = fixture.config("one", &["sleep", "forever"]);
    // Nothing is masked or read-only, so only the user namespace denies access.
    security(&mut config).masked_paths.clear();
    security(&mut config).readonly_paths.clear();
    let add_capabilities = vec!["NET_ADMIN".into()];
    security(&mut config).capabilities = Some(Capability { add_capabilities, ..Default::default() });
    let id = fixture.run(&config);
    assert_eq!(says(&fixture, &id, &["cat", "/proc/sys/kernel/shm_rmid_forced"]), "1\n");
    says(&fixture, &id, &["write", "/proc/sys/net/ipv4/ip_forward", "0"]);
    assert_eq!(says(&fixture, &id, &["cat", "/proc/sys/net/ipv4/ip_forward"]), "0\n");
    for (path, text) in [("/proc/sys/kernel/panic", "0"), ("/proc/sysrq-trigger", "h")] {
        let refused = fixture.node.exec_sync(exec(&id, &["write", path, text], 10)).expect("exec");
        assert_ne!(refused.exit_code, 0, "{path}");
    }
    fixture.node.stop();
}

#[test]
fn a_mapped_user_writes_to_the_streams_of_its_container() {
    let fixture = PodFixture::with(mapped(host_pod("mapped")));
    let mut config = fixture.config("one", &["write", "/dev/stdout", "by name\n"]);
    security(&mut config).run_as_user = Some(Int64Value { value: 1000 });
    security(&mut config).supplemental_groups = vec![77];
    let id = fixture.run(&config);
    assert_eq!(fixture.node.exited(&id).exit_code, 0, "{}", fixture.node.output(&id));
    assert_eq!(fixture.node.output(&id), "by name\n");
    let mut config = fixture.config("two", &["sleep", "forever"]);
    security(&mut config).run_as_user = Some(Int64Value { value: 1000 });
    let id = fixture.run(&config);
    let about = fs::metadata(format!("/proc/{}", fixture.node.container_pid(&id))).expect("it lives");
    assert_eq!(about.uid(), HOST_ID + 1000);
    assert_eq!(says(&fixture, &id, &["write", "/dev/stdout", "exec by name\n"]), "exec by name\n");
    fixture.node.stop();
}

#[test]
fn unsupported_mappings_are_refused() {
    let fixture = PodFixture::with(mapped(host_pod("mapped")));
    let mut config = fixture.config("one", &["true"]);
    security(&mut config).run_as_user = Some(Int64Value { value: 70_000 });
    let refused = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
    let refused = refused.expect_err("70000 is not mapped");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("70000 is not mapped"), "{refused}");
    let mut config = fixture.config("two", &["true"]);
    volume(&fixture, "volume", &mut config, true);
    config.mounts[0].uid_mappings[0].host_id += 1;
    let refused = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
    assert!(refused.expect_err("other mappings").message().contains("uidMappings"));
    // A file system without support for idmapped mounts is named when the container starts.
    let mut config = fixture.config("three", &["true"]);
    volume(&fixture, "volume", &mut config, true);
    config.mounts[0].host_path = "/proc/self".into();
    let id = fixture.create(&config);
    let refused =
        fixture.node.start_container(StartContainerRequest { container_id: id }).expect_err("procfs");
    assert!(refused.message().contains("map the owners of files in /proc/self"), "{refused}");
    type Change = fn(&mut UserNamespace);
    let changes: [(&str, Change); 5] = [
        ("one mapping", |options| options.uids.push(mapping())),
        ("does not map 0", |options| options.gids[0].container_id = 1),
        ("no range", |options| options.uids[0].length = 0),
        ("neither POD nor NODE", |options| options.mode = NamespaceMode::Target.into()),
        ("although the mode is NODE", |options| options.mode = NamespaceMode::Node.into()),
    ];
    for (expected, change) in changes {
        let mut pod = mapped(host_pod("refused"));
        let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
        let options = context.namespace_options.as_mut().expect("set");
        change(options.userns_options.as_mut().expect("set"));
        let refused = fixture.node.run_pod_sandbox(run(&pod)).expect_err(expected);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(expected), "expected {expected:?} in {refused}");
    }
    fixture.node.stop();
}

/// Enables the controllers of the tests below a node's cgroup parent, as a kubelet does; v1 has no such file.
fn enable_controllers(node: &Node) {
    for root in cgroup_roots() {
        for parent in [root.clone(), root.join(node.cgroup_parent())] {
            let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory +pids");
        }
    }
}

/// Moves a node's daemon into a memory cgroup of its own, below the node's cgroup parent, which the node removes.
fn isolate_daemon(node: &Node) -> PathBuf {
    let roots = cgroup_roots();
    let v1 = roots.iter().find(|root| root.join("memory.limit_in_bytes").exists());
    let root = v1.or(roots.first()).expect("a cgroup hierarchy");
    let parent = root.join(node.cgroup_parent());
    let directory = parent.join("daemon");
    fs::create_dir_all(&directory).expect("a cgroup");
    enable_controllers(node);
    fs::write(directory.join("cgroup.procs"), node.pid().to_string()).expect("the daemon enters it");
    directory
}

/// Kernel memory that is charged to the cgroup of this directory, in KiB.
fn kernel_kib(directory: &Path) -> i64 {
    let v1 = fs::read_to_string(directory.join("memory.kmem.usage_in_bytes"));
    let bytes = v1.ok().and_then(|text| text.trim().parse::<i64>().ok()).or_else(|| {
        let stat = fs::read_to_string(directory.join("memory.stat")).ok()?;
        stat.lines().find_map(|line| line.strip_prefix("kernel "))?.parse().ok()
    });
    bytes.expect("a counter of kernel memory (Linux 5.18 with cgroup v2)") >> 10
}

/// The memory cgroup of a process.
fn memory_cgroup(pid: i32) -> PathBuf {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("the process lives");
    let paths = text.lines().filter(|line| line.contains(":memory:") || line.starts_with("0::"));
    let files = ["memory.kmem.usage_in_bytes", "memory.stat"];
    paths
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .find_map(|path| files.iter().find_map(|file| cgroup_file(path, file)))
        .and_then(|file| file.parent().map(Path::to_owned))
        .expect("a memory cgroup")
}

/// Runs 20 pods; returns the kernel memory for each in KiB that is charged to the daemon and to the pod itself.
fn charged_for(node: &Node, daemon: &Path, make: impl Fn(&str) -> PodSandboxConfig) -> (i64, i64) {
    const PODS: i64 = 20;
    let before = kernel_kib(daemon);
    let ids: Vec<String> = (0..PODS).map(|index| node.run_pod(&make(&format!("charged{index}")))).collect();
    let of_daemon = kernel_kib(daemon) - before;
    let monitors = node.monitors();
    assert_eq!(monitors.len() as i64, PODS);
    let of_pods: i64 = monitors.iter().map(|monitor| kernel_kib(&memory_cgroup(monitor.pid))).sum();
    ids.iter().for_each(|id| node.remove_pod(id));
    (of_daemon / PODS, of_pods / PODS)
}

/// The kernel charges a namespace to the memory cgroup of the process that creates it. The daemon's cgroup has a limit
/// for 110 pods (docs/install-kubelet.md).
#[test]
fn the_memory_of_namespaces_is_charged_to_the_pod() {
    /// The namespaces of a pod take some 80 KiB; measurements differ by less than this.
    const SAME_KIB: i64 = 30;
    let node = Node::with_bridge();
    let daemon = isolate_daemon(&node);
    // The first pods fill the kernel's caches.
    charged_for(&node, &daemon, bridge_pod);
    let (plain_daemon, plain_pod) = charged_for(&node, &daemon, bridge_pod);
    let (mapped_daemon, mapped_pod) = charged_for(&node, &daemon, |name| mapped(bridge_pod(name)));
    let text = format!(
        "KiB for a pod: daemon {plain_daemon}, pod {plain_pod}; with a user namespace: daemon {mapped_daemon}, pod {mapped_pod}"
    );
    assert!(mapped_daemon < plain_daemon + SAME_KIB && mapped_pod > plain_pod - SAME_KIB, "{text}");
    node.stop();
}

/// A limit of a cgroup that refuses a user namespace.
struct Refusing {
    name: &'static str,
    /// File names on v1 and on v2.
    files: [&'static str; 2],
    value: &'static str,
    /// The value that removes the limit.
    none: &'static str,
    /// Parts of the error's text.
    expected: &'static [&'static str],
}

/// Sets a limit of the cgroup `parent`: the file of v1, or of v2.
fn set_limit(parent: &str, files: [&str; 2], value: &str) {
    let file = files.iter().find_map(|file| cgroup_file(parent, file)).expect("a file of the limit");
    fs::write(&file, value).unwrap_or_else(|error| panic!("{value} to {}: {error}", file.display()));
}

#[test]
fn a_cgroup_that_refuses_the_user_namespace_leaves_nothing_of_the_pod() {
    let node = Node::with_bridge();
    make_kubelet_cgroups(&node.cgroup_parent());
    enable_controllers(&node);
    // The monitor is the only process that the first cgroup admits: its helper would be the second.
    let limits = [
        Refusing {
            name: "pids",
            files: ["pids.max", "pids.max"],
            value: "1",
            none: "max",
            expected: &["user namespace", "pids.max"],
        },
        Refusing {
            name: "memory",
            files: ["memory.limit_in_bytes", "memory.max"],
            value: "65536",
            none: "1000000000",
            expected: &["killed", "memory limit of the pod's cgroup"],
        },
    ];
    for Refusing { name, files, value, none, expected } in limits {
        let parent = format!("{}/{name}", node.cgroup_parent());
        make_kubelet_cgroups(&parent);
        set_limit(&parent, files, value);
        let mut pod = mapped(bridge_pod("refused"));
        pod.linux.as_mut().expect("set").cgroup_parent = format!("/{parent}");
        let refused = node.run_pod_sandbox(run(&pod)).expect_err(value);
        for text in expected {
            assert!(refused.message().contains(text), "expected {text:?} in {refused}");
        }
        assert!(node.list_pod_sandbox(Default::default()).expect("a list").items.is_empty());
        wait_until("no cgroup and so no process is left", || cgroups_below(&parent).is_empty());
        // The kernel removes the pod's link later, with the network namespace.
        wait_until("nothing of the pod is left", || node.rests().is_empty());
        set_limit(&parent, files, none);
        let id = node.run_pod_sandbox(run(&pod)).expect("the same request").pod_sandbox_id;
        node.remove_pod(&id);
    }
    node.stop();
}
