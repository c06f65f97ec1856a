//! Every pod and container of the node, as lists and look-ups see them, and what they are made on and with ([`Node`]).

use std::cell::{Cell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_sandbox::cgroup::{CgroupPath, Detail, Driver, Gauge};
use coracle_sandbox::{ContainerId, PodId};
use event_listener::Event as Changed;
use smol::lock::{Mutex, OnceCell as Latch};

use crate::lifecycle::LifecycleHooks;
use crate::link::Link;
use crate::node::Node;
use crate::notices::{Happened, Notice};
use crate::operations::Operations;
use crate::record::{ContainerRecord, Kept, PodRecord};
use crate::unknown::Unknown;
use crate::{notices, output, spec};

/// Longest time for the kernel to let go of killed processes: only uninterruptible sleep outlasts it, and then the
/// caller is told and tries again (CRI 2.6).
pub(crate) const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Most different warnings that are remembered; texts may hold names that a client chose.
const WARNINGS_MAX: usize = 256;

/// Every pod and container by its id, and who has which name.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) pods: RefCell<BTreeMap<PodId, Rc<Pod>>>,
    pub(crate) names: RefCell<HashMap<spec::PodName, PodId>>,
    pub(crate) containers: RefCell<BTreeMap<ContainerId, Rc<Container>>>,
}

/// Every pod of this node.
pub struct Pods {
    /// What they are made on and with.
    pub node: Node,
    /// Who follows their life.
    pub(crate) hooks: Rc<dyn LifecycleHooks>,
    pub(crate) table: Table,
    /// What was warned of: a limit this kernel lacks is asked for by every container.
    pub(crate) warned: RefCell<BTreeSet<String>>,
    pub(crate) listeners: notices::Listeners,
    /// What the start could not find out for now.
    pub(crate) unknown: RefCell<BTreeMap<PodId, Unknown>>,
    /// What is being made, started, stopped and removed.
    pub operations: Rc<Operations>,
    /// Of every ExecSync in flight.
    pub(crate) exec_output: Rc<output::Budget>,
}

/// One pod sandbox.
pub struct Pod {
    /// The id, 64 hex digits where it is printed.
    pub id: PodId,
    pub(crate) record: RefCell<PodRecord>,
    pub(crate) link: RefCell<Option<Rc<Link>>>,
    /// How many links there have been: what an earlier one tells of its end means nothing.
    pub(crate) links: Cell<u32>,
    /// Held by whoever makes, stops or removes the sandbox.
    pub(crate) operation: Mutex<()>,
    /// How RunPodSandbox went; identical requests wait for it.
    pub(crate) made: Latch<Result<(), Error>>,
    /// A client has used the id, so the answer that holds it arrived: from now on an identical request is a duplicate,
    /// not the retry of one whose answer was lost (RETRY-1).
    pub(crate) is_known: Cell<bool>,
    pub(crate) names: RefCell<HashMap<spec::ContainerName, ContainerId>>,
    /// Plugins have accepted it, or were there before this daemon: they are to hear of its end.
    pub(crate) is_offered: Cell<bool>,
    /// Everything it was made of is undone.
    pub(crate) is_down: Cell<bool>,
    /// "Ready" is durable, and a note holds it back.
    pub(crate) is_ahead: Cell<bool>,
    /// What ADD will be asked, where that is durable already.
    pub(crate) planned: RefCell<Option<coracle_network::Recorded>>,
    pub(crate) last_exec: Cell<u32>,
    pub(crate) execs: RefCell<HashMap<u32, smol::channel::Sender<coracle_sandbox::Exit>>>,
}

/// A stop of a container under way: the signal is out, and SIGKILL follows at `kill_at` (CRI 2.12).
pub(crate) struct Stop {
    pub(crate) kill_at: Cell<Instant>,
    /// A later call made `kill_at` earlier.
    pub(crate) sooner: Changed,
}

/// One container.
pub struct Container {
    /// The id, 64 hex digits where it is printed.
    pub id: ContainerId,
    /// The pod sandbox that it is in.
    pub pod: Rc<Pod>,
    pub(crate) record: RefCell<ContainerRecord>,
    pub(crate) operation: Mutex<()>,
    pub(crate) made: Latch<Result<(), Error>>,
    /// It is made, and in the lists; plugins may still be hearing of it.
    pub(crate) is_listed: Cell<bool>,
    /// As of a pod.
    pub(crate) is_known: Cell<bool>,
    /// Filled when the state is Exited and all clean-up that the exit calls for is under way.
    pub(crate) exited: Latch<()>,
    pub(crate) stop: RefCell<Option<Rc<Stop>>>,
    /// Filled when plugins have heard of its end.
    pub(crate) stop_told: Latch<()>,
    /// When it was started, where "running" since then is durable and a note holds it back.
    pub(crate) ahead: Cell<Option<i64>>,
    /// It is over, and its cgroup is gone.
    pub(crate) is_cleared: Cell<bool>,
    /// Held by whoever tells systemd its limits.
    pub(crate) scope: Mutex<()>,
    /// Of the main process as the node sees it; 0 while it does not run.
    pub(crate) pid: Cell<i32>,
    /// Of the main process, also when it has ended.
    pub(crate) last_pid: Cell<i32>,
    /// The number in the name of an exec's cgroup that no exec uses, for the next one.
    pub(crate) spare_exec_cgroup: Cell<Option<u32>>,
}

impl Pods {
    /// Nothing yet: [`Pods::recover`] fills it before the first call is served.
    pub fn new(node: Node, hooks: Rc<dyn LifecycleHooks>) -> Rc<Self> {
        Rc::new(Self {
            node,
            hooks,
            table: Table::default(),
            warned: RefCell::default(),
            listeners: notices::Listeners::default(),
            unknown: RefCell::default(),
            operations: Rc::default(),
            exec_output: output::Budget::new(),
        })
    }

    /// The pods that lists show, newest first.
    pub fn pods(&self) -> Vec<Rc<Pod>> {
        let mut pods: Vec<_> =
            self.table.pods.borrow().values().filter(|pod| pod.is_visible()).cloned().collect();
        pods.sort_by_key(|pod| std::cmp::Reverse(pod.record().created_at_ns));
        pods
    }

    /// The containers that lists show, newest first.
    pub fn containers(&self) -> Vec<Rc<Container>> {
        let containers = self.table.containers.borrow();
        let mut containers: Vec<_> =
            containers.values().filter(|container| container.is_visible()).cloned().collect();
        containers.sort_by_key(|container| std::cmp::Reverse(container.record().created_at_ns));
        containers
    }

    /// The pod with this id or unique prefix of one, as a client names it.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for a prefix that several have.
    pub fn pod(&self, id: &str) -> Result<Rc<Pod>, Error> {
        let pod =
            find(self.table.pods.borrow().iter().filter(|(_, pod)| pod.is_visible()), id, "pod sandbox")?;
        pod.is_known.set(true);
        Ok(pod)
    }

    /// The container with this id or unique prefix of one, as a client names it.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for a prefix that several have.
    pub fn container(&self, id: &str) -> Result<Rc<Container>, Error> {
        let containers = self.table.containers.borrow();
        let container =
            find(containers.iter().filter(|(_, container)| container.is_visible()), id, "container")?;
        container.is_known.set(true);
        Ok(container)
    }

    /// As [`Pods::container`], for one that is no client: knowing its id tells nothing of answers that arrived.
    pub fn container_for_plugin(&self, id: &str) -> Option<Rc<Container>> {
        let containers = self.table.containers.borrow();
        id.parse().ok().and_then(|id| containers.get(&id)).filter(|container| container.is_visible()).cloned()
    }

    /// Warns of something that is left out, once in the daemon's life.
    pub(crate) fn warn_once(&self, text: String) {
        let mut warned = self.warned.borrow_mut();
        if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
            log::warn!("left out, said once"; reason = text);
            warned.insert(text);
        }
    }

    /// Calls `listener` at every change from now on, until it answers that it listens no more.
    pub fn listen(&self, listener: Box<dyn Fn(&Notice<'_>) -> bool>) {
        self.listeners.add(listener);
    }

    /// How many pods run under a monitor of an older build.
    pub fn outdated(&self) -> usize {
        let is_outdated = |pod: &&Rc<Pod>| pod.link.borrow().as_ref().is_some_and(|link| link.is_outdated());
        self.table.pods.borrow().values().filter(is_outdated).count()
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.listeners.len()
    }

    /// The daemon is stopping: where no pod is left, neither is the cgroup that it made for them.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn release_cgroup_parent(&self) -> Result<(), Error> {
        match self.node.placement.driver {
            Driver::Cgroupfs => {
                Ok(self.node.cgroups.unmake_if_unused(&CgroupPath::parse(&self.node.placement.parent)?)?)
            }
            Driver::Systemd => Ok(()),
        }
    }

    /// Lets every listener go: the daemon is stopping.
    pub fn end_listening(&self) {
        self.listeners.clear();
    }

    pub(crate) fn tell(&self, happened: Happened, id: &impl std::fmt::Display, pod: &Rc<Pod>) {
        // Mostly nobody listens, and an id is 64 digits.
        if self.listeners.len() > 0 {
            let at_ns = self.node.kernel.clock.now_ns();
            self.listeners.tell(&Notice { happened, id: id.to_string(), pod, at_ns });
        }
    }

    /// UpdatePodSandboxResources: kept and shown. The kubelet has changed the pod's own cgroup before it calls.
    ///
    /// # Errors
    /// A refusal by who follows the pod's life; a record that could not be written.
    pub async fn update_pod(
        self: &Rc<Self>,
        pod: Rc<Pod>,
        overhead: Option<spec::Resources>,
        resources: Option<spec::Resources>,
    ) -> Result<(), Error> {
        let pods = Rc::clone(self);
        let work = async move {
            let _operation = pod.operation.lock().await;
            let turn = pods.hooks.begin(&pods, &pod).await;
            turn.update_pod(&pod, overhead.as_ref(), resources.as_ref()).await?;
            let mut record: PodRecord = pod.record().clone();
            record.spec.overhead = overhead.or(record.spec.overhead);
            record.spec.resources = resources.or(record.spec.resources);
            record.commit(&pods.node.paths)?;
            *pod.record.borrow_mut() = record;
            turn.updated_pod(&pod).await;
            Ok(())
        };
        self.operations.run(work).await
    }

    /// What statistics of a container are read from; `None` where its cgroup is gone.
    ///
    /// # Errors
    /// What the kernel did not let be opened.
    pub fn container_gauge(&self, container: &Container) -> Result<Option<Gauge>, Error> {
        Ok(self.node.cgroups.gauge(&container.cgroup()?)?)
    }

    /// What statistics of a pod are read from, its parent cgroup, which the kubelet has made for it; `None` where it is gone.
    ///
    /// # Errors
    /// What the kernel did not let be opened.
    pub fn pod_gauge(&self, pod: &Pod) -> Result<Option<Gauge>, Error> {
        let parent = CgroupPath::parse(&pod.record().cgroup_parent)?;
        Ok(self.node.cgroups.gauge(&parent)?)
    }

    /// What else a container's cgroup counts; `None` where it is gone.
    ///
    /// # Errors
    /// What could not be read.
    pub fn container_detail(&self, container: &Container) -> Result<Option<Detail>, Error> {
        Ok(self.node.cgroups.detail(&container.cgroup()?)?)
    }

    /// What a container writes, on the host.
    pub fn writable_layer(&self, container: &Container) -> PathBuf {
        self.node.paths.container(container.pod.id, container.id).join("upper")
    }

    /// The containers of a pod, made or being made.
    pub(crate) fn containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        self.table.containers.borrow().values().filter(|container| container.pod.id == pod).cloned().collect()
    }
}

/// Looks `id` up: whole, or as a prefix that names only one (CRI 2.0: never a guess).
fn find<'a, K: std::fmt::Display + 'a, V: Clone + 'a>(
    entries: impl Iterator<Item = (&'a K, &'a V)>,
    id: &str,
    what: &str,
) -> Result<V, Error> {
    let is_digits = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut found = entries.filter(|(key, _)| is_digits && key.to_string().starts_with(id));
    match (found.next(), found.next()) {
        (Some((_, value)), None) => Ok(value.clone()),
        (None, _) => Err(Error::new(Kind::NotFound, format!("{what} {id:?}: not found"))),
        (Some(_), Some(_)) => {
            Err(Error::new(Kind::InvalidArgument, format!("{what} {id:?}: several ids start so")))
        }
    }
}

impl Pod {
    pub(crate) fn new(record: PodRecord) -> Rc<Self> {
        Rc::new(Self {
            id: record.id,
            record: RefCell::new(record),
            link: RefCell::default(),
            links: Cell::new(0),
            operation: Mutex::new(()),
            made: Latch::new(),
            is_known: Cell::new(false),
            names: RefCell::default(),
            is_offered: Cell::new(false),
            is_down: Cell::new(false),
            is_ahead: Cell::new(false),
            planned: RefCell::default(),
            last_exec: Cell::new(0),
            execs: RefCell::default(),
        })
    }

    /// The record as it is now. Not to be held across an await.
    pub fn record(&self) -> Ref<'_, PodRecord> {
        self.record.borrow()
    }

    /// Of the monitor, as the node sees it; 0 when there is none.
    pub fn pid(&self) -> i32 {
        self.link.borrow().as_ref().map_or(0, |link| link.pid())
    }

    /// Whether it has a network namespace of its own.
    pub fn has_network(&self) -> bool {
        self.record().spec.namespaces.network == spec::Sharing::Pod
    }

    pub(crate) fn is_visible(&self) -> bool {
        self.record().state.is_visible()
    }

    pub(crate) fn link(&self) -> Result<Rc<Link>, Error> {
        let link = self.link.borrow().clone();
        link.ok_or_else(|| {
            // A pod that is ready has one, which could not be reached since the start.
            let (kind, why) = match self.record().state.is_ready() {
                true => (Kind::Unavailable, "its monitor has not been reached yet"),
                false => (Kind::FailedPrecondition, "has no monitor"),
            };
            Error::new(kind, format!("pod sandbox {:.13}: {why}", self.id))
        })
    }

    pub(crate) fn cgroup(&self) -> Result<CgroupPath, Error> {
        self.record().cgroup(&self.id)
    }
}

impl Container {
    pub(crate) fn new(pod: Rc<Pod>, record: ContainerRecord) -> Rc<Self> {
        Rc::new(Self {
            id: record.id,
            pod,
            record: RefCell::new(record),
            operation: Mutex::new(()),
            made: Latch::new(),
            is_listed: Cell::new(false),
            is_known: Cell::new(false),
            exited: Latch::new(),
            stop: RefCell::default(),
            stop_told: Latch::new(),
            pid: Cell::new(0),
            last_pid: Cell::new(0),
            spare_exec_cgroup: Cell::new(None),
            ahead: Cell::new(None),
            is_cleared: Cell::new(false),
            scope: Mutex::new(()),
        })
    }

    /// The record as it is now. Not to be held across an await.
    pub fn record(&self) -> Ref<'_, ContainerRecord> {
        self.record.borrow()
    }

    /// Of the main process, as the node sees it; 0 when it does not run.
    pub fn pid(&self) -> i32 {
        self.pid.get()
    }

    /// As [`Container::pid`], but also when it has ended.
    pub fn last_pid(&self) -> i32 {
        self.last_pid.get()
    }

    pub(crate) fn set_pid(&self, pid: i32) {
        self.pid.set(pid);
        self.last_pid.set(pid);
    }

    pub(crate) fn is_visible(&self) -> bool {
        self.is_listed.get()
    }

    /// It is made: lists show it, and calls find it.
    pub(crate) fn list(&self) {
        self.is_listed.set(true);
    }

    pub(crate) fn cgroup(&self) -> Result<CgroupPath, Error> {
        let record = self.record();
        match record.adjusted.cgroup.as_str() {
            "" => self.pod.record().cgroup(&self.id),
            path => Ok(CgroupPath::parse(path)?),
        }
    }

    /// `container 3f2a… (web/nginx)`: how errors and logs name it.
    pub(crate) fn title(&self) -> String {
        let pod = self.pod.record();
        format!("container {:.13} ({}/{})", self.id, pod.spec.name.name, self.record().spec.name.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_never_a_guess() {
        let ids = ["aa10".to_owned(), "aa20".to_owned(), "bb00".to_owned()];
        let entries = || ids.iter().map(|id| (id, id));
        assert_eq!(find(entries(), "bb", "pod").unwrap(), "bb00");
        assert_eq!(find(entries(), "aa10", "pod").unwrap(), "aa10");
        for (id, expected) in
            [("aa", "several ids"), ("", "not found"), ("cc", "not found"), ("b*", "not found")]
        {
            let error = find(entries(), id, "pod").unwrap_err().to_string();
            assert!(error.contains(expected), "{id:?}: {error}");
        }
    }
}
