//! SELinux on a kernel that supports it, with Debian's policy. That policy names container types but does not
//! define them, so it is tested unmodified for refusals, and with the module of `tests/qemu/selinux`, which
//! defines them, in enforcing mode for labels.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::cri::proto::{Mount, PodSandboxConfig, SeLinuxOption, StatusRequest};
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{create, exec, host_pod, run, security};
use coracle_tests::stage::Stage;
use serde_json::Value;
use tonic::Code;

const SELINUX: &str = "/sys/fs/selinux";
const PROCESS: &str = "system_u:system_r:container_t:s0:";

/// Loads one of the two policies.
fn load(policy: &str, enforces: bool) {
    if !Path::new(SELINUX).join("load").exists() {
        let mounted = Command::new("mount").args(["-t", "selinuxfs", "selinuxfs", SELINUX]).status();
        assert!(mounted.expect("mount").success(), "SELinux is not on");
    }
    let enforce = |on: &str| fs::write(format!("{SELINUX}/enforce"), on).expect("enforce");
    enforce("0");
    let policy = fs::read(format!("/opt/selinux/{policy}.policy")).expect("the harness made it");
    fs::write(format!("{SELINUX}/load"), policy).expect("load");
    enforce(if enforces { "1" } else { "0" });
}

/// The SELinux level of a container of this fixture, which must have the policy's type, like its execs.
#[track_caller]
fn level(stage: &Stage, container: &str) -> String {
    let first = says(stage, container, &["cat", "/proc/1/attr/current"]);
    assert_eq!(
        says(stage, container, &["cat", "/proc/self/attr/current"]),
        first,
        "an exec is labelled as its container"
    );
    first.strip_prefix(PROCESS).unwrap_or_else(|| panic!("{first:?}")).to_owned()
}

/// Output and errors of the probe in a running container.
#[track_caller]
fn says(stage: &Stage, container: &str, words: &[&str]) -> String {
    let answer = stage.node.exec_sync(exec(container, words, 60)).expect("exec");
    let text = String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned();
    text.trim_end_matches(['\n', '\0']).to_owned()
}

#[track_caller]
fn sleeper(stage: &Stage, pod_id: &str, pod: &PodSandboxConfig, name: &str, mounts: Vec<Mount>) -> String {
    let mut config = stage.config(name, &["sleep", "forever"]);
    config.mounts = mounts;
    stage.node.run_container(pod_id, &config, pod)
}

fn volume(stage: &Stage, name: &str, selinux_relabel: bool) -> (PathBuf, Mount) {
    let path = stage.node.folder().join(name);
    fs::create_dir_all(path.join("below")).expect("a directory");
    fs::write(path.join("below/file"), "content").expect("a file");
    let host_path = path.display().to_string();
    (path, Mount { container_path: "/volume".into(), host_path, selinux_relabel, ..Default::default() })
}

fn options(level: &str, kind: &str) -> Option<SeLinuxOption> {
    Some(SeLinuxOption { level: level.into(), r#type: kind.into(), ..Default::default() })
}

fn report(node: &Node) -> (bool, String, Value) {
    let answer = node.status(StatusRequest { verbose: true }).expect("status");
    let conditions = answer.status.expect("a status").conditions;
    let ours = conditions.iter().find(|one| one.r#type == "SecurityModulesReady").expect("a condition");
    let report: Value = serde_json::from_str(&answer.info["security"]).expect("JSON");
    (ours.status, format!("{} {}", ours.reason, ours.message), report["selinux"].clone())
}

/// Debian's policy names types that it does not define: Status reports it, pods and containers with a
/// requested label are refused, others run without a label; with `required`, all are refused.
#[test]
fn a_policy_without_container_types_is_reported_and_options_are_refused() {
    load("debian", false);
    let stage = Stage::set();
    let (is_ready, why, selinux) = report(&stage.node);
    assert!(!is_ready && why.starts_with("SELinuxLabelsMissing "), "{why}");
    assert!(why.contains("does not know system_u:system_r:container_t:s0"), "{why}");
    assert_eq!(selinux["labels"], false, "{selinux}");
    stage.output(&["true"], |_| ());
    let mut config = stage.config("asks", &["true"]);
    security(&mut config).selinux_options = options("s0:c1,c2", "");
    let refused =
        stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)).expect_err("no types");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("security_context.selinux_options: "), "{refused}");
    let mut pod = host_pod("asks");
    let linux = pod.linux.as_mut().expect("set");
    linux.security_context.as_mut().expect("set").selinux_options = options("s0:c1,c2", "");
    let refused = stage.node.run_pod_sandbox(run(&pod)).expect_err("no types");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    stage.node.stop();
    let config = "[security]\nselinux = \"required\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let refused = node.run_pod_sandbox(run(&host_pod("any"))).expect_err("no types");
    assert!(refused.message().contains("security.selinux requires labels"), "{refused}");
    node.stop();
}

/// Containers of a pod share a level that no other pod has, also after a restart of the daemon. Files that a
/// container may use are labelled; access to an unlabelled file of the node, or to a volume of another pod,
/// is denied.
#[test]
fn pods_are_separated_by_their_categories() {
    load("containers", true);
    let mut stage = Stage::set();
    let other_pod = host_pod("other");
    let other_pod_id = stage.node.run_pod(&other_pod);
    let (labelled, own) = volume(&stage, "labelled", true);
    let (plain, unlabelled) = volume(&stage, "plain", false);
    let pod = stage.pod.clone();
    let pod_id = stage.pod_id.clone();
    let one = sleeper(&stage, &pod_id, &pod, "one", vec![own.clone()]);
    let two = sleeper(&stage, &pod_id, &pod, "two", vec![Mount { selinux_relabel: false, ..own.clone() }]);
    let bare = sleeper(&stage, &pod_id, &pod, "bare", vec![unlabelled]);
    let stranger = Mount { selinux_relabel: false, ..own };
    let other = sleeper(&stage, &other_pod_id, &other_pod, "other", vec![stranger]);
    let first = level(&stage, &one);
    assert!(first.starts_with('c') && first.contains(",c"), "{first}");
    assert_eq!(level(&stage, &two), first, "a pod's containers share its level");
    let second = level(&stage, &other);
    assert_ne!(second, first, "two pods share one level");
    for container in [&one, &two] {
        assert_eq!(says(&stage, container, &["cat", "/volume/below/file"]), "content");
    }
    for (container, what) in [(&other, "another pod's volume"), (&bare, "a volume without a label")] {
        let refused = says(&stage, container, &["cat", "/volume/below/file"]);
        assert!(refused.contains("Permission denied"), "{what}: {refused}");
    }
    assert_eq!(
        label_of(&labelled.join("below/file")),
        format!("system_u:object_r:container_file_t:s0:{first}")
    );
    assert!(!label_of(&plain.join("below/file")).contains("container_file_t"));
    for words in [
        ["write", "/file", "text"].as_slice(),
        &["write", "/dev/shm/file", "text"],
        &["write", "/dev/null", "text"],
        &["write", "/volume/new", "text"],
    ] {
        assert_eq!(says(&stage, &one, words), "", "{words:?}");
    }
    assert!(says(&stage, &one, &["cat", "/etc/resolv.conf"]).contains("192.0.2.53"));
    stage.node.restart();
    let late = sleeper(&stage, &pod_id, &pod, "late", Vec::new());
    assert_eq!(level(&stage, &late), first, "the level outlives the daemon");
    let (is_ready, why, selinux) = report(&stage.node);
    assert!(is_ready, "{why}");
    assert_eq!(selinux["process"], "container_t", "{selinux}");
    stage.node.stop();
}

/// A valid level and a valid type are applied; others are refused with their name. Privileged containers have
/// their own type.
#[test]
fn options_are_applied_or_refused_and_privileged_containers_have_their_own_type() {
    load("containers", true);
    let mut pod = host_pod("stage");
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    context.privileged = true;
    context.selinux_options = options("s0:c5,c6", "");
    let stage = Stage::with(pod);
    let plain = stage.run(&stage.config("plain", &["sleep", "forever"]));
    assert_eq!(level(&stage, &plain), "c5,c6", "the pod's level is its containers'");
    let mut config = stage.config("asks", &["sleep", "forever"]);
    security(&mut config).selinux_options = options("s0:c7,c8", "");
    let asks = stage.run(&config);
    assert_eq!(level(&stage, &asks), "c7,c8");
    for (name, kind, wanted) in [
        ("unknown", "nobody_t", "system_u:system_r:nobody_t:s0:c5,c6"),
        ("not-a-type", "a:b", "selinux_options.type: is no part of an SELinux label"),
    ] {
        let mut config = stage.config(name, &["true"]);
        security(&mut config).selinux_options = options("", kind);
        let refused =
            stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)).expect_err(name);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(wanted), "{refused}");
    }
    let mut config = stage.config("privileged", &["sleep", "forever"]);
    security(&mut config).privileged = true;
    let privileged = stage.run(&config);
    assert_eq!(says(&stage, &privileged, &["cat", "/proc/1/attr/current"]), "system_u:system_r:spc_t:s0");
    assert_eq!(says(&stage, &privileged, &["cat", "/proc/self/attr/current"]), "system_u:system_r:spc_t:s0");
    stage.node.stop();
}

/// Relabelling the node's own directories would make the node unusable.
#[test]
fn the_nodes_directories_are_not_relabelled() {
    load("containers", true);
    let stage = Stage::set();
    let before = label_of(Path::new("/etc/passwd"));
    let mut config = stage.config("etc", &["true"]);
    let mount = Mount {
        container_path: "/volume".into(),
        host_path: "/etc".into(),
        selinux_relabel: true,
        ..Default::default()
    };
    config.mounts = vec![mount];
    let refused = stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)).expect_err("/etc");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(
        refused
            .message()
            .contains("selinux_relabel: /etc: a system directory of the node, which must keep its label"),
        "{refused}"
    );
    assert_eq!(label_of(Path::new("/etc/passwd")), before);
    stage.node.stop();
}

/// The label of a file.
#[track_caller]
fn label_of(path: &Path) -> String {
    let mut label = [0; 256];
    let length = rustix::fs::lgetxattr(path, "security.selinux", &mut label).expect("a label");
    String::from_utf8_lossy(&label[..length]).trim_end_matches('\0').to_owned()
}
