//! What pods and containers use: what the kubelet asks for every ten seconds of a node's life.
//!
//! ```text
//!   cgroup files ─► read when asked, never in between ─► rate from the last two readings (`gauges`)
//!   writable layers ─► walked by a worker, when asked and the last walk is old ─► answered as it was then
//!   /proc/MONITOR/net/dev ─► the pod's interfaces
//! ```
//! Nothing wakes up for statistics: a node that nobody asks spends nothing. Rules: CRI 2.22, CRI 2.23.

mod gauges;
mod network;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::log;
use coracle_base::reactor;
use coracle_base::workers::Workers;
use coracle_engine::{Container, Pod, Pods};
use coracle_job::{Job, Outcome, TreeUsage};
use coracle_sandbox::ContainerId;
use coracle_sandbox::cgroup::{Gauge, Pressure, Sample, Usage};

use gauges::{Gauges, Of};
pub(crate) use network::Interface;

/// How old a walk of the writable layers may be before the next is worth its reads; the kubelet asks as often.
const WALK_AGE_MAX: Duration = Duration::from_secs(10);

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
    gauges: Gauges,
    layers: RefCell<HashMap<ContainerId, (i64, TreeUsage)>>,
    walked_at: Cell<Option<Instant>>,
    is_walking: Cell<bool>,
}

impl Stats {
    pub(crate) fn new(pods: Rc<Pods>, workers: Rc<Workers>) -> Rc<Stats> {
        Rc::new(Stats {
            pods,
            workers,
            gauges: Gauges::new(),
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
        self.reading(Of::Container(container.id), || self.pods.container_gauge(container))
    }

    /// Reads a pod; `None` where its cgroup is gone.
    pub(crate) fn pod(&self, pod: &Pod) -> Option<Reading> {
        self.reading(Of::Pod(pod.id), || self.pods.pod_gauge(pod))
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
        of: Of,
        open: impl FnOnce() -> Result<Option<Gauge>, coracle_base::error::Error>,
    ) -> Option<Reading> {
        match self.gauges.read(of, open) {
            Ok(read) => {
                let (sample, nanocores) = read?;
                let Sample { usage, pressure } = sample;
                Some(Reading { at_ns: self.pods.node.kernel.clock.now_ns(), usage, pressure, nanocores })
            }
            Err(error) => {
                log::debug!("statistics left out"; of = of, error = error);
                None
            }
        }
    }

    /// A container's writable layer as of the last walk.
    pub(crate) fn layer(&self, container: &Container) -> Layer {
        let known = self.layers.borrow().get(&container.id).copied();
        let (at_ns, usage) =
            known.unwrap_or_else(|| (self.pods.node.kernel.clock.now_ns(), TreeUsage::default()));
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
            let at_ns = stats.pods.node.kernel.clock.now_ns();
            match measured {
                // What is not there any more is forgotten with the old table.
                Ok(Outcome::Measured(usages)) => {
                    let layers = ids.into_iter().zip(usages);
                    let layers = layers.map(|(id, usage)| (id, (at_ns, usage))).collect();
                    stats.layers.replace(layers);
                }
                Ok(_) => log::error!("writable layers not measured"; error = "the worker did another job"),
                Err(error) => log::warn!("writable layers not measured"; error = error),
            }
            stats.walked_at.set(Some(Instant::now()));
            stats.is_walking.set(false);
        })
        .detach();
    }
}
