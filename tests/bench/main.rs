//! Benchmarks. `make bench`: time and memory with their budgets as a table; `make bench-long`: leaks after
//! ten thousand pods; `make bench-steps`: each call of a pod's lifecycle; `make bench-memory`: memory by
//! mapping; `make bench-peers`: the same measurements for coracle and containerd. Memory is PSS from
//! smaps_rollup; times are percentiles of at least fifty runs, measured by a client over the socket. The rows
//! of a pod's life are also ratios to the floor (tests/floor), whose pods run in between. Run them on an idle
//! machine.
#![forbid(unsafe_code)]

mod beside;
mod crowds;
mod flash;
mod guest;
mod hot;
mod kubelet;
mod life;
mod logs;
mod long;
mod many;
mod measure;
mod memory;
mod peers;
mod pictures;
mod plugins;
mod pulls;
mod slow_flush;
mod small;
mod steps;
mod stores;
mod time;
mod updates;

use std::process::{Command, Stdio};

use coracle_tests::node;

use crate::pictures::Source;

/// A row of the table.
pub(crate) struct Row {
    /// The measured quantity, in the words of docs/performance.md.
    pub(crate) what: &'static str,
    /// The budget, in the words of docs/performance.md.
    pub(crate) budget: &'static str,
    /// The measured value with its unit.
    pub(crate) measured: String,
    /// The value as a ratio to that of the floor, which ran in between; `None`: the floor has no such row.
    pub(crate) floor: Option<String>,
}

/// A part of the table: its name and its measurement.
type Part = (&'static str, fn() -> Vec<Row>);

/// The parts of the table in the order of docs/performance.md, except for the last; each can be run by its
/// name.
const PARTS: [Part; 17] = [
    ("idle", measure::idle),
    ("crowd", measure::crowd),
    ("kubelet", kubelet::measure),
    ("life", life::alone),
    ("flash", flash::measure),
    ("slow-flush", slow_flush::measure),
    ("logs", logs::measure),
    ("burst", crowds::at_once),
    ("beside", beside::pull),
    ("storm", beside::storm),
    ("pull", pulls::measure),
    ("stores", stores::measure),
    ("update", updates::measure),
    ("size", measure::size),
    ("small", small::measure),
    ("plugins", plugins::measure),
    // Last, because the kernel removes five hundred namespaces for a minute, which delays all operations on
    // links.
    ("many", many::measure),
];

fn main() {
    settle_apart();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["hot"] => hot::run(),
        ["long"] => long::run(),
        ["peers", ref parts @ ..] => peers::run(parts),
        ["memory"] => memory::run(),
        ["steps"] => steps::run(),
        ref parts => table(parts),
    }
}

/// ext4 does not reuse inodes that were freed within the last minutes and searches past each
/// (`recently_deleted`), so removed files would affect later measurements. In a directory with this attribute
/// each subdirectory is in a block group of its own.
fn settle_apart() {
    let base = node::base();
    std::fs::create_dir_all(&base).expect("a folder for nodes");
    // Other file systems do not have this attribute and do not need it.
    let _ = Command::new("chattr").arg("+T").arg(&base).stderr(Stdio::null()).status();
}

/// Prints the rows of these parts, or of all, as they complete.
fn table(wanted: &[&str]) {
    let known = PARTS.map(|(name, _)| name);
    for name in wanted {
        assert!(
            known.contains(name),
            "{name}: long, peers, memory, steps, or parts of the table: {}",
            known.join(" ")
        );
    }
    println!("| what | budget | measured | ratio to the floor |\n|---|---|---|---|");
    // Updates take half an hour, and programs of others.
    let parts = PARTS.iter().filter(|(name, _)| match wanted {
        [] => *name != "update",
        _ => wanted.contains(name),
    });
    let parts = parts.filter(|(name, _)| guest::can_run(name));
    for row in parts.flat_map(|(_, part)| part()) {
        let floor = row.floor.as_deref().unwrap_or("-");
        let text = format!("| {} | {} | {} | {floor} |", row.what, row.budget, row.measured);
        pictures::print(Source::Own, &text);
    }
    pictures::draw();
}
