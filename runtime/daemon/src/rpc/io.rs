//! A watched socket as hyper wants it. Reads go through one buffer of the thread's, because hyper's cursor hands out
//! uninitialised memory to unsafe code only; the copy costs less than zeroing a buffer for each connection would.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use coracle_base::reactor::Watched;
use hyper::rt::{Read, ReadBufCursor, Write};
use smol::io::AsyncWrite;

/// One HTTP/2 frame of the default maximum size with room for its header: what one read usually brings.
const READ_BYTES: usize = 20 * 1024;

thread_local! {
    static SCRATCH: RefCell<[u8; READ_BYTES]> = const { RefCell::new([0; READ_BYTES]) };
}

/// A connection's byte stream.
pub(super) struct Io {
    watched: Watched,
    heard: Rc<Cell<bool>>,
}

impl Io {
    pub(super) fn new(watched: Watched) -> Io {
        Io { watched, heard: Rc::default() }
    }

    /// Whether the peer has said anything yet.
    pub(super) fn heard(&self) -> Rc<Cell<bool>> {
        Rc::clone(&self.heard)
    }
}

impl Read for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut cursor: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let room = cursor.remaining().min(READ_BYTES);
            let reading =
                self.watched.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, &mut scratch[..room])?));
            reading.map_ok(|count| {
                self.heard.set(true);
                cursor.put_slice(&scratch[..count]);
            })
        })
    }
}

impl Write for Io {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut &self.watched).poll_write(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.watched.poll_write_with(context, |fd| Ok(nix::sys::uio::writev(fd, parts)?))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &self.watched).poll_close(context)
    }
}
