//! `make bench`: what design.md budgets, as one table; `make bench-long`: ten thousand pods, one after the other, and what is
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

/// A line of the table: what, its budget in words, and what was measured.
pub(crate) struct Row {
    /// As in design.md.
    pub(crate) what: &'static str,
    /// As in design.md.
    pub(crate) budget: &'static str,
    /// With its unit.
    pub(crate) measured: String,
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        None => table(),
        Some("long") => long::run(),
        Some("peers") => peers::run(),
        Some("memory") => memory::run(),
        Some("steps") => steps::run(),
        Some(other) => panic!("{other}: long, peers, memory, steps, or nothing"),
    }
}

/// Each row as soon as it is there.
fn table() {
    println!("| what | budget | measured |\n|---|---|---|");
    let parts = [measure::idle, measure::crowd, life::alone, crowds::at_once, crowds::full, beside::pull];
    let parts = parts.into_iter().chain([beside::storm, pulls::measure, measure::size, plugins::measure]);
    for part in parts {
        for row in part() {
            println!("| {} | {} | {} |", row.what, row.budget, row.measured);
        }
    }
}
