//! A pod sandbox and its containers: what the daemon keeps of each, beside the records. The methods of [`Pod`]
//! stand here and in the modules below, each named after its subject; those that create and end containers stand in
//! `container`, as most methods of [`Container`] do.

mod monitor;
mod network;
mod removed_state;
mod setup_and_teardown;
pub(crate) mod strays;
mod take_over;
pub(crate) mod unlisted_containers;

use std::cell::{Cell, Ref, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::time;
use coracle_sandbox::cgroup::{CgroupPath, Detail, Gauge, Resources};
use coracle_sandbox::{ContainerId, Exit, PodId};
use event_listener::Event as Changed;
use smol::lock::{Mutex, OnceCell as Latch};

use crate::link::Link;
use crate::node::Node;
use crate::published::Published;
use crate::record::{ContainerRecord, DurableRecord, PodRecord};
use crate::unknown::Unknown;
use crate::{Engine, spec, state};

/// Time limit for the end of killed processes: only uninterruptible sleep takes longer. The caller then gets
/// an error and retries (CRI 2.6).
pub(crate) const KILL_LIMIT: Duration = Duration::from_secs(10);

/// A pod sandbox: its record with its state, and its containers' names.
pub struct Pod {
    /// Pod ID, printed as 64 hexadecimal digits.
    pub id: PodId,
    pub(crate) record: Published<PodRecord>,
    /// IDs of the pod's containers by name.
    pub(crate) names: RefCell<HashMap<spec::ContainerName, ContainerId>>,
    /// The result of the creation, for which identical requests wait.
    pub(crate) made: Latch<Result<(), Error>>,
    /// Held by the task that creates, stops or removes the sandbox.
    pub(crate) operation: Mutex<()>,
    pub(crate) connection: Connection,
    pub(crate) engine: Rc<Engine>,
}

/// The connection to the monitor of a pod sandbox, and the execs that the monitor runs.
#[derive(Default)]
pub(crate) struct Connection {
    pub(crate) link: RefCell<Option<Rc<Link>>>,
    /// Number of connections so far. The daemon ignores the end of a connection that is not the latest one.
    pub(crate) links: Cell<u32>,
    pub(crate) execs: Execs,
}

/// The running execs of a pod sandbox by number.
pub(crate) struct Execs {
    /// The last number that was used. An exec that an earlier daemon started may still run, with its number and its
    /// cgroup. Numbers therefore begin with the milliseconds since the boot: a daemon starts fewer than one exec
    /// in a millisecond.
    pub(crate) last: Cell<u32>,
    pub(crate) waiting: RefCell<HashMap<u32, smol::channel::Sender<Exit>>>,
}

impl Default for Execs {
    fn default() -> Self {
        Self { last: Cell::new(time::boot_ms() as u32), waiting: RefCell::default() }
    }
}

/// A container: its record with its state, and its running operations.
pub struct Container {
    /// Container ID, printed as 64 hexadecimal digits.
    pub id: ContainerId,
    /// The pod sandbox of the container.
    pub pod: Rc<Pod>,
    pub(crate) record: Published<ContainerRecord>,
    /// The result of the creation, for which identical requests wait.
    pub(crate) made: Latch<Result<(), Error>>,
    /// Held by the task that creates, starts or removes the container.
    pub(crate) operation: Mutex<()>,
    pub(crate) process: Process,
    /// Notified at each change of the state.
    pub(crate) changed: Changed,
    pub(crate) cgroup_use: CgroupUse,
}

/// The main process of a container.
#[derive(Default)]
pub(crate) struct Process {
    /// PID in the node's PID namespace; 0 while the process is not running.
    pub(crate) pid: Cell<i32>,
    /// PID in the node's PID namespace, also after the process has exited; 0 if there was none.
    pub(crate) last_pid: Cell<i32>,
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

impl Pod {
    /// Drops the link to a monitor that has ended or does not respond, and the pod's execs. Returns whether
    /// the pod is ready.
    pub(crate) fn unlink(&self) -> bool {
        *self.connection.link.borrow_mut() = None;
        self.connection.execs.waiting.borrow_mut().clear();
        self.record().state.is_ready()
    }

    pub(crate) fn new(engine: Rc<Engine>, record: PodRecord) -> Rc<Self> {
        Rc::new(Self {
            id: record.id,
            record: Published::new(record),
            names: RefCell::default(),
            made: Latch::default(),
            operation: Mutex::new(()),
            connection: Connection::default(),
            engine,
        })
    }

    /// The node and the services that all pods share.
    pub fn engine(&self) -> &Rc<Engine> {
        &self.engine
    }

    /// The environment of the pod.
    pub fn node(&self) -> &Node {
        &self.engine().node
    }

    /// The current record. The caller must not hold the reference across an await.
    pub fn record(&self) -> Ref<'_, PodRecord> {
        self.record.borrow()
    }

    /// The pod's item of lists as `encode` writes it, which is called once for each change of the record.
    pub fn listed(&self, encode: impl FnOnce(&PodRecord) -> Vec<u8>) -> Rc<[u8]> {
        self.record.encoded(encode)
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

    /// UpdatePodSandboxResources: stores the resources for status. The kubelet has changed the pod's cgroup
    /// before the call.
    ///
    /// # Errors
    /// A refusal by a lifecycle hook; an error of writing the record.
    pub async fn update(
        self: &Rc<Self>,
        overhead: Option<Resources>,
        resources: Option<Resources>,
    ) -> Result<(), Error> {
        let pod = Rc::clone(self);
        let work = async move {
            let _operation = pod.operation.lock().await;
            let turn = pod.engine().hooks.begin(&pod).await;
            turn.update_pod(&pod, overhead.as_ref(), resources.as_ref()).await?;
            let mut record: PodRecord = pod.record().clone();
            record.spec.overhead = overhead.or(record.spec.overhead);
            record.spec.resources = resources.or(record.spec.resources);
            record.commit(pod.node())?;
            *pod.record.borrow_mut() = record;
            turn.updated_pod(&pod).await;
            Ok(())
        };
        self.engine().operations.run(work).await
    }

    /// Opens the statistics of a pod's parent cgroup, which the kubelet created; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn gauge(&self) -> Result<Option<Gauge>, Error> {
        let parent = CgroupPath::parse(&self.record().cgroup_parent)?;
        Ok(self.node().cgroups.gauge(&parent)?)
    }

    /// The containers of the pod, including those being created; none after the end of the daemon.
    pub(crate) fn containers(&self) -> Vec<Rc<Container>> {
        self.engine.pods().map_or_else(Vec::new, |pods| pods.containers_of(self.id))
    }

    /// A container of the pod; `None` if the pod has no container with this ID.
    pub(crate) fn container(&self, id: ContainerId) -> Option<Rc<Container>> {
        let container = self.engine.pods()?.table.containers.borrow().get(&id).cloned();
        container.filter(|container| container.pod.id == self.id)
    }

    /// The part of the pod's state that is unknown; `None`: no part.
    pub(crate) fn unknown(&self) -> Option<Unknown> {
        self.engine.pods()?.unknown.borrow().get(&self.id).cloned()
    }

    /// Records which part of the pod's state is unknown, and retries in the background.
    pub(crate) fn keep_trying(&self, unknown: Unknown) {
        if let Some(pods) = self.engine.pods() {
            pods.keep_trying(self.id, unknown);
        }
    }

    pub(crate) fn exec_exited(&self, exec: u32, exit: Exit) {
        let waiting = self.connection.execs.waiting.borrow_mut().remove(&exec);
        if let Some(sender) = waiting {
            let _ = sender.try_send(exit); // fails if there is no receiver any more
        }
    }

    /// Refuses a new container while the record of another container of the pod cannot be read, for at most one minute: the other one
    /// may have the same name.
    ///
    /// # Errors
    /// `Unavailable`: the client may repeat the call.
    pub(crate) fn require_container_names(&self) -> Result<(), Error> {
        match self.unknown().filter(|unknown| unknown.is_unread && unknown.is_new()) {
            Some(unknown) => Err(Error::new(Kind::Unavailable, unknown.reason)),
            None => Ok(()),
        }
    }
}

impl Container {
    pub(crate) fn new(pod: Rc<Pod>, record: ContainerRecord) -> Rc<Self> {
        Rc::new(Self {
            id: record.id,
            pod,
            record: Published::new(record),
            made: Latch::default(),
            operation: Mutex::new(()),
            process: Process::default(),
            changed: Changed::new(),
            cgroup_use: CgroupUse::default(),
        })
    }

    /// The node and the services that all pods share.
    pub fn engine(&self) -> &Rc<Engine> {
        &self.pod.engine
    }

    /// The environment of the container.
    pub fn node(&self) -> &Node {
        &self.engine().node
    }

    /// The current record. The caller must not hold the reference across an await.
    pub fn record(&self) -> Ref<'_, ContainerRecord> {
        self.record.borrow()
    }

    /// The container's item of lists as `encode` writes it, which is called once for each change of the record.
    pub fn listed(&self, encode: impl FnOnce(&ContainerRecord) -> Vec<u8>) -> Rc<[u8]> {
        self.record.encoded(encode)
    }

    /// Changes what the record does not contain of the state.
    pub(crate) fn update_state(&self, update: impl FnOnce(&mut state::Container)) {
        update(&mut self.record.borrow_mut().state);
        self.changed.notify(usize::MAX);
    }

    /// Notes what has followed the end of a container that has exited.
    pub(crate) fn update_end(&self, update: impl FnOnce(&mut state::CleanUp)) {
        self.update_state(|state| {
            if let state::Container::Exited { clean_up, .. } = state {
                update(clean_up);
            }
        });
    }

    /// Waits until the state is of a kind.
    pub(crate) async fn until(&self, is_it: impl Fn(&state::Container) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_it(&self.record().state) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until plugins have been notified of the container's end, if it has exited.
    pub(crate) async fn announced(&self) {
        self.until(|state| state.clean_up().is_none_or(|clean_up| clean_up.is_announced)).await;
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

    /// Opens the statistics of a container's cgroup; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn gauge(&self) -> Result<Option<Gauge>, Error> {
        Ok(self.node().cgroups.gauge(&self.cgroup()?)?)
    }

    /// Reads further counters of a container's cgroup; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn detail(&self) -> Result<Option<Detail>, Error> {
        Ok(self.node().cgroups.detail(&self.cgroup()?)?)
    }

    /// Host path of a container's writable layer.
    pub fn writable_layer(&self) -> PathBuf {
        self.node().paths.container(self.pod.id, self.id).join("upper")
    }
}
