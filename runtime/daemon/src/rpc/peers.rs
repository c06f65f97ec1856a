//! The open connections: which are idle, which do not read their answers, and which do not finish their requests. All three are
//! limited over all connections, so that clients which leak connections, do not read or do not send do not affect other clients:
//!
//! | limit | connection that is closed |
//! |---|---|
//! | number of connections | the one that has been idle for longest; connections that never had a call first |
//! | bytes of unread answers | the one with the oldest unread answer |
//! | bytes of unfinished requests | the one with most of them |

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use coracle_base::log;
use http::Response;
use hyper::body::{Frame, SizeHint};
use send_wrapper::SendWrapper;
use smol::channel::{Receiver, Sender};
use tonic::Status;
use tonic::body::Body;

use super::MESSAGE_BYTES_MAX;
use super::requests::UNFINISHED_BYTES_MAX;

/// Maximum number of bytes of unread answers of all connections: two of the longest, or four thousand short ones.
const UNREAD_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX;
/// Memory in bytes that an answer needs in addition to its message: stream, headers and task.
const ANSWER_BYTES: usize = 8 << 10;

/// Length of an answer's message in bytes, passed with the answer ([`tonic::Response::extensions_mut`]).
#[derive(Clone, Copy)]
pub(super) struct AnswerBytes(pub(super) usize);

/// All open connections.
#[derive(Default)]
pub(super) struct Peers {
    open: RefCell<BTreeMap<u64, Rc<Peer>>>,
    last_peer: Cell<u64>,
    last_answer: Cell<u64>,
    unread_bytes: Cell<usize>,
    unfinished_bytes: Cell<usize>,
}

/// One open connection.
pub(super) struct Peer {
    id: u64,
    /// Number of calls between the request and the last byte of the answer.
    calls: Cell<usize>,
    has_called: Cell<bool>,
    /// Time at which the connection was opened, or its last call ended.
    idle_since: Cell<Instant>,
    /// Numbers of the answers that have not been read completely; numbers increase over all connections.
    unread: RefCell<BTreeSet<u64>>,
    /// Number of bytes that requests may need which have not arrived completely.
    unfinished_bytes: Cell<usize>,
    /// No value is ever sent: the channel is closed when the connection must be closed.
    close: Sender<Infallible>,
    closed: Receiver<Infallible>,
}

impl Peers {
    /// Adds a connection.
    pub(super) fn add(&self) -> Rc<Peer> {
        let id = self.last_peer.get() + 1;
        self.last_peer.set(id);
        let (close, closed) = smol::channel::bounded(1);
        let peer = Rc::new(Peer {
            id,
            calls: Cell::new(0),
            has_called: Cell::new(false),
            idle_since: Cell::new(Instant::now()),
            unread: RefCell::default(),
            unfinished_bytes: Cell::default(),
            close,
            closed,
        });
        self.open.borrow_mut().insert(id, Rc::clone(&peer));
        peer
    }

    /// Removes a connection that has ended.
    pub(super) fn remove(&self, peer: &Peer) {
        self.open.borrow_mut().remove(&peer.id);
    }

    /// Number of open connections.
    pub(super) fn count(&self) -> usize {
        self.open.borrow().len()
    }

    /// Closes the connection that has been idle for longest; returns false if all connections have a call in progress.
    pub(super) fn end_idle(&self) -> bool {
        let idle = {
            let open = self.open.borrow();
            let idle = open.values().filter(|peer| peer.calls.get() == 0);
            idle.min_by_key(|peer| (peer.has_called.get(), peer.idle_since.get())).cloned()
        };
        idle.inspect(|peer| self.end(peer)).is_some()
    }

    fn end(&self, peer: &Peer) {
        peer.close.close();
        // Its memory is freed when its tasks end, which is next.
        self.unfinished_bytes.set(self.unfinished_bytes.get() - peer.unfinished_bytes.take());
        self.remove(peer);
    }

    fn hold(&self, peer: &Peer, bytes: usize) -> u64 {
        let number = self.last_answer.get() + 1;
        self.last_answer.set(number);
        peer.unread.borrow_mut().insert(number);
        self.unread_bytes.set(self.unread_bytes.get() + bytes);
        if self.unread_bytes.get() > UNREAD_BYTES_MAX {
            self.close_slowest_reader();
        }
        number
    }

    /// Counts bytes that an unfinished request of a connection may need.
    pub(super) fn expect(&self, peer: &Peer, bytes: usize) {
        if peer.close.is_closed() {
            return;
        }
        peer.unfinished_bytes.set(peer.unfinished_bytes.get() + bytes);
        self.unfinished_bytes.set(self.unfinished_bytes.get() + bytes);
        if self.unfinished_bytes.get() > UNFINISHED_BYTES_MAX {
            self.close_slowest_sender();
        }
    }

    /// Ends the count of a request's bytes.
    pub(super) fn received(&self, peer: &Peer, bytes: usize) {
        if !peer.close.is_closed() {
            peer.unfinished_bytes.set(peer.unfinished_bytes.get() - bytes);
            self.unfinished_bytes.set(self.unfinished_bytes.get() - bytes);
        }
    }

    /// Number of bytes that all unfinished requests may need.
    #[cfg(test)]
    pub(super) fn unfinished_bytes(&self) -> usize {
        self.unfinished_bytes.get()
    }

    fn close_slowest_sender(&self) {
        let slowest = {
            let open = self.open.borrow();
            open.values().max_by_key(|peer| peer.unfinished_bytes.get()).cloned()
        };
        if let Some(peer) = slowest {
            log::warn!("closing a connection whose client does not finish its requests"; bytes = peer.unfinished_bytes.get());
            self.end(&peer);
        }
    }

    /// Closes the connection with the oldest unread answer; its memory is freed when its tasks end.
    fn close_slowest_reader(&self) {
        let reluctant = {
            let open = self.open.borrow();
            let oldest = |peer: &&Rc<Peer>| peer.unread.borrow().first().copied().unwrap_or(u64::MAX);
            open.values().min_by_key(oldest).cloned()
        };
        if let Some(peer) = reluctant {
            log::warn!("closing a connection whose client does not read its answers"; answers = peer.unread.borrow().len());
            self.end(&peer);
        }
    }
}

impl Peer {
    /// Waits until the connection must be closed for another one.
    pub(super) async fn must_close(&self) {
        // An error: the channel was closed, which is the signal.
        let _ = self.closed.recv().await;
    }

    /// Records that a call begins.
    pub(super) fn call(self: &Rc<Self>) -> OpenCall {
        self.calls.set(self.calls.get() + 1);
        self.has_called.set(true);
        OpenCall(Rc::clone(self))
    }
}

/// One call of a connection, until its answer is read or dropped.
pub(super) struct OpenCall(Rc<Peer>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.calls.set(self.0.calls.get() - 1);
        self.0.idle_since.set(Instant::now());
    }
}

/// Counts an answer until its last byte has been sent.
pub(super) fn hold(peers: &Rc<Peers>, call: OpenCall, mut response: Response<Body>) -> Response<Body> {
    let message = response.extensions_mut().remove::<AnswerBytes>().map_or(0, |AnswerBytes(bytes)| bytes);
    let bytes = message + ANSWER_BYTES;
    let number = peers.hold(&call.0, bytes);
    let held = SendWrapper::new(Rc::new(Held { peers: Rc::clone(peers), call, number, bytes }));
    response.map(|body| Body::new(HeldBody { body, held }))
}

struct Held {
    peers: Rc<Peers>,
    call: OpenCall,
    number: u64,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.call.0.unread.borrow_mut().remove(&self.number);
        self.peers.unread_bytes.set(self.peers.unread_bytes.get() - self.bytes);
    }
}

struct HeldBody {
    body: Body,
    held: SendWrapper<Rc<Held>>,
}

/// A buffer of an answer. h2 takes it from the body as soon as the client's window has room for one byte, and drops it when all of
/// it is sent; until then the answer is counted.
struct HeldBytes {
    bytes: Bytes,
    _held: SendWrapper<Rc<Held>>,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl hyper::body::Body for HeldBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let hold = |bytes| Bytes::from_owner(HeldBytes { bytes, _held: self.held.clone() });
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(hold))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_ended(peer: &Peer) -> bool {
        peer.closed.is_closed()
    }

    #[test]
    fn of_idle_connections_those_without_a_call_go_first_and_then_the_longest_idle() {
        let peers = Peers::default();
        let [busy, used, older, newer] = [(); 4].map(|()| peers.add());
        let under_way = busy.call();
        drop(used.call());
        for expected in [&older, &newer, &used] {
            assert!(peers.end_idle());
            assert!(is_ended(expected));
        }
        assert!(!peers.end_idle() && !is_ended(&busy));
        assert_eq!(peers.count(), 1);
        drop(under_way);
        assert!(peers.end_idle() && peers.count() == 0);
    }

    #[test]
    fn the_connection_that_leaves_an_answer_unread_for_longest_gives_way() {
        let peers = Rc::new(Peers::default());
        let answer = |peer: &Rc<Peer>, bytes: usize| {
            let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from_static(b"x"))));
            response.extensions_mut().insert(AnswerBytes(bytes));
            hold(&peers, peer.call(), response)
        };
        let (reluctant, reader) = (peers.add(), peers.add());
        for _ in 0..1000 {
            drop(answer(&reader, MESSAGE_BYTES_MAX)); // read at once
        }
        let held = answer(&reluctant, MESSAGE_BYTES_MAX);
        let next = answer(&reader, MESSAGE_BYTES_MAX);
        assert!(is_ended(&reluctant) && !is_ended(&reader));
        drop((held, next));
        assert_eq!(peers.unread_bytes.get(), 0);
        // Short ones are counted, too.
        let mut many = Vec::new();
        while !is_ended(&reader) {
            many.push(answer(&reader, 0));
        }
        assert_eq!(many.len(), UNREAD_BYTES_MAX / ANSWER_BYTES + 1);
    }

    #[test]
    fn an_answer_is_counted_until_its_last_buffer_is_dropped() {
        let peers = Rc::new(Peers::default());
        let peer = peers.add();
        let response = Response::new(Body::new(http_body_util::Full::new(Bytes::from_static(b"x"))));
        let mut body = hold(&peers, peer.call(), response).into_body();
        let mut context = Context::from_waker(std::task::Waker::noop());
        let frame = hyper::body::Body::poll_frame(Pin::new(&mut body), &mut context);
        drop(body);
        assert_eq!((peers.unread_bytes.get(), peer.calls.get()), (ANSWER_BYTES, 1), "h2 has the buffer");
        let Poll::Ready(Some(Ok(frame))) = frame else { unreachable!("the body has a frame") };
        let bytes = frame.into_data().expect("data");
        assert_eq!(bytes, "x");
        drop(bytes);
        assert_eq!((peers.unread_bytes.get(), peer.calls.get()), (0, 0));
    }
}
