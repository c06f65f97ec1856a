//! SELinux on a kernel that supports it, with Debian's policy. That policy names container types but does not
//! define them, so it is tested unmodified for refusals, and with the module of `tests/qemu/selinux`, which
//! defines them, in enforcing mode for labels.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::cri::proto::{Mount, PodSandboxConfig, SeLinuxOption, StatusRequest};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod, run, security};
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
fn level(fixture: &PodFixture, container: &str) -> String {
    let first = says(fixture, container, &["cat", "/proc/1/attr/current"]);
    assert_eq!(
        says(fixture, container, &["cat", "/proc/self/attr/current"]),
        first,
        "an exec is labelled as its container"
    );
    first.strip_prefix(PROCESS).unwrap_or_else(|| panic!("{first:?}")).to_owned()
}

/// Output and errors of the probe in a running container.
#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 60)).expect("exec");
    let text = String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned();
    text.trim_end_matches(['\n', '\0']).to_owned()
}

#[track_caller]
fn sleeper(
    fixture: &PodFixture,
    pod_id: &str,
    pod: &PodSandboxConfig,
    name: &str,
    mounts: Vec<Mount>,
) -> String {
    let mut config = fixture.config(name, &["sleep", "forever"]);
    config.mounts = mounts;
    fixture.node.run_container(pod_id, &config, pod)
}

fn volume(fixture: &PodFixture, name: &str, selinux_relabel: bool) -> (PathBuf, Mount) {
    let path = fixture.node.folder().join(name);
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
    let fixture = PodFixture::start();
    let (is_ready, why, selinux) = report(&fixture.node);
    assert!(!is_ready && why.starts_with("SELinuxLabelsMissing "), "{why}");
    assert!(why.contains("does not know system_u:system_r:container_t:s0"), "{why}");
    assert_eq!(selinux["labels"], false, "{selinux}");
    fixture.output(&["true"], |_| ());
    let mut config = fixture.config("asks", &["true"]);
    security(&mut config).selinux_options = options("s0:c1,c2", "");
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("no types");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("security_context.selinux_options: "), "{refused}");
    let mut pod = host_pod("asks");
    let linux = pod.linux.as_mut().expect("set");
    linux.security_context.as_mut().expect("set").selinux_options = options("s0:c1,c2", "");
    let refused = fixture.node.run_pod_sandbox(run(&pod)).expect_err("no types");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    fixture.node.stop();
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
    let mut fixture = PodFixture::start();
    let other_pod = host_pod("other");
    let other_pod_id = fixture.node.run_pod(&other_pod);
    let (labelled, own) = volume(&fixture, "labelled", true);
    let (plain, unlabelled) = volume(&fixture, "plain", false);
    let pod = fixture.pod.clone();
    let pod_id = fixture.pod_id.clone();
    let one = sleeper(&fixture, &pod_id, &pod, "one", vec![own.clone()]);
    let two = sleeper(&fixture, &pod_id, &pod, "two", vec![Mount { selinux_relabel: false, ..own.clone() }]);
    let bare = sleeper(&fixture, &pod_id, &pod, "bare", vec![unlabelled]);
    let stranger = Mount { selinux_relabel: false, ..own };
    let other = sleeper(&fixture, &other_pod_id, &other_pod, "other", vec![stranger]);
    let first = level(&fixture, &one);
    assert!(first.starts_with('c') && first.contains(",c"), "{first}");
    assert_eq!(level(&fixture, &two), first, "a pod's containers share its level");
    let second = level(&fixture, &other);
    assert_ne!(second, first, "two pods share one level");
    for container in [&one, &two] {
        assert_eq!(says(&fixture, container, &["cat", "/volume/below/file"]), "content");
    }
    for (container, what) in [(&other, "another pod's volume"), (&bare, "a volume without a label")] {
        let refused = says(&fixture, container, &["cat", "/volume/below/file"]);
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
        assert_eq!(says(&fixture, &one, words), "", "{words:?}");
    }
    assert!(says(&fixture, &one, &["cat", "/etc/resolv.conf"]).contains("192.0.2.53"));
    fixture.node.restart();
    let late = sleeper(&fixture, &pod_id, &pod, "late", Vec::new());
    assert_eq!(level(&fixture, &late), first, "the level outlives the daemon");
    let (is_ready, why, selinux) = report(&fixture.node);
    assert!(is_ready, "{why}");
    assert_eq!(selinux["process"], "container_t", "{selinux}");
    fixture.node.stop();
}

/// A valid level and a valid type are applied; others are refused with their name. Privileged containers have
/// their own type.
#[test]
fn options_are_applied_or_refused_and_privileged_containers_have_their_own_type() {
    load("containers", true);
    let mut pod = host_pod("fixture");
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    context.privileged = true;
    context.selinux_options = options("s0:c5,c6", "");
    let fixture = PodFixture::with(pod);
    let plain = fixture.run(&fixture.config("plain", &["sleep", "forever"]));
    assert_eq!(level(&fixture, &plain), "c5,c6", "the pod's level is its containers'");
    let mut config = fixture.config("asks", &["sleep", "forever"]);
    security(&mut config).selinux_options = options("s0:c7,c8", "");
    let asks = fixture.run(&config);
    assert_eq!(level(&fixture, &asks), "c7,c8");
    for (name, kind, wanted) in [
        ("unknown", "nobody_t", "system_u:system_r:nobody_t:s0:c5,c6"),
        ("not-a-type", "a:b", "selinux_options.type: is no part of an SELinux label"),
    ] {
        let mut config = fixture.config(name, &["true"]);
        security(&mut config).selinux_options = options("", kind);
        let refused =
            fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err(name);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(wanted), "{refused}");
    }
    let mut config = fixture.config("privileged", &["sleep", "forever"]);
    security(&mut config).privileged = true;
    let privileged = fixture.run(&config);
    assert_eq!(says(&fixture, &privileged, &["cat", "/proc/1/attr/current"]), "system_u:system_r:spc_t:s0");
    assert_eq!(
        says(&fixture, &privileged, &["cat", "/proc/self/attr/current"]),
        "system_u:system_r:spc_t:s0"
    );
    fixture.node.stop();
}

/// Relabelling the node's own directories would make the node unusable.
#[test]
fn the_nodes_directories_are_not_relabelled() {
    load("containers", true);
    let fixture = PodFixture::start();
    let before = label_of(Path::new("/etc/passwd"));
    let mut config = fixture.config("etc", &["true"]);
    let mount = Mount {
        container_path: "/volume".into(),
        host_path: "/etc".into(),
        selinux_relabel: true,
        ..Default::default()
    };
    config.mounts = vec![mount];
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("/etc");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(
        refused
            .message()
            .contains("selinux_relabel: /etc: a system directory of the node, which must keep its label"),
        "{refused}"
    );
    assert_eq!(label_of(Path::new("/etc/passwd")), before);
    fixture.node.stop();
}

/// The label of a file.
#[track_caller]
fn label_of(path: &Path) -> String {
    let mut label = [0; 256];
    let length = rustix::fs::lgetxattr(path, "security.selinux", &mut label).expect("a label");
    String::from_utf8_lossy(&label[..length]).trim_end_matches('\0').to_owned()
}
