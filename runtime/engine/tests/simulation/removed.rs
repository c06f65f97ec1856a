//! Directories of the daemon that another program removes while it runs, and the watches that report this.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::reactor;
use coracle_engine::Pods;
use coracle_sandbox::Error;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::engine::{container_spec, pod_spec};
use crate::monitor::Simulated;
use crate::moved::fixture;
use crate::named::{Fixture, start_one};
use crate::world::{CHANGE_IN_MEMORY, Happening, MS, ROOT, SCARCE, STATE, World, descriptor, trace};

/// A pipe: the first end becomes readable when the second one and all its copies are closed.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe2(OFlag::O_CLOEXEC).expect("a pipe")
}

/// Whether the other end of a pipe or a socket is open.
fn has_other_end(end: BorrowedFd<'_>) -> bool {
    // No event is asked for; POLLHUP is always reported.
    let mut polled = [PollFd::new(end, PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO).expect("poll") == 0
}

/// Whether a daemon is connected to a monitor.
fn has_daemon(monitor: &Simulated) -> bool {
    monitor.connection().is_some_and(|end| has_other_end(end.as_fd()))
}

/// Watches of removals, and what connects a monitor with the files that lead to it.
#[derive(Default)]
pub(crate) struct Removals {
    /// Each watched directory with a pipe, whose other end becomes readable when this one is closed.
    watches: Vec<(String, OwnedFd)>,
    /// For each monitor the end of a pipe whose other end stands for the listening socket that a daemon has made for it.
    listeners: BTreeMap<i32, OwnedFd>,
    /// Number of removals of each state directory of a pod; one that was made again is another directory.
    counts: BTreeMap<String, u64>,
    /// Parents of cgroups of pods, of which only notes say that a daemon has made them, and these are lost.
    parents: BTreeSet<String>,
    /// Number of errors when the daemon was started.
    errors_before: u64,
    /// Whether the daemon has recovered its pods.
    pub(crate) is_daemon_up: bool,
    /// State directories of pods that were removed in the life of this daemon.
    unwritten: BTreeSet<String>,
    /// State directories of pods whose notes are lost, because the daemon ended before it could write them again.
    pub(crate) lost: BTreeSet<String>,
}

impl World {
    /// Binds the socket of a monitor.
    pub(crate) fn listen(&mut self, directory: &str) -> Result<(), Error> {
        self.kernel_call("listen", directory, SCARCE)?;
        self.disk.write(&format!("{directory}/monitor.sock"), b"").map_err(|_| missing("listen", directory))
    }

    pub(crate) fn write_pid_file(&mut self, directory: &str, pid: i32) -> Result<(), Error> {
        let file = format!("{directory}/monitor.pid");
        self.kernel_call("write", &file, CHANGE_IN_MEMORY)?;
        self.disk.write(&file, pid.to_string().as_bytes()).map_err(|_| missing("write", &file))
    }

    /// Makes the files of a running monitor again; returns its new listening socket and directory.
    pub(crate) fn remake_monitor_files(&mut self, directory: &str, pid: i32) -> Result<[OwnedFd; 2], Error> {
        self.removals.listeners.remove(&pid);
        self.listen(directory)?;
        let (end, listener) = pipe();
        self.removals.listeners.insert(pid, end);
        self.write_pid_file(directory, pid)?;
        Ok([listener, descriptor(&self.state_number(directory).to_string())])
    }

    /// The number of a state directory of a pod, in place of its inode.
    pub(crate) fn state_number(&self, directory: &str) -> u64 {
        self.removals.counts.get(directory).copied().unwrap_or(0)
    }

    /// The records of pods and containers on the disk.
    fn records(&self) -> Vec<String> {
        let is_record = |path: &String| path.starts_with(ROOT) && path.ends_with("/record");
        self.disk.containing("/pods/").into_iter().filter(is_record).collect()
    }

    /// Whether a record of a pod or container cannot be read, also one that a power cut has left in a spare file.
    pub(crate) fn has_bad_record(&self) -> bool {
        let is_in_use = |path: &&String| !path.starts_with(&format!("{ROOT}/quarantine/"));
        self.disk.containing(ROOT).iter().filter(is_in_use).any(|path| self.disk.is_bad(path))
    }

    /// Whether the record of a pod cannot be read, or was set aside: what a plugin program has made for it is not released.
    pub(crate) fn is_record_lost(&self, id: &str) -> bool {
        self.spoiled.contains(id) || !self.disk.containing(&format!("{ROOT}/quarantine/{id}.")).is_empty()
    }

    /// A sector of a random record cannot be read any more.
    pub(crate) fn spoil_record(&mut self) {
        let records = self.records();
        if !records.is_empty() {
            let number = self.random.below(records.len() as u64) as usize;
            self.spoil(&records[number]);
        }
    }

    /// The record at `path` cannot be read any more.
    pub(crate) fn spoil(&mut self, path: &str) {
        trace!(self, "{path} cannot be read any more");
        self.disk.spoil(path);
        let id = path.rsplit('/').nth(1).unwrap_or_default();
        self.spoiled.insert(id.to_owned());
    }

    /// Whether this is the parent of a pod's cgroup that no daemon may know to be its own: this is in a note and in the pod's record.
    pub(crate) fn is_lost_parent(&self, cgroup: &str) -> bool {
        let is_spoiled = !self.spoiled.is_empty() && cgroup.starts_with("/kubepods/pod");
        is_spoiled || self.removals.parents.contains(cgroup)
    }

    /// The parents of cgroups of pods in these directories, and of pods that had no cgroup yet.
    fn parents(&self, directories: &[String]) -> Vec<String> {
        let is_parent = |path: &String| path.starts_with("/kubepods/pod") && path.matches('/').count() == 2;
        let is_concerned = |path: &String| {
            let paths = self.cgroups.paths().into_iter();
            let below = paths.filter_map(|below| below.strip_prefix(&format!("{path}/")));
            let mut pods = below.filter_map(|below| below.split('/').next());
            pods.all(|pod| directories.iter().any(|directory| directory.ends_with(pod)))
        };
        let paths = self.cgroups.paths().into_iter();
        paths.filter(|path| is_parent(path) && is_concerned(path)).cloned().collect()
    }

    /// Whether the socket that a daemon has made for a monitor is there and open: in the monitor, or on its way.
    pub(crate) fn has_new_listener(&self, pid: i32) -> bool {
        let Some(end) = self.removals.listeners.get(&pid) else { return false };
        let directory = self.monitors.get(&pid).map(|monitor| &monitor.directory);
        if !directory.is_some_and(|directory| self.disk.has(&format!("{directory}/monitor.sock"))) {
            return false;
        }
        has_other_end(end.as_fd())
    }

    /// Watches a directory until a name in it, or the directory itself, is removed.
    pub(crate) fn arm_removals(&mut self, directory: &str) -> Result<OwnedFd, Errno> {
        self.call("inotify", directory, SCARCE)?;
        if !self.disk.has(directory) {
            return Err(Errno::ENOENT);
        }
        let (watch, report) = pipe();
        self.removals.watches.push((directory.to_owned(), report));
        Ok(watch)
    }

    /// Reports a removal to those who watch the directory or the one that contains it.
    pub(crate) fn report_removal(&mut self, path: &str) {
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        self.removals.watches.retain(|(directory, _)| directory != path && directory != parent);
    }

    /// Lets another program remove a directory of the daemon soon.
    pub(crate) fn schedule_removal(&mut self) {
        let delay = self.random.below(50 * MS);
        self.schedule(delay, Happening::DirectoryIsRemoved);
    }

    /// Another program removes a directory of the daemon, one of those that have no durable records.
    pub(crate) fn remove_a_directory(&mut self) {
        // Spare files may be records after a power cut, and are as durable as these.
        let mut all = vec![format!("{STATE}/pods"), format!("{ROOT}/garbage")];
        all.extend(self.states_of_pods());
        all.retain(|path| self.disk.has(path));
        if !all.is_empty() {
            let number = self.random.below(all.len() as u64) as usize;
            self.remove_directory(&all.swap_remove(number));
        }
    }

    fn states_of_pods(&self) -> Vec<String> {
        let entries = self.disk.entries(&format!("{STATE}/pods")).unwrap_or_default();
        entries.iter().map(|(name, _)| format!("{STATE}/pods/{}", name.display())).collect()
    }

    fn remove_directory(&mut self, path: &str) {
        trace!(self, "another program removes {path}");
        let is_removed = |directory: &String| directory == path || directory.starts_with(&format!("{path}/"));
        let removed: Vec<String> = self.states_of_pods().into_iter().filter(is_removed).collect();
        self.removals.parents.extend(self.parents(&removed));
        for directory in &removed {
            *self.removals.counts.entry(directory.clone()).or_default() += 1;
        }
        self.removals.unwritten.extend(removed.iter().cloned());
        // A daemon that could not commit an exit reads the record again, also if the monitor has ended since it wrote it.
        for (container, facts) in &mut self.facts {
            let has_exit = |directory: &String| self.disk.has(&format!("{directory}/exits/{container}"));
            facts.has_lost_exit |= removed.iter().any(has_exit);
        }
        let _ = self.disk.remove_dir_all(path);
        for monitor in self.monitors.values_mut().filter(|monitor| is_removed(&monitor.directory)) {
            monitor.has_lost_state = true;
            for container in monitor.containers() {
                self.facts.entry(*container).or_default().has_lost_exit = true;
            }
            // The daemon has not reached it, or not read its answer or the pod's record, and does not find it later.
            if !has_daemon(monitor) || !monitor.is_heard {
                self.killed_monitors.insert(monitor.directory.clone());
            }
        }
        // Nor has it read the notes of the pod; after an error it may not have read those of another one.
        let has_errors = self.errors > self.removals.errors_before;
        let is_unread = |directory: &String| has_errors || self.killed_monitors.contains(directory);
        self.removals.lost.extend(removed.into_iter().filter(is_unread));
        self.report_removal(path);
        if !self.removals.is_daemon_up {
            self.give_up_state();
        }
    }

    pub(crate) fn begin_daemon(&mut self) {
        self.removals.errors_before = self.errors;
    }

    /// The daemon has ended: what it has not made again is lost. Pods of monitors that the next daemon cannot find need not
    /// stay ready.
    pub(crate) fn give_up_state(&mut self) {
        self.removals.is_daemon_up = false;
        // Of a connection that ends the kernel may report the end before the frames in it, a new socket among them.
        let unreachable: Vec<String> = (self.monitors.values())
            .filter(|monitor| monitor.has_lost_state)
            .map(|monitor| monitor.directory.clone())
            .collect();
        let unwritten = std::mem::take(&mut self.removals.unwritten);
        let is_written = |directory: &String| self.disk.has(&format!("{directory}/stopping"));
        self.removals.lost.extend(unwritten.into_iter().filter(|directory| !is_written(directory)));
        self.removals.lost.extend(unreachable.iter().cloned());
        self.killed_monitors.extend(unreachable);
    }

    /// Whether neither a file, a cgroup nor a connection leads to a monitor.
    pub(crate) fn is_out_of_reach(&self, pid: i32) -> bool {
        let Some((process, monitor)) = self.processes.get(&pid).zip(self.monitors.get(&pid)) else {
            return false;
        };
        let pod = monitor.directory.rsplit('/').next().unwrap_or_default();
        if self.is_in_cgroup_of(process, pod) {
            return false;
        }
        let is_lost = monitor.has_lost_state && !has_daemon(monitor);
        is_lost || self.killed_monitors.contains(&monitor.directory)
    }
}

fn missing(op: &'static str, target: &str) -> Error {
    Error::Kernel { op, target: target.to_owned(), errno: Errno::ENOENT }
}

/// Longer than the daemon waits before it looks again.
const MENDED: Duration = Duration::from_secs(40);

fn begin(fixture: &Fixture, pods: &Rc<Pods>) {
    pods.follow_state_directory();
    fixture.clients.node.world.borrow_mut().removals.is_daemon_up = true;
}

fn remove_states(fixture: &Fixture) {
    fixture.clients.node.world.borrow_mut().remove_directory(&format!("{STATE}/pods"));
}

async fn create_one(pods: &Rc<Pods>) {
    let id = pods.run(pod_spec(0)).await.expect("a pod");
    let pod = pods.pod(&id.to_string()).expect("it is listed");
    pod.create_container(container_spec(0)).await.expect("a container");
}

/// Fails if the directory is looked for only when something is removed: the pod is made after that, and the next daemon does
/// not find its monitor.
#[test]
fn a_pod_is_kept_whose_state_is_removed_while_it_is_made() {
    let mut number = 0;
    loop {
        let fixture = fixture(41);
        let is_made = fixture.daemon(async |pods| {
            begin(&fixture, pods);
            let made = reactor::spawn({
                let pods = Rc::clone(pods);
                async move { pods.run(pod_spec(0)).await }
            });
            reactor::sleep(Duration::from_micros(500 * number)).await;
            let is_early = !made.is_finished();
            remove_states(&fixture);
            let is_made = made.await.is_ok();
            reactor::sleep(MENDED).await;
            fixture.require(pods);
            is_early.then_some(is_made)
        });
        fixture.daemon(async |pods| {
            let is_ready = pods.pods().iter().any(|pod| pod.record().state.is_ready());
            assert_eq!(is_ready, is_made.unwrap_or(true), "removed after {} us", 500 * number);
            fixture.require(pods);
            fixture.remove_all(pods).await;
        });
        number += 1;
        if is_made.is_none() {
            break;
        }
    }
    assert!(number > 10, "the pod was made too early");
}

/// Fails if the record of a container whose removal waits has to be written: its directory is gone.
#[test]
fn a_container_whose_removal_waits_keeps_no_pod_from_its_state_directory() {
    let fixture = fixture(42);
    fixture.daemon(async |pods| {
        begin(&fixture, pods);
        create_one(pods).await;
        let container = Rc::clone(&pods.containers()[0]);
        fixture.freeze_monitors(15_000_000_000);
        container.remove().await.expect_err("the monitor does not answer");
        remove_states(&fixture);
        reactor::sleep(MENDED).await;
        fixture.require(pods);
    });
    fixture.daemon(async |pods| {
        assert!(pods.pods()[0].record().state.is_ready());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

/// Seed 7136082: the directory stayed until the next start, also after a client had removed the container.
#[test]
fn a_directory_without_a_record_that_cannot_be_removed_is_removed_later() {
    let fixture = fixture(45);
    fixture.daemon(async |pods| {
        begin(&fixture, pods);
        create_one(pods).await;
    });
    // Its only record is a note there.
    remove_states(&fixture);
    fixture.refuse("rename", "/containers/", Errno::EIO, 1);
    fixture.daemon(async |pods| {
        assert!(pods.containers().is_empty());
        assert!(pods.unknown().is_some_and(|(_, reason)| reason.contains("/containers/")));
        fixture.settle(pods).await;
    });
}

/// Seed 326419: a directory went after it was made and before it was restricted, and the daemon did not start.
#[test]
fn a_daemon_starts_whose_directory_is_removed_while_it_is_made() {
    let fixture = fixture(47);
    fixture.refuse("stat", STATE, Errno::ENOENT, 1);
    fixture.daemon(async |pods| {
        assert_eq!(fixture.refusals_left(), 0);
        begin(&fixture, pods);
        start_one(pods).await.expect("a container is started");
        fixture.require(pods);
    });
}

/// Seed 7039808: the connection was closed after a second of read errors, and no other one could be made.
#[test]
fn a_pod_without_a_state_directory_survives_a_lack_of_memory() {
    let fixture = fixture(44);
    fixture.daemon(async |pods| {
        begin(&fixture, pods);
        start_one(pods).await.expect("a container is started");
        fixture.refuse("receive frame", "", Errno::ENOMEM, 40);
        remove_states(&fixture);
        reactor::sleep(Duration::from_secs(60)).await;
        assert_eq!(fixture.refusals_left(), 0);
        reactor::sleep(MENDED).await;
        assert!(pods.pods()[0].record().state.is_ready());
        assert!(pods.containers()[0].record().state.is_running());
        fixture.require(pods);
    });
    fixture.daemon(async |pods| {
        assert!(pods.pods()[0].record().state.is_ready());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

/// Fails if only pods with a monitor get their state directory again: the container was a note there.
#[test]
fn a_container_of_a_stopped_pod_is_listed_after_the_loss_of_its_note() {
    let fixture = fixture(43);
    fixture.daemon(async |pods| {
        begin(&fixture, pods);
        create_one(pods).await;
        pods.pods()[0].stop().await.expect("it is stopped");
        remove_states(&fixture);
        reactor::sleep(MENDED).await;
        fixture.require(pods);
    });
    fixture.daemon(async |pods| {
        assert_eq!(pods.containers().len(), 1);
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}
