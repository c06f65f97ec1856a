//! One upgraded connection: its socket and its protocol, pumped both ways with bounded memory.
//!
//! ```text
//!   Receiver::next ◄── buffer ◄── socket          whoever handles an event slowly stops the reading
//!   send ──► output ──► transmit ──► socket       whoever sends waits while the output is full
//! ```
//! Back pressure is TCP's, both ways: no queue grows. A stalled stream stalls its connection, as with every server of
//! these protocols (streaming facts §6.4).

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use event_listener::{Event as Changed, listener};
use nix::sys::socket::{Shutdown, shutdown};

use super::event::{Broken, Event};
use super::peer::Peer;
use crate::reactor::{self, Watched};

/// Output that waits for the socket before senders wait, too: two of the longest frames.
const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// One read of a socket or a pipe: what a pipe holds, and two of the longest frames.
const READ_BYTES: usize = 64 << 10;
/// The first reads of a session: keystrokes need no more.
const FIRST_READ_BYTES: usize = 2 << 10;
/// How long the last bytes, and the client's goodbye, are waited for.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

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
    /// What was written, for the next output.
    spare: Cell<Vec<u8>>,
    /// Output came, or went.
    output_changed: Changed,
    /// When a byte last went either way.
    last_used: Cell<Instant>,
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
    from.read_with(|fd| {
        SCRATCH.with_borrow_mut(|scratch| {
            let count = nix::unistd::read(fd, scratch)?;
            hand_on(&scratch[..count]);
            Ok(count)
        })
    })
    .await
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
    pub(super) fn new(socket: Watched, peer: Peer) -> Connection {
        Connection {
            socket,
            peer: RefCell::new(peer),
            spare: Cell::default(),
            output_changed: Changed::new(),
            last_used: Cell::new(Instant::now()),
        }
    }

    /// Changes the protocol's state; whatever that writes goes out. Not for a flow of bytes: it does not wait.
    pub(super) fn tell<T>(&self, change: impl FnOnce(&mut Peer) -> T) -> T {
        let answer = change(&mut self.peer.borrow_mut());
        self.output_changed.notify(usize::MAX);
        answer
    }

    /// Copies `from` to a stream until its end, as fast as the client takes it, and ends the stream.
    pub(super) async fn copy(&self, from: &Watched, stream: u32) {
        loop {
            self.room().await;
            let hand_on = |bytes: &[u8]| {
                if !bytes.is_empty() {
                    self.tell(|peer| peer.send(stream, bytes));
                }
            };
            // A terminal's end is EIO; whatever else a read says, it will not get better.
            if read_through(from, hand_on).await.unwrap_or(0) == 0 {
                return self.tell(|peer| peer.finish(stream));
            }
            // A fast writer and a fast client would keep the loop to themselves.
            reactor::yield_now().await;
        }
    }

    /// Waits until there is room for one more piece of a stream.
    pub(super) async fn room(&self) {
        loop {
            listener!(self.output_changed => changed);
            if self.peer.borrow_mut().output().len() < OUTPUT_BYTES_MAX {
                return;
            }
            changed.await;
        }
    }

    /// Writes what there is to write, for as long as it lives; ends only when the socket does, or when nothing has gone
    /// either way for `idle`.
    pub(super) async fn transmit(&self, idle: Duration) -> Lost {
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
        smol::future::or(writing, self.idle(idle)).await
    }

    async fn write_out(&self) -> io::Result<()> {
        loop {
            let spare = self.spare.take();
            let mut output = std::mem::replace(self.peer.borrow_mut().output(), spare);
            if output.is_empty() {
                return Ok(());
            }
            // There is room for the next while this goes out.
            self.output_changed.notify(usize::MAX);
            self.socket.write_all(&output).await?;
            self.last_used.set(Instant::now());
            output.clear();
            self.spare.set(output);
        }
    }

    async fn idle(&self, limit: Duration) -> Lost {
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

    /// Says goodbye, writes what is left, and gives the client a moment to hang up first.
    pub(super) async fn close(&self) {
        self.tell(Peer::close);
        let closed = async {
            self.write_out().await?;
            shutdown(self.socket.fd().as_raw_fd(), Shutdown::Write)?;
            let mut rest = [0; 1024];
            while self.socket.read(&mut rest).await? > 0 {}
            Ok::<(), io::Error>(())
        };
        // A client that does not read, or never hangs up, is cut off.
        let _ = reactor::deadline(CLOSE_LIMIT, closed).await;
    }
}
