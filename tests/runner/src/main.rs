//! Runs the checks and suites of this repository, each as early as what it needs is built, and says what each took.
//!
//! ```text
//!     steps ──► schedule ──► program (a suite of Rust's test harness) ──► results ──► table
//!    (what there is)   │
//!                      └──► plain commands: builds, installation, clippy
//! ```
//!
//! | command | does |
//! |---|---|
//! | `runner check` | what `make check` does |
//! | `runner test` | what `make test` does |
//! | `runner all [PART…]` | what `make test-all` does, or these parts of it |
//! | `runner only NAME SUITE…` | the tests of these suites whose name contains NAME, with their output |
//! | `runner suites` | the names of all suites |
//! | `runner parts` | the names of all parts |
//!
//! The last line of each run is `N passed, N failed`. With `UPDATE=1` the times go into the table of CONTRIBUTING.md.
#![forbid(unsafe_code)]

mod harness;
mod results;
mod schedule;
mod steps;
mod table;

use std::path::Path;
use std::process::ExitCode;

use crate::schedule::Run;
use crate::steps::{Tier, part_names};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    std::env::set_current_dir(workspace()).expect("the workspace exists");
    match words.as_slice() {
        ["check"] => Run::new(Tier::Check, &[]).finish(),
        ["test"] => Run::new(Tier::Test, &[]).finish(),
        ["all", parts @ ..] => {
            let known: Vec<&str> = part_names();
            if let Some(unknown) = parts.iter().find(|part| !known.contains(part)) {
                eprintln!("no part {unknown}; there are: {}", known.join(" "));
                return ExitCode::from(2);
            }
            let parts = if parts.is_empty() { &known } else { parts };
            Run::new(Tier::All, parts).finish()
        }
        ["only", name, suites @ ..] => harness::only(name, suites),
        ["suites"] => {
            println!("{}", steps::suite_names().join(" "));
            ExitCode::SUCCESS
        }
        ["parts"] => {
            println!("{}", part_names().join(" "));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: runner check | test | all [PART…] | only NAME SUITE… | suites | parts");
            ExitCode::from(2)
        }
    }
}

/// The directory of the workspace.
fn workspace() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).expect("the runner is two levels below the workspace")
}
