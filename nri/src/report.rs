//! What is counted of each plugin: calls by event and outcome, and how long they took.

use std::time::Duration;

use crate::api::Event;
use crate::connection::Outcome;
use crate::plugin::method;

/// Upper bounds of the latency histogram's buckets, in microseconds; one more is above the last.
pub const BUCKETS_US: [u64; 6] = [100, 1_000, 10_000, 100_000, 1_000_000, 2_000_000];

/// Counts of one event at one plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventReport {
    /// Its name, as `RunPodSandbox`.
    pub event: &'static str,
    /// Answered.
    pub ok: u64,
    /// Refused.
    pub error: u64,
    /// Not answered in time.
    pub timeout: u64,
    /// The connection went away.
    pub lost: u64,
    /// Of all calls together.
    pub total: Duration,
    /// Calls up to 0.1, 1, 10, 100 ms, 1 s, 2 s, and above.
    pub histogram: [u64; BUCKETS_US.len() + 1],
}

/// What is known of one plugin.
#[derive(Clone, Debug)]
pub struct PluginReport {
    /// `10-name`.
    pub title: String,
    /// Subscribed events, bit n-1 for event n.
    pub events: i32,
    /// Built before v0.12.
    pub is_legacy: bool,
    /// Frames and answers that belonged to nothing.
    pub strays: u64,
    /// In the order in which they came first.
    pub calls: Vec<EventReport>,
}

/// The counts of one plugin.
#[derive(Default)]
pub(crate) struct Tally(Vec<EventReport>);

impl Tally {
    pub(crate) fn add<T>(&mut self, event: Event, outcome: &Outcome<T>, took: Duration) {
        let name = method(event);
        let known = self.0.iter().position(|report| report.event == name);
        let at = known.unwrap_or_else(|| {
            self.0.push(EventReport { event: name, ..EventReport::default() });
            self.0.len() - 1
        });
        let report = &mut self.0[at];
        match outcome {
            Outcome::Ok(_) => report.ok += 1,
            Outcome::Refused(_) => report.error += 1,
            Outcome::TimedOut => report.timeout += 1,
            Outcome::Lost => report.lost += 1,
        }
        report.total += took;
        let bucket = BUCKETS_US.iter().position(|bound| took.as_micros() <= u128::from(*bound));
        report.histogram[bucket.unwrap_or(BUCKETS_US.len())] += 1;
    }

    pub(crate) fn report(&self) -> Vec<EventReport> {
        self.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nri_r26_calls_are_counted_by_event_and_outcome() {
        let mut tally = Tally::default();
        tally.add(Event::RunPodSandbox, &Outcome::Ok(()), Duration::from_micros(90));
        tally.add(Event::RunPodSandbox, &Outcome::<()>::TimedOut, Duration::from_secs(3));
        tally.add(Event::StopContainer, &Outcome::<()>::Lost, Duration::from_millis(5));
        let report = tally.report();
        assert_eq!(report[0].event, "RunPodSandbox");
        assert_eq!((report[0].ok, report[0].timeout, report[1].lost), (1, 1, 1));
        assert_eq!(report[0].histogram, [1, 0, 0, 0, 0, 0, 1]);
        assert_eq!(report[1].histogram[2], 1);
    }
}
