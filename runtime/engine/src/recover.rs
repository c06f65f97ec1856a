//! The start of a daemon: every pod and container of earlier ones is found again, as it is.
//!
//! | found | done |
//! |---|---|
//! | record, same boot, monitor answers | taken over; exits in between are the monitor's records (RST-1 to RST-6) |
//! | record, same boot, monitor dead | NotReady; its containers ended: exit record, or Lost |
//! | record of an earlier boot | NotReady; containers Lost; CNI DEL before any ADD (BOOT-1 to BOOT-3) |
//! | intent only (Creating) | undone from the record (RST-7) |
//! | a record that is read and does not verify | set aside, its processes ended: it costs that one pod or container (RST-9) |
//! | a record that cannot be read, a monitor that cannot be reached | left alone, tried again (`again`) |
//! | a container that runs without a record | ended (`unlisted`) |
//! | directory or monitor without a record | ended and removed (RST-12) |
//!
//! Nothing is served before this is through (RST-10): a list that omits a pod makes a kubelet start it twice. One pod
//! that hangs delays only itself, by [`ATTACH_LIMIT`].

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::store::{self, Damage};
use coracle_base::{log, reactor};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::monitor::ConnectError;
use coracle_sandbox::{ContainerId, PodId, Request, monitor, netns};

use crate::link::LinkError;
use crate::record::{ContainerRecord, PodRecord, Told};
use crate::state::{self, ContainerEvent, How, PodEvent};
use crate::unknown::Unknown;
use crate::unlisted::{self, ids};
use crate::{Container, Pod, Pods, again, garbage, paths};
use coracle_base::error::failed;

/// Longest time one pod may delay the start.
const ATTACH_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for a monitor's answer about one container.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Milliseconds since boot, suspend included: a clock that outlives the daemon and never steps.
pub(crate) fn boot_time_ms() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map(|now| Duration::from(now).as_millis()).ok().and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0)
}

impl Pods {
    /// Finds everything again; once, before the first call is served.
    ///
    /// # Errors
    /// What keeps the daemon from serving at all. A pod or container that cannot be found again is logged and costs no other.
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
            // What may be of a record that cannot be read now is left alone.
            if !self.table.pods.borrow().contains_key(&id) && !self.unknown.borrow().contains_key(&id) {
                self.end_orphan(id).await;
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
                let pods = Rc::clone(self);
                reactor::spawn(async move { (pod.id, pods.take_over(&pod).await) })
            })
            .collect();
        for task in tasks {
            let (id, unknown) = task.await;
            let is_unread = self.unknown.borrow().get(&id).is_some_and(|unknown| unknown.is_unread);
            if let (Some(unknown), false) = (unknown, is_unread) {
                self.set_unknown(id, Some(unknown));
            }
        }
    }

    /// Reads the records of a pod and of its containers, those that are not known yet; answers what could not be read for now.
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
                Err(damage) => {
                    self.set_pod_aside(id, damage).await;
                    return None;
                }
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
        if pod.record().state != state::Pod::Creating {
            let _ = pod.made.try_set(Ok(()));
            pod.is_offered.set(true);
        }
        // A pod of the same name may have been made meanwhile.
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
                // Ended before its files go.
                let cgroup = pod.record().cgroup(&id);
                if let Ok(cgroup) = cgroup {
                    self.clear_killed(&cgroup).await;
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
        let container = Container::new(Rc::clone(pod), record);
        let _ = container.made.try_set(Ok(()));
        container.list();
        if container.record().state.is_over() {
            let _ = container.exited.try_set(());
            let _ = container.stop_told.try_set(());
        }
        if let Err(error) = self.node.images.retain(id, container.record().layer_names()) {
            log::error!("layers of a container are not held"; ctr = id, error = error);
        }
        pod.names.borrow_mut().entry(container.record().spec.name.clone()).or_insert(id);
        self.table.containers.borrow_mut().insert(id, container);
    }

    /// A pod whose record does not verify: nobody can say what it is, so it ends, and what is left of it is kept to look at.
    async fn set_pod_aside(self: &Rc<Self>, id: PodId, damage: Damage) {
        self.end_orphan(id).await;
        self.set_aside(&self.node.paths.pod(id), damage);
    }

    /// Absent: the crash came before the intent was whole, so nothing was made. Anything else is kept and shown.
    fn set_aside(self: &Rc<Self>, directory: &Path, damage: Damage) {
        let reason = match damage {
            Damage::Absent => {
                if let Err(error) = garbage::discard(self, directory) {
                    log::warn!("a directory without a record stays"; path = directory.display(), error = error);
                }
                return;
            }
            Damage::Io(error) => coracle_base::error::plain(&error),
            Damage::Damaged(reason) => reason,
        };
        match store::quarantine(&self.node.paths.root, directory, &reason) {
            Ok(to) => log::error!("a damaged record is set aside"; path = to.display(), reason = reason),
            Err(error) => {
                log::error!("a damaged record stays"; path = directory.display(), reason = reason, error = error)
            }
        }
    }

    /// A pod without a record: its monitor and its containers are ended, wherever their cgroups are.
    async fn end_orphan(self: &Rc<Self>, id: PodId) {
        let state = self.node.paths.pod_state(id);
        let pid = monitor::connect(&state).map_or(0, |monitor| monitor.pid);
        if pid != 0 {
            log::warn!("a monitor without a record is ended"; pod = id, pid = pid);
        }
        match self.cgroups_of_orphan(id, pid) {
            Ok(cgroups) => {
                for cgroup in cgroups {
                    self.clear_killed(&cgroup).await;
                }
            }
            // Its state directory names what is left of it: the next start tries again.
            Err(error) => return log::error!("a pod without a record stays"; pod = id, error = error),
        }
        let forgotten = self.node.network.cni.forget(&id.to_string()).await;
        if let Err(error) = netns::unpin(&paths::netns(id)) {
            log::warn!("a network namespace stays"; pod = id, error = error);
        }
        // Its state directory, which is not removed, has the next start try again.
        if let Err(error) = forgotten {
            return log::error!("the network of a pod without a record stays"; pod = id, error = error);
        }
        if let Err(error) = std::fs::remove_dir_all(&state)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            log::warn!("a state directory stays"; pod = id, error = failed("remove", &state, &error));
        }
    }

    /// Those of its containers, then the monitor's: found by their names, which are ids, in the whole tree.
    fn cgroups_of_orphan(&self, id: PodId, monitor: i32) -> Result<Vec<CgroupPath>, Error> {
        let paths = &self.node.paths;
        let mut traces = unlisted::traces(paths, id, monitor)?;
        for container in ids::<ContainerId>(&paths.containers(id))? {
            traces.entry(container).or_insert(None);
        }
        // One whose directory another pod has is that pod's.
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

    async fn clear_killed(&self, cgroup: &CgroupPath) {
        let killed = self.node.cgroups.kill(cgroup).map_err(Error::from);
        if let Err(error) = killed.and(self.clear_cgroup(cgroup).await) {
            log::error!("a cgroup stays"; path = cgroup, error = error);
        }
    }

    /// Finds the monitor of a pod again and asks it what runs; answers what it did not tell for now.
    pub(crate) async fn take_over(self: &Rc<Self>, pod: &Rc<Pod>) -> Option<Unknown> {
        let is_same_boot = pod.record().boot == self.node.kernel.boot;
        if !is_same_boot {
            self.rebooted(pod);
            return None;
        }
        if pod.record().state == state::Pod::Creating {
            // One that this daemon makes is no business of recovery.
            if !pod.made.is_initialized() && pod.link.borrow().is_none() {
                self.undo(pod);
            }
            return None;
        }
        let is_attached = pod.link.borrow().is_some();
        let attached = if is_attached { Ok(()) } else { self.reattach(pod).await };
        match attached {
            Ok(()) => self.take_over_containers(pod).await,
            Err(Unattached::Later(error)) => {
                // An answer that comes too late is not waited for; nor is it taken for the monitor's end.
                pod.links.set(pod.links.get() + 1);
                if let Some(link) = pod.link.borrow_mut().take() {
                    link.abandon();
                }
                Some(Unknown::unattached(pod.id, error))
            }
            Err(Unattached::Gone(error)) => {
                if pod.record().state.is_ready() {
                    log::error!("the pod's monitor is gone"; pod = pod.id, error = error);
                }
                self.log_failed(pod, self.change(pod, PodEvent::MonitorGone));
                self.log_failed(pod, self.end_containers(pod).await);
                None
            }
        }
    }

    async fn reattach(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Unattached> {
        again::require_descriptors().map_err(Unattached::Later)?;
        let internal = |text: String| Error::new(Kind::Internal, text);
        let monitor = monitor::connect(&self.node.paths.pod_state(pod.id)).map_err(|error| match error {
            // The kernel says why not: a table of descriptors that is full, a disk that fails.
            ConnectError::Failed(coracle_sandbox::Error::Kernel { .. }) => {
                Unattached::Later(internal(error.to_string()))
            }
            ConnectError::NotThere | ConnectError::Failed(_) => Unattached::Gone(internal(error.to_string())),
        })?;
        match reactor::deadline(ATTACH_LIMIT, self.attach(pod, monitor)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error @ LinkError::Socket(_))) => Err(Unattached::Later(internal(error.to_string()))),
            // Its process lives: another connection may have replaced this one.
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
            if container.exited.is_initialized() || container.pid() != 0 {
                continue; // known, or just told by the monitor
            }
            let link = pod.link().ok()?;
            let asked = Request::Signal { container: container.id, signal: 0 };
            let was_running = container.record().state.is_running();
            match link.ask(asked, &[], ASK_LIMIT).await {
                Ok(_) => self.take_over_running(&container),
                // The end of the monitor is seen by the link.
                Err(LinkError::Gone) => return None,
                Err(error @ (LinkError::Silent { .. } | LinkError::Socket(_))) => {
                    return Some(Unknown::unattached(pod.id, error));
                }
                Err(LinkError::Failed(_)) if was_running && !container.exited.is_initialized() => {
                    self.end_without_monitor(&container, "the monitor does not know it");
                }
                Err(LinkError::Failed(_)) => {}
            }
        }
        // Those whose record cannot be read for now are left alone.
        let is_unread = self.unknown.borrow().get(&pod.id).is_some_and(|unknown| unknown.is_unread);
        if !is_unread {
            self.log_failed(pod, self.end_unlisted(pod).await);
        }
        None
    }

    /// The record may be one step behind: killed between the monitor's answer and the commit.
    fn take_over_running(self: &Rc<Self>, container: &Rc<Container>) {
        let path = self.node.paths.started(container.pod.id).join(container.id.to_string());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let (at_ns, pid) = text.split_once(' ').unwrap_or_default();
        container.set_pid(pid.parse().unwrap_or(0));
        if !container.record().state.is_running() {
            let at_ns = at_ns.parse().unwrap_or_else(|_| self.node.kernel.clock.now_ns());
            self.log_failed(
                &container.pod,
                self.change_container(container, ContainerEvent::Started { at_ns }),
            );
        }
        self.resume_stop(container);
    }

    /// A stop that the earlier daemon had begun kills when it would have (RST-11).
    fn resume_stop(self: &Rc<Self>, container: &Rc<Container>) {
        let path = self.node.paths.stopping(container.pod.id).join(container.id.to_string());
        let due_ms = std::fs::read_to_string(path).ok().and_then(|text| text.parse::<u64>().ok());
        if let Some(due_ms) = due_ms {
            let grace = Duration::from_millis(due_ms.saturating_sub(boot_time_ms()));
            self.begin_stop(container, grace, false);
        }
    }

    fn rebooted(self: &Rc<Self>, pod: &Rc<Pod>) {
        self.log_failed(pod, self.change(pod, PodEvent::Rebooted));
        let _ = pod.made.try_set(Ok(()));
        for container in self.containers_of(pod.id) {
            if !container.exited.is_initialized() {
                let message = "the node was rebooted".to_owned();
                self.end(&container, self.node.kernel.clock.now_ns(), How::Lost { message });
            }
        }
    }

    /// RunPodSandbox was cut off: undone in the background, its name held until it is.
    fn undo(self: &Rc<Self>, pod: &Rc<Pod>) {
        let (pods, pod) = (Rc::clone(self), Rc::clone(pod));
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            log::info!("a pod sandbox that was being made is undone"; pod = pod.id);
            let undone = match pods.down(&pod).await.into_iter().next() {
                None => pods.forget_pod(&pod),
                Some(error) => Err(error),
            };
            if undone.is_err() {
                // Listed from now on, so that Stop and Remove try again; no plugin knows of it.
                pod.record.borrow_mut().told = Told { stop: true, remove: true };
                pods.log_failed(&pod, pods.change(&pod, PodEvent::UpFailed));
            }
            pods.log_failed(&pod, undone);
            let _ = pod.made.try_set(Err(Error::new(
                Kind::Unavailable,
                "the runtime was restarted while making it: try again",
            )));
        })
        .detach();
    }

    /// Networks of pods of an earlier boot are released before the first ADD: their addresses are needed again.
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
            log::error!("recovery of a pod is not complete"; pod = pod.id, error = error);
        }
    }
}

/// Why a monitor is not found again.
enum Unattached {
    /// It has ended.
    Gone(Error),
    /// It may be there, and could not be reached for now.
    Later(Error),
}
