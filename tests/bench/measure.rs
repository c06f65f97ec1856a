//! Resource usage of an idle daemon, and of one with as many pods as a small node has.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ListContainerStatsRequest, ListContainersRequest, ListPodSandboxRequest, ListPodSandboxStatsRequest,
    VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::{self, Node, Options};
use coracle_tests::request::{container, host_pod, share_pids};

use crate::Row;
use crate::life::RUNS;
use crate::time::Percentiles;

/// Number of pods of the full node.
const CROWD: usize = 50;
/// Number of existing pods when the start time of a daemon is measured.
const BIG_CROWD: usize = 250;
/// Number of requests before the idle daemon is measured.
const REQUESTS: usize = 1000;
/// Time until a daemon has released memory after work.
pub(crate) const AT_REST: Duration = Duration::from_secs(11);

/// Memory of the daemon in KiB; signed, for differences.
pub(crate) struct Memory {
    /// PSS.
    pub(crate) pss: i64,
    /// Anonymous memory.
    pub(crate) anonymous: i64,
}

impl Memory {
    /// Formats the growth since `before`.
    pub(crate) fn since(&self, before: &Memory) -> String {
        format!("PSS {:+} KiB, anonymous {:+} KiB", self.pss - before.pss, self.anonymous - before.anonymous)
    }
}

/// The daemon's memory ten seconds after the last work, when unused program code was released
/// (runtime/daemon/src/reclaim.rs).
pub(crate) fn settled(node: &Node) -> Memory {
    std::thread::sleep(AT_REST);
    Memory { pss: host::pss_kib(node.pid()) as i64, anonymous: host::anonymous_kib(node.pid()) as i64 }
}

/// Sends requests of every common kind.
pub(crate) fn ask(cri: &Cri) {
    for _ in 0..REQUESTS / 3 + 1 {
        cri.version(VersionRequest::default()).expect("version");
        cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
        cri.list_containers(ListContainersRequest::default()).expect("list");
    }
}

/// Starts a node with this configuration, whose state directory is on a tmpfs as on a machine with systemd.
pub(crate) fn node(config: &str) -> Node {
    Node::with(Options { config: config.into(), has_tmpfs_state: true, ..Options::default() })
}

/// Measures the daemon without pods after requests.
pub(crate) fn idle() -> Vec<Row> {
    let node = node("");
    ask(&node);
    let at_once = host::pss_kib(node.pid()) as f64 / 1024.0;
    let settled = settled(&node);
    node.stop();
    let measured = format!(
        "{:.2} MB ({:.2} anonymous), {at_once:.2} MB right after them",
        settled.pss as f64 / 1024.0,
        settled.anonymous as f64 / 1024.0
    );
    vec![Row { what: "daemon idle PSS, after 1000 requests", budget: "2 MB", measured, floor: None }]
}

/// Runs a pod on the node's network with one container for each number.
fn fill(node: &Node, image: &str, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let pod = host_pod(&format!("crowd{number}"));
        let pod_id = node.run_pod(&pod);
        node.run_container(&pod_id, &container("one", image, &["sleep", "forever"], &pod), &pod);
    }
}

/// Measures many pods: memory, and the start time of a new daemon.
pub(crate) fn crowd() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut node = node("");
    let empty = restarts(&mut node);
    let image = node.import_probe();
    fill(&node, &image, 0..CROWD);
    let pods = pss_of_pods(&node);
    let daemon = host::pss_kib(node.pid());
    let everything = format!("{:.2} MB", (pods + daemon) as f64 / 1024.0);
    let each = format!("{:.1} KiB", pods as f64 / CROWD as f64);
    rows.push(Row {
        what: "all coracle processes with 50 pods, PSS",
        budget: "6 MB",
        measured: everything,
        floor: None,
    });
    rows.push(Row { what: "per pod, PSS of our processes", budget: "64 KiB", measured: each, floor: None });
    let before = host::cpu_time(node.pid());
    // The measured quantity is CPU time over this period.
    std::thread::sleep(Duration::from_secs(10));
    let used = host::cpu_time(node.pid()) - before;
    let measured = format!("{} ms in 10 s", used.as_millis());
    rows.push(Row { what: "CPU with 50 pods and no calls", budget: "0", measured, floor: None });
    watched(&node, &mut rows);
    let full = restarts(&mut node);
    fill(&node, &image, CROWD..BIG_CROWD);
    let fuller = restarts(&mut node);
    let [empty, full, fuller] = [empty, full, fuller].map(|times| Percentiles::of(&times).to_string());
    let measured = format!("{empty} / {full} / {fuller}");
    let what = "start to first answer with 0 / 50 / 250 pods";
    rows.push(Row { what, budget: "5 / 30 / 100 ms", measured, floor: None });
    node.stop();
    rows.push(shared_pids());
    rows
}

/// Measures the memory of pods with a shared PID namespace, which have a PID 1 in addition to the monitor.
fn shared_pids() -> Row {
    let node = node("");
    let image = node.import_probe();
    for index in 0..CROWD {
        let mut pod = host_pod(&format!("shared{index}"));
        share_pids(&mut pod);
        let pod_id = node.run_pod(&pod);
        node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    }
    let each = format!("{:.1} KiB", pss_of_pods(&node) as f64 / CROWD as f64);
    node.stop();
    Row { what: "the same with a shared PID namespace", budget: "64 KiB", measured: each, floor: None }
}

/// PSS of monitors and of PID 1 of shared PID namespaces, in KiB.
pub(crate) fn pss_of_pods(node: &Node) -> u64 {
    node.pod_processes().iter().map(|process| host::pss_kib(process.pid)).sum()
}

/// Measures the regular calls of a kubelet on a full node.
fn watched(node: &Node, rows: &mut Vec<Row>) {
    const SECONDS: u64 = 60;
    let pss = host::pss_kib(node.pid());
    let before = host::cpu_time(node.pid());
    let (mut times, begun) = (Vec::new(), Instant::now());
    for second in 0..SECONDS {
        if let Some(took) = look(node, second) {
            times.push(took);
        }
        let next = Duration::from_secs(second + 1);
        std::thread::sleep(next.saturating_sub(begun.elapsed()));
    }
    let used = host::cpu_time(node.pid()) - before;
    let grown = host::pss_kib(node.pid()) as i64 - pss as i64;
    let measured =
        format!("{:.3} s (daemon and the children it waited for), PSS {grown:+} KiB", used.as_secs_f64());
    rows.push(Row {
        what: "a minute of relists and stats with 50 pods, CPU",
        budget: "0.15 s",
        measured,
        floor: None,
    });
    let half_an_hour = || {
        for second in 0..30 * SECONDS {
            look(node, second);
        }
        settled(node)
    };
    let (before, first, second) = (settled(node), half_an_hour(), half_an_hour());
    // A leak would also grow in the second round.
    let measured = format!("{}; by another: {}", first.since(&before), second.since(&first));
    rows.push(Row {
        what: "growth by half an hour's calls of that kind, in a row",
        budget: "0",
        measured,
        floor: None,
    });
    times.extend((0..RUNS).map(|_| list_stats(node)));
    let measured = Percentiles::of(&times).to_string();
    rows.push(Row {
        what: "ListContainerStats of 50 containers, p50 / p99",
        budget: "3 ms",
        measured,
        floor: None,
    });
}

/// The kubelet's calls of one second; in every tenth also the statistics, whose duration is returned.
fn look(cri: &Cri, second: u64) -> Option<Duration> {
    cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
    cri.list_containers(ListContainersRequest::default()).expect("list");
    second.is_multiple_of(10).then(|| {
        let took = list_stats(cri);
        cri.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats");
        took
    })
}

/// Duration of ListContainerStats.
pub(crate) fn list_stats(cri: &Cri) -> Duration {
    let begin = Instant::now();
    cri.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
    begin.elapsed()
}

/// Start times of a new daemon until its first answer.
pub(crate) fn restarts(node: &mut Node) -> Vec<Duration> {
    (0..10)
        .map(|_| {
            node.kill9();
            let begin = Instant::now();
            node.spawn();
            first_answer(node, &node.socket());
            begin.elapsed()
        })
        .collect()
}

/// Waits for the first answer of a daemon that was just started; polls often enough not to affect the result.
pub(crate) fn first_answer(cri: &Cri, socket: &Path) {
    const LOOK_AGAIN: Duration = Duration::from_micros(100);
    let end = Instant::now() + host::patience();
    while UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < end, "{}: no process listens", socket.display());
        std::thread::sleep(LOOK_AGAIN);
    }
    // The client's first call may fail on its old connection.
    while cri.version(VersionRequest::default()).is_err() {
        assert!(Instant::now() < end, "{}: no answer", socket.display());
    }
}

/// Measures the size of the three programs; the worker is in that of the command line.
pub(crate) fn size() -> Vec<Row> {
    let sizes = ["coracled", "coracle", "coracle-pod"]
        .map(|name| std::fs::metadata(node::binaries().join(name)).map_or(0, |about| about.len()));
    let kib = sizes.map(|bytes| bytes / 1024);
    let all = sizes.iter().sum::<u64>() as f64 / 1e6;
    let measured = format!("{all:.2} MB ({} + {} + {} KiB)", kib[0], kib[1], kib[2]);
    vec![Row { what: "installed size, all programs", budget: "8.76 MB", measured, floor: None }]
}
