//! Kubernetes' end-to-end suite, unmodified, on a cluster of one node: its `[Conformance]` specs, those that share the
//! node in parallel and the serial ones after them. What cannot pass here is listed in
//! `expected.toml` with the reason; a listed spec that passes is a failure, too.
//!
//! The output is in `target/conformance`, or in `target/conformance-part` if the specs are limited: for each part
//! `e2e.log` and `junit_01.xml`, as the conformance programme of the CNCF expects them, and a list of the results. With
//! `PROCS=1` there is one part with all specs.

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tests::ginkgo::{self, Expected, Results, State};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::cluster::{Cluster, target, tools};
use crate::usage;

/// Processes of the parallel part, if `PROCS` is not set.
const PROCESSES: u32 = 4;
/// Time limit of a part, in the form of ginkgo's flag; in a guest, too.
pub(crate) const PART_LIMIT: &str = "3h";
/// Time limit of the sample outside of a guest, where it takes two minutes.
const SAMPLE_LIMIT: &str = "20m";
/// The least number of specs in the sample: fewer mean that names have changed.
const SAMPLE_LEAST: usize = 45;

/// The archive of the suite's images, in the directory of [`tools`].
const IMAGES: &str = "images-e2e.tar";
/// Specs that `make test` runs: what a runtime does for pods, without those that wait for minutes.
const SAMPLE: &str = r"\[sig-node\] (Pods|Container Runtime|Container Lifecycle Hook|Security Context|PreStop|Ephemeral Containers|InitContainer|Sysctls|RuntimeClass|Downward API).*\[Conformance\]";

/// A part of a run: the specs that match all of these.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) skip: Option<&'static str>,
    /// Labels of ginkgo.
    pub(crate) labels: Option<&'static str>,
    pub(crate) focus: String,
    pub(crate) processes: u32,
    /// In the form of ginkgo's flag.
    pub(crate) time_limit: &'static str,
}

/// A suite and how it is started.
pub(crate) struct Suite<'a> {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(&'static str, PathBuf)>,
    /// Working directory.
    pub(crate) directory: &'a Path,
}

/// Runs all parts; panics if the results differ from the list. `FOCUS` limits the specs to those whose names match this
/// expression.
pub(crate) fn run() {
    let (processes, limit) = (processes(), limit());
    let focus = |more: &str| match &limit {
        // ginkgo joins several expressions by "or".
        Some(limit) => format!(r"({limit}).*{more}\[Conformance\]"),
        None => format!(r"{more}\[Conformance\]"),
    };
    let parts = if processes == 1 {
        vec![Part {
            name: "all",
            skip: None,
            labels: None,
            focus: focus(""),
            processes,
            time_limit: PART_LIMIT,
        }]
    } else {
        vec![
            Part {
                name: "parallel",
                skip: Some(r"\[Serial\]"),
                labels: None,
                focus: focus(""),
                processes,
                time_limit: PART_LIMIT,
            },
            Part {
                name: "serial",
                skip: None,
                labels: None,
                focus: focus(r"\[Serial\].*"),
                processes: 1,
                time_limit: PART_LIMIT,
            },
        ]
    };
    let output = output(if limit.is_some() { "conformance-part" } else { "conformance" });
    let cluster = Cluster::start(&[IMAGES]);
    let registry = start_registry(&cluster.node);
    let suite = suite(&cluster);
    let mut results = Results::new();
    for part in parts {
        let found = run_part(&suite, &part, &output);
        cluster.say(&format!("{}: {}", part.name, ginkgo::counts(&found)));
        results.extend(found);
    }
    println!("conformance: {}", ginkgo::counts(&results));
    println!("logs and reports are in {}", output.display());
    drop(registry);
    cluster.stop();
    ginkgo::judge(&results, &expected(include_str!("expected.toml")), limit.is_none());
}

/// Uses a cluster like a user, then runs the specs of [`SAMPLE`] on it. The last line that it prints is that of a suite, for
/// `tests/runner`.
pub(crate) fn sample() {
    let output = output("conformance-sample");
    let mut cluster = Cluster::start(&[IMAGES]);
    usage::run_on(&mut cluster);
    let part = Part {
        name: "sample",
        // A spec that updates a pod 500 times takes four minutes.
        skip: Some(r"\[Serial\]|\[Slow\]|issue 500 podspec updates"),
        labels: None,
        focus: SAMPLE.into(),
        processes: processes(),
        time_limit: if host::slowness() == 1 { SAMPLE_LIMIT } else { PART_LIMIT },
    };
    let results = run_part(&suite(&cluster), &part, &output);
    cluster.say(&format!("conformance, a sample: {}", ginkgo::counts(&results)));
    println!("logs and reports are in {}", output.display());
    ginkgo::judge(&results, &expected(include_str!("expected.toml")), false);
    let passed = results.values().filter(|(state, _)| *state == State::Passed).count();
    assert!(passed >= SAMPLE_LEAST, "{passed} specs of the sample passed");
    cluster.stop();
    println!("test result: ok. {} passed; 0 failed", passed + 1);
}

/// Path of the output of a run in `target`; removes that of an earlier run.
pub(crate) fn output(name: &str) -> PathBuf {
    let output = target().join(name);
    let _ = fs::remove_dir_all(&output); // of an earlier run
    output
}

/// The end-to-end suite against this cluster.
fn suite(cluster: &Cluster) -> Suite<'_> {
    let kubeconfig = cluster.kubeconfig();
    Suite {
        program: tools().join("e2e.test"),
        arguments: vec![
            "--provider=skeleton".into(),
            "--num-nodes=1".into(),
            "--disable-log-dump".into(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--kubectl-path={}", tools().join("bin/kubectl").display()),
        ],
        environment: vec![("KUBECONFIG", kubeconfig)],
        directory: cluster.node.folder(),
    }
}

/// Number of processes of parallel parts: `PROCS`.
pub(crate) fn processes() -> u32 {
    std::env::var("PROCS").map_or(PROCESSES, |text| text.parse().expect("PROCS is a number"))
}

/// The expression that limits the specs: `FOCUS`.
pub(crate) fn limit() -> Option<String> {
    std::env::var("FOCUS").ok().filter(|text| !text.is_empty())
}

/// Starts a registry in the place of registry.k8s.io, with the one image that a spec pulls even if it is present.
pub(crate) fn start_registry(node: &Node) -> Registry {
    let registry = Registry::start(node.folder());
    let entries = [
        Entry::file("data.json", br#"{"image": "kitten.jpg"}"#),
        Entry::directory("etc", 0o755),
        // The spec looks for the words.
        Entry::file("etc/os-release", b"PRETTY_NAME=\"in the place of Alpine Linux\"\n"),
    ];
    let image = Image::of(vec![Layer::new(&entries, Compression::Gzip)]);
    registry.push(&image, "e2e-test-images/kitten", "1.8");
    let mirrors = format!("mirrors:\n  registry.k8s.io: {{endpoint: [\"http://{}\"]}}\n", registry.address());
    fs::write(node.folder().join("registries.yaml"), mirrors).expect("registries.yaml");
    registry
}

/// Runs a part of a suite. Its output is in the directory of its name in `output`.
pub(crate) fn run_part(suite: &Suite<'_>, part: &Part, output: &Path) -> Results {
    let folder = output.join(part.name);
    fs::create_dir_all(&folder).expect("a folder");
    let log = fs::File::create(folder.join("e2e.log")).expect("a log");
    let mut command = Command::new(tools().join("bin/ginkgo"));
    command
        .args(["--no-color", "--keep-going", "--timeout", part.time_limit, "--json-report=report.json"])
        .arg(format!("--output-dir={}", folder.display()))
        .arg(format!("--procs={}", part.processes))
        .arg(format!("--focus={}", part.focus))
        .args(part.skip.map(|skip| format!("--skip={skip}")))
        .args(part.labels.map(|labels| format!("--label-filter={labels}")))
        .arg(&suite.program)
        .arg("--")
        .args(&suite.arguments)
        .arg(format!("--report-dir={}", folder.display()))
        .env("HOME", suite.directory)
        .envs(suite.environment.iter().cloned())
        .current_dir(suite.directory)
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

/// State and reason of each spec in a list like `expected.toml`.
pub(crate) fn expected(text: &str) -> Expected {
    let mut sections = vec![("fails", State::Failed), ("skips", State::Skipped)];
    if Path::new("/sys/fs/cgroup/memory").exists() {
        sections.push(("fails_on_cgroup_v1", State::Failed));
        sections.push(("skips_on_cgroup_v1", State::Skipped));
    }
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    for (section, least) in [("skips_below_3_cpus", 3), ("skips_below_4_cpus", 4)] {
        if cpus < least {
            sections.push((section, State::Skipped));
        }
    }
    if !has_dummy_links() {
        sections.push(("fails_without_dummy_links", State::Failed));
    }
    if !has_nfs() {
        sections.push(("fails_without_nfs", State::Failed));
    }
    ginkgo::expected(text, &sections)
}

/// Whether this kernel has links of the type `dummy` (CONFIG_DUMMY).
fn has_dummy_links() -> bool {
    let ip = |words: &str| Command::new("ip").args(words.split(' ')).stderr(Stdio::null()).status();
    let is_made = ip("link add probe0 type dummy").is_ok_and(|status| status.success());
    is_made && ip("link delete probe0").is_ok_and(|status| status.success())
}

/// Whether this machine can mount NFS, and its kernel can serve it, of which modules are loaded here.
fn has_nfs() -> bool {
    let knows = |kind: &str| {
        let place = std::env::temp_dir().join(format!("{kind}-probe"));
        fs::create_dir_all(&place).expect("a directory");
        let done = mount(Some("none"), &place, Some(kind), MsFlags::empty(), None::<&str>);
        if done.is_ok() {
            umount2(&place, MntFlags::MNT_DETACH).expect("it was mounted");
        }
        fs::remove_dir(&place).expect("the directory");
        // Other errors are those of a type that exists: nfs wants options.
        done != Err(Errno::ENODEV)
    };
    Path::new("/sbin/mount.nfs").exists() && knows("nfs") && knows("nfsd")
}
