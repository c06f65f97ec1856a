//! The objects of a node on the machine: those that exist while pods run, and those that must not remain.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use super::Node;
use crate::host;

impl Node {
    /// Objects that must not exist after all pods were removed.
    pub fn rests(&self) -> Vec<String> {
        let name = format!("{}/", self.folder.display());
        let mut rests = Vec::new();
        let state = self.state.display().to_string();
        let is_state = |line: &str| line.split(' ').nth(4) == Some(&state);
        let mounts = host::mounts(&name).into_iter().filter(|line| !is_state(line));
        rests.extend(mounts.map(|line| format!("mount {line}")));
        let cgroups = host::cgroups_below(&self.pods_parent());
        rests.extend(
            cgroups.iter().filter(|path| is_pods(path)).map(|path| format!("cgroup {}", path.display())),
        );
        let links = host::links(&self.bridge());
        rests.extend(
            links.into_iter().filter(|link| *link != self.bridge()).map(|link| format!("link {link}")),
        );
        // A registry in this directory belongs to another value, which ends it.
        let processes = host::processes(&name)
            .into_iter()
            .filter(|process| {
                !["docker-registry ", "nginx "].iter().any(|own| process.command.starts_with(own))
            })
            .filter(|process| Some(process.pid as u32) != self.daemon.as_ref().map(Child::id));
        rests.extend(processes.map(|process| format!("process {} {}", process.pid, process.command)));
        rests.extend(self.namespaces().into_iter().map(|path| format!("namespace {}", path.display())));
        rests.extend(
            self.pod_processes().into_iter().map(|process| format!("{} {}", process.command, process.pid)),
        );
        rests.extend(self.leases().into_iter().map(|lease| format!("lease {lease}")));
        for (what, place) in [("record", self.root.join("pods")), ("state", self.state().join("pods"))] {
            let entries = fs::read_dir(place).into_iter().flatten().flatten();
            rests.extend(entries.map(|entry| format!("{what} {}", entry.path().display())));
        }
        rests
    }

    /// Paths of the network namespaces of this node's pods: their names are IDs that are in the daemon's log.
    pub fn namespaces(&self) -> Vec<PathBuf> {
        const PRINTED_DIGITS: usize = 13;
        let log = self.log();
        let Ok(entries) = fs::read_dir("/run/netns") else { return Vec::new() };
        let is_ours = |name: &str| {
            name.strip_prefix("coracle-")
                .and_then(|id| id.get(..PRINTED_DIGITS))
                .is_some_and(|id| log.contains(id))
        };
        entries
            .flatten()
            .filter(|entry| is_ours(&entry.file_name().to_string_lossy()))
            .map(|entry| entry.path())
            .collect()
    }

    /// Lease files of addresses on this node's bridge, of a configured or of the default network.
    pub fn leases(&self) -> Vec<String> {
        let folders = [self.folder.join("leases/boat"), self.root.join("networks/coracle")];
        let entries = folders.iter().flat_map(fs::read_dir).flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("10")).collect()
    }

    /// Running workers of this node's daemon.
    pub fn workers(&self) -> Vec<host::Process> {
        let Some(daemon) = &self.daemon else { return Vec::new() };
        let parent = u64::from(daemon.id());
        let mut workers = host::processes("coracle-worker");
        workers.retain(|process| host::proc_value(process.pid, "status", "PPid") == Some(parent));
        workers
    }

    /// PSS of all monitors of this node's pods in KiB.
    pub fn monitors_pss_kib(&self) -> u64 {
        self.monitors().iter().map(|monitor| host::pss_kib(monitor.pid)).sum()
    }

    /// Running monitors of this node's pods. A child that a monitor has forked, and that has not become its
    /// program yet, has the monitor's name: it is not among them.
    pub fn monitors(&self) -> Vec<host::Process> {
        let mut processes = self.pod_processes();
        processes.retain(|process| process.command.starts_with("coracle-pod"));
        let pids: Vec<i32> = processes.iter().map(|process| process.pid).collect();
        let is_child = |process: &host::Process| {
            let parent = host::proc_value(process.pid, "status", "PPid");
            parent.is_some_and(|parent| pids.iter().any(|pid| u64::try_from(*pid) == Ok(parent)))
        };
        processes.retain(|process| !is_child(process));
        processes
    }

    /// The cgroup with those of all pods: with the systemd driver a kubelet chooses slices of its own, so that all cgroups of the
    /// machine are searched, which is a guest.
    fn pods_parent(&self) -> String {
        if host::has_systemd_driver() { String::new() } else { self.cgroup_parent() }
    }

    /// Processes of coracle for pods while no start is in progress: monitors, and the first processes of
    /// shared PID namespaces.
    pub fn pod_processes(&self) -> Vec<host::Process> {
        let mut found = Vec::new();
        let parent = self.pods_parent();
        let parents = host::cgroup_roots().into_iter().map(|root| root.join(&parent));
        for folder in host::cgroups_below(&parent).into_iter().chain(parents) {
            let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in text.lines().filter_map(|line| line.parse::<i32>().ok()) {
                let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let process = host::Process { pid, command: command.trim().to_owned() };
                let is_ours = ["coracle-pod", "coracle-init"].contains(&process.command.as_str());
                if is_ours && !found.contains(&process) {
                    found.push(process);
                }
            }
        }
        found
    }
}

/// Whether a cgroup belongs to a pod or a container: its name is an ID, or a scope with an ID.
fn is_pods(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let id = name.trim_start_matches("coracle-").trim_end_matches(".scope");
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}
