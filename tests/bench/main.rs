//! `make bench`: what design.md budgets, as far as it is built, as one table. Memory is PSS from smaps_rollup, times are
//! percentiles of at least fifty runs, over the socket, client included. Run it on a quiet machine.
#![forbid(unsafe_code)]

mod measure;
mod plugins;
mod pulls;

use std::fmt::Write;

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
    let mut table = String::from("| what | budget | measured |\n|---|---|---|\n");
    for row in measure::all().into_iter().chain(plugins::all()) {
        // Writing to memory cannot fail.
        let _ = writeln!(table, "| {} | {} | {} |", row.what, row.budget, row.measured);
    }
    print!("{table}");
}
