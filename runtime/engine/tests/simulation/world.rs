//! The state of the simulated node: time, processes, cgroups, network namespaces, the disk, and events that
//! no client causes.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::time::Duration;

use coracle_sandbox::monitor::memfd;
use coracle_sandbox::{ContainerId, Error, Exit};
use nix::errno::Errno;

use crate::cgroups::Cgroups;
use crate::disk::Disk;
use crate::monitor::Simulated;
use crate::random::Random;
use crate::removed::Removals;

/// The daemon's `--root` directory.
pub(crate) const ROOT: &str = "/sim/root";
pub(crate) const STATE: &str = "/sim/state";

/// The payload of the panic that ends a daemon during a call, like SIGKILL.
pub(crate) struct Killed;

/// Possible errors of calls that only read.
pub(crate) const READ: &[Errno] = &[Errno::EIO, Errno::EMFILE, Errno::ENOMEM];
/// Possible errors of changes on the durable disk.
const CHANGE: &[Errno] = &[Errno::EIO, Errno::ENOSPC, Errno::EROFS, Errno::EMFILE, Errno::ENOMEM];
/// Possible errors of changes on a tmpfs.
pub(crate) const CHANGE_IN_MEMORY: &[Errno] = &[Errno::ENOSPC, Errno::EMFILE, Errno::ENOMEM];
/// Possible errors of removals on the durable disk.
pub(crate) const REMOVE: &[Errno] = &[Errno::EIO, Errno::EROFS, Errno::ENOMEM];
/// Possible errors of calls that need memory or a descriptor.
pub(crate) const SCARCE: &[Errno] = &[Errno::ENOMEM, Errno::EMFILE];
/// Possible errors of clone.
pub(crate) const CLONE: &[Errno] = &[Errno::ENOMEM, Errno::EAGAIN, Errno::EMFILE];
/// Possible errors of pidfd_open and pidfd_send_signal; a security module may refuse a signal.
pub(crate) const SIGNAL: &[Errno] = &[Errno::ENOMEM, Errno::EMFILE, Errno::EPERM];
/// Possible errors of a socket.
pub(crate) const SOCKET: &[Errno] = &[Errno::ENOBUFS, Errno::ENOMEM];

/// Calls that change something, as [`World::call`] names them. Some are rare among all calls, and a daemon that is killed before them
/// leaves what only few other places of a history leave.
pub(crate) const CHANGES: &[&str] = &[
    "mkdir",
    "create",
    "write",
    "fsync",
    "rename",
    "unlink",
    "rmdir",
    "make cgroup",
    "apply limits",
    "kill cgroup",
    "kill process",
    "remove cgroup",
    "bind network namespace",
    "unmount network namespace",
    "listen",
    "clone monitor",
    "release monitor",
    "execute monitor",
    "send frame",
    "receive frame",
];

/// Calls beside [`CHANGES`] of which all may fail for the whole life of a daemon.
pub(crate) const OTHERS: &[&str] = &[
    "pwrite",
    "open",
    "fdatasync",
    "read",
    "list",
    "stat",
    "list cgroups",
    "connect to monitor",
    "read fdinfo",
    "syncfs",
    "inotify",
    "open cgroup",
    "remove unused cgroup",
    "read monitor.pid",
];

/// More turns of the event loop, calls of the node and reads of the clock than any history needs.
pub(crate) const TURNS_MAX: u64 = 1_000_000;
/// Maximum number of events that no client causes; a history that needs more has an endless loop.
const HAPPENINGS_MAX: u64 = 1_000_000;

pub(crate) const US: u64 = 1_000;
pub(crate) const MS: u64 = 1_000_000;
pub(crate) const S: u64 = 1_000_000_000;

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A monitor that waits until the daemon permits it to run.
    Blocked,
    Monitor,
    /// The main process of a container.
    Main(ContainerId),
    /// A child process of a container's main process; outlives the main process unless the container has a
    /// PID namespace.
    Child(ContainerId),
}

/// A simulated process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) role: Role,
    /// The cgroup in each [`Hierarchy`](crate::cgroups::Hierarchy).
    pub(crate) cgroups: [String; 2],
    pub(crate) parent: i32,
    /// ID of the pod; empty for a monitor.
    pub(crate) pod: String,
    pub(crate) born_ns: u64,
    /// Whether a signal that ends the process is pending.
    pub(crate) is_dying: bool,
    /// Whether the process is the first of a PID namespace, whose other processes end with it.
    pub(crate) has_namespace: bool,
    /// Whether the process of a container has changed its root, as one of a container runtime inside of it does.
    pub(crate) has_other_root: bool,
}

/// An event that no client causes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happening {
    /// A process ends.
    Ends(i32, Exit),
    /// The descriptor of an ended monitor becomes readable.
    Reported(i32),
    /// A monitor accepts a connection or reads a frame.
    MonitorReads(i32),
    /// A container's process calls exec.
    Execs(i32, ContainerId),
    /// Another program removes a directory of the daemon.
    DirectoryIsRemoved,
    /// A monitor notices the end of a container.
    Reaps(i32, ContainerId, Exit),
}

/// The faults that are injected at random.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Probability of an error for each call, per mille.
    pub(crate) errors: u64,
    /// A call that always fails, and the number of its error among those that it may have; `None`: no call does.
    pub(crate) lasting: Option<(&'static str, usize)>,
    /// The number of the call in which the daemon is killed; `None`: never.
    pub(crate) killed_at: Option<u64>,
    /// The name of a call before which the daemon is killed, and how many calls of this name come first.
    pub(crate) killed_before: Option<(&'static str, u64)>,
}

impl Faults {
    /// The error with which a call always fails, of those that it may have; `None`: it does not.
    fn lasting(&self, name: &str, errors: &[Errno]) -> Option<Errno> {
        let (_, number) = self.lasting.filter(|(lasting, _)| *lasting == name && !errors.is_empty())?;
        errors.get(number % errors.len()).copied()
    }

    /// Whether the daemon is killed before this call.
    fn is_last(&mut self, number: u64, name: &str) -> bool {
        let is_named = match &mut self.killed_before {
            Some((killer, 0)) => *killer == name,
            Some((killer, left)) => {
                *left -= u64::from(*killer == name);
                false
            }
            None => false,
        };
        is_named || self.killed_at.is_some_and(|at| number >= at)
    }
}

/// Calls that fail in a named history.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) name: &'static str,
    /// Part of the target of these calls.
    pub(crate) target: String,
    pub(crate) errno: Errno,
    /// Number of further calls that fail.
    pub(crate) count: u32,
}

/// The attachment of a pod to the network, as a CNI plugin stores it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attached {
    /// Whether an address is allocated; the allocation survives a reboot.
    pub(crate) has_lease: bool,
    /// Whether a link exists.
    pub(crate) has_link: bool,
}

/// Facts about a container on the node, with which the checks compare the answers to clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// Number of processes that were cloned for the container, without those that failed before exec.
    pub(crate) clones: u32,
    /// Exit of the container's main process; `None` while it has not ended.
    pub(crate) end: Option<Exit>,
    /// Simulated time of the main process's end.
    pub(crate) ended_ns: u64,
    /// Simulated time at which the monitor wrote the exit record; `None` if it has not.
    pub(crate) reaped_ns: Option<u64>,
    /// Whether the container's cgroup was killed while its main process ran.
    pub(crate) is_killed: bool,
    /// Whether another program has removed the exit record, or the directory for it before.
    pub(crate) has_lost_exit: bool,
}

/// The state of the simulated node.
pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) now_ns: u64,
    /// The wall clock at the time of the boot, in nanoseconds since 1970.
    pub(crate) wall_ns: u64,
    /// Number of the current boot.
    pub(crate) boot: u32,
    pub(crate) disk: Disk,
    pub(crate) happenings: BTreeMap<(u64, u64), Happening>,
    sequence: u64,
    pub(crate) cgroups: Cgroups,
    pub(crate) processes: BTreeMap<i32, Process>,
    last_pid: i32,
    pub(crate) monitors: BTreeMap<i32, Simulated>,
    /// The state directories of monitors that the simulation has killed, or that a later daemon could not find: their pods
    /// need not stay ready.
    pub(crate) killed_monitors: BTreeSet<String>,
    pub(crate) removals: Removals,
    /// IDs of the pods and containers whose record cannot be read: the next daemon sets it aside and ends what runs.
    pub(crate) spoiled: BTreeSet<String>,
    pub(crate) namespaces: BTreeSet<String>,
    pub(crate) attached: BTreeMap<String, Attached>,
    pub(crate) facts: BTreeMap<ContainerId, Facts>,
    pub(crate) faults: Faults,
    /// Time between the clone of a container's process and its exec; `None`: random.
    pub(crate) exec_delay_ns: Option<u64>,
    /// Exit of the programs that end by themselves, for a history that is compared with the real node; all
    /// other programs run until they are killed. `None`: programs end, or start child processes, at random.
    pub(crate) programs: Option<BTreeMap<ContainerId, Exit>>,
    pub(crate) refusals: Vec<Refusal>,
    /// Number of calls of all daemons.
    pub(crate) calls: u64,
    /// Number of events that no client caused.
    happenings_count: u64,
    /// Number of turns of the event loops of all daemons.
    pub(crate) turns: u64,
    /// Number of times that the clock was read.
    pub(crate) clock_reads: Cell<u64>,
    /// Number of errors that were injected.
    pub(crate) errors: u64,
    /// Whether the daemon was killed and its destructors are running.
    pub(crate) is_daemon_dead: bool,
    pub(crate) is_traced: bool,
    pub(crate) trace: Vec<String>,
    /// Description of the first violation of a rule of the node itself; `None` if there was none.
    pub(crate) violation: Option<String>,
}

macro_rules! trace {
    ($world:expr, $($text:tt)*) => {
        if $world.is_traced {
            let text = format!($($text)*);
            $world.note(text);
        }
    };
}
pub(crate) use trace;

impl World {
    pub(crate) fn new(seed: u64, is_traced: bool) -> Self {
        Self {
            random: Random::new(seed),
            now_ns: 10 * S,
            wall_ns: 1_700_000_000 * S,
            boot: 1,
            disk: Disk::new(ROOT, STATE),
            happenings: BTreeMap::new(),
            sequence: 0,
            cgroups: Cgroups::new(false),
            processes: BTreeMap::new(),
            last_pid: 1000,
            monitors: BTreeMap::new(),
            killed_monitors: BTreeSet::new(),
            removals: Removals::default(),
            spoiled: BTreeSet::new(),
            namespaces: BTreeSet::new(),
            attached: BTreeMap::new(),
            facts: BTreeMap::new(),
            faults: Faults::default(),
            exec_delay_ns: None,
            programs: None,
            refusals: Vec::new(),
            calls: 0,
            happenings_count: 0,
            turns: 0,
            clock_reads: Cell::new(0),
            errors: 0,
            is_daemon_dead: false,
            is_traced,
            trace: Vec::new(),
            violation: None,
        }
    }

    pub(crate) fn note(&mut self, text: String) {
        self.trace.push(format!("{:>12.6} {text}", Duration::from_nanos(self.now_ns).as_secs_f64()));
    }

    /// Records the violation of a rule of the node by the daemon.
    pub(crate) fn broken(&mut self, text: String) {
        trace!(self, "BROKEN {text}");
        self.violation.get_or_insert(text);
    }

    /// Begins a call of the daemon: simulated time passes, the call may fail, and the daemon may be killed in
    /// it.
    pub(crate) fn call(&mut self, name: &str, target: &str, errors: &[Errno]) -> Result<(), Errno> {
        if self.is_daemon_dead {
            return Err(Errno::EIO);
        }
        self.calls += 1;
        assert!(self.calls < TURNS_MAX, "{name} {target} and so on without an end");
        let moment = match self.random.below(200) {
            0 => self.random.below(20 * MS),
            _ => self.random.below(10 * US),
        };
        self.pass(self.now_ns + moment);
        if self.faults.is_last(self.calls, name) {
            trace!(self, "daemon killed before {name} {target}");
            (self.faults.killed_at, self.faults.killed_before) = (None, None);
            self.is_daemon_dead = true;
            resume_unwind(Box::new(Killed));
        }
        let is_it = |refusal: &&mut Refusal| {
            refusal.count > 0 && refusal.name == name && target.contains(&refusal.target)
        };
        if let Some(refusal) = self.refusals.iter_mut().find(is_it) {
            refusal.count -= 1;
            self.errors += 1;
            return Err(refusal.errno);
        }
        let lasting = self.faults.lasting(name, errors);
        let is_random =
            !errors.is_empty() && self.faults.errors > 0 && self.random.happens(self.faults.errors);
        if lasting.is_some() || is_random {
            let errno = lasting.unwrap_or_else(|| self.random.pick(errors));
            self.errors += 1;
            trace!(self, "{name} {target}: {errno}");
            return Err(errno);
        }
        trace!(self, "{name} {target}");
        Ok(())
    }

    /// Begins a call whose errors contain an operation and a target; see [`World::call`].
    pub(crate) fn kernel_call(
        &mut self,
        name: &'static str,
        target: &str,
        errors: &[Errno],
    ) -> Result<(), Error> {
        self.call(name, target, errors).map_err(|errno| Error::Kernel {
            op: name,
            target: target.to_owned(),
            errno,
        })
    }

    /// Lets time pass until `until_ns`, and executes all events that are due until then.
    pub(crate) fn pass(&mut self, until_ns: u64) {
        while let Some(entry) = self.happenings.first_entry().filter(|entry| entry.key().0 <= until_ns) {
            let ((at_ns, _), happening) = entry.remove_entry();
            self.now_ns = self.now_ns.max(at_ns);
            self.happenings_count += 1;
            assert!(
                self.happenings_count < HAPPENINGS_MAX,
                "{happening:?} at {at_ns} and so on without an end"
            );
            self.happens(happening);
        }
        self.now_ns = self.now_ns.max(until_ns);
    }

    pub(crate) fn schedule(&mut self, after_ns: u64, happening: Happening) {
        self.sequence += 1;
        self.happenings.insert((self.now_ns + after_ns, self.sequence), happening);
    }

    /// A random duration in nanoseconds: usually short, sometimes long.
    pub(crate) fn moment(&mut self) -> u64 {
        match self.random.below(100) {
            0 => self.random.below(2 * S),
            1..10 => self.random.below(50 * MS),
            _ => self.random.below(500 * US),
        }
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Ends(pid, exit) => self.process_ends(pid, exit),
            Happening::DirectoryIsRemoved => self.remove_a_directory(),
            Happening::Reported(pid) => drop(self.monitors.remove(&pid)),
            Happening::MonitorReads(pid) => self.monitor_reads(pid),
            Happening::Execs(pid, container) => self.container_executes(pid, container),
            Happening::Reaps(pid, container, exit) => self.monitor_reaps(pid, container, exit),
        }
    }

    pub(crate) fn clone_process(&mut self, role: Role, cgroups: &[String; 2], parent: i32) -> i32 {
        self.last_pid += 1;
        let pod = match self.monitors.get(&parent) {
            Some(monitor) => monitor.directory.rsplit('/').next().unwrap_or_default().to_owned(),
            None => self.processes.get(&parent).map(|parent| parent.pod.clone()).unwrap_or_default(),
        };
        let process = Process {
            role,
            cgroups: cgroups.clone(),
            parent,
            pod,
            born_ns: self.now_ns,
            is_dying: false,
            has_namespace: false,
            has_other_root: false,
        };
        self.processes.insert(self.last_pid, process);
        self.last_pid
    }

    /// Sends a signal that ends a process.
    pub(crate) fn kill(&mut self, pid: i32, exit: Exit) {
        let delay = self.moment();
        if let Some(process) = self.processes.get_mut(&pid)
            && !process.is_dying
        {
            process.is_dying = true;
            self.schedule(delay, Happening::Ends(pid, exit));
        }
    }

    fn process_ends(&mut self, pid: i32, exit: Exit) {
        let Some(process) = self.processes.remove(&pid) else { return };
        trace!(self, "process {pid} ({:?}) ends: {exit:?}", process.role);
        match process.role {
            Role::Blocked => {}
            Role::Child(_) => {}
            Role::Monitor => {
                for child in self.processes.values_mut().filter(|child| child.parent == pid) {
                    child.parent = 1;
                }
                if let Some(monitor) = self.monitors.get_mut(&pid) {
                    monitor.end();
                }
                let delay = self.moment();
                self.schedule(delay, Happening::Reported(pid));
            }
            Role::Main(container) => {
                let now_ns = self.now_ns;
                let facts = self.facts.entry(container).or_default();
                facts.end.get_or_insert(exit);
                facts.ended_ns = now_ns;
                let children: Vec<i32> = (self.processes.iter())
                    .filter(|(_, child)| child.role == Role::Child(container))
                    .map(|(pid, _)| *pid)
                    .collect();
                for child in children {
                    if process.has_namespace {
                        self.kill(child, Exit::Signal(9));
                    } else if let Some(child) = self.processes.get_mut(&child) {
                        child.parent = process.parent;
                    }
                }
                let delay = self.random.below(300 * US);
                self.schedule(delay, Happening::Reaps(process.parent, container, exit));
            }
        }
    }

    /// Kills monitors that were still blocked when their daemon ended.
    pub(crate) fn daemon_ends(&mut self) {
        let blocked: Vec<i32> = (self.processes.iter())
            .filter(|(_, process)| process.role == Role::Blocked)
            .map(|(pid, _)| *pid)
            .collect();
        for pid in blocked {
            self.kill(pid, Exit::Code(1));
        }
        self.give_up_state();
    }

    /// Cuts the power of the node and boots it again.
    pub(crate) fn lose_power(&mut self) {
        trace!(self, "power cut");
        self.disk.lose_power(&mut self.random);
        self.disk.create_dir_all(STATE).expect("the tmpfs is mounted again");
        self.happenings.clear();
        self.processes.clear();
        self.monitors.clear();
        self.cgroups.clear();
        self.namespaces.clear();
        self.attached.retain(|_, attached| {
            attached.has_link = false;
            attached.has_lease
        });
        self.boot += 1;
        // A board without a real-time clock starts in 1970.
        self.wall_ns = match self.random.below(3) {
            0 => 0,
            _ => self.wall_ns + self.now_ns,
        };
        self.now_ns = 5 * S;
    }

    /// Possible errors of changes below `path`.
    pub(crate) fn change_errors(path: &str) -> &'static [Errno] {
        if path.starts_with(ROOT) { CHANGE } else { CHANGE_IN_MEMORY }
    }

    /// The content of a simulated file of procfs; `None` if it does not exist.
    pub(crate) fn proc_file(&self, path: &str) -> Option<String> {
        let (pid, file) = path.strip_prefix("/proc/")?.split_once('/')?;
        let pid = pid.parse::<i32>().ok()?;
        let process = self.processes.get(&pid)?;
        match file {
            "cgroup" => Some(process.cgroup_file(self.cgroups.is_hybrid())),
            "mountinfo" => Some(match process.role {
                Role::Main(id) | Role::Child(id) if !process.has_other_root => {
                    let upper = format!("{ROOT}/pods/{}/containers/{id}/upper", process.pod);
                    format!("1 1 0:1 / / rw - overlay overlay rw,upperdir={upper},volatile\n")
                }
                _ => "1 1 0:2 / / rw - tmpfs tmpfs rw\n".to_owned(),
            }),
            "stat" => {
                let ticks = process.born_ns / (10 * MS);
                let rest: String = (5..22).map(|_| " 0").collect();
                Some(format!("{pid} (sim) S {}{rest} {ticks} 0\n", process.parent))
            }
            _ => {
                let children = self.processes.iter().filter(|(_, child)| child.parent == pid);
                Some(children.map(|(pid, _)| format!("{pid} ")).collect())
            }
        }
    }
}

/// Creates a descriptor that represents an object of the simulation.
pub(crate) fn descriptor(text: &str) -> OwnedFd {
    memfd(text.as_bytes()).expect("a memfd")
}

/// The text of the object that a descriptor of [`descriptor`] represents.
pub(crate) fn object_of(fd: BorrowedFd<'_>) -> String {
    let file = std::fs::File::from(fd.try_clone_to_owned().expect("a free descriptor"));
    let mut bytes = [0; 512];
    let length = file.read_at(&mut bytes, 0).expect("a memfd can be read");
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}
