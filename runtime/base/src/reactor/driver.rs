//! The tables of the event loop: descriptors with their waiting tasks, timers, and the `epoll_wait` call.
//!
//! Each descriptor is registered edge-triggered, first for reading only and from its first wait for a write on for
//! both directions: a socket reports free space each time its peer reads, which would wake the daemon after every
//! answer. Events reach the tables only in [`Driver::turn`], between polls of tasks, so a task that got `EAGAIN` and
//! registers before it returns cannot miss an event. No waker is woken or dropped while a table is borrowed, because
//! either can run a task's destructor, which uses the tables.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::holds::{Holds, Turns};
use crate::time;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Maximum number of events per `epoll_wait`; the next call returns further events. 64 events take 768 bytes.
const EVENTS_PER_TURN: usize = 64;

/// A direction of a descriptor: reading or writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Direction {
    /// The epoll events after which a call in this direction may succeed; errors and hang-ups are reported by
    /// the call itself.
    fn wakes_on(self) -> EpollFlags {
        let ends = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
        match self {
            Direction::Read => ends | EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLPRI,
            Direction::Write => ends | EpollFlags::EPOLLOUT,
        }
    }
}

/// Identifies a registration. The generation distinguishes late events of a closed descriptor from events of
/// the descriptor that reuses its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    index: u32,
    generation: u32,
}

impl Token {
    fn to_data(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    fn from_data(data: u64) -> Token {
        Token { index: data as u32, generation: (data >> 32) as u32 }
    }
}

/// Identifies a waiter of a descriptor, or a timer.
pub(super) type WaitId = u64;

/// The waiter that polls a descriptor through futures-io or hyper; only the latest one per direction is kept.
pub(super) const POLLER: WaitId = 0;

#[derive(Default)]
struct Side {
    /// Number of events so far. A waiter is ready when the number differs from that at the beginning of its
    /// wait.
    edges: u32,
    waiters: Vec<(WaitId, Waker)>,
}

impl Side {
    /// Counts an event, and moves the wakers of all that wait for it to `ready`.
    fn report(&mut self, ready: &mut Vec<Waker>) {
        self.edges = self.edges.wrapping_add(1);
        ready.extend(self.waiters.drain(..).map(|(_, waker)| waker));
    }
}

#[derive(Default)]
struct Source {
    read: Side,
    write: Side,
    /// Whether the descriptor is registered for writing, too.
    reports_writes: bool,
}

impl Source {
    fn side(&mut self, direction: Direction) -> &mut Side {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }
}

/// The registered descriptors. Slots are reused; their number is limited by the process's limit of open
/// files.
#[derive(Default)]
struct Sources {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    source: Option<Source>,
}

impl Sources {
    fn insert(&mut self) -> Token {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.source = Some(Source::default());
        Token { index, generation: slot.generation }
    }

    fn get(&mut self, token: Token) -> Option<&mut Source> {
        let slot = self.slots.get_mut(token.index as usize)?;
        if slot.generation == token.generation { slot.source.as_mut() } else { None }
    }

    fn remove(&mut self, token: Token) -> Option<Source> {
        let slot =
            self.slots.get_mut(token.index as usize).filter(|slot| slot.generation == token.generation)?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(token.index);
        slot.source.take()
    }

    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

pub(super) struct Driver {
    epoll: Epoll,
    sources: RefCell<Sources>,
    /// Wakers by time and ID, so that keys are unique and timers with equal times keep their order.
    timers: RefCell<BTreeMap<(Instant, WaitId), Waker>>,
    next_id: Cell<WaitId>,
    turns: Cell<u64>,
    times: Turns,
    /// Called before the next wait for events without other work.
    before_sleep: Cell<Option<fn()>>,
    /// Buffer that is reused between turns to avoid allocations.
    ready: RefCell<Vec<Waker>>,
}

impl Driver {
    pub(super) fn new() -> io::Result<Driver> {
        Ok(Driver {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            sources: RefCell::default(),
            timers: RefCell::default(),
            next_id: Cell::new(POLLER + 1),
            turns: Cell::new(0),
            times: Turns::new(),
            before_sleep: Cell::new(None),
            ready: RefCell::default(),
        })
    }

    pub(super) fn before_sleep(&self, action: fn()) {
        self.before_sleep.set(Some(action));
    }

    /// Whether the turn in progress has lasted for so long that it must end. A simulated node has no such turns: its
    /// histories follow from their seed, and not from the time that they take.
    pub(super) fn is_turn_over(&self) -> bool {
        #[cfg(feature = "simulation")]
        if coracle_sandbox::simulation::node().is_some() {
            return false;
        }
        self.times.is_over()
    }

    /// The times of the turns so far.
    pub(super) fn holds(&self) -> Holds {
        self.times.holds()
    }

    /// Calls `epoll_wait` once: without blocking, or (`may_sleep`) until a descriptor or a timer is ready.
    /// Wakes the ready waiters.
    ///
    /// # Panics
    /// If `epoll_wait` fails for any reason other than a signal, which can only be a defect of coracle.
    pub(super) fn turn(&self, may_sleep: bool) {
        self.turns.set(self.turns.get().wrapping_add(1));
        #[cfg(feature = "simulation")]
        let may_sleep = !self.rest_in_simulation(may_sleep) && may_sleep;
        let timeout = if may_sleep { self.until_next_timer() } else { EpollTimeout::ZERO };
        let mut events = [EpollEvent::empty(); EVENTS_PER_TURN];
        self.times.end();
        // Directly before the wait: code that runs in between would be mapped again.
        if may_sleep && let Some(action) = self.before_sleep.take() {
            action();
        }
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => panic!("epoll_wait: {errno}"),
        };
        self.times.begin();
        let mut ready = std::mem::take(&mut *self.ready.borrow_mut());
        self.take_edges(&events[..count], &mut ready);
        self.take_expired(&mut ready);
        for waker in ready.drain(..) {
            waker.wake();
        }
        *self.ready.borrow_mut() = ready;
    }

    /// If this thread has a simulated node: lets it proceed, and lets time pass unless a descriptor is ready.
    /// Returns whether there is a simulated node.
    #[cfg(feature = "simulation")]
    fn rest_in_simulation(&self, may_sleep: bool) -> bool {
        let Some(node) = coracle_sandbox::simulation::node() else { return false };
        node.turns();
        if !may_sleep {
            return true;
        }
        let descriptor = std::os::fd::AsFd::as_fd(&self.epoll.0);
        let mut ready = [nix::poll::PollFd::new(descriptor, nix::poll::PollFlags::POLLIN)];
        if !matches!(nix::poll::poll(&mut ready, nix::poll::PollTimeout::ZERO), Ok(1..)) {
            let next = self.timers.borrow().first_key_value().map(|((due, _), _)| time::simulated::ns(*due));
            node.rest(next);
        }
        true
    }

    fn take_edges(&self, events: &[EpollEvent], ready: &mut Vec<Waker>) {
        let mut sources = self.sources.borrow_mut();
        for event in events {
            // None: it was closed by a task that was woken earlier in this batch.
            let Some(source) = sources.get(Token::from_data(event.data())) else { continue };
            for direction in [Direction::Read, Direction::Write] {
                if event.events().intersects(direction.wakes_on()) {
                    source.side(direction).report(ready);
                }
            }
        }
    }

    fn take_expired(&self, ready: &mut Vec<Waker>) {
        let mut timers = self.timers.borrow_mut();
        if timers.is_empty() {
            return;
        }
        let now = time::now();
        while let Some(entry) = timers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            ready.push(entry.remove());
        }
    }

    /// The time until the next timer in milliseconds, rounded up, so that the loop does not spin during a
    /// timer's last millisecond.
    fn until_next_timer(&self) -> EpollTimeout {
        let timers = self.timers.borrow();
        let Some(((due, _), _)) = timers.first_key_value() else { return EpollTimeout::NONE };
        let left = due.saturating_duration_since(time::now());
        let millis = left.saturating_add(Duration::from_nanos(999_999)).as_millis();
        // A wait that is longer than epoll supports (24 days) is split.
        EpollTimeout::try_from(i32::try_from(millis).unwrap_or(i32::MAX)).unwrap_or(EpollTimeout::MAX)
    }

    /// Watches `fd` until [`Driver::deregister`].
    ///
    /// # Errors
    /// The error of `epoll_ctl`: `EPERM` for a regular file or directory, `ENOSPC` at `max_user_watches`.
    pub(super) fn register(&self, fd: BorrowedFd<'_>) -> io::Result<Token> {
        let token = self.sources.borrow_mut().insert();
        let flags = EpollFlags::EPOLLET | Direction::Read.wakes_on();
        if let Err(errno) = self.epoll.add(fd, EpollEvent::new(flags, token.to_data())) {
            self.sources.borrow_mut().remove(token);
            return Err(errno.into());
        }
        Ok(token)
    }

    /// Stops watching a descriptor. Waiting tasks are woken; their next call returns the error.
    pub(super) fn deregister(&self, token: Token, fd: BorrowedFd<'_>) {
        // This fails only for a descriptor that is not registered, which `Watched` prevents.
        let _ = self.epoll.delete(fd);
        let source = self.sources.borrow_mut().remove(token);
        if let Some(source) = source {
            for (_, waker) in source.read.waiters.into_iter().chain(source.write.waiters) {
                waker.wake();
            }
        }
    }

    /// Wakes the waiters of a descriptor as an event does.
    pub(super) fn wake(&self, token: Token, direction: Direction) {
        let mut ready = Vec::new();
        if let Some(source) = self.sources.borrow_mut().get(token) {
            source.side(direction).report(&mut ready);
        }
        ready.into_iter().for_each(Waker::wake);
    }

    /// The number of events so far; a waiter stores it at the beginning of its wait.
    pub(super) fn edges(&self, token: Token, direction: Direction) -> u32 {
        self.sources.borrow_mut().get(token).map_or(0, |source| source.side(direction).edges)
    }

    /// Requests a wake-up at the next event of `fd`, whose registration is `token`. Each waiter has one waker at a
    /// time.
    pub(super) fn wait(
        &self,
        (token, fd): (Token, BorrowedFd<'_>),
        direction: Direction,
        id: WaitId,
        waker: &Waker,
    ) {
        let mut sources = self.sources.borrow_mut();
        let Some(source) = sources.get(token) else { return };
        if direction == Direction::Write && !source.reports_writes {
            // If there is free space by now, the call makes the kernel report it (epoll_ctl(2), EPOLL_CTL_MOD).
            let flags = EpollFlags::EPOLLET | Direction::Read.wakes_on() | Direction::Write.wakes_on();
            if self.epoll.modify(fd, &mut EpollEvent::new(flags, token.to_data())).is_err() {
                // As after an event, the waiter tries its call again, instead of waiting for one that would not be reported.
                source.write.edges = source.write.edges.wrapping_add(1);
                drop(sources);
                waker.wake_by_ref();
                return;
            }
            source.reports_writes = true;
        }
        let waiters = &mut source.side(direction).waiters;
        let stale = match waiters.iter_mut().find(|(owner, _)| *owner == id) {
            Some((_, held)) if held.will_wake(waker) => None,
            Some((_, held)) => Some(std::mem::replace(held, waker.clone())),
            None => {
                waiters.push((id, waker.clone()));
                None
            }
        };
        drop(sources);
        drop(stale);
    }

    /// Cancels a wait whose future is dropped before the event.
    pub(super) fn forget(&self, token: Token, direction: Direction, id: WaitId) {
        let mut sources = self.sources.borrow_mut();
        let Some(source) = sources.get(token) else { return };
        let waiters = &mut source.side(direction).waiters;
        let found = waiters.iter().position(|(owner, _)| *owner == id);
        let stale = found.map(|index| waiters.swap_remove(index));
        drop(sources);
        drop(stale);
    }

    /// Requests a wake-up at `due`; a second call with the same `id` replaces the waker.
    pub(super) fn wake_at(&self, due: Instant, id: WaitId, waker: &Waker) {
        let stale = self.timers.borrow_mut().insert((due, id), waker.clone());
        drop(stale);
    }

    /// Cancels a timer.
    pub(super) fn cancel(&self, due: Instant, id: WaitId) {
        let stale = self.timers.borrow_mut().remove(&(due, id));
        drop(stale);
    }

    /// Returns a new unique ID for a waiter or timer; 64 bits do not overflow.
    pub(super) fn next_id(&self) -> WaitId {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }

    pub(super) fn descriptors(&self) -> usize {
        self.sources.borrow().len()
    }

    pub(super) fn timers(&self) -> usize {
        self.timers.borrow().len()
    }

    pub(super) fn turns(&self) -> u64 {
        self.turns.get()
    }
}
