//! What a daemon costs that is alone, and one with as many pods as a small node has.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ListContainerStatsRequest, ListContainersRequest, ListPodSandboxRequest, ListPodSandboxStatsRequest,
    VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::{self, Node};
use coracle_tests::request::{container, host_pod, share_pids};

use crate::Row;
use crate::life::RUNS;
use crate::time::Percentiles;

/// Pods of the crowded node.
const CROWD: usize = 50;
/// Requests before the idle daemon is measured.
const REQUESTS: usize = 1000;
/// From work until a daemon has let go of what it was for; the passing of time is what is measured.
pub(crate) const AT_REST: Duration = Duration::from_secs(11);

/// Memory of the daemon in KiB; signed, for differences.
pub(crate) struct Memory {
    /// PSS.
    pub(crate) pss: i64,
    /// What it wrote itself.
    pub(crate) anonymous: i64,
}

impl Memory {
    /// What has been added since `before`.
    pub(crate) fn since(&self, before: &Memory) -> String {
        format!("PSS {:+} KiB, anonymous {:+} KiB", self.pss - before.pss, self.anonymous - before.anonymous)
    }
}

/// The daemon's memory once code that a burst has mapped is let go of (runtime/daemon/src/settle.rs): ten seconds after it began.
pub(crate) fn settled(node: &Node) -> Memory {
    std::thread::sleep(AT_REST);
    Memory { pss: host::pss_kib(node.pid()) as i64, anonymous: host::anonymous_kib(node.pid()) as i64 }
}

/// Requests of every common kind.
pub(crate) fn ask(cri: &Cri) {
    for _ in 0..REQUESTS / 3 + 1 {
        cri.version(VersionRequest::default()).expect("version");
        cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
        cri.list_containers(ListContainersRequest::default()).expect("list");
    }
}

/// The daemon alone after requests.
pub(crate) fn idle() -> Vec<Row> {
    let node = Node::start();
    ask(&node);
    let at_once = host::pss_kib(node.pid()) as f64 / 1024.0;
    let settled = settled(&node);
    node.stop();
    let measured = format!(
        "{:.2} MB ({:.2} anonymous), {at_once:.2} MB right after them",
        settled.pss as f64 / 1024.0,
        settled.anonymous as f64 / 1024.0
    );
    vec![Row { what: "daemon idle PSS, after 1000 requests", budget: "2 MB", measured }]
}

/// Many pods at once: memory, and how fast a new daemon finds them.
pub(crate) fn crowd() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut node = Node::start();
    let empty = restarts(&mut node);
    let image = node.import_probe();
    for index in 0..CROWD {
        let pod = host_pod(&format!("crowd{index}"));
        let pod_id = node.run_pod(&pod);
        node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    }
    let pods = pss_of_pods(&node);
    let daemon = host::pss_kib(node.pid());
    let everything = format!("{:.2} MB", (pods + daemon) as f64 / 1024.0);
    let each = format!("{:.1} KiB", pods as f64 / CROWD as f64);
    rows.push(Row { what: "all coracle processes with 50 pods, PSS", budget: "6 MB", measured: everything });
    rows.push(Row { what: "per pod, PSS of our processes", budget: "64 KiB", measured: each });
    let before = host::cpu_time(node.pid());
    // The passing of time is what is measured.
    std::thread::sleep(Duration::from_secs(10));
    let used = host::cpu_time(node.pid()) - before;
    let measured = format!("{} ms in 10 s", used.as_millis());
    rows.push(Row { what: "CPU with 50 pods and no calls", budget: "0", measured });
    watched(&node, &mut rows);
    let full = restarts(&mut node);
    let measured = format!("{} / {}", Percentiles::of(&empty), Percentiles::of(&full));
    rows.push(Row { what: "start to first answer with 0 / 50 pods", budget: "5 / 30 ms", measured });
    node.stop();
    rows.push(shared_pids());
    rows
}

/// Memory of pods whose containers share a PID namespace: they have a pid 1 beside the monitor.
fn shared_pids() -> Row {
    let node = Node::start();
    let image = node.import_probe();
    for index in 0..CROWD {
        let mut pod = host_pod(&format!("shared{index}"));
        share_pids(&mut pod);
        let pod_id = node.run_pod(&pod);
        node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    }
    let each = format!("{:.1} KiB", pss_of_pods(&node) as f64 / CROWD as f64);
    node.stop();
    Row { what: "the same with a shared PID namespace", budget: "64 KiB", measured: each }
}

/// Monitors, and the first processes of PID namespaces that containers share.
fn pss_of_pods(node: &Node) -> u64 {
    node.pod_processes().iter().map(|process| host::pss_kib(process.pid)).sum()
}

/// What a kubelet asks of a crowded node all day long.
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
    rows.push(Row { what: "a minute of relists and stats with 50 pods, CPU", budget: "0.15 s", measured });
    let half_an_hour = || {
        for second in 0..30 * SECONDS {
            look(node, second);
        }
        settled(node)
    };
    let (before, first, second) = (settled(node), half_an_hour(), half_an_hour());
    // As after a storm of pulls: a leak would grow with the second, too.
    let measured = format!("{}; by another: {}", first.since(&before), second.since(&first));
    rows.push(Row { what: "growth by half an hour's calls of that kind, in a row", budget: "0", measured });
    times.extend((0..RUNS).map(|_| list_stats(node)));
    let measured = Percentiles::of(&times).to_string();
    rows.push(Row { what: "ListContainerStats of 50 containers, p50 / p99", budget: "3 ms", measured });
}

/// The kubelet's calls of one second; every tenth brings statistics, whose time is given.
fn look(cri: &Cri, second: u64) -> Option<Duration> {
    cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
    cri.list_containers(ListContainersRequest::default()).expect("list");
    second.is_multiple_of(10).then(|| {
        let took = list_stats(cri);
        cri.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats");
        took
    })
}

/// How long ListContainerStats takes.
pub(crate) fn list_stats(cri: &Cri) -> Duration {
    let begin = Instant::now();
    cri.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
    begin.elapsed()
}

/// How long a new daemon takes until it answers, several times.
fn restarts(node: &mut Node) -> Vec<Duration> {
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

/// Waits until a daemon that was just started answers, and looks as often as makes no difference to how long that takes.
pub(crate) fn first_answer(cri: &Cri, socket: &Path) {
    const LOOK_AGAIN: Duration = Duration::from_micros(100);
    let end = Instant::now() + host::patience();
    while UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < end, "{}: nobody listens", socket.display());
        std::thread::sleep(LOOK_AGAIN);
    }
    // The client's first call may find that its old connection is gone.
    while cri.version(VersionRequest::default()).is_err() {
        assert!(Instant::now() < end, "{}: nobody answers", socket.display());
    }
}

/// The three programs' files.
pub(crate) fn size() -> Vec<Row> {
    let sizes = ["coracle", "coracle-pod", "coracle-worker"]
        .map(|name| std::fs::metadata(node::binaries().join(name)).map_or(0, |about| about.len()));
    let kib = sizes.map(|bytes| bytes / 1024);
    let all = sizes.iter().sum::<u64>() as f64 / 1e6;
    let measured = format!("{all:.2} MB ({} + {} + {} KiB)", kib[0], kib[1], kib[2]);
    vec![Row { what: "installed size, all programs", budget: "8 MB", measured }]
}
