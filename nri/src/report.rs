//! Counters of each plugin: calls by event and outcome, and their duration.

use std::time::Duration;

use crate::api::Event;
use crate::connection::Outcome;
use crate::plugin::method;

/// Upper bounds of the latency histogram's buckets, in microseconds; there is one more bucket above the last.
pub const BUCKETS_US: [u64; 6] = [100, 1_000, 10_000, 100_000, 1_000_000, 2_000_000];

/// Counters of one event of one plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventReport {
    /// Name of the event, for example `RunPodSandbox`.
    pub event: &'static str,
    /// Number of answered calls.
    pub ok: u64,
    /// Number of calls that returned an error.
    pub error: u64,
    /// Number of calls that timed out.
    pub timeout: u64,
    /// Number of calls whose connection was lost.
    pub lost: u64,
    /// Total duration of all calls of this event.
    pub total: Duration,
    /// Number of calls by duration: up to 0.1, 1, 10, 100 ms, 1 s, 2 s, and above.
    pub histogram: [u64; BUCKETS_US.len() + 1],
}

/// State and counters of one plugin.
#[derive(Clone, Debug)]
pub struct PluginReport {
    /// Index and name of the plugin: `10-name`.
    pub title: String,
    /// Subscribed events: bit n-1 is event n.
    pub events: i32,
    /// Whether the plugin was built before v0.12.
    pub is_legacy: bool,
    /// Number of unexpected frames and answers.
    pub strays: u64,
    /// Counters by event, in the order of the first calls.
    pub calls: Vec<EventReport>,
}

/// The counters of one plugin.
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

    /// Tests rule NRI-R26 of docs/specs/nri.md.
    #[test]
    fn calls_are_counted_by_event_and_outcome() {
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
