//! Ten broken nodes, as an operator meets them. The first five lines of `coracle why` or `coracle check` name the cause, with
//! the object that it is about, and the cure.
//!
//! | node | how it is broken | commands |
//! |---|---|---|
//! | without a network | no file in the CNI directory | check, why POD |
//! | wrong authority | a registry with a certificate of an authority that this node does not know | why IMAGE, why POD |
//! | full disk | a tmpfs as root directory, filled | check, why POD |
//! | read-only disk | the same, mounted again read-only | check, why POD |
//! | missing controller | the daemon runs where the memory controller of the node is not mounted | check |
//! | bad seccomp profile | a profile of the node with an action that does not exist | why POD, why CONTAINER |
//! | OOM loop | a container that the kernel kills three times | why POD, why CONTAINER |
//! | hanging hook | an OCI hook and a CNI plugin that do not end | why POD, why CONTAINER |
//! | damaged record | one byte of a pod's record is changed while the daemon is dead | why POD, daemon alive and dead |
//! | wrong clock | a registry with a certificate that is not valid yet; the guest's clock in 1970 is `tests/inside/clock.rs` | why IMAGE |
//!
//! The symptoms and cures are also in one row of docs/troubleshooting.md each.

use std::fs;
use std::process::{Command, Output};

use coracle_tests::cri::proto::{
    LinuxContainerResources, PodSandboxConfig, SecurityProfile, StartContainerRequest,
    security_profile::ProfileType,
};
use coracle_tests::host::{cgroup_roots, wait_until, write_program};
use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::{Node, binaries};
use coracle_tests::nri::{Answer, EVENTS, Handler, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::registry::Registry;
use coracle_tests::request::{bridge_pod, container, create, host_pod, pull, run, security};
use coracle_tests::small_disk::SmallDisk;

use crate::disk;

/// Texts in the first lines of a command and in one row of docs/troubleshooting.md.
struct Broken {
    symptom: &'static str,
    cure: &'static str,
}

const NO_NETWORK: Broken =
    Broken { symptom: "no CNI configuration file", cure: "network.default = \"builtin\"" };
const WRONG_AUTHORITY: Broken =
    Broken { symptom: "signed by an authority that this node does not trust", cure: "ca_file" };
const FULL_DISK: Broken = Broken { symptom: "no space left on device", cure: "make room" };
const READ_ONLY_DISK: Broken = Broken { symptom: "read-only file system", cure: "mount it writable" };
const NO_CONTROLLER: Broken =
    Broken { symptom: "cgroup controller memory", cure: "boot with cgroup_enable=memory" };
const BAD_PROFILE: Broken = Broken { symptom: "seccomp", cure: "put a valid seccomp profile" };
const OOM_LOOP: Broken = Broken { symptom: "OOMKilled", cure: "raise resources.limits.memory" };
const HANGING_HOOK: Broken = Broken { symptom: "hook", cure: "look at the hook's program" };
const HANGING_PLUGIN: Broken = Broken { symptom: "it waits for CNI plugin", cure: "look at the plugin" };
const DAMAGED_RECORD: Broken =
    Broken { symptom: "damaged record moved to quarantine", cure: "check the disk" };
const WRONG_CLOCK: Broken = Broken { symptom: "not valid yet", cure: "set the clock" };

const ALL: [&Broken; 11] = [
    &NO_NETWORK,
    &WRONG_AUTHORITY,
    &FULL_DISK,
    &READ_ONLY_DISK,
    &NO_CONTROLLER,
    &BAD_PROFILE,
    &OOM_LOOP,
    &HANGING_HOOK,
    &HANGING_PLUGIN,
    &DAMAGED_RECORD,
    &WRONG_CLOCK,
];

/// Everything that a command printed.
fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Fails unless the first five lines have the symptom, the cure, and the objects that are broken. Case does not matter.
#[track_caller]
fn names(output: &Output, broken: &Broken, objects: &[&str]) {
    let text = text(output);
    let head = text.lines().take(5).collect::<Vec<_>>().join("\n").to_lowercase();
    for part in [broken.symptom, broken.cure].iter().chain(objects) {
        assert!(head.contains(&part.to_lowercase()), "{part:?} is not in the first five lines of:\n{text}");
    }
}

/// `namespace/name` of a pod.
fn name_of(pod: &PodSandboxConfig) -> String {
    let metadata = pod.metadata.as_ref().expect("a name");
    format!("{}/{}", metadata.namespace, metadata.name)
}

#[test]
fn the_page_has_each_symptom_with_its_cure() {
    let page = include_str!("../../docs/troubleshooting.md").to_lowercase();
    for Broken { symptom, cure } in ALL {
        let has = |row: &str| [symptom, cure].iter().all(|part| row.contains(&part.to_lowercase()));
        let rows = page.lines().filter(|line| line.starts_with("| "));
        assert!(rows.filter(|row| has(row)).count() > 0, "docs/troubleshooting.md: {symptom:?}, {cure:?}");
    }
}

#[test]
fn a_node_without_a_network_names_it() {
    let node = Node::start();
    let directory = node.cni().display().to_string();
    let check = node.tool(&["check"]);
    names(&check, &NO_NETWORK, &["degraded  CNI network", &directory]);
    let pod = bridge_pod("lonely");
    node.run_pod_sandbox(run(&pod)).expect_err("there is no network");
    let why = node.tool(&["why", &name_of(&pod)]);
    names(&why, &NO_NETWORK, &[&directory, "install the cluster's network"]);
    assert!(why.status.success(), "{}", text(&why));
    node.stop();
}

#[test]
fn a_wrong_certificate_authority_is_named() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "ca"), "x", "1");
    let nginx = Nginx::start(node.folder(), "wrong-ca", registry.address(), Wants::default());
    // Not a name of this machine, whose registries may have any certificate.
    let name = "registry.test/x:1".to_owned();
    fs::write(
        node.folder().join("registries.yaml"),
        format!("mirrors: {{registry.test: {{endpoint: [\"https://{}\"]}}}}\n", nginx.address()),
    )
    .expect("registries.yaml");
    let mut request = pull(&name);
    let pod = host_pod("puller");
    request.sandbox_config = Some(pod.clone());
    node.pull_image(request).expect_err("of an unknown authority");
    for wanted in [name.as_str(), &name_of(&pod)] {
        let why = node.tool(&["why", wanted]);
        names(&why, &WRONG_AUTHORITY, &[&name, &nginx.address().to_string(), "registries.yaml"]);
    }
    node.stop();
}

#[test]
fn a_certificate_of_the_future_is_named() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "clock"), "x", "1");
    let nginx = Nginx::of_the_future(node.folder(), "future", registry.address());
    let name = format!("{}/x:1", nginx.address());
    let (address, ca) = (nginx.address(), nginx.file("ca.pem"));
    fs::write(
        node.folder().join("registries.yaml"),
        format!(
            "mirrors: {{\"{address}\": {{endpoint: [\"https://{address}\"]}}}}\n\
             configs: {{\"{address}\": {{tls: {{ca_file: {}}}}}}}\n",
            ca.display()
        ),
    )
    .expect("registries.yaml");
    node.pull_image(pull(&name)).expect_err("not valid before 2040");
    names(&node.tool(&["why", &name]), &WRONG_CLOCK, &[&name]);
    node.stop();
}

#[test]
fn a_full_disk_is_named() {
    let disk = SmallDisk::new(24);
    let node = disk::on(&disk);
    disk.fill();
    let pod = host_pod("late");
    node.run_pod_sandbox(run(&pod)).expect_err("no room for its record");
    let root = node.root().display().to_string();
    names(&node.tool(&["why", &name_of(&pod)]), &FULL_DISK, &[&root, "coracle image prune"]);
    let check = text(&node.tool(&["check"]));
    let line = check.lines().take(5).find(|line| line.contains("space in root")).expect("it is first");
    for part in ["0 of 24 MiB", &disk.path().display().to_string(), FULL_DISK.cure] {
        assert!(line.contains(part), "{part}: {line}");
    }
    fs::remove_file(disk.path().join("filler")).expect("our file");
    node.stop();
}

#[test]
fn a_read_only_disk_is_named() {
    let disk = SmallDisk::new(24);
    let node = disk::on(&disk);
    disk.read_only(true);
    let pod = host_pod("frozen");
    node.run_pod_sandbox(run(&pod)).expect_err("nothing can be recorded");
    let root = node.root().display().to_string();
    names(&node.tool(&["why", &name_of(&pod)]), &READ_ONLY_DISK, &[&root, "dmesg"]);
    let check = node.tool(&["check"]);
    let shown = text(&check);
    let line = shown.lines().next().expect("a line");
    for part in ["missing   file system of root", "read-only", &disk.path().display().to_string(), "dmesg"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(!check.status.success());
    disk.read_only(false);
    node.stop();
}

/// A node without the memory controller, as a Raspberry Pi boots: the mount namespace of the daemon lacks it.
#[test]
fn a_missing_cgroup_controller_is_named() {
    let roots = cgroup_roots();
    let hide = match roots.iter().find(|root| root.ends_with("memory")) {
        Some(mount) => format!("umount {}", mount.display()),
        None => "echo cpu io pids > $T/controllers && mount --bind $T/controllers /sys/fs/cgroup/cgroup.controllers".into(),
    };
    let mut node = Node::start();
    node.terminate();
    let script = format!("T={}; {hide} && exec \"$@\"", node.folder().display());
    let unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", &script, "sh"];
    node.wrap(unshare.map(str::to_owned).to_vec());
    node.launch();
    let program = binaries().join("coracle");
    let check = Command::new("nsenter")
        .arg(format!("--mount=/proc/{}/ns/mnt", node.pid()))
        .args([program.as_os_str(), "check".as_ref()])
        .args(node.flags())
        .output()
        .expect("nsenter of util-linux");
    names(&check, &NO_CONTROLLER, &["memory limits do not hold", "CONFIG_MEMCG"]);
    // Pods run, as the line says: the limit is not refused.
    let fixture = PodFixture::on(node, host_pod("unlimited"));
    let mut config = fixture.config("limited", &["true"]);
    let limit = LinuxContainerResources { memory_limit_in_bytes: 32 << 20, ..Default::default() };
    config.linux.as_mut().expect("set").resources = Some(limit);
    let id = fixture.run(&config);
    assert_eq!(fixture.node.exited(&id).exit_code, 0);
    fixture.node.stop();
}

#[test]
fn an_invalid_seccomp_profile_is_named() {
    let fixture = PodFixture::start();
    let broken = fixture.node.folder().join("broken.json");
    fs::write(&broken, r#"{"defaultAction": "SCMP_ACT_DANCE"}"#).expect("a profile");
    let mut config = fixture.config("strict", &["true"]);
    let path = broken.display().to_string();
    security(&mut config).seccomp =
        Some(SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: path.clone() });
    fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("a bad profile");
    for wanted in [name_of(&fixture.pod), format!("{}/strict", name_of(&fixture.pod)), fixture.pod_id.clone()]
    {
        names(&fixture.node.tool(&["why", &wanted]), &BAD_PROFILE, &["SCMP_ACT_DANCE", &path]);
    }
    fixture.node.stop();
}

#[test]
fn a_container_in_an_oom_loop_is_explained() {
    let fixture = PodFixture::start();
    for attempt in 0..3 {
        let mut config = fixture.config("hungry", &["burn", "256"]);
        config.metadata.as_mut().expect("a name").attempt = attempt;
        let limit = LinuxContainerResources { memory_limit_in_bytes: 32 << 20, ..Default::default() };
        config.linux.as_mut().expect("set").resources = Some(limit);
        let id = fixture.run(&config);
        fixture.node.exited(&id);
    }
    for wanted in ["hungry".to_owned(), name_of(&fixture.pod)] {
        let why = fixture.node.tool(&["why", &wanted]);
        names(&why, &OOM_LOOP, &["hungry used more memory than its limit", "32 MiB", "3 times"]);
    }
    fixture.node.stop();
}

#[test]
fn a_hook_that_hangs_is_named() {
    let fixture = PodFixture::start();
    let hook = api::Hook {
        path: "/bin/sh".into(),
        args: ["sh", "-c", "exec sleep 100"].map(str::to_owned).into(),
        env: vec!["PATH=/usr/bin:/bin".into()],
        timeout: Some(api::OptionalInt { value: 6 }),
    };
    let hooks = api::Hooks { create_runtime: vec![hook], ..Default::default() };
    let adjustment = api::ContainerAdjustment { hooks: Some(hooks), ..Default::default() };
    let handler: Handler = Box::new(move |_, heard| match heard.method.as_str() {
        "CreateContainer" => Answer::adjust(adjustment.clone()),
        _ => Answer::empty(),
    });
    let _plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    let id = fixture.create(&fixture.config("slow", &["true"]));
    let client = fixture.node.another();
    let request = StartContainerRequest { container_id: id.clone() };
    std::thread::scope(|scope| {
        let start = scope.spawn(move || client.start_container(request));
        let why = || text(&fixture.node.tool(&["why", &id]));
        wait_until("the wait is long enough to be named", || why().contains("it waits for"));
        names(&fixture.node.tool(&["why", &id]), &HANGING_HOOK, &["it waits for hook /bin/sh"]);
        start.join().expect("no panic").expect_err("the hook does not end");
    });
    let after = ["hook /bin/sh", "did not end within 6000 ms"];
    names(&fixture.node.tool(&["why", &id]), &HANGING_HOOK, &after);
    fixture.node.stop();
}

#[test]
fn a_network_plugin_that_hangs_is_named() {
    let node = Node::start();
    let plugin = node.plugins().join("sleeper");
    let held = node.folder().join("held");
    fs::write(&held, "").expect("our file");
    let wait = format!("while [ -e {} ]; do sleep 0.1; done", held.display());
    let answer = r#"{"cniVersion":"1.0.0","interfaces":[],"ips":[]}"#;
    write_program(&plugin, &format!("#!/bin/sh\n{wait}\necho '{answer}'\n"));
    let list = r#"{"cniVersion":"1.0.0","name":"slow","plugins":[{"type":"sleeper"}]}"#;
    fs::write(node.cni().join("10-slow.conflist"), list).expect("a network");
    wait_until("the list is in use", || node.log().contains("network=slow"));
    let pod = bridge_pod("stuck");
    let client = node.another();
    std::thread::scope(|scope| {
        let request = run(&pod);
        scope.spawn(move || client.run_pod_sandbox(request));
        let why = || text(&node.tool(&["why", &name_of(&pod)]));
        wait_until("the wait is long enough to be named", || why().contains("it waits for CNI plugin"));
        let why = node.tool(&["why", &name_of(&pod)]);
        names(&why, &HANGING_PLUGIN, &["CNI plugin sleeper"]);
        fs::remove_file(held).expect("our file");
    });
    for listed in node.list_pod_sandbox(Default::default()).expect("list").items {
        node.remove_pod(&listed.id);
    }
    node.stop();
}

#[test]
fn a_damaged_record_is_named() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("victim");
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    node.kill9();
    let record = node.root().join("pods").join(&pod_id).join("record");
    let mut bytes = fs::read(&record).expect("the record");
    bytes[20] ^= 0x10; // in the body of the only slot in use
    fs::write(&record, &bytes).expect("our file");
    node.launch();
    let quarantine = node.root().join("quarantine").join(&pod_id).display().to_string();
    for wanted in [name_of(&pod), pod_id.clone()] {
        names(&node.tool(&["why", &wanted]), &DAMAGED_RECORD, &[&quarantine]);
    }
    // The same with the daemon dead.
    node.kill9();
    names(
        &node.tool(&["why", &name_of(&pod)]),
        &DAMAGED_RECORD,
        &[&quarantine, "the daemon does not answer"],
    );
    node.launch();
    node.stop();
}
