//! Counters of RPCs, steps and workers by name and outcome. They are thread-local, because the daemon has one
//! thread; updating a counter is an addition. [`read`] gives access to the counters; the metrics endpoint
//! defines the names of the exported metrics.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_job::Progress;

/// Upper bounds of the RPC duration histogram, in seconds.
pub const RPC_BOUNDS: [f64; 8] = [0.001, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0];
/// Upper bounds of the histogram of set-up steps, in seconds.
pub const STEP_BOUNDS: [f64; 8] = [0.0005, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0];
/// Upper bounds of the worker duration histogram, in seconds.
pub const WORKER_BOUNDS: [f64; 8] = [0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0];

/// A histogram of durations with `COUNTS - 1` upper bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times<const COUNTS: usize = 9> {
    /// Number of durations up to each upper bound; the last entry counts durations above the highest bound.
    pub histogram: [u64; COUNTS],
    /// Sum of all durations.
    pub total: Duration,
}

/// All counters of RPCs, workers, pulls and OOM kills.
#[derive(Default)]
pub struct Counters {
    started_s: Option<u64>,
    /// Durations of RPCs by method, with the bounds [`RPC_BOUNDS`].
    pub rpc: BTreeMap<&'static str, Times>,
    /// Number of RPCs by method and gRPC code.
    pub rpc_codes: BTreeMap<(&'static str, &'static str), u64>,
    /// Durations of the steps that set up a pod sandbox, with the bounds [`STEP_BOUNDS`].
    pub steps: BTreeMap<&'static str, Times>,
    /// Durations of worker processes by job, with the bounds [`WORKER_BOUNDS`].
    pub workers: BTreeMap<&'static str, Times>,
    /// Number of worker processes by job and outcome (`ok`, `error`).
    pub worker_outcomes: BTreeMap<(&'static str, &'static str), u64>,
    /// Number of pulls by outcome: `ok`, or the cause of the failure in one word.
    pub pulls: BTreeMap<&'static str, u64>,
    /// Number of bytes that pulls have downloaded.
    pub pulled_bytes: u64,
    /// Number of these bytes that came from neighbours.
    pub neighbour_bytes: u64,
    /// Number of bytes that pulls did not have to download, because other layers of the node had them.
    pub reused_bytes: u64,
    /// Number of bytes of layers that were checked in the background.
    pub checked_bytes: u64,
    /// Number of attempts to repair damaged layers by outcome (`ok`, `error`).
    pub repairs: BTreeMap<&'static str, u64>,
    /// Number of containers whose main process the kernel killed because of a lack of memory.
    pub oom_kills: u64,
}

thread_local! {
    static COUNTERS: RefCell<Counters> = RefCell::default();
}

impl<const COUNTS: usize> Default for Times<COUNTS> {
    fn default() -> Self {
        Self { histogram: [0; COUNTS], total: Duration::ZERO }
    }
}

impl<const COUNTS: usize> Times<COUNTS> {
    /// Counts a duration; `bounds` are in seconds.
    pub(crate) fn add(&mut self, bounds: &[f64], took: Duration) {
        let bucket = bounds.iter().position(|bound| took.as_secs_f64() <= *bound);
        self.histogram[bucket.unwrap_or(bounds.len())] += 1;
        self.total += took;
    }
}

/// Counts a completed RPC; `code` is the name of the gRPC code.
pub fn rpc(method: &'static str, code: &'static str, took: Duration) {
    COUNTERS.with_borrow_mut(|counters| {
        counters.rpc.entry(method).or_default().add(&RPC_BOUNDS, took);
        *counters.rpc_codes.entry((method, code)).or_default() += 1;
    });
}

/// Counts a step of the set-up of a pod sandbox, including a failed one.
pub fn step(name: &'static str, took: Duration) {
    COUNTERS.with_borrow_mut(|counters| counters.steps.entry(name).or_default().add(&STEP_BOUNDS, took));
}

/// Counts a worker that has ended; `is_well`: whether its job succeeded.
pub fn worker(job: &'static str, is_well: bool, took: Duration) {
    let outcome = if is_well { "ok" } else { "error" };
    COUNTERS.with_borrow_mut(|counters| {
        counters.workers.entry(job).or_default().add(&WORKER_BOUNDS, took);
        *counters.worker_outcomes.entry((job, outcome)).or_default() += 1;
    });
}

/// Counts a pull that has ended with its bytes.
pub fn pull(outcome: &'static str, progress: &Progress) {
    COUNTERS.with_borrow_mut(|counters| {
        *counters.pulls.entry(outcome).or_default() += 1;
        for (counter, bytes) in [
            (&mut counters.pulled_bytes, progress.bytes_fetched),
            (&mut counters.neighbour_bytes, progress.bytes_from_neighbours),
            (&mut counters.reused_bytes, progress.bytes_reused),
        ] {
            *counter = counter.saturating_add(bytes);
        }
    });
}

/// Counts bytes of layers that were checked in the background.
pub fn checked(bytes: u64) {
    COUNTERS
        .with_borrow_mut(|counters| counters.checked_bytes = counters.checked_bytes.saturating_add(bytes));
}

/// Counts an attempt to repair a damaged layer.
pub fn repair(is_well: bool) {
    let outcome = if is_well { "ok" } else { "error" };
    COUNTERS.with_borrow_mut(|counters| *counters.repairs.entry(outcome).or_default() += 1);
}

/// Counts a container that ended because of a lack of memory.
pub fn oom_kill() {
    COUNTERS.with_borrow_mut(|counters| counters.oom_kills += 1);
}

/// Time of the first call, which is made at the daemon's start, in seconds since 1970.
pub fn started_s() -> u64 {
    COUNTERS.with_borrow_mut(|counters| {
        *counters.started_s.get_or_insert_with(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
        })
    })
}

/// Calls `look` with all counters of this thread. `look` must not update counters.
pub fn read<T>(look: impl FnOnce(&Counters) -> T) -> T {
    COUNTERS.with_borrow(look)
}
