//! A watched socket with hyper's traits. Reads use one buffer of the thread, because hyper's cursor gives uninitialised memory
//! to unsafe code only; the copy costs less than zeroing a buffer for each connection. In this buffer an `:authority` that h2
//! would refuse is replaced ([`authority`](super::authority)).
//!
//! h2 writes each DATA frame by itself. A kubelet would be woken by the first of the four frames of a list, and would wake the
//! daemon by its window updates while the daemon writes the others: on a CPU that was idle, these wake-ups cost more than
//! the list. So [`Io`] keeps what h2 writes, and [`serve`] sends it when h2 has nothing more to write.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use coracle_base::reactor::Watched;
use hyper::rt::{Read, ReadBufCursor, Write};
use smol::io::AsyncWrite;

use super::authority::Rewriter;

/// Buffer size in bytes: one HTTP/2 frame of the default maximum size with its header.
const READ_BYTES: usize = 20 * 1024;

thread_local! {
    static SCRATCH: RefCell<[u8; READ_BYTES]> = const { RefCell::new([0; READ_BYTES]) };
    /// Buffer of the last bytes that were sent, for the next ones of any connection: for a list that is asked for each second,
    /// the page faults of a new buffer take as long as the list.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Frees the buffer that is kept for the next response.
pub(crate) fn free_spare_buffer() {
    SPARE.take();
}

/// Maximum number of bytes that are kept for one write. It is the window that HTTP/2 grants at first: without the
/// client's window updates, which need its wake-up, no more can be sent.
const KEPT_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of reads in one poll of a connection. h2 reads until there is nothing left, and a client that sends small frames
/// faster than h2 handles them would keep the thread. The second read of a usual request finds nothing.
const READS_MAX: u32 = 2;

/// The byte stream of a connection.
pub(super) struct Io {
    output: Rc<Output>,
    heard: Rc<Cell<usize>>,
    authority: Rewriter,
}

/// A socket with the bytes that were written and not yet sent.
pub(super) struct Output {
    socket: Watched,
    kept: RefCell<Vec<u8>>,
    kept_max: usize,
    /// Number of reads until the poll of [`serve`] in progress must end.
    reads_left: Cell<u32>,
}

impl Output {
    /// Keeps the bytes of `parts`, as far as there is room, after it has sent what leaves no room. Returns their number.
    fn poll_keep(&self, context: &Context<'_>, parts: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if self.kept.borrow().len() + length > self.kept_max {
            ready!(self.poll_send(context))?;
            if length > self.kept_max {
                return self.socket.poll_write_with(context, |fd| Ok(nix::sys::uio::writev(fd, parts)?));
            }
        }
        let mut kept = self.kept.borrow_mut();
        if kept.capacity() == 0 {
            *kept = SPARE.take();
            // At once for all frames of a long response; pages that are not written cost nothing.
            kept.reserve(self.kept_max);
        }
        parts.iter().for_each(|part| kept.extend_from_slice(part));
        Poll::Ready(Ok(length))
    }

    /// Sends all bytes that are kept; if the socket is full, the task is woken when there is room.
    fn poll_send(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut kept = self.kept.borrow_mut();
        let mut sent = 0;
        while sent < kept.len() {
            let writing =
                self.socket.poll_write_with(context, |fd| Ok(nix::unistd::write(fd, &kept[sent..])?));
            match writing {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(count)) => sent += count,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    kept.drain(..sent);
                    return Poll::Pending;
                }
            }
        }
        // An idle connection has no buffer.
        if kept.capacity() > 0 {
            kept.clear();
            SPARE.set(std::mem::take(&mut kept));
        }
        Poll::Ready(Ok(()))
    }
}

/// Serves a connection to its end. After each poll it sends what the connection has written.
///
/// # Errors
/// The error of the connection or of the socket.
pub(super) async fn serve<E: Into<Box<dyn std::error::Error>>>(
    mut connection: Pin<&mut impl Future<Output = Result<(), E>>>,
    output: &Output,
) -> Result<(), Box<dyn std::error::Error>> {
    poll_fn(|context| {
        output.reads_left.set(READS_MAX);
        let ended = connection.as_mut().poll(context);
        match (ended, output.poll_send(context)) {
            (Poll::Ready(result), _) => Poll::Ready(result.map_err(Into::into)),
            (Poll::Pending, Poll::Ready(Err(error))) => Poll::Ready(Err(error.into())),
            (Poll::Pending, _) => Poll::Pending,
        }
    })
    .await
}

impl Io {
    pub(super) fn new(socket: Watched) -> Io {
        Io::with(socket, KEPT_BYTES_MAX, Rewriter::new())
    }

    /// Creates the client's end of a connection, for tests. Its bytes are sent at once, and those from a server are not changed.
    #[cfg(test)]
    pub(super) fn of_client(socket: Watched) -> Io {
        Io::with(socket, 0, Rewriter::off())
    }

    fn with(socket: Watched, kept_max: usize, authority: Rewriter) -> Io {
        // A client's end is not polled by `serve`.
        let reads_left = Cell::new(u32::MAX);
        let output = Rc::new(Output { socket, kept: RefCell::default(), kept_max, reads_left });
        Io { output, heard: Rc::default(), authority }
    }

    /// The part of it that sends, for [`serve`].
    pub(super) fn output(&self) -> Rc<Output> {
        Rc::clone(&self.output)
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
        let Some(left) = this.output.reads_left.get().checked_sub(1) else {
            // The others come first.
            context.waker().wake_by_ref();
            return Poll::Pending;
        };
        this.output.reads_left.set(left);
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
                let reading =
                    this.output.socket.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, new)?));
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
        self.output.poll_keep(context, &[io::IoSlice::new(bytes)])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.output.poll_keep(context, parts)
    }

    /// Does nothing: h2 flushes after each frame, and [`serve`] sends after the last one.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.output.poll_send(context))?;
        Pin::new(&mut &self.output.socket).poll_close(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::pin::pin;
    use std::time::Duration;

    use coracle_base::reactor::{self, deadline};

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    fn pair() -> (Io, UnixStream) {
        let (ours, peer) = UnixStream::pair().unwrap();
        (Io::new(Watched::new(ours.into()).unwrap()), peer)
    }

    /// Writes all of `bytes` as h2 does, frame by frame, with a flush after each.
    async fn write(io: &mut Io, bytes: &[u8], frame: usize) -> io::Result<()> {
        for mut part in bytes.chunks(frame) {
            while !part.is_empty() {
                let (head, rest) = part.split_at(part.len().min(9));
                let parts = [io::IoSlice::new(head), io::IoSlice::new(rest)];
                let count =
                    poll_fn(|context| Pin::new(&mut *io).poll_write_vectored(context, &parts)).await?;
                part = &part[count..];
            }
            poll_fn(|context| Pin::new(&mut *io).poll_flush(context)).await?;
        }
        Ok(())
    }

    #[test]
    fn frames_of_one_turn_are_sent_together_after_it() {
        reactor::run(async {
            let (mut io, mut peer) = pair();
            peer.set_nonblocking(true).unwrap();
            let output = io.output();
            let message: Vec<u8> = (0..60_000_u32).map(|at| at as u8).collect();
            let mut bytes = [0; 128 * 1024];
            let turn = async {
                write(&mut io, &message, 16_393).await.unwrap();
                let early = peer.read(&mut bytes).unwrap_err();
                assert_eq!(
                    early.kind(),
                    io::ErrorKind::WouldBlock,
                    "nothing is sent before the end of the turn"
                );
                reactor::yield_now().await;
                let count = peer.read(&mut bytes).unwrap();
                assert_eq!(bytes[..count], message, "all of it is sent by then");
                Ok::<(), io::Error>(())
            };
            serve(pin!(turn), &output).await.unwrap();
            assert_eq!(output.kept.borrow().capacity(), 0, "an idle connection has no buffer");
            let spare = SPARE.take();
            assert!(spare.is_empty() && spare.capacity() >= KEPT_BYTES_MAX, "{}", spare.capacity());
            let (address, (mut io, mut peer)) = (spare.as_ptr(), pair());
            SPARE.set(spare);
            write(&mut io, b"the next response", 16_393).await.unwrap();
            assert_eq!(
                io.output().kept.borrow().as_ptr(),
                address,
                "another connection uses the same buffer"
            );
            poll_fn(|context| io.output().poll_send(context)).await.unwrap();
            let count = peer.read(&mut bytes).unwrap();
            assert_eq!(&bytes[..count], b"the next response");
            free_spare_buffer();
            assert_eq!(SPARE.take().capacity(), 0);
        });
    }

    #[test]
    fn a_client_that_reads_slowly_gets_every_byte_in_order_and_then_the_end() {
        reactor::run(async {
            let (mut io, peer) = pair();
            let output = io.output();
            let message: Vec<u8> = (0..2_000_000_u32).map(|at| (at % 251) as u8).collect();
            let expected = message.clone();
            let reading = reactor::spawn(async move {
                let peer = Watched::new(OwnedFd::from(peer)).unwrap();
                let mut all = Vec::new();
                let mut some = [0; 7_001];
                loop {
                    let reading = poll_fn(|context| {
                        peer.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, &mut some)?))
                    });
                    match reading.await.unwrap() {
                        0 => return all,
                        count => all.extend_from_slice(&some[..count]),
                    }
                    reactor::yield_now().await;
                }
            });
            let sending = async {
                write(&mut io, &message, 100_000).await?;
                write(&mut io, b"the end", 16_384).await?;
                poll_fn(|context| Pin::new(&mut io).poll_shutdown(context)).await
            };
            deadline(LONG, serve(pin!(sending), &output)).await.unwrap().unwrap();
            let read = deadline(LONG, reading).await.unwrap();
            assert!(read.len() == expected.len() + 7 && read[..expected.len()] == expected, "{}", read.len());
            assert!(read.ends_with(b"the end"));
        });
    }

    #[test]
    fn no_more_is_kept_than_the_first_window_of_a_client_that_does_not_read() {
        reactor::run(async {
            let (mut io, peer) = pair();
            let output = io.output();
            let sending = async { write(&mut io, &vec![0; 4 << 20], 16_384).await };
            let waiting = deadline(Duration::from_millis(100), serve(pin!(sending), &output)).await;
            assert!(waiting.is_err(), "the socket is full");
            let kept = output.kept.borrow().len();
            assert!((1..=KEPT_BYTES_MAX).contains(&kept), "{kept}");
            drop(peer);
        });
    }

    #[test]
    fn a_client_that_always_sends_does_not_keep_the_thread() {
        reactor::run(async {
            let (mut io, mut peer) = pair();
            let output = io.output();
            let mut polls = 0;
            let reading = poll_fn(|context| {
                polls += 1;
                let mut reads = 0;
                loop {
                    peer.write_all(&[0; 100]).unwrap();
                    let mut bytes = [0; 100];
                    let mut buffer = hyper::rt::ReadBuf::new(&mut bytes);
                    match Pin::new(&mut io).poll_read(context, buffer.unfilled()) {
                        Poll::Pending => break,
                        Poll::Ready(result) => result.unwrap(),
                    }
                    reads += 1;
                }
                assert_eq!(reads, READS_MAX);
                // It is polled again without another event.
                if polls == 3 { Poll::Ready(Ok::<(), io::Error>(())) } else { Poll::Pending }
            });
            deadline(LONG, serve(pin!(reading), &output)).await.unwrap().unwrap();
        });
    }

    #[test]
    fn a_connection_whose_client_has_gone_ends() {
        reactor::run(async {
            let (mut io, peer) = pair();
            let output = io.output();
            drop(peer);
            let sending = async {
                write(&mut io, b"a response", 16_384).await?;
                std::future::pending::<io::Result<()>>().await
            };
            let ended = deadline(LONG, serve(pin!(sending), &output)).await.unwrap();
            assert!(ended.unwrap_err().to_string().contains("Broken pipe"));
        });
    }
}
