//! `make bench-memory`: the memory of the daemon and of a monitor by mapping, and the kernel memory of a pod.

use std::collections::BTreeMap;
use std::fs;

use coracle_tests::cri::proto::PodSandboxConfig;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, container, host_pod};

use crate::life;
use crate::measure::{ask, settled};
use crate::time::median;

/// Number of pods whose kernel memory is measured together, and number of rounds.
const PODS: usize = 100;
const ROUNDS: usize = 3;

/// Lines of /proc/meminfo about memory of the kernel.
const KEYS: [&str; 5] = ["SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "Percpu"];

/// Purposes of mappings in the order of addresses.
const PARTS: [(&str, &str); 8] = [
    ("headers", "of the program's file"),
    ("code", "of the program's file, as far as it is in use"),
    ("constants", "of the program's file: texts, tables, vtables"),
    ("data", "of the program's file, written at its start (relocation) or later"),
    ("zeroed", "statics, the allocator's own state, thread-local storage"),
    ("heap", "small allocations"),
    ("allocated", "allocations in groups, connections' buffers"),
    ("stack", "of the one thread"),
];

/// Resident size, PSS and written (anonymous) size, in KiB.
#[derive(Clone, Copy, Default)]
struct Part {
    size: u64,
    pss: u64,
    written: u64,
}

/// Prints the tables.
pub(crate) fn run() {
    let node = life::bridged();
    let image = node.import_probe();
    let pod = bridge_pod("one");
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    ask(&node);
    let at_once = parts(node.pid());
    settled(&node);
    let later = parts(node.pid());
    let monitor = parts(node.monitors().first().expect("the pod's monitor").pid);
    println!(
        "| mapping | for | daemon, of KiB | after 1000 requests | settled | written | monitor, of KiB | PSS | written |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let of = |parts: &BTreeMap<&str, Part>, name| parts.get(name).copied().unwrap_or_default();
    for (name, purpose) in PARTS {
        let (at_once, later, monitor) = (of(&at_once, name), of(&later, name), of(&monitor, name));
        println!(
            "| {name} | {purpose} | {} | {} | {} | {} | {} | {} | {} |",
            later.size, at_once.pss, later.pss, later.written, monitor.size, monitor.pss, monitor.written
        );
    }
    let all = |parts: &BTreeMap<&str, Part>, field: fn(&Part) -> u64| parts.values().map(field).sum::<u64>();
    println!(
        "| all | | | {} | {} | {} | | {} | {} |",
        all(&at_once, |part| part.pss),
        all(&later, |part| part.pss),
        all(&later, |part| part.written),
        all(&monitor, |part| part.pss),
        all(&monitor, |part| part.written)
    );
    node.remove_pod(&pod_id);
    kernel(&node, &image);
    node.stop();
}

/// The mappings of a process by purpose.
fn parts(pid: i32) -> BTreeMap<&'static str, Part> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process lives");
    let mut parts: BTreeMap<&'static str, Part> = BTreeMap::new();
    let (mut name, mut is_first) = ("headers", true);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
        let Some(key) = first.strip_suffix(':') else {
            name = purpose(second, words.nth(3), is_first, name);
            is_first = false;
            continue;
        };
        let part = parts.entry(name).or_default();
        let kib = || second.parse::<u64>().unwrap_or(0);
        match key {
            "Size" => part.size += kib(),
            "Pss" => part.pss += kib(),
            "Anonymous" => part.written += kib(),
            _ => {}
        }
    }
    parts
}

/// The purpose of a mapping. `path`: its name in the kernel; `before`: the purpose of the preceding mapping.
fn purpose(rights: &str, path: Option<&str>, is_first: bool, before: &'static str) -> &'static str {
    match path {
        Some("[heap]") => "heap",
        Some("[stack]") => "stack",
        Some(name) if name.starts_with('[') => "kernel",
        Some(_) if rights.contains('x') => "code",
        Some(_) if rights.contains('w') => "data",
        Some(_) if is_first => "headers",
        Some(_) => "constants",
        None if ["data", "constants", "zeroed"].contains(&before) => "zeroed",
        None => "allocated",
    }
}

/// Creates the pod configuration of a name.
type Make = fn(&str) -> PodSandboxConfig;

/// Measures the kernel memory per pod with one container from the kernel's own counters; the median of
/// several rounds.
fn kernel(node: &Node, image: &str) {
    println!("\n| a pod with one container adds, KiB | {} |", KEYS.join(" | "));
    println!("|---|{}", "---|".repeat(KEYS.len()));
    let on_host: Make = host_pod;
    for (network, make) in [("on the host's network", on_host), ("on the built-in bridge", bridge_pod)] {
        let rounds: Vec<Vec<f64>> = (0..ROUNDS).map(|_| round(node, image, make, &KEYS)).collect();
        let middle = |index: usize| median(rounds.iter().map(|round| round[index]).collect());
        let cells: Vec<String> = (0..KEYS.len()).map(|index| format!("{:.1}", middle(index))).collect();
        println!("| {network} | {} |", cells.join(" | "));
    }
}

/// Measures one round: the kernel memory of each key per pod in KiB.
fn round(node: &Node, image: &str, make: Make, keys: &[&str]) -> Vec<f64> {
    let before = about_memory(keys);
    let up = |index| {
        let pod = make(&format!("kernel{index}"));
        let id = node.run_pod(&pod);
        node.run_container(&id, &container("one", image, &["sleep", "forever"], &pod), &pod);
        id
    };
    let ids: Vec<String> = (0..PODS).map(up).collect();
    let after = about_memory(keys);
    ids.iter().for_each(|id| node.remove_pod(id));
    // Slabs and namespaces are freed asynchronously, which must not affect the next round.
    settled(node);
    before.iter().zip(after).map(|(before, after)| (after - before) / PODS as f64).collect()
}

/// Memory that the kernel has for itself, in KiB.
pub(crate) fn in_kernel_kib() -> f64 {
    about_memory(&KEYS).iter().sum()
}

/// Lines of /proc/meminfo, in KiB.
fn about_memory(keys: &[&str]) -> Vec<f64> {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc");
    let value = |key: &&str| {
        let line = text.lines().find(|line| line.split(':').next() == Some(*key));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0.0)
    };
    keys.iter().map(value).collect()
}
