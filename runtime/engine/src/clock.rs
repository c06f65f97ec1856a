//! Wall-clock time that never goes backwards. Boards without a real-time clock boot in 1970, and clocks step; the
//! kubelet takes the newest sandbox by `created_at` (CRI 2.0; BOOT-7). So each time given out is later
//! than every one before, those in the records of earlier daemons and boots included.

use std::cell::Cell;
use std::time::{SystemTime, UNIX_EPOCH};

/// The node's clock; one per daemon.
#[derive(Default)]
pub struct Clock {
    last_ns: Cell<i64>,
}

impl Clock {
    /// Nanoseconds since 1970, strictly rising.
    pub fn now_ns(&self) -> i64 {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        self.after(i64::try_from(wall).unwrap_or(i64::MAX))
    }

    /// Takes note of a time found in a record.
    pub(crate) fn saw(&self, ns: i64) {
        self.last_ns.set(self.last_ns.get().max(ns));
    }

    fn after(&self, wall_ns: i64) -> i64 {
        let now = wall_ns.max(self.last_ns.get().saturating_add(1));
        self.last_ns.set(now);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_rises_even_when_the_clock_steps_back() {
        let clock = Clock::default();
        clock.saw(1_000);
        let given: Vec<i64> = [500, 2_000, 1_999, 2_000].into_iter().map(|wall| clock.after(wall)).collect();
        assert_eq!(given, [1_001, 2_000, 2_001, 2_002]);
    }
}
