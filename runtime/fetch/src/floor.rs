//! The minimum transfer rate. A download may take any time while data arrives; below the minimum rate it is
//! aborted, because another endpoint or a retry may be faster.

use std::time::{Duration, Instant};

use coracle_job::Timeouts;

/// Measures the transfer rate of one body.
#[derive(Debug)]
pub struct Floor {
    bytes_min: u64,
    window: Duration,
    begun: Instant,
    bytes: u64,
}

impl Floor {
    /// Begins to measure now, with the minimum rate of `timeouts`.
    pub fn new(timeouts: &Timeouts) -> Self {
        let window = Duration::from_millis(timeouts.rate_window_ms);
        let bytes_min = timeouts.rate_bytes_min.saturating_mul(timeouts.rate_window_ms) / 1000;
        Self { bytes_min, window, begun: Instant::now(), bytes: 0 }
    }

    /// Counts `count` bytes that arrived at time `now`.
    ///
    /// # Errors
    /// The last measuring interval had too few bytes.
    pub fn passed(&mut self, count: usize, now: Instant) -> Result<(), String> {
        self.bytes += count as u64;
        if now.duration_since(self.begun) < self.window {
            return Ok(());
        }
        if self.bytes < self.bytes_min {
            return Err(format!("too slow: {} bytes in {:?}", self.bytes, self.window));
        }
        (self.begun, self.bytes) = (now, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_below_the_minimum_rate_is_an_error() {
        let mut floor =
            Floor::new(&Timeouts { rate_bytes_min: 10, rate_window_ms: 2000, ..Timeouts::default() });
        let at = |begun: Instant, seconds: u64| begun + Duration::from_secs(seconds);
        let begun = floor.begun;
        assert_eq!(floor.passed(1, at(begun, 1)), Ok(()), "the window is open");
        assert_eq!(floor.passed(19, at(begun, 2)), Ok(()), "just enough");
        assert_eq!(floor.passed(1, at(begun, 3)), Ok(()));
        assert!(floor.passed(18, at(begun, 4)).is_err());
    }
}
