//! Recovery at the start of a daemon: all pods and containers of earlier daemons are found in their current
//! state. This module reads the records, asks the kernel and the monitors, and carries out the decisions of
//! `reconcile`. A decision that cannot be carried out is retried (`retries`).
//!
//! | found | rules |
//! |---|---|
//! | a monitor that responds | RST-1 to RST-6 |
//! | an interrupted creation of a pod or a container | RST-7 |
//! | a record that was read and fails verification | RST-9 |
//! | a directory, a monitor or a container without a record | RST-12 |
//! | a record of an earlier boot | BOOT-1 to BOOT-3: CNI DEL before any ADD |
//!
//! No request is served before recovery is complete (RST-10): a kubelet would start a pod that a list omits a
//! second time. All records are read first. A pod whose monitor does not answer, or whose processes do not end, does
//! not delay the others: after [`START_LIMIT`] the pod is listed from its records, and its recovery continues in
//! the background.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::store::{self, Damage};
use coracle_base::{log, reactor, time};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::collect::ordered;
use coracle_sandbox::{ContainerId, PodId, disk, monitor, netns};

use crate::filesystem::is_missing;
use crate::node::Node;
use crate::pod::strays;
use crate::pod::unlisted_containers::{self, ids};
use crate::reconcile::{
    self, Answer, Cgroup, ContainerDecision, Decision, Greeting, MonitorProcess, Recorded,
};
use crate::record::{self, ContainerRecord, PodRecord};
use crate::state;
use crate::unknown::Unknown;
use crate::{Container, Pod, Pods, garbage, paths};

/// Maximum time for which monitors that do not answer, and processes that do not end, delay the start, all
/// together. Working monitors answer within a few milliseconds.
const START_LIMIT: Duration = Duration::from_millis(500);

/// The way in which a directory without a usable record is removed.
type Removal = fn(&Pods, &Path, &Damage) -> Result<(), Error>;

/// The records of one pod.
enum Records {
    /// The pod has no usable record.
    UnusablePod(Damage),
    /// The record of the pod is usable.
    Pod {
        pod: Rc<Pod>,
        /// Containers without a usable record.
        unusable: Vec<(ContainerId, Damage)>,
        /// Set if the directory of the containers cannot be listed.
        unlisted: Option<Damage>,
    },
}

impl Pods {
    /// Recovers all pods and containers; called once, before the first call is served.
    ///
    /// # Errors
    /// Errors that prevent the daemon from serving. A pod or container that cannot be recovered is logged and
    /// does not affect others.
    pub async fn recover(self: &Rc<Self>) -> Result<(), Error> {
        let paths = &self.node().paths;
        for directory in [paths.pods(), paths.pods_state()] {
            crate::filesystem::make_private_directory(&directory)?;
        }
        store::close_quarantine(&paths.root)?;
        garbage::prepare(paths)?;
        garbage::sweep_all(self.node())?;
        record::adopt(self.node())?;
        let found = self.read_all_records()?;
        self.recover_all(found).await;
        self.node().images.sweep();
        self.release_networks();
        self.try_again_later();
        Ok(())
    }

    /// Reads the records of all pods, and lists those that are usable. A pod without a directory below the root
    /// directory may still have one below the state directory.
    fn read_all_records(&self) -> Result<Vec<(PodId, Records)>, Error> {
        let paths = &self.node().paths;
        let mut found: BTreeMap<PodId, Records> =
            ordered(ids(&paths.pods())?.into_iter().map(|id| (id, self.read_records(id, false))));
        for id in ids::<PodId>(&paths.pods_state())? {
            found.entry(id).or_insert(Records::UnusablePod(Damage::Absent));
        }
        Ok(found.into_iter().collect())
    }

    /// Recovers all pods at the same time. What takes longer than [`START_LIMIT`] continues in the background.
    async fn recover_all(self: &Rc<Self>, found: Vec<(PodId, Records)>) {
        let tasks: Vec<_> = found
            .into_iter()
            .map(|(id, records)| {
                let (pods, settled) = (Rc::clone(self), Rc::new(Cell::new(false)));
                let is_settled = Rc::clone(&settled);
                let task = reactor::spawn(async move { pods.recover_pod(id, Some(records), &settled).await });
                (id, is_settled, task)
            })
            .collect();
        let end = time::now() + START_LIMIT;
        for (id, is_settled, mut task) in tasks {
            let left = end.saturating_duration_since(time::now());
            if reactor::deadline(left, &mut task).await.is_err() {
                self.set_recovered(id, Some(self.unfinished(id, is_settled.get())));
                task.detach();
            }
        }
    }

    /// The entry of a pod whose recovery continues in the background. `is_settled`: whether the decisions about
    /// its records have been carried out.
    fn unfinished(&self, id: PodId, is_settled: bool) -> Unknown {
        let pod = self.table.pods.borrow().get(&id).cloned();
        if let Some(pod) = &pod {
            pod.look_at_processes();
        }
        let unknown = match is_settled {
            true => Unknown::unattached(id, "it has not answered yet"),
            // The layers of their containers are in use until they have ended.
            false => Unknown::unread(format!("pod sandbox {id:.13}: its recovery has not ended yet")),
        };
        // A retry for a pod in the table waits for the pod's lock.
        Unknown { is_in_progress: pod.is_none(), ..unknown }
    }

    /// Attempts again to determine the state of a pod that is not completely known. `is_removed`: a client removes it, so that
    /// records which cannot be read are set aside.
    pub(crate) async fn recover_again(self: &Rc<Self>, id: PodId, is_removed: bool) {
        self.update_unknown(id, |unknown| unknown.is_in_progress = true);
        let records = is_removed.then(|| self.read_records(id, true));
        self.recover_pod(id, records, &Cell::new(false)).await;
    }

    /// Carries out the decisions about the records of a pod and sets `is_settled`, then takes over the pod if its
    /// record was read. Records which part of its state is still unknown. `records`: those that the start has read;
    /// `None`: they are read here, while the pod's lock is held.
    async fn recover_pod(self: &Rc<Self>, id: PodId, records: Option<Records>, is_settled: &Cell<bool>) {
        let known = self.table.pods.borrow().get(&id).cloned();
        let _operation = match &known {
            Some(pod) => Some(pod.operation.lock().await),
            None => None,
        };
        let records = records.unwrap_or_else(|| self.read_records(id, false));
        let unread = self.settle(id, records).await;
        is_settled.set(true);
        match &unread {
            Some(_) => self.set_unknown(id, unread.clone()),
            // All records were read, so other containers must not run; but the pod is known only when the monitor
            // responds.
            None => self.update_unknown(id, |unknown| unknown.is_unread = false),
        }
        // `None`: it has no usable record, or was removed or quarantined meanwhile.
        let pod = self.table.pods.borrow().get(&id).cloned();
        let unknown = match pod {
            Some(pod) => pod.take_over().await.or(unread),
            None => unread,
        };
        // While the lock is held, so that no later result is overwritten.
        self.set_recovered(id, unknown);
        self.update_unknown(id, |unknown| unknown.is_in_progress = false);
    }

    /// Records which part of a pod's state is unknown. An existing entry about an unreadable record is kept.
    fn set_recovered(&self, id: PodId, unknown: Option<Unknown>) {
        let is_unread = self.unknown.borrow().get(&id).is_some_and(|unknown| unknown.is_unread);
        if !is_unread {
            self.set_unknown(id, unknown);
        }
    }

    fn update_unknown(&self, id: PodId, update: impl FnOnce(&mut Unknown)) {
        if let Some(unknown) = self.unknown.borrow_mut().get_mut(&id) {
            update(unknown);
        }
    }

    /// Attempts again to move records from spare files to their places. Pods that become known by it are recovered next.
    pub(crate) fn adopt_again(&self) {
        if self.node().host.records.unmoved().is_none() {
            return;
        }
        let found = record::adopt(self.node()).and_then(|()| ids::<PodId>(&self.node().paths.pods()));
        let found = found.unwrap_or_else(|error| {
            log::warn!("cannot look for records in spare files"; error = error);
            Default::default()
        });
        self.give_up_spare_files();
        for id in found {
            let is_known =
                self.table.pods.borrow().contains_key(&id) || self.unknown.borrow().contains_key(&id);
            if !is_known {
                let reason = format!("pod sandbox {id:.13}: its record was in a spare file");
                self.set_unknown(id, Some(Unknown::unread(reason)));
            }
        }
    }

    /// The damage, or an error that may pass if the missing record may be in a spare file.
    fn unless_unmoved(&self, damage: Damage) -> Damage {
        match (damage, self.node().host.records.unmoved()) {
            (Damage::Absent, Some(reason)) => Damage::Io(std::io::Error::other(reason)),
            (damage, _) => damage,
        }
    }

    /// Reads the records of a pod and of its containers, except those already in the table, and lists those that
    /// are usable. `is_removed`: a client removes the pod.
    fn read_records(&self, id: PodId, is_removed: bool) -> Records {
        let paths = &self.node().paths;
        let unless_lasting = |path: &Path, damage| self.unless_lasting(path, damage, is_removed);
        let known = self.table.pods.borrow().get(&id).cloned();
        let pod = match known {
            Some(pod) => pod,
            None => match PodRecord::load(paths, id) {
                Ok(record) => self.enlist_pod(record),
                Err(damage) => return Records::UnusablePod(unless_lasting(&paths.pod(id), damage)),
            },
        };
        self.unread.forget(&paths.pod(id));
        let directory = paths.containers(id);
        let (ids, unlisted) = match unlisted_containers::list::<ContainerId>(&directory) {
            Ok(ids) => (ids, None),
            Err(error) => (Vec::new(), Some(unless_lasting(&directory, Damage::Io(error)))),
        };
        if unlisted.is_none() {
            self.unread.forget(&directory);
        }
        let mut unusable = Vec::new();
        for container in ids {
            if self.table.containers.borrow().contains_key(&container) {
                continue;
            }
            let directory = paths.container(id, container);
            match ContainerRecord::load(paths, id, container) {
                Ok(record) => {
                    self.unread.forget(&directory);
                    self.enlist_container(&pod, record);
                }
                Err(damage) => unusable.push((container, unless_lasting(&directory, damage))),
            }
        }
        Records::Pod { pod, unusable, unlisted }
    }

    /// Carries out the decisions about records that are not usable; returns why they must be retried.
    async fn settle(self: &Rc<Self>, id: PodId, records: Records) -> Option<Unknown> {
        let (pod, unusable, unlisted) = match records {
            Records::UnusablePod(damage) => return self.without_pod_record(id, damage).await,
            Records::Pod { pod, unusable, unlisted } => (pod, unusable, unlisted),
        };
        let mut unknown = match unlisted {
            Some(damage) => self.without_list(&pod, &damage).await,
            None => None,
        };
        for (container, damage) in unusable {
            // The directory of a container that belongs to another pod.
            if self.table.containers.borrow().contains_key(&container) {
                continue;
            }
            if let Some(new) = self.without_container_record(&pod, container, damage).await {
                unknown = Some(new.after(unknown.as_ref()));
            }
        }
        unknown
    }

    /// Carries out the decision about a pod without a usable record; returns why it must be retried.
    async fn without_pod_record(self: &Rc<Self>, id: PodId, damage: Damage) -> Option<Unknown> {
        let damage = self.unless_unmoved(damage);
        let decision = reconcile::pod(MonitorProcess::NotAsked, Greeting::Silent, Recorded::from(&damage));
        let Some(remove) = Self::removal(decision) else {
            return Some(Unknown::unread_file(id, &self.node().paths.pod(id), &damage));
        };
        // Its files are evidence of its containers, and stay until these are ended.
        match self.end_orphan(id).await {
            Ok(()) => remove(self, &self.node().paths.pod(id), &damage).err().map(Unknown::unremoved),
            Err(error) => Some(Unknown::orphan(id, error)),
        }
    }

    fn enlist_pod(&self, record: PodRecord) -> Rc<Pod> {
        self.node().kernel.clock.saw(record.created_at_ns);
        let pod = Pod::new(Rc::clone(self.engine()), record);
        if pod.is_visible() {
            let _ = pod.made.try_set(Ok(()));
        }
        // A pod of the same name may have been created meanwhile.
        self.enter(&pod);
        pod
    }

    /// Carries out the decision about a container without a usable record; returns why it must be retried.
    async fn without_container_record(
        self: &Rc<Self>,
        pod: &Rc<Pod>,
        id: ContainerId,
        damage: Damage,
    ) -> Option<Unknown> {
        let damage = self.unless_unmoved(damage);
        let decision = reconcile::container(Cgroup::NotAsked, Answer::NotAsked, Recorded::from(&damage));
        let Some(remove) = Self::removal(decision) else {
            return Some(Unknown::unread_file(pod.id, &self.node().paths.container(pod.id, id), &damage));
        };
        // Its processes are ended before its files are removed.
        let cgroup = pod.record().cgroup(&id);
        if let Ok(cgroup) = cgroup
            && let Err(error) = pod.kill_container(id, &cgroup).await
        {
            return Some(Unknown::unended_unread(
                pod.id,
                format!("container {id:.13}, whose record is damaged: {error}"),
            ));
        }
        remove(self, &self.node().paths.container(pod.id, id), &damage).err().map(Unknown::unremoved)
    }

    /// Carries out the decision about a pod whose containers cannot be listed; returns why it must be retried.
    async fn without_list(self: &Rc<Self>, pod: &Rc<Pod>, damage: &Damage) -> Option<Unknown> {
        let directory = self.node().paths.containers(pod.id);
        let decision = reconcile::container(Cgroup::NotAsked, Answer::NotAsked, Recorded::from(damage));
        let Some(remove) = Self::removal(decision) else {
            return Some(Unknown::unread_file(pod.id, &directory, damage));
        };
        if let Err(error) = pod.end_unlisted().await {
            return Some(Unknown::unended_unread(pod.id, error));
        }
        if pod.containers().is_empty() {
            return remove(self, &directory, damage).err().map(Unknown::unremoved);
        }
        // Those that are listed have their files there.
        log::error!("containers of a pod that could not be listed were ended"; pod = pod.id, reason = damage);
        None
    }

    fn enlist_container(&self, pod: &Rc<Pod>, mut record: ContainerRecord) {
        let id = record.id;
        self.node().kernel.clock.saw(record.created_at_ns);
        if let Some(ended) = record.state.ended() {
            self.node().kernel.clock.saw(ended.finished_at_ns);
        }
        let started_ahead = record.started_ahead(&self.node().paths);
        if let state::Container::Created { ahead_ns, .. } = &mut record.state {
            *ahead_ns = started_ahead;
        }
        let container = Container::new(Rc::clone(pod), record);
        if let Err(error) = self.node().images.retain(id, container.record().layer_names()) {
            log::error!("cannot retain the layers of a container"; ctr = id, error = error);
        }
        pod.names.borrow_mut().entry(container.record().spec.name.clone()).or_insert(id);
        self.enter_container(&container);
        let record = Recorded::State(container.recorded());
        let decision = reconcile::container(Cgroup::NotAsked, Answer::NotAsked, record);
        match decision == Decision::Known(ContainerDecision::Undo) {
            true => container.undo(),
            false => drop(container.made.try_set(Ok(()))),
        }
    }

    /// The way in which a directory without a usable record is removed; `None` if it is left alone.
    fn removal<T>(decision: Decision<T>) -> Option<Removal> {
        match decision {
            Decision::EndAndDiscard => Some(Self::discard_directory),
            Decision::EndAndSetAside => Some(Self::set_aside),
            Decision::LeaveAlone | Decision::Known(_) => None,
        }
    }

    /// Removes a directory without a record.
    fn discard_directory(&self, directory: &Path, _: &Damage) -> Result<(), Error> {
        garbage::discard(self.node(), directory)
            .map_err(|error| error.context("a directory without a record"))
    }

    /// Moves a directory with a damaged record to quarantine.
    fn set_aside(&self, directory: &Path, damage: &Damage) -> Result<(), Error> {
        let reason = match damage {
            Damage::Damaged(reason) => reason.clone(),
            Damage::Absent | Damage::Io(_) => damage.to_string(),
        };
        let to = store::quarantine(&self.node().paths.root, directory, &reason)
            .map_err(|error| error.context(format!("a damaged record ({reason})")))?;
        log::error!("damaged record moved to quarantine"; path = to.display(), reason = reason);
        Ok(())
    }

    /// Ends the monitor and the containers of a pod without a record, wherever their cgroups are.
    ///
    /// # Errors
    /// An object that could not be removed; the call may be repeated. The pod's state directory is removed
    /// last.
    async fn end_orphan(&self, id: PodId) -> Result<(), Error> {
        let state = self.node().paths.pod_state(id);
        let monitor = || Ok(strays::unless_unreadable(monitor::pid(&state))?.unwrap_or(0));
        let pid = monitor()?;
        if pid != 0 {
            log::warn!("ending a monitor without a record"; pod = id, pid = pid);
        }
        let cgroups = self.cgroups_of_orphan(id, pid)?;
        // A container whose directory belongs to another pod is left alone.
        let is_own = |found: Option<ContainerId>| {
            found.is_none_or(|id| !self.table.containers.borrow().contains_key(&id))
        };
        let mut outcome = Ok(());
        if pid != 0 {
            outcome = strays::end(id, monitor, is_own).await;
        }
        for cgroup in cgroups {
            outcome = outcome.and(self.node().kill_cgroup(&cgroup).await);
        }
        outcome = outcome.and(strays::end_monitor(&state).await);
        // What the monitor left, or did not lead to.
        outcome = outcome.and(strays::end(id, || Ok(0), is_own).await);
        outcome = outcome.and(self.node().network.cni.forget(&id.to_string()).await);
        outcome.and(netns::unpin(&paths::netns(id)).map_err(Error::from))?;
        match disk::remove_dir_all(&state) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", &state, &error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The cgroups of the pod's containers, followed by the monitor's. They are found in the whole hierarchy
    /// by their names, which are IDs.
    fn cgroups_of_orphan(&self, id: PodId, monitor: i32) -> Result<Vec<CgroupPath>, Error> {
        let paths = &self.node().paths;
        // All processes below the monitor end by their PIDs, so no name of a cgroup needs to be believed.
        let mut traces = unlisted_containers::traces(paths, id, monitor, |_, _| false)?;
        // A container whose directory belongs to another pod is not included.
        traces.retain(|container, _| !self.table.containers.borrow().contains_key(container));
        let names: Vec<String> = traces.keys().map(ToString::to_string).chain([id.to_string()]).collect();
        let is_named = |name: &str| {
            let name = cgroup::id_of_scope(name).unwrap_or(name);
            names.iter().any(|wanted| wanted == name)
        };
        let mut cgroups: Vec<_> = traces.into_values().flatten().collect();
        let found = self.node().cgroups.find(is_named)?;
        let (own, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|cgroup| cgroup.as_str().contains(&id.to_string()));
        cgroups.extend(others);
        cgroups.extend(own);
        Ok(cgroups)
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
            .filter(|pod| pod.record().boot != self.node().kernel.boot)
            .cloned()
            .collect();
        reactor::spawn(async move {
            for pod in stale {
                let _operation = pod.operation.lock().await;
                pod.log_failed(pod.unmake_network().await);
            }
            pods.release_leases_without_pods().await;
            pods.node().network.cni.recovered();
        })
        .detach();
    }

    /// Releases the leases and rules of pods of which no directory exists any more. A build that could not read their records,
    /// or another program, may have removed them.
    async fn release_leases_without_pods(&self) {
        let Node { paths, network, host, .. } = self.node();
        if host.records.unmoved().is_some() {
            return;
        }
        let holders = network.cni.holders().unwrap_or_else(|error| {
            log::warn!("cannot look for leases without a pod"; error = error);
            BTreeSet::new()
        });
        for id in holders.iter().filter_map(|id| id.parse::<PodId>().ok()) {
            if is_missing(&paths.pod(id)) && is_missing(&paths.pod_state(id)) {
                log::warn!("releasing the network of a pod that does not exist"; pod = id);
                if let Err(error) = network.cni.forget(&id.to_string()).await {
                    log::warn!("cannot release the network of a pod that does not exist"; pod = id, error = error);
                }
            }
        }
    }
}

impl Container {
    /// Undoes an interrupted CreateContainer in the background; the container's name is reserved until then.
    /// If undoing fails, the next request with this name tries again, and so does the removal of the pod.
    fn undo(self: &Rc<Self>) {
        let container = Rc::clone(self);
        reactor::spawn(async move {
            let _operation = container.operation.lock().await;
            log::info!("undoing an incomplete container"; pod = container.pod.id, ctr = container.id);
            container.pod.log_failed(container.unmake().await);
            let text = "the runtime was restarted while creating it: try again";
            let _ = container.made.try_set(Err(Error::new(Kind::Unavailable, text)));
        })
        .detach();
    }
}
