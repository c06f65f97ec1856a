//! Starts processes: prepares pipes, clones a child, and records its state. The child's part is in `launch` and
//! `child`; it reports over a pipe, and the reports are handled here.

use coracle_sys::process::{self, Clone};
use coracle_sys::sibling::SiblingPid;
use coracle_sys::socket::{self, EPOLLIN};
use coracle_sys::{Errno, Fd, FdRef, fs};
use coracle_wire::{ContainerId, ExecId, PidNamespace, Reply, Streams};

use crate::answer::Descriptors;
use crate::child::{FAILURE_BYTES, Failure};
use crate::keyring::KEYRING_NAME_BYTES;
use crate::launch::{self, Destination, Launch, Proc, Second, Steps, lend};
use crate::log::Writer;
use crate::namespaces::{self, ContainerNamespaces, MOUNTS};
use crate::oom::Counter;
use crate::output::MEMORY_BYTES;
use crate::second;
use crate::serve::{Monitor, Phase, Source, unwatch};
use crate::table::{Container, ContainerState, Exec, ExecState, Output, STREAMS, Slot, Starting};

/// Maximum number of attempts to read a report again after an error.
const REPORT_TRIES: u32 = 8;

/// The parameters of `Request::Start`.
pub(crate) struct Asked {
    pub(crate) container: ContainerId,
    pub(crate) streams: Streams,
    pub(crate) pid: PidNamespace,
    pub(crate) has_cgroup: bool,
    pub(crate) has_oom_counter: bool,
}

/// The report pipe and the socket pair between the monitor and a child.
struct Line {
    starting: Starting,
    report: Fd,
    terminal: Fd,
}

/// The standard streams of a container: the child's ends and the monitor's ends.
struct Standard {
    child: [Fd; 3],
    stdin: Option<Fd>,
    outputs: [Option<Output>; STREAMS],
}

/// The PID namespace of a new container.
struct Pids<'a> {
    /// pidfd of a process that is already in the namespace; `None` for a new namespace or the monitor's.
    beside: Option<FdRef<'a>>,
    /// The procfs that the start mounts.
    proc: Proc,
    /// Whether the namespace differs from the monitor's and the pod's.
    is_own: bool,
    /// The mount namespace of the container to which the PID namespace belongs; `None` if it belongs to none.
    target: Option<FdRef<'a>>,
}

/// The state of the report pipe.
enum Report {
    Nothing,
    Waits,
    Executed,
    Failed(Failure),
}

impl Monitor<'_> {
    /// Starts a container; the reply is sent when the child's report arrives.
    ///
    /// # Errors
    /// Those of `Request::Start`; ESHUTDOWN if the monitor is ending.
    pub(crate) fn start(
        &mut self,
        number: u32,
        asked: &Asked,
        descriptors: &mut Descriptors,
    ) -> Result<(), Errno> {
        if self.table.container(&asked.container).is_some() {
            return Err(Errno::EEXIST);
        }
        let slot = self.slot(self.table.free_container())?;
        self.name_keyring(slot)?;
        let record = descriptors.take()?;
        let log = descriptors.take_if(asked.streams.log)?;
        let cgroup = descriptors.take_if(asked.has_cgroup)?;
        let oom = descriptors.take_if(asked.has_oom_counter)?.map(Counter::new);
        if oom.is_some() {
            self.table.count_oom_kills(cgroup.as_ref().map(Fd::borrow));
        }
        // The remaining descriptor, if the record needs it, is the host's mount namespace.
        let host = descriptors.take().ok();
        let Pids { beside, proc, is_own: has_own_pids, target } = self.pids(&asked.pid)?;
        let second = if beside.is_some() { Some(self.second_pid()?) } else { None };
        let line = self.line(number, Source::ContainerReport(slot), second)?;
        let standard = self.standard(slot, asked.streams)?;
        let launch = Launch {
            record: record.borrow(),
            standard: standard.child.each_ref().map(Fd::borrow),
            report: line.report.borrow(),
            terminal: line.terminal.borrow(),
            home: Destination::New { host: lend(&host), user: lend(&self.user), target },
            steps: match (beside, &line.starting.second, proc) {
                (Some(beside), Some(pid), Proc::None) => Steps::SecondWalks(Second { beside, pid }),
                (Some(beside), Some(pid), proc) => {
                    Steps::SecondExecs { second: Second { beside, pid }, proc }
                }
                (_, _, _) => Steps::One,
            },
            permitted: self.permitted,
        };
        let namespaces = if asked.pid == PidNamespace::New { process::CLONE_NEWPID } else { 0 };
        let name = self.memory.get(keyring_range(slot)).ok_or(Errno::EINVAL)?;
        socket::send(line.starting.terminal.borrow(), name, &[])?;
        let (pid, pidfd) = clone(namespaces, cgroup.as_ref().map(Fd::borrow), &launch)?;
        let Line { starting, .. } = line;
        let container = Container {
            id: asked.container,
            slot,
            pid,
            pidfd,
            state: ContainerState::Starting(starting),
            has_own_pids,
            home: ContainerNamespaces::default(),
            outputs: standard.outputs,
            log,
            writer: Writer::default(),
            stdin: standard.stdin,
            oom,
        };
        // A slot is free, so there is space.
        self.table.containers.push(container).map_err(|_| Errno::EAGAIN)
    }

    /// Selects the PID namespace of a container.
    fn pids(&self, asked: &PidNamespace) -> Result<Pids<'_>, Errno> {
        let shared = self.init.as_ref().map(|init| init.pidfd.borrow());
        let target = match asked {
            PidNamespace::Monitor => {
                return Ok(Pids { beside: shared, proc: Proc::OfPod, is_own: false, target: None });
            }
            PidNamespace::New => {
                return Ok(Pids { beside: None, proc: Proc::None, is_own: true, target: None });
            }
            PidNamespace::Of(other) => self.table.running(other).ok_or(Errno::ESRCH)?,
        };
        if !target.has_own_pids {
            return self.pids(&PidNamespace::Monitor);
        }
        // In a mount namespace of a user namespace, a mount cannot be cloned without its submounts.
        let proc = match self.user {
            Some(_) => Proc::None,
            None => Proc::OfTarget(target.home.proc.ok_or(Errno::ENOENT)?),
        };
        let mounts = lend(&target.home.namespaces[MOUNTS]);
        Ok(Pids { beside: Some(target.pidfd.borrow()), proc, is_own: true, target: mounts })
    }

    /// Starts an exec; the reply is sent when the child's report arrives.
    pub(crate) fn exec(
        &mut self,
        number: u32,
        (exec, container): (ExecId, &ContainerId),
        has_cgroup: bool,
        descriptors: &mut Descriptors,
    ) -> Result<(), Errno> {
        if self.table.execs.iter().any(|other| other.id == exec) {
            return Err(Errno::EEXIST);
        }
        let slot = self.slot(self.table.free_exec())?;
        let record = descriptors.take()?;
        let standard = [descriptors.take()?, descriptors.take()?, descriptors.take()?];
        let cgroup = descriptors.take_if(has_cgroup)?;
        let main = self.table.running(container).ok_or(Errno::ESRCH)?;
        // In the node's PID namespace one step is enough.
        let has_two_steps = main.has_own_pids || self.init.is_some();
        let (name, namespaces) = (main.slot, main.home.namespaces.each_ref().map(lend));
        let main = main.pidfd.borrow();
        let second = if has_two_steps { Some(self.second_pid()?) } else { None };
        let line = self.line(number, Source::ExecReport(slot), second)?;
        let launch = Launch {
            record: record.borrow(),
            standard: standard.each_ref().map(Fd::borrow),
            report: line.report.borrow(),
            terminal: line.terminal.borrow(),
            home: Destination::Existing { namespaces, user: lend(&self.user) },
            steps: match &line.starting.second {
                Some(pid) => Steps::SecondExecs { second: Second { beside: main, pid }, proc: Proc::None },
                None => Steps::One,
            },
            permitted: self.permitted,
        };
        let name = self.memory.get(keyring_range(name)).ok_or(Errno::EINVAL)?;
        socket::send(line.starting.terminal.borrow(), name, &[])?;
        let (pid, pidfd) = clone(0, cgroup.as_ref().map(Fd::borrow), &launch)?;
        let Line { starting, .. } = line;
        let exec = Exec { id: exec, slot, pid, pidfd, state: ExecState::Starting(starting) };
        self.table.execs.push(exec).map_err(|_| Errno::EAGAIN)
    }

    /// Generates the keyring name of the container in `slot`.
    ///
    /// # Errors
    /// EAGAIN early during boot.
    fn name_keyring(&mut self, slot: Slot) -> Result<(), Errno> {
        let (names, _) = self.memory[keyring_range(slot)].as_chunks_mut();
        names.first_mut().ok_or(Errno::EINVAL).and_then(process::random)
    }

    fn slot(&self, free: Option<Slot>) -> Result<Slot, Errno> {
        match self.phase {
            Phase::Serving => free.ok_or(Errno::EAGAIN),
            Phase::Failed { .. } | Phase::Ending { .. } => Err(Errno::ESHUTDOWN),
        }
    }

    /// Memory for the PID of a second process; that of an earlier start is reused.
    fn second_pid(&self) -> Result<SiblingPid, Errno> {
        match self.table.spare.take() {
            Some(spare) => spare.renew().map(|()| spare),
            None => SiblingPid::new(),
        }
    }

    fn line(&self, number: u32, source: Source, second: Option<SiblingPid>) -> Result<Line, Errno> {
        // The writes into the empty pipe do not block.
        let (ours, report) = fs::nonblocking_pipe()?;
        let (terminal, theirs) = socket::seqpacket_pair()?;
        socket::watch(self.epoll, ours.borrow(), EPOLLIN, source.token())?;
        let starting = Starting {
            number,
            report: ours,
            terminal,
            failure: None,
            is_waiting: false,
            second,
            ended: None,
        };
        Ok(Line { starting, report, terminal: theirs })
    }

    fn standard(&self, slot: Slot, streams: Streams) -> Result<Standard, Errno> {
        let null = || fs::open(FdRef::WORKING_DIRECTORY, c"/dev/null", fs::O_RDWR, 0);
        if streams.tty {
            // They are replaced by the terminal later.
            return Ok(Standard { child: [null()?, null()?, null()?], stdin: None, outputs: [None, None] });
        }
        let (reader, stdin) = if streams.stdin {
            let (reader, writer) = fs::pipe()?;
            (reader, Some(writer))
        } else {
            (null()?, None)
        };
        let (stdout, stdout_writer) = fs::pipe()?;
        let (stderr, stderr_writer) = fs::pipe()?;
        let outputs = [Some(self.output(slot, 0, stdout)?), Some(self.output(slot, 1, stderr)?)];
        Ok(Standard { child: [reader, stdout_writer, stderr_writer], stdin, outputs })
    }

    fn output(&self, slot: Slot, stream: usize, file: Fd) -> Result<Output, Errno> {
        fs::set_nonblocking(file.borrow())?;
        socket::watch(self.epoll, file.borrow(), EPOLLIN, Source::Output(slot, stream).token())?;
        Ok(Output { file, held: 0, held_max: 0 })
    }

    /// Handles the report of a container's process: it has called exec, waits, or failed.
    pub(crate) fn container_report(&mut self, slot: Slot) {
        let mut containers = self.table.containers.iter_mut();
        let Some(container) = containers.find(|container| container.slot == slot) else { return };
        let ContainerState::Starting(starting) = &mut container.state else { return };
        second::adopt(starting, (&mut container.pid, &mut container.pidfd), &self.table.spare);
        if starting.ended.is_some() || starting.failure.is_some() {
            return; // it has ended: the reply is sent when its last process has been reaped
        }
        match read_report(self.epoll, starting) {
            Report::Nothing => {}
            Report::Waits => {
                starting.is_waiting = true;
                let number = core::mem::take(&mut starting.number);
                self.reply_with_process(number, Reply::Waiting, slot);
            }
            Report::Failed(failure) => {
                starting.failure = Some(failure);
                end_failed(&container.pidfd);
            }
            Report::Executed => {
                let number = starting.number;
                let told = namespaces::receive(starting.terminal.borrow());
                container.state = ContainerState::Running;
                container.home = told.home;
                if let Some(master) = told.terminal {
                    self.keep_terminal(slot, master);
                }
                self.reply_with_process(number, Reply::Started, slot);
            }
        }
    }

    /// Replies with the pidfd of a container's process.
    fn reply_with_process(&mut self, number: u32, reply: Reply, slot: Slot) {
        let mut containers = self.table.containers.iter();
        let Some(container) = containers.find(|container| container.slot == slot) else { return };
        if self.try_reply(number, reply, &[container.pidfd.borrow()]).is_err() {
            self.disconnect();
        }
    }

    /// Resumes a waiting process; the reply is sent when its next report arrives.
    pub(crate) fn resume(&mut self, number: u32, id: &ContainerId) -> Result<(), Errno> {
        let container = self.table.container(id).ok_or(Errno::ESRCH)?;
        let ContainerState::Starting(starting) = &mut container.state else { return Err(Errno::ESRCH) };
        if !starting.is_waiting {
            return Err(Errno::ESRCH);
        }
        socket::send(starting.terminal.borrow(), b"g", &[])?;
        starting.is_waiting = false;
        starting.number = number;
        Ok(())
    }

    /// Stores the master side of a terminal, which is both the container's output and its standard input.
    fn keep_terminal(&mut self, slot: Slot, master: Fd) {
        let kept = fs::duplicate(master.borrow(), 3).ok();
        let output = self.output(slot, 0, master).ok();
        let mut containers = self.table.containers.iter_mut();
        if let Some(container) = containers.find(|container| container.slot == slot) {
            container.outputs[0] = output;
            container.stdin = kept;
        }
    }

    /// Handles the report of an exec's process: it has called exec or failed.
    pub(crate) fn exec_report(&mut self, slot: Slot) {
        let Some(exec) = self.table.execs.iter_mut().find(|exec| exec.slot == slot) else { return };
        let ExecState::Starting(starting) = &mut exec.state else { return };
        second::adopt(starting, (&mut exec.pid, &mut exec.pidfd), &self.table.spare);
        if starting.ended.is_some() || starting.failure.is_some() {
            return; // it has ended: the reply is sent when its last process has been reaped
        }
        match read_report(self.epoll, starting) {
            Report::Nothing | Report::Waits => {}
            Report::Failed(failure) => {
                starting.failure = Some(failure);
                end_failed(&exec.pidfd);
            }
            Report::Executed => {
                let number = starting.number;
                let master = namespaces::receive(starting.terminal.borrow()).terminal;
                exec.state = ExecState::Running;
                self.reply_with_exec(number, slot, master);
            }
        }
    }

    /// Replies with the pidfd of an exec, and with its terminal if it has one.
    fn reply_with_exec(&mut self, number: u32, slot: Slot, master: Option<Fd>) {
        let Some(exec) = self.table.execs.iter().find(|exec| exec.slot == slot) else { return };
        let pidfd = exec.pidfd.borrow();
        let sent = match &master {
            Some(master) => self.try_reply(number, Reply::Started, &[pidfd, master.borrow()]),
            None => self.try_reply(number, Reply::Started, &[pidfd]),
        };
        if sent.is_err() {
            self.disconnect();
        }
    }
}

/// The range of a container's keyring name in the monitor's memory.
fn keyring_range(slot: Slot) -> core::ops::Range<usize> {
    let start = MEMORY_BYTES + usize::from(slot) * KEYRING_NAME_BYTES;
    start..start + KEYRING_NAME_BYTES
}

/// Clones a process that runs `launch`.
fn clone(namespaces: u64, cgroup: Option<FdRef<'_>>, launch: &Launch<'_>) -> Result<(i32, Fd), Errno> {
    match process::clone(namespaces, cgroup)? {
        Clone::Child => launch::run(launch),
        Clone::Parent { pid, pidfd } => {
            if let Steps::SecondWalks(second) | Steps::SecondExecs { second, .. } = launch.steps {
                // This cannot fail for the monitor's own mapping; if it did, later children would only see a pid.
                let _ = second.pid.hide_from_children();
            }
            Ok((pid, pidfd))
        }
    }
}

/// Kills a process that has reported a failure. Such a process exits by itself, unless a tracer (CAP_SYS_PTRACE) has
/// forged the report; the process would then continue to run in a container that never started.
fn end_failed(pidfd: &Fd) {
    let _ = process::pidfd_signal(pidfd.borrow(), process::SIGKILL);
}

fn read_report(epoll: FdRef<'_>, starting: &Starting) -> Report {
    let mut bytes = [0; FAILURE_BYTES];
    // The only report of a process that has ended may be left to read: it is not left unread because of one error.
    let mut read = fs::read(starting.report.borrow(), &mut bytes);
    for _ in 0..REPORT_TRIES {
        match read {
            Ok(_) | Err(Errno::EAGAIN) => break,
            Err(_) => read = fs::read(starting.report.borrow(), &mut bytes),
        }
    }
    match read {
        Err(_) => Report::Nothing,
        Ok(0) if starting.failure.is_some() => Report::Nothing,
        Ok(0) => {
            unwatch(epoll, &starting.report);
            Report::Executed
        }
        // A failure is longer and written with one call.
        Ok(1) => Report::Waits,
        Ok(_) => {
            unwatch(epoll, &starting.report);
            Report::Failed(Failure::from_bytes(bytes))
        }
    }
}
