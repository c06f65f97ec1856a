//! What is counted as it happens: RPCs and workers, by name and outcome. The daemon has one thread, so the counters are
//! its own and cost an addition.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::text::{Kind, Text};

/// Upper bounds of RPC times, seconds.
const RPC_BOUNDS: [f64; 8] = [0.001, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0];
/// Upper bounds of workers' times, seconds.
const WORKER_BOUNDS: [f64; 8] = [0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0];

/// How often, and how long.
#[derive(Default)]
struct Times {
    /// By upper bound; the last is above all.
    histogram: [u64; 9],
    total: Duration,
}

#[derive(Default)]
struct Counters {
    started_s: Option<u64>,
    rpc: BTreeMap<&'static str, Times>,
    rpc_codes: BTreeMap<(&'static str, &'static str), u64>,
    workers: BTreeMap<&'static str, Times>,
    worker_outcomes: BTreeMap<(&'static str, &'static str), u64>,
}

thread_local! {
    static COUNTERS: RefCell<Counters> = RefCell::default();
}

impl Times {
    fn add(&mut self, bounds: &[f64; 8], took: Duration) {
        let bucket = bounds.iter().position(|bound| took.as_secs_f64() <= *bound);
        self.histogram[bucket.unwrap_or(bounds.len())] += 1;
        self.total += took;
    }
}

/// An RPC was answered; `code` as gRPC names it.
pub(crate) fn rpc(method: &'static str, code: &'static str, took: Duration) {
    COUNTERS.with_borrow_mut(|counters| {
        counters.rpc.entry(method).or_default().add(&RPC_BOUNDS, took);
        *counters.rpc_codes.entry((method, code)).or_default() += 1;
    });
}

/// A worker has ended.
pub(crate) fn worker(job: &'static str, is_well: bool, took: Duration) {
    let outcome = if is_well { "ok" } else { "error" };
    COUNTERS.with_borrow_mut(|counters| {
        counters.workers.entry(job).or_default().add(&WORKER_BOUNDS, took);
        *counters.worker_outcomes.entry((job, outcome)).or_default() += 1;
    });
}

/// When the first caller asked: at the daemon's start. Seconds since 1970.
pub(super) fn started_s() -> u64 {
    COUNTERS.with_borrow_mut(|counters| {
        *counters.started_s.get_or_insert_with(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
        })
    })
}

pub(super) fn render(text: &mut Text) {
    COUNTERS.with_borrow(|counters| {
        text.family("coracle_rpc_total", "RPCs by method and code", Kind::Counter);
        for ((method, code), count) in &counters.rpc_codes {
            text.value("coracle_rpc_total", &[("method", method), ("code", code)], count);
        }
        text.family("coracle_rpc_seconds", "How long RPCs took", Kind::Histogram);
        for (method, times) in &counters.rpc {
            let labels = [("method", *method)];
            text.histogram("coracle_rpc_seconds", &labels, &RPC_BOUNDS, &times.histogram, times.total);
        }
        text.family("coracle_worker_runs_total", "Worker processes by job and outcome", Kind::Counter);
        for ((job, outcome), count) in &counters.worker_outcomes {
            text.value("coracle_worker_runs_total", &[("job", job), ("outcome", outcome)], count);
        }
        text.family("coracle_worker_seconds", "How long worker processes ran", Kind::Histogram);
        for (job, times) in &counters.workers {
            let labels = [("job", *job)];
            text.histogram("coracle_worker_seconds", &labels, &WORKER_BOUNDS, &times.histogram, times.total);
        }
    });
}
