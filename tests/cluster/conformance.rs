//! Kubernetes' end-to-end suite, unmodified, on a cluster of one node: its `[Conformance]` specs, those that share the
//! node in parallel and the serial ones after them. What cannot pass here is listed in
//! `expected.toml` with the reason; a listed spec that passes is a failure, too.
//!
//! The output is in `target/conformance`, or in `target/conformance-part` if the specs are limited: for each part
//! `e2e.log` and `junit_01.xml`, as the conformance programme of the CNCF expects them, and a list of the results. With
//! `PROCS=1` there is one part with all specs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::registry::Registry;
use serde_json::Value;

use crate::cluster::{Cluster, tools};

/// Processes of the parallel part, if `PROCS` is not set.
const PROCESSES: u32 = 4;
/// Time limit of a part, for ginkgo.
const PART_LIMIT: &str = "3h";

/// Result of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Passed,
    Failed,
    Skipped,
}

type Results = BTreeMap<String, (State, String)>;

/// A part of the run.
struct Part {
    name: &'static str,
    skip: Option<&'static str>,
    focus: String,
    processes: u32,
}

/// Runs all parts; panics if the results differ from the list. `FOCUS` limits the specs to those whose names match this
/// expression.
pub(crate) fn run() {
    let processes = std::env::var("PROCS").map_or(PROCESSES, |text| text.parse().expect("PROCS is a number"));
    let limit = std::env::var("FOCUS").ok().filter(|text| !text.is_empty());
    let focus = |more: &str| match &limit {
        // ginkgo joins several expressions by "or".
        Some(limit) => format!(r"({limit}).*{more}\[Conformance\]"),
        None => format!(r"{more}\[Conformance\]"),
    };
    let parts = if processes == 1 {
        vec![Part { name: "all", skip: None, focus: focus(""), processes }]
    } else {
        vec![
            Part { name: "parallel", skip: Some(r"\[Serial\]"), focus: focus(""), processes },
            Part { name: "serial", skip: None, focus: focus(r"\[Serial\].*"), processes: 1 },
        ]
    };
    let name = if limit.is_some() { "../target/conformance-part" } else { "../target/conformance" };
    let output = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let _ = fs::remove_dir_all(&output); // of an earlier run
    let cluster = Cluster::start(&["images-e2e.tar"]);
    let registry = start_registry(&cluster);
    let mut results = Results::new();
    for part in parts {
        let folder = output.join(part.name);
        fs::create_dir_all(&folder).expect("a folder");
        let found = run_part(&cluster, &part, &folder);
        cluster.say(&format!("{}: {}", part.name, counts(&found)));
        results.extend(found);
    }
    let wrong = judge(&results, limit.is_none());
    println!("conformance: {}", counts(&results));
    println!("logs and reports are in {}", output.display());
    drop(registry);
    cluster.stop();
    assert!(!results.is_empty(), "no spec ran");
    assert!(wrong.is_empty(), "{} specs are not as expected:\n{}", wrong.len(), wrong.join("\n"));
}

/// Starts a registry in the place of registry.k8s.io, with the one image that a spec pulls even if it is present.
fn start_registry(cluster: &Cluster) -> Registry {
    let registry = Registry::start(cluster.node.folder());
    let entries = [
        Entry::file("data.json", br#"{"image": "kitten.jpg"}"#),
        Entry::directory("etc", 0o755),
        // The spec looks for the words.
        Entry::file("etc/os-release", b"PRETTY_NAME=\"in the place of Alpine Linux\"\n"),
    ];
    let image = Image::of(vec![Layer::new(&entries, Compression::Gzip)]);
    registry.push(&image, "e2e-test-images/kitten", "1.8");
    let mirrors = format!("mirrors:\n  registry.k8s.io: {{endpoint: [\"http://{}\"]}}\n", registry.address());
    fs::write(cluster.node.folder().join("registries.yaml"), mirrors).expect("registries.yaml");
    registry
}

fn run_part(cluster: &Cluster, part: &Part, folder: &Path) -> Results {
    let log = fs::File::create(folder.join("e2e.log")).expect("a log");
    let mut command = Command::new(tools().join("bin/ginkgo"));
    command
        .args(["--no-color", "--keep-going", "--timeout", PART_LIMIT, "--json-report=report.json"])
        .arg(format!("--output-dir={}", folder.display()))
        .arg(format!("--procs={}", part.processes))
        .arg(format!("--focus={}", part.focus))
        .args(part.skip.map(|skip| format!("--skip={skip}")))
        .arg(tools().join("e2e.test"))
        .args(["--", "--provider=skeleton", "--num-nodes=1", "--disable-log-dump"])
        .arg(format!("--kubeconfig={}", cluster.kubeconfig().display()))
        .arg(format!("--kubectl-path={}", tools().join("bin/kubectl").display()))
        .arg(format!("--report-dir={}", folder.display()))
        .env("HOME", cluster.node.folder())
        .env("KUBECONFIG", cluster.kubeconfig())
        .current_dir(cluster.node.folder())
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a descriptor"))
        .stderr(log);
    let status = command.status().expect("ginkgo runs");
    let report = folder.join("report.json");
    let text = fs::read(&report).unwrap_or_else(|error| {
        panic!("{}: {error}; ginkgo ended with {status}; see e2e.log beside it", report.display())
    });
    let suites: Value = serde_json::from_slice(&text).expect("ginkgo's report is JSON");
    let specs = suites[0]["SpecReports"].as_array().expect("the report has specs");
    let found: Results = specs.iter().filter_map(spec).collect();
    // The report lists every spec of the suite, most of them as not selected.
    fs::remove_file(&report).expect("a file");
    let lines: Vec<String> = found.iter().map(|(name, (state, _))| format!("{state:?}: {name}\n")).collect();
    fs::write(folder.join("results.txt"), lines.concat()).expect("a file");
    found
}

/// Name and result of a spec that was selected.
fn spec(report: &Value) -> Option<(String, (State, String))> {
    let leaf = report["LeafNodeText"].as_str().filter(|text| !text.is_empty())?;
    let levels = report["ContainerHierarchyTexts"].as_array()?.iter().filter_map(Value::as_str);
    let name: Vec<&str> = levels.chain([leaf]).collect();
    let why = report["Failure"]["Message"].as_str().unwrap_or_default();
    let state = match report["State"].as_str()? {
        "passed" => State::Passed,
        // A spec that is not selected has no message; one that skips itself has one.
        "skipped" | "pending" if why.is_empty() => return None,
        "skipped" | "pending" => State::Skipped,
        _ => State::Failed,
    };
    Some((name.join(" "), (state, why.to_owned())))
}

fn counts(results: &Results) -> String {
    let count = |wanted| results.values().filter(|(state, _)| *state == wanted).count();
    let (passed, failed, skipped) = (count(State::Passed), count(State::Failed), count(State::Skipped));
    format!("{passed} passed, {failed} failed, {skipped} skipped")
}

/// State and reason of each spec in `expected.toml`.
fn expected() -> BTreeMap<String, (State, String)> {
    let table: toml::Table = include_str!("expected.toml").parse().expect("expected.toml is TOML");
    let mut all = BTreeMap::new();
    let mut sections = vec![("fails", State::Failed), ("skips", State::Skipped)];
    if PathBuf::from("/sys/fs/cgroup/memory").exists() {
        sections.push(("fails_on_cgroup_v1", State::Failed));
        sections.push(("skips_on_cgroup_v1", State::Skipped));
    }
    for (section, state) in sections {
        for (spec, reason) in table.get(section).and_then(toml::Value::as_table).into_iter().flatten() {
            let reason = reason.as_str().filter(|reason| reason.len() > 20).expect("each has a reason");
            all.insert(spec.clone(), (state, reason.to_owned()));
        }
    }
    all
}

/// Prints what is as listed; returns what is not. With `all`, each listed spec must have been selected.
fn judge(results: &Results, all: bool) -> Vec<String> {
    let expected = expected();
    let mut wrong = Vec::new();
    for (name, (state, why)) in results {
        let due = expected.get(name).map_or(State::Passed, |(state, _)| *state);
        match expected.get(name) {
            Some((_, reason)) if *state == due => println!("{state:?} as expected: {name} ({reason})"),
            _ if *state == due => {}
            _ => {
                let why: String =
                    why.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(400).collect();
                wrong.push(format!("{name}: {state:?}, expected {due:?}: {why}"));
            }
        }
    }
    if all {
        let gone = expected.keys().filter(|name| !results.contains_key(*name));
        wrong.extend(gone.map(|name| format!("{name}: is listed and was not run")));
    }
    wrong
}
