//! Accepts and counts connections, serves them with hyper, and drains them at shutdown.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Task, Watched};
use smol::channel::{Receiver, Sender};

use super::dispatch::{Answer, Calls, Dispatch, PeerDispatch};
use super::io::{self, Io};
use super::peers::{Peer, Peers};

/// Maximum number of open connections. A kubelet holds two, crictl one or two for a short time, agents a few; critest 1.36
/// opens two for each of its 122 specs and closes none. An idle connection needs 21 KiB, and only root can open one: the limit
/// protects against a client that leaks connections. For a new connection, the one that has been idle for longest is closed.
pub(super) const CONNECTIONS_MAX: usize = 512;

/// Maximum number of concurrent calls per connection. A kubelet uses one goroutine per pod, and small nodes have up to 110
/// pods.
const STREAMS_MAX: u32 = 250;

/// Maximum size in bytes of a call's metadata; a kubelet with tracing sends some hundred bytes.
const HEADERS_BYTES_MAX: u32 = 16 * 1024;

/// Pause after a failed `accept`: a full descriptor table needs time to empty.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time limit for a new connection's preface, which clients send at once.
const PREFACE_LIMIT: Duration = Duration::from_secs(10);
/// Length in bytes of the preface `PRI * HTTP/2.0\r \r SM\r \r ` (RFC 9113 §3.4).
const PREFACE_BYTES: usize = 24;

/// Time at the end of a drain in which pending responses are sent. Event streams do not end by themselves, so a longer wait is
/// not useful.
const FLUSH: Duration = Duration::from_millis(250);

/// The response to a connection above the limit: GOAWAY with ENHANCE_YOUR_CALM (11) and a text (RFC 9113 §4.1, §6.8). The
/// response is not preceded by a SETTINGS frame: after such a frame grpc-go 1.72 considers the connection established and
/// retries immediately, 488 times per second; without it grpc-go treats the attempt as failed and backs off.
const REFUSAL: &[u8] = b"\0\0\x1c\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0btoo many connections";

/// Counters of a [`Server`], for the SIGUSR1 dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Number of open connections.
    pub(crate) connections: usize,
    /// Number of connections that were refused because [`CONNECTIONS_MAX`] were open and the daemon worked on a call of each.
    pub(crate) refused: u64,
    /// Number of running calls.
    pub(crate) calls: usize,
    /// Maximum number of concurrent calls so far.
    pub(crate) calls_max: usize,
    /// Total number of calls.
    pub(crate) calls_total: u64,
}

/// A listening socket with its connections, which are closed on drop.
pub(crate) struct Server {
    accepting: Task<()>,
    shared: Rc<Shared>,
    /// Closed when the drain starts; no value is ever sent.
    stop: Sender<Infallible>,
    /// Closed when the last connection has ended; no value is ever sent.
    gone: Receiver<Infallible>,
}

#[derive(Default)]
struct Shared {
    peers: Rc<Peers>,
    refused: Cell<u64>,
    /// Whether the most recent connection was refused.
    is_full: Cell<bool>,
    calls: Rc<Calls>,
}

impl Server {
    /// Serves requests on `listener` with `answer` until it is dropped or drained.
    pub(crate) fn start(listener: Listener, answer: Answer) -> Server {
        Server::with(listener, Rc::default(), answer)
    }

    /// Serves another API on `listener` in the same way. The limits of connections, requests and answers are those of this server and
    /// the new one together.
    pub(crate) fn start_beside(&self, listener: Listener, answer: Answer) -> Server {
        Server::with(listener, Rc::clone(&self.shared.peers), answer)
    }

    fn with(listener: Listener, peers: Rc<Peers>, answer: Answer) -> Server {
        let shared = Rc::new(Shared { peers, ..Shared::default() });
        let (stop, stopped) = smol::channel::bounded(1);
        let (alive, gone) = smol::channel::bounded(1);
        let dispatch = Dispatch::new(answer, shared.calls.clone());
        let acceptor = Acceptor { dispatch, shared: shared.clone(), stopped, alive };
        Server { accepting: reactor::spawn(acceptor.run(listener)), shared, stop, gone }
    }

    /// Returns the current counters.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            connections: self.shared.peers.count(),
            refused: self.shared.refused.get(),
            calls: self.shared.calls.active(),
            calls_max: self.shared.calls.active_max(),
            calls_total: self.shared.calls.total(),
        }
    }

    /// Stops accepting connections, sends GOAWAY to clients, and waits at most `limit` for running calls.
    /// Returns the number of unfinished calls.
    pub(crate) async fn drain(self, limit: Duration) -> usize {
        self.accepting.cancel().await;
        self.stop.close();
        // On timeout the number of remaining calls is returned below.
        let _ = reactor::deadline(limit, self.shared.calls.none_left()).await;
        let _ = reactor::deadline(FLUSH, self.gone.recv()).await;
        self.shared.calls.active()
    }
}

struct Acceptor {
    dispatch: Dispatch,
    shared: Rc<Shared>,
    stopped: Receiver<Infallible>,
    alive: Sender<Infallible>,
}

impl Acceptor {
    async fn run(self, listener: Listener) {
        loop {
            match listener.accept().await {
                Ok(socket) => self.admit(socket),
                Err(error) => {
                    log::warn!("cannot accept a CRI connection"; error = coracle_base::error::describe_io(&error));
                    reactor::sleep(ACCEPT_PAUSE).await;
                }
            }
            // One accept per turn, so that a burst of clients does not delay others.
            reactor::yield_now().await;
        }
    }

    fn admit(&self, socket: Watched) {
        let open = self.shared.peers.count();
        if open >= CONNECTIONS_MAX && !self.shared.peers.end_idle() {
            self.shared.refused.set(self.shared.refused.get() + 1);
            // Logged once until there is a free slot; the dump has the count.
            if !self.shared.is_full.replace(true) {
                log::warn!("CRI connection refused, too many are open"; open = open, refused = self.shared.refused.get());
            }
            // It fits into the buffer of a new socket; an error means that the client has disconnected.
            let _ = nix::unistd::write(socket.fd(), REFUSAL);
            return;
        }
        self.shared.is_full.set(false);
        let open = Open::new(self.shared.clone(), self.alive.clone());
        let dispatch = PeerDispatch {
            dispatch: self.dispatch.clone(),
            peers: Rc::clone(&self.shared.peers),
            peer: Rc::clone(&open.peer),
        };
        let connection = serve(socket, dispatch, self.stopped.clone());
        reactor::spawn(async move {
            let _open = open;
            connection.await;
        })
        .detach();
    }
}

/// Serves one connection from its preface until its end, or until the end of its calls after `stopped` is closed.
async fn serve(socket: Watched, dispatch: PeerDispatch, stopped: Receiver<Infallible>) {
    let mut builder = hyper::server::conn::http2::Builder::new(OnReactor);
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .auto_date_header(false);
    let io = Io::new(socket);
    let (heard, output, peer) = (io.heard(), io.output(), Rc::clone(&dispatch.peer));
    let mut connection = pin!(builder.serve_connection(io, dispatch));
    let mut patience = Some(reactor::sleep(PREFACE_LIMIT));
    // Polled after the connection each time. Once the preface is there the timer goes: it would wake a quiet connection for
    // nothing, and load a megabyte of code again that was just released (`reclaim`).
    let silent = std::future::poll_fn(|context| {
        if heard.get() >= PREFACE_BYTES {
            patience = None;
        }
        match &mut patience {
            Some(patience) => Pin::new(patience).poll(context).map(|()| Some(Ok(()))),
            None => Poll::Pending,
        }
    });
    let stop = async {
        // The error means that the channel was closed, which is the signal.
        let _ = stopped.recv().await;
        None
    };
    let given_way = async {
        peer.must_close().await;
        Some(Ok(()))
    };
    let events = smol::future::or(smol::future::or(silent, given_way), stop);
    let ended = smol::future::or(async { Some(io::serve(connection.as_mut(), &output).await) }, events).await;
    let result = match ended {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            io::serve(connection, &output).await
        }
    };
    if let Err(error) = result {
        // Clients often disconnect without notice, so this is logged at level debug only.
        log::debug!("CRI connection ended with an error"; error = error);
    }
}

/// Runs hyper's tasks (one per call) on this thread's executor.
#[derive(Clone, Copy)]
pub(super) struct OnReactor;

impl<F> hyper::rt::Executor<F> for OnReactor
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        reactor::spawn(future).detach();
    }
}

/// An open connection in the counter; dropping the value decrements the counter.
struct Open {
    shared: Rc<Shared>,
    peer: Rc<Peer>,
    _alive: Sender<Infallible>,
}

impl Open {
    fn new(shared: Rc<Shared>, alive: Sender<Infallible>) -> Open {
        let peer = shared.peers.add();
        Open { shared, peer, _alive: alive }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.peers.remove(&self.peer);
    }
}
