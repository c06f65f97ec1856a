//! `make bench-steps`: the duration of each call of a pod's lifecycle without a tracer, and in a second
//! series under strace the system calls of the daemon and the pod's processes. The counts are those of the
//! median pod; times under strace are not reported, because strace doubles them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    PodSandboxConfig, RemoveContainerRequest, StartContainerRequest, StopContainerRequest,
    StopPodSandboxRequest,
};
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, container, exec, host_pod};

use crate::life::{self, RUNS};
use crate::time::{Percentiles, median};

/// Number of pods of the traced series.
const TRACED: usize = 15;
/// Pause for work after an answer, which belongs to no call.
const PAUSE: Duration = Duration::from_millis(15);

/// Counted system calls, by name and a part of their arguments.
const COUNTED: [(&str, &[&str], &str); 6] = [
    ("fsync", &["fsync", "fdatasync"], ""),
    ("processes", &["clone3", "clone", "vfork"], ""),
    ("programs", &["execve", "execveat"], ""),
    ("mounts", &["mount", "move_mount", "fsmount", "umount2"], ""),
    ("cgroups made", &["mkdir", "mkdirat"], "/sys/fs/cgroup"),
    ("cgroups removed", &["rmdir"], "/sys/fs/cgroup"),
];

/// One call of a lifecycle: its name, start and end.
struct Step {
    name: &'static str,
    begin: Duration,
    end: Duration,
}

/// Prints the tables of a pod on the node's network and of one on the built-in bridge.
pub(crate) fn run() {
    let node = life::bridged();
    let image = node.import_probe();
    for (title, make) in
        [("host network", host_pod as fn(&str) -> PodSandboxConfig), ("built-in bridge", bridge_pod)]
    {
        println!("\n{title}:\n");
        table(&node, &image, make);
    }
    node.stop();
}

fn table(node: &Node, image: &str, make: fn(&str) -> PodSandboxConfig) {
    let lives = |count: usize| -> Vec<Vec<Step>> {
        (0..count).map(|run| one(node, &make(&format!("step{run}")), image)).collect()
    };
    lives(5); // warm
    let timed = lives(RUNS);
    let trace = node.folder().join("trace");
    let tracer = attach(node, &trace);
    let traced = lives(TRACED);
    detach(tracer);
    let calls = calls(&trace, node.pid());
    let heads: Vec<&str> = COUNTED.iter().map(|(name, ..)| *name).collect();
    println!("| call | p50, µs | system calls: daemon | its children | {} |", heads.join(" | "));
    println!("|---|---|---|---|{}", "---|".repeat(COUNTED.len()));
    for (index, step) in timed[0].iter().enumerate() {
        let times: Vec<Duration> = timed.iter().map(|life| life[index].end - life[index].begin).collect();
        let within = |wanted: &dyn Fn(&Call) -> bool| {
            let counts = traced.iter().map(|life| {
                let during = |call: &&Call| call.at >= life[index].begin && call.at < life[index].end;
                calls.iter().filter(during).filter(|call| wanted(call)).count() as f64
            });
            median(counts.collect())
        };
        let counted = COUNTED.map(|(_, names, part)| {
            within(&|call| names.contains(&call.name.as_str()) && call.arguments.contains(part)).to_string()
        });
        println!(
            "| {} | {:.0} | {} | {} | {} |",
            step.name,
            Percentiles::of(&times).p50 * 1000.0,
            within(&|call| call.is_daemon),
            within(&|call| !call.is_daemon),
            counted.join(" | ")
        );
    }
}

/// Runs one pod; returns the time of each call.
fn one(cri: &Cri, pod: &PodSandboxConfig, image: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let config = container("one", image, &["sleep", "forever"], pod);
    let pod_id = timed(&mut steps, "RunPodSandbox", || cri.run_pod(pod));
    let id = timed(&mut steps, "CreateContainer", || cri.create(&pod_id, &config, pod));
    let start = StartContainerRequest { container_id: id.clone() };
    timed(&mut steps, "StartContainer", || cri.start_container(start).expect("start"));
    timed(&mut steps, "ExecSync(true)", || cri.exec_sync(exec(&id, &["true"], 10)).expect("exec"));
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    timed(&mut steps, "StopContainer", || cri.stop_container(stop).expect("stop"));
    let remove = RemoveContainerRequest { container_id: id };
    timed(&mut steps, "RemoveContainer", || cri.remove_container(remove).expect("remove"));
    let stop = StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() };
    timed(&mut steps, "StopPodSandbox", || cri.stop_pod_sandbox(stop).expect("stop"));
    timed(&mut steps, "RemovePodSandbox", || cri.remove_pod(&pod_id));
    steps
}

fn timed<T>(steps: &mut Vec<Step>, name: &'static str, call: impl FnOnce() -> T) -> T {
    // strace prints wall-clock times, to which the calls' times are converted.
    let (since_1970, begun) = (now(), Instant::now());
    let value = call();
    steps.push(Step { name, begin: since_1970, end: since_1970 + begun.elapsed() });
    thread::sleep(PAUSE);
    value
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970")
}

/// The start of a system call in the trace.
struct Call {
    at: Duration,
    is_daemon: bool,
    name: String,
    arguments: String,
}

/// A running strace. Its standard error must be read, otherwise it ends.
struct Tracer {
    process: Child,
    said: BufReader<ChildStderr>,
}

/// Attaches strace to the daemon and its future children.
fn attach(node: &Node, trace: &Path) -> Tracer {
    let mut process = Command::new("strace")
        .args(["-f", "-ttt", "-s", "128", "-p", &node.pid().to_string(), "-o"])
        .arg(trace)
        .stderr(Stdio::piped())
        .spawn()
        .expect("strace runs: tests/tools/install bench");
    let mut said = BufReader::new(process.stderr.take().expect("its errors are piped"));
    let mut first = String::new();
    said.read_line(&mut first).expect("what strace says");
    assert!(first.contains("attached"), "strace: {first}");
    Tracer { process, said }
}

fn detach(mut tracer: Tracer) {
    let pid = tracer.process.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill runs").success());
    std::io::copy(&mut tracer.said, &mut std::io::sink()).expect("the rest of it");
    tracer.process.wait().expect("strace ends");
}

/// The lines of the trace that start a call: `PID SECONDS NAME(ARGUMENTS…`.
fn calls(trace: &Path, daemon: i32) -> Vec<Call> {
    let text = fs::read(trace).expect("a trace");
    let calls: Vec<Call> = String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| {
            let (pid, rest) = line.split_once(' ')?;
            let (seconds, call) = rest.trim_start().split_once(' ')?;
            let (name, arguments) = call.split_once('(')?;
            let is_call =
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            is_call.then_some(Call {
                at: Duration::from_secs_f64(seconds.parse().ok()?),
                is_daemon: pid.parse() == Ok(daemon),
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            })
        })
        .collect();
    assert!(calls.iter().any(|call| call.is_daemon), "strace saw nothing of the daemon");
    calls
}
