//! Times of many runs, in few numbers.

use std::fmt;
use std::time::Duration;

/// The median and the tail of some runs, in milliseconds.
#[derive(Clone, Copy)]
pub(crate) struct Percentiles {
    /// Of half of them.
    pub(crate) p50: f64,
    /// Of all but one in a hundred.
    pub(crate) p99: f64,
}

impl Percentiles {
    pub(crate) fn of(times: &[Duration]) -> Percentiles {
        assert!(!times.is_empty(), "percentiles of no runs");
        let mut times = times.to_vec();
        times.sort();
        let at =
            |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1000.0;
        Percentiles { p50: at(0.5), p99: at(0.99) }
    }

    /// Of several series that whose median is in the middle.
    pub(crate) fn middle(series: &[Vec<Duration>]) -> Percentiles {
        let mut all: Vec<Percentiles> = series.iter().map(|times| Percentiles::of(times)).collect();
        all.sort_by(|one, other| one.p50.total_cmp(&other.p50));
        all[all.len() / 2]
    }
}

/// `p50 / p99 ms`.
impl fmt::Display for Percentiles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.2} / {:.2} ms", self.p50, self.p99)
    }
}

/// The one in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
