//! `make compare`: the same input to containerd and to coracle, side by side on one machine. Each difference of what comes out
//! is a failure, unless `known.toml` has it with its reason.
//!
//! ```text
//!                     ┌──> containerd 2 with runc ──> what came out ──┐
//!   part: input ──────┤        (CRI, one socket)                      ├──> differences − known.toml
//!   table, then random└──> coracle ─────────────────> what came out ──┘
//! ```
//!
//! A part begins with a table of cases, which is always run whole, and continues with random ones until its time is over. The
//! seed is printed; the same seed gives the same cases.
#![forbid(unsafe_code)]

mod archive;
mod configurations;
mod containers;
mod known;
mod layers;
mod pair;
mod registries;
mod report;
mod requests;
mod server;
mod snapshots;
mod tree;
mod verifiers;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use coracle_tests::random::Random;

use crate::known::Known;
use crate::pair::Pair;

/// A part: its name and its cases.
type Part = (&'static str, fn(&mut Run<'_>));

const PARTS: [Part; 6] = [
    ("containers", containers::run),
    ("layers", layers::run),
    ("configurations", configurations::run),
    ("requests", requests::run),
    ("registries", registries::run),
    ("verifiers", verifiers::run),
];

/// Time of a part without `SECONDS`.
const USUAL: Duration = Duration::from_secs(60);

/// One run of a part.
pub(crate) struct Run<'a> {
    pub(crate) pair: &'a Pair,
    pub(crate) random: Random,
    part: &'static str,
    until: Instant,
    time: Duration,
    known: &'a mut Known,
    cases: u64,
    unexplained: u64,
}

impl Run<'_> {
    /// Whether there is time for another random case.
    pub(crate) fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }

    /// Gives random cases the whole time of the part, after a table that takes long itself.
    pub(crate) fn end_table(&mut self) {
        self.until = Instant::now() + self.time;
    }

    /// Counts a case.
    pub(crate) fn begin_case(&mut self) {
        self.cases += 1;
    }

    /// Compares one fact of both sides. `what` names it by words that are the same in each run, because `known.toml` has them;
    /// `input` describes the case for a reader who wants to repeat it.
    pub(crate) fn compare(&mut self, what: &str, ours: &str, theirs: &str, input: &str) {
        if ours == theirs || self.known.explains(self.part, what, ours, theirs) {
            return;
        }
        self.unexplained += 1;
        println!("DIFFERENT {}: {what}\n    containerd: {theirs}\n    coracle:    {ours}", self.part);
        if !input.is_empty() {
            println!("    input:      {input}");
        }
    }
}

/// Whether a program is in the search path.
pub(crate) fn has_program(name: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').any(|folder| Path::new(folder).join(name).is_file())
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for name in &wanted {
        let names = PARTS.map(|(name, _)| name);
        assert!(names.contains(&name.as_str()), "{name}: the parts are {}", names.join(" "));
    }
    let time = std::env::var("CORACLE_SECONDS").ok().filter(|text| !text.is_empty());
    let time = time.map_or(USUAL, |text| Duration::from_secs(text.parse().expect("SECONDS is a number")));
    let random = Random::from_environment();
    let mut known = Known::read();
    let pair = Pair::start();
    let (mut cases, mut unexplained) = (0, 0);
    for (name, part) in PARTS {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let mut run = Run {
            pair: &pair,
            random: random.clone(),
            part: name,
            until: Instant::now() + time,
            time,
            known: &mut known,
            cases: 0,
            unexplained: 0,
        };
        part(&mut run);
        println!("{name}: {} cases, {} unexplained differences", run.cases, run.unexplained);
        (cases, unexplained) = (cases + run.cases, unexplained + run.unexplained);
        // A table without a difference is no evidence that an entry is obsolete if only random cases meet it.
        for entry in known.unused(name) {
            println!("{name}: known.toml has {entry:?}, which this run did not meet");
        }
    }
    pair.stop();
    // As Rust's test harness, for `tests/runner`.
    let state = if unexplained == 0 { "ok" } else { "FAILED" };
    println!("test result: {state}. {cases} passed; {unexplained} failed");
    if unexplained == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
