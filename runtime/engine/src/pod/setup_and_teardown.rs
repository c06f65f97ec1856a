//! Set-up and teardown of pod sandboxes: one list of steps creates a pod sandbox, and the reversed list
//! undoes it, for a failed RunPodSandbox, for Stop and Remove, and after a crash or a reboot.
//!
//! Names of all objects are derived from the pod's ID (see `paths`), and the intent record is on disk before
//! the first object is created, so undoing needs no other state. Only the CNI configuration cannot be
//! derived; it is recorded before its step. A missing object is not an error; undoing twice is allowed.
//!
//! | step | creates | undone by |
//! |---|---|---|
//! | Cgroup | the monitor's cgroup | rmdir |
//! | Monitor | `coracle-pod` in the pod's namespaces | SIGKILL to its cgroup |
//! | Netns | a file that refers to the network namespace, for CNI plugins | umount, unlink |
//! | Network | link, address, ports, by CNI ADD, built in or by programs | CNI DEL; the link itself is removed with Netns and Monitor |
//! | Sysctls | nothing; those of the pod's network namespace are written, which may name its interface | with the namespace |
//! | Plugins | nothing; NRI plugins may refuse the pod | notification that the containers have exited |
//! | Workload | nothing; containers are created while the pod is ready | ends all containers |

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{counters, log, reactor, time, waits};
use coracle_sandbox::cgroup::{CgroupPath, Driver};
use coracle_sandbox::lsm::labelling_files;
use coracle_sandbox::{PodId, disk, netns};

use crate::filesystem::make_directory;
use crate::lifecycle::Event as Hook;
use crate::link::LinkError;
use crate::notices::ChangeKind;
use crate::operations::Key;
use crate::pod::KILL_LIMIT;
use crate::record::{DurableRecord, Notified, PodRecord};
use crate::spec::PodSpec;
use crate::state::{self, PodEvent};
use crate::times::Times;
use crate::unknown::Unknown;
use crate::{Node, Pod, Pods, files, garbage, paths};

/// The steps of a pod in the order of set-up; teardown is in reverse order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Cgroup,
    Monitor,
    Netns,
    Network,
    Sysctls,
    Plugins,
    Workload,
}

impl Step {
    const ALL: [Self; 7] = [
        Self::Cgroup,
        Self::Monitor,
        Self::Netns,
        Self::Network,
        Self::Sysctls,
        Self::Plugins,
        Self::Workload,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Monitor => "monitor",
            Self::Netns => "network namespace",
            Self::Network => "network",
            Self::Sysctls => "sysctls",
            Self::Plugins => "plugins",
            Self::Workload => "workload",
        }
    }
}

impl Pods {
    /// RunPodSandbox: creates the pod, or joins an identical request that is being executed (RETRY-1 to
    /// RETRY-4). The operation is a separate task: if the caller disconnects, the operation still completes
    /// or is completely undone.
    ///
    /// # Errors
    /// `AlreadyExists` if another sandbox has the name; `Unavailable` while a pod whose record cannot be read
    /// may have the name; otherwise the error of the first failed step, after the preceding steps were
    /// undone.
    pub async fn run(&self, spec: PodSpec) -> Result<PodId, Error> {
        loop {
            let pod = match self.named(&spec)? {
                Some(pod) => pod,
                None => {
                    let named = format!("pod sandbox {}", spec.name);
                    self.require_names().map_err(|error| error.context(named))?;
                    self.reserve(spec.clone())?
                }
            };
            let is_earlier = pod.record().state.is_earlier();
            match pod.made.wait().await.clone() {
                // The interrupted pod of an earlier daemon was undone, so the name is free again.
                Err(error) if error.kind() == Kind::Unavailable && is_earlier && !pod.is_visible() => {}
                Err(error) => return Err(error),
                // It may be a pod of an earlier daemon, of whose monitor nothing is known yet.
                Ok(()) => return pod.require_reached().map(|()| pod.id),
            }
        }
    }

    /// The pod with the requested name, if the request is a retry of the one that created the pod; `None` if
    /// no pod has the name.
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
            state::Pod::Creating { .. } => true,
            state::Pod::Ready { is_told } => !is_told,
            state::Pod::NotReady { .. } | state::Pod::Removing | state::Pod::Gone => false,
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

    /// Reserves the pod's name and starts the operation.
    fn reserve(&self, spec: PodSpec) -> Result<Rc<Pod>, Error> {
        if let (Some(_), Err(why)) = (&spec.user_namespace, &self.node().kernel.user_namespaces) {
            let text = format!("pod sandbox {}: user namespaces: {why}", spec.name);
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.node().images.want_sandbox_image();
        let id = PodId::from_bytes(coracle_sandbox::random_id()?);
        let cgroup_parent = self.node().placement.parent_of(&spec.cgroup_parent)?;
        let has_scopes = self.node().placement.driver == Driver::Systemd;
        paths::cgroup(&cgroup_parent, has_scopes, &id)?;
        let is_taken =
            |level: &str| self.table.pods.borrow().values().any(|pod| pod.record().selinux_level == level);
        let selinux_level = self.node().kernel.modules.pod_level(spec.selinux.as_ref(), is_taken)?;
        let pod = Pod::new(
            Rc::clone(self.engine()),
            PodRecord {
                id,
                boot: self.node().kernel.boot.clone(),
                created_at_ns: self.node().kernel.clock.now_ns(),
                spec,
                cgroup_parent,
                owns_cgroup_parent: false,
                state: state::Pod::NEW,
                network: None,
                addresses: Vec::new(),
                notified: Notified::default(),
                selinux_level,
                has_scopes,
            },
        );
        self.enter(&pod);
        let made = Rc::clone(&pod);
        self.engine().operations.detach(async move {
            let _operation = made.operation.lock().await;
            let result = made.up().await;
            let _ = made.made.try_set(result);
        });
        Ok(pod)
    }
}

impl Pod {
    async fn up(self: &Rc<Self>) -> Result<(), Error> {
        let begun = time::now();
        let title = self.record().spec.name.to_string();
        let mut times = Times::default();
        let made = self.make_all(&mut times).await;
        let Err(error) = made else {
            log::info!("pod sandbox ready"; pod = self.id, name = self.name(), ms = (time::now() - begun).as_millis(), steps = times);
            return Ok(());
        };
        log::warn!("pod sandbox not created"; pod = self.id, name = self.name(), steps = times, error = error);
        let error = error.logged();
        if let Err(error) = self.undo_creation().await {
            log::warn!("cannot record that the creation of a pod failed, the next daemon undoes it"; pod = self.id, error = error);
        }
        Err(error.context(format!("pod sandbox {title}")))
    }

    /// Undoes an incomplete creation. If this fails, the pod is listed from now on, so that Stop and Remove retry (CRI 2.0).
    ///
    /// # Errors
    /// The failure could not be written: the next daemon undoes the pod.
    pub(crate) async fn undo_creation(self: &Rc<Self>) -> Result<(), Error> {
        let mut left = self.down().await;
        let is_down = left.is_empty();
        if is_down && let Err(error) = self.forget() {
            left.push(error);
        }
        if left.is_empty() {
            return Ok(());
        }
        log_all(self.id, &left);
        let written = self.change(PodEvent::UpFailed);
        self.set_down(is_down);
        written
    }

    /// Executes all set-up steps; records in `times` how long each step took, including a failed one.
    async fn make_all(self: &Rc<Self>, times: &mut Times) -> Result<(), Error> {
        self.prepare()?;
        for step in Step::ALL {
            let begun = time::now();
            let made = self.make(step).await;
            let took = time::now() - begun;
            times.add(step.name(), took);
            counters::step(step.name(), took);
            made?;
        }
        Ok(())
    }

    /// Calls the plugins, which may refuse the pod, and sets the state Ready. One event guard covers both, so
    /// that no plugin sees the pod in between.
    async fn make_ready(self: &Rc<Self>) -> Result<(), Error> {
        let turn = self.engine().hooks.begin(self).await;
        turn.run_pod(self).await?;
        // It may have ended during the steps since its own, which do not need it.
        let has_monitor = match self.connection.link.borrow().is_some() {
            true => Ok(()),
            false => Err(Error::new(Kind::Unknown, LinkError::Gone.to_string())),
        };
        let made = has_monitor.and_then(|()| self.change(PodEvent::Up));
        if made.is_err() {
            turn.undo_run_pod(self).await;
        }
        made
    }

    /// Notifies plugins, once, that all containers of the pod have exited, after the notifications about each
    /// container.
    async fn announce_stopped(self: &Rc<Self>) {
        if self.record().state.is_creating() {
            return; // plugins have not accepted it
        }
        for container in self.containers() {
            container.announced().await;
        }
        let turn = self.engine().hooks.begin(self).await;
        if !self.record().notified.stop {
            let notified = Notified { stop: true, ..self.record().notified };
            self.record_notified(notified, self.engine().hooks.wants(Hook::StopPod));
            turn.stop_pod(self).await;
        }
    }

    /// Records that plugins are notified of an event, before the notification, so that plugins are never
    /// notified twice. If there are no plugins, the entry is written by the next commit.
    fn record_notified(&self, notified: Notified, is_heard: bool) {
        self.record.borrow_mut().notified = notified;
        if is_heard && let Err(error) = self.record().commit(self.node()) {
            log::warn!("cannot record that NRI plugins were notified, the event may be repeated after a restart"; pod = self.id, error = error);
        }
    }

    /// Writes the intent record and creates the directories, before any other object is created.
    fn prepare(&self) -> Result<(), Error> {
        let node = self.node();
        let directory = node.paths.pod(self.id);
        self.record().note(&node.paths)?;
        make_directory(&node.paths.containers(self.id))?;
        let label = node.kernel.modules.pod_file_label(&self.record().selinux_level);
        labelling_files(label.as_deref(), || files::write(&directory, &self.record().spec))?;
        for directory in [
            node.paths.shm(self.id),
            node.paths.root_mountpoint(self.id),
            node.paths.plans(self.id),
            node.paths.stopping(self.id),
            node.paths.pod_state(self.id).join("exits"),
        ] {
            make_directory(&directory)?;
        }
        Ok(())
    }

    async fn make(self: &Rc<Self>, step: Step) -> Result<(), Error> {
        let _wait = waits::begin(self.id, self.name(), format!("set-up step {}", step.name()));
        match step {
            Step::Cgroup => self.make_cgroup(),
            Step::Monitor => self.make_monitor().await,
            Step::Netns => self.make_netns(),
            Step::Network => self.make_network().await,
            Step::Sysctls => self.set_network_sysctls(),
            Step::Plugins => self.make_ready().await,
            Step::Workload => Ok(()),
        }
    }

    async fn unmake(self: &Rc<Self>, step: Step) -> Result<(), Error> {
        let _wait = waits::begin(self.id, self.name(), format!("teardown step {}", step.name()));
        match step {
            Step::Workload => self.end_containers().await,
            Step::Plugins => {
                self.announce_stopped().await;
                Ok(())
            }
            Step::Sysctls => Ok(()),
            Step::Network => self.unmake_network().await,
            Step::Netns => Ok(netns::unpin(&paths::netns(self.id))?),
            Step::Monitor => self.unmake_monitor().await,
            Step::Cgroup => self.unmake_cgroup().await,
        }
    }

    /// Undoes all steps. If undoing a step fails, the function continues with the next step; it returns all
    /// errors.
    pub(crate) async fn down(self: &Rc<Self>) -> Vec<Error> {
        let mut errors = Vec::new();
        for step in Step::ALL.into_iter().rev() {
            if let Err(error) = self.unmake(step).await {
                errors.push(error);
            }
        }
        // No monitor reports the end of what the first step has not ended.
        if self.runs_any()
            && let Err(error) = self.end_containers().await
        {
            self.keep_trying(Unknown::unended(self.id, error));
        }
        self.set_down(errors.is_empty());
        errors
    }

    /// Sets whether all objects of a pod that is not ready were removed.
    fn set_down(&self, is_now: bool) {
        if let state::Pod::NotReady { is_down, .. } = &mut self.record.borrow_mut().state {
            *is_down = is_now;
        }
    }

    /// StopPodSandbox: ends all containers concurrently, then undoes the sandbox. The call may be repeated.
    ///
    /// # Errors
    /// The error of the first step that could not be undone; the other steps were undone if possible, and the
    /// caller may retry.
    pub async fn stop(self: &Rc<Self>) -> Result<(), Error> {
        let (pod, key) = (Rc::clone(self), Key::StopPod(self.id));
        let work = async move {
            let _operation = pod.operation.lock().await;
            pod.stop_locked().await
        };
        self.engine().operations.share(key, work).await
    }

    async fn stop_locked(self: &Rc<Self>) -> Result<(), Error> {
        let was_ready = self.record().state.is_ready();
        if self.record().state.is_down() {
            return Ok(());
        }
        self.change(PodEvent::Stop)?;
        let begun = time::now();
        let mut errors = self.down().await.into_iter();
        match errors.next() {
            None if was_ready => {
                log::info!("pod sandbox stopped"; pod = self.id, name = self.name(), ms = (time::now() - begun).as_millis());
                Ok(())
            }
            None => Ok(()),
            Some(first) => {
                log_all(self.id, errors.as_slice());
                Err(first.context(format!("stop pod sandbox {:.13}", self.id)))
            }
        }
    }

    /// RemovePodSandbox: stops the pod if necessary, removes its containers, then its record.
    ///
    /// # Errors
    /// Those of [`Pod::stop`].
    pub async fn remove(self: &Rc<Self>) -> Result<(), Error> {
        let (pod, key) = (Rc::clone(self), Key::RemovePod(self.id));
        let work = async move {
            let _operation = pod.operation.lock().await;
            pod.stop_locked().await?;
            for container in pod.containers() {
                container.remove().await?;
            }
            let turn = pod.engine().hooks.begin(&pod).await;
            if !pod.record().notified.remove {
                let notified = Notified { remove: true, ..pod.record().notified };
                pod.record_notified(notified, pod.engine().hooks.wants(Hook::RemovePod));
                turn.remove_pod(&pod).await;
            }
            pod.change(PodEvent::Remove)?;
            pod.forget()?;
            drop(turn);
            log::info!("pod sandbox removed"; pod = pod.id, name = pod.name());
            pod.engine().tell(ChangeKind::Deleted, &pod.id, "", &pod);
            Ok(())
        };
        self.engine().operations.share(key, work).await
    }

    /// Removes all files of the pod, its name, and its entry in the lists.
    pub(crate) fn forget(self: &Rc<Self>) -> Result<(), Error> {
        // First what makes it a pod to the next daemon, with one rename: its notes alone are none, and go at the next start.
        // The other way round a record that ran ahead of a note ("ready") would be taken at its word.
        garbage::discard(self.node(), &self.node().paths.pod(self.id))?;
        let state = self.node().paths.pod_state(self.id);
        match disk::remove_dir_all(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed("remove", &state, &error));
            }
            Ok(()) | Err(_) => {}
        }
        self.engine().pods().inspect(|pods| pods.leave(self.id));
        self.change(PodEvent::Forgotten)
    }

    /// Changes the state of a pod: commits the new state, then publishes it. A state that is already a fact
    /// is published even if it cannot be written, because the next daemon detects it by itself.
    pub(crate) fn change(self: &Rc<Self>, event: PodEvent) -> Result<(), Error> {
        let next = self.record().state.on(event);
        let next = next.map_err(|refused| Error::new(Kind::FailedPrecondition, refused.to_string()))?;
        if next == self.record().state {
            return Ok(());
        }
        let mut record = self.record().clone();
        if record.state.is_creating() && !next.is_ready() {
            // Plugins did not accept it, or were notified of its end.
            record.notified = Notified { stop: true, remove: true };
        }
        record.state = next;
        let written = match record.state {
            // Committed in advance, when the monitor was started.
            state::Pod::Ready { .. } if !self.has_network() => record.make_effective(&self.node().paths),
            state::Pod::Ready { .. } => record.commit(self.node()),
            state::Pod::Creating { .. } | state::Pod::NotReady { .. } => record.note(&self.node().paths),
            // The directory is removed next, or was removed.
            state::Pod::Removing | state::Pod::Gone => Ok(()),
        };
        match event {
            PodEvent::Up | PodEvent::Stop | PodEvent::Remove | PodEvent::Forgotten => written.clone()?,
            PodEvent::UpFailed | PodEvent::MonitorGone | PodEvent::NetworkGone | PodEvent::Rebooted => {}
        }
        #[cfg(feature = "testing")]
        state::transitions::note(&self.id, [self.record().state.name(), event.name(), record.state.name()]);
        let (was_ready, is_ready) = (self.record().state.is_ready(), record.state.is_ready());
        *self.record.borrow_mut() = record;
        match (was_ready, is_ready) {
            (false, true) => {
                self.engine().tell(ChangeKind::Created, &self.id, "", self);
                self.engine().tell(ChangeKind::Started, &self.id, "", self);
            }
            (true, false) => self.engine().tell(ChangeKind::Stopped, &self.id, "", self),
            (true, true) | (false, false) => {}
        }
        written
    }

    fn make_cgroup(&self) -> Result<(), Error> {
        let parent = CgroupPath::parse(&self.record().cgroup_parent)?;
        let is_default = self.record().cgroup_parent == self.node().placement.parent;
        if !is_default && !self.record().has_scopes && !self.node().cgroups.exists(&parent) {
            // coracle must remove a parent that it created; the kubelet creates its own before the call.
            // Slices belong to systemd, and the default parent is kept for the next pod.
            let mut record = self.record().clone();
            record.owns_cgroup_parent = true;
            record.note(&self.node().paths)?;
            *self.record.borrow_mut() = record;
        }
        Ok(self.node().cgroups.make(&self.cgroup()?)?)
    }

    async fn unmake_cgroup(&self) -> Result<(), Error> {
        self.node().clear_cgroup(&self.cgroup()?).await?;
        if self.record().owns_cgroup_parent {
            // Other pods may still use it: the last one removes it.
            let parent = CgroupPath::parse(&self.record().cgroup_parent)?;
            self.node().cgroups.unmake_if_unused(&parent)?;
        }
        Ok(())
    }
}

impl Node {
    /// Kills all processes of a cgroup, and removes the cgroup as soon as they have ended.
    pub(crate) async fn kill_cgroup(&self, path: &CgroupPath) -> Result<(), Error> {
        self.cgroups.kill(path)?;
        self.clear_cgroup(path).await
    }

    /// Removes a cgroup whose processes were killed, as soon as they have ended.
    pub(crate) async fn clear_cgroup(&self, path: &CgroupPath) -> Result<(), Error> {
        self.end_scope(path).await;
        let end = time::now() + KILL_LIMIT;
        let mut pause = Duration::from_micros(200);
        loop {
            let error = match self.cgroups.unmake(path) {
                Ok(()) => return Ok(()),
                Err(coracle_sandbox::Error::Kernel { errno: nix::errno::Errno::EBUSY, .. })
                    if time::now() < end =>
                {
                    // Killed again, because a process may have forked meanwhile, or may have been moved here.
                    self.cgroups.kill_in_all(path)?;
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(50));
                    continue;
                }
                Err(error) => error,
            };
            return Err(error.into());
        }
    }
}

fn log_all(pod: PodId, errors: &[Error]) {
    for error in errors {
        log::error!("teardown step failed, will retry"; pod = pod, error = error);
    }
}
