//! The rules that hold whenever the simulated node is idle: no call is in progress, no error is injected,
//! every monitor answers.

use std::collections::BTreeMap;
use std::rc::Rc;

use coracle_engine::state::{Container as State, Ended, How, transitions};
use coracle_engine::{Container, Pod, Pods};
use coracle_sandbox::{ContainerId, PodId};

use crate::cgroups::INNER;
use crate::clients::{Call, Clients, Told, ToldContainer, ToldPod};
use crate::engine::PARENT;
use crate::world::{ROOT, Role, S, STATE, World};

/// The three views that the rules compare: the lists of the daemon, the node, and the answers that clients
/// received.
struct Check<'a> {
    world: &'a World,
    told: &'a Told,
    pods: BTreeMap<PodId, Rc<Pod>>,
    containers: BTreeMap<ContainerId, Rc<Container>>,
    broken: Vec<String>,
}

macro_rules! require {
    ($check:expr, $rule:expr, $($text:tt)*) => {
        if !$rule {
            $check.broken.push(format!($($text)*));
        }
    };
}

/// Checks all rules; returns a text for each rule that is violated.
pub(crate) fn check(clients: &Clients, pods: &Rc<Pods>) -> Vec<String> {
    let (world, told) = (clients.node.world.borrow(), clients.told.borrow());
    let mut check = Check {
        world: &world,
        told: &told,
        pods: pods.every_pod().into_iter().map(|pod| (pod.id, pod)).collect(),
        containers: pods.containers().into_iter().map(|container| (container.id, container)).collect(),
        broken: world.violation.iter().cloned().collect(),
    };
    if let Some((_, reason)) = pods.unknown() {
        check.broken.push(format!("the state of a pod stays unknown: {reason}"));
    }
    check.processes();
    check.states();
    check.names();
    check.owners();
    for pod in &told.pods {
        check.pod(pod);
    }
    for container in &told.containers {
        check.container(container);
    }
    check.broken
}

/// Checks that a node from which everything was removed is empty; returns a text for each remaining object.
pub(crate) fn check_empty(clients: &Clients, pods: &Rc<Pods>) -> Vec<String> {
    let world = clients.node.world.borrow();
    let mut left: Vec<String> = world.violation.iter().cloned().collect();
    let is_known = |(pid, _): &(&i32, _)| !world.is_out_of_reach(**pid);
    let processes = world.processes.iter().filter(is_known);
    left.extend(processes.map(|(pid, process)| format!("process {pid}: {process:?}")));
    let is_own = |path: &String| *path != PARENT && *path != "/kubepods" && !world.is_lost_parent(path);
    left.extend(
        world.cgroups.paths().into_iter().filter(|path| is_own(path)).map(|path| format!("cgroup {path}")),
    );
    left.extend(world.namespaces.iter().map(|path| format!("network namespace {path}")));
    let attached = world.attached.iter().filter(|(id, _)| !world.is_record_lost(id));
    left.extend(attached.map(|(id, attached)| format!("network of pod {id:.13}: {attached:?}")));
    for directory in [format!("{ROOT}/pods"), format!("{STATE}/pods"), format!("{ROOT}/garbage")] {
        let entries = world.disk.entries(&directory).unwrap_or_default();
        left.extend(entries.into_iter().map(|(name, _)| format!("{directory}/{}", name.display())));
    }
    left.extend(pods.every_pod().iter().map(|pod| format!("pod {:.13}", pod.id)));
    left.extend(pods.containers().iter().map(|container| format!("container {:.13}", container.id)));
    left.into_iter().map(|what| format!("left after everything was removed: {what}")).collect()
}

/// Checks that no removed pod or container is in memory; the caller must not have a reference to one. Each pod refers to the
/// engine, and each container to its pod; the table refers to the engine, too.
pub(crate) fn check_memory(pods: &Rc<Pods>) -> Option<String> {
    let count = Rc::strong_count(pods.engine()) - 1 - pods.every_pod().len();
    (count > 0).then(|| format!("{count} removed pods are in memory, or their containers"))
}

impl Check<'_> {
    fn main_process(&self, container: ContainerId) -> Option<i32> {
        let is_it = |process: &crate::world::Process| process.role == Role::Main(container);
        self.world.processes.iter().find(|(_, process)| is_it(process)).map(|(pid, _)| *pid)
    }

    /// Checks that every running process belongs to a listed container, and that every container listed as
    /// running has a process.
    fn processes(&mut self) {
        let has_errors = self.world.errors > 0;
        for (pid, process) in &self.world.processes {
            if self.world.is_out_of_reach(*pid) {
                continue;
            }
            match process.role {
                Role::Blocked => self.broken.push(format!("process {pid} waits for an ended daemon")),
                Role::Main(id) => match self.containers.get(&id) {
                    None => self.broken.push(format!("container {id:.13} runs and is not listed")),
                    Some(container) => {
                        let state = &container.record().state;
                        require!(
                            self,
                            state.is_running(),
                            "container {id:.13} runs and is listed as {state:?}"
                        );
                    }
                },
                Role::Child(id) => {
                    let is_running = |container: &Rc<Container>| container.record().state.is_running();
                    let is_listed = self.containers.get(&id).is_some_and(is_running);
                    require!(
                        self,
                        is_listed || has_errors,
                        "a child process of container {id:.13} outlives it"
                    );
                }
                Role::Monitor => self.monitor(*pid),
            }
        }
        for (id, container) in &self.containers {
            let main = self.main_process(*id);
            if container.record().state.is_running() {
                require!(self, main.is_some(), "container {id:.13} is listed as running and does not run");
                let is_right = main == Some(container.pid()) || container.pid() == 0 && has_errors;
                require!(self, is_right, "container {id:.13} has process {main:?}, not {}", container.pid());
            }
        }
        for (id, pod) in self.pods.iter().filter(|(_, pod)| pod.record().state.is_ready()) {
            require!(
                self,
                self.world.processes.contains_key(&pod.pid()),
                "pod {id:.13} is ready without a monitor"
            );
            let has_lost_state =
                self.world.monitors.get(&pod.pid()).is_some_and(|monitor| monitor.has_lost_state);
            require!(
                self,
                !has_lost_state,
                "pod {id:.13} is ready, and the next daemon will not find its monitor"
            );
        }
    }

    /// Checks that each state is the one to which an event has led.
    fn states(&mut self) {
        let pods = self.pods.values().map(|pod| (transitions::last(&pod.id), pod.record().state.name()));
        let containers = (self.containers.values())
            .map(|container| (transitions::last(&container.id), container.record().state.name()));
        for (last, now) in pods.chain(containers).collect::<Vec<_>>() {
            require!(self, last.is_none_or(|last| last == now), "{last:?} is {now} without an event");
        }
    }

    /// Checks that a monitor belongs to a listed pod that is ready, or was asked to stop.
    fn monitor(&mut self, pid: i32) {
        let directory = &self.world.monitors[&pid].directory;
        let Some(pod) = self.pods.values().find(|pod| directory.ends_with(&pod.id.to_string())) else {
            return self.broken.push(format!("the monitor of {directory} runs and is not listed"));
        };
        let (id, is_ready, has_link) = (pod.id, pod.record().state.is_ready(), pod.pid() == pid);
        let is_asked = |told: &&ToldPod| told.stop.was_made() || told.remove.was_made();
        let is_stopped = self.told.pods.iter().filter(is_asked).any(|told| told.id == Some(id));
        let may_run = is_ready || is_stopped || self.world.errors > 0;
        require!(self, may_run, "the monitor of pod {id:.13} runs, which is not ready");
        require!(self, !is_ready || has_link, "pod {id:.13} has no link to its monitor");
    }

    /// Checks that no two listed objects have the same name.
    fn names(&mut self) {
        let mut names = BTreeMap::new();
        for pod in self.pods.values().filter(|pod| pod.record().state.is_ready()) {
            *names.entry(pod.name()).or_insert(0) += 1;
        }
        for container in self.containers.values().filter(|container| !container.record().state.is_over()) {
            *names.entry(format!("{:.13}/{}", container.pod.id, container.name())).or_insert(0) += 1;
        }
        for (name, holders) in names {
            require!(self, holders == 1, "{holders} hold the name {name}");
        }
    }

    /// Checks that every object of the node belongs to a listed pod or container.
    fn owners(&mut self) {
        let is_pod = |part: &str| self.pods.keys().any(|id| id.to_string() == part);
        let is_pods = |part: &str| self.pods.keys().any(|id| format!("{id:.32}") == part);
        let is_container = |part: &str| {
            let is_listed = self.containers.keys().any(|id| id.to_string() == part);
            // A container whose creation could not be undone is not listed; its pod is.
            is_listed
                || self.world.errors > 0
                    && self.world.disk.containing(part).iter().any(|path| path.split('/').any(&is_pod))
        };
        let mut broken = Vec::new();
        for path in
            self.world.cgroups.paths().into_iter().filter(|path| *path != PARENT && *path != "/kubepods")
        {
            let name = path.rsplit('/').find(|part| *part != INNER).unwrap_or_default();
            let is_parent = self.pods.values().any(|pod| pod.record().cgroup_parent == *path);
            if !is_parent && !self.world.is_lost_parent(path) && !is_pod(name) && !is_container(name) {
                broken.push(format!("cgroup {path} has no owner"));
            }
        }
        for path in &self.world.namespaces {
            if !path.rsplit('-').next().is_some_and(&is_pods) {
                broken.push(format!("network namespace {path} has no owner"));
            }
        }
        for id in self.world.attached.keys().filter(|id| !is_pod(id) && !self.world.is_record_lost(id)) {
            broken.push(format!("the network of pod {id:.13} has no owner"));
        }
        for directory in [format!("{ROOT}/pods"), format!("{STATE}/pods")] {
            for (name, _) in self.world.disk.entries(&directory).unwrap_or_default() {
                let name = name.to_string_lossy().into_owned();
                // What has no record is removed at the next start, if it could not be removed now.
                let has_record = self.world.disk.has(&format!("{directory}/{name}/record"));
                if !is_pod(&name) && (has_record || self.world.errors == 0) {
                    broken.push(format!("{directory}/{name} has no owner"));
                }
            }
        }
        self.broken.extend(broken);
    }

    /// The files of a pod or container, without those in quarantine.
    fn files_of(&self, id: &str) -> Vec<String> {
        let mut files = self.world.disk.containing(id);
        files.retain(|path| !path.starts_with(&format!("{ROOT}/quarantine/")));
        files
    }

    /// Compares the answers that clients received about a pod with its state.
    fn pod(&mut self, told: &ToldPod) {
        let Some(id) = told.id else { return };
        let is_this_boot = told.boot == self.world.boot;
        let pod = self.pods.get(&id);
        let state = pod.map(|pod| pod.record().state.clone());
        let name = format!("pod {id:.13} (pod{})", told.name);
        let is_spoiled = self.world.spoiled.contains(&id.to_string());
        if told.run == Call::Done && !told.remove.was_made() && (pod.is_some() || !is_spoiled) {
            let is_listed = state.as_ref().is_some_and(|state| !state.is_creating());
            require!(self, is_listed, "{name} was made and is not listed");
            let is_killed = self.world.killed_monitors.contains(&format!("{STATE}/pods/{id}"));
            let stays_ready = is_this_boot && !told.stop.was_made() && !is_killed;
            let is_ready = state.as_ref().is_some_and(coracle_engine::state::Pod::is_ready);
            require!(self, is_ready || !stays_ready, "{name} was made and is {state:?}");
            require!(self, !is_ready || is_this_boot, "{name} is of an earlier boot and is ready");
        }
        // Addresses that a reboot has left are released before others are asked for.
        // Without a record it is not known what a plugin program has made.
        let is_record_lost = self.world.is_record_lost(&id.to_string());
        let has_network = self.world.attached.contains_key(&id.to_string()) && !is_record_lost;
        let is_released = is_this_boot || !has_network || self.world.errors > 0;
        require!(self, is_released, "{name} is of an earlier boot and has its network");
        let is_stopped = told.stop == Call::Done || told.remove == Call::Done;
        if is_stopped {
            let text = id.to_string();
            let is_ready = state.as_ref().is_some_and(coracle_engine::state::Pod::is_ready);
            require!(self, !is_ready, "{name} was stopped and is ready");
            let is_own = |path: &String| path.ends_with(&text);
            require!(
                self,
                !self.world.cgroups.paths().into_iter().any(is_own),
                "{name} was stopped and has its cgroup"
            );
            // Neither a file nor a cgroup leads to a monitor that was moved and whose files are lost.
            let is_known = |pid: &i32| !self.world.is_out_of_reach(*pid);
            let has_monitor = (self.world.monitors.iter())
                .any(|(pid, monitor)| is_own(&monitor.directory) && is_known(pid));
            require!(self, !has_monitor, "{name} was stopped and has its monitor");
            let netns = format!("{id:.32}");
            let has_netns = self.world.namespaces.iter().any(|path| path.ends_with(&netns));
            require!(self, !has_netns, "{name} was stopped and has its network namespace");
            require!(self, !has_network, "{name} was stopped and has its network");
        }
        if told.remove == Call::Done && is_this_boot {
            require!(self, state.is_none(), "{name} was removed and is {state:?}");
            let left = self.files_of(&id.to_string());
            require!(self, left.is_empty(), "{name} was removed and has {left:?}");
        }
    }

    /// Compares the answers that clients received about a container with its state.
    fn container(&mut self, told: &ToldContainer) {
        let Some(id) = told.id else { return };
        let pod = &self.told.pods[told.pod];
        let is_this_boot = told.boot == self.world.boot;
        let is_removed = told.remove.was_made() || pod.remove.was_made();
        let state = self.containers.get(&id).map(|container| container.record().state.clone());
        let facts = self.world.facts.get(&id).cloned().unwrap_or_default();
        let main = self.main_process(id);
        let name = format!("container {id:.13} (ctr{})", told.name);
        let directory = pod.id.map(|pod| format!("{STATE}/pods/{pod}")).unwrap_or_default();
        let has_lost_notes = self.world.removals.lost.contains(&directory);
        let is_spoiled = |id: String| self.world.spoiled.contains(&id);
        let is_lost = is_spoiled(id.to_string()) || pod.id.is_some_and(|pod| is_spoiled(pod.to_string()));
        let is_kept = is_this_boot && !has_lost_notes || told.start == Call::Done;
        if told.create == Call::Done && !is_removed && is_kept && !is_lost {
            require!(self, state.is_some(), "{name} was created and is not listed");
        }
        if told.start == Call::Done {
            require!(self, facts.clones == 1, "{name} was started and has {} processes", facts.clones);
            require!(
                self,
                !matches!(state, Some(State::Created { .. })),
                "{name} was started and is listed as created"
            );
            if let Some(State::Exited { ended, .. }) = &state
                && is_this_boot
                && let Some(reaped_ns) = facts.reaped_ns
                && !self.was_unreported(ended, facts.ended_ns, reaped_ns)
                && !(matches!(ended.how, How::Lost { .. }) && facts.has_lost_exit)
            {
                let code = facts.end.map(coracle_sandbox::Exit::code);
                require!(
                    self,
                    code == Some(ended.exit_code()),
                    "{name} exited with {code:?}, but is {ended:?}"
                );
            }
        }
        if told.start == Call::Failed {
            require!(self, main.is_none(), "{name} was not started and runs");
        }
        let is_stopped = told.stop == Call::Done || told.remove == Call::Done || pod.stop == Call::Done;
        if is_stopped {
            require!(self, main.is_none(), "{name} was stopped and runs");
        }
        let is_asked = told.was_stopped || is_removed || pod.stop.was_made();
        let is_ready =
            (pod.id.and_then(|pod| self.pods.get(&pod))).is_some_and(|pod| pod.record().state.is_ready());
        // After an error a start may be undone.
        let must_run = is_this_boot && is_ready && !is_lost && !has_lost_notes && self.world.errors == 0;
        if told.start == Call::Done && must_run {
            require!(self, is_asked || !facts.is_killed, "{name} was killed without a request");
        }
        if told.remove == Call::Done && is_this_boot {
            require!(self, state.is_none(), "{name} was removed and is {state:?}");
            let cgroup = id.to_string();
            let has_cgroup = self.world.cgroups.paths().iter().any(|path| path.ends_with(&cgroup));
            require!(self, !has_cgroup, "{name} was removed and has its cgroup");
            let mut left = self.files_of(&cgroup);
            // Without a monitor its exit record stays until the pod is removed.
            left.retain(|path| !path.contains("/exits/"));
            require!(self, left.is_empty(), "{name} was removed and has {left:?}");
        }
        if told.remove == Call::Done {
            let cgroup = id.to_string();
            let has_processes =
                self.world.processes.values().any(|process| self.world.is_in_cgroup_of(process, &cgroup));
            require!(self, !has_processes, "{name} was removed and has processes");
        }
    }

    /// Whether a container whose pod was stopped has an unknown exit code because its monitor did not work
    /// for at least a second. The exit code stays unknown, also if the monitor writes the exit record later.
    fn was_unreported(&self, ended: &Ended, ended_ns: u64, reaped_ns: u64) -> bool {
        let reaped_wall_ns = i64::try_from(self.world.wall_ns + reaped_ns).unwrap_or(i64::MAX);
        // After a clock was set back, an exit is recorded at the time of the start, which is not comparable.
        let is_comparable = ended.started_at_ns < reaped_wall_ns;
        matches!(ended.how, How::Lost { .. })
            && (ended.finished_at_ns < reaped_wall_ns || !is_comparable)
            && reaped_ns - ended_ns >= S
    }
}
