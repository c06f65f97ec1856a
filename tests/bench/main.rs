//! `make bench`: time and memory with their budgets, as one table; `make bench-long`: ten thousand pods, one after the other, and what is
//! left of them; `make bench-steps`: each call of a pod's life; `make bench-memory`: what each page is for; `make bench-peers`:
//! the same measurements beside containerd's. Memory is PSS from smaps_rollup, times are percentiles of at least fifty runs, over
//! the socket, client included. Run it on a quiet machine.
#![forbid(unsafe_code)]

mod beside;
mod crowds;
mod life;
mod long;
mod measure;
mod memory;
mod peers;
mod plugins;
mod pulls;
mod steps;
mod time;

use std::process::{Command, Stdio};

use coracle_tests::node;

/// A line of the table: what, its budget in words, and what was measured.
pub(crate) struct Row {
    /// As docs/performance.md writes it.
    pub(crate) what: &'static str,
    /// As docs/performance.md writes it.
    pub(crate) budget: &'static str,
    /// With its unit.
    pub(crate) measured: String,
}

/// A part of the table: its name, and what measures it.
type Part = (&'static str, fn() -> Vec<Row>);

/// The table's parts, in the order of docs/performance.md but for the last; each can be run alone, by its name.
const PARTS: [Part; 10] = [
    ("idle", measure::idle),
    ("crowd", measure::crowd),
    ("life", life::alone),
    ("burst", crowds::at_once),
    ("beside", beside::pull),
    ("storm", beside::storm),
    ("pull", pulls::measure),
    ("size", measure::size),
    ("plugins", plugins::measure),
    // Last: the kernel takes down five hundred namespaces for a minute, and whoever asks for a link waits.
    ("full", crowds::full),
];

fn main() {
    settle_apart();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["long"] => long::run(),
        ["peers", ref parts @ ..] => peers::run(parts),
        ["memory"] => memory::run(),
        ["steps"] => steps::run(),
        ref parts => table(parts),
    }
}

/// ext4 takes no inode again that was freed within the last minutes, and searches past each (`recently_deleted`): what was removed
/// before would be what is measured. Below a directory with this attribute each folder begins in a block group of its own.
fn settle_apart() {
    let base = node::base();
    std::fs::create_dir_all(&base).expect("a folder for nodes");
    // Other file systems know no such attribute, and need none.
    let _ = Command::new("chattr").arg("+T").arg(&base).stderr(Stdio::null()).status();
}

/// The rows of these parts, or of all, each as soon as it is there.
fn table(wanted: &[&str]) {
    let known = PARTS.map(|(name, _)| name);
    for name in wanted {
        assert!(
            known.contains(name),
            "{name}: long, peers, memory, steps, or parts of the table: {}",
            known.join(" ")
        );
    }
    println!("| what | budget | measured |\n|---|---|---|");
    let parts = PARTS.iter().filter(|(name, _)| wanted.is_empty() || wanted.contains(name));
    for row in parts.flat_map(|(_, part)| part()) {
        println!("| {} | {} | {} |", row.what, row.budget, row.measured);
    }
}
