//! One upgraded connection: a socket and its protocol. Data is transferred in both directions with bounded
//! memory.
//!
//! ```text
//! Receiver::next ◄── buffer ◄── socket          a slow event handler stops the reads
//! send ──► output ──► transmit ──► socket       senders wait while the output buffer is full
//! ```
//! Both directions use TCP's back pressure: no queue grows. A blocked stream blocks its connection, as in
//! every server of these protocols (streaming 6.4).

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use coracle_base::error::describe_io;
use coracle_base::reactor::{self, Watched};
use event_listener::{Event as Changed, listener};
use nix::sys::socket::{Shutdown, shutdown};

use super::event::{Broken, Event};
use super::peer::Peer;

/// Number of bytes in the output buffer above which senders wait: two frames of the maximum length.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// Maximum number of bytes per read of a socket or a pipe: the size of a pipe buffer, and two frames of the
/// maximum length.
const READ_BYTES: usize = 64 << 10;
/// Maximum number of bytes of the first reads of a session: sufficient for keystrokes.
const FIRST_READ_BYTES: usize = 2 << 10;
/// Time limit for the client to close the connection after the last byte was sent to it. Clients ping every
/// five seconds.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(12);

/// The reason why a connection ended.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The client closed the connection.
    Closed,
    /// The client violated the protocol.
    Broken(Broken),
    /// An error of the socket.
    Socket(io::Error),
    /// The client did not open its streams within the time limit.
    Late,
    /// No data was transferred for this time.
    Idle(Duration),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndReason::Closed => f.write_str("closed by the client"),
            EndReason::Broken(why) => write!(f, "the client violated the protocol: {why}"),
            EndReason::Socket(error) => write!(f, "connection to the client lost: {}", describe_io(error)),
            EndReason::Late => f.write_str("the client did not open its streams in time"),
            EndReason::Idle(limit) => write!(f, "idle for {} s", limit.as_secs()),
        }
    }
}

/// An event that owns its values; its data is in [`Receiver::bytes`].
pub(super) enum Incoming {
    Opened { stream: u32, headers: Vec<(String, String)> },
    Data { stream: u32 },
    Ended { stream: u32 },
    Reset { stream: u32 },
}

/// A connection with its output buffer; see the module's documentation.
pub(super) struct Connection {
    socket: Watched,
    peer: RefCell<Peer>,
    /// Data that is being written. The data is kept in the connection, because a cancelled writer may have
    /// written a part of it, and the next writer must continue there.
    outgoing: RefCell<Outgoing>,
    /// Notified when the output buffer gets data or space.
    output_changed: Changed,
    /// Time of the last transfer in either direction.
    last_used: Cell<Instant>,
    /// Maximum time without a transfer in either direction; zero: no limit.
    idle_limit: Duration,
}

/// A part of the protocol's output that is being written.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    written: usize,
}

/// The receiving half, with an input buffer that stays small for interactive sessions.
pub(super) struct Receiver {
    input: Vec<u8>,
    /// Start of those bytes of `input` that were read but not consumed yet.
    from: usize,
    to: usize,
    /// Position in `input` of the last event's data; empty if the protocol had to decode the data.
    bytes: Range<usize>,
    unpacked: Vec<u8>,
}

thread_local! {
    /// Buffer for reads from pipes and from sockets in pods. It contains no data during an await.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
}

/// Reads available bytes and passes them to `hand_on`, without an await in between. Returns the number of
/// bytes; 0 means end of file.
pub(super) async fn read_through(from: &Watched, mut hand_on: impl FnMut(&[u8])) -> io::Result<usize> {
    from.read_with(|fd| read_scratch(fd, &mut hand_on)).await
}

fn read_scratch(from: BorrowedFd<'_>, hand_on: impl FnOnce(&[u8])) -> io::Result<usize> {
    SCRATCH.with_borrow_mut(|scratch| {
        let count = nix::unistd::read(from, scratch)?;
        hand_on(&scratch[..count]);
        Ok(count)
    })
}

impl Receiver {
    /// Creates a receiver; `read` contains the bytes that were received after the request's header.
    pub(super) fn new(read: Vec<u8>) -> Receiver {
        Receiver { from: 0, to: read.len(), input: read, bytes: 0..0, unpacked: Vec::new() }
    }

    /// Data of the last [`Incoming::Data`].
    pub(super) fn bytes(&self) -> &[u8] {
        if self.bytes.is_empty() { &self.unpacked } else { &self.input[self.bytes.clone()] }
    }

    /// Waits for the next event.
    pub(super) async fn next(&mut self, connection: &Connection) -> Result<Incoming, EndReason> {
        loop {
            if let Some(incoming) = self.take(&mut connection.peer.borrow_mut())? {
                return Ok(incoming);
            }
            // There may be replies to the event: a PONG, or the refusal of a stream.
            connection.output_changed.notify(usize::MAX);
            // A full buffer means a bulk transfer, for which it grows.
            if self.to == self.input.len() {
                let length = if self.input.is_empty() { FIRST_READ_BYTES } else { READ_BYTES };
                self.input.resize(length.max(self.input.len()), 0);
            }
            let count = connection.socket.read(&mut self.input).await.map_err(EndReason::Socket)?;
            if count == 0 {
                return Err(EndReason::Closed);
            }
            (self.from, self.to) = (0, count);
            connection.last_used.set(Instant::now());
        }
    }

    fn take(&mut self, peer: &mut Peer) -> Result<Option<Incoming>, EndReason> {
        let is_packed = !matches!(peer, Peer::Spdy(_));
        let mut rest = &self.input[self.from..self.to];
        let event = peer.next(&mut rest).map_err(EndReason::Broken)?;
        let end = self.to - rest.len();
        let incoming = match event {
            None => None,
            Some(Event::Opened { stream, headers }) => Some(Incoming::Opened { stream, headers }),
            Some(Event::Data { stream, bytes }) if is_packed => {
                self.unpacked.clear();
                self.unpacked.extend_from_slice(bytes);
                self.bytes = 0..0;
                Some(Incoming::Data { stream })
            }
            // SPDY returns a part of its input: the bytes directly before the rest.
            Some(Event::Data { stream, bytes }) => {
                self.bytes = end - bytes.len()..end;
                Some(Incoming::Data { stream })
            }
            Some(Event::Ended { stream }) => Some(Incoming::Ended { stream }),
            Some(Event::Reset { stream }) => Some(Incoming::Reset { stream }),
            Some(Event::Closed) => return Err(EndReason::Closed),
        };
        self.from = end;
        Ok(incoming)
    }
}

impl Connection {
    pub(super) fn new(socket: Watched, peer: Peer, idle_limit: Duration) -> Connection {
        Connection {
            socket,
            peer: RefCell::new(peer),
            outgoing: RefCell::default(),
            output_changed: Changed::new(),
            last_used: Cell::new(Instant::now()),
            idle_limit,
        }
    }

    /// Changes the protocol's state and sends the resulting output. The function does not wait for space in
    /// the output buffer, so it must not be used for bulk data.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Peer) -> T) -> T {
        let answer = change(&mut self.peer.borrow_mut());
        self.output_changed.notify(usize::MAX);
        answer
    }

    /// Copies `from` to a stream until end of file, as fast as the client reads, and ends the stream.
    ///
    /// # Errors
    ///
    /// The read error of `from`. The end of a terminal is an error, too (`EIO`).
    pub(super) async fn copy(&self, from: &Watched, stream: u32) -> io::Result<()> {
        loop {
            self.room().await;
            // Checked again after the wait, because other tasks may have filled the output buffer: a
            // connection can have five hundred of them.
            let read = |fd: BorrowedFd<'_>| self.has_room().then(|| self.hand_on(fd, stream)).transpose();
            match from.read_with(read).await {
                Ok(None) => {}
                // Otherwise a fast writer and a fast client would occupy the event loop.
                Ok(Some(1..)) => reactor::yield_now().await,
                end => {
                    self.update(|peer| peer.finish(stream));
                    return end.map(|_| ());
                }
            }
        }
    }

    fn hand_on(&self, from: BorrowedFd<'_>, stream: u32) -> io::Result<usize> {
        read_scratch(from, |bytes| {
            if !bytes.is_empty() {
                self.update(|peer| peer.send(stream, bytes));
            }
        })
    }

    fn has_room(&self) -> bool {
        self.peer.borrow_mut().output().len() < OUTPUT_BYTES_MAX
    }

    /// Waits until the output buffer has space for one more piece of a stream.
    pub(super) async fn room(&self) {
        loop {
            listener!(self.output_changed => changed);
            if self.has_room() {
                return;
            }
            changed.await;
        }
    }

    /// Writes all output until the connection ends. Returns when the socket fails or no data was transferred
    /// in either direction for too long.
    pub(super) async fn transmit(&self) -> EndReason {
        let writing = async {
            loop {
                if let Err(error) = self.write_out().await {
                    return EndReason::Socket(error);
                }
                listener!(self.output_changed => changed);
                if self.peer.borrow_mut().output().is_empty() {
                    changed.await;
                }
            }
        };
        smol::future::or(writing, self.idle()).await
    }

    async fn write_out(&self) -> io::Result<()> {
        while self.has_outgoing() {
            let write = |fd: BorrowedFd<'_>| {
                let mut outgoing = self.outgoing.borrow_mut();
                let count = nix::unistd::write(fd, &outgoing.bytes[outgoing.written..])?;
                outgoing.written += count;
                Ok(count)
            };
            if self.socket.write_with(write).await? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.last_used.set(Instant::now());
        }
        Ok(())
    }

    /// Whether there is data to write; takes the next part of the output when the last one was written.
    fn has_outgoing(&self) -> bool {
        let mut outgoing = self.outgoing.borrow_mut();
        if outgoing.written == outgoing.bytes.len() {
            outgoing.bytes.clear();
            outgoing.written = 0;
            std::mem::swap(self.peer.borrow_mut().output(), &mut outgoing.bytes);
            // The output buffer has space while this part is written.
            self.output_changed.notify(usize::MAX);
        }
        !outgoing.bytes.is_empty()
    }

    async fn idle(&self) -> EndReason {
        let limit = self.idle_limit;
        if limit.is_zero() {
            return std::future::pending().await;
        }
        loop {
            let left = limit.saturating_sub(self.last_used.get().elapsed());
            if left.is_zero() {
                return EndReason::Idle(limit);
            }
            reactor::sleep(left).await;
        }
    }

    /// Sends the protocol's close message and the remaining output, and waits for the client to close the
    /// connection first: if a socket is closed while the client still writes, the kernel discards data that
    /// the client has not read yet.
    pub(super) async fn close(&self) {
        self.update(Peer::close);
        let written = smol::future::or(self.write_out(), async {
            Err(io::Error::new(io::ErrorKind::TimedOut, self.idle().await.to_string()))
        });
        if written.await.is_err() || shutdown(self.socket.fd().as_raw_fd(), Shutdown::Write).is_err() {
            return;
        }
        // Its pings show that it still reads; when they stop, the kernel delivers the rest.
        let mut rest = [0; 1024];
        while let Ok(Ok(1..)) = reactor::deadline(CLOSE_LIMIT, self.socket.read(&mut rest)).await {}
    }
}
