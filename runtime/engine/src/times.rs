//! Durations of the steps of an operation, for its log message.

use std::fmt;
use std::time::Duration;

/// Steps with their durations, printed as `monitor 2.3 ms, network 4.1 ms`. Steps of less than 0.1 ms are
/// omitted.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<(&'static str, Duration)>);

impl Times {
    /// Adds a step with its duration.
    pub(crate) fn add(&mut self, step: &'static str, time: Duration) {
        self.0.push((step, time));
    }
}

impl fmt::Display for Times {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (step, time) in &self.0 {
            let tenths = (time.as_micros() + 50) / 100;
            if tenths > 0 {
                write!(out, "{between}{step} {}.{} ms", tenths / 10, tenths % 10)?;
                between = ", ";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Times};

    #[test]
    fn only_steps_that_took_time_are_shown() {
        let mut times = Times::default();
        for (step, micros) in [("cgroup", 49), ("monitor", 2340), ("plugins", 0), ("network", 50)] {
            times.add(step, Duration::from_micros(micros));
        }
        assert_eq!(times.to_string(), "monitor 2.3 ms, network 0.1 ms");
        assert_eq!(Times::default().to_string(), "");
    }
}
