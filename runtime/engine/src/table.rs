//! The table of all pods and containers, and their environment ([`Node`]).

use std::cell::{Cell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, time};
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

/// Time limit for the end of killed processes: only uninterruptible sleep takes longer. The caller then gets
/// an error and retries (CRI 2.6).
pub(crate) const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Maximum number of different warnings that are remembered; texts may contain names from clients.
const WARNINGS_MAX: usize = 256;

/// All pods and containers by their IDs, and the reserved names.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) pods: RefCell<BTreeMap<PodId, Rc<Pod>>>,
    pub(crate) names: RefCell<HashMap<spec::PodName, PodId>>,
    pub(crate) containers: RefCell<BTreeMap<ContainerId, Rc<Container>>>,
}

/// The pods of this node.
pub struct Pods {
    /// The environment of the pods.
    pub node: Node,
    /// The lifecycle hooks, which call NRI plugins.
    pub(crate) hooks: Rc<dyn LifecycleHooks>,
    pub(crate) table: Table,
    /// Texts of warnings that were logged: every container may request a limit that this kernel does not
    /// have.
    pub(crate) warned: RefCell<BTreeSet<String>>,
    pub(crate) listeners: notices::Listeners,
    /// Pods whose state could not be determined at the start.
    pub(crate) unknown: RefCell<BTreeMap<PodId, Unknown>>,
    /// Running operations on pods and containers.
    pub operations: Rc<Operations>,
    /// The output budget of all ExecSync calls.
    pub(crate) exec_output: Rc<output::Budget>,
}

/// A pod sandbox: its record, its progress and its containers' names.
pub struct Pod {
    /// Pod ID, printed as 64 hexadecimal digits.
    pub id: PodId,
    pub(crate) record: RefCell<PodRecord>,
    /// IDs of the pod's containers by name.
    pub(crate) names: RefCell<HashMap<spec::ContainerName, ContainerId>>,
    pub(crate) creation: Creation,
    /// Held by the task that creates, stops or removes the sandbox.
    pub(crate) operation: Mutex<()>,
    pub(crate) progress: PodProgress,
    pub(crate) connection: Connection,
    pub(crate) execs: Execs,
}

/// The state of the call that creates a pod sandbox or container.
#[derive(Default)]
pub(crate) struct Creation {
    /// The result, for which identical requests wait.
    pub(crate) made: Latch<Result<(), Error>>,
    /// Whether a client has used the ID, so it has received the answer: a later identical request is then a
    /// duplicate and not a retry after a lost answer (RETRY-1).
    pub(crate) is_known: Cell<bool>,
    /// Whether the object is from the record of an earlier daemon: a client may have the ID from a list of
    /// that daemon.
    pub(crate) is_earlier: Cell<bool>,
}

/// Progress of the set-up and teardown of a pod sandbox, as far as the record does not contain it.
#[derive(Default)]
pub(crate) struct PodProgress {
    /// Whether plugins have accepted the pod, or the pod is older than this daemon: plugins must be notified
    /// of its end.
    pub(crate) is_offered: Cell<bool>,
    /// Whether all objects of the pod were removed.
    pub(crate) is_down: Cell<bool>,
    /// Whether the state Ready was committed in advance and a note has precedence.
    pub(crate) is_ahead: Cell<bool>,
    /// The parameters of ADD that were committed in advance; `None` if there are none.
    pub(crate) planned: RefCell<Option<coracle_network::Recorded>>,
}

/// The connection to the monitor of a pod sandbox.
#[derive(Default)]
pub(crate) struct Connection {
    pub(crate) link: RefCell<Option<Rc<Link>>>,
    /// Number of connections so far. The daemon ignores the end of a connection that is not the latest one.
    pub(crate) links: Cell<u32>,
}

/// The running execs of a pod sandbox by number.
pub(crate) struct Execs {
    /// The last number that was used. An exec that an earlier daemon started may still run, with its number and its
    /// cgroup. Numbers therefore begin with the milliseconds since the boot: a daemon starts fewer than one exec
    /// in a millisecond.
    pub(crate) last: Cell<u32>,
    pub(crate) waiting: RefCell<HashMap<u32, smol::channel::Sender<coracle_sandbox::Exit>>>,
}

/// A stop in progress: the stop signal was sent or is due, SIGKILL follows at `kill_at` (CRI 2.12).
pub(crate) struct Stop {
    pub(crate) kill_at: Cell<Instant>,
    /// Whether the stop signal may not have been sent yet.
    pub(crate) is_signal_due: Cell<bool>,
    /// Notified when a later call has made `kill_at` earlier.
    pub(crate) sooner: Changed,
}

/// A container: its record and its running operations.
pub struct Container {
    /// Container ID, printed as 64 hexadecimal digits.
    pub id: ContainerId,
    /// The pod sandbox of the container.
    pub pod: Rc<Pod>,
    pub(crate) record: RefCell<ContainerRecord>,
    pub(crate) creation: Creation,
    /// Held by the task that creates, starts or removes the container.
    pub(crate) operation: Mutex<()>,
    pub(crate) process: Process,
    pub(crate) ending: Ending,
    pub(crate) cgroup_use: CgroupUse,
}

/// The main process of a container.
#[derive(Default)]
pub(crate) struct Process {
    /// PID in the node's PID namespace; 0 while the process is not running.
    pub(crate) pid: Cell<i32>,
    /// PID in the node's PID namespace, also after the process has exited; 0 if there was none.
    pub(crate) last_pid: Cell<i32>,
    /// The start time if the state Running was committed in advance and a note has precedence; otherwise
    /// `None`.
    pub(crate) ahead: Cell<Option<i64>>,
}

/// The end of a container: its stop, and the operations after its exit.
#[derive(Default)]
pub(crate) struct Ending {
    pub(crate) stop: RefCell<Option<Rc<Stop>>>,
    /// Set when the state is Exited and the clean-up after the exit has started.
    pub(crate) exited: Latch<()>,
    /// Set when plugins were notified of the container's end.
    pub(crate) stop_told: Latch<()>,
    /// Whether the container has exited and its cgroup was removed.
    pub(crate) is_cleared: Cell<bool>,
    /// Whether the monitor has removed it from its table, which has [`coracle_sandbox::CONTAINERS_MAX`] entries.
    pub(crate) is_forgotten: Cell<bool>,
}

/// The cgroup of an exec that has ended.
pub(crate) struct SpareCgroup {
    pub(crate) path: CgroupPath,
    /// Whether no process was in it when it was checked last.
    pub(crate) was_empty: bool,
}

/// Operations on the cgroup of a container that outlive a call.
#[derive(Default)]
pub(crate) struct CgroupUse {
    /// Held by the task that sends the container's limits to systemd.
    pub(crate) scope: Mutex<()>,
    /// The unused cgroup of an earlier exec, for the next exec; `None` if there is none.
    pub(crate) spare_exec_cgroup: Cell<Option<SpareCgroup>>,
}

impl Pods {
    /// Creates an empty table: [`Pods::recover`] fills it before the first call is served.
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

    /// The listed pods, newest first.
    pub fn pods(&self) -> Vec<Rc<Pod>> {
        let mut pods: Vec<_> =
            self.table.pods.borrow().values().filter(|pod| pod.is_visible()).cloned().collect();
        pods.sort_by_key(|pod| std::cmp::Reverse(pod.record().created_at_ns));
        pods
    }

    /// All pods, including those that are being created or removed, which lists do not show.
    pub fn every_pod(&self) -> Vec<Rc<Pod>> {
        self.table.pods.borrow().values().cloned().collect()
    }

    /// The containers that lists show, newest first.
    pub fn containers(&self) -> Vec<Rc<Container>> {
        let containers = self.table.containers.borrow();
        let mut containers: Vec<_> =
            containers.values().filter(|container| container.is_visible()).cloned().collect();
        containers.sort_by_key(|container| std::cmp::Reverse(container.record().created_at_ns));
        containers
    }

    /// Finds a pod by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if the pod's record cannot be
    /// read at the moment, or the pod is being undone after the end of the daemon that created it.
    pub fn pod(&self, id: &str) -> Result<Rc<Pod>, Error> {
        let pods = self.table.pods.borrow();
        let found = find(pods.iter().filter(|(_, pod)| pod.is_visible()), id, "pod sandbox");
        let pod = found.map_err(|error| {
            let unknown = self.unknown.borrow();
            let mut unlisted = unknown.keys().filter(|id| !pods.contains_key(id));
            let is_it = !id.is_empty() && unlisted.any(|unlisted| unlisted.to_string().starts_with(id));
            // Undoing it may fail, and then it is listed.
            let mut undone =
                pods.iter().filter(|(_, pod)| !pod.is_visible() && pod.creation.is_earlier.get());
            let is_undone = !id.is_empty() && undone.any(|(undone, _)| undone.to_string().starts_with(id));
            match is_undone && error.kind() == Kind::NotFound {
                true => error.context("it is being undone").with_kind(Kind::Unavailable),
                false => unless_unread(error, is_it),
            }
        })?;
        pod.creation.is_known.set(true);
        Ok(pod)
    }

    /// Finds a container by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if a record cannot be read at the
    /// moment, which may be that of this container.
    pub fn container(&self, id: &str) -> Result<Rc<Container>, Error> {
        let containers = self.table.containers.borrow();
        let visible = containers.iter().filter(|(_, container)| container.is_visible());
        let container = find(visible, id, "container").map_err(|error| {
            unless_unread(error, self.unknown.borrow().values().any(|unknown| unknown.is_unread))
        })?;
        container.creation.is_known.set(true);
        Ok(container)
    }

    /// Finds a container for a plugin. Unlike [`Pods::container`], this does not count as the use of the ID
    /// by a client.
    pub fn container_for_plugin(&self, id: &str) -> Option<Rc<Container>> {
        let containers = self.table.containers.borrow();
        id.parse().ok().and_then(|id| containers.get(&id)).filter(|container| container.is_visible()).cloned()
    }

    /// Logs a warning about an ignored setting, once in the lifetime of the daemon.
    pub(crate) fn warn_once(&self, text: String) {
        let mut warned = self.warned.borrow_mut();
        if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
            log::warn!("unsupported by this kernel, ignored"; reason = text);
            warned.insert(text);
        }
    }

    /// Calls `listener` at every change until it returns false.
    pub fn listen(&self, listener: Box<dyn Fn(&Notice<'_>) -> bool>) {
        self.listeners.add(listener);
    }

    /// Number of pods whose monitor is of an older build.
    pub fn outdated(&self) -> usize {
        let is_outdated =
            |pod: &&Rc<Pod>| pod.connection.link.borrow().as_ref().is_some_and(|link| link.is_outdated());
        self.table.pods.borrow().values().filter(is_outdated).count()
    }

    /// Number of listeners for changes.
    pub fn listeners(&self) -> usize {
        self.listeners.len()
    }

    /// Removes the default cgroup parent at shutdown if coracle created it and there are no pods.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn release_cgroup_parent(&self) -> Result<(), Error> {
        match self.node.placement.driver {
            Driver::Cgroupfs => {
                Ok(self.node.cgroups.unmake_if_unused(&CgroupPath::parse(&self.node.placement.parent)?)?)
            }
            Driver::Systemd => Ok(()),
        }
    }

    /// Drops all listeners at shutdown.
    pub fn end_listening(&self) {
        self.listeners.clear();
    }

    /// Notifies listeners of a change. `container` is the name of the container; empty for a change of the
    /// pod itself.
    pub(crate) fn tell(
        &self,
        happened: Happened,
        id: &impl std::fmt::Display,
        container: &str,
        pod: &Rc<Pod>,
    ) {
        // There is usually no listener, and formatting an ID takes time.
        if self.listeners.len() > 0 {
            let at_ns = self.node.kernel.clock.now_ns();
            self.listeners.tell(&Notice { happened, id: id.to_string(), container, pod, at_ns });
        }
    }

    /// UpdatePodSandboxResources: stores the resources for status. The kubelet has changed the pod's cgroup
    /// before the call.
    ///
    /// # Errors
    /// A refusal by a lifecycle hook; an error of writing the record.
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

    /// Opens the statistics of a container's cgroup; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn container_gauge(&self, container: &Container) -> Result<Option<Gauge>, Error> {
        Ok(self.node.cgroups.gauge(&container.cgroup()?)?)
    }

    /// Opens the statistics of a pod's parent cgroup, which the kubelet created; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn pod_gauge(&self, pod: &Pod) -> Result<Option<Gauge>, Error> {
        let parent = CgroupPath::parse(&pod.record().cgroup_parent)?;
        Ok(self.node.cgroups.gauge(&parent)?)
    }

    /// Reads further counters of a container's cgroup; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn container_detail(&self, container: &Container) -> Result<Option<Detail>, Error> {
        Ok(self.node.cgroups.detail(&container.cgroup()?)?)
    }

    /// Host path of a container's writable layer.
    pub fn writable_layer(&self, container: &Container) -> PathBuf {
        self.node.paths.container(container.pod.id, container.id).join("upper")
    }

    /// The containers of a pod, including those being created.
    pub(crate) fn containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        self.table.containers.borrow().values().filter(|container| container.pod.id == pod).cloned().collect()
    }
}

/// The error for an object that is not in the table: `Unavailable` instead of `NotFound` if a record could
/// not be read, because a client that receives `NotFound` assumes that the object is removed.
fn unless_unread(error: Error, is_unread: bool) -> Error {
    match error.kind() == Kind::NotFound && is_unread {
        true => error.context("a record cannot be read at the moment").with_kind(Kind::Unavailable),
        false => error,
    }
}

/// Finds the entry whose ID is `id` or the only one that begins with `id` (CRI 2.0).
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
    /// Drops the link to a monitor that has ended or does not respond, and the pod's execs. Returns whether
    /// the pod is ready.
    pub(crate) fn unlink(&self) -> bool {
        *self.connection.link.borrow_mut() = None;
        self.execs.waiting.borrow_mut().clear();
        self.record().state.is_ready()
    }

    pub(crate) fn new(record: PodRecord) -> Rc<Self> {
        Rc::new(Self {
            id: record.id,
            record: RefCell::new(record),
            names: RefCell::default(),
            creation: Creation::default(),
            operation: Mutex::new(()),
            progress: PodProgress::default(),
            connection: Connection::default(),
            execs: Execs { last: Cell::new(time::boot_ms() as u32), waiting: RefCell::default() },
        })
    }

    /// The current record. The caller must not hold the reference across an await.
    pub fn record(&self) -> Ref<'_, PodRecord> {
        self.record.borrow()
    }

    /// PID of the monitor in the node's PID namespace; 0 if there is none.
    pub fn pid(&self) -> i32 {
        self.connection.link.borrow().as_ref().map_or(0, |link| link.pid())
    }

    /// The pod's name in log messages: `namespace/name`.
    pub fn name(&self) -> String {
        self.record().spec.name.short()
    }

    /// Whether the pod sandbox has its own network namespace.
    pub fn has_network(&self) -> bool {
        self.record().spec.namespaces.network == spec::Sharing::Pod
    }

    pub(crate) fn is_visible(&self) -> bool {
        self.record().state.is_visible()
    }

    pub(crate) fn link(&self) -> Result<Rc<Link>, Error> {
        // One that has not answered the first request yet does not serve.
        let link = self.connection.link.borrow().clone().filter(|link| link.is_greeted());
        link.ok_or_else(|| {
            // A ready pod has a monitor, which could not be reached since the start.
            let (kind, why) = match self.record().state.is_ready() {
                true => (Kind::Unavailable, "its monitor has not been reached yet"),
                false => (Kind::FailedPrecondition, "has no monitor"),
            };
            Error::new(kind, format!("pod sandbox {:.13}: {why}", self.id))
        })
    }

    /// Checks that the daemon is connected to the monitor of a pod that is ready.
    ///
    /// # Errors
    /// `Unavailable` if the daemon has not reached the monitor since its start.
    pub(crate) fn require_reached(&self) -> Result<(), Error> {
        match self.link() {
            Err(error) if error.kind() == Kind::Unavailable => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
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
            creation: Creation::default(),
            operation: Mutex::new(()),
            process: Process::default(),
            ending: Ending::default(),
            cgroup_use: CgroupUse::default(),
        })
    }

    /// The current record. The caller must not hold the reference across an await.
    pub fn record(&self) -> Ref<'_, ContainerRecord> {
        self.record.borrow()
    }

    /// PID of the main process in the node's PID namespace; 0 if it is not running.
    pub fn pid(&self) -> i32 {
        self.process.pid.get()
    }

    /// PID of the main process in the node's PID namespace, also after the process has exited; 0 if there was
    /// none.
    pub fn last_pid(&self) -> i32 {
        self.process.last_pid.get()
    }

    pub(crate) fn set_pid(&self, pid: i32) {
        self.process.pid.set(pid);
        self.process.last_pid.set(pid);
    }

    pub(crate) fn is_visible(&self) -> bool {
        self.record().state.is_visible()
    }

    pub(crate) fn cgroup(&self) -> Result<CgroupPath, Error> {
        let record = self.record();
        match record.adjusted.cgroup.as_str() {
            "" => self.pod.record().cgroup(&self.id),
            path => Ok(CgroupPath::parse(path)?),
        }
    }

    /// Name of the container in its pod, for log messages together with [`Pod::name`].
    pub fn name(&self) -> String {
        self.record().spec.name.name.clone()
    }

    /// The image name in the request.
    pub(crate) fn image(&self) -> String {
        let record = self.record();
        match record.spec.user_specified_image.as_str() {
            "" => record.spec.image.clone(),
            name => name.to_owned(),
        }
    }

    /// The container in errors and log messages, for example `container 3f2a… (web/nginx)`.
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
