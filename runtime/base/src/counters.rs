//! What is counted as it happens: RPCs and workers, by name and outcome. The daemon has one thread, so the counters are
//! its own and cost an addition. Whoever publishes them reads them by [`read`]; what the numbers are called outside is not known
//! here.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Upper bounds of RPC times, seconds.
pub const RPC_BOUNDS: [f64; 8] = [0.001, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0];
/// Upper bounds of workers' times, seconds.
pub const WORKER_BOUNDS: [f64; 8] = [0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0];

/// How often something took how long.
#[derive(Default)]
pub struct Times {
    /// Count for each upper bound; the last one counts what took longer than the highest.
    pub histogram: [u64; 9],
    /// Sum of all times.
    pub total: Duration,
}

/// Everything that is counted.
#[derive(Default)]
pub struct Counters {
    started_s: Option<u64>,
    /// Durations of RPCs by method, within [`RPC_BOUNDS`].
    pub rpc: BTreeMap<&'static str, Times>,
    /// RPCs by method and gRPC code.
    pub rpc_codes: BTreeMap<(&'static str, &'static str), u64>,
    /// Durations of worker processes by job, within [`WORKER_BOUNDS`].
    pub workers: BTreeMap<&'static str, Times>,
    /// Worker processes by job and outcome (`ok`, `error`).
    pub worker_outcomes: BTreeMap<(&'static str, &'static str), u64>,
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

/// Counts an answered RPC; `code` as gRPC names it.
pub fn rpc(method: &'static str, code: &'static str, took: Duration) {
    COUNTERS.with_borrow_mut(|counters| {
        counters.rpc.entry(method).or_default().add(&RPC_BOUNDS, took);
        *counters.rpc_codes.entry((method, code)).or_default() += 1;
    });
}

/// Counts a worker that has ended.
pub fn worker(job: &'static str, is_well: bool, took: Duration) {
    let outcome = if is_well { "ok" } else { "error" };
    COUNTERS.with_borrow_mut(|counters| {
        counters.workers.entry(job).or_default().add(&WORKER_BOUNDS, took);
        *counters.worker_outcomes.entry((job, outcome)).or_default() += 1;
    });
}

/// When the first caller asked: at the daemon's start. Seconds since 1970.
pub fn started_s() -> u64 {
    COUNTERS.with_borrow_mut(|counters| {
        *counters.started_s.get_or_insert_with(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
        })
    })
}

/// Calls `look` with all counters of this thread. It must count nothing itself.
pub fn read<T>(look: impl FnOnce(&Counters) -> T) -> T {
    COUNTERS.with_borrow(look)
}
