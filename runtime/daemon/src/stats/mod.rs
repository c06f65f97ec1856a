//! Resource usage of pods and containers, for which the kubelet asks every ten seconds.
//!
//! ```text
//! cgroup files ─► read on request only ─► rate from the last two readings (`gauges`)
//! writable layers ─► measured by a worker if requested and the last measurement may be out of date
//! (`schedule`) ─► the last measurement is returned
//! /proc/MONITOR/net/dev ─► the pod's interfaces
//! ```
//! Without requests, no work is done. Rules: CRI 2.22, CRI 2.23.

mod gauges;
mod network;
mod schedule;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use coracle_base::log;
use coracle_base::reactor;
use coracle_base::workers::Workers;
use coracle_engine::{Container, Pod, Pods};
use coracle_job::{Job, Outcome, TreeUsage};
use coracle_sandbox::ContainerId;
use coracle_sandbox::cgroup::{Gauge, Pressure, Sample, Usage};

use gauges::{Gauges, Of};
pub(crate) use network::Interface;
use schedule::{Schedule, Signs, Used};

/// Statistics of one container or pod.
pub(crate) struct Reading {
    /// Wall clock in nanoseconds since 1970 at the reading.
    pub(crate) at_ns: i64,
    pub(crate) usage: Usage,
    /// Pressure stall information of CPU, memory and I/O; `None` if the kernel does not provide it.
    pub(crate) pressure: [Option<Pressure>; 3],
    /// CPU nanoseconds per second between the last two readings; `None` before the second reading.
    pub(crate) nanocores: Option<u64>,
}

/// Disk usage of a writable layer at its last measurement.
pub(crate) struct Layer {
    pub(crate) at_ns: i64,
    pub(crate) directory: PathBuf,
    pub(crate) usage: TreeUsage,
}

/// The statistics service; see the module's documentation.
pub(crate) struct Stats {
    pods: Rc<Pods>,
    workers: Rc<Workers>,
    gauges: Gauges,
    layers: RefCell<HashMap<ContainerId, (i64, TreeUsage)>>,
    schedule: RefCell<Schedule>,
    is_measuring: Cell<bool>,
}

impl Stats {
    pub(crate) fn new(pods: Rc<Pods>, workers: Rc<Workers>) -> Rc<Stats> {
        Rc::new(Stats {
            pods,
            workers,
            gauges: Gauges::new(),
            layers: RefCell::default(),
            schedule: RefCell::default(),
            is_measuring: Cell::new(false),
        })
    }

    /// The running containers, which have statistics. The call also starts a measurement of their layers if it is due.
    pub(crate) fn containers(self: &Rc<Self>) -> Vec<Rc<Container>> {
        let mut running = self.pods.containers();
        running.retain(|container| container.record().state.is_running());
        self.refresh_layers(&running);
        running
    }

    /// The running containers of a pod.
    pub(crate) fn containers_of(&self, pod: &Pod) -> Vec<Rc<Container>> {
        let mut running = self.pods.listed_containers_of(pod.id);
        running.retain(|container| container.record().state.is_running());
        running
    }

    /// Reads the statistics of a container; `None` if it has exited.
    pub(crate) fn container(&self, container: &Container) -> Option<Reading> {
        self.reading(Of::Container(container.id), || container.gauge())
    }

    /// Reads the statistics of a pod; `None` if its cgroup does not exist.
    pub(crate) fn pod(&self, pod: &Pod) -> Option<Reading> {
        self.reading(Of::Pod(pod.id), || pod.gauge())
    }

    /// The interfaces of a pod's network namespace except the loopback interface; `None` if the pod has no network namespace,
    /// or they cannot be read.
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
                Some(Reading { at_ns: self.pods.node().kernel.clock.now_ns(), usage, pressure, nanocores })
            }
            Err(error) => {
                log::debug!("cannot read statistics, omitted"; of = of, error = error);
                None
            }
        }
    }

    /// The last measurement of a container's writable layer; `None` before the first one, so that the layer is not reported as
    /// empty.
    pub(crate) fn layer(&self, container: &Container) -> Option<Layer> {
        let (at_ns, usage) = self.layers.borrow().get(&container.id).copied()?;
        Some(Layer { at_ns, directory: container.writable_layer(), usage })
    }

    /// Starts a measurement of the layers if it is due and none is running.
    fn refresh_layers(self: &Rc<Self>, running: &[Rc<Container>]) {
        let Some(first) = running.first() else { return };
        // All layers are on the file system of `--root`.
        let used = || Used::of(&first.writable_layer());
        let has_new = || running.iter().any(|container| !self.layers.borrow().contains_key(&container.id));
        let signs = || Signs { has_new: has_new(), used: used() };
        if self.is_measuring.get() || !self.schedule.borrow().is_due(Instant::now(), signs) {
            return;
        }
        self.is_measuring.set(true);
        let used_before = used();
        let ids: Vec<ContainerId> = running.iter().map(|container| container.id).collect();
        let paths = running.iter().map(|container| container.writable_layer()).collect();
        let stats = Rc::clone(self);
        reactor::spawn(async move {
            let measured = stats.workers.run(Job::MeasureTrees { paths }).await;
            let has_changed = match measured {
                Ok(Outcome::Measured(usages)) => stats.replace_layers(ids.into_iter().zip(usages)),
                Ok(_) => {
                    log::error!("cannot measure writable layers, earlier sizes are reported"; error = "unexpected answer of the worker");
                    true
                }
                Err(error) => {
                    log::warn!("cannot measure writable layers, earlier sizes are reported"; error = error);
                    true
                }
            };
            stats.schedule.borrow_mut().note(Instant::now(), used_before, has_changed);
            stats.is_measuring.set(false);
        })
        .detach();
    }

    /// Replaces the measurements of all layers, so that those of removed containers are dropped. Returns whether the usage of any
    /// container is another one than before.
    fn replace_layers(&self, usages: impl Iterator<Item = (ContainerId, TreeUsage)>) -> bool {
        let at_ns = self.pods.node().kernel.clock.now_ns();
        let layers: HashMap<_, _> = usages.map(|(id, usage)| (id, (at_ns, usage))).collect();
        let before = self.layers.replace(layers);
        let now = self.layers.borrow();
        now.iter().any(|(id, (_, usage))| before.get(id).is_none_or(|(_, before)| before != usage))
    }
}
