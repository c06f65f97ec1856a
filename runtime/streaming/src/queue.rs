//! Data of a client that the receiving process or socket has not read yet. The queue is bounded, so a
//! receiver that does not read blocks the client and not the daemon.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;

use coracle_base::reactor::Watched;
use event_listener::{Event as Changed, listener};
use nix::sys::socket::{Shutdown, shutdown};

/// A bounded queue; see the module's documentation.
pub(super) struct Queue {
    bytes: RefCell<VecDeque<u8>>,
    bytes_max: usize,
    has_ended: Cell<bool>,
    /// Whether the receiver was closed: further data is dropped.
    is_closed: Cell<bool>,
    /// The descriptor to which the queue is drained; `None` until it is known.
    reader: RefCell<Option<Rc<Watched>>>,
    changed: Changed,
}

impl Queue {
    pub(super) fn new(bytes_max: usize) -> Queue {
        Queue {
            bytes: RefCell::default(),
            bytes_max,
            has_ended: Cell::new(false),
            is_closed: Cell::new(false),
            reader: RefCell::default(),
            changed: Changed::new(),
        }
    }

    /// Writes bytes to the receiver. If it does not accept them, they are queued when there is space.
    pub(super) async fn push(&self, bytes: &[u8]) {
        let bytes = &bytes[self.pass_on(bytes)..];
        if bytes.is_empty() {
            return;
        }
        loop {
            listener!(self.changed => changed);
            if self.is_closed.get() {
                return;
            }
            if self.bytes.borrow().len() < self.bytes_max {
                break;
            }
            changed.await;
        }
        self.bytes.borrow_mut().extend(bytes);
        self.changed.notify(usize::MAX);
    }

    /// If the queue is empty, writes the bytes that the receiver accepts without blocking; returns their
    /// number. A write error is handled by the drain.
    fn pass_on(&self, bytes: &[u8]) -> usize {
        let reader = self.reader.borrow();
        match &*reader {
            Some(reader) if self.bytes.borrow().is_empty() && !self.is_closed.get() => {
                nix::unistd::write(reader.fd(), bytes).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Marks the end of the client's data.
    pub(super) fn end(&self) {
        self.has_ended.set(true);
        self.changed.notify(usize::MAX);
    }

    /// Marks the receiver as closed.
    pub(super) fn close(&self) {
        self.is_closed.set(true);
        self.bytes.take();
        self.reader.take();
        self.changed.notify(usize::MAX);
    }

    /// Writes all data to `to` until the end of the client's data; returns false if the receiver was closed
    /// before.
    pub(super) async fn drain(&self, to: &Rc<Watched>) -> bool {
        *self.reader.borrow_mut() = Some(Rc::clone(to));
        let is_whole = self.drain_all(to).await;
        *self.reader.borrow_mut() = None;
        is_whole
    }

    async fn drain_all(&self, to: &Watched) -> bool {
        loop {
            listener!(self.changed => changed);
            if self.bytes.borrow().is_empty() {
                if self.has_ended.get() {
                    return true;
                }
                changed.await;
                continue;
            }
            let write = |fd: BorrowedFd<'_>| {
                let mut bytes = self.bytes.borrow_mut();
                let count = nix::unistd::write(fd, bytes.as_slices().0)?;
                bytes.drain(..count);
                if bytes.is_empty() && bytes.capacity() > SPARE_BYTES_MAX {
                    *bytes = VecDeque::new();
                }
                Ok(count)
            };
            // EPIPE or EIO: the receiver closed its end, which is allowed.
            if to.write_with(write).await.is_err() {
                self.close();
                return false;
            }
            self.changed.notify(usize::MAX);
        }
    }

    /// Drains like [`Queue::drain`], then shuts down the sending half of the socket.
    pub(super) async fn drain_to_socket(&self, to: &Rc<Watched>) {
        if self.drain(to).await {
            // Fails if the peer reset the connection, which needs no shutdown.
            let _ = shutdown(to.fd().as_raw_fd(), Shutdown::Write);
        }
    }
}

/// Maximum capacity in bytes that an empty queue keeps.
const SPARE_BYTES_MAX: usize = 64 << 10;
