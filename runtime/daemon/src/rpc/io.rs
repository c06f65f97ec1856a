//! A watched socket with hyper's traits. Reads use one buffer of the thread, because hyper's cursor gives uninitialised memory
//! to unsafe code only; the copy costs less than zeroing a buffer for each connection. In this buffer an `:authority` that h2
//! would refuse is replaced ([`authority`](super::authority)).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use coracle_base::reactor::Watched;
use hyper::rt::{Read, ReadBufCursor, Write};
use smol::io::AsyncWrite;

use super::authority::Rewriter;

/// Buffer size in bytes: one HTTP/2 frame of the default maximum size with its header.
const READ_BYTES: usize = 20 * 1024;

thread_local! {
    static SCRATCH: RefCell<[u8; READ_BYTES]> = const { RefCell::new([0; READ_BYTES]) };
}

/// The byte stream of a connection.
pub(super) struct Io {
    watched: Watched,
    heard: Rc<Cell<usize>>,
    authority: Rewriter,
}

impl Io {
    pub(super) fn new(watched: Watched) -> Io {
        Io { watched, heard: Rc::default(), authority: Rewriter::new() }
    }

    /// Creates the client's end of a connection, for tests. The bytes from a server are not changed.
    #[cfg(test)]
    pub(super) fn of_client(watched: Watched) -> Io {
        Io { authority: Rewriter::off(), ..Io::new(watched) }
    }

    /// Counter of the bytes that the peer has sent.
    pub(super) fn heard(&self) -> Rc<Cell<usize>> {
        Rc::clone(&self.heard)
    }
}

impl Read for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut cursor: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        SCRATCH.with_borrow_mut(|scratch| {
            let room = cursor.remaining().min(READ_BYTES);
            loop {
                let held = this.authority.held();
                let known = usize::from(held.is_some());
                if let Some(byte) = held {
                    scratch[0] = byte;
                    if room <= known {
                        cursor.put_slice(&scratch[..room]);
                        return Poll::Ready(Ok(()));
                    }
                }
                let new = &mut scratch[known..room];
                let reading = this.watched.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, new)?));
                let Poll::Ready(count) = reading? else {
                    this.authority.hold(held);
                    return Poll::Pending;
                };
                if count == 0 {
                    return Poll::Ready(Ok(()));
                }
                this.heard.set(this.heard.get().saturating_add(count));
                let ready = this.authority.rewrite(&mut scratch[..known + count], known);
                // Nothing given is the end of the stream to hyper: a single byte that is held back has to wait.
                if ready > 0 {
                    cursor.put_slice(&scratch[..ready]);
                    return Poll::Ready(Ok(()));
                }
            }
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
