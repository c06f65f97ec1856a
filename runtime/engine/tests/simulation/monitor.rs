//! Simulated monitors. A simulated monitor answers the frames of the engine like `coracle-pod` (its modules
//! `answer`, `start` and `reap`); the encoding, connections and time limits are the real ones of the engine.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use coracle_sandbox::monitor::Monitor;
use coracle_sandbox::simulation::{MonitorEnd, connection, exit_record_bytes};
use coracle_sandbox::{
    ContainerId, Event, Exit, ExitRecord, FRAMES_VERSION, Failure, FromMonitor, PidNamespace, Reply, Request,
};
use nix::errno::Errno;

use crate::cgroups::entered;
use crate::removed::pipe;
use crate::world::{Happening, MS, Role, S, US, World, descriptor, object_of, trace};

/// The state of a container in its monitor.
#[derive(Clone, Debug)]
enum State {
    /// The process was cloned, and the start request `number` is not answered yet; 0: the daemon that sent it
    /// has disconnected.
    Starting {
        number: u32,
    },
    Running,
    Exited {
        record: ExitRecord,
        is_told: bool,
    },
}

#[derive(Clone, Debug)]
struct Entry {
    pid: i32,
    state: State,
}

/// A simulated monitor.
pub(crate) struct Simulated {
    pub(crate) directory: String,
    /// The monitor's end of the connection, and whether the daemon has sent Hello; `None` without a
    /// connection.
    connection: Option<(MonitorEnd, bool)>,
    /// Whether the daemon of this connection has read the answer to Hello.
    pub(crate) is_heard: bool,
    /// A connection that the monitor has not accepted yet; `None` if there is none.
    waiting: Option<MonitorEnd>,
    containers: BTreeMap<ContainerId, Entry>,
    /// Whether the monitor's socket and state directory are removed and it has not received new ones.
    pub(crate) has_lost_state: bool,
    /// The listening socket that a daemon has made for the monitor; `None`: the first one.
    listener: Option<OwnedFd>,
    /// The error with which the pod's set-up fails; `None`: it succeeds.
    setup: Option<Errno>,
    /// Simulated time until which the monitor is frozen.
    pub(crate) frozen_until_ns: u64,
    has_ended: bool,
    /// Descriptor that becomes readable when `_ended` is closed, in place of a pidfd.
    process: OwnedFd,
    _ended: OwnedFd,
}

impl Simulated {
    /// Marks the monitor's process as ended; its pidfd becomes readable a moment later.
    pub(crate) fn end(&mut self) {
        self.has_ended = true;
        self.connection = None;
        self.waiting = None;
    }

    /// The connection on which a daemon has sent Hello.
    pub(crate) fn connection(&self) -> Option<&MonitorEnd> {
        self.connection.as_ref().filter(|(_, is_greeted)| *is_greeted).map(|(end, _)| end)
    }

    /// The containers that the monitor has started and was not told to forget.
    pub(crate) fn containers(&self) -> impl Iterator<Item = &ContainerId> {
        self.containers.keys()
    }

    /// Removes a container from the monitor's table, as if the monitor had never started it.
    pub(crate) fn forget(&mut self, container: ContainerId) {
        self.containers.remove(&container);
    }

    /// Closes the connection to a daemon; the numbers of its requests are not valid for the next daemon.
    fn disconnect(&mut self) {
        self.connection = None;
        for entry in self.containers.values_mut() {
            if let State::Starting { number } = &mut entry.state {
                *number = 0;
            }
        }
    }
}

impl World {
    /// Starts a simulated monitor in an existing process.
    pub(crate) fn start_monitor(&mut self, pid: i32, directory: &str) {
        let (process, ended) = pipe();
        let has_failed = self.faults.errors > 0 && self.random.happens(20);
        let monitor = Simulated {
            directory: directory.to_owned(),
            connection: None,
            is_heard: false,
            waiting: None,
            containers: BTreeMap::new(),
            has_lost_state: !self.disk.has(&format!("{directory}/monitor.sock")),
            listener: None,
            setup: has_failed.then_some(Errno::ENOMEM),
            frozen_until_ns: 0,
            has_ended: false,
            process,
            _ended: ended,
        };
        self.monitors.insert(pid, monitor);
        if let Some(process) = self.processes.get_mut(&pid) {
            process.role = Role::Monitor;
        }
    }

    /// PID of the monitor for a state directory, from the PID file in the directory.
    pub(crate) fn monitor_of(&self, directory: &str) -> Option<i32> {
        let file = self.disk.read(&format!("{directory}/monitor.pid")).ok()?;
        let pid = String::from_utf8(file).ok()?.parse().ok()?;
        self.monitors.get(&pid).filter(|monitor| !monitor.has_ended).map(|_| pid)
    }

    /// Connects to a monitor, which accepts the connection later.
    pub(crate) fn connect(&mut self, pid: i32) -> Option<Monitor> {
        if self.monitors.get(&pid)?.has_lost_state && !self.has_new_listener(pid) {
            return None;
        }
        let monitor = self.monitors.get_mut(&pid).filter(|monitor| !monitor.has_ended)?;
        let (socket, end) = connection().expect("a socket pair");
        monitor.waiting = Some(end);
        let pidfd = monitor.process.try_clone().expect("a free descriptor");
        let delay = self.moment();
        self.schedule(delay, Happening::MonitorReads(pid));
        Some(Monitor { socket: socket.into(), pid, pidfd: pidfd.into() })
    }

    /// Whether a monitor handles events now; if it is frozen, the event `later` is repeated when the monitor
    /// continues.
    fn works(&mut self, pid: i32, later: Happening) -> bool {
        let Some(monitor) = self.monitors.get(&pid).filter(|monitor| !monitor.has_ended) else {
            return false;
        };
        let left = monitor.frozen_until_ns.saturating_sub(self.now_ns);
        if left > 0 {
            self.schedule(left, later);
        }
        left == 0
    }

    pub(crate) fn monitor_reads(&mut self, pid: i32) {
        if !self.works(pid, Happening::MonitorReads(pid)) {
            return;
        }
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        // The socket that would accept the connection may be on its way in the old one.
        if !monitor.has_lost_state
            && let Some(end) = monitor.waiting.take()
        {
            monitor.disconnect();
            monitor.connection = Some((end, false));
            monitor.is_heard = false;
        }
        let Some((end, _)) = &monitor.connection else { return };
        match end.receive() {
            Ok(None) => {}
            Err(_) => monitor.disconnect(),
            Ok(Some((frame, descriptors))) => {
                self.schedule(10 * US, Happening::MonitorReads(pid));
                trace!(self, "monitor {pid} gets {:?}", frame.request);
                self.answer(pid, frame.number, frame.request, &descriptors);
            }
        }
    }

    fn send(&mut self, pid: i32, frame: &FromMonitor, descriptors: &[OwnedFd]) {
        trace!(self, "monitor {pid} says {frame:?}");
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        if matches!(frame, FromMonitor::Reply { number: 0, .. }) {
            return;
        }
        if let Some((end, _)) = &monitor.connection
            && end.send(frame, &descriptors).is_err()
        {
            monitor.disconnect();
        }
    }

    fn reply(&mut self, pid: i32, number: u32, reply: Reply) {
        self.send(pid, &FromMonitor::Reply { number, reply }, &[]);
    }

    /// Sends the exit records that the daemon has not received.
    fn tell(&mut self, pid: i32) {
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        if monitor.connection().is_none() {
            return;
        }
        let mut records = Vec::new();
        for entry in monitor.containers.values_mut() {
            if let State::Exited { record, is_told: is_told @ false } = &mut entry.state {
                *is_told = true;
                records.push(*record);
            }
        }
        for record in records {
            self.send(pid, &FromMonitor::Event(Event::Exited(record)), &[]);
        }
    }

    fn answer(&mut self, pid: i32, number: u32, request: Request, descriptors: &[OwnedFd]) {
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        let is_greeted = monitor.connection().is_some();
        let done = match request {
            Request::Hello { .. } => return self.greet(pid, number),
            _ if !is_greeted => Err(Errno::EPROTO),
            Request::Start { container, pid: namespace, has_cgroup, .. } => {
                assert!(has_cgroup && descriptors.len() >= 2, "a start passes a record and a cgroup");
                let cgroup = object_of(descriptors[1].as_fd());
                match self.start(pid, number, container, &cgroup, namespace) {
                    Ok(()) => return,
                    refused => refused,
                }
            }
            Request::Process { container } => match monitor.containers.get(&container) {
                Some(Entry { pid: main, state: State::Running }) => {
                    let pidfd = descriptor(&main.to_string());
                    return self.send(pid, &FromMonitor::Reply { number, reply: Reply::Done }, &[pidfd]);
                }
                Some(Entry { state: State::Starting { .. }, .. }) => Err(Errno::EAGAIN),
                Some(Entry { state: State::Exited { .. }, .. }) | None => Err(Errno::ESRCH),
            },
            Request::Signal { container, signal } => match monitor.containers.get(&container) {
                Some(Entry { pid: main, state: State::Running | State::Starting { .. } }) => {
                    let main = *main;
                    // Some programs ignore their stop signal.
                    if signal != 0 && self.random.happens(600) {
                        self.kill(main, Exit::Signal(u8::try_from(signal).unwrap_or(0)));
                    }
                    Ok(())
                }
                Some(Entry { state: State::Exited { .. }, .. }) | None => Err(Errno::ESRCH),
            },
            Request::Forget { container } => match monitor.containers.get(&container) {
                Some(Entry { state: State::Running | State::Starting { .. }, .. }) => Err(Errno::EBUSY),
                Some(Entry { state: State::Exited { .. }, .. }) | None => {
                    monitor.containers.remove(&container);
                    if !monitor.has_lost_state {
                        let _ = self.disk.remove_file(&format!("{}/exits/{container}", monitor.directory));
                    }
                    Ok(())
                }
            },
            Request::ReplaceState => {
                self.replace_state(pid, descriptors);
                Ok(())
            }
            Request::Exec { .. }
            | Request::ReopenLog { .. }
            | Request::Shutdown
            | Request::Stdin { .. }
            | Request::Attach { .. }
            | Request::CloseStdin { .. }
            | Request::TcpSocket { .. }
            | Request::Resume { .. } => Err(Errno::ENOSYS),
        };
        let reply = match done {
            Ok(()) => Reply::Done,
            Err(errno) => Reply::Failed(Failure::Refused { errno: errno as i32 }),
        };
        self.reply(pid, number, reply);
    }

    fn replace_state(&mut self, pid: i32, descriptors: &[OwnedFd]) {
        let [socket, state] = descriptors else { panic!("the request passes a socket and a directory") };
        let Some(directory) = self.monitors.get(&pid).map(|monitor| monitor.directory.clone()) else {
            return;
        };
        let is_current = object_of(state.as_fd()) == self.state_number(&directory).to_string();
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        monitor.listener = socket.try_clone().ok();
        if is_current {
            monitor.has_lost_state = false;
            let _ = self.disk.create_dir_all(&format!("{directory}/exits"));
        }
    }

    fn greet(&mut self, pid: i32, number: u32) {
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        if let Some(errno) = monitor.setup {
            let failure = Failure::Operation { index: 0, errno: errno as i32 };
            self.reply(pid, number, Reply::Failed(failure));
            return self.kill(pid, Exit::Code(1));
        }
        if let Some((_, is_greeted)) = &mut monitor.connection {
            *is_greeted = true;
        }
        for entry in monitor.containers.values_mut() {
            if let State::Exited { is_told, .. } = &mut entry.state {
                *is_told = false;
            }
        }
        self.reply(pid, number, Reply::Hello { version: FRAMES_VERSION });
        self.tell(pid);
    }

    fn start(
        &mut self,
        pid: i32,
        number: u32,
        container: ContainerId,
        cgroup: &str,
        namespace: PidNamespace,
    ) -> Result<(), Errno> {
        let Some(monitor) = self.monitors.get(&pid) else { return Err(Errno::ESHUTDOWN) };
        if monitor.containers.contains_key(&container) {
            return Err(Errno::EEXIST);
        }
        if self.faults.errors > 0 && self.random.happens(20) {
            return Err(self.random.pick(&[Errno::EMFILE, Errno::ENOMEM, Errno::EAGAIN]));
        }
        if !self.cgroups.is_whole(cgroup) {
            return Err(Errno::ENODEV);
        }
        let main = self.clone_process(Role::Main(container), &entered(cgroup), pid);
        let facts = self.facts.entry(container).or_default();
        facts.clones += 1;
        if facts.clones > 1 {
            self.broken(format!("container {container:.13} is started a second time"));
        }
        if let Some(process) = self.processes.get_mut(&main) {
            process.has_namespace = namespace == PidNamespace::New;
        }
        if let Some(monitor) = self.monitors.get_mut(&pid) {
            monitor.containers.insert(container, Entry { pid: main, state: State::Starting { number } });
        }
        // The image may be on slow flash.
        let delay = match (self.exec_delay_ns, self.random.below(30)) {
            (Some(delay_ns), _) => delay_ns,
            (None, 0) => self.random.below(8 * S),
            (None, _) => 100 * US + self.random.below(5 * MS),
        };
        self.schedule(delay, Happening::Execs(pid, container));
        Ok(())
    }

    /// Handles the exec of a container's process, unless the process was killed before.
    pub(crate) fn container_executes(&mut self, pid: i32, container: ContainerId) {
        let main = self.processes.iter().find(|(_, process)| process.role == Role::Main(container));
        let Some((&main, process)) = main.filter(|(_, process)| !process.is_dying) else { return };
        let cgroups = process.cgroups.clone();
        if !self.works(pid, Happening::Execs(pid, container)) && self.monitors.contains_key(&pid) {
            return;
        }
        if self.faults.errors > 0 && self.random.happens(30) {
            self.processes.remove(&main);
            // No program has run, so it may be started again.
            self.facts.entry(container).or_default().clones -= 1;
            let entry = self.monitors.get_mut(&pid).and_then(|monitor| monitor.containers.remove(&container));
            if let Some(Entry { state: State::Starting { number }, .. }) = entry {
                let failure = Failure::Operation { index: 0, errno: Errno::ENOENT as i32 };
                self.reply(pid, number, Reply::Failed(failure));
            }
            return;
        }
        trace!(self, "container {container:.13} runs as process {main}");
        match &self.programs {
            Some(programs) => {
                if let Some(exit) = programs.get(&container).copied() {
                    self.schedule(MS, Happening::Ends(main, exit));
                }
            }
            None => self.run_program(container, main, &cgroups),
        }
        self.started(pid, container, main);
    }

    /// Runs a container's program: half of all programs end by themselves.
    fn run_program(&mut self, container: ContainerId, main: i32, cgroups: &[String; 2]) {
        if self.random.happens(300) {
            self.clone_process(Role::Child(container), cgroups, main);
        }
        if self.random.happens(500) {
            let exit = Exit::Code(self.random.below(4) as u8);
            let after = match self.random.below(3) {
                0 => self.random.below(MS),
                1 => self.random.below(S),
                _ => self.random.below(60 * S),
            };
            self.schedule(after, Happening::Ends(main, exit));
        }
    }

    /// Completes a start, because the process has called exec or was killed before: answers the daemon's
    /// request.
    fn started(&mut self, pid: i32, container: ContainerId, main: i32) {
        let entry = self.monitors.get_mut(&pid).and_then(|monitor| monitor.containers.get_mut(&container));
        let Some(entry) = entry else { return };
        if let State::Starting { number } = entry.state {
            entry.state = State::Running;
            let reply = FromMonitor::Reply { number, reply: Reply::Started };
            self.send(pid, &reply, &[descriptor(&main.to_string())]);
        }
    }

    /// Lets a monitor reap the main process of a container: the exit record is written before the daemon or a
    /// client is notified.
    pub(crate) fn monitor_reaps(&mut self, pid: i32, container: ContainerId, exit: Exit) {
        if !self.works(pid, Happening::Reaps(pid, container, exit)) {
            return;
        }
        let main = self.monitors.get(&pid).and_then(|monitor| monitor.containers.get(&container));
        let Some(main) = main.map(|entry| entry.pid) else { return };
        self.started(pid, container, main);
        let record = ExitRecord {
            container,
            exit,
            oom_killed: false,
            finished_at_ns: i64::try_from(self.wall_ns + self.now_ns).unwrap_or(i64::MAX),
            lost_log_lines: 0,
        };
        let Some(monitor) = self.monitors.get_mut(&pid) else { return };
        if let Some(entry) = monitor.containers.get_mut(&container) {
            entry.state = State::Exited { record, is_told: false };
        }
        let file = format!("{}/exits/{container}", monitor.directory);
        let has_lost_exit = monitor.has_lost_state;
        if !has_lost_exit {
            let _ = self.disk.write(&file, &exit_record_bytes(&record));
        }
        let facts = self.facts.entry(container).or_default();
        (facts.reaped_ns, facts.has_lost_exit) = (Some(self.now_ns), has_lost_exit);
        self.tell(pid);
    }
}
