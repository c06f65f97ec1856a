//! The event loop: waits for the daemon, signals, reports of children and output of containers, and dispatches each to
//! its module. The loop blocks only in epoll, never on a child during its set-up or on a daemon that does not read.
//!
//! At most one daemon is connected; a new connection replaces it. Events that do not fit into the socket are marked in
//! the table and sent when there is space. A daemon that leaves replies unread is disconnected; it reads the exit
//! records when it reconnects.

use core::mem::{self, MaybeUninit};

use coracle_sys::memory::Mapping;
use coracle_sys::process::{self, Clock, Control, SIGCHLD, SIGKILL, SIGTERM, Signals};
use coracle_sys::socket::{self, EPOLLIN, EPOLLOUT, EVENTS_MAX};
use coracle_sys::stack::FirstStack;
use coracle_sys::{Errno, Fd, FdRef};
use coracle_wire::{CONTAINERS_MAX, Event, FRAME_BYTES_MAX, FromMonitor, Reply};

use crate::child::{self, Failure};
use crate::exit_records;
use crate::init::Init;
use crate::keyring::KEYRING_NAME_BYTES;
use crate::output::MEMORY_BYTES;
use crate::table::{ContainerState, ExecState, Slot, Table};

/// Time without events in milliseconds after which memory is returned to the kernel.
const QUIET_MS: i32 = 1000;
/// Time in nanoseconds for which a monitor whose set-up failed waits for a daemon to read the reason.
const FAILED_SETUP_NS: i64 = 30_000_000_000;
/// Time limit in nanoseconds for the end of killed processes when the monitor ends; processes that stay in the kernel
/// for longer are then reparented to init.
const ENDING_NS: i64 = 10_000_000_000;
/// Time limit in nanoseconds for sending a reply. The monitor does nothing else during this time.
const SEND_LIMIT_NS: i64 = 100_000_000;
/// Pause in nanoseconds between two attempts to send.
pub(crate) const SEND_PAUSE_NS: i64 = 1_000_000;
/// The effective capabilities after the set-up, as a bit mask: CAP_KILL, to signal processes of every user, and
/// CAP_SYS_ADMIN, to clone into new PID namespaces. The monitor's children use all others.
const EFFECTIVE: u64 = 1 << 5 | 1 << 21;
const EVERY_SIGNAL: Signals = Signals::MAX;

/// Source of an event: encoded in the token's second byte, with a slot in the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Listener,
    Connection,
    Signals,
    ContainerReport(Slot),
    ExecReport(Slot),
    /// Stream 0 or 1 of the container in a slot.
    Output(Slot, usize),
}

impl Source {
    /// Encodes the source as an epoll token.
    pub(crate) fn token(self) -> u64 {
        let (kind, slot) = match self {
            Self::Listener => (0, 0),
            Self::Connection => (1, 0),
            Self::Signals => (2, 0),
            Self::ContainerReport(slot) => (3, slot),
            Self::ExecReport(slot) => (4, slot),
            Self::Output(slot, stream) => (5 + stream as u64, slot),
        };
        kind << 8 | u64::from(slot)
    }

    fn from_token(token: u64) -> Self {
        let slot = token as Slot;
        match token >> 8 {
            0 => Self::Listener,
            1 => Self::Connection,
            2 => Self::Signals,
            3 => Self::ContainerReport(slot),
            4 => Self::ExecReport(slot),
            kind => Self::Output(slot, usize::from(kind != 5)),
        }
    }
}

/// Phases of the monitor.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    Serving,
    /// The setup record failed; the monitor reports the reason to a daemon, then exits.
    Failed {
        failure: Failure,
        until_ns: i64,
    },
    /// All processes have been killed and are being reaped.
    Ending {
        until_ns: i64,
    },
}

/// The connection to the daemon.
pub(crate) struct Connection {
    pub(crate) socket: Fd,
    /// Whether the daemon has sent Hello; events are sent only after that.
    pub(crate) is_greeted: bool,
    /// Whether events must wait for space in the socket.
    waits_for_room: bool,
}

/// The state of the monitor.
pub(crate) struct Monitor<'t> {
    pub(crate) table: &'t mut Table,
    pub(crate) epoll: FdRef<'static>,
    pub(crate) state: Fd,
    /// The pod's user namespace; `None` if the pod has none.
    pub(crate) user: Option<Fd>,
    /// The first process of the PID namespace that containers share; `None` if they share none.
    pub(crate) init: Option<Init>,
    listener: Fd,
    signals: Fd,
    pub(crate) connection: Option<Connection>,
    pub(crate) memory: Mapping,
    /// The permitted capabilities as a bit mask, which children make effective to set up containers.
    pub(crate) permitted: u64,
    /// Whether pages of `memory` may be in use.
    pub(crate) is_memory_used: bool,
    pub(crate) phase: Phase,
}

/// Descriptors that the daemon passes to a monitor.
pub struct Inherited {
    /// A listening SOCK_SEQPACKET socket.
    pub listener: Fd,
    /// The pod's state directory.
    pub state: Fd,
    /// A sealed memfd with the setup record.
    pub setup: Fd,
    /// The pod's user namespace; `None` if the pod has none.
    pub user: Option<Fd>,
}

/// Runs a monitor until its exit, starting with an empty table.
pub fn run(table: &mut Table, stack: &FirstStack, inherited: Inherited) -> ! {
    match Monitor::new(table, inherited).and_then(|mut monitor| monitor.serve(stack)) {
        Ok(()) => process::exit(0),
        Err(errno) => process::exit(errno.0 as u8),
    }
}

impl<'t> Monitor<'t> {
    // Its own frame, as for `handle`.
    #[inline(never)]
    fn new(table: &'t mut Table, inherited: Inherited) -> Result<Self, Errno> {
        let Inherited { listener, state, setup, user } = inherited;
        process::set_name(c"coracle-pod")?;
        // Blocked signals neither end nor interrupt the monitor; children reset them (see `launch`).
        process::reset_signal_handlers();
        process::set_signal_mask(EVERY_SIGNAL)?;
        process::control(Control::NotDumpable)?;
        process::control(Control::Subreaper)?;
        match process::new_session() {
            // The process is already a session leader.
            Err(Errno::EPERM) => {}
            made => made?,
        }
        let set_up = child::set_up(setup.borrow());
        drop(setup);
        let prepared = exit_records::prepare(state.borrow()).map_err(|errno| Failure { index: 0, errno });
        let (init, phase) = match prepared.and(set_up) {
            Ok(init) => (init, Phase::Serving),
            Err(failure) => (None, Phase::Failed { failure, until_ns: later(FAILED_SETUP_NS) }),
        };
        // The descriptor stays open for the lifetime of the monitor.
        let epoll = socket::epoll()?.leak();
        let signals = socket::signal_fd(process::signals(SIGCHLD) | process::signals(SIGTERM))?;
        socket::watch(epoll, listener.borrow(), EPOLLIN, Source::Listener.token())?;
        socket::watch(epoll, signals.borrow(), EPOLLIN, Source::Signals.token())?;
        // Output and keyring names of containers, which children must not see.
        let memory = Mapping::anonymous(MEMORY_BYTES + KEYRING_NAME_BYTES * CONTAINERS_MAX)?;
        memory.wipe_in_children()?;
        let permitted = process::permitted_capabilities()?;
        process::set_capabilities(permitted & EFFECTIVE, permitted, 0)?;
        let is_memory_used = false;
        let connection = None;
        Ok(Self {
            table,
            epoll,
            state,
            user,
            init,
            listener,
            signals,
            connection,
            memory,
            is_memory_used,
            permitted,
            phase,
        })
    }

    fn serve(&mut self, stack: &FirstStack) -> Result<(), Errno> {
        // The setup and requests use more of the stack than output does. Each page is a fifth of a monitor's memory, but
        // between the events of one exec they would be returned only to be faulted in again.
        let mut is_stack_used = true;
        while !self.is_done() {
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            let events = socket::wait(self.epoll, &mut events, self.timeout_ms(is_stack_used))?;
            if events.is_empty() {
                self.give_back_memory();
            }
            let is_output =
                |event: &socket::Event| matches!(Source::from_token(event.data.u64()), Source::Output(..));
            if events.iter().all(is_output) && mem::take(&mut is_stack_used) {
                stack.forget_deeper();
            }
            for event in events {
                is_stack_used |= !is_output(event);
                self.handle(event);
            }
        }
        Ok(())
    }

    // Its own frame, which is gone while the monitor waits: see `FirstStack::forget_deeper`.
    #[inline(never)]
    fn handle(&mut self, event: &socket::Event) {
        match Source::from_token(event.data.u64()) {
            Source::Listener => self.accept(),
            Source::Connection => {
                if socket::is_writable(event) {
                    self.tell();
                }
                if socket::is_readable(event) {
                    self.answer();
                }
            }
            Source::Signals => self.take_signals(),
            Source::ContainerReport(slot) => self.container_report(slot),
            Source::ExecReport(slot) => self.exec_report(slot),
            Source::Output(slot, stream) => self.read_output(slot, stream),
        }
    }

    /// Serves on another socket and writes exit records to another directory, because another program has removed those of
    /// the pod's start.
    #[inline(never)]
    pub(crate) fn replace_state(&mut self, listener: Fd, state: Fd) -> Result<(), Errno> {
        exit_records::prepare(state.borrow())?;
        socket::watch(self.epoll, listener.borrow(), EPOLLIN, Source::Listener.token())?;
        // Closing the old socket ends its watch.
        (self.listener, self.state) = (listener, state);
        Ok(())
    }

    fn is_done(&self) -> bool {
        match self.phase {
            Phase::Serving => false,
            Phase::Failed { until_ns, .. } => is_over(until_ns),
            Phase::Ending { until_ns } => {
                !self.table.has_processes() && self.init.is_none() || is_over(until_ns)
            }
        }
    }

    fn timeout_ms(&self, is_stack_used: bool) -> i32 {
        let is_timed = is_stack_used || self.is_memory_used || !matches!(self.phase, Phase::Serving);
        if is_timed { QUIET_MS } else { -1 }
    }

    fn take_signals(&mut self) {
        while let Some(signal) = socket::next_signal(self.signals.borrow()) {
            match signal {
                SIGCHLD => self.reap(),
                _ => self.end(),
            }
        }
    }

    /// Kills all processes; the loop ends when they have been reaped.
    pub(crate) fn end(&mut self) {
        if matches!(self.phase, Phase::Ending { .. }) {
            return;
        }
        self.phase = Phase::Ending { until_ns: later(ENDING_NS) };
        self.adopt_second_processes();
        let containers = self.table.containers.iter().filter(|container| container.is_alive());
        let execs = self.table.execs.iter().filter(|exec| exec.is_alive());
        let init = self.init.iter().map(|init| &init.pidfd);
        let processes = containers.map(|container| &container.pidfd).chain(execs.map(|exec| &exec.pidfd));
        // When the first process of a PID namespace ends, the kernel kills all others in it, including orphans.
        for process in processes.chain(init) {
            // ESRCH: the process has just ended by itself.
            let _ = process::pidfd_signal(process.borrow(), SIGKILL);
        }
    }

    fn accept(&mut self) {
        let Ok(socket) = socket::accept(self.listener.borrow()) else { return };
        self.disconnect();
        let watch = || socket::watch(self.epoll, socket.borrow(), EPOLLIN, Source::Connection.token());
        // A second time, because the daemon would treat a new pod whose first connection is closed as failed.
        if watch().or_else(|_| watch()).is_ok() {
            self.connection = Some(Connection { socket, is_greeted: false, waits_for_room: false });
        }
    }

    /// Closes the connection to the daemon.
    pub(crate) fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            unwatch(self.epoll, &connection.socket);
        }
        self.table.forget_requesters();
        self.table.forget_ended_execs();
    }

    /// Sends the reply to request `number`; a daemon that does not read its replies is disconnected.
    pub(crate) fn reply(&mut self, number: u32, reply: Reply, descriptors: &[FdRef<'_>]) {
        if self.try_reply(number, reply, descriptors).is_err() {
            self.disconnect();
        }
    }

    /// Sends the answer to request `number`; if this fails, the caller must disconnect. For descriptors that are
    /// borrowed from the table, with which [`Monitor::reply`] cannot be called because it may change the table.
    pub(crate) fn try_reply(
        &self,
        number: u32,
        reply: Reply,
        descriptors: &[FdRef<'_>],
    ) -> Result<(), Errno> {
        let Some(connection) = self.connection.as_ref().filter(|_| number != 0) else { return Ok(()) };
        send_in_time(connection, &FromMonitor::Reply { number, reply }, descriptors)
    }

    /// Sends pending events (ends of containers and execs) to the daemon as long as its socket has space.
    pub(crate) fn tell(&mut self) {
        let told = match &self.connection {
            Some(connection) if connection.is_greeted => tell_all(connection, self.table),
            // Ids of execs are known only to the daemon that chose them.
            _ => {
                self.table.forget_ended_execs();
                return;
            }
        };
        let waits = match told {
            Ok(()) => false,
            Err(Errno::EAGAIN) => true,
            // The socket stays writable, so the next try follows at once.
            Err(Errno::ENOMEM | Errno::ENOBUFS) => {
                process::pause(SEND_PAUSE_NS);
                true
            }
            Err(_) => return self.disconnect(),
        };
        let Some(connection) = &mut self.connection else { return };
        if waits != connection.waits_for_room {
            connection.waits_for_room = waits;
            let events = if waits { EPOLLIN | EPOLLOUT } else { EPOLLIN };
            let token = Source::Connection.token();
            let _ = socket::watch_for(self.epoll, connection.socket.borrow(), events, token);
        }
    }
}

/// Sends events until all are sent or the socket is full.
fn tell_all(connection: &Connection, table: &mut Table) -> Result<(), Errno> {
    for container in &mut table.containers {
        if let ContainerState::Exited { record, is_told: is_told @ false } = &mut container.state {
            send(connection, &FromMonitor::Event(Event::Exited(*record)), &[])?;
            *is_told = true;
        }
    }
    while let Some(index) = table.execs.iter().position(|exec| !exec.is_alive()) {
        if let ExecState::Ended(exit) = table.execs[index].state {
            send(
                connection,
                &FromMonitor::Event(Event::ExecExited { exec: table.execs[index].id, exit }),
                &[],
            )?;
        }
        table.execs.swap_remove(index);
    }
    Ok(())
}

/// Sends a frame. While the socket is full or the kernel has no memory, sending is retried for
/// [`SEND_LIMIT_NS`]: closing the connection would lose the replies to all other requests.
fn send_in_time(
    connection: &Connection,
    frame: &FromMonitor,
    descriptors: &[FdRef<'_>],
) -> Result<(), Errno> {
    let until_ns = later(SEND_LIMIT_NS);
    loop {
        match send(connection, frame, descriptors) {
            Err(Errno::EAGAIN | Errno::ENOMEM | Errno::ENOBUFS) if !is_over(until_ns) => {
                process::pause(SEND_PAUSE_NS);
            }
            sent => return sent,
        }
    }
}

fn send(connection: &Connection, frame: &FromMonitor, descriptors: &[FdRef<'_>]) -> Result<(), Errno> {
    let mut buffer = [0; FRAME_BYTES_MAX];
    let bytes = postcard::to_slice(frame, &mut buffer).map_err(|_| Errno::EMSGSIZE)?;
    socket::send(connection.socket.borrow(), bytes, descriptors)
}

/// Unregisters `file` from epoll, before it is closed: a copy in a child would keep the registration. ENOENT means that
/// it was not registered.
pub(crate) fn unwatch(epoll: FdRef<'_>, file: &Fd) {
    let _ = socket::unwatch(epoll, file.borrow());
}

fn later(after_ns: i64) -> i64 {
    process::now_ns(Clock::Monotonic).saturating_add(after_ns)
}

fn is_over(until_ns: i64) -> bool {
    process::now_ns(Clock::Monotonic) >= until_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_survives_encoding_as_a_token() {
        let sources = [
            Source::Listener,
            Source::Connection,
            Source::Signals,
            Source::ContainerReport(63),
            Source::ExecReport(127),
            Source::Output(0, 0),
            Source::Output(63, 1),
        ];
        for source in sources {
            assert_eq!(Source::from_token(source.token()), source);
        }
    }
}
