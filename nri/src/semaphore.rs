//! A FIFO semaphore: for the gate between events and joins, for the order of a pod's events, and for the calls of a
//! plugin. With other locks a later caller can overtake a waiting one, and a plugin would receive events out of order.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A number of permits, acquired one by one (shared) or all together (exclusive).
pub(crate) struct FifoSemaphore {
    total: usize,
    free: Cell<usize>,
    queue: RefCell<VecDeque<Rc<Waiter>>>,
}

struct Waiter {
    wants: usize,
    is_granted: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// Acquired permits, released on drop.
pub(crate) struct Permit {
    lock: Rc<FifoSemaphore>,
    count: usize,
}

/// A future that waits for permits. Dropping the future removes it from the queue.
pub(crate) struct Acquire {
    lock: Rc<FifoSemaphore>,
    wants: usize,
    waiter: Option<Rc<Waiter>>,
    is_done: bool,
}

impl FifoSemaphore {
    pub(crate) fn new(total: usize) -> Rc<Self> {
        Rc::new(Self { total, free: Cell::new(total), queue: RefCell::default() })
    }

    /// Acquires one permit.
    pub(crate) fn shared(self: &Rc<Self>) -> Acquire {
        Acquire { lock: Rc::clone(self), wants: 1, waiter: None, is_done: false }
    }

    /// Acquires all permits.
    pub(crate) fn exclusive(self: &Rc<Self>) -> Acquire {
        Acquire { lock: Rc::clone(self), wants: self.total, waiter: None, is_done: false }
    }

    /// Acquires one permit if one is free and no other caller waits; otherwise `None`.
    pub(crate) fn try_shared(self: &Rc<Self>) -> Option<Permit> {
        let is_free = self.queue.borrow().is_empty() && self.free.get() > 0;
        is_free.then(|| {
            self.free.set(self.free.get() - 1);
            Permit { lock: Rc::clone(self), count: 1 }
        })
    }

    fn give_back(&self, count: usize) {
        self.free.set(self.free.get() + count);
        self.serve();
    }

    /// Grants free permits to waiting futures in the order of the queue.
    fn serve(&self) {
        loop {
            let first = self.queue.borrow().front().cloned();
            let Some(first) = first.filter(|first| first.wants <= self.free.get()) else { return };
            self.free.set(self.free.get() - first.wants);
            self.queue.borrow_mut().pop_front();
            first.is_granted.set(true);
            if let Some(waker) = first.waker.take() {
                waker.wake();
            }
        }
    }
}

impl Future for Acquire {
    type Output = Permit;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        let this = &mut *self;
        let is_granted = match &this.waiter {
            Some(waiter) => waiter.is_granted.get(),
            None => {
                let is_first = this.lock.queue.borrow().is_empty() && this.lock.free.get() >= this.wants;
                if is_first {
                    this.lock.free.set(this.lock.free.get() - this.wants);
                }
                is_first
            }
        };
        if is_granted {
            this.is_done = true;
            return Poll::Ready(Permit { lock: Rc::clone(&this.lock), count: this.wants });
        }
        let waiter = this.waiter.get_or_insert_with(|| {
            let waiter = Rc::new(Waiter {
                wants: this.wants,
                is_granted: Cell::new(false),
                waker: RefCell::default(),
            });
            this.lock.queue.borrow_mut().push_back(Rc::clone(&waiter));
            waiter
        });
        waiter.waker.replace(Some(context.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take().filter(|_| !self.is_done) else { return };
        if waiter.is_granted.get() {
            return self.lock.give_back(self.wants);
        }
        self.lock.queue.borrow_mut().retain(|other| !Rc::ptr_eq(other, &waiter));
        self.lock.serve(); // later waiters may get permits now
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.lock.give_back(self.count);
    }
}

#[cfg(test)]
mod tests {
    use smol::future::{block_on, poll_once};

    use super::*;

    #[test]
    fn exclusive_waits_for_shared_and_stops_later_ones() {
        block_on(async {
            let lock = FifoSemaphore::new(8);
            let first = lock.shared().await;
            let mut writer = Box::pin(lock.exclusive());
            let mut second = Box::pin(lock.shared());
            assert!(poll_once(&mut writer).await.is_none());
            assert!(poll_once(&mut second).await.is_none(), "a late comer overtakes");
            drop(first);
            let all = poll_once(&mut writer).await.expect("it is the writer's turn");
            assert!(poll_once(&mut second).await.is_none());
            drop(all);
            assert!(poll_once(&mut second).await.is_some());
        });
    }

    #[test]
    fn a_cancelled_waiter_delays_no_other() {
        block_on(async {
            let lock = FifoSemaphore::new(1);
            let first = lock.shared().await;
            let mut gives_up = Box::pin(lock.shared());
            let mut behind = Box::pin(lock.shared());
            assert!(poll_once(&mut gives_up).await.is_none());
            assert!(poll_once(&mut behind).await.is_none());
            drop(first); // grants the permit to the future that is dropped next
            drop(gives_up);
            drop(poll_once(&mut behind).await.expect("it is free"));
            drop(behind);
            assert!(lock.try_shared().is_some());
        });
    }
}
