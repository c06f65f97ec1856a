//! Kubernetes' end-to-end suite, unmodified, on a cluster of one node: its `[Conformance]` specs, those that share the
//! node in parallel and the serial ones after them. What cannot pass here is listed in
//! `expected.toml` with the reason; a listed spec that passes is a failure, too.
//!
//! The output is in `target/conformance`, or in `target/conformance-part` if the specs are limited: for each part
//! `e2e.log` and `junit_01.xml`, as the conformance programme of the CNCF expects them, and a list of the results. With
//! `PROCS=1` there is one part with all specs.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use coracle_tests::ginkgo::{self, Expected, Results, State};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::registry::Registry;

use crate::cluster::{Cluster, tools};

/// Processes of the parallel part, if `PROCS` is not set.
const PROCESSES: u32 = 4;
/// Time limit of a part, for ginkgo.
const PART_LIMIT: &str = "3h";

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
        cluster.say(&format!("{}: {}", part.name, ginkgo::counts(&found)));
        results.extend(found);
    }
    println!("conformance: {}", ginkgo::counts(&results));
    println!("logs and reports are in {}", output.display());
    drop(registry);
    cluster.stop();
    ginkgo::judge(&results, &expected(), limit.is_none());
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
    let found = ginkgo::results(&report, &["skipped", "pending"]).unwrap_or_else(|error| {
        panic!("{}: {error}; ginkgo ended with {status}; see e2e.log beside it", report.display())
    });
    // The report lists every spec of the suite, most of them as not selected.
    fs::remove_file(&report).expect("a file");
    let lines: Vec<String> = found.iter().map(|(name, (state, _))| format!("{state:?}: {name}\n")).collect();
    fs::write(folder.join("results.txt"), lines.concat()).expect("a file");
    found
}

/// State and reason of each spec in `expected.toml`.
fn expected() -> Expected {
    let mut sections = vec![("fails", State::Failed), ("skips", State::Skipped)];
    if Path::new("/sys/fs/cgroup/memory").exists() {
        sections.push(("fails_on_cgroup_v1", State::Failed));
        sections.push(("skips_on_cgroup_v1", State::Skipped));
    }
    ginkgo::expected(include_str!("expected.toml"), &sections)
}
