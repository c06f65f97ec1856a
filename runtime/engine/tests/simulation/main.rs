//! The engine on a simulated node, in one process, without root and in virtual time: random histories from a seed, and a few named
//! ones. `make simulate [SECONDS=600]` runs histories with increasing seeds and prints the seed of the first one that breaks a rule;
//! `make simulate SEED=n` repeats it and prints its course.
//!
//! Simulated are a disk with an ordered journal and power cuts, which tear, zero or lose what is not synced; processes and cgroups, in
//! one hierarchy or in two; monitors that fail, freeze or are killed; the network; another program that moves processes out of their
//! cgroups, or into those of other pods, and removes directories of the daemon; records that can never be read; kills of the daemon at
//! any call, up to six daemons one after the other; errors in up to three per cent of the calls, or of all calls of one kind for a
//! daemon's whole life; and clients that call at once, again, or leave before their answer. Not simulated: images and their garbage
//! collection, exec, attach and logs, NRI plugins, the systemd cgroup driver, user namespaces, a second daemon.
//!
//! After each round of calls the errors end, 40 s pass, and these rules are checked:
//!
//! - Each process belongs to a listed container that is listed as running, or to the monitor of a listed pod.
//! - Each container that is listed as running runs, under the pid that is listed; each ready pod has a monitor, which the next daemon
//!   will find.
//! - No name is held twice; no cgroup, network namespace, network attachment or directory is without an owner.
//! - The state of no pod stays unknown, only transitions of the table in docs/reliability.md happen, and each call is answered.
//! - What a client was told holds, also after a crash or a power cut: a pod that was made is listed, a container that was started was
//!   started once and is running or has its exit code, what was stopped does not run, nothing is left of what was removed. One
//!   exception: if the monitor does not work for a second while its pod is stopped or removed, the exit code is unknown (255), and
//!   stays so if the monitor writes down the exit later.
//!
//! At the end of a history a daemon without errors repeats failed calls, which must succeed, and removes all pods, after which nothing
//! may be left. After a power cut, a pod or container whose removal was not durable may be listed again, but does not run.
//!
//! The simulated node is compared with a real one: `tests/faults/compared.txt` holds 24 histories of 40 random calls, kills of monitors
//! and restarts by `kill -9`, and `tests/faults/compared.rs` makes the same calls to the daemon with real pods.
//! `CORACLE_SIMULATE_WRITE=1 cargo test -p coracle-engine --test simulation the_simulated` writes the file again.

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
fn the_same_seed_gives_the_same_history() {
    history::note_panics();
    let ground = Rc::new(Ground::new());
    for seed in [1, 7, 23] {
        let courses = [(); 2].map(|()| run(&ground, seed, true).map(|counts| counts.to_string()));
        let [first, second] = courses.map(|course| course.map_err(|failed| report(&failed)));
        assert_eq!(first, second);
    }
}
