//! Recovery at the start of a daemon: all pods and containers of earlier daemons are found in their current
//! state.
//!
//! | found | action |
//! |---|---|
//! | record, same boot, monitor responds | the daemon connects; exits that happened without a daemon are in the monitor's exit records (RST-1 to RST-6) |
//! | record, same boot, monitor ended | NotReady; its containers have exited: exit record, or Lost |
//! | record of an earlier boot | NotReady; containers Lost; CNI DEL before any ADD (BOOT-1 to BOOT-3) |
//! | intent only (Creating), of a pod or a container | undone from the record (RST-7) |
//! | a record that can be read but fails verification | moved to quarantine, its processes killed: only this pod or container is lost (RST-9) |
//! | a record that cannot be read, a monitor that cannot be reached | not changed, retried (`again`) |
//! | a container that runs without a record | killed (`unlisted`); if that fails, retried |
//! | directory or monitor without a record | killed and removed (RST-12); if that fails, retried |
//!
//! No request is served before recovery is complete (RST-10): a kubelet would start a pod that a list omits a
//! second time. A pod whose monitor does not answer does not delay the others: after [`START_LIMIT`] the pod
//! is listed from its records, and the daemon connects to the monitor in the background.

use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::store::{self, Damage};
use coracle_base::{log, reactor, time};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::monitor::ConnectError;
use coracle_sandbox::{ContainerId, Failure, PodId, Request, disk, monitor, netns};
use nix::errno::Errno;

use crate::container::{REPORT_LIMIT, StoppingNote};
use crate::link::{Link, LinkError};
use crate::record::{ContainerRecord, PodRecord, Told};
use crate::state::{self, ContainerEvent, How, PodEvent};
use crate::unknown::Unknown;
use crate::unlisted::{self, ids};
use crate::{Container, Pod, Pods, again, garbage, paths};

/// Maximum time for which monitors that do not answer delay the start, all together. Working monitors answer
/// within a few milliseconds.
const START_LIMIT: Duration = Duration::from_millis(500);

/// Time limit for a monitor's answer to its first request, and for the answers about its containers.
const ATTACH_LIMIT: Duration = Duration::from_secs(5);

/// Interval between two checks of a container whose start is in progress.
const STARTING_PAUSE: Duration = Duration::from_millis(20);

/// Time limit for a monitor's answer about one container.
const ASK_LIMIT: Duration = Duration::from_secs(5);

impl Pods {
    /// Recovers all pods and containers; called once, before the first call is served.
    ///
    /// # Errors
    /// Errors that prevent the daemon from serving. A pod or container that cannot be recovered is logged and
    /// does not affect others.
    pub async fn recover(self: &Rc<Self>) -> Result<(), Error> {
        let paths = &self.node.paths;
        for directory in [paths.pods(), paths.pods_state()] {
            crate::filesystem::make_private_directory(&directory)?;
        }
        store::close_quarantine(&paths.root)?;
        garbage::prepare(paths)?;
        garbage::sweep_all(self)?;
        for id in ids::<PodId>(&paths.pods())? {
            if let Some(unknown) = self.load_pod(id).await {
                self.set_unknown(id, Some(unknown));
            }
        }
        self.node.images.sweep();
        self.take_over_all().await;
        for id in ids::<PodId>(&paths.pods_state())? {
            // Objects whose record may exist but cannot be read now are left alone.
            if !self.table.pods.borrow().contains_key(&id)
                && !self.unknown.borrow().contains_key(&id)
                && let Err(error) = self.end_orphan(id).await
            {
                self.set_unknown(id, Some(Unknown::orphan(id, error)));
            }
        }
        self.release_networks();
        self.try_again_later();
        Ok(())
    }

    async fn take_over_all(self: &Rc<Self>) {
        let pods: Vec<_> = self.table.pods.borrow().values().cloned().collect();
        let tasks: Vec<_> = pods
            .into_iter()
            .map(|pod| {
                let (pods, id) = (Rc::clone(self), pod.id);
                let task = reactor::spawn(async move {
                    let _operation = pod.operation.lock().await;
                    pods.take_over(&pod).await
                });
                (id, task)
            })
            .collect();
        let end = time::now() + START_LIMIT;
        for (id, mut task) in tasks {
            let left = end.saturating_duration_since(time::now());
            match reactor::deadline(left, &mut task).await {
                Ok(unknown) => self.set_taken_over(id, unknown),
                Err(_) => {
                    let pod = self.table.pods.borrow().get(&id).cloned();
                    pod.inspect(|pod| self.look_at_processes(pod));
                    self.set_taken_over(id, Some(Unknown::unattached(id, "it has not answered yet")));
                    let pods = Rc::clone(self);
                    reactor::spawn(async move { pods.set_taken_over(id, task.await) }).detach();
                }
            }
        }
    }

    /// Records which part of a pod's state its monitor did not report. An existing entry about an unreadable
    /// record is kept.
    fn set_taken_over(&self, id: PodId, unknown: Option<Unknown>) {
        let is_unread = self.unknown.borrow().get(&id).is_some_and(|unknown| unknown.is_unread);
        if !is_unread {
            self.set_unknown(id, unknown);
        }
    }

    /// Reads the records of a pod and of its containers, except those already in the table; returns what
    /// cannot be read at the moment.
    pub(crate) async fn load_pod(self: &Rc<Self>, id: PodId) -> Option<Unknown> {
        let known = self.table.pods.borrow().get(&id).cloned();
        let pod = match known {
            Some(pod) => pod,
            None => match PodRecord::load(&self.node.paths, id) {
                Ok(record) => self.enlist_pod(record),
                Err(Damage::Io(error)) => {
                    let text =
                        format!("record of pod sandbox {id:.13}: {}", coracle_base::error::plain(&error));
                    return Some(Unknown::unread(text));
                }
                // Its files are evidence of its containers, and stay until these are ended.
                Err(damage) => match self.end_orphan(id).await {
                    Ok(()) => {
                        self.set_aside(&self.node.paths.pod(id), damage);
                        return None;
                    }
                    Err(error) => return Some(Unknown::orphan(id, error)),
                },
            },
        };
        let containers = match ids::<ContainerId>(&self.node.paths.containers(id)) {
            Ok(containers) => containers,
            Err(error) => return Some(Unknown::unread(error)),
        };
        let mut unknown = None;
        for container in containers {
            let is_known = self.table.containers.borrow().contains_key(&container);
            if !is_known && let Some(unread) = self.load_container(&pod, container).await {
                unknown = Some(unread);
            }
        }
        unknown
    }

    fn enlist_pod(self: &Rc<Self>, record: PodRecord) -> Rc<Pod> {
        let id = record.id;
        self.node.kernel.clock.saw(record.created_at_ns);
        let pod = Pod::new(record);
        pod.creation.is_earlier.set(true);
        if pod.record().state != state::Pod::Creating {
            let _ = pod.creation.made.try_set(Ok(()));
            pod.progress.is_offered.set(true);
        }
        // A pod of the same name may have been created meanwhile.
        self.table.names.borrow_mut().entry(pod.record().spec.name.clone()).or_insert(id);
        self.table.pods.borrow_mut().insert(id, Rc::clone(&pod));
        pod
    }

    async fn load_container(self: &Rc<Self>, pod: &Rc<Pod>, id: ContainerId) -> Option<Unknown> {
        match ContainerRecord::load(&self.node.paths, pod.id, id) {
            Ok(record) => self.enlist_container(pod, record),
            Err(Damage::Io(error)) => {
                let text = format!("record of container {id:.13}: {}", coracle_base::error::plain(&error));
                return Some(Unknown::unread(text));
            }
            Err(damage) => {
                // Its processes are ended before its files are removed.
                let cgroup = pod.record().cgroup(&id);
                if let Ok(cgroup) = cgroup
                    && let Err(error) = self.clear_killed(&cgroup).await
                {
                    let text = format!("container {id:.13}, whose record is damaged: {error}");
                    return Some(Unknown::unread(text));
                }
                self.set_aside(&self.node.paths.container(pod.id, id), damage);
            }
        }
        None
    }

    fn enlist_container(self: &Rc<Self>, pod: &Rc<Pod>, record: ContainerRecord) {
        let id = record.id;
        self.node.kernel.clock.saw(record.created_at_ns);
        if let state::Container::Exited(ended) = &record.state {
            self.node.kernel.clock.saw(ended.finished_at_ns);
        }
        let started_ahead = record.started_ahead(&self.node.paths);
        let container = Container::new(Rc::clone(pod), record);
        container.process.ahead.set(started_ahead);
        if container.record().state.is_over() {
            let _ = container.ending.exited.try_set(());
            let _ = container.ending.stop_told.try_set(());
        }
        if let Err(error) = self.node.images.retain(id, container.record().layer_names()) {
            log::error!("cannot retain the layers of a container"; ctr = id, error = error);
        }
        pod.names.borrow_mut().entry(container.record().spec.name.clone()).or_insert(id);
        self.table.containers.borrow_mut().insert(id, Rc::clone(&container));
        match container.is_visible() {
            true => drop(container.creation.made.try_set(Ok(()))),
            false => self.undo_container(container),
        }
    }

    /// Undoes an interrupted CreateContainer in the background; the container's name is reserved until then.
    /// If undoing fails, the next request with this name tries again, and so does the removal of the pod.
    fn undo_container(self: &Rc<Self>, container: Rc<Container>) {
        let pods = Rc::clone(self);
        reactor::spawn(async move {
            let _operation = container.operation.lock().await;
            log::info!("undoing an incomplete container"; pod = container.pod.id, ctr = container.id);
            pods.log_failed(&container.pod, pods.unmake_container(&container).await);
            let text = "the runtime was restarted while creating it: try again";
            let _ = container.creation.made.try_set(Err(Error::new(Kind::Unavailable, text)));
        })
        .detach();
    }

    /// Handles a record that cannot be used. Absent: the daemon ended before the intent was written, so no
    /// object exists, and the directory is removed. Damaged: the files are moved to quarantine.
    fn set_aside(self: &Rc<Self>, directory: &Path, damage: Damage) {
        let reason = match damage {
            Damage::Absent => {
                if let Err(error) = garbage::discard(self, directory) {
                    log::warn!("cannot remove a directory without a record"; path = directory.display(), error = error);
                }
                return;
            }
            Damage::Io(error) => coracle_base::error::plain(&error),
            Damage::Damaged(reason) => reason,
        };
        match store::quarantine(&self.node.paths.root, directory, &reason) {
            Ok(to) => log::error!("damaged record moved to quarantine"; path = to.display(), reason = reason),
            Err(error) => {
                log::error!("cannot move a damaged record to quarantine"; path = directory.display(), reason = reason, error = error)
            }
        }
    }

    /// Ends the monitor and the containers of a pod without a record, wherever their cgroups are.
    ///
    /// # Errors
    /// An object that could not be removed; the call may be repeated. The pod's state directory is removed
    /// last.
    async fn end_orphan(self: &Rc<Self>, id: PodId) -> Result<(), Error> {
        let state = self.node.paths.pod_state(id);
        let pid = monitor::connect(&state).map_or(0, |monitor| monitor.pid);
        if pid != 0 {
            log::warn!("ending a monitor without a record"; pod = id, pid = pid);
        }
        let mut outcome = Ok(());
        for cgroup in self.cgroups_of_orphan(id, pid)? {
            outcome = outcome.and(self.clear_killed(&cgroup).await);
        }
        outcome = outcome.and(self.node.network.cni.forget(&id.to_string()).await);
        outcome.and(netns::unpin(&paths::netns(id)).map_err(Error::from))?;
        match disk::remove_dir_all(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(failed("remove", &state, &error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The cgroups of the pod's containers, followed by the monitor's. They are found in the whole hierarchy
    /// by their names, which are IDs.
    fn cgroups_of_orphan(&self, id: PodId, monitor: i32) -> Result<Vec<CgroupPath>, Error> {
        let paths = &self.node.paths;
        let mut traces = unlisted::traces(paths, id, monitor)?;
        for container in ids::<ContainerId>(&paths.containers(id))? {
            traces.entry(container).or_insert(None);
        }
        // A container whose directory belongs to another pod is not included.
        traces.retain(|container, _| !self.table.containers.borrow().contains_key(container));
        let names: Vec<String> = traces.keys().map(ToString::to_string).chain([id.to_string()]).collect();
        let is_named = |name: &str| {
            let name = cgroup::id_of_scope(name).unwrap_or(name);
            names.iter().any(|wanted| wanted == name)
        };
        let mut cgroups: Vec<_> = traces.into_values().flatten().collect();
        let found = self.node.cgroups.find(is_named)?;
        let (own, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|cgroup| cgroup.as_str().contains(&id.to_string()));
        cgroups.extend(others);
        cgroups.extend(own);
        Ok(cgroups)
    }

    async fn clear_killed(&self, cgroup: &CgroupPath) -> Result<(), Error> {
        self.node.cgroups.kill(cgroup)?;
        self.clear_cgroup(cgroup).await
    }

    /// Connects to the monitor of a pod and queries its containers; returns which part of the pod's state is
    /// still unknown.
    pub(crate) async fn take_over(self: &Rc<Self>, pod: &Rc<Pod>) -> Option<Unknown> {
        let is_same_boot = pod.record().boot == self.node.kernel.boot;
        if !is_same_boot {
            self.rebooted(pod);
            return None;
        }
        if pod.record().state == state::Pod::Creating {
            // A pod that this daemon is creating is not recovered.
            if !pod.creation.made.is_initialized() && pod.connection.link.borrow().is_none() {
                self.undo(pod);
            }
            return None;
        }
        let is_attached = pod.connection.link.borrow().is_some();
        let attached = if is_attached { Ok(()) } else { self.reattach(pod).await };
        match attached {
            Ok(()) => self.take_over_containers(pod).await,
            Err(Unattached::Later(error)) => {
                self.look_at_processes(pod);
                // An answer that comes too late is not waited for; nor is it taken for the monitor's end.
                pod.connection.links.set(pod.connection.links.get() + 1);
                if let Some(link) = pod.connection.link.borrow_mut().take() {
                    link.abandon();
                }
                Some(Unknown::unattached(pod.id, error))
            }
            Err(Unattached::Gone(error)) => {
                if pod.record().state.is_ready() {
                    log::error!("the pod's monitor has ended"; pod = pod.id, error = error);
                }
                self.log_failed(pod, self.change(pod, PodEvent::MonitorGone));
                self.end_containers(pod).await.err().map(|error| Unknown::unended(pod.id, error))
            }
        }
    }

    async fn reattach(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Unattached> {
        again::require_descriptors().map_err(Unattached::Later)?;
        let internal = |text: String| Error::new(Kind::Internal, text);
        let monitor = monitor::connect(&self.node.paths.pod_state(pod.id)).map_err(|error| match error {
            // A temporary error of the kernel: a full descriptor table, a failing disk.
            ConnectError::Failed(coracle_sandbox::Error::Kernel { .. }) => {
                Unattached::Later(internal(error.to_string()))
            }
            ConnectError::NotThere | ConnectError::Failed(_) => Unattached::Gone(internal(error.to_string())),
        })?;
        match reactor::deadline(ATTACH_LIMIT, self.attach(pod, monitor)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error @ LinkError::Socket(_))) => Err(Unattached::Later(internal(error.to_string()))),
            // Its process is running: another connection may have replaced this one.
            Ok(Err(error @ LinkError::Gone)) if self.has_monitor(pod) => {
                Err(Unattached::Later(internal(error.to_string())))
            }
            Ok(Err(error)) => Err(Unattached::Gone(internal(error.to_string()))),
            Err(_) => Err(Unattached::Later(internal("it does not answer".to_owned()))),
        }
    }

    fn has_monitor(&self, pod: &Pod) -> bool {
        !matches!(monitor::connect(&self.node.paths.pod_state(pod.id)), Err(ConnectError::NotThere))
    }

    async fn take_over_containers(self: &Rc<Self>, pod: &Rc<Pod>) -> Option<Unknown> {
        for container in self.containers_of(pod.id) {
            if container.ending.exited.is_initialized() {
                // An earlier daemon may have recorded the exit, and ended before it killed the child processes.
                if container.cgroup().is_ok_and(|cgroup| self.node.cgroups.exists(&cgroup)) {
                    self.end_remaining(container);
                }
                continue;
            }
            if !container.is_visible() {
                continue; // never started
            }
            let link = pod.link().ok()?;
            let was_running = container.record().state.is_running();
            match self.ask_process(&link, &container).await {
                Ok(Some(pid)) => self.take_over_running(&container, pid),
                Ok(None) if was_running && !container.ending.exited.is_initialized() => {
                    let end = time::now() + REPORT_LIMIT;
                    let found = self.read_exit_record(&container, end, || false).await;
                    if container.record().state.is_running() {
                        self.end_without_monitor(&container, "the monitor does not know it", found);
                    }
                }
                Ok(None) => {}
                // The end of the monitor is seen by the link.
                Err(LinkError::Gone) => return None,
                Err(error) => return Some(Unknown::unattached(pod.id, error)),
            }
        }
        // Containers whose record cannot be read now are left alone.
        let is_unread = self.unknown.borrow().get(&pod.id).is_some_and(|unknown| unknown.is_unread);
        match is_unread {
            true => None,
            false => self.end_unlisted(pod).await.err().map(|error| Unknown::unended(pod.id, error)),
        }
    }

    /// Requests the main process of a container from the monitor: its PID, 0 if the PID is unknown, `None` if
    /// no process runs. If a start that an earlier daemon requested is in progress, waits for its result.
    async fn ask_process(&self, link: &Link, container: &Container) -> Result<Option<i32>, LinkError> {
        let end = time::now() + ASK_LIMIT;
        let id = container.id;
        loop {
            let refused = match link.ask(Request::Process { container: id }, &[], ASK_LIMIT).await {
                Ok(descriptors) => {
                    let pid = descriptors.first().and_then(|pidfd| monitor::pid_of(pidfd.as_fd()));
                    return Ok(Some(pid.unwrap_or(0)));
                }
                Err(LinkError::Failed(Failure::Unknown)) => break,
                Err(LinkError::Failed(Failure::Refused { errno })) => Errno::from_raw(errno),
                Err(error) => return Err(error),
            };
            match refused {
                Errno::EAGAIN if time::now() < end => reactor::sleep(STARTING_PAUSE).await,
                Errno::EAGAIN => return Err(LinkError::Silent { limit: ASK_LIMIT }),
                _ => return Ok(None),
            }
        }
        // A monitor of an earlier build does not report it; the kernel does.
        match link.ask(Request::Signal { container: id, signal: 0 }, &[], ASK_LIMIT).await {
            Ok(_) => {
                let cgroup = container.cgroup().ok();
                let pid = cgroup.and_then(|cgroup| unlisted::main_process(link.pid(), &cgroup));
                Ok(Some(pid.unwrap_or(0)))
            }
            Err(LinkError::Failed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Continues a container whose main process runs. Its record may still have the state Created, if the
    /// daemon was killed between the monitor's answer and the commit.
    fn take_over_running(self: &Rc<Self>, container: &Rc<Container>, pid: i32) {
        container.set_pid(pid);
        if !container.record().state.is_running() {
            let at_ns = container.process.ahead.get().unwrap_or_else(|| self.created_ns(container, pid));
            self.log_failed(
                &container.pod,
                self.change_container(container, ContainerEvent::Started { at_ns }),
            );
        }
        self.resume_stop(container);
    }

    /// Wall-clock time of the creation of a container's process in nanoseconds since 1970; not earlier than
    /// the container's own creation.
    fn created_ns(&self, container: &Container, pid: i32) -> i64 {
        let now_ns = self.node.kernel.clock.now_ns();
        let age_ms = unlisted::created_ms(pid).map(|created_ms| time::boot_ms().saturating_sub(created_ms));
        let age_ns = i64::try_from(age_ms.unwrap_or(0)).unwrap_or(0).saturating_mul(1_000_000);
        now_ns.saturating_sub(age_ns).max(container.record().created_at_ns)
    }

    /// Reads the PIDs of running containers from the kernel, for a pod whose monitor does not answer.
    fn look_at_processes(&self, pod: &Rc<Pod>) {
        let monitor = monitor::pid(&self.node.paths.pod_state(pod.id)).unwrap_or(0);
        for container in self.containers_of(pod.id) {
            let is_running = container.record().state.is_running();
            if let (true, Ok(cgroup)) = (is_running, container.cgroup())
                && let Some(pid) = unlisted::main_process(monitor, &cgroup)
            {
                container.set_pid(pid);
            }
        }
    }

    /// Continues a stop that the previous daemon had begun: SIGKILL is due at the same time (RST-11). The
    /// stop signal is sent if it may not have been sent: it is sent twice if the previous daemon ended
    /// directly after sending it.
    fn resume_stop(self: &Rc<Self>, container: &Rc<Container>) {
        let path = self.node.paths.stopping(container.pod.id).join(container.id.to_string());
        let note = disk::read_to_string(&path).ok().and_then(|text| StoppingNote::parse(&text));
        if let Some(StoppingNote { due_ms, is_signal_due }) = note {
            let grace = Duration::from_millis(due_ms.saturating_sub(time::boot_ms()));
            self.begin_stop(container, grace, is_signal_due);
        }
    }

    fn rebooted(self: &Rc<Self>, pod: &Rc<Pod>) {
        self.log_failed(pod, self.change(pod, PodEvent::Rebooted));
        let _ = pod.creation.made.try_set(Ok(()));
        for container in self.containers_of(pod.id) {
            if container.is_visible() && !container.ending.exited.is_initialized() {
                let message = "the node was rebooted".to_owned();
                self.end(&container, self.node.kernel.clock.now_ns(), How::Lost { message });
            }
        }
    }

    /// Undoes an interrupted RunPodSandbox in the background; the pod's name is reserved until then.
    fn undo(self: &Rc<Self>, pod: &Rc<Pod>) {
        let (pods, pod) = (Rc::clone(self), Rc::clone(pod));
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            log::info!("undoing an incomplete pod sandbox"; pod = pod.id);
            let undone = match pods.down(&pod).await.into_iter().next() {
                None => pods.forget_pod(&pod),
                Some(error) => Err(error),
            };
            if undone.is_err() {
                // Listed from now on, so that Stop and Remove retry; plugins do not know it.
                pod.record.borrow_mut().told = Told { stop: true, remove: true };
                pods.log_failed(&pod, pods.change(&pod, PodEvent::UpFailed));
            }
            pods.log_failed(&pod, undone);
            let _ = pod.creation.made.try_set(Err(Error::new(
                Kind::Unavailable,
                "the runtime was restarted while making it: try again",
            )));
        })
        .detach();
    }

    /// Releases the networks of pods of an earlier boot before the first ADD, because ADD may allocate their
    /// addresses again.
    fn release_networks(self: &Rc<Self>) {
        let pods = Rc::clone(self);
        let stale: Vec<_> = self
            .table
            .pods
            .borrow()
            .values()
            .filter(|pod| pod.record().boot != self.node.kernel.boot)
            .cloned()
            .collect();
        reactor::spawn(async move {
            for pod in stale {
                let _operation = pod.operation.lock().await;
                pods.log_failed(&pod, pods.unmake_network(&pod).await);
            }
            pods.node.network.cni.recovered();
        })
        .detach();
    }

    fn log_failed(&self, pod: &Rc<Pod>, result: Result<(), Error>) {
        if let Err(error) = result {
            log::error!("recovery of a pod is incomplete"; pod = pod.id, error = error);
        }
    }
}

/// The reason why the daemon could not connect to a monitor.
enum Unattached {
    /// The monitor has ended.
    Gone(Error),
    /// The monitor may be running but cannot be reached now.
    Later(Error),
}
