//! The cgroup files that statistics are read from, open for as long as somebody asks, and the rates between two readings.
//!
//! The kubelet asks every ten seconds for as long as it lives. Whoever is not asked about for a minute is closed: a last
//! wake-up after the last question, and none while nobody asks.

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

/// A rate over less than this is noise.
const RATE_SPAN_MIN: Duration = Duration::from_secs(1);
/// A rate over more than this is history.
const RATE_SPAN_MAX: Duration = Duration::from_secs(30);
/// How long nobody may have asked before files are closed and a rate is forgotten.
const KEPT: Duration = Duration::from_secs(60);
/// The part of the descriptors that the daemon may have which gauges may take.
const DESCRIPTORS_PART: u64 = 4;

/// What is read.
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

/// See the module.
pub(super) struct Gauges {
    kept: Rc<RefCell<HashMap<Of, Kept>>>,
    buffer: RefCell<Vec<u8>>,
    /// Most descriptors; what comes beyond is opened anew each time.
    descriptors_max: usize,
    descriptors: Rc<Cell<usize>>,
    /// Whether the task that closes them is there.
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

    /// Reads one, opening it where it is not open; with its rate. `None` where the cgroup is gone.
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

    /// Closes what nobody has asked about for long, until nothing is left.
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

/// The last reading that a rate was, or will be, computed from.
#[derive(Clone, Copy, Debug)]
struct Rate {
    at: Instant,
    cpu_ns: u64,
    nanocores: Option<u64>,
}

impl Rate {
    /// The next reading. Within the shortest span the last rate stands; over the longest, or where the counter was
    /// reset, there is none.
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
    fn rates_need_two_readings_that_are_neither_too_close_nor_too_far() {
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
