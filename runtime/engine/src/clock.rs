//! A wall clock that never goes backwards. Boards without a real-time clock boot in 1970, and clocks are
//! adjusted; the kubelet chooses the newest sandbox by `created_at` (CRI 2.0; BOOT-7). Therefore each
//! returned time is later than all earlier ones, including those in the records of earlier daemons and boots.

use std::cell::Cell;

use coracle_base::time;

/// The clock of the node; there is one per daemon.
#[derive(Default)]
pub struct Clock {
    last_ns: Cell<i64>,
}

impl Clock {
    /// Current time in nanoseconds since 1970; strictly increasing.
    pub fn now_ns(&self) -> i64 {
        self.after(i64::try_from(time::wall().as_nanos()).unwrap_or(i64::MAX))
    }

    /// Ensures that later times of this clock are greater than `ns`, the time of a record.
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
