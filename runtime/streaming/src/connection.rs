//! One upgraded connection: its socket and its protocol, pumped both ways with bounded memory.
//!
//! ```text
//!   Receiver::next ◄── buffer ◄── socket          whoever handles an event slowly stops the reading
//!   send ──► output ──► transmit ──► socket       whoever sends waits while the output is full
//! ```
//! Back pressure is TCP's, both ways: no queue grows. A stalled stream stalls its connection, as with every server of
//! these protocols (streaming 6.4).

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use coracle_base::reactor::{self, Watched};
use event_listener::{Event as Changed, listener};
use nix::sys::socket::{Shutdown, shutdown};

use super::event::{Broken, Event};
use super::peer::Peer;

/// Output that waits for the socket before senders wait, too: two of the longest frames.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// One read of a socket or a pipe: what a pipe holds, and two of the longest frames.
const READ_BYTES: usize = 64 << 10;
/// The first reads of a session: keystrokes need no more.
const FIRST_READ_BYTES: usize = 2 << 10;
/// How long the client's goodbye is waited for after its last byte. Clients ping every five seconds.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(12);

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum Lost {
    /// The client closed it.
    Closed,
    /// The client broke the protocol.
    Broken(Broken),
    /// The socket.
    Socket(io::Error),
    /// The client did not open its streams in time.
    Late,
    /// Nothing came or went for that long.
    Idle(Duration),
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Closed => f.write_str("the client closed it"),
            Lost::Broken(why) => write!(f, "the client broke the protocol: {why}"),
            Lost::Socket(error) => write!(f, "the client is gone: {error}"),
            Lost::Late => f.write_str("the client did not open its streams"),
            Lost::Idle(limit) => write!(f, "idle for {} s", limit.as_secs()),
        }
    }
}

/// An event, taken over: its bytes are in [`Receiver::bytes`].
pub(super) enum Incoming {
    Opened { stream: u32, headers: Vec<(String, String)> },
    Data { stream: u32 },
    Ended { stream: u32 },
    Reset { stream: u32 },
}

/// See the module.
pub(super) struct Connection {
    socket: Watched,
    peer: RefCell<Peer>,
    /// What is on its way out. Kept here, as whoever writes it may give up in the middle and another must go on there.
    outgoing: RefCell<Outgoing>,
    /// Output came, or went.
    output_changed: Changed,
    /// When a byte last went either way.
    last_used: Cell<Instant>,
    /// How long nothing may go either way; zero is for ever.
    idle_limit: Duration,
}

/// A piece of the protocol's output.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    written: usize,
}

/// The reading half: a buffer that a shell leaves small.
pub(super) struct Receiver {
    input: Vec<u8>,
    /// What of `input` was read and not taken yet.
    from: usize,
    to: usize,
    /// Where the last event's bytes are: in `input`, unless the protocol had to unpack them.
    bytes: Range<usize>,
    unpacked: Vec<u8>,
}

thread_local! {
    /// What reads of pipes and of sockets in pods fill, all of one turn of the loop: nothing is in it across an await.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
}

/// Reads what is there and hands it on before anybody else can; 0 is the end.
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
    /// `read`: what came with the request's head.
    pub(super) fn new(read: Vec<u8>) -> Receiver {
        Receiver { from: 0, to: read.len(), input: read, bytes: 0..0, unpacked: Vec::new() }
    }

    /// Bytes of the last [`Incoming::Data`].
    pub(super) fn bytes(&self) -> &[u8] {
        if self.bytes.is_empty() { &self.unpacked } else { &self.input[self.bytes.clone()] }
    }

    /// Waits for the next event.
    pub(super) async fn next(&mut self, connection: &Connection) -> Result<Incoming, Lost> {
        loop {
            if let Some(incoming) = self.take(&mut connection.peer.borrow_mut())? {
                return Ok(incoming);
            }
            // Answers to what was just taken: a PONG, the refusal of a stream.
            connection.output_changed.notify(usize::MAX);
            // A full buffer is a flow, which deserves a large one.
            if self.to == self.input.len() {
                let length = if self.input.is_empty() { FIRST_READ_BYTES } else { READ_BYTES };
                self.input.resize(length.max(self.input.len()), 0);
            }
            let count = connection.socket.read(&mut self.input).await.map_err(Lost::Socket)?;
            if count == 0 {
                return Err(Lost::Closed);
            }
            (self.from, self.to) = (0, count);
            connection.last_used.set(Instant::now());
        }
    }

    fn take(&mut self, peer: &mut Peer) -> Result<Option<Incoming>, Lost> {
        let is_packed = !matches!(peer, Peer::Spdy(_));
        let mut rest = &self.input[self.from..self.to];
        let event = peer.next(&mut rest).map_err(Lost::Broken)?;
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
            // SPDY hands on what it was given: the bytes just before what is left.
            Some(Event::Data { stream, bytes }) => {
                self.bytes = end - bytes.len()..end;
                Some(Incoming::Data { stream })
            }
            Some(Event::Ended { stream }) => Some(Incoming::Ended { stream }),
            Some(Event::Reset { stream }) => Some(Incoming::Reset { stream }),
            Some(Event::Closed) => return Err(Lost::Closed),
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

    /// Changes the protocol's state; whatever that writes goes out. Not for a flow of bytes: it does not wait.
    pub(super) fn tell<T>(&self, change: impl FnOnce(&mut Peer) -> T) -> T {
        let answer = change(&mut self.peer.borrow_mut());
        self.output_changed.notify(usize::MAX);
        answer
    }

    /// Copies `from` to a stream until its end, as fast as the client takes it, and ends the stream.
    ///
    /// # Errors
    ///
    /// What broke `from`. The end of a terminal is told in the same way (`EIO`).
    pub(super) async fn copy(&self, from: &Watched, stream: u32) -> io::Result<()> {
        loop {
            self.room().await;
            // What comes late may find that others have filled the output meanwhile: five hundred of them on a
            // connection.
            let read = |fd: BorrowedFd<'_>| self.has_room().then(|| self.hand_on(fd, stream)).transpose();
            match from.read_with(read).await {
                Ok(None) => {}
                // A fast writer and a fast client would keep the loop to themselves.
                Ok(Some(1..)) => reactor::yield_now().await,
                end => {
                    self.tell(|peer| peer.finish(stream));
                    return end.map(|_| ());
                }
            }
        }
    }

    fn hand_on(&self, from: BorrowedFd<'_>, stream: u32) -> io::Result<usize> {
        read_scratch(from, |bytes| {
            if !bytes.is_empty() {
                self.tell(|peer| peer.send(stream, bytes));
            }
        })
    }

    fn has_room(&self) -> bool {
        self.peer.borrow_mut().output().len() < OUTPUT_BYTES_MAX
    }

    /// Waits until there is room for one more piece of a stream.
    pub(super) async fn room(&self) {
        loop {
            listener!(self.output_changed => changed);
            if self.has_room() {
                return;
            }
            changed.await;
        }
    }

    /// Writes what there is to write, for as long as it lives; ends only when the socket does, or when nothing has gone
    /// either way for too long.
    pub(super) async fn transmit(&self) -> Lost {
        let writing = async {
            loop {
                if let Err(error) = self.write_out().await {
                    return Lost::Socket(error);
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

    /// Takes the next piece over where the last is out.
    fn has_outgoing(&self) -> bool {
        let mut outgoing = self.outgoing.borrow_mut();
        if outgoing.written == outgoing.bytes.len() {
            outgoing.bytes.clear();
            outgoing.written = 0;
            std::mem::swap(self.peer.borrow_mut().output(), &mut outgoing.bytes);
            // There is room for the next while this goes out.
            self.output_changed.notify(usize::MAX);
        }
        !outgoing.bytes.is_empty()
    }

    async fn idle(&self) -> Lost {
        let limit = self.idle_limit;
        if limit.is_zero() {
            return std::future::pending().await;
        }
        loop {
            let left = limit.saturating_sub(self.last_used.get().elapsed());
            if left.is_zero() {
                return Lost::Idle(limit);
            }
            reactor::sleep(left).await;
        }
    }

    /// Says goodbye, writes what is left as fast as the client takes it, and lets the client hang up first: closing a
    /// socket that the client still writes to would take back what it has not read yet.
    pub(super) async fn close(&self) {
        self.tell(Peer::close);
        let written = smol::future::or(self.write_out(), async {
            Err(io::Error::new(io::ErrorKind::TimedOut, self.idle().await.to_string()))
        });
        if written.await.is_err() || shutdown(self.socket.fd().as_raw_fd(), Shutdown::Write).is_err() {
            return;
        }
        // Its pings say that it is still reading; once it is silent, the kernel delivers the rest without us.
        let mut rest = [0; 1024];
        while let Ok(Ok(1..)) = reactor::deadline(CLOSE_LIMIT, self.socket.read(&mut rest)).await {}
    }
}
