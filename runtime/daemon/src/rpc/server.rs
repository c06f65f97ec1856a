//! Connections: accepted, counted, served by hyper on our executor, and drained at the end.

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

use super::dispatch::{Answer, Calls, Dispatch};
use super::io::Io;
use super::service::Service;
use super::v1::image_service_server::ImageService;
use super::v1::runtime_service_server::RuntimeService;

/// A kubelet holds two connections, crictl one or two for a moment, agents a few; critest 1.36 two for each of its 122
/// specs, none of which it closes. An idle connection costs 21 KiB, and only root can open one: the limit is there for
/// a client that leaks them.
pub(super) const CONNECTIONS_MAX: usize = 512;

/// Calls at once on one connection. A kubelet calls from one goroutine per pod, and small nodes hold 110 pods.
const STREAMS_MAX: u32 = 250;

/// Metadata of a call; a kubelet with tracing sends some hundred bytes.
const HEADERS_BYTES_MAX: u32 = 16 * 1024;

/// Pause after a failed `accept`: a table of descriptors that is full does not empty at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// For a new connection's first byte. Clients speak at once; one that does not would hold a place for ever.
const SILENCE: Duration = Duration::from_secs(10);

/// At the end of a drain: for answers already given to reach their callers. Event streams have no end of their own, so
/// there is nothing longer to wait for.
const FLUSH: Duration = Duration::from_millis(250);

/// What a client gets that is one too many: GOAWAY with ENHANCE_YOUR_CALM (11) and a text (RFC 9113 §4.1, §6.8). The
/// SETTINGS frame that should come first is left out on purpose: after one, grpc-go 1.72 counts the connection as made
/// and tries again at once, 488 times in its second; without, it takes the attempt as failed and backs off.
const REFUSAL: &[u8] = b"\0\0\x1c\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0btoo many connections";

/// The counts of a [`Server`], for the SIGUSR1 dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Open connections.
    pub(crate) connections: usize,
    /// Connections refused because [`CONNECTIONS_MAX`] were open.
    pub(crate) refused: u64,
    /// Calls between request and answer.
    pub(crate) calls: usize,
    /// The most of them at once.
    pub(crate) calls_max: usize,
    /// All calls so far.
    pub(crate) calls_total: u64,
}

/// A listening socket with its connections. Dropping it drops them.
pub(crate) struct Server {
    accepting: Task<()>,
    shared: Rc<Shared>,
    /// Never sent on: closed when the drain begins.
    stop: Sender<Infallible>,
    /// Never sent on: closed when the last connection has gone.
    gone: Receiver<Infallible>,
}

#[derive(Default)]
struct Shared {
    connections: Cell<usize>,
    refused: Cell<u64>,
    /// The last client was refused.
    is_full: Cell<bool>,
    calls: Rc<Calls>,
}

impl Server {
    /// Serves both CRI services on `listener` until dropped or drained.
    pub(crate) fn start(listener: Listener, service: impl RuntimeService + ImageService) -> Server {
        Server::with(listener, |calls| Dispatch::new(service, calls))
    }

    /// Has `answer` answer what is asked on `listener`, until dropped.
    pub(crate) fn start_other(listener: Listener, answer: Answer) -> Server {
        Server::with(listener, |calls| Dispatch::<Service>::other(answer, calls))
    }

    fn with<S>(listener: Listener, dispatch: impl FnOnce(Rc<Calls>) -> Dispatch<S>) -> Server
    where
        S: RuntimeService + ImageService,
    {
        let shared = Rc::new(Shared::default());
        let (stop, stopped) = smol::channel::bounded(1);
        let (alive, gone) = smol::channel::bounded(1);
        let acceptor =
            Acceptor { dispatch: dispatch(shared.calls.clone()), shared: shared.clone(), stopped, alive };
        Server { accepting: reactor::spawn(acceptor.run(listener)), shared, stop, gone }
    }

    /// What is open and under way.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            connections: self.shared.connections.get(),
            refused: self.shared.refused.get(),
            calls: self.shared.calls.active(),
            calls_max: self.shared.calls.active_max(),
            calls_total: self.shared.calls.total(),
        }
    }

    /// Stops accepting, tells clients to go (GOAWAY), and lets calls under way finish for at most `limit`.
    /// Returns how many did not.
    pub(crate) async fn drain(self, limit: Duration) -> usize {
        self.accepting.cancel().await;
        self.stop.close();
        // On Elapsed the count below tells how many calls it was about.
        let _ = reactor::deadline(limit, self.shared.calls.none_left()).await;
        let _ = reactor::deadline(FLUSH, self.gone.recv()).await;
        self.shared.calls.active()
    }
}

struct Acceptor<S> {
    dispatch: Dispatch<S>,
    shared: Rc<Shared>,
    stopped: Receiver<Infallible>,
    alive: Sender<Infallible>,
}

impl<S: RuntimeService + ImageService> Acceptor<S> {
    async fn run(self, listener: Listener) {
        loop {
            match listener.accept().await {
                Ok(socket) => self.admit(socket),
                Err(error) => {
                    log::warn!("accept"; error = coracle_base::error::plain(&error));
                    reactor::sleep(ACCEPT_PAUSE).await;
                }
            }
            // One accept per turn: a burst of clients does not keep the others waiting.
            reactor::yield_now().await;
        }
    }

    fn admit(&self, socket: Watched) {
        let open = self.shared.connections.get();
        if open >= CONNECTIONS_MAX {
            self.shared.refused.set(self.shared.refused.get() + 1);
            // Once until there is room again; the count is in the dump.
            if !self.shared.is_full.replace(true) {
                log::warn!("connection refused"; open = open, refused = self.shared.refused.get());
            }
            // It fits a fresh socket's buffer; a client that is gone already needs no refusal.
            let _ = nix::unistd::write(socket.fd(), REFUSAL);
            return;
        }
        self.shared.is_full.set(false);
        let open = Open::new(self.shared.clone(), self.alive.clone());
        let connection = serve(socket, self.dispatch.clone(), self.stopped.clone());
        reactor::spawn(async move {
            let _open = open;
            connection.await;
        })
        .detach();
    }
}

/// One connection, from its preface to its end or, once `stopped` is closed, the end of its calls.
async fn serve<S>(socket: Watched, dispatch: Dispatch<S>, stopped: Receiver<Infallible>)
where
    S: RuntimeService + ImageService,
{
    let mut builder = hyper::server::conn::http2::Builder::new(OnReactor);
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .auto_date_header(false);
    let io = Io::new(socket);
    let heard = io.heard();
    let mut connection = pin!(builder.serve_connection(io, dispatch));
    let mut patience = Some(reactor::sleep(SILENCE));
    // Polled after the connection each time. Once there was a byte the timer goes: it would wake a quiet connection for
    // nothing, and bring back a megabyte of code that has just been let go of (settle).
    let silent = std::future::poll_fn(|context| {
        if heard.get() {
            patience = None;
        }
        match &mut patience {
            Some(patience) => Pin::new(patience).poll(context).map(|()| Some(Ok(()))),
            None => Poll::Pending,
        }
    });
    let stop = async {
        // An error: the channel was closed, which is the signal.
        let _ = stopped.recv().await;
        None
    };
    let events = smol::future::or(silent, stop);
    let ended = smol::future::or(async { Some(connection.as_mut().await) }, events).await;
    let result = match ended {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        // A client that breaks off is everyday life; it matters only to whoever looks for a fault.
        log::debug!("connection ended"; error = error);
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

/// One open connection in the counts.
struct Open {
    shared: Rc<Shared>,
    _alive: Sender<Infallible>,
}

impl Open {
    fn new(shared: Rc<Shared>, alive: Sender<Infallible>) -> Open {
        shared.connections.set(shared.connections.get() + 1);
        Open { shared, _alive: alive }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.connections.set(self.shared.connections.get() - 1);
    }
}
