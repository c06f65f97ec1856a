//! A node with four hundred pods, and with five hundred: what a pod's life and the kubelet's calls cost there, compared
//! with a node that has none. A kubelet's usual limit is 110.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ListContainerStatsRequest, ListContainersRequest, ListPodSandboxMetricsRequest, ListPodSandboxRequest,
    ListPodSandboxStatsRequest, PodSandboxConfig,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::prometheus::{address_of, scrape};
use coracle_tests::request::{bridge_pod, host_pod};

use crate::crowds::{SETTLED, burst, timed};
use crate::life::{Lives, RUNS};
use crate::time::Percentiles;
use crate::{Row, measure, memory};

/// Numbers of pods at which the node is measured.
const SOME: usize = 50;
const MANY: usize = 400;
const FULL: usize = 500;
/// Number of lists and of statistics of each kind.
const CALLS: usize = 100;

fn row(what: &'static str, budget: &'static str, measured: String) -> Row {
    Row { what, budget, measured, floor: None }
}

/// Measures a pod's life on this node.
fn lives(node: &Node, image: &str, make: fn(&str) -> PodSandboxConfig) -> Lives {
    let mut lives = Lives::default();
    (0..RUNS).for_each(|run| lives.one(node, &make(&format!("more{run}")), image));
    lives
}

fn calls(call: &dyn Fn()) -> Percentiles {
    call();
    Percentiles::of(&(0..CALLS).map(|_| timed(call)).collect::<Vec<_>>())
}

fn lists(cri: &Cri) -> [Percentiles; 2] {
    [
        calls(&|| drop(cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list"))),
        calls(&|| drop(cri.list_containers(ListContainersRequest::default()).expect("list"))),
    ]
}

fn statistics(cri: &Cri) -> [Percentiles; 3] {
    [
        calls(&|| drop(cri.list_container_stats(ListContainerStatsRequest::default()).expect("stats"))),
        calls(&|| drop(cri.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats"))),
        calls(&|| drop(cri.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).expect("metrics"))),
    ]
}

/// The numbers of turns of the daemon's loop by their upper bound.
fn turns(address: &str) -> BTreeMap<String, f64> {
    let mut found = scrape(address);
    found.retain(|name, _| name.starts_with("coracle_loop_hold_seconds_bucket"));
    found
}

/// The bound in seconds which no turn between two scrapes exceeded, as a text, and the number of turns above 2 ms.
fn longest(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> String {
    let bound = |name: &str| -> f64 {
        let text = name.split('"').nth(1).unwrap_or_default();
        text.replace("+Inf", "inf").parse().unwrap_or(f64::INFINITY)
    };
    let mut counts: Vec<(f64, f64)> = after
        .iter()
        .map(|(name, count)| (bound(name), count - before.get(name).copied().unwrap_or(0.0)))
        .collect();
    calls_by_bound(&mut counts);
    let all = counts.last().map_or(0.0, |(_, count)| *count);
    let within = counts.iter().find(|(_, count)| *count >= all).map_or(f64::INFINITY, |(bound, _)| *bound);
    let short = counts.iter().find(|(bound, _)| *bound >= 0.002).map_or(0.0, |(_, count)| *count);
    format!("at most {:.2} ms; {} of {all} turns above 2 ms", within * 1000.0, all - short)
}

fn calls_by_bound(counts: &mut [(f64, f64)]) {
    counts.sort_by(|one, other| one.0.total_cmp(&other.0));
}

fn ratio(beside: &[Duration], alone: &[Duration]) -> String {
    let (beside, alone) = (Percentiles::of(beside), Percentiles::of(alone));
    format!("{:.2} x ({beside}, alone {alone})", beside.p50 / alone.p50)
}

fn mb(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

/// Measures the node without pods, with some, with many and full.
pub(crate) fn measure() -> Vec<Row> {
    // A range with enough addresses, which differs from those of other measuring processes.
    let network = format!(
        "[metrics]\naddress = \"127.0.0.1:0\"\n[network]\ndefault = \"builtin\"\nbridge = \"BRIDGE\"\n\
         subnets = [\"10.{}.0.0/21\"]\n",
        200 + std::process::id() % 50
    );
    let mut node = measure::node(&network);
    let image = node.import_probe();
    let alone = [lives(&node, &image, host_pod), lives(&node, &image, bridge_pod)];
    burst(&node, &image, SOME, &bridge_pod);
    let some = lists(&node);
    let before = memory::in_kernel_kib();
    burst(&node, &image, MANY - SOME, &bridge_pod);
    let kernel = (memory::in_kernel_kib() - before) / (MANY - SOME) as f64 / 1024.0;
    std::thread::sleep(SETTLED);
    let beside = [lives(&node, &image, host_pod), lives(&node, &image, bridge_pod)];
    let many = lists(&node);
    let address = address_of(&node);
    let quiet = turns(&address);
    let stats = statistics(&node);
    let held = longest(&quiet, &turns(&address));
    let restarts = Percentiles::of(&measure::restarts(&mut node));
    burst(&node, &image, FULL - MANY, &bridge_pod);
    let monitors = node.monitors_pss_kib();
    let busy = host::pss_kib(node.pid());
    let daemon = u64::try_from(measure::settled(&node).pss).unwrap_or(0);
    node.stop();
    let everything = mb(daemon + monitors);
    vec![
        row("pod up beside 400, host network", "1.3 x", ratio(&beside[0].up, &alone[0].up)),
        row("pod up beside 400, bridge network built in", "1.3 x", ratio(&beside[1].up, &alone[1].up)),
        row("pod down beside 400, bridge network built in", "", ratio(&beside[1].down, &alone[1].down)),
        row("ListPodSandbox of 50, p50 / p99", "0.3 ms", some[0].to_string()),
        row("ListContainers of 50, p50 / p99", "0.3 ms", some[1].to_string()),
        row("ListPodSandbox of 400, p50 / p99", "1 ms", many[0].to_string()),
        row("ListContainers of 400, p50 / p99", "1 ms", many[1].to_string()),
        row("ListContainerStats of 400, p50 / p99", "", stats[0].to_string()),
        row("ListPodSandboxStats of 400, p50 / p99", "", stats[1].to_string()),
        row("ListPodSandboxMetrics of 400, p50 / p99", "", stats[2].to_string()),
        row("longest hold of the one thread by these three", "2 ms", held),
        row("start to first answer with 400 pods", "60 ms", restarts.to_string()),
        row("kernel memory of a pod, 51st to 400th", "0.3 MB", format!("{kernel:.2} MB")),
        row(
            "all coracle processes with 500 pods, PSS",
            "12 MB",
            format!(
                "{everything:.1} MB (daemon {:.1}, right after the last pod {:.1}; monitors {:.1})",
                mb(daemon),
                mb(busy),
                mb(monitors)
            ),
        ),
    ]
}
