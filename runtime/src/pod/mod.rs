//! Pods and containers: their life, from the request that CRI has validated to the last object that is gone.
//!
//! ```text
//!   cri/  ──►  Pods  ──►  steps (pod up, pod down)      container (create, start, stop, remove)     exec
//!               │              │                             │
//!               │            state (pure)    record (durable)    link (the monitor)
//!               └── recover: the same steps, after a crash or a reboot
//! ```
//!
//! One owner: a pod's or container's state is changed by the task that holds its `operation` lock; lists and status
//! read the published value and never wait. No lock spans two pods. Knows no gRPC, no CRI types, no CNI JSON.

mod again;
mod attachment;
pub(crate) mod clock;
mod container;
pub(crate) mod exec;
mod files;
mod garbage;
mod hooks;
mod link;
pub(crate) mod modules;
pub(crate) mod notices;
mod operations;
pub(crate) mod output;
pub(crate) mod paths;
pub(crate) mod record;
mod recover;
mod scope;
pub(crate) mod signal;
pub(crate) mod spec;
pub(crate) mod state;
mod steps;
pub(crate) mod streams;
mod unlisted;

pub(crate) use container::{OPEN_FILES_HARD, OPEN_FILES_SOFT, Resolved, compile_filter};

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use coracle_sandbox::base_mount_ns::BaseMountNamespace;
use coracle_sandbox::cgroup::{CgroupPath, Cgroups, Detail, Driver, Gauge, slice};
use coracle_sandbox::{ContainerId, PodId};
use smol::lock::{Mutex, OnceCell as Latch};

use crate::error::{Error, Kind};
use crate::hostpath::HostPaths;
use crate::image::Images;
use crate::log;
use crate::network::Network;
use crate::plugins::Plugins;
use crate::workers::Workers;
use link::Link;
use notices::{Happened, Notice};
use operations::Operations;
use record::{ContainerRecord, Kept, PodRecord};

/// Longest time for the kernel to let go of killed processes: only uninterruptible sleep outlasts it, and then the
/// caller is told and tries again (CRI 2.6).
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Most different warnings that are remembered; texts may hold names that a client chose.
const WARNINGS_MAX: usize = 256;

/// What pods are made on and with.
pub(crate) struct Node {
    pub(crate) paths: paths::Paths,
    pub(crate) cgroups: Cgroups,
    pub(crate) monitor_program: coracle_sandbox::monitor::Program,
    /// Made with the first pod that is started.
    pub(crate) view: OnceCell<BaseMountNamespace>,
    pub(crate) network: Rc<Network>,
    pub(crate) images: Rc<Images>,
    pub(crate) workers: Rc<Workers>,
    pub(crate) host_paths: Rc<HostPaths>,
    pub(crate) plugins: Rc<Plugins>,
    pub(crate) clock: clock::Clock,
    /// `/proc/sys/kernel/random/boot_id`.
    pub(crate) boot: String,
    /// The node's range as UpdateRuntimeConfig gave it; empty: not known.
    pub(crate) pod_cidr: RefCell<String>,
    /// Where pods go that name no cgroup parent.
    pub(crate) cgroup_parent: String,
    /// Who makes cgroups.
    pub(crate) cgroup_driver: Driver,
    /// The daemon's own bounding set: what ALL and privileged mean (CRI 3.3).
    pub(crate) capabilities: u64,
    /// Where CDI spec files are.
    pub(crate) cdi_directories: Vec<PathBuf>,
    /// Whether pods can have user namespaces of their own, or why not.
    pub(crate) user_namespaces: Result<(), String>,
    pub(crate) modules: modules::Modules,
}

impl Node {
    /// What monitors see of the host's files.
    fn view(&self) -> Result<&BaseMountNamespace, Error> {
        if let Some(view) = self.view.get() {
            return Ok(view);
        }
        let view = BaseMountNamespace::make(&[&self.paths.root, &self.paths.state])?;
        Ok(self.view.get_or_init(|| view))
    }

    /// Where a pod's cgroups go whose request names `asked`.
    fn cgroup_parent_of(&self, asked: &str) -> Result<String, Error> {
        if asked.is_empty() {
            return Ok(self.cgroup_parent.clone());
        }
        match self.cgroup_driver {
            // The name of a slice is a directory's, too, and it may come without a path.
            Driver::Cgroupfs => Ok(format!("/{}", asked.trim_start_matches('/'))),
            Driver::Systemd => slice(asked).map(|path| path.to_string()).map_err(|error| {
                Error::new(Kind::InvalidArgument, format!("config.linux.cgroup_parent: {error}"))
            }),
        }
    }
}

/// Every pod of this node.
pub(crate) struct Pods {
    pub(crate) node: Node,
    pods: RefCell<BTreeMap<PodId, Rc<Pod>>>,
    names: RefCell<HashMap<spec::PodName, PodId>>,
    containers: RefCell<BTreeMap<ContainerId, Rc<Container>>>,
    /// What was warned of: a limit this kernel lacks is asked for by every container.
    warned: RefCell<BTreeSet<String>>,
    listeners: notices::Listeners,
    /// What the start could not find out for now.
    unknown: RefCell<BTreeMap<PodId, again::Unknown>>,
    /// What is being made, started, stopped and removed.
    pub(crate) operations: Rc<Operations>,
    /// Of every ExecSync in flight.
    exec_output: Rc<output::Budget>,
}

/// One pod sandbox.
pub(crate) struct Pod {
    pub(crate) id: PodId,
    record: RefCell<PodRecord>,
    link: RefCell<Option<Rc<Link>>>,
    /// How many links there have been: what an earlier one tells of its end means nothing.
    links: Cell<u32>,
    /// Held by whoever makes, stops or removes the sandbox.
    operation: Mutex<()>,
    /// How RunPodSandbox went; identical requests wait for it.
    made: Latch<Result<(), Error>>,
    /// A client has used the id, so the answer that holds it arrived: from now on an identical request is a duplicate,
    /// not the retry of one whose answer was lost (RETRY-1).
    is_known: Cell<bool>,
    names: RefCell<HashMap<spec::ContainerName, ContainerId>>,
    /// Plugins have accepted it, or were there before this daemon: they are to hear of its end.
    is_offered: Cell<bool>,
    /// Everything it was made of is undone.
    is_down: Cell<bool>,
    /// "Ready" is durable, and a note holds it back.
    is_ahead: Cell<bool>,
    /// What ADD will be asked, where that is durable already.
    planned: RefCell<Option<crate::network::Recorded>>,
    last_exec: Cell<u32>,
    execs: RefCell<HashMap<u32, smol::channel::Sender<coracle_sandbox::Exit>>>,
}

/// One container.
pub(crate) struct Container {
    pub(crate) id: ContainerId,
    pub(crate) pod: Rc<Pod>,
    record: RefCell<ContainerRecord>,
    operation: Mutex<()>,
    made: Latch<Result<(), Error>>,
    /// It is made, and in the lists; plugins may still be hearing of it.
    is_listed: Cell<bool>,
    /// As of a pod.
    is_known: Cell<bool>,
    /// Filled when the state is Exited and all clean-up that the exit calls for is under way.
    exited: Latch<()>,
    stop: RefCell<Option<Rc<container::Stop>>>,
    /// Filled when plugins have heard of its end.
    stop_told: Latch<()>,
    /// When it was started, where "running" since then is durable and a note holds it back.
    ahead: Cell<Option<i64>>,
    /// It is over, and its cgroup is gone.
    is_cleared: Cell<bool>,
    /// Held by whoever tells systemd its limits.
    scope: Mutex<()>,
    /// Of the main process as the node sees it; 0 while it does not run.
    pid: Cell<i32>,
    /// Of the main process, also when it has ended.
    last_pid: Cell<i32>,
}

impl Pods {
    /// Nothing yet: [`Pods::recover`] fills it before the first call is served.
    pub(crate) fn new(node: Node) -> Rc<Self> {
        Rc::new(Self {
            node,
            pods: RefCell::default(),
            names: RefCell::default(),
            containers: RefCell::default(),
            warned: RefCell::default(),
            listeners: notices::Listeners::default(),
            unknown: RefCell::default(),
            operations: Rc::default(),
            exec_output: output::Budget::new(),
        })
    }

    /// The pods that lists show, newest first.
    pub(crate) fn pods(&self) -> Vec<Rc<Pod>> {
        let mut pods: Vec<_> = self.pods.borrow().values().filter(|pod| pod.is_visible()).cloned().collect();
        pods.sort_by_key(|pod| std::cmp::Reverse(pod.record().created_at_ns));
        pods
    }

    /// The containers that lists show, newest first.
    pub(crate) fn containers(&self) -> Vec<Rc<Container>> {
        let containers = self.containers.borrow();
        let mut containers: Vec<_> =
            containers.values().filter(|container| container.is_visible()).cloned().collect();
        containers.sort_by_key(|container| std::cmp::Reverse(container.record().created_at_ns));
        containers
    }

    /// The pod with this id or unique prefix of one, as a client names it.
    pub(crate) fn pod(&self, id: &str) -> Result<Rc<Pod>, Error> {
        let pod = find(self.pods.borrow().iter().filter(|(_, pod)| pod.is_visible()), id, "pod sandbox")?;
        pod.is_known.set(true);
        Ok(pod)
    }

    /// The container with this id or unique prefix of one, as a client names it.
    pub(crate) fn container(&self, id: &str) -> Result<Rc<Container>, Error> {
        let containers = self.containers.borrow();
        let container =
            find(containers.iter().filter(|(_, container)| container.is_visible()), id, "container")?;
        container.is_known.set(true);
        Ok(container)
    }

    /// As [`Pods::container`], for one that is no client: knowing its id tells nothing of answers that arrived.
    pub(crate) fn container_for_plugin(&self, id: &str) -> Option<Rc<Container>> {
        let containers = self.containers.borrow();
        id.parse().ok().and_then(|id| containers.get(&id)).filter(|container| container.is_visible()).cloned()
    }

    /// Warns of something that is left out, once in the daemon's life.
    fn warn_once(&self, text: String) {
        let mut warned = self.warned.borrow_mut();
        if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
            log::warn!("left out, said once"; reason = text);
            warned.insert(text);
        }
    }

    /// Calls `listener` at every change from now on, until it answers that it listens no more.
    pub(crate) fn listen(&self, listener: Box<dyn Fn(&Notice<'_>) -> bool>) {
        self.listeners.add(listener);
    }

    /// How many pods run under a monitor of an older build.
    pub(crate) fn outdated(&self) -> usize {
        let is_outdated = |pod: &&Rc<Pod>| pod.link.borrow().as_ref().is_some_and(|link| link.is_outdated());
        self.pods.borrow().values().filter(is_outdated).count()
    }

    /// How many listen.
    pub(crate) fn listeners(&self) -> usize {
        self.listeners.len()
    }

    /// The daemon is stopping: where no pod is left, neither is the cgroup that it made for them.
    pub(crate) fn release_cgroup_parent(&self) -> Result<(), Error> {
        match self.node.cgroup_driver {
            Driver::Cgroupfs => {
                Ok(self.node.cgroups.unmake_if_unused(&CgroupPath::parse(&self.node.cgroup_parent)?)?)
            }
            Driver::Systemd => Ok(()),
        }
    }

    /// Lets every listener go: the daemon is stopping.
    pub(crate) fn end_listening(&self) {
        self.listeners.clear();
    }

    fn tell(&self, happened: Happened, id: &impl std::fmt::Display, pod: &Rc<Pod>) {
        // Mostly nobody listens, and an id is 64 digits.
        if self.listeners.len() > 0 {
            let at_ns = self.node.clock.now_ns();
            self.listeners.tell(&Notice { happened, id: id.to_string(), pod, at_ns });
        }
    }

    /// UpdatePodSandboxResources: kept and shown. The kubelet has changed the pod's own cgroup before it calls.
    pub(crate) async fn update_pod(
        self: &Rc<Self>,
        pod: Rc<Pod>,
        overhead: Option<spec::Resources>,
        resources: Option<spec::Resources>,
    ) -> Result<(), Error> {
        let pods = Rc::clone(self);
        let work = async move {
            let _operation = pod.operation.lock().await;
            let turn = pods.node.plugins.turn(&pods, &pod).await;
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
    pub(crate) fn container_gauge(&self, container: &Container) -> Result<Option<Gauge>, Error> {
        Ok(self.node.cgroups.gauge(&container.cgroup()?)?)
    }

    /// The same of the cgroup above a pod's containers: the one that the kubelet made for the pod.
    pub(crate) fn pod_gauge(&self, pod: &Pod) -> Result<Option<Gauge>, Error> {
        let parent = CgroupPath::parse(&pod.record().cgroup_parent)?;
        Ok(self.node.cgroups.gauge(&parent)?)
    }

    /// What else a container's cgroup counts; `None` where it is gone.
    pub(crate) fn container_detail(&self, container: &Container) -> Result<Option<Detail>, Error> {
        Ok(self.node.cgroups.detail(&container.cgroup()?)?)
    }

    /// What a container writes, on the host.
    pub(crate) fn writable_layer(&self, container: &Container) -> PathBuf {
        self.node.paths.container(container.pod.id, container.id).join("upper")
    }

    /// The containers of a pod, made or being made.
    fn containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        self.containers.borrow().values().filter(|container| container.pod.id == pod).cloned().collect()
    }
}

/// What the kernel room reports, as the kinds that clients act on.
impl From<coracle_sandbox::Error> for Error {
    fn from(error: coracle_sandbox::Error) -> Self {
        use coracle_sandbox::Error as Sandbox;
        use nix::errno::Errno;
        let kind = match &error {
            // Not NotFound for ENOENT: to a kubelet that means the pod or container is gone.
            Sandbox::Kernel { errno: Errno::ENOSPC | Errno::EDQUOT | Errno::ENOMEM, .. } => {
                Kind::ResourceExhausted
            }
            Sandbox::Kernel { .. } => Kind::Internal,
            Sandbox::Missing { .. } => Kind::FailedPrecondition,
            Sandbox::Invalid { .. } => Kind::InvalidArgument,
        };
        Self::new(kind, error.to_string())
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
    fn new(record: PodRecord) -> Rc<Self> {
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
    pub(crate) fn record(&self) -> Ref<'_, PodRecord> {
        self.record.borrow()
    }

    /// Of the monitor, as the node sees it; 0 when there is none.
    pub(crate) fn pid(&self) -> i32 {
        self.link.borrow().as_ref().map_or(0, |link| link.pid())
    }

    /// Whether it has a network namespace of its own.
    pub(crate) fn has_network(&self) -> bool {
        self.record().spec.namespaces.network == spec::Sharing::Pod
    }

    fn is_visible(&self) -> bool {
        self.record().state.is_visible()
    }

    fn link(&self) -> Result<Rc<Link>, Error> {
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

    fn cgroup(&self) -> Result<CgroupPath, Error> {
        self.record().cgroup(&self.id)
    }
}

impl Container {
    fn new(pod: Rc<Pod>, record: ContainerRecord) -> Rc<Self> {
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
            ahead: Cell::new(None),
            is_cleared: Cell::new(false),
            scope: Mutex::new(()),
        })
    }

    /// The record as it is now. Not to be held across an await.
    pub(crate) fn record(&self) -> Ref<'_, ContainerRecord> {
        self.record.borrow()
    }

    /// Of the main process, as the node sees it; 0 when it does not run.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.get()
    }

    /// As [`Container::pid`], but also when it has ended.
    pub(crate) fn last_pid(&self) -> i32 {
        self.last_pid.get()
    }

    fn set_pid(&self, pid: i32) {
        self.pid.set(pid);
        self.last_pid.set(pid);
    }

    fn is_visible(&self) -> bool {
        self.is_listed.get()
    }

    /// It is made: lists show it, and calls find it.
    fn list(&self) {
        self.is_listed.set(true);
    }

    fn cgroup(&self) -> Result<CgroupPath, Error> {
        let record = self.record();
        match record.adjusted.cgroup.as_str() {
            "" => self.pod.record().cgroup(&self.id),
            path => Ok(CgroupPath::parse(path)?),
        }
    }

    /// `container 3f2a… (web/nginx)`: how errors and logs name it.
    fn title(&self) -> String {
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
