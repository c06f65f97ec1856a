//! Runs critest, the public CRI conformance suite, unmodified against a node and a registry of its own. All
//! specs run; those that cannot pass are listed in `expected.toml` with the reason, and a listed one that
//! passes is a failure, too.
#![forbid(unsafe_code)]

mod images;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_tests::host::wait_within;
use coracle_tests::node::{self, Node};
use coracle_tests::registry::Registry;
use serde_json::Value;

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

/// Result of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Passed,
    Failed,
    Skipped,
}

/// Runs critest; returns the result of each selected spec with its message.
fn critest(node: &Node, run: &str, flags: &[&str]) -> BTreeMap<String, (State, String)> {
    let report = node.folder().join(format!("critest-{run}.json"));
    let log = node.folder().join(format!("critest-{run}.log"));
    let endpoint = format!("unix://{}", node.socket().display());
    let mut child = Command::new("critest")
        .args(["-runtime-endpoint", &endpoint, "-image-endpoint", &endpoint])
        .args(["-ginkgo.no-color", "-ginkgo.json-report"])
        .arg(&report)
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
    let text = fs::read(&report)
        .unwrap_or_else(|error| panic!("critest's report: {error}; its log is {}", log.display()));
    let suites: Value = serde_json::from_slice(&text).expect("critest's report is JSON");
    let specs = suites[0]["SpecReports"].as_array().expect("the report has specs");
    specs.iter().filter_map(spec).collect()
}

fn spec(report: &Value) -> Option<(String, (State, String))> {
    let leaf = report["LeafNodeText"].as_str().filter(|text| !text.is_empty())?;
    let levels = report["ContainerHierarchyTexts"].as_array()?.iter().filter_map(Value::as_str);
    let name: Vec<&str> = levels.chain([leaf]).collect();
    let why = report["Failure"]["Message"].as_str().unwrap_or_default();
    let state = match report["State"].as_str()? {
        "passed" => State::Passed,
        // A spec that is not selected, or a benchmark, has no message; one that skips itself has one.
        "skipped" if why.is_empty() => return None,
        "skipped" => State::Skipped,
        _ => State::Failed,
    };
    Some((name.join(" "), (state, why.to_owned())))
}

/// One entry of `expected.toml`.
struct Expected {
    state: State,
    reason: String,
}

fn expected() -> BTreeMap<String, Expected> {
    let table: toml::Table = include_str!("expected.toml").parse().expect("expected.toml is TOML");
    let mut all = BTreeMap::new();
    let mut sections = vec![("fails", State::Failed)];
    if !Path::new("/sys/kernel/security/apparmor").exists() {
        sections.push(("skips_without_apparmor", State::Skipped));
    }
    for (section, state) in sections {
        for (spec, reason) in table.get(section).and_then(toml::Value::as_table).into_iter().flatten() {
            let reason = reason.as_str().filter(|reason| reason.len() > 20).expect("each has a reason");
            all.insert(spec.clone(), Expected { state, reason: reason.to_owned() });
        }
    }
    all
}

/// Prints the results and panics if they differ from the list.
fn judge(specs: &BTreeMap<String, (State, String)>, all_expected: bool) {
    let expected = expected();
    let mut wrong = Vec::new();
    for (name, (state, why)) in specs {
        let due = expected.get(name).map_or(State::Passed, |expected| expected.state);
        match expected.get(name) {
            Some(expected) if *state == due => {
                println!("{state:?} as expected: {name} ({})", expected.reason)
            }
            _ if *state == due => {}
            _ => {
                // gomega prints whole Go structures; the error is at the start.
                let why: String =
                    why.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(400).collect();
                wrong.push(format!("{name}: {state:?}, expected {due:?}: {why}"));
            }
        }
    }
    if all_expected {
        let gone = expected.keys().filter(|name| !specs.contains_key(*name));
        wrong.extend(gone.map(|name| format!("{name}: is listed and is no spec")));
    }
    let count = |wanted| specs.values().filter(|(state, _)| *state == wanted).count();
    println!(
        "critest: {} passed, {} failed, {} skipped",
        count(State::Passed),
        count(State::Failed),
        count(State::Skipped)
    );
    assert!(!specs.is_empty(), "no spec ran");
    assert!(wrong.is_empty(), "{} specs are not as expected:\n{}", wrong.len(), wrong.join("\n"));
}

/// With `CORACLE_CRITEST_FOCUS` set, only specs whose names match this expression run.
///
/// Both runs are one test, because the host ports and host names of the suite are fixed, so that two runs
/// cannot be concurrent.
#[test]
fn critest_over_spdy_then_streaming_over_websocket() {
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
