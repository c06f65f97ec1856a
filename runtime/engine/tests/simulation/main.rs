//! The engine on a simulated node: random histories from a seed, and a few named ones.
//! See docs/reliability.md, "The engine on a simulated node".

mod cgroups;
mod check;
mod clients;
mod compared;
mod disk;
mod engine;
mod history;
mod monitor;
mod moved;
mod named;
mod node;
mod random;
mod rebooted;
mod reconciled;
mod removed;
mod stopped;
mod unread;
mod world;

use std::rc::Rc;
use std::time::{Duration, Instant};

use engine::Ground;
use history::{Counts, Failed, run};

/// Duration of the random histories in an ordinary test run, in seconds.
const SECONDS: u64 = 10;

fn report(failed: &Failed) -> String {
    let Failed { seed, broken, trace } = failed;
    let again = format!("make simulate SEED={seed} prints its course");
    let trace = trace.iter().fold(String::new(), |text, line| text + line + "\n");
    format!("{trace}seed {seed} fails ({again}):\n  {}", broken.join("\n  "))
}

/// `CORACLE_SIMULATE_SEED` replays one seed and prints its course. Otherwise `CORACLE_SIMULATE_SECONDS` is
/// the duration of the test, and `CORACLE_SIMULATE_FROM` the first seed.
#[test]
fn random_histories_break_no_rule_as_root() {
    history::note_panics();
    let ground = Rc::new(Ground::new());
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("CORACLE_SIMULATE_SEED") {
        match run(&ground, seed, true) {
            Ok(counts) => return println!("seed {seed} breaks no rule: {counts}"),
            Err(failed) => panic!("{}", report(&failed)),
        }
    }
    let limit = Duration::from_secs(number("CORACLE_SIMULATE_SECONDS").unwrap_or(SECONDS));
    let from = number("CORACLE_SIMULATE_FROM").unwrap_or(0);
    let (begun, mut counts, mut reported) = (Instant::now(), Counts::default(), Duration::from_secs(60));
    for seed in from.. {
        let passed = begun.elapsed();
        if passed >= limit {
            break;
        }
        if passed >= reported {
            println!("{} s: {counts}", passed.as_secs());
            reported += Duration::from_secs(60);
        }
        match run(&ground, seed, false) {
            Ok(one) => counts.add(one),
            Err(failed) => panic!("{}", report(&failed)),
        }
    }
    println!("seeds from {from}: {counts}");
    assert!(counts.histories > 0 && counts.calls > 0 && counts.checks > 0);
}

/// A failed seed can be replayed only if it always has the same course.
#[test]
fn a_seed_has_one_course() {
    history::note_panics();
    let ground = Rc::new(Ground::new());
    for seed in [1, 7, 23] {
        let courses = [(); 2].map(|()| run(&ground, seed, true).map(|counts| counts.to_string()));
        let [first, second] = courses.map(|course| course.map_err(|failed| report(&failed)));
        assert_eq!(first, second);
    }
}
