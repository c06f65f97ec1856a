//! The open connections: which are idle, which do not read their answers, and which do not finish their requests. All three are
//! limited over all connections, so that clients which leak connections, do not read or do not send do not affect other clients:
//!
//! | limit | connection that is closed |
//! |---|---|
//! | number of connections | the one that has been idle for longest; those that never had a call or have an unfinished one first |
//! | bytes of unread answers | the one with the oldest unread answer |
//! | bytes of unfinished requests | the one whose oldest has lasted for most seconds; of several the one with most bytes |
//!
//! A connection is idle if all its calls wait for its client: for the rest of a request, or until an answer is read.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

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

/// Passed with an answer of several messages: each counts from when it is sent until it is read, and the answer does not end by itself.
#[derive(Clone, Copy)]
pub(super) struct Streamed;

/// Age from which an unfinished request is a reason to close its connection: one that is being sent takes milliseconds.
const SLOW: Duration = Duration::from_secs(1);

/// All open connections.
#[derive(Default)]
pub(super) struct Peers {
    open: RefCell<BTreeMap<u64, Rc<Peer>>>,
    last_peer: Cell<u64>,
    /// Number of the last request or answer.
    last_number: Cell<u64>,
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
    /// Numbers of the requests that have not arrived completely, with the times of their beginning.
    unfinished: RefCell<BTreeMap<u64, Instant>>,
    /// Number of bytes that these requests may need.
    unfinished_bytes: Cell<usize>,
    /// Number of bytes of the unread answers.
    unread_bytes: Cell<usize>,
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
            unfinished: RefCell::default(),
            unfinished_bytes: Cell::default(),
            unread_bytes: Cell::default(),
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

    /// Closes the connection that has been idle for longest; returns false if the daemon works on a call of each connection.
    pub(super) fn end_idle(&self) -> bool {
        let idle = {
            let open = self.open.borrow();
            let idle = open.values().filter(|peer| !peer.is_served());
            idle.min_by_key(|peer| match peer.unfinished_since() {
                Some(since) if since.elapsed() >= SLOW => (0, since),
                Some(since) => (2, since),
                None => (u8::from(peer.has_called.get()), peer.idle_since.get()),
            })
            .cloned()
        };
        idle.inspect(|peer| self.end(peer)).is_some()
    }

    fn end(&self, peer: &Peer) {
        peer.close.close();
        // Its memory is freed when its tasks end, which is next.
        self.unfinished_bytes.set(self.unfinished_bytes.get() - peer.unfinished_bytes.take());
        self.unread_bytes.set(self.unread_bytes.get() - peer.unread_bytes.take());
        self.remove(peer);
    }

    fn hold(&self, peer: &Peer, bytes: usize) -> u64 {
        let number = self.next_number();
        if peer.close.is_closed() {
            return number;
        }
        peer.unread.borrow_mut().insert(number);
        peer.unread_bytes.set(peer.unread_bytes.get() + bytes);
        self.unread_bytes.set(self.unread_bytes.get() + bytes);
        if self.unread_bytes.get() > UNREAD_BYTES_MAX {
            self.close_slowest_reader();
        }
        number
    }

    fn next_number(&self) -> u64 {
        self.last_number.set(self.last_number.get() + 1);
        self.last_number.get()
    }

    /// Records that a request of a connection begins, and returns its number.
    pub(super) fn begin(&self, peer: &Peer) -> u64 {
        let number = self.next_number();
        peer.unfinished.borrow_mut().insert(number, Instant::now());
        number
    }

    /// Counts bytes that an unfinished request of a connection may need.
    pub(super) fn expect(&self, peer: &Peer, bytes: usize) {
        if peer.close.is_closed() {
            return;
        }
        peer.unfinished_bytes.set(peer.unfinished_bytes.get() + bytes);
        self.unfinished_bytes.set(self.unfinished_bytes.get() + bytes);
        while self.unfinished_bytes.get() > UNFINISHED_BYTES_MAX && self.close_slowest_sender() {}
    }

    /// Records that a request has arrived, or that its call has ended.
    pub(super) fn received(&self, peer: &Peer, number: u64, bytes: usize) {
        peer.unfinished.borrow_mut().remove(&number);
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

    /// Closes a connection for the bytes of others; returns false if none has an unfinished request. A request that is being sent takes
    /// milliseconds, so that a long one is no reason to close its connection while others do not send for a second.
    fn close_slowest_sender(&self) -> bool {
        let slowest = {
            let open = self.open.borrow();
            let slow = open.values().filter_map(|peer| Some((peer, peer.unfinished_since()?)));
            slow.max_by_key(|(peer, since)| (since.elapsed().as_secs(), peer.unfinished_bytes.get()))
                .map(|(peer, _)| Rc::clone(peer))
        };
        slowest.inspect(|peer| {
            log::warn!("closing a connection whose client does not finish its requests"; bytes = peer.unfinished_bytes.get());
            self.end(peer);
        })
        .is_some()
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

    /// Whether the daemon works on a call: one whose request has arrived and that has no answer yet.
    fn is_served(&self) -> bool {
        self.calls.get() > self.unfinished.borrow().len() + self.unread.borrow().len()
    }

    /// The beginning of the oldest request that has not arrived completely.
    fn unfinished_since(&self) -> Option<Instant> {
        self.unfinished.borrow().first_key_value().map(|(_, since)| *since)
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
    let is_streamed = response.extensions_mut().remove::<Streamed>().is_some();
    let open = OpenAnswer { peers: Rc::clone(peers), call: Rc::new(call) };
    let whole = (!is_streamed).then(|| SendWrapper::new(open.hold(message + ANSWER_BYTES)));
    response.map(|body| Body::new(HeldBody { body, open: SendWrapper::new(open), whole }))
}

/// An answer that is being sent.
#[derive(Clone)]
struct OpenAnswer {
    peers: Rc<Peers>,
    call: Rc<OpenCall>,
}

impl OpenAnswer {
    fn hold(&self, bytes: usize) -> Rc<Held> {
        let number = self.peers.hold(&self.call.0, bytes);
        Rc::new(Held { answer: self.clone(), number, bytes })
    }
}

/// A message that has not been read.
struct Held {
    answer: OpenAnswer,
    number: u64,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let OpenAnswer { peers, call } = &self.answer;
        let peer = &call.0;
        peer.unread.borrow_mut().remove(&self.number);
        if !peer.close.is_closed() {
            peer.unread_bytes.set(peer.unread_bytes.get() - self.bytes);
            peers.unread_bytes.set(peers.unread_bytes.get() - self.bytes);
        }
    }
}

struct HeldBody {
    body: Body,
    open: SendWrapper<OpenAnswer>,
    /// The whole answer, unless it is streamed.
    whole: Option<SendWrapper<Rc<Held>>>,
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
        let hold = |bytes: Bytes| {
            let held = self.whole.clone().unwrap_or_else(|| SendWrapper::new(self.open.hold(bytes.len())));
            Bytes::from_owner(HeldBytes { bytes, _held: held })
        };
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

    /// An answer whose message has this many bytes.
    fn answer(peers: &Rc<Peers>, peer: &Rc<Peer>, bytes: usize) -> Response<Body> {
        let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from_static(b"x"))));
        response.extensions_mut().insert(AnswerBytes(bytes));
        hold(peers, peer.call(), response)
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
    fn a_connection_whose_calls_all_wait_for_its_client_is_idle() {
        let peers = Rc::new(Peers::default());
        let [served, reluctant, slow, sending] = [(); 4].map(|()| peers.add());
        let calls = [served.call(), served.call(), slow.call(), sending.call()];
        for peer in [&served, &slow, &sending] {
            peers.begin(peer);
        }
        slow.unfinished.borrow_mut().values_mut().for_each(|since| *since -= SLOW);
        let unread = answer(&peers, &reluctant, 0);
        let new = peers.add();
        // A request that has just begun is that of a client in use.
        for expected in [&slow, &new, &reluctant, &sending] {
            assert!(peers.end_idle());
            assert!(is_ended(expected));
        }
        assert!(!peers.end_idle() && !is_ended(&served), "one of its two requests has arrived");
        drop((calls, unread));
    }

    #[test]
    fn a_connection_with_a_long_request_is_not_closed_for_clients_that_do_not_send() {
        let peers = Rc::new(Peers::default());
        let begin = |bytes, seconds| {
            let peer = peers.add();
            peers.begin(&peer);
            peer.unfinished
                .borrow_mut()
                .values_mut()
                .for_each(|since| *since -= Duration::from_secs(seconds));
            peers.expect(&peer, bytes);
            peer
        };
        let slow: Vec<_> = (0..500).map(|_| begin(32 << 10, 1)).collect();
        let long = begin(MESSAGE_BYTES_MAX, 0);
        let given_way = slow.iter().filter(|peer| is_ended(peer)).count();
        assert_eq!((given_way, is_ended(&long)), (500 - 128, false), "no more than is needed");
        let longer = begin(MESSAGE_BYTES_MAX, 1);
        assert!(
            !is_ended(&long) && is_ended(&longer) && peers.unfinished_bytes.get() == UNFINISHED_BYTES_MAX
        );
    }

    #[test]
    fn the_connection_that_leaves_an_answer_unread_for_longest_is_closed() {
        let peers = Rc::new(Peers::default());
        let answer = |peer: &Rc<Peer>, bytes: usize| answer(&peers, peer, bytes);
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

    /// A kubelet that watches events has an answer that does not end, and reads it.
    #[test]
    fn a_stream_counts_what_its_client_has_not_read() {
        let peers = Rc::new(Peers::default());
        let watcher = peers.add();
        let stream = |peer: &Rc<Peer>| {
            let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from_static(b"x"))));
            response.extensions_mut().insert(Streamed);
            hold(&peers, peer.call(), response).into_body()
        };
        let (mut events, idle) = (stream(&watcher), peers.add());
        assert!(peers.end_idle() && is_ended(&idle) && !peers.end_idle() && !is_ended(&watcher));
        let mut context = Context::from_waker(std::task::Waker::noop());
        let frame = hyper::body::Body::poll_frame(Pin::new(&mut events), &mut context);
        assert_eq!(watcher.unread.borrow().len(), 1);
        drop(frame);
        assert_eq!((watcher.unread.borrow().len(), peers.unread_bytes.get()), (0, 0));
        let reluctant = peers.add();
        // The oldest unread answer is that of another one, and the bytes of its connection are gone with it.
        let many =
            [answer(&peers, &reluctant, MESSAGE_BYTES_MAX), answer(&peers, &watcher, MESSAGE_BYTES_MAX)];
        let more = answer(&peers, &watcher, 0);
        assert!(is_ended(&reluctant) && !is_ended(&watcher));
        drop((many, more, events));
        assert_eq!(peers.unread_bytes.get(), 0);
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
