//! The start of a daemon: every pod and container of earlier ones is found again, as it is.
//!
//! | found | done |
//! |---|---|
//! | record, same boot, monitor answers | taken over; exits in between are the monitor's records (RST-1 to RST-6) |
//! | record, same boot, monitor dead | NotReady; its containers ended: exit record, or Lost |
//! | record of an earlier boot | NotReady; containers Lost; CNI DEL before any ADD (BOOT-1 to BOOT-3) |
//! | intent only (Creating) | undone from the record (RST-7) |
//! | damaged record | set aside, its processes ended: it costs that one pod or container (RST-9) |
//! | directory or monitor without a record | ended and removed (RST-12) |
//!
//! Nothing is served before this is through (RST-10): a list that omits a pod makes a kubelet start it twice. One pod
//! that hangs delays only itself, by [`ATTACH_LIMIT`].

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::{ContainerId, PodId, Request, monitor, netns};

use super::record::{ContainerRecord, PodRecord, Told};
use super::state::{self, ContainerEvent, How, PodEvent};
use super::steps::failed;
use super::{Container, Pod, Pods, garbage, paths};
use crate::error::{Error, Kind};
use crate::store::{self, Damage};
use crate::{log, reactor};

/// Longest time one pod may delay the start.
const ATTACH_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for a monitor's answer about one container.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Milliseconds since boot, suspend included: a clock that outlives the daemon and never steps.
pub(super) fn boot_time_ms() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map(|now| Duration::from(now).as_millis()).ok().and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0)
}

impl Pods {
    /// Finds everything again; once, before the first call is served.
    pub(crate) async fn recover(self: &Rc<Self>) -> Result<(), Error> {
        let paths = &self.node.paths;
        for directory in [paths.pods(), paths.pods_state()] {
            super::steps::make_private_directory(&directory)?;
        }
        store::close_quarantine(&paths.root)?;
        garbage::prepare(paths)?;
        garbage::sweep_all(self)?;
        for id in ids::<PodId>(&paths.pods())? {
            self.load_pod(id).await;
        }
        self.node.images.sweep();
        let pods: Vec<_> = self.pods.borrow().values().cloned().collect();
        let tasks: Vec<_> = pods
            .into_iter()
            .map(|pod| {
                let pods = Rc::clone(self);
                reactor::spawn(async move { pods.take_over(&pod).await })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        for id in ids::<PodId>(&paths.pods_state())? {
            if !self.pods.borrow().contains_key(&id) {
                self.end_orphan(id, &[]).await;
            }
        }
        self.release_networks();
        Ok(())
    }

    async fn load_pod(self: &Rc<Self>, id: PodId) {
        let record = match PodRecord::load(&self.node.paths, id) {
            Ok(record) => record,
            Err(damage) => return self.set_pod_aside(id, damage).await,
        };
        self.node.clock.saw(record.created_at_ns);
        let pod = Pod::new(record);
        if pod.record().state != state::Pod::Creating {
            pod.made.set(Ok(()));
            pod.is_offered.set(true);
        }
        self.names.borrow_mut().insert(pod.record().spec.name.clone(), id);
        self.pods.borrow_mut().insert(id, Rc::clone(&pod));
        let containers = ids::<ContainerId>(&self.node.paths.containers(id)).unwrap_or_else(|error| {
            log::error!("containers of a pod cannot be listed"; pod = id, error = error);
            Vec::new()
        });
        for container in containers {
            self.load_container(&pod, container).await;
        }
    }

    async fn load_container(self: &Rc<Self>, pod: &Rc<Pod>, id: ContainerId) {
        match ContainerRecord::load(&self.node.paths, pod.id, id) {
            Ok(record) => {
                self.node.clock.saw(record.created_at_ns);
                if let state::Container::Exited(ended) = &record.state {
                    self.node.clock.saw(ended.finished_at_ns);
                }
                let container = Container::new(Rc::clone(pod), record);
                container.made.set(Ok(()));
                container.list();
                if container.record().state.is_over() {
                    container.exited.set(());
                    container.stop_told.set(());
                }
                if let Err(error) = self.node.images.retain(id, container.record().layer_names()) {
                    log::error!("layers of a container are not held"; ctr = id, error = error);
                }
                pod.names.borrow_mut().insert(container.record().spec.name.clone(), id);
                self.containers.borrow_mut().insert(id, container);
            }
            Err(damage) => {
                let directory = self.node.paths.container(pod.id, id);
                self.set_aside(&directory, damage);
                let cgroup = pod.record().cgroup(&id);
                if let Ok(cgroup) = cgroup {
                    self.clear_killed(&cgroup).await;
                }
            }
        }
    }

    /// A pod whose record cannot be read: nobody can say what it is, so it ends, and what is left of it is kept to look at.
    async fn set_pod_aside(self: &Rc<Self>, id: PodId, damage: Damage) {
        let containers = ids::<ContainerId>(&self.node.paths.containers(id)).unwrap_or_default();
        self.end_orphan(id, &containers).await;
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
            Damage::Io(error) => crate::error::plain(&error),
            Damage::Damaged(reason) => reason,
        };
        match store::quarantine(&self.node.paths.root, directory, &reason) {
            Ok(to) => log::error!("a damaged record is set aside"; path = to.display(), reason = reason),
            Err(error) => {
                log::error!("a damaged record stays"; path = directory.display(), reason = reason, error = error)
            }
        }
    }

    /// A monitor without a record: ended with its containers, as far as its own cgroup tells where they are.
    async fn end_orphan(self: &Rc<Self>, id: PodId, containers: &[ContainerId]) {
        let state = self.node.paths.pod_state(id);
        if let Ok(monitor) = monitor::connect(&state) {
            log::warn!("a monitor without a record is ended"; pod = id, pid = monitor.pid);
            let place = cgroup_parent_of(monitor.pid, id);
            let names = containers.iter().map(ToString::to_string).chain([id.to_string()]);
            for name in names {
                let place = place.as_ref();
                let cgroup =
                    place.and_then(|(parent, is_scope)| paths::cgroup(parent, *is_scope, &name).ok());
                if let Some(cgroup) = cgroup {
                    self.clear_killed(&cgroup).await;
                }
            }
        }
        if let Err(error) = netns::unpin(&paths::netns(id)) {
            log::warn!("a network namespace stays"; pod = id, error = error);
        }
        if let Err(error) = std::fs::remove_dir_all(&state)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            log::warn!("a state directory stays"; pod = id, error = failed("remove", &state, &error));
        }
    }

    async fn clear_killed(&self, cgroup: &CgroupPath) {
        let killed = self.node.cgroups.kill(cgroup).map_err(Error::from);
        if let Err(error) = killed.and(self.clear_cgroup(cgroup).await) {
            log::error!("a cgroup stays"; path = cgroup, error = error);
        }
    }

    async fn take_over(self: &Rc<Self>, pod: &Rc<Pod>) {
        let is_same_boot = pod.record().boot == self.node.boot;
        if !is_same_boot {
            return self.rebooted(pod);
        }
        if pod.record().state == state::Pod::Creating {
            return self.undo(pod);
        }
        match self.reattach(pod).await {
            Ok(()) => self.take_over_containers(pod).await,
            Err(error) => {
                if pod.record().state.is_ready() {
                    log::error!("the pod's monitor is gone"; pod = pod.id, error = error);
                }
                self.log_failed(pod, self.change(pod, PodEvent::MonitorGone));
                self.log_failed(pod, self.end_containers(pod).await);
            }
        }
    }

    async fn reattach(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let monitor = monitor::connect(&self.node.paths.pod_state(pod.id));
        let monitor = monitor.map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
        let attached = reactor::deadline(ATTACH_LIMIT, self.attach(pod, monitor)).await;
        let attached =
            attached.map_err(|_| Error::new(Kind::DeadlineExceeded, "the monitor does not answer"))?;
        attached.map_err(|error| Error::new(Kind::Internal, error.to_string()))
    }

    async fn take_over_containers(self: &Rc<Self>, pod: &Rc<Pod>) {
        for container in self.containers_of(pod.id) {
            if container.exited.get().is_some() {
                continue; // known, or just told by the monitor
            }
            let Ok(link) = pod.link() else { return };
            let runs = link
                .ask(Request::Signal { container: container.id, signal: 0 }, &[], ASK_LIMIT)
                .await
                .is_ok();
            let was_running = container.record().state.is_running();
            if runs {
                self.take_over_running(&container);
            } else if was_running && container.exited.get().is_none() {
                self.end_without_monitor(&container, "the monitor does not know it");
            }
        }
    }

    /// The record may be one step behind: killed between the monitor's answer and the commit.
    fn take_over_running(self: &Rc<Self>, container: &Rc<Container>) {
        let path = self.node.paths.started(container.pod.id).join(container.id.to_string());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let (at_ns, pid) = text.split_once(' ').unwrap_or_default();
        container.set_pid(pid.parse().unwrap_or(0));
        if !container.record().state.is_running() {
            let at_ns = at_ns.parse().unwrap_or_else(|_| self.node.clock.now_ns());
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
        pod.made.set(Ok(()));
        for container in self.containers_of(pod.id) {
            if container.exited.get().is_none() {
                let message = "the node was rebooted".to_owned();
                self.end(&container, self.node.clock.now_ns(), How::Lost { message });
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
            pod.made.set(Err(Error::new(
                Kind::Unavailable,
                "the runtime was restarted while making it: try again",
            )));
        })
        .detach();
    }

    /// Networks of pods of an earlier boot are released before the first ADD: their addresses are needed again.
    fn release_networks(self: &Rc<Self>) {
        let pods = Rc::clone(self);
        let stale: Vec<_> =
            self.pods.borrow().values().filter(|pod| pod.record().boot != self.node.boot).cloned().collect();
        reactor::spawn(async move {
            for pod in stale {
                let _operation = pod.operation.lock().await;
                pods.log_failed(&pod, pods.unmake_network(&pod).await);
            }
            pods.node.network.recovered();
        })
        .detach();
    }

    fn log_failed(&self, pod: &Rc<Pod>, result: Result<(), Error>) {
        if let Err(error) = result {
            log::error!("recovery of a pod is not complete"; pod = pod.id, error = error);
        }
    }
}

/// The ids that name the entries of a directory; other names are none of ours. A missing directory holds nothing.
fn ids<T: std::str::FromStr>(directory: &Path) -> Result<Vec<T>, Error> {
    match std::fs::read_dir(directory) {
        Ok(entries) => {
            Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed("list", directory, &error)),
    }
}

/// `PARENT` where a process is in the cgroup `PARENT/ID` of some hierarchy, and whether that is a scope.
fn cgroup_parent_of(pid: i32, id: PodId) -> Option<(String, bool)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let names = [(format!("/{id}"), false), (format!("/{}", cgroup::scope(&id)), true)];
    // HIERARCHY:CONTROLLERS:PATH
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(|path| {
        let found =
            |(name, is_scope): &(String, bool)| Some((path.strip_suffix(name)?.to_owned(), *is_scope));
        names.iter().find_map(found)
    })
}
