//! The cgroups of the simulated node, in one hierarchy, or in two as on a hybrid node, and processes that another program moves
//! between them.

use std::collections::{BTreeMap, BTreeSet};

use coracle_sandbox::cgroup::CgroupPath;
use coracle_sandbox::{ContainerId, Error, Exit, PodId};
use nix::errno::Errno;

use crate::world::{Process, Role, World, trace};

/// The name of a cgroup that another program makes below one of coracle's.
pub(crate) const INNER: &str = "inner";

/// A cgroup hierarchy of the simulated node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hierarchy {
    /// The hierarchy in which processes are listed and killed.
    Tracking,
    /// A hierarchy of v1, which a node with v2 alone does not have.
    Legacy,
}

/// The paths of all cgroups in each hierarchy that the node has.
#[derive(Clone, Debug)]
pub(crate) struct Cgroups(BTreeMap<Hierarchy, BTreeSet<String>>);

impl Cgroups {
    pub(crate) fn new(is_hybrid: bool) -> Self {
        let legacy = is_hybrid.then_some(Hierarchy::Legacy);
        Self([Hierarchy::Tracking].into_iter().chain(legacy).map(|one| (one, BTreeSet::new())).collect())
    }

    pub(crate) fn is_hybrid(&self) -> bool {
        self.0.len() > 1
    }

    /// The paths in all hierarchies, each once.
    pub(crate) fn paths(&self) -> BTreeSet<&String> {
        self.0.values().flatten().collect()
    }

    /// Whether a cgroup exists in a hierarchy.
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.values().any(|paths| paths.contains(path))
    }

    /// Whether a cgroup exists in all hierarchies.
    pub(crate) fn is_whole(&self, path: &str) -> bool {
        self.0.values().all(|paths| paths.contains(path))
    }

    pub(crate) fn clear(&mut self) {
        self.0.values_mut().for_each(BTreeSet::clear);
    }

    fn hierarchies(&self) -> Vec<Hierarchy> {
        self.0.keys().copied().collect()
    }
}

impl World {
    /// Whether a process is in the cgroup with this name, or below it, in a hierarchy.
    pub(crate) fn is_in_cgroup_of(&self, process: &Process, name: &str) -> bool {
        let is_inside = |hierarchy| process.cgroup(hierarchy).split('/').any(|part| part == name);
        self.cgroups.hierarchies().into_iter().any(is_inside)
    }

    fn paths_in(&mut self, hierarchy: Hierarchy) -> &mut BTreeSet<String> {
        self.cgroups.0.get_mut(&hierarchy).expect("the node has it")
    }

    pub(crate) fn make_cgroup(&mut self, path: &str) -> Result<(), Error> {
        let parts = path.match_indices('/').skip(1).map(|(end, _)| &path[..end]).chain([path]);
        for part in parts {
            for hierarchy in self.cgroups.hierarchies() {
                if !self.paths_in(hierarchy).contains(part) {
                    self.kernel_call("make cgroup", part, &[Errno::ENOMEM, Errno::EAGAIN])?;
                    self.paths_in(hierarchy).insert(part.to_owned());
                }
            }
        }
        Ok(())
    }

    /// Removes a cgroup in all hierarchies; the first error of one of them.
    pub(crate) fn remove_cgroup(&mut self, path: &str) -> Result<(), Error> {
        let mut outcome = Ok(());
        for hierarchy in self.cgroups.hierarchies() {
            outcome = outcome.and(self.remove_cgroup_in(hierarchy, path));
        }
        outcome
    }

    fn remove_cgroup_in(&mut self, hierarchy: Hierarchy, path: &str) -> Result<(), Error> {
        self.kernel_call("remove cgroup", path, &[Errno::ENOMEM, Errno::EINTR])?;
        if self.has_process_in(hierarchy, path) {
            trace!(self, "cgroup {path} is in use in {hierarchy:?}");
            return Err(Error::Kernel { op: "remove cgroup", target: path.to_owned(), errno: Errno::EBUSY });
        }
        self.paths_in(hierarchy).retain(|cgroup| !is_below(cgroup, path));
        Ok(())
    }

    /// Removes a cgroup in each hierarchy in which neither a process nor a cgroup is in it.
    pub(crate) fn remove_unused_cgroup(&mut self, path: &str) -> Result<(), Error> {
        for hierarchy in self.cgroups.hierarchies() {
            self.kernel_call("remove unused cgroup", path, &[Errno::ENOMEM, Errno::EINTR])?;
            let has_cgroup =
                self.paths_in(hierarchy).iter().any(|cgroup| cgroup != path && is_below(cgroup, path));
            if !has_cgroup && !self.has_process_in(hierarchy, path) {
                self.paths_in(hierarchy).remove(path);
            }
        }
        Ok(())
    }

    fn has_process_in(&self, hierarchy: Hierarchy, path: &str) -> bool {
        self.processes.values().any(|process| is_below(process.cgroup(hierarchy), path))
    }

    /// Ends all processes that are in a cgroup in the tracking hierarchy, with `in_all` those in another one if there is none.
    /// Returns whether there are no others to end.
    pub(crate) fn kill_below(&mut self, path: &str, in_all: bool) -> bool {
        let hierarchy = match in_all && !self.has_process_in(Hierarchy::Tracking, path) {
            true => Hierarchy::Legacy,
            false => Hierarchy::Tracking,
        };
        let hierarchies = self.cgroups.hierarchies();
        if !hierarchies.contains(&hierarchy) {
            return true;
        }
        let is_inside = |process: &Process| is_below(process.cgroup(hierarchy), path);
        let pids: Vec<i32> =
            self.processes.iter().filter(|(_, process)| is_inside(process)).map(|(pid, _)| *pid).collect();
        for pid in pids {
            self.note_kill(pid, path);
            self.kill(pid, Exit::Signal(9));
        }
        hierarchies.last() == Some(&hierarchy)
    }

    /// Notes that the kill of a cgroup ends a container in its own cgroup, or the monitor of another pod, which another program
    /// has moved into it: that pod need not stay ready.
    fn note_kill(&mut self, pid: i32, path: &str) {
        let process = &self.processes[&pid];
        if let Role::Main(id) = process.role
            && !process.is_dying
            && path.ends_with(&id.to_string())
        {
            self.facts.entry(id).or_default().is_killed = true;
        }
        let Some(monitor) = self.monitors.get(&pid) else { return };
        let is_own = monitor.directory.rsplit('/').next().is_some_and(|pod| path.ends_with(pod));
        if !is_own {
            trace!(self, "monitor {pid} is killed in cgroup {path}");
            let directory = self.monitors[&pid].directory.clone();
            self.killed_monitors.insert(directory);
        }
    }

    /// The cgroups in any hierarchy whose names are wanted.
    pub(crate) fn named_cgroups(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<CgroupPath>, Error> {
        let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let paths = self.cgroups.paths().into_iter();
        paths.filter(|path| is_wanted(&name(path))).map(|path| CgroupPath::parse(path)).collect()
    }

    /// Moves a process out of the cgroups of coracle in all hierarchies, as a privileged container or an administrator's tool can.
    pub(crate) fn move_away(&mut self, pid: i32) {
        for hierarchy in [Hierarchy::Tracking, Hierarchy::Legacy] {
            self.move_to(pid, hierarchy, "/");
        }
    }

    /// Moves a process to another cgroup of one hierarchy.
    pub(crate) fn move_to(&mut self, pid: i32, hierarchy: Hierarchy, path: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            path.clone_into(&mut process.cgroups[hierarchy as usize]);
            trace!(self, "process {pid} is moved to {path} in {hierarchy:?}");
        }
    }

    /// Moves a process at random: in one hierarchy or in both, out of coracle's cgroups, to that of another container or monitor,
    /// or to a new one below its own.
    pub(crate) fn move_at_random(&mut self, pid: i32) {
        // A monitor does not come back: a daemon may have given it up.
        let own = self.monitors.get(&pid).and_then(|monitor| monitor.directory.rsplit('/').next());
        let is_id = |path: &&String| {
            let name = path.rsplit('/').next().unwrap_or_default();
            (name.parse::<ContainerId>().is_ok() || name.parse::<PodId>().is_ok()) && own != Some(name)
        };
        let mut targets: Vec<String> = self.cgroups.paths().into_iter().filter(is_id).cloned().collect();
        targets.push("/".to_owned());
        targets.push("/".to_owned());
        let target = self.random.pick(&targets.iter().map(String::as_str).collect::<Vec<_>>()).to_owned();
        let is_nested = self.random.happens(200);
        let hierarchies = match (self.cgroups.is_hybrid(), self.random.below(3)) {
            (true, 0) => vec![Hierarchy::Tracking],
            (true, 1) => vec![Hierarchy::Legacy],
            _ => self.cgroups.hierarchies(),
        };
        for hierarchy in hierarchies {
            if is_nested {
                let own = self.processes[&pid].cgroup(hierarchy).to_owned();
                if self.paths_in(hierarchy).contains(&own) {
                    let inner = format!("{own}/{INNER}");
                    self.paths_in(hierarchy).insert(inner.clone());
                    self.move_to(pid, hierarchy, &inner);
                }
            } else if target == "/" || self.paths_in(hierarchy).contains(&target) {
                self.move_to(pid, hierarchy, &target);
            }
        }
    }
}

impl Process {
    /// The process's cgroup in a hierarchy.
    pub(crate) fn cgroup(&self, hierarchy: Hierarchy) -> &str {
        &self.cgroups[hierarchy as usize]
    }

    /// The text of /proc/PID/cgroup.
    pub(crate) fn cgroup_file(&self, is_hybrid: bool) -> String {
        let [tracking, legacy] = &self.cgroups;
        let legacy = if is_hybrid { format!("4:memory:{legacy}\n") } else { String::new() };
        format!("{legacy}0::{tracking}\n")
    }

    /// Whether a process runs a container's program.
    pub(crate) fn is_of_container(&self) -> bool {
        matches!(self.role, Role::Main(_) | Role::Child(_))
    }
}

/// The cgroups of a process that has entered one in all hierarchies.
pub(crate) fn entered(path: &str) -> [String; 2] {
    [path.to_owned(), path.to_owned()]
}

/// Whether a cgroup is `top` or below it.
fn is_below(cgroup: &str, top: &str) -> bool {
    cgroup.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
