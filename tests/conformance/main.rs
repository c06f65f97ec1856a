//! Runs critest, the public CRI conformance suite, unmodified against a node and a registry of its own. All
//! specs run; those that cannot pass are listed in `expected.toml` with the reason, and a listed one that
//! passes is a failure, too.
#![forbid(unsafe_code)]

mod images;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_tests::ginkgo::{self, Results, State};
use coracle_tests::host::wait_within;
use coracle_tests::node::{self, Node};
use coracle_tests::registry::Registry;

/// Time limit; 122 specs take two minutes on a typical machine, and ten times as long in a guest of
/// `tests/qemu`.
const RUN_LIMIT: Duration = Duration::from_secs(3600);

/// Arguments of the second run: the streaming specs over WebSocket.
const WEBSOCKET: [&str; 4] =
    ["-websocket-exec", "-websocket-attach", "-websocket-portforward", "-ginkgo.focus=Streaming"];

/// Directory of Debian's busybox; guests have another one.
fn tools() -> PathBuf {
    let usual = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools");
    std::env::var_os("CORACLE_TOOLS_DIR").map_or_else(|| PathBuf::from(usual), PathBuf::from)
}

/// Runs critest; returns the result of each selected spec with its message.
fn critest(node: &Node, run: &str, flags: &[&str]) -> Results {
    let report = node.folder().join(format!("critest-{run}.json"));
    let log = node.folder().join(format!("critest-{run}.log"));
    let endpoint = format!("unix://{}", node.socket().display());
    let mut child = Command::new("critest")
        .args(["-runtime-endpoint", &endpoint, "-image-endpoint", &endpoint])
        .args(["-ginkgo.no-color", "-ginkgo.json-report"])
        .arg(&report)
        .args(nri_flags(node))
        .args(flags)
        .current_dir(node.folder())
        .stdin(Stdio::null())
        .stdout(fs::File::create(&log).expect("critest's log"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("critest: {error}; tests/tools/install builds it"));
    if wait_within(RUN_LIMIT, || child.try_wait().expect("it is our child")).is_none() {
        child.kill().expect("it is ours to kill");
        child.wait().expect("it is our child");
        panic!("critest did not end within {RUN_LIMIT:?}; its log is {}", log.display());
    }
    // A spec that is not selected, or a benchmark, has no message.
    ginkgo::results(&report, &["skipped"])
        .unwrap_or_else(|error| panic!("critest's report: {error}; its log is {}", log.display()))
}

/// The socket for the specs of NRI, which critest has since 1.37 and skips without it.
fn nri_flags(node: &Node) -> Option<String> {
    let help = Command::new("critest").arg("-help").output().expect("critest runs");
    let texts = [help.stdout, help.stderr].map(|text| String::from_utf8_lossy(&text).contains("nri-socket"));
    texts.contains(&true).then(|| format!("-nri-socket={}", node.nri().display()))
}

/// Prints the results and panics if they differ from `expected.toml`.
fn judge(specs: &Results, all_expected: bool) {
    let mut sections = vec![("fails", State::Failed)];
    if !Path::new("/sys/kernel/security/apparmor").exists() {
        sections.push(("skips_without_apparmor", State::Skipped));
    }
    println!("critest: {}", ginkgo::counts(specs));
    ginkgo::judge(specs, &ginkgo::expected(include_str!("expected.toml"), &sections), all_expected);
}

/// If `CORACLE_CRITEST_FOCUS` is set, only specs whose names match this expression run.
///
/// Both runs are one test, because the host ports and host names of the suite are fixed, so that two runs
/// cannot be concurrent.
#[test]
fn critest_passes_over_spdy_and_streaming_over_websocket() {
    let node = Node::with_bridge();
    let registry = Registry::start(node.folder());
    images::push(&registry, &node::binaries(), &tools());
    let mirrors: Vec<String> = images::REGISTRIES
        .iter()
        .map(|name| format!("  {name}: {{endpoint: [\"http://{}\"]}}\n", registry.address()))
        .collect();
    let file = node.folder().join("registries.yaml");
    fs::write(file, format!("mirrors:\n{}", mirrors.concat())).expect("registries.yaml");
    if let Ok(focus) = std::env::var("CORACLE_CRITEST_FOCUS") {
        let some = critest(&node, "focus", &[&format!("-ginkgo.focus={focus}")]);
        judge(&some, false);
        return node.stop();
    }
    let streaming = critest(&node, "websocket", &WEBSOCKET);
    judge(&streaming, false);
    let all = critest(&node, "spdy", &[]);
    judge(&all, true);
    node.stop();
}
