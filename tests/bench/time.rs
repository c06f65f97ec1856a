//! Statistics of durations.

use std::fmt;
use std::time::Duration;

/// Median and 99th percentile in milliseconds.
#[derive(Clone, Copy)]
pub(crate) struct Percentiles {
    /// Median.
    pub(crate) p50: f64,
    /// 99th percentile.
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

    /// The percentiles of the series whose median is in the middle.
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

/// The median of a list of values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
