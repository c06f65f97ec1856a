//! The lifecycle of containers: create, start, stop, remove, and the handling of exits.
//!
//! Create compiles the request into a plan, which is stored in a file; start compiles the launch record from it and sends that to the
//! monitor. Each operation is a separate task, and the call waits for its result. Objects and their removal:
//!
//! | object | created by | removed by |
//! |---|---|---|
//! | writable layer and record, `ROOT/pods/POD/containers/CTR` | create | one rename into the garbage |
//! | cgroup | create | the exit, or remove |
//! | plan and confinement, files under `--state` | create | remove; the plan by start |
//! | process, log, streams | start, in the monitor | its exit; `Forget` at remove |

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, reactor, time};
use coracle_job::ContainerEdits;
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::{ContainerId, ExitRecord, Request, disk, exit_record, monitor, plan};

use crate::hooks::Point;
use crate::lifecycle::{Event as Hook, EventGuard};
use crate::link::{ASK_LIMIT, LinkError};
use crate::notices::ChangeKind;
use crate::operations::Key;
use crate::pod::unlisted_containers::forget_notes;
use crate::pod::{KILL_LIMIT, strays};
use crate::record::{ContainerRecord, DurableRecord, Notified};
use crate::spec::ContainerSpec;
use crate::state::{self, ContainerEvent, How};
use crate::unknown::Unknown;
use crate::{Container, Pod, garbage};
use on_host::OnHost;

mod cgroup;
mod devices;
mod filter;
mod kept;
mod on_host;
mod resolve;
mod resolved;
mod start;
mod stop;
mod update;
mod volumes;

pub use filter::compile_filter;
pub use resolved::Resolved;
pub(crate) use stop::StoppingNote;

/// Time for which exit records of killed containers are awaited, for all containers of a pod together, if
/// their monitor has not reported the exits. A working monitor writes exit records within milliseconds.
pub(crate) const REPORT_LIMIT: Duration = Duration::from_secs(1);
const REPORT_PAUSE: Duration = Duration::from_millis(2);

/// Time for which the exit record of one container is awaited at least, after its last process has ended.
const REPORT_MIN: Duration = Duration::from_millis(100);

impl Pod {
    /// CreateContainer: creates a container, or joins an identical request that is being executed.
    ///
    /// # Errors
    /// `AlreadyExists` if another container has the name; `FailedPrecondition` if the pod sandbox is not
    /// ready; `InvalidArgument` for invalid values of the request or the image; otherwise the error of the
    /// failed operation, in which case nothing remains.
    pub async fn create_container(self: &Rc<Self>, spec: ContainerSpec) -> Result<ContainerId, Error> {
        if let Some(id) = self.join_create(&spec).await? {
            return Ok(id);
        }
        self.require_ready()?;
        // Before the name is reserved: a wait between the two would let a second request in.
        let edits = self.node().cdi_edits(spec.cdi_devices.clone()).await?;
        let title = || format!("container {}", spec.name);
        let on_host =
            self.node().look_at_host(&spec, &edits).await.map_err(|error| error.context(title()))?;
        if let Some(id) = self.join_create(&spec).await? {
            return Ok(id);
        }
        let container = self.reserve_container(spec, (&edits, on_host))?;
        container.made.wait().await.clone()?;
        Ok(container.id)
    }

    /// Waits for an identical request that is creating the container or has created it; `None` if no
    /// container has the name.
    async fn join_create(&self, spec: &ContainerSpec) -> Result<Option<ContainerId>, Error> {
        while let Some(container) = self.named_container(spec)? {
            if has_failed(&container) {
                // Undoing it has failed, too: else it would not have the name any more.
                let _operation = container.operation.lock().await;
                container.unmake().await?;
                continue;
            }
            match container.made.wait().await.clone() {
                Ok(()) => return Ok(Some(container.id)),
                // What an earlier daemon had begun is undone, and the name is free again.
                Err(error) if error.kind() == Kind::Unavailable => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn named_container(&self, spec: &ContainerSpec) -> Result<Option<Rc<Container>>, Error> {
        let holder = self.names.borrow().get(&spec.name).copied();
        let Some(holder) = holder.and_then(|id| self.container(id)) else { return Ok(None) };
        let is_same = holder.record().spec == *spec;
        let is_retry = match holder.record().state {
            state::Container::Creating => is_same || has_failed(&holder),
            state::Container::Created { is_told, .. } => is_same && !is_told,
            _ => false,
        };
        if is_retry {
            return Ok(Some(holder));
        }
        let what = if is_same { "" } else { " with another configuration" };
        let text = format!("container {}: the name is held by {:.13}{what}", spec.name, holder.id);
        Err(Error::new(Kind::AlreadyExists, text))
    }

    fn reserve_container(
        self: &Rc<Self>,
        spec: ContainerSpec,
        (edits, on_host): (&ContainerEdits, OnHost),
    ) -> Result<Rc<Container>, Error> {
        self.require_ready()?;
        self.require_container_names().map_err(|error| error.context(format!("container {}", spec.name)))?;
        let name = spec.name.clone();
        let id = ContainerId::from_bytes(coracle_sandbox::random_id()?);
        let resolved = self
            .resolve(id, spec, (edits, on_host))
            .map_err(|error| error.context(format!("container {name}")))?;
        let container = Container::new(Rc::clone(self), resolved.record.clone());
        self.node().images.retain(id, container.record().layer_names())?;
        self.names.borrow_mut().insert(name, id);
        self.engine().pods().inspect(|pods| pods.enter_container(&container));
        let made = Rc::clone(&container);
        self.engine().operations.detach(async move {
            let _operation = made.operation.lock().await;
            let mut result = made.make_under_guard(resolved).await;
            if let Err(error) = result {
                let title = made.title();
                log::warn!("container not created"; pod = made.pod.id, ctr = made.id, name = made.pod.name(), container = made.name(), image = made.image(), error = error);
                if let Err(error) = made.unmake().await {
                    log::error!("cannot undo the creation of a container, will retry at the next request for its name"; ctr = made.id, error = error);
                }
                result = Err(error.context(title).logged());
            } else {
                log::info!("container created"; pod = made.pod.id, ctr = made.id, name = made.pod.name(), container = made.name(), image = made.image());
            }
            let _ = made.made.try_set(result);
        });
        Ok(container)
    }

    fn require_ready(&self) -> Result<(), Error> {
        let record = self.record();
        match record.state.is_ready() {
            true => Ok(()),
            false => Err(Error::new(
                Kind::FailedPrecondition,
                format!("pod sandbox {:.13} is {}", self.id, record.state.name()),
            )),
        }
    }

    /// Kills all containers of a pod concurrently, without a grace period. Containers without an exit record
    /// of their monitor are Lost.
    pub(crate) async fn end_containers(&self) -> Result<(), Error> {
        let containers = self.containers();
        let is_watched = self.connection.link.borrow().is_some();
        let mut waits = Vec::new();
        for container in &containers {
            // A running start is also killed and awaited: otherwise a container would be listed as running
            // without a monitor.
            if container.is_started() && is_watched {
                container.begin_stop(Duration::ZERO, false);
                waits.push(container);
            }
        }
        // All together: a monitor that does not respond reports none of them.
        let end = time::now() + KILL_LIMIT;
        for container in waits {
            let left = end.saturating_duration_since(time::now());
            let _ = reactor::deadline(left, container.ended()).await;
        }
        let mut outcome = Ok(());
        // A monitor that ended by itself may have lost a process that was moved out of its cgroup, also of an exited container.
        let is_over = |container: &Rc<Container>| container.record().state.is_over();
        let may_have_lost = self.record().state.ended_by_itself() || !containers.iter().all(is_over);
        if may_have_lost && matches!(self.monitor_pid(), Ok(0) | Err(_)) {
            outcome = strays::end(self.id, || Ok(0), |_| true).await;
        }
        // Otherwise a process that was not found or killed may be of any of them.
        let may_have_ended = outcome.is_ok();
        let kill = |container: Rc<Container>| {
            let killed = Rc::clone(&container);
            (container, reactor::spawn(async move { killed.end_processes().await }))
        };
        let kills: Vec<_> = containers.into_iter().map(kill).collect();
        let mut ended = Vec::new();
        for (container, kill) in kills {
            match kill.await {
                Ok(()) => ended.extend(may_have_ended.then_some(container)),
                Err(error) => outcome = outcome.and(Err(error.context(container.title()))),
            }
        }
        // From the end of the last process on, so that the monitor has this time for each container.
        let report_end = time::now() + REPORT_LIMIT;
        for container in ended {
            outcome = outcome.and(container.end_with_pod(is_watched, report_end).await);
        }
        outcome.and(self.end_unlisted().await)
    }

    /// Handles an exit that the monitor reports. Called by the link's reader, so it must not wait.
    pub(crate) fn container_exited(&self, exit: &ExitRecord) {
        let Some(container) = self.container(exit.container) else { return };
        if container.record().state.is_over() {
            return; // told again after a reconnect
        }
        if let Err(error) = container.run_first() {
            log::error!("cannot commit the start of a container"; ctr = container.id, error = error);
        }
        let how = How::Exit { exit: exit.exit, oom_killed: exit.oom_killed };
        stop::log_exit(&container, exit);
        if exit.oom_killed {
            coracle_base::counters::oom_kill();
        }
        self.node().kernel.clock.saw(exit.finished_at_ns);
        container.end(exit.finished_at_ns, how);
        container.end_remaining();
    }

    /// Whether a container of the pod is running or is being started.
    pub(crate) fn runs_any(&self) -> bool {
        self.containers().iter().any(|container| container.is_started())
    }
}

impl Container {
    /// Calls NRI plugins, which may change the container, then creates and lists it. One event guard covers
    /// all of this, so that no plugin sees the container in between.
    async fn make_under_guard(self: &Rc<Self>, mut resolved: Resolved) -> Result<(), Error> {
        let pod = &self.pod;
        let turn = self.engine().hooks.begin(pod).await;
        let is_offered = self.engine().hooks.wants(Hook::CreateContainer);
        if is_offered {
            turn.create(pod, &mut resolved).await?;
        }
        // An undo uses the record, for example for the cgroup, so it must describe the created objects.
        *self.record.borrow_mut() = resolved.record.clone();
        let taken = pod.take_net_devices(std::mem::take(&mut resolved.net_devices)).await;
        let taken = match taken {
            Ok(()) => self.node().relabel(&resolved).await,
            refused => refused,
        };
        // The pod may have been stopped while plugins were called.
        let made = taken.and_then(|()| pod.require_ready()).and_then(|()| self.make_objects(resolved));
        if let Err(error) = made {
            if is_offered {
                turn.undo_create(pod).await;
            }
            return Err(error);
        }
        turn.created(self).await;
        Ok(())
    }

    /// Creates the objects of a container. The state Creating is on disk before the cgroup is created, and
    /// the state Created after all objects: if the daemon is killed in between, the next daemon undoes the
    /// creation. A directory without a record is garbage.
    fn make_objects(&self, resolved: Resolved) -> Result<(), Error> {
        let node = self.node();
        let Resolved { record, devices, confinement, mut plan, joins, .. } = resolved;
        let directory = node.paths.container(self.pod.id, self.id);
        let has_image_volumes = !self.record().image_volumes.is_empty();
        crate::filesystem::make_directory(&directory.join("work"))?;
        // These directories become root directories, which users of the container must be able to enter.
        for name in ["upper"].into_iter().chain(has_image_volumes.then_some("empty")) {
            crate::filesystem::make_public_directory(&directory.join(name))?;
        }
        if let Some(mappings) = self.pod.record().spec.user_mappings() {
            // The owner of the root directory is that of the upper directory.
            crate::files::give(&directory.join("upper"), &mappings)?;
        }
        self.record().note(&node.paths)?;
        let cgroup = self.cgroup()?;
        node.cgroups.make(&cgroup)?;
        for warning in node.cgroups.apply_to_new(&cgroup, &record.limits(), &devices, &plan.devices)? {
            self.engine().warn_once(warning);
        }
        plan.cgroup_joins = node.cgroups.join_files(&cgroup);
        plan.cgroup_joins.extend(joins);
        self.keep_confinement(&confinement)?;
        let main = record.plan(record.process.clone(), confinement, record.spec.tty);
        plan::check(&plan, &main)?;
        self.keep_plan(&plan)?;
        self.change(ContainerEvent::Made)
    }

    /// Kills the remaining processes of an exited container in the background: without a PID namespace of the
    /// container, child processes outlive the main process.
    pub(crate) fn end_remaining(self: &Rc<Self>) {
        let container = Rc::clone(self);
        reactor::spawn(async move { container.end_or_retry().await }).detach();
    }

    /// Kills the remaining processes of a container; if that fails, it is retried in the background.
    pub(crate) async fn end_or_retry(&self) {
        if let Err(error) = self.end_processes().await {
            log::error!("cannot end the remaining processes of a container, will retry"; ctr = self.id, error = error);
            self.pod.keep_trying(Unknown::unended(self.pod.id, error));
        }
    }

    /// Records the end of a container, whatever its cause: commits the state, publishes it, and wakes the
    /// waiting callers.
    pub(crate) fn end(self: &Rc<Self>, at_ns: i64, how: How) {
        self.process.pid.set(0);
        let _ = disk::remove_file(&self.stopping_path());
        if let Err(error) = self.change(ContainerEvent::Ended { at_ns, how }) {
            // The monitor keeps its exit record, which the next daemon reads.
            log::error!("cannot commit the exit of a container"; ctr = self.id, error = error);
        }
        self.queue_stop_event();
    }

    /// Notifies NRI plugins of the container's end, after the earlier events of its pod.
    fn queue_stop_event(self: &Rc<Self>) {
        if !self.engine().hooks.wants(Hook::StopContainer) {
            return self.update_end(|clean_up| clean_up.is_announced = true);
        }
        let container = Rc::clone(self);
        reactor::spawn(async move {
            let turn = container.engine().hooks.begin(&container.pod).await;
            turn.stop(&container).await;
            container.update_end(|clean_up| clean_up.is_announced = true);
        })
        .detach();
    }

    /// Kills the remaining processes of the container and removes its cgroup, because the kubelet cannot remove
    /// the pod's cgroup otherwise.
    pub(crate) async fn end_processes(&self) -> Result<(), Error> {
        let state = self.record().state.clone();
        let is_over = state.is_over();
        // The cgroup of a removed container may be that of another one.
        if is_over && state.clean_up().is_none_or(|clean_up| clean_up.is_cleared) {
            return Ok(());
        }
        let cgroup = self.cgroup()?;
        if is_over && self.has_successor(&cgroup) {
            return self.end_beside_successor().await;
        }
        // The process of a start that failed may live: a monitor that ends does not take it along.
        let is_not_started = self.record().state.is_not_started();
        // The others of a PID namespace end with its first process. Without a monitor all running containers are looked for at once.
        let may_have_strays = !(is_over && !is_not_started && self.has_own_pids()) && self.was_started();
        match may_have_strays && (is_not_started || self.pod.monitor_pid()? != 0) {
            true => self.pod.kill_container(self.id, &cgroup).await?,
            false => self.node().kill_cgroup(&cgroup).await?,
        }
        if is_over {
            self.update_end(|clean_up| clean_up.is_cleared = true);
        }
        Ok(())
    }

    /// Records the end of a container whose processes have been killed: as in its exit record, otherwise as
    /// Lost. `is_watched`: whether the daemon was connected to the monitor; determines the reason in Lost.
    async fn end_with_pod(self: &Rc<Self>, is_watched: bool, report_end: Instant) -> Result<(), Error> {
        // It fails soon if there is no monitor; the state is final only afterwards.
        let start = self.engine().operations.ended(Key::Start(self.id));
        reactor::deadline(KILL_LIMIT, start).await.map_err(|_| {
            Error::new(Kind::DeadlineExceeded, format!("{}: its start does not end", self.title()))
        })?;
        let directory = self.node().paths.pod_state(self.pod.id);
        let report_end = report_end.max(time::now() + REPORT_MIN);
        // A monitor that runs writes the record of a killed container within a moment, also if the daemon has no
        // connection to it. A monitor whose state cannot be read may run.
        let may_run = || !matches!(monitor::pid(&directory), Ok(None));
        let found = self.read_exit_record(report_end, may_run).await;
        // A container that is recorded as created and has an exit record was started: its start could not be recorded.
        let has_exited = matches!(found, Ok(Some(_))) && self.record().state.is_created();
        if self.record().state.is_running() || has_exited {
            let why = match is_watched {
                true => "the pod's monitor did not report its end",
                false => "the pod's monitor ended before it",
            };
            self.end_without_monitor(why, found);
        }
        Ok(())
    }

    /// Reads the exit record of a container whose state is Running. If it cannot be read, or does not exist
    /// while `is_awaited` returns true, reading is repeated until `end`.
    ///
    /// # Errors
    /// The last read error.
    pub(crate) async fn read_exit_record(
        &self,
        end: Instant,
        is_awaited: impl Fn() -> bool,
    ) -> Result<Option<ExitRecord>, coracle_sandbox::Error> {
        let directory = self.node().paths.pod_state(self.pod.id);
        loop {
            // A monitor may write the record and end after the record was read, so it is looked for first.
            let is_awaited = is_awaited();
            let found = exit_record(&directory, self.id);
            let is_over = match &found {
                Ok(Some(_)) => true,
                Ok(None) => !is_awaited,
                // The next daemon reads records again, too; an exit code that is recorded as unknown would stay so.
                Err(_) => false,
            };
            if is_over || !self.record().state.is_running() || time::now() >= end {
                return found;
            }
            reactor::sleep(REPORT_PAUSE).await;
        }
    }

    /// Records the end of a container without a monitor: as in its exit record if the monitor wrote one,
    /// otherwise as Lost.
    pub(crate) fn end_without_monitor(
        self: &Rc<Self>,
        why: &str,
        found: Result<Option<ExitRecord>, coracle_sandbox::Error>,
    ) {
        match found {
            Ok(Some(exit)) => self.pod.container_exited(&exit),
            Ok(None) => self.end(self.node().kernel.clock.now_ns(), How::Lost { message: why.to_owned() }),
            Err(error) => {
                let message = format!("{why}; its exit record: {error}");
                self.end(self.node().kernel.clock.now_ns(), How::Lost { message });
            }
        }
    }

    /// RemoveContainer: stops the container if it is running, then removes all its objects.
    ///
    /// # Errors
    /// Those of [`Container::stop`]; an object that could not be removed, in which case the caller may
    /// retry.
    pub async fn remove(self: &Rc<Self>) -> Result<(), Error> {
        let (container, key) = (Rc::clone(self), Key::RemoveContainer(self.id));
        let work = async move {
            container.stop(Duration::ZERO).await?;
            let _operation = container.operation.lock().await;
            let title = container.title();
            let turn = container.announce_removal().await;
            container.unmake().await.map_err(|error| error.context(format!("remove {title}")))?;
            drop(turn);
            log::info!("container removed"; pod = container.pod.id, ctr = container.id, name = container.pod.name(), container = container.name());
            container.engine().tell(ChangeKind::Deleted, &container.id, &container.name(), &container.pod);
            Ok(())
        };
        self.engine().operations.share(key, work).await
    }

    /// Notifies NRI plugins of the end of a container that never ran, and of the container's removal; each at
    /// most once.
    async fn announce_removal(self: &Rc<Self>) -> Box<dyn EventGuard> {
        let is_over = self.record().state.is_over();
        self.announced().await;
        let turn = self.engine().hooks.begin(&self.pod).await;
        // Plugins were already notified of the end of a container whose creation failed.
        if !self.is_visible() {
            return turn;
        }
        let notified = self.record().notified;
        if !is_over && !notified.stop {
            self.record.borrow_mut().notified.stop = true;
            turn.stop(self).await;
        }
        if !notified.remove {
            self.record.borrow_mut().notified = Notified { stop: true, remove: true };
            // Recorded before the event, so that plugins are never notified twice.
            if self.engine().hooks.wants(Hook::RemoveContainer)
                && let Err(error) = self.record().commit(self.node())
            {
                log::warn!("cannot record that NRI plugins were notified, the event may be repeated after a restart"; ctr = self.id, error = error);
            }
            turn.remove(self).await;
        }
        turn
    }

    pub(crate) async fn unmake(&self) -> Result<(), Error> {
        let pod = &self.pod;
        self.end_processes().await?;
        let paths = &self.node().paths;
        let name = self.id.to_string();
        // A pid is no sign of a start: none is known of a program that ended at once, or before this daemon began.
        if self.record().state.has_run() {
            self.run_hooks(Point::Stopped).await?;
        }
        if !self.record().adjusted.hooks.is_empty() {
            let bundle = paths.bundle(pod.id).join(&name);
            match disk::remove_dir_all(&bundle) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(failed("remove", &bundle, &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        // First what makes it a container to the next daemon: a record that ran ahead of its note would be taken at its word.
        garbage::discard(self.node(), &paths.container(pod.id, self.id))?;
        // Later than that: the monitor's exit record may be the only one, and a container that is still listed keeps its exit code.
        if let Ok(link) = pod.link() {
            let forgotten = link.ask(Request::Forget { container: self.id }, &[], ASK_LIMIT).await;
            match forgotten {
                Ok(_) | Err(LinkError::Gone) => {}
                Err(error) => return Err(Error::new(Kind::Internal, error.to_string())),
            }
        }
        forget_notes(paths, pod.id, self.id)?;
        self.node().images.release(&self.id);
        pod.names.borrow_mut().retain(|_, id| *id != self.id);
        self.engine().pods().inspect(|pods| pods.leave_container(self));
        self.change(ContainerEvent::Removed)
    }

    /// ReopenContainerLog: all lines after the answer are written to the new file.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container is not running or has no log; otherwise the error for the log's
    /// path.
    pub async fn reopen_log(&self) -> Result<(), Error> {
        if !self.record().state.is_running() {
            return Err(Error::new(Kind::FailedPrecondition, format!("{}: is not running", self.title())));
        }
        let Some(log) = self.open_log().await? else {
            return Err(Error::new(Kind::FailedPrecondition, format!("{}: has no log", self.title())));
        };
        let link = self.pod.link()?;
        let reopened = link.ask(Request::ReopenLog { container: self.id }, &[log.as_fd()], ASK_LIMIT).await;
        reopened.map(|_| ()).map_err(|error| Error::new(Kind::Unknown, error.to_string()))
    }

    /// Opens the log; `None` if the container has none.
    pub(crate) async fn open_log(&self) -> Result<Option<OwnedFd>, Error> {
        let path = PathBuf::from(&self.record().log_path);
        if path.as_os_str().is_empty() {
            return Ok(None);
        }
        let pod_directory = PathBuf::from(&self.pod.record().spec.log_directory);
        self.node().host.paths.open_log(&path, &pod_directory, &mut Mounts::default()).await.map(Some)
    }

    /// Changes the state of a container: commits the new state, then publishes it.
    pub(crate) fn change(&self, event: ContainerEvent) -> Result<(), Error> {
        #[cfg(feature = "testing")]
        let name = event.name();
        let next = self.record().state.on(event);
        let next = next.map_err(|refused| Error::new(Kind::FailedPrecondition, refused.to_string()))?;
        if next == self.record().state {
            return Ok(());
        }
        let mut record: ContainerRecord = self.record().clone();
        let (paths, ahead_ns) = (&self.node().paths, record.state.ahead_ns());
        record.state = next;
        let (kind, written) = match record.state {
            state::Container::Creating | state::Container::Created { .. } => {
                (Some(ChangeKind::Created), record.note(paths))
            }
            state::Container::Running { started_at_ns, .. } if ahead_ns == Some(started_at_ns) => {
                (Some(ChangeKind::Started), record.make_effective(paths))
            }
            state::Container::Running { .. } => (Some(ChangeKind::Started), record.commit(self.node())),
            state::Container::Exited { .. } => (Some(ChangeKind::Stopped), record.commit(self.node())),
            // Its files were removed, and clients are notified by the call.
            state::Container::Gone => (None, Ok(())),
        };
        // A start or an exit is published even if the disk is full: it is a fact, and the monitor keeps a record of it.
        if kind == Some(ChangeKind::Created) {
            written.clone()?;
        }
        #[cfg(feature = "testing")]
        state::transitions::note(&self.id, [self.record().state.name(), name, record.state.name()]);
        *self.record.borrow_mut() = record;
        if let Some(kind) = kind {
            self.engine().tell(kind, &self.id, &self.name(), &self.pod);
        }
        self.changed.notify(usize::MAX);
        written
    }
}

/// Whether the creation of the container has failed.
fn has_failed(container: &Container) -> bool {
    matches!(container.made.get(), Some(Err(_)))
}
