//! A container's life: create, start, stop, remove, and what its exit sets off.
//!
//! Create resolves everything into one launch record, kept as a file; start hands that file to the monitor. Each runs
//! as a task of its own that the call only awaits. Objects and their way back:
//!
//! | made | by | undone by |
//! |---|---|---|
//! | record and writable layer, `ROOT/pods/POD/containers/CTR` | create | one rename into the garbage |
//! | cgroup | create | the exit, or remove |
//! | launch record, a file under `--state` | create | remove |
//! | process, log, streams | start, in the monitor | its exit; `Forget` at remove |

use std::cell::Cell;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_job::ContainerEdits;
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::{ContainerId, ExitRecord, Request, plan};
use event_listener::Event as Changed;

use crate::hooks::Point;
use crate::lifecycle::{Event as Hook, EventGuard};
use crate::link::LinkError;
use crate::notices::Happened;
use crate::operations::Key;
use crate::record::{ContainerRecord, Kept, Told};
use crate::spec::ContainerSpec;
use crate::state::{self, ContainerEvent, How};
use crate::table::{KILL_LIMIT, Stop};
use crate::{Container, Pod, Pods, garbage};
use coracle_base::error::failed;
use on_host::OnHost;

mod devices;
mod filter;
mod on_host;
mod resolve;
mod resolved;
mod start;
mod update;
mod volumes;

pub use filter::compile_filter;
pub use resolve::{OPEN_FILES_HARD, OPEN_FILES_SOFT};
pub use resolved::Resolved;

/// Longest wait for a request that the monitor answers at once.
const ASK_LIMIT: Duration = Duration::from_secs(10);

impl Pods {
    /// CreateContainer: makes it, or joins the identical request that is making it.
    ///
    /// # Errors
    /// `AlreadyExists` where another container has the name, `FailedPrecondition` where the pod sandbox is not ready,
    /// `InvalidArgument` for what the request or the image cannot be, else what went wrong on the way; nothing is left of it
    /// then.
    pub async fn create_container(
        self: &Rc<Self>,
        pod: Rc<Pod>,
        spec: ContainerSpec,
    ) -> Result<ContainerId, Error> {
        if let Some(container) = self.named_container(&pod, &spec)? {
            container.made.wait().await.clone()?;
            return Ok(container.id);
        }
        self.require_ready(&pod)?;
        // Before the name is taken: a wait in between would let a second request in.
        let edits = self.cdi_edits(spec.cdi_devices.clone()).await?;
        let title = || format!("container {}", spec.name);
        let on_host = self.look_at_host(&spec, &edits).await.map_err(|error| error.context(title()))?;
        let container = match self.named_container(&pod, &spec)? {
            Some(container) => container,
            None => self.reserve_container(&pod, spec, (&edits, on_host))?,
        };
        container.made.wait().await.clone()?;
        Ok(container.id)
    }

    fn named_container(&self, pod: &Rc<Pod>, spec: &ContainerSpec) -> Result<Option<Rc<Container>>, Error> {
        let holder =
            pod.names.borrow().get(&spec.name).and_then(|id| self.table.containers.borrow().get(id).cloned());
        let Some(holder) = holder else { return Ok(None) };
        let is_same = holder.record().spec == *spec;
        if is_same && !holder.is_known.get() && holder.record().state == state::Container::Created {
            return Ok(Some(holder));
        }
        let what = if is_same { "" } else { " with another configuration" };
        let text = format!("container {}: the name is held by {:.13}{what}", spec.name, holder.id);
        Err(Error::new(Kind::AlreadyExists, text))
    }

    fn reserve_container(
        self: &Rc<Self>,
        pod: &Rc<Pod>,
        spec: ContainerSpec,
        (edits, on_host): (&ContainerEdits, OnHost),
    ) -> Result<Rc<Container>, Error> {
        self.require_ready(pod)?;
        let name = spec.name.clone();
        let id = ContainerId::from_bytes(coracle_sandbox::random_id()?);
        let resolved = self
            .resolve(pod, id, spec, (edits, on_host))
            .map_err(|error| error.context(format!("container {name}")))?;
        let container = Container::new(Rc::clone(pod), resolved.record.clone());
        self.node.images.retain(id, container.record().layer_names())?;
        pod.names.borrow_mut().insert(name, id);
        self.table.containers.borrow_mut().insert(id, Rc::clone(&container));
        let (pods, made) = (Rc::clone(self), Rc::clone(&container));
        self.operations.detach(async move {
            let _operation = made.operation.lock().await;
            let mut result = pods.make_in_turn(&made, resolved).await;
            if let Err(error) = result {
                let title = made.title();
                log::warn!("container not created"; pod = made.pod.id, ctr = made.id, error = error);
                if let Err(error) = pods.unmake_container(&made).await {
                    log::error!("not undone, will be tried at the next start"; ctr = made.id, error = error);
                }
                result = Err(error.context(title));
            } else {
                log::info!("container created"; pod = made.pod.id, ctr = made.id);
            }
            let _ = made.made.try_set(result);
        });
        Ok(container)
    }

    /// Plugins change it, it is made, and it is in the lists, in one turn: nobody sees it in between.
    async fn make_in_turn(
        self: &Rc<Self>,
        container: &Rc<Container>,
        mut resolved: Resolved,
    ) -> Result<(), Error> {
        let pod = &container.pod;
        let turn = self.hooks.begin(self, pod).await;
        let is_offered = self.hooks.wants(Hook::CreateContainer);
        if is_offered {
            turn.create(pod, &mut resolved).await?;
        }
        // What an undo needs of it, its cgroup for one, must be what is being made.
        *container.record.borrow_mut() = resolved.record.clone();
        let taken = self.take_net_devices(pod, std::mem::take(&mut resolved.net_devices)).await;
        let taken = match taken {
            Ok(()) => self.relabel(&resolved).await,
            refused => refused,
        };
        // The pod may have been stopped while plugins were asked.
        let made = taken
            .and_then(|()| self.require_ready(pod))
            .and_then(|()| self.make_container(container, resolved));
        if let Err(error) = made {
            if is_offered {
                turn.undo_create(pod).await;
            }
            return Err(error);
        }
        container.list();
        self.tell(Happened::Created, &container.id, pod);
        turn.created(container).await;
        Ok(())
    }

    fn require_ready(&self, pod: &Rc<Pod>) -> Result<(), Error> {
        let record = pod.record();
        match record.state.is_ready() {
            true => Ok(()),
            false => Err(Error::new(
                Kind::FailedPrecondition,
                format!("pod sandbox {:.13} is {}", pod.id, record.state.name()),
            )),
        }
    }

    /// The record is the intent; it comes before the cgroup and the layer's directories.
    fn make_container(&self, container: &Rc<Container>, resolved: Resolved) -> Result<(), Error> {
        let node = &self.node;
        let Resolved { resources, plan: mut launch, joins, .. } = resolved;
        let directory = node.paths.container(container.pod.id, container.id);
        let has_image_volumes = !container.record().image_volumes.is_empty();
        crate::filesystem::make_directory(&directory.join("work"))?;
        // These are root directories of file systems that users of the container enter.
        for name in ["upper"].into_iter().chain(has_image_volumes.then_some("empty")) {
            crate::filesystem::make_public_directory(&directory.join(name))?;
        }
        if let Some(mappings) = container.pod.record().spec.user_mappings() {
            // The root directory's owner is that of the upper directory.
            crate::files::give(&directory.join("upper"), &mappings)?;
        }
        container.record().note(&node.paths)?;
        let cgroup = container.cgroup()?;
        node.cgroups.make(&cgroup)?;
        for warning in node.cgroups.apply(&cgroup, &resources)? {
            self.warn_once(warning);
        }
        launch.cgroup_joins = node.cgroups.join_files(&cgroup);
        launch.cgroup_joins.extend(joins);
        let path = node.paths.launch(container.pod.id).join(container.id.to_string());
        std::fs::write(&path, plan::container(&launch)?).map_err(|error| failed("write", &path, &error))
    }

    /// The monitor saw it exit. Called from the link's reader, so nothing here waits.
    pub(crate) fn container_exited(self: &Rc<Self>, exit: &ExitRecord) {
        let Some(container) = self.table.containers.borrow().get(&exit.container).cloned() else { return };
        if container.exited.is_initialized() {
            return; // told again after a reconnect
        }
        if let Err(error) = self.run_first(&container) {
            log::error!("start not seen"; ctr = container.id, error = error);
        }
        let how = How::Exit { exit: exit.exit, oom_killed: exit.oom_killed };
        log::info!("container exited"; pod = container.pod.id, ctr = container.id, code = exit.exit.code(),
            oom = exit.oom_killed, lost_lines = exit.lost_log_lines);
        self.node.kernel.clock.saw(exit.finished_at_ns);
        self.end(&container, exit.finished_at_ns, how);
        // Without a pid namespace of its own, what it forked outlives it: the container is over, so are they.
        let pods = Rc::clone(self);
        reactor::spawn(async move {
            if let Err(error) = pods.end_processes(&container).await {
                log::error!("processes outlive their container"; ctr = container.id, error = error);
            }
        })
        .detach();
    }

    /// Exited, from whatever cause: committed, then seen, then whoever waits is told.
    pub(crate) fn end(self: &Rc<Self>, container: &Rc<Container>, at_ns: i64, how: How) {
        container.pid.set(0);
        let _ = std::fs::remove_file(self.stopping_path(container));
        if let Err(error) = self.change_container(container, ContainerEvent::Ended { at_ns, how }) {
            // The exit record stays in the monitor's directory: the next daemon finds it again.
            log::error!("exit not committed"; ctr = container.id, error = error);
        }
        let _ = container.exited.try_set(());
        self.queue_stop_told(container);
    }

    /// Plugins hear of the end in the pod's order: after what they are hearing now.
    fn queue_stop_told(self: &Rc<Self>, container: &Rc<Container>) {
        if !self.hooks.wants(Hook::StopContainer) {
            let _ = container.stop_told.try_set(());
            return;
        }
        let (pods, container) = (Rc::clone(self), Rc::clone(container));
        reactor::spawn(async move {
            let turn = pods.hooks.begin(&pods, &container.pod).await;
            turn.stop(&container).await;
            let _ = container.stop_told.try_set(());
        })
        .detach();
    }

    /// Kills what is left in the container's cgroup and removes it: the kubelet cannot remove the pod's cgroup before.
    async fn end_processes(&self, container: &Rc<Container>) -> Result<(), Error> {
        if container.is_cleared.get() {
            return Ok(());
        }
        let is_over = container.exited.is_initialized();
        let cgroup = container.cgroup()?;
        self.node.cgroups.kill(&cgroup)?;
        self.clear_cgroup(&cgroup).await?;
        container.is_cleared.set(is_over);
        Ok(())
    }

    /// StopContainer: the signal, the grace, SIGKILL. Concurrent calls share one stop; the shortest grace wins.
    ///
    /// # Errors
    /// `DeadlineExceeded` where the kernel does not end its processes: the call may come again.
    pub async fn stop_container(
        self: &Rc<Self>,
        container: Rc<Container>,
        grace: Duration,
    ) -> Result<(), Error> {
        if !self.is_started(&container) {
            return Ok(());
        }
        let kill_at = self.begin_stop(&container, grace, true);
        let limit = kill_at.saturating_duration_since(Instant::now()) + KILL_LIMIT;
        let ended = reactor::deadline(limit, self.ended(&container)).await;
        ended.map_err(|_| {
            Error::new(Kind::DeadlineExceeded, format!("{}: does not end after SIGKILL", container.title()))
        })?;
        if container.exited.is_initialized() {
            // Each plugin has its own limit.
            container.stop_told.wait().await;
        }
        Ok(())
    }

    /// Whether there is something to stop: it runs, or its start is under way, which may end in a process that runs.
    fn is_started(&self, container: &Container) -> bool {
        container.record().state.is_running() || self.operations.is_under_way(Key::Start(container.id))
    }

    /// Waits until there is nothing to stop: the container has exited, or a start that was refused has left it as it was.
    async fn ended(&self, container: &Container) {
        let exited = async {
            container.exited.wait().await;
        };
        let refused = async {
            self.operations.ended(Key::Start(container.id)).await;
            if container.record().state.is_running() {
                container.exited.wait().await;
            }
        };
        smol::future::or(exited, refused).await;
    }

    /// Starts a stop or shortens the one under way; answers when SIGKILL is due. Without `with_signal` it takes up one
    /// whose signal an earlier daemon has sent.
    pub(crate) fn begin_stop(
        self: &Rc<Self>,
        container: &Rc<Container>,
        grace: Duration,
        with_signal: bool,
    ) -> Instant {
        let kill_at = Instant::now() + grace;
        let under_way = container.stop.borrow().clone();
        if let Some(stop) = under_way {
            if kill_at < stop.kill_at.get() {
                stop.kill_at.set(kill_at);
                self.write_stopping(container, grace);
                stop.sooner.notify(usize::MAX);
            }
            return stop.kill_at.get();
        }
        let stop = Rc::new(Stop { kill_at: Cell::new(kill_at), sooner: Changed::new() });
        *container.stop.borrow_mut() = Some(Rc::clone(&stop));
        self.write_stopping(container, grace);
        let (pods, container) = (Rc::clone(self), Rc::clone(container));
        reactor::spawn(async move {
            let signal = async {
                if with_signal && !grace.is_zero() {
                    pods.signal(&container).await;
                }
                smol::future::pending().await
            };
            smol::future::or(signal, pods.wait_and_kill(&container, &stop)).await;
        })
        .detach();
        kill_at
    }

    async fn signal(&self, container: &Rc<Container>) {
        // Before that there is no program that could handle it.
        self.operations.ended(Key::Start(container.id)).await;
        let signal = container.record().stop_signal;
        let Ok(link) = container.pod.link() else { return };
        // ESRCH: it ended by itself; anything else: SIGKILL follows.
        if let Err(error) =
            link.ask(Request::Signal { container: container.id, signal }, &[], ASK_LIMIT).await
        {
            log::debug!("stop signal not sent"; ctr = container.id, error = error);
        }
    }

    async fn wait_and_kill(&self, container: &Rc<Container>, stop: &Stop) {
        while self.is_started(container) {
            let sooner = stop.sooner.listen();
            let now = Instant::now();
            if now >= stop.kill_at.get() {
                break;
            }
            let end = smol::future::or(self.ended(container), async {
                sooner.await;
            });
            let _ = reactor::deadline(stop.kill_at.get() - now, end).await;
        }
        // Again and again: a fork may be ahead of the first SIGKILL.
        let end = Instant::now() + KILL_LIMIT;
        while self.is_started(container) && Instant::now() < end {
            match container.cgroup().and_then(|cgroup| Ok(self.node.cgroups.kill(&cgroup)?)) {
                Ok(()) => {}
                Err(error) => log::error!("kill"; ctr = container.id, error = error),
            }
            let _ = reactor::deadline(Duration::from_millis(100), self.ended(container)).await;
        }
        if !container.exited.is_initialized() && !self.is_started(container) {
            // It may still be started, and then nothing asks it to stop.
            let _ = std::fs::remove_file(self.stopping_path(container));
        }
        *container.stop.borrow_mut() = None; // the next call starts over where this one did not get through
    }

    /// Every container of a pod, at once and without grace; those a dead monitor left are Lost.
    pub(crate) async fn end_containers(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let containers = self.containers_of(pod.id);
        let is_watched = pod.link.borrow().is_some();
        let mut waits = Vec::new();
        for container in &containers {
            // A start under way is killed and waited for, too: else it would end in a container that is listed as running and
            // that nobody watches any more.
            if self.is_started(container) && is_watched {
                self.begin_stop(container, Duration::ZERO, false);
                waits.push(container);
            }
        }
        for container in waits {
            let ended = reactor::deadline(KILL_LIMIT, self.ended(container)).await;
            ended.map_err(|_| {
                Error::new(Kind::DeadlineExceeded, format!("{}: does not end", container.title()))
            })?;
        }
        for container in containers {
            self.end_processes(&container).await?;
            // Without a monitor it fails soon; only then is the state below the last one.
            let start = self.operations.ended(Key::Start(container.id));
            reactor::deadline(KILL_LIMIT, start).await.map_err(|_| {
                Error::new(Kind::DeadlineExceeded, format!("{}: its start does not end", container.title()))
            })?;
            if container.record().state.is_running() {
                self.end_without_monitor(&container, "the pod's monitor ended before it");
            }
        }
        self.end_unlisted(pod).await
    }

    /// A container that nobody watches: its exit record if the monitor left one, else Lost.
    pub(crate) fn end_without_monitor(self: &Rc<Self>, container: &Rc<Container>, why: &str) {
        match coracle_sandbox::exit_record(&self.node.paths.pod_state(container.pod.id), container.id) {
            Ok(Some(exit)) => self.container_exited(&exit),
            Ok(None) => {
                self.end(container, self.node.kernel.clock.now_ns(), How::Lost { message: why.to_owned() })
            }
            Err(error) => {
                let message = format!("{why}; its exit record: {error}");
                self.end(container, self.node.kernel.clock.now_ns(), How::Lost { message });
            }
        }
    }

    /// RemoveContainer: kills it where it runs, then takes everything away.
    ///
    /// # Errors
    /// As [`Pods::stop_container`]; else what could not be taken away: the call may come again.
    pub async fn remove_container(self: &Rc<Self>, container: Rc<Container>) -> Result<(), Error> {
        let (pods, key) = (Rc::clone(self), Key::RemoveContainer(container.id));
        let work = async move {
            pods.stop_container(Rc::clone(&container), Duration::ZERO).await?;
            let _operation = container.operation.lock().await;
            let title = container.title();
            let turn = pods.tell_removal(&container).await;
            pods.unmake_container(&container)
                .await
                .map_err(|error| error.context(format!("remove {title}")))?;
            drop(turn);
            log::info!("container removed"; pod = container.pod.id, ctr = container.id);
            pods.tell(Happened::Deleted, &container.id, &container.pod);
            Ok(())
        };
        self.operations.share(key, work).await
    }

    /// Plugins hear of the end of one that never ran, and of the removal; each once.
    async fn tell_removal(self: &Rc<Self>, container: &Rc<Container>) -> Box<dyn EventGuard> {
        let is_over = container.exited.is_initialized();
        if is_over {
            container.stop_told.wait().await;
        }
        let turn = self.hooks.begin(self, &container.pod).await;
        // One that failed to be created has been heard the end of.
        if !container.is_visible() {
            return turn;
        }
        let told = container.record().told;
        if !is_over && !told.stop {
            container.record.borrow_mut().told.stop = true;
            turn.stop(container).await;
        }
        if !told.remove {
            container.record.borrow_mut().told = Told { stop: true, remove: true };
            // Before the event, so that it is never told twice.
            if self.hooks.wants(Hook::RemoveContainer)
                && let Err(error) = container.record().commit(&self.node.paths)
            {
                log::warn!("an event could be told again after a restart"; ctr = container.id, error = error);
            }
            turn.remove(container).await;
        }
        turn
    }

    async fn unmake_container(self: &Rc<Self>, container: &Rc<Container>) -> Result<(), Error> {
        let pod = &container.pod;
        self.end_processes(container).await?;
        if let Ok(link) = pod.link() {
            let forgotten = link.ask(Request::Forget { container: container.id }, &[], ASK_LIMIT).await;
            match forgotten {
                Ok(_) | Err(LinkError::Gone) => {}
                Err(error) => return Err(Error::new(Kind::Internal, error.to_string())),
            }
        }
        let paths = &self.node.paths;
        let name = container.id.to_string();
        // A pid is no sign of a start: none is known of a program that ended at once, or before this daemon began.
        if container.is_visible() && container.record().state != state::Container::Created {
            self.run_hooks(container, Point::Stopped).await?;
        }
        if !container.record().adjusted.hooks.is_empty() {
            let bundle = paths.bundle(pod.id).join(&name);
            match std::fs::remove_dir_all(&bundle) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(failed("remove", &bundle, &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        let notes =
            [paths.records(pod.id), paths.launch(pod.id), paths.started(pod.id), paths.stopping(pod.id)];
        for directory in notes {
            let path = directory.join(&name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(failed("remove", &path, &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        garbage::discard(self, &paths.container(pod.id, container.id))?;
        self.node.images.release(&container.id);
        pod.names.borrow_mut().retain(|_, id| *id != container.id);
        self.table.containers.borrow_mut().remove(&container.id);
        Ok(())
    }

    /// ReopenContainerLog: from the answer on every line goes to the new file.
    ///
    /// # Errors
    /// `FailedPrecondition` where it does not run or has no log; else what is wrong with its log's path.
    pub async fn reopen_log(&self, container: Rc<Container>) -> Result<(), Error> {
        if !container.record().state.is_running() {
            return Err(Error::new(
                Kind::FailedPrecondition,
                format!("{}: is not running", container.title()),
            ));
        }
        let path = PathBuf::from(&container.record().log_path);
        if path.as_os_str().is_empty() {
            return Err(Error::new(Kind::FailedPrecondition, format!("{}: has no log", container.title())));
        }
        let log = self.node.host.paths.open_log(&path, &mut Mounts::default()).await?;
        let link = container.pod.link()?;
        let reopened =
            link.ask(Request::ReopenLog { container: container.id }, &[log.as_fd()], ASK_LIMIT).await;
        reopened.map(|_| ()).map_err(|error| Error::new(Kind::Unknown, error.to_string()))
    }

    /// Changes the state: committed first, then seen.
    pub(crate) fn change_container(
        &self,
        container: &Rc<Container>,
        event: ContainerEvent,
    ) -> Result<(), Error> {
        let next = container.record().state.on(event);
        let next = next.map_err(|refused| Error::new(Kind::FailedPrecondition, refused.to_string()))?;
        if next == container.record().state {
            return Ok(());
        }
        let mut record: ContainerRecord = container.record().clone();
        record.state = next;
        let committed = match record.state {
            state::Container::Running { started_at_ns } if container.ahead.get() == Some(started_at_ns) => {
                record.reach(&self.node.paths)
            }
            _ => record.commit(&self.node.paths),
        };
        // Seen even where the disk is full: the exit is a fact, and the monitor keeps its record of it.
        let happened = match &record.state {
            state::Container::Created => Happened::Created,
            state::Container::Running { .. } => Happened::Started,
            state::Container::Exited { .. } => Happened::Stopped,
        };
        *container.record.borrow_mut() = record;
        self.tell(happened, &container.id, &container.pod);
        committed
    }

    fn stopping_path(&self, container: &Rc<Container>) -> PathBuf {
        self.node.paths.stopping(container.pod.id).join(container.id.to_string())
    }

    /// For the next daemon: when the kill is due, in milliseconds of the boot's clock (RST-11).
    fn write_stopping(&self, container: &Rc<Container>, grace: Duration) {
        let due_ms = crate::recover::boot_time_ms()
            .saturating_add(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let path = self.stopping_path(container);
        if let Err(error) = std::fs::write(&path, due_ms.to_string()) {
            log::warn!("a stop would not survive a restart"; ctr = container.id, error = failed("write", &path, &error));
        }
    }
}
