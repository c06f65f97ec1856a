//! The tables under the loop: descriptors and who waits for them, timers, and the one `epoll_wait`.
//!
//! Descriptors are registered once, edge-triggered, for both directions. Edges reach the tables only in [`Driver::turn`],
//! between polls of tasks, so a task that saw `EAGAIN` and registers before it returns cannot miss one.
//! No waker is woken or dropped while a table is borrowed: either may run a task's destructor, which comes back here.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Events taken per `epoll_wait`. What does not fit comes with the next turn; 64 of them fill 768 bytes.
const EVENTS_PER_TURN: usize = 64;

/// A direction of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Direction {
    /// The events that let a call of this direction get on; errors and hang-ups are found out by trying.
    fn wakes_on(self) -> EpollFlags {
        let ends = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
        match self {
            Direction::Read => ends | EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLPRI,
            Direction::Write => ends | EpollFlags::EPOLLOUT,
        }
    }
}

/// Names one registration. The generation tells a late event for a closed descriptor from one for its successor.
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

/// Names one waiter of a descriptor, or one timer.
pub(super) type WaitId = u64;

/// The waiter that polls a descriptor through futures-io or hyper; there is one per direction, the latest.
pub(super) const POLLER: WaitId = 0;

#[derive(Default)]
struct Side {
    /// Grows with every edge: a waiter is done when it differs from what it saw first.
    edges: u32,
    waiters: Vec<(WaitId, Waker)>,
}

#[derive(Default)]
struct Source {
    read: Side,
    write: Side,
}

impl Source {
    fn side(&mut self, direction: Direction) -> &mut Side {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }
}

/// Slots are reused; their number is bounded by the process's limit of open files.
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
    /// By time, then by id, so that equal times keep their order and every key is its own.
    timers: RefCell<BTreeMap<(Instant, WaitId), Waker>>,
    next_id: Cell<WaitId>,
    turns: Cell<u64>,
    /// Kept between turns, so that a turn allocates nothing.
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
            ready: RefCell::default(),
        })
    }

    /// One `epoll_wait`: without waiting, or (`may_sleep`) until a descriptor or a timer is due. Wakes what is ready.
    ///
    /// # Panics
    /// If `epoll_wait` fails for another reason than a signal: only a bug closes the descriptor under us.
    pub(super) fn turn(&self, may_sleep: bool) {
        self.turns.set(self.turns.get().wrapping_add(1));
        let timeout = if may_sleep { self.until_next_timer() } else { EpollTimeout::ZERO };
        let mut events = [EpollEvent::empty(); EVENTS_PER_TURN];
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => panic!("epoll_wait: {errno}"),
        };
        let mut ready = std::mem::take(&mut *self.ready.borrow_mut());
        self.take_edges(&events[..count], &mut ready);
        self.take_expired(&mut ready);
        for waker in ready.drain(..) {
            waker.wake();
        }
        *self.ready.borrow_mut() = ready;
    }

    fn take_edges(&self, events: &[EpollEvent], ready: &mut Vec<Waker>) {
        let mut sources = self.sources.borrow_mut();
        for event in events {
            // None: closed by a task that was woken earlier in this batch.
            let Some(source) = sources.get(Token::from_data(event.data())) else { continue };
            for direction in [Direction::Read, Direction::Write] {
                if event.events().intersects(direction.wakes_on()) {
                    let side = source.side(direction);
                    side.edges = side.edges.wrapping_add(1);
                    ready.extend(side.waiters.drain(..).map(|(_, waker)| waker));
                }
            }
        }
    }

    fn take_expired(&self, ready: &mut Vec<Waker>) {
        let mut timers = self.timers.borrow_mut();
        if timers.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(entry) = timers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            ready.push(entry.remove());
        }
    }

    /// Rounded up, so that the loop does not spin through a timer's last millisecond.
    fn until_next_timer(&self) -> EpollTimeout {
        let timers = self.timers.borrow();
        let Some(((due, _), _)) = timers.first_key_value() else { return EpollTimeout::NONE };
        let left = due.saturating_duration_since(Instant::now());
        let millis = left.saturating_add(Duration::from_nanos(999_999)).as_millis();
        // A longer wait than epoll can express (24 days) is a wait in two parts.
        EpollTimeout::try_from(i32::try_from(millis).unwrap_or(i32::MAX)).unwrap_or(EpollTimeout::MAX)
    }

    /// Watches `fd` until [`Driver::deregister`].
    ///
    /// # Errors
    /// What `epoll_ctl` says: `EPERM` for a regular file or directory, `ENOSPC` at `max_user_watches`.
    pub(super) fn register(&self, fd: BorrowedFd<'_>) -> io::Result<Token> {
        let token = self.sources.borrow_mut().insert();
        let flags = EpollFlags::EPOLLET | Direction::Read.wakes_on() | Direction::Write.wakes_on();
        if let Err(errno) = self.epoll.add(fd, EpollEvent::new(flags, token.to_data())) {
            self.sources.borrow_mut().remove(token);
            return Err(errno.into());
        }
        Ok(token)
    }

    /// Ends the watch. Whoever still waits is woken: the next try tells them what happened.
    pub(super) fn deregister(&self, token: Token, fd: BorrowedFd<'_>) {
        // Fails only for what is not registered, which `Watched` rules out; then there is nothing to undo either.
        let _ = self.epoll.delete(fd);
        let source = self.sources.borrow_mut().remove(token);
        if let Some(source) = source {
            for (_, waker) in source.read.waiters.into_iter().chain(source.write.waiters) {
                waker.wake();
            }
        }
    }

    /// How many edges came so far; what a wait compares with.
    pub(super) fn edges(&self, token: Token, direction: Direction) -> u32 {
        self.sources.borrow_mut().get(token).map_or(0, |source| source.side(direction).edges)
    }

    /// Asks for a wake at the next edge. A waiter has one waker at a time.
    pub(super) fn wait(&self, token: Token, direction: Direction, id: WaitId, waker: &Waker) {
        let mut sources = self.sources.borrow_mut();
        let Some(source) = sources.get(token) else { return };
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

    /// Takes a wait back, when its future is dropped before the edge.
    pub(super) fn forget(&self, token: Token, direction: Direction, id: WaitId) {
        let mut sources = self.sources.borrow_mut();
        let Some(source) = sources.get(token) else { return };
        let waiters = &mut source.side(direction).waiters;
        let found = waiters.iter().position(|(owner, _)| *owner == id);
        let stale = found.map(|index| waiters.swap_remove(index));
        drop(sources);
        drop(stale);
    }

    /// Asks for a wake at `due`; again with the same `id` replaces the waker.
    pub(super) fn wake_at(&self, due: Instant, id: WaitId, waker: &Waker) {
        let stale = self.timers.borrow_mut().insert((due, id), waker.clone());
        drop(stale);
    }

    /// Takes a timer back.
    pub(super) fn cancel(&self, due: Instant, id: WaitId) {
        let stale = self.timers.borrow_mut().remove(&(due, id));
        drop(stale);
    }

    /// A name for a waiter or timer that no other has; 64 bits do not come round.
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
