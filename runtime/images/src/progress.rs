//! Progress of a pull or an import: bytes, layers, rate and remaining time, for the log and for `coracle
//! image`.

use std::cell::Cell;
use std::time::{Duration, Instant};

use coracle_base::log;
use coracle_job::Progress;

/// Interval of log messages about a running pull or import.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Length of a measuring window. The rate is the average over the last one to two windows.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// The progress of a pull or an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulling {
    /// Reference of the image, or path of the archive.
    pub name: String,
    /// The worker's last report.
    pub progress: Progress,
    /// Current rate in bytes per second.
    pub rate: u64,
    /// Estimated remaining time; `None` if no data arrives or the size is unknown.
    pub left: Option<Duration>,
    /// Time since the start.
    pub since: Duration,
}

/// A running import, for its progress.
pub(super) struct Import {
    /// Path of the archive or store.
    pub(super) name: String,
    pub(super) tracker: Tracker,
}

/// The state of the progress of a running pull or import.
pub(super) struct Tracker {
    /// Message of the log lines.
    message: &'static str,
    begun: Instant,
    progress: Cell<Progress>,
    /// For the previous and the current window: time of its start, and downloaded bytes at that time.
    marks: Cell<[(Instant, u64); 2]>,
    logged: Cell<Instant>,
}

impl Tracker {
    pub(super) fn new(message: &'static str, now: Instant) -> Tracker {
        Tracker {
            message,
            begun: now,
            progress: Cell::default(),
            marks: Cell::new([(now, 0); 2]),
            logged: Cell::new(now),
        }
    }

    /// Stores the worker's report and logs it at intervals.
    pub(super) fn note(&self, name: &impl ToString, progress: Progress, now: Instant) {
        self.progress.set(progress);
        let [_, this] = self.marks.get();
        if now.duration_since(this.0) >= RATE_WINDOW {
            self.marks.set([this, (now, progress.bytes_fetched)]);
        }
        if now.duration_since(self.logged.get()) >= LOG_INTERVAL {
            self.logged.set(now);
            let Pulling { name, progress, rate, left, since } = self.view(name, now);
            log::info!(
                self.message;
                name = name,
                bytes = progress.bytes_done,
                of = progress.bytes_total,
                layers = progress.layers_done,
                of_layers = progress.layers_total,
                rate = rate,
                eta_s = left.map_or_else(|| "unknown".to_owned(), |left| left.as_secs().to_string()),
                s = since.as_secs()
            );
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.get()
    }

    pub(super) fn since(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn view(&self, name: &impl ToString, now: Instant) -> Pulling {
        let (progress, [(at, fetched), _]) = (self.progress.get(), self.marks.get());
        let (bytes, ms) =
            (progress.bytes_fetched.saturating_sub(fetched), now.duration_since(at).as_millis());
        let rate = (u128::from(bytes) * 1000).checked_div(ms).unwrap_or(0) as u64;
        let missing =
            progress.bytes_total.checked_sub(progress.bytes_done).filter(|_| progress.bytes_total > 0);
        let left = missing.and_then(|missing| missing.checked_div(rate)).map(Duration::from_secs);
        Pulling { name: name.to_string(), progress, rate, left, since: now.duration_since(self.begun) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_recent_and_determines_the_remaining_time() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let tracker = Tracker::new("pulling image", begun);
        let note = |seconds, fetched| {
            let progress = Progress {
                bytes_done: 500 + fetched,
                bytes_total: 10_500,
                bytes_fetched: fetched,
                ..Progress::default()
            };
            tracker.note(&"x", progress, at(seconds));
        };
        assert_eq!(tracker.view(&"x", begun).left, None, "the size is unknown");
        note(2, 2000);
        let view = tracker.view(&"x", at(2));
        assert_eq!((view.rate, view.left), (1000, Some(Duration::from_secs(8))));
        for seconds in 3..=20 {
            note(seconds, 2000 + 100 * (seconds - 2));
        }
        assert_eq!(tracker.view(&"x", at(20)).rate, 100, "the fast start no longer counts");
        let stalled = tracker.view(&"x", at(10_000));
        assert_eq!((stalled.rate, stalled.left), (0, None));
    }
}
