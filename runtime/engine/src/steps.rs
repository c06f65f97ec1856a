//! Pod up, pod down: one list of steps makes a pod sandbox, the same list reversed undoes it, whoever asks: a failed
//! RunPodSandbox, Stop and Remove, a daemon that starts after a crash or a reboot.
//!
//! Every object's name is derived from the pod's id (see `paths`), and the intent record is on disk before the first
//! object exists, so undoing needs no memory of what happened. What cannot be derived, the CNI configuration as it
//! was, is in the record before its step. Not there is success; undoing twice is normal.
//!
//! | step | makes | undone by |
//! |---|---|---|
//! | Cgroup | the monitor's cgroup | rmdir |
//! | Monitor | `coracle-pod` in the pod's namespaces | SIGKILL to its cgroup |
//! | Netns | a file that holds the network namespace, for CNI plugins | umount, unlink |
//! | Network | link, address, ports, by CNI ADD, built in or by programs | CNI DEL; the pair itself goes with Netns and Monitor |
//! | Plugins | nothing; the last word of RunPodSandbox is theirs | they hear that the workload has ended |
//! | Workload | nothing; containers come and go while the pod is ready | ends every container |

use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_sandbox::cgroup::{CgroupPath, Driver};
use coracle_sandbox::lsm::labelling_files;
use coracle_sandbox::{Event, PodId, Request, monitor, netns, plan};

use crate::filesystem::make_directory;
use crate::lifecycle::Event as Hook;
use crate::link::{Link, News};
use crate::notices::Happened;
use crate::operations::Key;
use crate::record::{Kept, Network, PodRecord, Told};
use crate::spec::{PodPid, PodSpec};
use crate::state::{self, PodEvent};
use crate::table::KILL_LIMIT;
use crate::{Pod, Pods, again, files, garbage, paths};
use coracle_base::error::failed;

/// Longest wait for a monitor that has just been started or found again: it answers in a millisecond; a machine that
/// swaps or a kernel that holds a namespace lock takes longer.
const HELLO_LIMIT: Duration = Duration::from_secs(20);

/// What a pod is made of, in the order it is made; undone from the back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Cgroup,
    Monitor,
    Netns,
    Network,
    Plugins,
    Workload,
}

impl Step {
    const ALL: [Self; 6] =
        [Self::Cgroup, Self::Monitor, Self::Netns, Self::Network, Self::Plugins, Self::Workload];
}

impl Pods {
    /// RunPodSandbox: makes the pod, or joins the identical request that is making it (RETRY-1 to RETRY-4).
    /// The work is a task of its own: a caller that goes away leaves it to end whole, or wholly undone.
    ///
    /// # Errors
    /// `AlreadyExists` where another sandbox has the name; else what the first step that failed said; what was made before it
    /// is undone.
    pub async fn run(self: &Rc<Self>, spec: PodSpec) -> Result<PodId, Error> {
        loop {
            let pod = match self.named(&spec)? {
                Some(pod) => pod,
                None => self.reserve(spec.clone())?,
            };
            match pod.made.wait().await.clone() {
                // What an earlier daemon had begun is undone, and the name is free again.
                Err(error)
                    if error.kind() == Kind::Unavailable && pod.record().state == state::Pod::Creating => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(pod.id),
            }
        }
    }

    /// The pod that holds this name already, if the request is a retry of the one that made it.
    fn named(&self, spec: &PodSpec) -> Result<Option<Rc<Pod>>, Error> {
        let Some(holder) = self
            .table
            .names
            .borrow()
            .get(&spec.name)
            .and_then(|id| self.table.pods.borrow().get(id).cloned())
        else {
            return Ok(None);
        };
        let is_same = holder.record().spec == *spec;
        let is_retry = match holder.record().state {
            state::Pod::Creating => true,
            state::Pod::Ready => !holder.is_known.get(),
            state::Pod::NotReady { .. } | state::Pod::Removing => false,
        };
        if is_same && is_retry {
            return Ok(Some(holder));
        }
        let what = if is_same { "" } else { " with another configuration" };
        let text =
            format!("pod sandbox {}: the name is held by {:.13}{what}, which is {}", spec.name, holder.id, {
                holder.record().state.name()
            });
        Err(Error::new(Kind::AlreadyExists, text))
    }

    /// Takes the name and starts the work.
    fn reserve(self: &Rc<Self>, spec: PodSpec) -> Result<Rc<Pod>, Error> {
        if let (Some(_), Err(why)) = (&spec.user_namespace, &self.node.kernel.user_namespaces) {
            let text = format!("pod sandbox {}: user namespaces: {why}", spec.name);
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.node.images.want_sandbox_image();
        let id = PodId::from_bytes(coracle_sandbox::random_id()?);
        let cgroup_parent = self.node.placement.parent_of(&spec.cgroup_parent)?;
        let has_scopes = self.node.placement.driver == Driver::Systemd;
        paths::cgroup(&cgroup_parent, has_scopes, &id)?;
        let is_taken =
            |level: &str| self.table.pods.borrow().values().any(|pod| pod.record().selinux_level == level);
        let selinux_level = self.node.kernel.modules.pod_level(spec.selinux.as_ref(), is_taken)?;
        let name = spec.name.clone();
        let pod = Pod::new(PodRecord {
            id,
            boot: self.node.kernel.boot.clone(),
            created_at_ns: self.node.kernel.clock.now_ns(),
            spec,
            cgroup_parent,
            owns_cgroup_parent: false,
            state: state::Pod::Creating,
            network: None,
            addresses: Vec::new(),
            told: Told::default(),
            selinux_level,
            has_scopes,
        });
        self.table.names.borrow_mut().insert(name, id);
        self.table.pods.borrow_mut().insert(id, Rc::clone(&pod));
        let (pods, made) = (Rc::clone(self), Rc::clone(&pod));
        self.operations.detach(async move {
            let _operation = made.operation.lock().await;
            let result = pods.up(&made).await;
            let _ = made.made.try_set(result);
        });
        Ok(pod)
    }

    async fn up(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let begun = Instant::now();
        let title = pod.record().spec.name.to_string();
        let made = self.make_all(pod).await;
        let Err(error) = made else {
            log::info!("pod sandbox ready"; pod = pod.id, name = title, ms = begun.elapsed().as_millis());
            return Ok(());
        };
        log::warn!("pod sandbox not made"; pod = pod.id, name = title, error = error);
        let left = self.down(pod).await;
        if left.is_empty() {
            if let Err(error) = self.forget_pod(pod) {
                log::warn!("a directory stays until the next start"; pod = pod.id, error = error);
            }
        } else {
            // Kept and listed, so that Stop and Remove try again (CRI 2.0).
            log_all(pod.id, &left);
            // Plugins have accepted nothing, or have heard of its end.
            pod.record.borrow_mut().told = Told { stop: true, remove: true };
            self.change(pod, PodEvent::UpFailed)?;
        }
        Err(error.context(format!("pod sandbox {title}")))
    }

    async fn make_all(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        self.prepare(pod)?;
        for step in Step::ALL {
            self.make(step, pod).await?;
        }
        Ok(())
    }

    /// Plugins accept it, and it is ready, in one turn: nobody sees it in between.
    async fn make_ready(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let turn = self.hooks.begin(self, pod).await;
        turn.run_pod(pod).await?;
        match self.change(pod, PodEvent::Up) {
            Ok(()) => {
                pod.is_offered.set(true);
                Ok(())
            }
            Err(error) => {
                turn.undo_run_pod(pod).await;
                Err(error)
            }
        }
    }

    /// Plugins hear once that the workload has ended, after they have heard so of every container.
    async fn tell_stopped(self: &Rc<Self>, pod: &Rc<Pod>) {
        if !pod.is_offered.get() {
            return;
        }
        for container in self.containers_of(pod.id) {
            if container.exited.is_initialized() {
                container.stop_told.wait().await;
            }
        }
        let turn = self.hooks.begin(self, pod).await;
        if !pod.record().told.stop {
            let told = Told { stop: true, ..pod.record().told };
            self.note_told(pod, told, self.hooks.wants(Hook::StopPod));
            turn.stop_pod(pod).await;
        }
    }

    /// Before the event, so that it is never told twice; where nobody hears it the next commit will do.
    fn note_told(&self, pod: &Rc<Pod>, told: Told, is_heard: bool) {
        pod.record.borrow_mut().told = told;
        if is_heard && let Err(error) = pod.record().commit(&self.node.paths) {
            log::warn!("an event could be told again after a restart"; pod = pod.id, error = error);
        }
    }

    /// The intent record and the directories, before any object.
    fn prepare(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        let node = &self.node;
        let directory = node.paths.pod(pod.id);
        pod.record().note(&node.paths)?;
        make_directory(&node.paths.containers(pod.id))?;
        let label = node.kernel.modules.pod_file_label(&pod.record().selinux_level);
        labelling_files(label.as_deref(), || files::write(&directory, &pod.record().spec))?;
        for directory in [
            node.paths.shm(pod.id),
            node.paths.root_mountpoint(pod.id),
            node.paths.launch(pod.id),
            node.paths.started(pod.id),
            node.paths.stopping(pod.id),
            node.paths.pod_state(pod.id).join("exits"),
        ] {
            make_directory(&directory)?;
        }
        Ok(())
    }

    async fn make(self: &Rc<Self>, step: Step, pod: &Rc<Pod>) -> Result<(), Error> {
        match step {
            Step::Cgroup => self.make_cgroup(pod),
            Step::Monitor => self.make_monitor(pod).await,
            Step::Netns => self.make_netns(pod),
            Step::Network => self.make_network(pod).await,
            Step::Plugins => self.make_ready(pod).await,
            Step::Workload => Ok(()),
        }
    }

    async fn unmake(self: &Rc<Self>, step: Step, pod: &Rc<Pod>) -> Result<(), Error> {
        match step {
            Step::Workload => self.end_containers(pod).await,
            Step::Plugins => {
                self.tell_stopped(pod).await;
                Ok(())
            }
            Step::Network => self.unmake_network(pod).await,
            Step::Netns => Ok(netns::unpin(&paths::netns(pod.id))?),
            Step::Monitor => self.unmake_monitor(pod).await,
            Step::Cgroup => self.unmake_cgroup(pod).await,
        }
    }

    /// The way back, whoever asks. One stuck step must not strand the rest: it goes on and reports all.
    pub(crate) async fn down(self: &Rc<Self>, pod: &Rc<Pod>) -> Vec<Error> {
        let mut errors = Vec::new();
        for step in Step::ALL.into_iter().rev() {
            if let Err(error) = self.unmake(step, pod).await {
                errors.push(error);
            }
        }
        pod.is_down.set(errors.is_empty());
        errors
    }

    /// StopPodSandbox: ends every container at once, then takes the sandbox down. Again and again is fine.
    ///
    /// # Errors
    /// The first step that could not be undone; the others were tried all the same, and the call may come again.
    pub async fn stop_pod(self: &Rc<Self>, pod: Rc<Pod>) -> Result<(), Error> {
        let (pods, key) = (Rc::clone(self), Key::StopPod(pod.id));
        let work = async move {
            let _operation = pod.operation.lock().await;
            pods.stop_locked(&pod).await
        };
        self.operations.share(key, work).await
    }

    async fn stop_locked(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let was_ready = pod.record().state.is_ready();
        if pod.is_down.get() {
            return Ok(());
        }
        self.change(pod, PodEvent::Stop)?;
        let begun = Instant::now();
        let mut errors = self.down(pod).await.into_iter();
        match errors.next() {
            None if was_ready => {
                log::info!("pod sandbox stopped"; pod = pod.id, ms = begun.elapsed().as_millis());
                Ok(())
            }
            None => Ok(()),
            Some(first) => {
                log_all(pod.id, errors.as_slice());
                Err(first.context(format!("stop pod sandbox {:.13}", pod.id)))
            }
        }
    }

    /// RemovePodSandbox: stops it where it is not, removes its containers, then the record.
    ///
    /// # Errors
    /// As [`Pods::stop_pod`].
    pub async fn remove_pod(self: &Rc<Self>, pod: Rc<Pod>) -> Result<(), Error> {
        let (pods, key) = (Rc::clone(self), Key::RemovePod(pod.id));
        let work = async move {
            let _operation = pod.operation.lock().await;
            pods.stop_locked(&pod).await?;
            for container in pods.containers_of(pod.id) {
                pods.remove_container(container).await?;
            }
            let turn = pods.hooks.begin(&pods, &pod).await;
            if pod.is_offered.get() && !pod.record().told.remove {
                let told = Told { remove: true, ..pod.record().told };
                pods.note_told(&pod, told, pods.hooks.wants(Hook::RemovePod));
                turn.remove_pod(&pod).await;
            }
            pods.change(&pod, PodEvent::Remove)?;
            pods.forget_pod(&pod)?;
            drop(turn);
            log::info!("pod sandbox removed"; pod = pod.id);
            pods.tell(Happened::Deleted, &pod.id, &pod);
            Ok(())
        };
        self.operations.share(key, work).await
    }

    /// The last act: everything on disk, the name, the place in the lists.
    pub(crate) fn forget_pod(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let state = self.node.paths.pod_state(pod.id);
        match std::fs::remove_dir_all(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed("remove", &state, &error));
            }
            Ok(()) | Err(_) => {}
        }
        garbage::discard(self, &self.node.paths.pod(pod.id))?;
        self.table.names.borrow_mut().retain(|_, id| *id != pod.id);
        self.table.pods.borrow_mut().remove(&pod.id);
        Ok(())
    }

    /// Changes the state: committed first, then seen.
    pub(crate) fn change(&self, pod: &Rc<Pod>, event: PodEvent) -> Result<(), Error> {
        let next = pod.record().state.on(event);
        let next = next.map_err(|refused| Error::new(Kind::FailedPrecondition, refused.to_string()))?;
        if next == pod.record().state {
            return Ok(());
        }
        let mut record = pod.record().clone();
        record.state = next;
        match record.state {
            state::Pod::Ready if pod.is_ahead.get() => record.reach(&self.node.paths)?,
            state::Pod::Ready => record.commit(&self.node.paths)?,
            state::Pod::Creating | state::Pod::NotReady { .. } => record.note(&self.node.paths)?,
            // The directory goes next.
            state::Pod::Removing => {}
        }
        let (was_ready, is_ready) = (pod.record().state.is_ready(), record.state.is_ready());
        *pod.record.borrow_mut() = record;
        match (was_ready, is_ready) {
            (false, true) => {
                self.tell(Happened::Created, &pod.id, pod);
                self.tell(Happened::Started, &pod.id, pod);
            }
            (true, false) => self.tell(Happened::Stopped, &pod.id, pod),
            (true, true) | (false, false) => {}
        }
        Ok(())
    }

    fn make_cgroup(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        let parent = CgroupPath::parse(&pod.record().cgroup_parent)?;
        let is_default = pod.record().cgroup_parent == self.node.placement.parent;
        if !is_default && !pod.record().has_scopes && !self.node.cgroups.exists(&parent) {
            // Ours to take away again; the kubelet makes its own before it calls. Slices are systemd's, and the default
            // parent stays for the next pod.
            let mut record = pod.record().clone();
            record.owns_cgroup_parent = true;
            record.note(&self.node.paths)?;
            *pod.record.borrow_mut() = record;
        }
        Ok(self.node.cgroups.make(&pod.cgroup()?)?)
    }

    async fn unmake_cgroup(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        self.clear_cgroup(&pod.cgroup()?).await?;
        if pod.record().owns_cgroup_parent {
            // Other pods may still be in it: the last one takes it away.
            let parent = CgroupPath::parse(&pod.record().cgroup_parent)?;
            self.node.cgroups.unmake_if_unused(&parent)?;
        }
        Ok(())
    }

    /// Removes a cgroup whose processes have been killed, as soon as the kernel lets go of them.
    pub(crate) async fn clear_cgroup(&self, path: &CgroupPath) -> Result<(), Error> {
        self.end_scope(path).await;
        let end = Instant::now() + KILL_LIMIT;
        let mut pause = Duration::from_micros(200);
        loop {
            let error = match self.node.cgroups.unmake(path) {
                Ok(()) => return Ok(()),
                Err(coracle_sandbox::Error::Kernel { errno: nix::errno::Errno::EBUSY, .. })
                    if Instant::now() < end =>
                {
                    // Killed again: a process may have been forked meanwhile.
                    self.node.cgroups.kill(path)?;
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(50));
                    continue;
                }
                Err(error) => error,
            };
            return Err(error.into());
        }
    }

    async fn make_monitor(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        again::require_descriptors()?;
        let node = &self.node;
        let directory = node.paths.pod_state(pod.id);
        let mut committed = Ok(());
        let (setup, spawned) = {
            let record = pod.record();
            let namespaces = record.spec.own_namespaces();
            let plan::PodNamespaces { network, ipc, uts } = namespaces;
            let setup = plan::sandbox(&plan::SandboxPlan {
                namespaces,
                shares_pids: record.spec.namespaces.pid == PodPid::Pod,
                shm_directory: node.paths.shm(pod.id),
                host_name: files::hostname(&record.spec),
                sysctls: record.spec.sysctls.clone(),
                convenience_sysctls: network,
                oom_score_adj: Some(SANDBOX_OOM_SCORE_ADJ),
                user_namespace: record.spec.user_mappings(),
                label: node.kernel.modules.pod_file_label(&record.selinux_level),
            })?;
            let entry = node.cgroups.entry(&pod.cgroup()?)?;
            let user = record.spec.user_mappings();
            let spawn = monitor::Spawn {
                program: &node.monitors.program,
                base: node.monitors.base(&node.paths)?,
                directory: &directory,
                network,
                ipc,
                uts,
                user: user.as_ref(),
                setup: &setup,
                cgroup: entry.into.as_ref().map(std::os::fd::AsFd::as_fd),
                cgroup_joins: &entry.join_files,
            };
            let spawned = monitor::spawn(&spawn, || committed = self.commit_ahead(pod))?;
            (setup, spawned)
        };
        // After the link is there: undoing waits for the monitor's end by it.
        self.attach(pod, spawned).await.map_err(|error| match error.operation() {
            Some((index, errno)) => Error::new(Kind::Unknown, plan::explain(&setup, index, errno)),
            None => Error::new(Kind::Internal, error.to_string()),
        })?;
        committed?;
        self.adopt_monitor(pod).await
    }

    /// The disk works while the monitor starts. What comes after that is "ready", or ADD.
    fn commit_ahead(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        let mut record = pod.record().clone();
        if pod.has_network() {
            // Refused where its step comes.
            let Ok(request) = self.plan_network(pod) else { return Ok(()) };
            record.network = Some(Network { request: request.clone(), addresses: Vec::new(), result: None });
            record.commit_ahead(&self.node.paths)?;
            *pod.planned.borrow_mut() = Some(request);
        } else {
            record.state = state::Pod::Ready;
            record.commit_ahead(&self.node.paths)?;
            pod.is_ahead.set(true);
        }
        Ok(())
    }

    /// Opens the link to a monitor, new or found again, and waits until it serves.
    pub(crate) async fn attach(
        self: &Rc<Self>,
        pod: &Rc<Pod>,
        monitor: monitor::Monitor,
    ) -> Result<(), crate::link::LinkError> {
        let (pods, weak) = (Rc::downgrade(self), Rc::downgrade(pod));
        let number = pod.links.get() + 1;
        pod.links.set(number);
        let on_news = move |news| {
            let (Some(pods), Some(pod)) = (pods.upgrade(), weak.upgrade()) else { return };
            match news {
                News::Event(Event::Exited(exit)) => pods.container_exited(&exit),
                News::Event(Event::ExecExited { exec, exit }) => pod.exec_exited(exec, exit),
                News::Gone if pod.links.get() == number => pods.monitor_gone(&pod),
                News::Lost if pod.links.get() == number => pods.monitor_lost(&pod),
                News::Gone | News::Lost => {}
            }
        };
        let link = Link::open(monitor, on_news)?;
        *pod.link.borrow_mut() = Some(Rc::clone(&link));
        link.ask(Request::Hello { version: coracle_sandbox::FRAMES_VERSION }, &[], HELLO_LIMIT).await?;
        Ok(())
    }

    /// The monitor has ended, by our hand or by itself: in the second case the pod is over (its namespaces may be), and
    /// what it ran is ended, since nobody would log or reap it.
    fn monitor_gone(self: &Rc<Self>, pod: &Rc<Pod>) {
        *pod.link.borrow_mut() = None;
        pod.execs.borrow_mut().clear();
        if !pod.record().state.is_ready() {
            return;
        }
        log::error!("the pod's monitor died"; pod = pod.id);
        let (pods, pod) = (Rc::clone(self), Rc::clone(pod));
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            if let Err(error) = pods.change(&pod, PodEvent::MonitorGone) {
                log::error!("state not committed"; pod = pod.id, error = error);
            }
            if let Err(error) = pods.end_containers(&pod).await {
                log::error!("containers of a dead monitor"; pod = pod.id, error = error);
            }
        })
        .detach();
    }

    async fn unmake_monitor(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        let path = pod.cgroup()?;
        // SIGKILL is all it needs: it holds nothing that is not in the record, and its containers are gone.
        self.node.cgroups.kill(&path)?;
        let link = pod.link.borrow_mut().take();
        if let Some(link) = link {
            let ended = reactor::deadline(KILL_LIMIT, link.ended()).await;
            ended.map_err(|_| Error::new(Kind::DeadlineExceeded, "the pod's monitor does not end"))?;
        }
        Ok(())
    }
}

/// As pause processes have: the kubelet expects that infrastructure is not killed first (CRI 2.5).
const SANDBOX_OOM_SCORE_ADJ: i32 = -998;

fn log_all(pod: PodId, errors: &[Error]) {
    for error in errors {
        log::error!("not undone, will be tried again"; pod = pod, error = error);
    }
}
