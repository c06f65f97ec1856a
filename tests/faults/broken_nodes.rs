//! Ten broken nodes, as an operator meets them: `coracle why` or `coracle check` names the cause and the cure in its first five lines.

use std::fs;
use std::process::{Command, Output};

use coracle_tests::cri::proto::{
    LinuxContainerResources, PodSandboxConfig, SecurityProfile, StartContainerRequest,
    security_profile::ProfileType,
};
use coracle_tests::host::{cgroup_roots, wait_until};
use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::{Node, binaries};
use coracle_tests::nri::{Answer, EVENTS, Handler, Plugin, api};
use coracle_tests::registry::Registry;
use coracle_tests::request::{bridge_pod, container, create, host_pod, pull, run, security};
use coracle_tests::stage::Stage;

use crate::disk::{self, SmallDisk};

/// Everything that a command printed.
fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Fails unless the first five lines have all of these parts, in lower or upper case.
#[track_caller]
fn names(output: &Output, cause: &[&str], cure: &str) {
    let text = text(output);
    let head = text.lines().take(5).collect::<Vec<_>>().join("\n").to_lowercase();
    for part in cause.iter().chain([&cure]) {
        assert!(head.contains(&part.to_lowercase()), "{part:?} is not in the first five lines of:\n{text}");
    }
}

/// `namespace/name` of a pod.
fn name_of(pod: &PodSandboxConfig) -> String {
    let metadata = pod.metadata.as_ref().expect("a name");
    format!("{}/{}", metadata.namespace, metadata.name)
}

#[test]
fn without_a_network() {
    let node = Node::start();
    names(
        &node.tool(&["check"]),
        &["degraded  CNI network", "no CNI configuration file"],
        "CNI configuration in",
    );
    let pod = bridge_pod("lonely");
    node.run_pod_sandbox(run(&pod)).expect_err("there is no network");
    let why = node.tool(&["why", &name_of(&pod)]);
    names(
        &why,
        &["no CNI configuration file", &node.cni().display().to_string()],
        "install the cluster's network",
    );
    assert!(why.status.success(), "{}", text(&why));
    node.stop();
}

#[test]
fn with_a_wrong_authority() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "ca"), "x", "1");
    let nginx = Nginx::start(node.folder(), "wrong-ca", registry.address(), Wants::default());
    let name = format!("{}/x:1", nginx.address());
    fs::write(
        node.folder().join("registries.yaml"),
        format!("mirrors: {{\"{0}\": {{endpoint: [\"https://{0}\"]}}}}\n", nginx.address()),
    )
    .expect("registries.yaml");
    let mut request = pull(&name);
    let pod = host_pod("puller");
    request.sandbox_config = Some(pod.clone());
    node.pull_image(request).expect_err("of an unknown authority");
    for wanted in [name.as_str(), &name_of(&pod)] {
        names(
            &node.tool(&["why", wanted]),
            &[&name, "signed by an authority that this node does not trust"],
            "ca_file",
        );
    }
    node.stop();
}

#[test]
fn with_a_clock_in_1970() {
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
    names(&node.tool(&["why", &name]), &["not valid yet"], "set the clock");
    node.stop();
}

#[test]
fn with_a_full_disk() {
    let disk = SmallDisk::new(24);
    let node = disk::on(&disk);
    disk.fill();
    let pod = host_pod("late");
    node.run_pod_sandbox(run(&pod)).expect_err("no room for its record");
    names(&node.tool(&["why", &name_of(&pod)]), &["no space left on device"], "make room");
    names(&node.tool(&["check"]), &["space in root", "0 of 24 MiB"], "make room");
    fs::remove_file(disk.path().join("filler")).expect("our file");
    node.stop();
}

#[test]
fn with_a_read_only_disk() {
    let disk = SmallDisk::new(24);
    let node = disk::on(&disk);
    disk.read_only(true);
    let pod = host_pod("frozen");
    node.run_pod_sandbox(run(&pod)).expect_err("nothing can be recorded");
    names(&node.tool(&["why", &name_of(&pod)]), &["read-only file system"], "mount it writable");
    let check = node.tool(&["check"]);
    names(&check, &["missing   file system of root", "read-only"], "writable ext4");
    assert!(!check.status.success());
    disk.read_only(false);
    node.stop();
}

/// The mount namespace of the command alone lacks the controller.
#[test]
fn without_a_controller() {
    let roots = cgroup_roots();
    let own = roots.iter().find(|root| root.ends_with("pids"));
    let hide = match own {
        Some(mount) => format!("umount {}", mount.display()),
        None => "echo cpu io memory > $T/controllers && mount --bind $T/controllers /sys/fs/cgroup/cgroup.controllers".into(),
    };
    let node = Node::start();
    let script = format!("{hide} && exec {}/coracle check \"$@\"", binaries().display());
    let check = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"])
        .args(node.flags())
        .env("T", node.folder())
        .output()
        .expect("unshare of util-linux");
    names(&check, &["cgroup controller pids"], "CONFIG_CGROUP_PIDS");
    node.stop();
}

#[test]
fn with_a_bad_seccomp_profile() {
    let stage = Stage::set();
    let broken = stage.node.folder().join("broken.json");
    fs::write(&broken, r#"{"defaultAction": "SCMP_ACT_DANCE"}"#).expect("a profile");
    let mut config = stage.config("strict", &["true"]);
    let path = broken.display().to_string();
    security(&mut config).seccomp =
        Some(SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: path.clone() });
    stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)).expect_err("a bad profile");
    for wanted in [name_of(&stage.pod), format!("{}/strict", name_of(&stage.pod)), stage.pod_id.clone()] {
        let why = stage.node.tool(&["why", &wanted]);
        names(&why, &["SCMP_ACT_DANCE", &path], "put a valid seccomp profile");
    }
    stage.node.stop();
}

#[test]
fn with_a_container_in_an_oom_loop() {
    let stage = Stage::set();
    for attempt in 0..3 {
        let mut config = stage.config("hungry", &["burn", "256"]);
        config.metadata.as_mut().expect("a name").attempt = attempt;
        let limit = LinuxContainerResources { memory_limit_in_bytes: 32 << 20, ..Default::default() };
        config.linux.as_mut().expect("set").resources = Some(limit);
        let id = stage.run(&config);
        stage.node.exited(&id);
    }
    for wanted in ["hungry".to_owned(), name_of(&stage.pod)] {
        let why = stage.node.tool(&["why", &wanted]);
        names(
            &why,
            &["hungry used more memory than its limit", "OOMKilled", "3 times"],
            "raise resources.limits.memory",
        );
    }
    stage.node.stop();
}

#[test]
fn with_a_hook_that_hangs() {
    let stage = Stage::set();
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
    let _plugin = Plugin::join(&stage.node, "10", "hooks", EVENTS, handler);
    let id = stage.create(&stage.config("slow", &["true"]));
    let client = stage.node.another();
    let request = StartContainerRequest { container_id: id.clone() };
    std::thread::scope(|scope| {
        let start = scope.spawn(move || client.start_container(request));
        let why = || text(&stage.node.tool(&["why", &id]));
        wait_until("the wait is long enough to be named", || why().contains("it waits for"));
        names(
            &stage.node.tool(&["why", &id]),
            &["it waits for", "hook /bin/sh"],
            "look at the hook's program",
        );
        start.join().expect("no panic").expect_err("the hook does not end");
    });
    names(
        &stage.node.tool(&["why", &id]),
        &["hook /bin/sh", "did not end within 6000 ms"],
        "look at the hook's program",
    );
    stage.node.stop();
}

#[test]
fn with_a_damaged_record() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("victim");
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    node.kill9();
    let record = node.root().join("pods").join(&pod_id).join("record");
    let bytes = fs::read(&record).expect("the record");
    fs::write(&record, &bytes[..bytes.len() / 2]).expect("our file");
    node.launch();
    for wanted in [name_of(&pod), pod_id] {
        names(&node.tool(&["why", &wanted]), &["damaged record moved to quarantine"], "check the disk");
    }
    node.stop();
}
