//! `make workloads`: what users run on small nodes, as they run it: VPNs, databases, a broker, runtimes of languages, systemd,
//! podman, a name server. Each case of `cases/` is one or more static pods of a real kubelet, with the usual probes, users,
//! volumes and stop signals: they become ready, a client uses them, they are stopped, and nothing of them remains. The same
//! cases run with containerd and runc, and exit codes, reasons and restarts must be the same.
//!
//! ```text
//!   tests/workloads/layer: Debian's packages, one layer ──> images, one for each case
//!   cases/*.toml: image, pods, steps ──> kubelet ──> coracle, then containerd ──> facts of each, compared
//! ```
//!
//! It runs in the namespaces of `tests/cluster/namespaces`, requires root and what `tests/tools/install workloads` makes.
#![forbid(unsafe_code)]

mod case;
mod images;
mod outside;
mod side;
mod steps;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::peer::Peer;

use crate::case::Case;
use crate::side::Side;

/// Facts of each case; `None` if it failed.
type Outcome = BTreeMap<String, Option<Vec<String>>>;

fn main() -> ExitCode {
    host::require_root();
    if std::env::var_os("CORACLE_CLUSTER").is_none() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/namespaces");
        let program = std::env::current_exe().expect("this program has a path");
        let error = Command::new(script).arg(program).args(std::env::args().skip(1)).exec();
        panic!("tests/cluster/namespaces: {error}");
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |case: &Case| wanted.is_empty() || wanted.iter().any(|word| case.name.contains(word));
    let cases: Vec<Case> = case::all().into_iter().filter(is_wanted).collect();
    assert!(!cases.is_empty(), "no case of tests/workloads/cases has {wanted:?} in its name");
    let only = std::env::var("CORACLE_WORKLOADS_RUNTIME").unwrap_or_default();
    assert!(["", "coracle", "containerd"].contains(&only.as_str()), "RUNTIME={only}: coracle or containerd");

    let node = Node::with(Options { bridge: true, ..Options::default() });
    outside::make();
    let archive = images::archive(node.folder(), &cases);
    let mut outcomes = Vec::new();
    if only != "containerd" {
        let output = node.image_command(&["import", &archive.display().to_string()]);
        assert!(output.status.success(), "import: {}", String::from_utf8_lossy(&output.stderr));
        outcomes.push(run_all(&Side::coracle(&node), &cases));
    }
    if only != "coracle" {
        let peer = Peer::beside(&node, None);
        let output = peer.import_command().arg(&archive).output().expect("ctr runs");
        assert!(output.status.success(), "import: {}", String::from_utf8_lossy(&output.stderr));
        outcomes.push(run_all(&Side::containerd(&node, &peer), &cases));
        peer.stop();
    }
    std::fs::remove_file(archive).expect("ours");
    node.stop();
    report(&outcomes)
}

/// Runs each case with one runtime.
fn run_all(side: &Side<'_>, cases: &[Case]) -> Outcome {
    let mut outcome = Outcome::new();
    for case in cases {
        if let Some(reason) = case.not_with(side.name) {
            println!("left out with {}: {}: {reason}", side.name, case.name);
            continue;
        }
        if let Some(variant) = &case.left_out {
            println!("left out: {} {variant}", case.name);
        }
        let begin = Instant::now();
        let facts = steps::run(side, case);
        let state = if facts.is_some() { "ok    " } else { "FAILED" };
        println!(
            "{state} {:10} {:5.0} s  {}: {}",
            side.name,
            begin.elapsed().as_secs_f64(),
            case.name,
            case.about
        );
        outcome.insert(case.name.clone(), facts);
    }
    outcome
}

/// Prints the differences of two runtimes and the line that `tests/runner` reads.
fn report(outcomes: &[Outcome]) -> ExitCode {
    let all = || outcomes.iter().flat_map(|outcome| outcome.values());
    let (passed, mut failed) = (all().flatten().count(), all().filter(|facts| facts.is_none()).count());
    if let [ours, theirs] = outcomes {
        for (name, facts) in ours {
            let (Some(facts), Some(Some(other))) = (facts, theirs.get(name)) else { continue };
            if facts != other {
                failed += 1;
                println!("DIFFERENT {name}\n    containerd: {other:?}\n    coracle:    {facts:?}");
            }
        }
    }
    let state = if failed == 0 { "ok" } else { "FAILED" };
    println!("test result: {state}. {passed} passed; {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
