//! Plugins on NRI's public Go library (`sample/main.go`), unchanged in how they talk: connected and started by us, of now and
//! of before v0.12. The project's own samples are modules of their own that the module proxy does not serve.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coracle_tests::host::{self, wait_until};
use coracle_tests::node::Node;
use coracle_tests::nri::activations;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, exec, host_pod, run};

use super::refused;

/// Path of a Go plugin, which `make test` builds.
fn program(name: &str) -> PathBuf {
    let usual = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools");
    let tools = std::env::var_os("CORACLE_TOOLS_DIR").map_or_else(|| PathBuf::from(usual), PathBuf::from);
    let path = tools.join("bin").join(name);
    assert!(path.exists(), "{} is not there: `tests/tools/install test` makes it", path.display());
    path
}

/// A running plugin process.
struct Sample {
    child: Child,
    log: PathBuf,
}

impl Sample {
    fn start(node: &Node, program_name: &str, indices: &str) -> Sample {
        let log = node.folder().join(format!("{program_name}-{indices}.log"));
        let before: Vec<_> =
            indices.split(',').map(|index| (index, activations(node, index, "sample"))).collect();
        let child = Command::new(program(program_name))
            .args(["-indices", indices, "-socket", &node.nri().display().to_string()])
            .args(["-log", &log.display().to_string()])
            .stdout(Stdio::null())
            .stderr(fs::File::create(node.folder().join("sample.err")).expect("a file"))
            .spawn()
            .expect("it runs");
        for (index, count) in before {
            wait_until(&format!("plugin {index} is active"), || activations(node, index, "sample") > count);
        }
        Sample { child, log }
    }

    /// Events that plugin INDEX received.
    fn heard(&self, index: &str) -> Vec<String> {
        heard(&self.log, index)
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn heard(log: &Path, index: &str) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.strip_prefix(index)?.strip_prefix(' '));
    lines.map(|line| line.trim().to_owned()).collect()
}

#[test]
fn a_go_plugin_gets_all_events_of_a_pod() {
    let node = Node::with_bridge();
    let sample = Sample::start(&node, "nri-sample", "10");
    let fixture = PodFixture::on(node, bridge_pod("boat"));
    let id = fixture.run(&fixture.config("c1", &["true"]));
    fixture.node.exited(&id);
    fixture.node.remove_pod(&fixture.pod_id);
    let heard = sample.heard("10");
    let address = heard[2].split(' ').nth(3).expect("an address").to_owned();
    assert!(address.starts_with(&fixture.node.subnet()), "{heard:?}");
    let expected = [
        "Configure coracle".to_owned(),
        "Synchronize 0 0 0".to_owned(),
        format!("RunPodSandbox boat there {address} 0"),
        "CreateContainer c1".to_owned(),
        "PostCreateContainer c1".to_owned(),
        "StartContainer c1".to_owned(),
        "PostStartContainer c1".to_owned(),
        "StopContainer c1".to_owned(),
        "StopPodSandbox boat".to_owned(),
        "RemoveContainer c1".to_owned(),
        format!("RemovePodSandbox boat {address}"),
    ];
    assert_eq!(heard, expected);
    fixture.node.stop();
}

#[test]
fn changes_of_go_plugins_apply_to_the_container() {
    let node = Node::start();
    let marks = node.folder().join("hooked");
    // As the differ sample: several indices in one process.
    let sample = Sample::start(&node, "nri-sample", "00,50,99");
    let mut pod = host_pod("fixture");
    pod.annotations = [
        ("touch/00", "first".to_owned()),
        ("touch/50", "second".to_owned()),
        ("env/50", "ADDED yes".to_owned()),
        ("ulimit/99", "RLIMIT_NOFILE".to_owned()),
        ("device/00", "/dev/mine".to_owned()),
        ("mount/99", "/added".to_owned()),
        ("hook/99", format!("echo hooked > {}", marks.display())),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    let fixture = PodFixture::on(node, pod);
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let created = |index: &str| {
        let heard = sample.heard(index);
        let of =
            |event: &str| heard.iter().find(|line| line.starts_with(event)).expect("it is heard").clone();
        (of("CreateContainer"), of("PostCreateContainer"))
    };
    let after = "PostCreateContainer c1 second".to_owned();
    assert_eq!(created("00"), ("CreateContainer c1".to_owned(), after.clone()));
    assert_eq!(created("50"), ("CreateContainer c1 first".to_owned(), after.clone()));
    assert_eq!(created("99"), ("CreateContainer c1 second".to_owned(), after));
    let seen = fixture.node.exec_sync(exec(&id, &["see", "env", "limits", "mounts"], 10)).expect("an exec");
    let seen = String::from_utf8(seen.stdout).expect("text");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<_> = seen.lines().map(words).collect();
    for expected in ["env ADDED=yes", "Max open files 77 99 files"] {
        assert!(lines.iter().any(|line| line == expected), "{expected}: {seen}");
    }
    assert!(lines.iter().any(|line| line.starts_with("mounts /added ")), "{seen}");
    let node = fixture.node.exec_sync(exec(&id, &["stat", "/dev/mine"], 10)).expect("an exec");
    assert!(String::from_utf8_lossy(&node.stdout).starts_with("20666 0 0"));
    assert_eq!(fs::read_to_string(&marks).expect("the hook ran"), "hooked\n");
    fixture.node.stop();
}

#[test]
fn a_go_plugins_refusal_is_the_kubelets_error() {
    let node = Node::start();
    let sample = Sample::start(&node, "nri-sample", "10");
    let mut pod = host_pod("web");
    pod.annotations = [("refuse".to_owned(), "10".to_owned())].into();
    let text = refused(node.run_pod_sandbox(run(&pod)));
    assert!(text.contains("NRI RunPodSandbox failed: plugin \"10-sample\": this pod is refused"), "{text}");
    drop(sample);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R9, NRI-R20.
#[test]
fn long_messages_reach_a_go_plugin() {
    let node = Node::start();
    let sample = Sample::start(&node, "nri-sample", "10");
    let sizes = [4_000, 4_096, 5_000, 100_000, 1_000_000];
    for size in sizes {
        let mut pod = host_pod("big");
        pod.annotations = [("big".to_owned(), "x".repeat(size))].into();
        pod.metadata.as_mut().expect("set").attempt = size as u32;
        node.run_pod(&pod);
    }
    let told: Vec<_> =
        sample.heard("10").into_iter().filter(|line| line.starts_with("RunPodSandbox")).collect();
    let expected: Vec<_> = sizes.iter().map(|size| format!("RunPodSandbox big absent  {size}")).collect();
    assert_eq!(told, expected);
    drop(sample);
    // More than one message of Synchronize.
    let again = Sample::start(&node, "nri-sample", "20");
    assert_eq!(again.heard("20")[1], "Synchronize 5 0 1000000");
    drop(again);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C34.
#[test]
fn a_go_plugin_before_v0_12_gets_all_events() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let sample = Sample::start(&fixture.node, "nri-sample-old", "10");
    let id = fixture.run(&fixture.config("c1", &["true"]));
    fixture.node.exited(&id);
    fixture.node.remove_pod(&fixture.pod_id);
    let expected = [
        "Configure coracle",
        "Synchronize 1 0 64",
        "CreateContainer c1",
        "PostCreateContainer c1",
        "StartContainer c1",
        "PostStartContainer c1",
        "StopContainer c1",
        "StopPodSandbox fixture",
        "RemoveContainer c1",
        "RemovePodSandbox fixture",
    ];
    assert_eq!(sample.heard("10"), expected);
    fixture.node.stop();
}

/// Puts a program in the plugin directory of a node that is not running.
fn install(node: &Node, name: &str, program: &Path) {
    let folder = node.folder().join("nri");
    fs::create_dir_all(&folder).expect("a folder");
    std::os::unix::fs::symlink(program, folder.join(name)).expect("a link");
}

#[test]
fn plugins_of_the_directory_are_started_configured_and_started_again() {
    let mut node = Node::start();
    node.terminate();
    let log = node.folder().join("heard.log");
    install(&node, "10-first", &program("nri-sample"));
    install(&node, "20-old", &program("nri-sample-old"));
    // One that fails at once is logged and left out; others join before anything is served.
    let broken = node.folder().join("broken.sh");
    host::write_program(
        &broken,
        "#!/bin/sh\necho \"I am $NRI_PLUGIN_IDX $NRI_PLUGIN_NAME $NRI_PLUGIN_SOCKET\" >&2\nexit 3\n",
    );
    install(&node, "30-broken", &broken);
    fs::create_dir_all(node.folder().join("nri.d")).expect("a folder");
    let config = serde_json::json!({ "log": log }).to_string();
    fs::write(node.folder().join("nri.d/10-first.conf"), &config).expect("a file");
    fs::write(node.folder().join("nri.d/old.conf"), &config).expect("a file");
    node.launch();
    for index in ["10", "20"] {
        assert_eq!(heard(&log, index)[..2], ["Configure coracle", "Synchronize 0 0 0"], "{index}");
    }
    let text = node.log();
    assert!(text.contains("I am 30 broken 3") && text.contains("will restart"), "{text}");
    assert!(text.contains("configured by coracle v"), "what it prints is in our log");
    let id = node.run_pod(&host_pod("web"));
    assert!(heard(&log, "10").contains(&"RunPodSandbox web absent  0".to_owned()));
    // It dies, and comes back with a full handshake.
    let plugins = || host::processes("/nri/10-first");
    let pid = plugins()[0].pid;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).expect("ours");
    wait_until("it is there again", || heard(&log, "10").contains(&"Synchronize 1 0 64".to_owned()));
    node.remove_pod(&id);
    assert!(heard(&log, "10").contains(&"RemovePodSandbox web".to_owned()));
    node.terminate();
    wait_until("they end with the daemon", || plugins().is_empty());
    fs::remove_file(node.folder().join("nri/10-first")).expect("ours");
    fs::remove_file(node.folder().join("nri/20-old")).expect("ours");
    fs::remove_file(node.folder().join("nri/30-broken")).expect("ours");
    node.stop();
}
