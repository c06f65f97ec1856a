//! The namespaces in which `tests/cluster` runs: what a program starts there ends with it, and what it leaves elsewhere
//! is reported.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coracle_tests::{host, node};

/// Runs a shell command in the namespaces; returns its output.
fn run(base: &Path, command: &str) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/namespaces");
    let mut all = Command::new(script);
    all.args(["sh", "-c", command]).env("CORACLE_TEST_DIR", base).output().expect("the script runs")
}

fn base(name: &str) -> PathBuf {
    host::require_root();
    node::base().join(format!("namespaces-{name}-{}", std::process::id()))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn processes_links_and_mounts_end_with_the_namespaces() {
    let base = base("ends");
    // A process in a session of its own, a link, a mount, files in directories that look like the machine's.
    let command = "setsid sleep 54321 & ip link add left0 type veth peer name left1 && \
                   mkdir -p $CORACLE_CLUSTER/left && mount -t tmpfs tmpfs $CORACLE_CLUSTER/left && \
                   touch /var/lib/left /run/left /tmp/left /var/log/left && hostname && ip -o address";
    let output = run(&base, command);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.starts_with("node\n") && said.contains("10.88.0.1/24"), "{said}");
    assert!(host::processes("sleep 54321").is_empty(), "the process ended with its PID namespace");
    assert!(!Path::new("/sys/class/net/left0").exists(), "the link is gone");
    assert_eq!(host::mounts(&base.display().to_string()), Vec::<String>::new());
    for folder in ["/var/lib", "/run", "/tmp", "/var/log"] {
        assert!(!Path::new(folder).join("left").exists(), "{folder} was not the machine's");
    }
    assert!(!base.exists(), "its directory is removed");
}

#[test]
fn the_exit_code_is_the_programs() {
    let base = base("code");
    let output = run(&base, "exit 7");
    assert_eq!(output.status.code(), Some(7), "{}", text(&output));
    fs::remove_dir_all(&base).expect("kept, with the logs of what failed");
}

#[test]
fn a_cgroup_that_is_left_behind_is_a_failure() {
    let base = base("cgroup");
    let root = host::cgroup_roots().into_iter().next().expect("a hierarchy");
    let command =
        format!("mkdir {}/coracle-test-$CORACLE_TEST_ID-left && echo $CORACLE_TEST_ID", root.display());
    let output = run(&base, &command);
    let said = text(&output);
    let id = said.lines().next().expect("a number");
    fs::remove_dir(root.join(format!("coracle-test-{id}-left"))).expect("it was left");
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("left on the machine"), "{said}");
    fs::remove_dir_all(&base).expect("kept, with the logs of what failed");
}
