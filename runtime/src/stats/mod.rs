//! What pods and containers use: what the kubelet asks for every ten seconds of a node's life.
//!
//! ```text
//!   cgroup files ─► read when asked, never in between ─► rate from the last two readings
//!   writable layers ─► walked by a worker, when asked and the last walk is old ─► answered as it was then
//!   /proc/MONITOR/net/dev ─► the pod's interfaces
//! ```
//! Nothing wakes up for statistics: a node that nobody asks spends nothing. Rules: CRI section 2.22, 2.23.

mod network;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_job::{Job, Outcome, TreeUsage};
use coracle_sandbox::ContainerId;
use coracle_sandbox::cgroup::{Pressure, Usage};

use crate::log;
use crate::pod::{Container, Pod, Pods};
use crate::reactor;
use crate::workers::Workers;

pub(crate) use network::Interface;

/// How old a walk of the writable layers may be before the next is worth its reads; the kubelet asks as often.
const WALK_AGE_MAX: Duration = Duration::from_secs(10);
/// A rate over less than this is noise.
const RATE_SPAN_MIN: Duration = Duration::from_secs(1);
/// A rate over more than this is history.
const RATE_SPAN_MAX: Duration = Duration::from_secs(30);

/// A reading of one container or pod.
pub(crate) struct Reading {
    /// Wall clock, nanoseconds since 1970.
    pub(crate) at_ns: i64,
    pub(crate) usage: Usage,
    /// On CPU, memory and I/O; where the kernel counts it.
    pub(crate) pressure: [Option<Pressure>; 3],
    /// CPU nanoseconds a second, over the last two readings; `None` before there are two.
    pub(crate) nanocores: Option<u64>,
}

/// A writable layer as of its last walk; zeros before the first.
pub(crate) struct Layer {
    pub(crate) at_ns: i64,
    pub(crate) directory: PathBuf,
    pub(crate) usage: TreeUsage,
}

/// See the module.
pub(crate) struct Stats {
    pods: Rc<Pods>,
    workers: Rc<Workers>,
    rates: RefCell<HashMap<String, Rate>>,
    layers: RefCell<HashMap<ContainerId, (i64, TreeUsage)>>,
    walked_at: Cell<Option<Instant>>,
    is_walking: Cell<bool>,
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

impl Stats {
    pub(crate) fn new(pods: Rc<Pods>, workers: Rc<Workers>) -> Rc<Stats> {
        Rc::new(Stats {
            pods,
            workers,
            rates: RefCell::default(),
            layers: RefCell::default(),
            walked_at: Cell::new(None),
            is_walking: Cell::new(false),
        })
    }

    /// The running containers: what statistics are of. Whoever lists them wants their layers soon.
    pub(crate) fn containers(self: &Rc<Self>) -> Vec<Rc<Container>> {
        let containers = self.pods.containers();
        let running: Vec<_> =
            containers.into_iter().filter(|container| container.record().state.is_running()).collect();
        self.refresh_layers(&running);
        running
    }

    /// Reads a container; `None` where it has ended meanwhile.
    pub(crate) fn container(&self, container: &Container) -> Option<Reading> {
        let usage = self.pods.container_usage(container);
        let pressure = self.pods.container_pressure(container);
        self.reading(container.id.to_string(), usage, pressure)
    }

    /// Reads a pod; `None` where its cgroup is gone.
    pub(crate) fn pod(&self, pod: &Pod) -> Option<Reading> {
        let usage = self.pods.pod_usage(pod);
        self.reading(pod.id.to_string(), usage, self.pods.pod_pressure(pod))
    }

    /// The interfaces of a pod's own network namespace but the loopback; `None` where it has none, or they cannot be read.
    pub(crate) fn interfaces(&self, pod: &Pod) -> Option<Vec<Interface>> {
        if !pod.has_network() || pod.pid() == 0 {
            return None;
        }
        let text = std::fs::read_to_string(format!("/proc/{}/net/dev", pod.pid())).ok()?;
        Some(network::parse(&text))
    }

    fn reading(
        &self,
        key: String,
        usage: Result<Option<Usage>, crate::error::Error>,
        pressure: [Option<Pressure>; 3],
    ) -> Option<Reading> {
        let usage = match usage {
            Ok(usage) => usage?,
            Err(error) => {
                log::debug!("statistics left out"; id = key, error = error);
                return None;
            }
        };
        let now = Instant::now();
        let nanocores = usage.cpu_ns.and_then(|cpu_ns| {
            let mut rates = self.rates.borrow_mut();
            let known = rates.get(&key).copied();
            let rate = known.map_or(Rate { at: now, cpu_ns, nanocores: None }, |rate| rate.next(now, cpu_ns));
            rates.insert(key, rate);
            rate.nanocores
        });
        Some(Reading { at_ns: self.pods.node.clock.now_ns(), usage, pressure, nanocores })
    }

    /// A container's writable layer as of the last walk.
    pub(crate) fn layer(&self, container: &Container) -> Layer {
        let known = self.layers.borrow().get(&container.id).copied();
        let (at_ns, usage) = known.unwrap_or_else(|| (self.pods.node.clock.now_ns(), TreeUsage::default()));
        Layer { at_ns, directory: self.pods.writable_layer(container), usage }
    }

    /// Has the layers walked, unless that was done lately or is under way.
    fn refresh_layers(self: &Rc<Self>, running: &[Rc<Container>]) {
        let is_fresh = self.walked_at.get().is_some_and(|at| at.elapsed() < WALK_AGE_MAX);
        if self.is_walking.get() || is_fresh || running.is_empty() {
            return;
        }
        self.is_walking.set(true);
        let ids: Vec<ContainerId> = running.iter().map(|container| container.id).collect();
        let paths = running.iter().map(|container| self.pods.writable_layer(container)).collect();
        let stats = Rc::clone(self);
        reactor::spawn(async move {
            let measured = stats.workers.run(Job::MeasureTrees { paths }, |_, _| ()).await;
            let at_ns = stats.pods.node.clock.now_ns();
            match measured {
                // What is not there any more is forgotten with the old table.
                Ok(Outcome::Measured(usages)) => {
                    let layers = ids.into_iter().zip(usages);
                    let layers = layers.map(|(id, usage)| (id, (at_ns, usage))).collect();
                    stats.layers.replace(layers);
                    stats.forget_rates();
                }
                Ok(_) => log::error!("writable layers not measured"; error = "the worker did another job"),
                Err(error) => log::warn!("writable layers not measured"; error = error),
            }
            stats.walked_at.set(Some(Instant::now()));
            stats.is_walking.set(false);
        })
        .detach();
    }

    /// Rates of what nobody has read for long are of what is gone.
    fn forget_rates(&self) {
        self.rates.borrow_mut().retain(|_, rate| rate.at.elapsed() <= 2 * RATE_SPAN_MAX);
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
