//! Keeps the cgroup files of statistics open while they are requested, and computes rates between two readings.
//!
//! The kubelet requests statistics every ten seconds. Files without a request for a minute are closed: the last wake-up is a
//! minute after the last request.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use coracle_base::reactor;
use coracle_sandbox::cgroup::{BUFFER_BYTES, Gauge, Sample};
use coracle_sandbox::{ContainerId, PodId};
use rustix::process::{Resource, getrlimit};

/// Minimum time between two readings for a rate; with a shorter time the rate would be inaccurate.
const RATE_SPAN_MIN: Duration = Duration::from_secs(1);
/// Maximum time between two readings for a rate; with a longer time the rate would be out of date.
const RATE_SPAN_MAX: Duration = Duration::from_secs(30);
/// Time without a request after which files are closed and a rate is dropped.
const KEPT: Duration = Duration::from_secs(60);
/// Divisor for the share of the daemon's descriptors that may be used: one part in this many.
const DESCRIPTORS_PART: u64 = 4;

/// The object of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    Container(ContainerId),
    Pod(PodId),
}

impl fmt::Display for Of {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container(id) => write!(out, "container {id:.13}"),
            Self::Pod(id) => write!(out, "pod {id:.13}"),
        }
    }
}

/// The open files and rates; see the module's documentation.
pub(super) struct Gauges {
    kept: Rc<RefCell<HashMap<Of, Kept>>>,
    buffer: RefCell<Vec<u8>>,
    /// Maximum number of open descriptors; further files are opened and closed for each reading.
    descriptors_max: usize,
    descriptors: Rc<Cell<usize>>,
    /// Whether the task that closes files is running.
    is_expiring: Rc<Cell<bool>>,
}

struct Kept {
    gauge: Option<Gauge>,
    rate: Option<Rate>,
    read_at: Instant,
}

impl Gauges {
    pub(super) fn new() -> Gauges {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Gauges {
            kept: Rc::default(),
            buffer: RefCell::default(),
            descriptors_max: usize::try_from(limit / DESCRIPTORS_PART).unwrap_or(usize::MAX),
            descriptors: Rc::default(),
            is_expiring: Rc::default(),
        }
    }

    /// Reads one object, opening its files if necessary, and computes its rate. `None` if its cgroup does not
    /// exist.
    pub(super) fn read(
        &self,
        of: Of,
        open: impl FnOnce() -> Result<Option<Gauge>, Error>,
    ) -> Result<Option<(Sample, Option<u64>)>, Error> {
        self.expire();
        let mut kept = self.kept.borrow_mut();
        let now = Instant::now();
        let known = kept.entry(of).or_insert(Kept { gauge: None, rate: None, read_at: now });
        known.read_at = now;
        let mut passing = None;
        if known.gauge.is_none() {
            let Some(gauge) = open()? else {
                kept.remove(&of);
                return Ok(None);
            };
            match self.descriptors.get() + gauge.descriptors() {
                all if all <= self.descriptors_max => {
                    self.descriptors.set(all);
                    known.gauge = Some(gauge);
                }
                _ => passing = Some(gauge),
            }
        }
        let mut buffer = self.buffer.borrow_mut();
        buffer.resize(BUFFER_BYTES, 0);
        let sample = match known.gauge.as_ref().or(passing.as_ref()) {
            Some(gauge) => gauge.read(&mut buffer)?,
            None => None,
        };
        let Some(sample) = sample else {
            let gone = kept.remove(&of).and_then(|gone| gone.gauge);
            self.descriptors.set(self.descriptors.get() - gone.map_or(0, |gauge| gauge.descriptors()));
            return Ok(None);
        };
        if let Some(cpu_ns) = sample.usage.cpu_ns {
            let first = Rate { at: now, cpu_ns, nanocores: None };
            known.rate = Some(known.rate.map_or(first, |rate| rate.next(now, cpu_ns)));
        }
        Ok(Some((sample, known.rate.and_then(|rate| rate.nanocores))))
    }

    /// Closes files without recent requests, until no file is open.
    fn expire(&self) {
        if self.is_expiring.replace(true) {
            return;
        }
        let is_expiring = Rc::clone(&self.is_expiring);
        let (kept, descriptors) = (Rc::downgrade(&self.kept), Rc::clone(&self.descriptors));
        reactor::spawn(async move {
            loop {
                reactor::sleep(KEPT).await;
                let Some(kept) = kept.upgrade() else { return };
                let mut kept = kept.borrow_mut();
                kept.retain(|_, one| one.read_at.elapsed() < KEPT);
                descriptors.set(kept.values().flat_map(|one| &one.gauge).map(Gauge::descriptors).sum());
                if kept.is_empty() {
                    *kept = HashMap::new();
                    is_expiring.set(false);
                    return;
                }
            }
        })
        .detach();
    }
}

/// The reading from which the last and the next rate are computed.
#[derive(Clone, Copy, Debug)]
struct Rate {
    at: Instant,
    cpu_ns: u64,
    nanocores: Option<u64>,
}

impl Rate {
    /// Adds a reading. If the time since the last reading is below the minimum, the last rate is kept; if it is above the
    /// maximum, or the counter was reset, there is no rate.
    fn next(self, at: Instant, cpu_ns: u64) -> Rate {
        let span = at.saturating_duration_since(self.at);
        if span < RATE_SPAN_MIN && cpu_ns >= self.cpu_ns {
            return self;
        }
        let used = cpu_ns.checked_sub(self.cpu_ns).filter(|_| span <= RATE_SPAN_MAX);
        let rate = used.map(|used| (u128::from(used) * 1_000_000_000 / span.as_nanos().max(1)) as u64);
        Rate { at, cpu_ns, nanocores: rate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_need_two_readings_at_a_suitable_interval() {
        let start = Instant::now();
        let after = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let first = Rate { at: start, cpu_ns: 1_000, nanocores: None };
        assert_eq!(first.next(after(0.5), 2_000).nanocores, None, "too close");
        let second = first.next(after(2.0), 1_000_001_000);
        assert_eq!(second.nanocores, Some(500_000_000));
        assert_eq!(
            second.next(after(2.1), 1_100_000_000).nanocores,
            Some(500_000_000),
            "the last one stands"
        );
        assert_eq!(second.next(after(60.0), 1_100_000_000).nanocores, None, "too far");
        assert_eq!(second.next(after(4.0), 5).nanocores, None, "the counter was reset");
    }
}
