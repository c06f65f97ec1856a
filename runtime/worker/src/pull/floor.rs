//! The slowest link that counts as one. A body may take as long as it likes while bytes come; below the floor another
//! endpoint, or the next try, may do better.

use std::time::{Duration, Instant};

use coracle_job::Patience;

/// Watches one body.
pub(super) struct Floor {
    bytes_min: u64,
    window: Duration,
    begun: Instant,
    bytes: u64,
}

impl Floor {
    pub(super) fn new(patience: &Patience) -> Self {
        let window = Duration::from_millis(patience.rate_window_ms);
        let bytes_min = patience.rate_bytes_min.saturating_mul(patience.rate_window_ms) / 1000;
        Self { bytes_min, window, begun: Instant::now(), bytes: 0 }
    }

    /// `count` bytes came; `now` is when.
    ///
    /// # Errors
    /// It was too few of them in the window that ended.
    pub(super) fn passed(&mut self, count: usize, now: Instant) -> Result<(), String> {
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
    fn each_window_brings_enough_or_it_is_over() {
        let mut floor =
            Floor::new(&Patience { rate_bytes_min: 10, rate_window_ms: 2000, ..Patience::default() });
        let at = |begun: Instant, seconds: u64| begun + Duration::from_secs(seconds);
        let begun = floor.begun;
        assert_eq!(floor.passed(1, at(begun, 1)), Ok(()), "the window is open");
        assert_eq!(floor.passed(19, at(begun, 2)), Ok(()), "just enough");
        assert_eq!(floor.passed(1, at(begun, 3)), Ok(()));
        assert!(floor.passed(18, at(begun, 4)).is_err());
    }
}
