//! AppArmor on a kernel that supports it: the confinement of a container is read from its own procfs. The
//! rules of the default profile are tested by a container with all capabilities, without masks and read-only
//! paths, so that no other mechanism denies the attempt. Each attempt is also made without a profile and must
//! then succeed.

use std::fs;

use coracle_tests::cri::proto::security_profile::ProfileType;
use coracle_tests::cri::proto::{
    Capability, ContainerConfig, LinuxContainerSecurityContext, NamespaceMode, SecurityProfile,
    StatusRequest, StopContainerRequest,
};
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod, security};
use tonic::Code;

const POLICY: &str = "/sys/kernel/security/apparmor";
/// A profile that allows everything; the test harness compiles it and puts it here.
const OTHER: &str = "/opt/coracle-test.bin";
const DEFAULT: &str = "coracle-default (enforce)";

fn loaded() -> Vec<String> {
    let profiles = fs::read_to_string(format!("{POLICY}/profiles")).expect("AppArmor is on");
    profiles.lines().map(str::to_owned).collect()
}

fn profile(kind: ProfileType, name: &str) -> Option<SecurityProfile> {
    Some(SecurityProfile { profile_type: kind.into(), localhost_ref: name.into() })
}

/// The confinement of a container's processes in both files of the kernel.
#[track_caller]
fn confinement(fixture: &PodFixture, container: &str) -> String {
    let read = |path: &str| {
        let answer = fixture.node.exec_sync(exec(container, &["cat", path], 60)).expect("exec");
        assert_eq!(answer.exit_code, 0, "{}", String::from_utf8_lossy(&answer.stderr));
        String::from_utf8(answer.stdout).expect("text").trim().to_owned()
    };
    // The container's first process, then the exec's own.
    let first = read("/proc/1/attr/apparmor/current");
    assert_eq!(read("/proc/self/attr/apparmor/current"), first, "an exec is confined as its container");
    first
}

/// The profile is loaded by the daemon before any container; each way of requesting a profile applies it to
/// the container and its execs, also with no_new_privs.
#[test]
fn each_kind_of_request_applies_its_profile() {
    let mut pod = host_pod("fixture");
    let linux = pod.linux.as_mut().expect("set");
    linux.security_context.as_mut().expect("set").privileged = true;
    let fixture = PodFixture::with(pod);
    assert!(loaded().iter().any(|line| line == DEFAULT), "{:?}", loaded());
    fs::write(format!("{POLICY}/.replace"), fs::read(OTHER).expect("the harness made it")).expect("load");
    type Ask = fn(&mut LinuxContainerSecurityContext);
    let cases: [(&str, Ask, &str); 9] = [
        ("nothing", |_| (), DEFAULT),
        ("default", |asked| asked.apparmor = profile(ProfileType::RuntimeDefault, ""), DEFAULT),
        ("deprecated-default", |asked| asked.apparmor_profile = "runtime/default".into(), DEFAULT),
        ("unconfined", |asked| asked.apparmor = profile(ProfileType::Unconfined, ""), "unconfined"),
        ("deprecated-unconfined", |asked| asked.apparmor_profile = "unconfined".into(), "unconfined"),
        (
            "other",
            |asked| asked.apparmor = profile(ProfileType::Localhost, "coracle-test"),
            "coracle-test (enforce)",
        ),
        (
            "deprecated-other",
            |asked| asked.apparmor_profile = "localhost/coracle-test".into(),
            "coracle-test (enforce)",
        ),
        ("privileged", |asked| asked.privileged = true, "unconfined"),
        ("no-new-privileges", |asked| asked.no_new_privs = true, DEFAULT),
    ];
    for (name, ask, expected) in cases {
        let mut config = fixture.config(name, &["sleep", "forever"]);
        ask(security(&mut config));
        let id = fixture.run(&config);
        assert_eq!(confinement(&fixture, &id), expected, "{name}");
    }
    let mut config = fixture.config("absent", &["true"]);
    security(&mut config).apparmor = profile(ProfileType::Localhost, "coracle-absent");
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("absent");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("\"coracle-absent\": the profile is not loaded"), "{refused}");
    fixture.node.stop();
}

/// A container with all capabilities and no masks; `profile` is its only confinement.
fn open(fixture: &PodFixture, name: &str, asked: Option<SecurityProfile>) -> String {
    let mut config: ContainerConfig = fixture.config(name, &["sleep", "forever"]);
    let context = security(&mut config);
    context.apparmor = asked;
    context.capabilities = Some(Capability { add_capabilities: vec!["ALL".into()], ..Default::default() });
    fixture.run(&config)
}

/// The error of the attempt; empty if it succeeded.
fn attempt(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 60)).expect("exec");
    String::from_utf8_lossy(&answer.stderr).into_owned()
}

/// Writes to files of /proc outside of the container, kernel memory, and mounts are denied by the profile and
/// by nothing else. (sysfs is mounted read-only in every container that can have a profile, so its rules
/// cannot be tested.) Ordinary operations are allowed.
#[test]
fn the_default_profile_denies_the_documented_operations() {
    let fixture = PodFixture::start();
    let confined = open(&fixture, "confined", None);
    let free = open(&fixture, "free", profile(ProfileType::Unconfined, ""));
    let overcommit = fs::read_to_string("/proc/sys/vm/overcommit_memory").expect("sysctl");
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").expect("sysctl");
    let forbidden: [&[&str]; 7] = [
        &["write", "/proc/sys/vm/overcommit_memory", overcommit.trim()],
        &["write", "/proc/sys/kernel/core_pattern", pattern.trim()],
        &["write", "/proc/sys/kernel/sched_rt_runtime_us", "950000"],
        // Opened without writing a command.
        &["write", "/proc/sysrq-trigger", ""],
        &["cat", "/proc/kcore"],
        &["mount", "tmpfs", "/tmp"],
        &["mount", "proc", "/tmp"],
    ];
    for words in forbidden {
        let refused = attempt(&fixture, &confined, words);
        let is_denied = ["EACCES", "Permission denied"].iter().any(|why| refused.contains(why));
        assert!(is_denied, "{words:?} in a confined container: {refused:?}");
        if words[0] != "cat" {
            assert_eq!(attempt(&fixture, &free, words), "", "{words:?} without a profile");
        }
    }
    let ordinary: [&[&str]; 6] = [
        &["write", "/file", "text"],
        &["write", "/dev/shm/file", "text"],
        &["write", "/dev/null", "text"],
        &["write", "/proc/self/oom_score_adj", "500"],
        &["write", "/proc/sys/kernel/shmmax", "18446744073692774399"],
        &["cat", "/proc/sys/kernel/core_pattern"],
    ];
    for words in ordinary {
        assert_eq!(attempt(&fixture, &confined, words), "", "{words:?} in a confined container");
    }
    fixture.node.stop();
}

/// In a shared PID namespace, a confined container with CAP_SYS_PTRACE and CAP_KILL can neither read nor
/// signal an unconfined process; processes with the same profile can access each other, and the runtime can
/// end them.
#[test]
fn confined_processes_cannot_signal_or_trace_unconfined_ones() {
    let mut pod = host_pod("shared");
    let linux = pod.linux.as_mut().expect("set");
    let options = linux.security_context.as_mut().and_then(|context| context.namespace_options.as_mut());
    options.expect("set").pid = NamespaceMode::Node.into();
    let fixture = PodFixture::with(pod);
    let confined = open(&fixture, "confined", None);
    let other = open(&fixture, "other", None);
    let free = open(&fixture, "free", profile(ProfileType::Unconfined, ""));
    let [one, two] = [&other, &free].map(|id| fixture.node.container_pid(id).to_string());
    let environment = |pid: &str| format!("/proc/{pid}/environ");
    for words in [["kill", &two, "SIGWINCH"].as_slice(), &["cat", &environment(&two)]] {
        let refused = attempt(&fixture, &confined, words);
        assert!(refused.contains("EACCES") || refused.contains("ermission denied"), "{words:?}: {refused:?}");
        assert_eq!(attempt(&fixture, &free, words), "", "{words:?} without a profile");
    }
    for words in [["kill", &one, "SIGWINCH"].as_slice(), &["cat", &environment(&one)]] {
        assert_eq!(attempt(&fixture, &confined, words), "", "{words:?} among the confined");
    }
    fixture
        .node
        .stop_container(StopContainerRequest { container_id: confined.clone(), timeout: 60 })
        .expect("stop");
    let status = fixture.node.container(&confined);
    assert_eq!(status.exit_code, 128 + 15, "the first signal reached it: {status:?}");
    fixture.node.stop();
}

/// A restart of the node's AppArmor service unloads profiles that it does not know: the next container loads
/// the default one again. Status reports the current state.
#[test]
fn a_profile_that_was_unloaded_is_loaded_again() {
    let fixture = PodFixture::start();
    fs::write(format!("{POLICY}/.remove"), "coracle-default").expect("unload");
    assert!(!loaded().iter().any(|line| line == DEFAULT));
    let id = fixture.run(&fixture.config("again", &["sleep", "forever"]));
    assert_eq!(confinement(&fixture, &id), DEFAULT);
    expect_good_status(&fixture.node);
    fixture.node.stop();
}

#[track_caller]
fn expect_good_status(node: &Node) {
    let answer = node.status(StatusRequest { verbose: true }).expect("status");
    let conditions = answer.status.expect("a status").conditions;
    let ours = conditions.iter().find(|one| one.r#type == "SecurityModulesReady").expect("a condition");
    assert!(ours.status, "{ours:?}");
    let report: serde_json::Value = serde_json::from_str(&answer.info["security"]).expect("JSON");
    assert_eq!(report["apparmor"]["profile"], "coracle-default", "{report}");
    assert_eq!(report["apparmor"]["loaded"], true, "{report}");
}
