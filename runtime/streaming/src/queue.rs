//! What a client sent and its reader has not taken yet: bounded, so that a reader who does not read stops the client, not
//! the daemon.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;

use coracle_base::reactor::Watched;
use event_listener::{Event as Changed, listener};
use nix::sys::socket::{Shutdown, shutdown};

/// See the module.
pub(super) struct Queue {
    bytes: RefCell<VecDeque<u8>>,
    bytes_max: usize,
    has_ended: Cell<bool>,
    /// Nobody reads it any more: what comes is thrown away.
    is_closed: Cell<bool>,
    /// Where it is drained to, once it is.
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

    /// Passes bytes on, or keeps them once what is there leaves room.
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

    /// What the reader takes at once, while nothing waits before it; a reader that is gone is met by the drain.
    fn pass_on(&self, bytes: &[u8]) -> usize {
        let reader = self.reader.borrow();
        match &*reader {
            Some(reader) if self.bytes.borrow().is_empty() && !self.is_closed.get() => {
                nix::unistd::write(reader.fd(), bytes).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// No more comes.
    pub(super) fn end(&self) {
        self.has_ended.set(true);
        self.changed.notify(usize::MAX);
    }

    /// Nobody reads it any more.
    pub(super) fn close(&self) {
        self.is_closed.set(true);
        self.bytes.take();
        self.reader.take();
        self.changed.notify(usize::MAX);
    }

    /// Writes everything to `to` until the end; false where the reader was gone before.
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
            // EPIPE and EIO: it has closed its end, which is its right.
            if to.write_with(write).await.is_err() {
                self.close();
                return false;
            }
            self.changed.notify(usize::MAX);
        }
    }

    /// As [`Queue::drain`], then the write half of a socket.
    pub(super) async fn drain_to_socket(&self, to: &Rc<Watched>) {
        if self.drain(to).await {
            // A peer that reset it meanwhile needs no end.
            let _ = shutdown(to.fd().as_raw_fd(), Shutdown::Write);
        }
    }
}

/// An empty queue keeps no more than that.
const SPARE_BYTES_MAX: usize = 64 << 10;
