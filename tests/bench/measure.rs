//! The measurements, each on a node of its own, in the order of design.md's table.

use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ListContainerStatsRequest, ListContainersRequest, ListPodSandboxRequest, ListPodSandboxStatsRequest,
    RemoveContainerRequest, StopContainerRequest, StopPodSandboxRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::{self, Node};
use coracle_tests::request::{container, exec, host_pod};

use crate::{Row, pulls};

/// Runs of each timed thing; design.md asks for at least this many.
const RUNS: usize = 60;
/// Pods of the crowded node.
const CROWD: usize = 50;
/// Requests before the idle daemon is measured.
const REQUESTS: usize = 1000;

/// Everything, in order.
pub(crate) fn all() -> Vec<Row> {
    let mut rows = Vec::new();
    idle(&mut rows);
    crowd(&mut rows);
    lives(&mut rows);
    pulls::measure(&mut rows);
    rows.push(Row { what: "installed size, all programs", budget: "6 MB", measured: installed() });
    rows
}

/// The daemon alone after requests of every common kind.
fn idle(rows: &mut Vec<Row>) {
    let node = Node::start();
    for _ in 0..REQUESTS / 3 + 1 {
        node.version(VersionRequest::default()).expect("version");
        node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
        node.list_containers(ListContainersRequest::default()).expect("list");
    }
    let pss = || format!("{:.2} MB", host::pss_kib(node.pid()) as f64 / 1024.0);
    let at_once = pss();
    // The code of a burst is let go of ten seconds after it began (runtime/src/settle.rs).
    std::thread::sleep(Duration::from_secs(11));
    let measured = format!("{}, {at_once} right after them", pss());
    rows.push(Row { what: "daemon idle PSS, after 1000 requests", budget: "2 MB", measured });
    node.stop();
}

/// Many pods at once: memory, and how fast a new daemon finds them.
fn crowd(rows: &mut Vec<Row>) {
    let mut node = Node::start();
    let empty = restarts(&mut node);
    let image = node.import_probe();
    for index in 0..CROWD {
        let pod = host_pod(&format!("crowd{index}"));
        let pod_id = node.run_pod(&pod);
        node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    }
    let monitors = node.monitors();
    let pods: u64 = monitors.iter().map(|monitor| host::pss_kib(monitor.pid)).sum();
    let daemon = host::pss_kib(node.pid());
    let everything = format!("{:.2} MB", (pods + daemon) as f64 / 1024.0);
    let each = format!("{:.1} KiB", pods as f64 / monitors.len().max(1) as f64);
    rows.push(Row { what: "everything of ours with 50 pods, PSS", budget: "6 MB", measured: everything });
    rows.push(Row { what: "per pod, PSS of our processes", budget: "64 KiB", measured: each });
    let before = host::cpu_time(node.pid());
    // The passing of time is what is measured.
    std::thread::sleep(Duration::from_secs(10));
    let used = host::cpu_time(node.pid()) - before;
    let measured = format!("{} ms in 10 s", used.as_millis());
    rows.push(Row { what: "CPU with 50 pods and no calls", budget: "0", measured });
    watched(&node, rows);
    let full = restarts(&mut node);
    let measured = format!("{} / {}", percentiles(empty), percentiles(full));
    rows.push(Row { what: "start to first answer with 0 / 50 pods", budget: "5 / 30 ms", measured });
    node.stop();
}

/// What a kubelet asks of a crowded node all day long.
fn watched(node: &Node, rows: &mut Vec<Row>) {
    const SECONDS: u64 = 60;
    let pss = host::pss_kib(node.pid());
    let before = host::cpu_time(node.pid());
    let (mut stats, begun) = (Vec::new(), Instant::now());
    for second in 0..SECONDS {
        node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
        node.list_containers(ListContainersRequest::default()).expect("list");
        if second % 10 == 0 {
            let begin = Instant::now();
            node.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
            stats.push(begin.elapsed());
            node.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats");
        }
        let next = Duration::from_secs(second + 1);
        std::thread::sleep(next.saturating_sub(begun.elapsed()));
    }
    let used = host::cpu_time(node.pid()) - before;
    let grown = host::pss_kib(node.pid()) as i64 - pss as i64;
    let measured =
        format!("{:.3} s (daemon and the children it waited for), PSS {grown:+} KiB", used.as_secs_f64());
    rows.push(Row { what: "a minute of relists and stats with 50 pods, CPU", budget: "0.15 s", measured });
    // Once code that the burst has mapped is let go of (runtime/src/settle.rs): what is left is memory.
    let settled = || {
        std::thread::sleep(Duration::from_secs(11));
        (host::pss_kib(node.pid()) as i64, host::anonymous_kib(node.pid()) as i64)
    };
    let before = settled();
    for second in 0..30 * SECONDS {
        node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
        node.list_containers(ListContainersRequest::default()).expect("list");
        if second % 10 == 0 {
            node.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
            node.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats");
        }
    }
    let after = settled();
    let measured = format!("PSS {:+} KiB, anonymous {:+} KiB", after.0 - before.0, after.1 - before.1);
    rows.push(Row { what: "growth by half an hour's calls of that kind, in a row", budget: "0", measured });
    for _ in 0..RUNS {
        let begin = Instant::now();
        node.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
        stats.push(begin.elapsed());
    }
    let measured = percentiles(stats);
    rows.push(Row { what: "ListContainerStats of 50 containers, p50 / p99", budget: "3 ms", measured });
}

/// How long a new daemon takes until it answers, several times.
fn restarts(node: &mut Node) -> Vec<Duration> {
    (0..10)
        .map(|_| {
            node.kill9();
            let begin = Instant::now();
            node.launch();
            begin.elapsed()
        })
        .collect()
}

/// One pod after the other: up, execs, down, and the CPU of it all.
fn lives(rows: &mut Vec<Row>) {
    let node = Node::start();
    let image = node.import_probe();
    let (mut up, mut down, mut execs) = (Vec::new(), Vec::new(), Vec::new());
    let before = host::cpu_time(node.pid());
    for run in 0..RUNS {
        let pod = host_pod(&format!("life{run}"));
        let config = container("one", &image, &["sleep", "forever"], &pod);
        let begin = Instant::now();
        let pod_id = node.run_pod(&pod);
        let id = node.run_container(&pod_id, &config, &pod);
        up.push(begin.elapsed());
        for _ in 0..3 {
            let begin = Instant::now();
            node.exec_sync(exec(&id, &["true"], 10)).expect("exec");
            execs.push(begin.elapsed());
        }
        let begin = Instant::now();
        node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).expect("stop");
        node.remove_container(RemoveContainerRequest { container_id: id }).expect("remove");
        node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() }).expect("stop");
        node.remove_pod(&pod_id);
        down.push(begin.elapsed());
    }
    let cpu = (host::cpu_time(node.pid()) - before).as_secs_f64() / RUNS as f64;
    rows.push(Row { what: "pod up, host network, p50 / p99", budget: "6 ms", measured: percentiles(up) });
    rows.push(Row { what: "pod down, host network, p50 / p99", budget: "7 ms", measured: percentiles(down) });
    rows.push(Row { what: "ExecSync(true), p50 / p99", budget: "1 ms", measured: percentiles(execs) });
    let measured = format!("{cpu:.4} s (daemon and the children it waited for)");
    rows.push(Row { what: "CPU of one pod's life with 3 execs", budget: "0.02 s", measured });
    node.stop();
}

/// `p50 / p99` in milliseconds.
pub(crate) fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1000.0;
    format!("{:.2} / {:.2} ms", at(0.5), at(0.99))
}

/// The three programs' files.
fn installed() -> String {
    let sizes = ["coracle", "coracle-pod", "coracle-worker"]
        .map(|name| std::fs::metadata(node::binaries().join(name)).map_or(0, |about| about.len()));
    let kib = sizes.map(|bytes| bytes / 1024);
    format!("{:.2} MB ({} + {} + {} KiB)", sizes.iter().sum::<u64>() as f64 / 1e6, kib[0], kib[1], kib[2])
}
