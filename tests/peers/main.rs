//! `make peer-suites`: the CRI integration tests of containerd, unmodified, against coracle. The program is that of containerd's Go
//! module, which `tests/tools/install peer-suites` builds. What of it does not pass is in `expected.toml` with the reason; a listed
//! test that passes is a failure, too.
//!
//! The suite kills and finds its daemon by the name of its program, waits for something else to start it again, and uses fixed
//! paths below `/run` and `/var/lib`: all of it runs in the namespaces that `tests/cluster/namespaces` makes, where no other
//! daemon is. Each test is a process of its own, and no pod is left to the next one.
#![forbid(unsafe_code)]

mod images;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::ListPodSandboxRequest;
use coracle_tests::ginkgo::{self, Results, State};
use coracle_tests::go_test::{self, List};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use serde_json::{Value, json};

/// The suite, in the search path.
const PROGRAM: &str = "containerd-integration";
/// The CNI plugin and the runtime handler of tests in which something fails.
const PLUGIN: &str = "cni-bridge-fp";
const HANDLER: &str = "runc-fp";
/// The socket of NRI that the suite connects to, and skips these tests without it.
const NRI_SOCKET: &str = "/run/nri-test.sock";
/// A directory that must exist: it is asked whether its file system has ID-mapped mounts.
const CONTAINERD_ROOT: &str = "/var/lib/containerd-test";
/// Time limit of a test. The longest takes about a minute.
const LIMIT: Duration = Duration::from_secs(240);
/// How long the daemon is down after a test killed it: the suite looks once a second whether it is.
const DOWN: Duration = Duration::from_millis(2500);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if std::env::var_os("CORACLE_CLUSTER").is_none() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/namespaces");
        let program = std::env::current_exe().expect("this program has a path");
        let error = Command::new(&script).arg(program).args(&words).exec();
        panic!("{}: {error}", script.display());
    }
    let list = List::read(include_str!("expected.toml"));
    let node = Node::with(Options {
        bridge: true,
        config: format!("[runtime_handlers]\naliases = [\"{HANDLER}\"]\n"),
        ..Options::default()
    });
    change_network(&node);
    symlink(node.nri(), NRI_SOCKET).expect("/run is empty");
    fs::create_dir(CONTAINERD_ROOT).expect("/var/lib is empty");
    let registry = Registry::start(node.folder());
    let mut suite = Suite { images: images::push(&registry, &node), logs: logs(), node };
    let (mut found, mut not_run) = (Results::new(), 0);
    let names = suite.names();
    assert_eq!(list.obsolete(&names), Vec::<&str>::new(), "expected.toml names tests that do not exist");
    for name in names {
        if !words.is_empty() && !words.iter().any(|word| name.contains(word)) {
            continue;
        }
        if list.is_left_out(&name) {
            not_run += 1;
            continue;
        }
        let mut results = suite.run(&name);
        for _ in 1..list.attempts(&name) {
            let passes = suite.run(&name).into_iter().filter(|(_, (state, _))| *state == State::Passed);
            results.extend(passes);
        }
        println!("{name}: {}", ginkgo::counts(&results));
        found.extend(results);
    }
    println!(
        "containerd's tests: {}, {not_run} not run; logs: {}",
        ginkgo::counts(&found),
        suite.logs.display()
    );
    drop(registry);
    suite.node.stop();
    ginkgo::judge(&found, &list.expected(&found), words.is_empty());
    // As Rust's test harness, for `tests/runner`.
    let passed = found.values().filter(|(state, _)| *state == State::Passed).count();
    let ignored = found.len() - passed + not_run;
    println!("test result: ok. {passed} passed; 0 failed; {ignored} ignored");
}

/// Directory of the logs of all tests, emptied.
fn logs() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peer-suites");
    // It may not exist yet.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a directory for logs");
    folder.canonicalize().expect("it exists")
}

/// Makes the node's network that of containerd's tests: IPv6, too, and in the place of the plugin `bridge` one that fails or waits
/// before it as an annotation of the pod asks for.
fn change_network(node: &Node) {
    let file = node.cni().join("10-boat.conflist");
    let mut network: Value =
        serde_json::from_slice(&fs::read(&file).expect("the node's network")).expect("JSON");
    let bridge = &mut network["plugins"][0];
    bridge["type"] = json!(PLUGIN);
    bridge["capabilities"] = json!({ "io.kubernetes.cri.pod-annotations": true });
    let mut add = |key: &str, value| bridge["ipam"][key].as_array_mut().expect("a list").push(value);
    add("ranges", json!([{ "subnet": "fd00:c0::/64" }]));
    add("routes", json!({ "dst": "::/0" }));
    fs::write(file, network.to_string()).expect("the node's network");
    // Found by the name of its file, so that it cannot be a link to one of another name.
    fs::copy(program(PLUGIN), node.plugins().join(PLUGIN)).expect("a copy of the plugin");
}

/// Path of a program in the search path.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.exists())
        .unwrap_or_else(|| panic!("{name} is not in PATH; tests/tools/install peer-suites builds it"))
}

struct Suite {
    node: Node,
    /// File with the names of the images.
    images: PathBuf,
    logs: PathBuf,
}

impl Suite {
    fn command(&self) -> Command {
        let mut command = Command::new(program(PROGRAM));
        command
            .args(["-cri-endpoint", &format!("unix://{}", self.node.socket().display())])
            .args(["-containerd-bin", "coracled", "-image-list"])
            .arg(&self.images)
            .current_dir(self.node.folder())
            .stdin(Stdio::null());
        command
    }

    /// The names of all tests.
    fn names(&self) -> Vec<String> {
        let output = self.command().args(["-test.list", "."]).output().expect("the suite runs");
        assert!(output.status.success(), "{PROGRAM}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter(|line| line.starts_with("Test")).map(str::to_owned).collect()
    }

    /// Runs one test; returns its result, or those of its parts.
    fn run(&mut self, name: &str) -> Results {
        let log = self.logs.join(format!("{name}.log"));
        let file = fs::File::create(&log).expect("a log");
        let child = self
            .command()
            .args(["-test.v", "-test.run", &format!("^{name}$")])
            .stdout(file.try_clone().expect("a second handle"))
            .stderr(file)
            .spawn()
            .expect("the suite runs");
        let status = self.wait(name, child);
        self.remove_pods(name);
        let output = fs::read(&log).expect("it was written");
        let results = go_test::read(name, &String::from_utf8_lossy(&output));
        let has_failed = results.values().any(|(state, _)| *state == State::Failed);
        match status {
            None => go_test::unexpected(name, format!("did not end within {LIMIT:?}")),
            Some(status) if status.success() == has_failed => {
                go_test::unexpected(name, format!("{status}, with the results {results:?}"))
            }
            Some(_) => results,
        }
    }

    /// Waits for a test, and starts the daemon again that it kills. Returns the exit status of a test that ended by itself.
    fn wait(&mut self, name: &str, mut child: Child) -> Option<ExitStatus> {
        let end = Instant::now() + LIMIT;
        let mut down = None;
        loop {
            let status = child.try_wait().expect("it is our child");
            match self.node.exit_status() {
                None => down = None,
                Some(end) => {
                    // Tests end it by SIGTERM or SIGKILL.
                    let is_by_a_test = end.success() || end.signal() == Some(9);
                    assert!(is_by_a_test, "{name}: the daemon ended with {end}:\n{}", self.node.log());
                    if status.is_some() || down.get_or_insert_with(Instant::now).elapsed() > DOWN {
                        self.node.restart();
                    }
                }
            }
            if status.is_some() {
                return status;
            }
            if Instant::now() > end {
                child.kill().expect("it is ours to kill");
                child.wait().expect("it is our child");
                return None;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Removes what a failed test left.
    fn remove_pods(&self, name: &str) {
        let pods = self.node.list_pod_sandbox(ListPodSandboxRequest::default());
        for pod in pods.unwrap_or_else(|error| panic!("after {name}: {error}")).items {
            self.node.remove_pod(&pod.id);
        }
    }
}
