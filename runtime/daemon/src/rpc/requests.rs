//! Requests whose messages have not arrived completely. A client announces the length of a message before it sends it (gRPC's
//! length-prefixed message), so that what a request may need is known from its first five bytes. All connections share one limit
//! ([`peers`](super::peers)). Otherwise clients that send half of their requests would decide how much memory the daemon needs.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use send_wrapper::SendWrapper;

use super::MESSAGE_BYTES_MAX;
use super::peers::{Peer, Peers};

/// Maximum number of bytes of all unfinished requests: the longest one, and some 150 short ones.
pub(super) const UNFINISHED_BYTES_MAX: usize = MESSAGE_BYTES_MAX + (4 << 20);
/// Memory in bytes that a request needs in addition to its message: stream, headers, task, the buffer of the decoder and what h2 read
/// ahead; measured with a thousand half-sent requests of 16 KiB.
const REQUEST_BYTES: usize = 24 << 10;

/// Length of what precedes a message: a flag, and four bytes of its length.
const PREFIX_BYTES: usize = 5;

/// The body of a request, counted until its end.
pub(crate) struct Counted {
    body: Incoming,
    prefix: Prefix,
    held: SendWrapper<Unfinished>,
}

impl Counted {
    pub(super) fn new(body: Incoming, peers: &Rc<Peers>, peer: &Rc<Peer>) -> Counted {
        let held = Unfinished::new(peers, peer, REQUEST_BYTES);
        Counted { body, prefix: Prefix::default(), held: SendWrapper::new(held) }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Some(length) = self.prefix.take(data)
        {
            // A longer one is refused when its length is read.
            self.held.grow(length.min(MESSAGE_BYTES_MAX));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The bytes before a message, which may arrive one by one.
#[derive(Default)]
struct Prefix {
    bytes: [u8; PREFIX_BYTES],
    count: usize,
}

impl Prefix {
    /// Takes what belongs to the prefix; returns the length of the message once it is known.
    fn take(&mut self, data: &[u8]) -> Option<usize> {
        let missing = &mut self.bytes[self.count..];
        if missing.is_empty() {
            return None;
        }
        let count = missing.len().min(data.len());
        missing[..count].copy_from_slice(&data[..count]);
        self.count += count;
        let [_, length @ ..] = self.bytes;
        (self.count == PREFIX_BYTES).then(|| u32::from_be_bytes(length) as usize)
    }
}

/// The bytes that an unfinished request may need.
struct Unfinished {
    peers: Rc<Peers>,
    peer: Rc<Peer>,
    number: u64,
    bytes: Cell<usize>,
}

impl Unfinished {
    fn new(peers: &Rc<Peers>, peer: &Rc<Peer>, bytes: usize) -> Unfinished {
        let (number, peers, peer) = (peers.begin(peer), Rc::clone(peers), Rc::clone(peer));
        let begun = Unfinished { peers, peer, number, bytes: Cell::new(0) };
        begun.grow(bytes);
        begun
    }

    fn grow(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() + bytes);
        self.peers.expect(&self.peer, bytes);
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.peers.received(&self.peer, self.number, self.bytes.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_known_from_the_first_five_bytes() {
        let mut prefix = Prefix::default();
        assert_eq!(prefix.take(b"\0\0\x01"), None);
        assert_eq!(prefix.take(b""), None);
        assert_eq!(prefix.take(b"\x02\x03message"), Some(0x1_0203));
        assert_eq!(prefix.take(b"\xff\xff\xff\xff\xff\xff"), None, "the message");
        assert_eq!(Prefix::default().take(b"\0\xff\xff\xff\xff"), Some(u32::MAX as usize));
    }

    #[test]
    fn the_connection_with_the_longest_unfinished_requests_is_closed() {
        let peers = Rc::new(Peers::default());
        let (quick, slow) = (peers.add(), peers.add());
        let request = |peer: &Rc<Peer>, bytes| Unfinished::new(&peers, peer, bytes);
        for _ in 0..1000 {
            drop(request(&quick, MESSAGE_BYTES_MAX)); // received at once
        }
        let longest = request(&slow, MESSAGE_BYTES_MAX);
        let short = request(&quick, REQUEST_BYTES);
        assert_eq!(peers.count(), 2);
        let more = request(&quick, 4 << 20);
        assert_eq!(peers.count(), 1, "the slow one is closed");
        // Its requests end later, when its tasks do; they are not counted a second time.
        drop((longest, request(&slow, MESSAGE_BYTES_MAX)));
        let fits = request(&quick, MESSAGE_BYTES_MAX - (4 << 20));
        assert_eq!(peers.count(), 1);
        drop((short, more, fits));
        assert_eq!(peers.unfinished_bytes(), 0);
    }
}
