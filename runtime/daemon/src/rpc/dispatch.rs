//! Passes HTTP/2 requests to the handler of their socket, applies the caller's deadline and counts running calls.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use coracle_base::reactor;
use http::{Request, Response};
use hyper::body::Incoming;
use tonic::Status;
use tonic::body::Body;

use super::peers::{self, Peer, Peers};
use super::requests::Counted;
use super::{pieces, timeout};
use crate::reclaim;

/// The handler of the requests to a socket.
pub(crate) type Answer = Rc<dyn Fn(Request<Counted>) -> Answering>;

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>;

/// The handler of all connections' requests; clones share it.
#[derive(Clone)]
pub(super) struct Dispatch {
    answer: Answer,
    calls: Rc<Calls>,
}

impl Dispatch {
    pub(super) fn new(answer: Answer, calls: Rc<Calls>) -> Dispatch {
        Dispatch { answer, calls }
    }
}

/// The service that answers the requests of one connection.
pub(super) struct PeerDispatch {
    pub(super) dispatch: Dispatch,
    pub(super) peers: Rc<Peers>,
    pub(super) peer: Rc<Peer>,
}

impl hyper::service::Service<Request<Incoming>> for PeerDispatch {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let under_way = self.dispatch.calls.enter();
        let (peers, call) = (Rc::clone(&self.peers), self.peer.call());
        let limit = timeout::of(request.headers());
        let answer = (self.dispatch.answer)(request.map(|body| Counted::new(body, &self.peers, &self.peer)));
        Box::pin(async move {
            let _under_way = under_way;
            let answer = match limit {
                Some(limit) => reactor::deadline(limit, answer).await.unwrap_or_else(|_| Ok(too_late(limit))),
                None => answer.await,
            };
            let answer = answer.map(name_oversize).map(pieces::replace_body);
            answer.map(|response| peers::hold(&peers, call, response))
        })
    }
}

/// Replaces OUT_OF_RANGE, which tonic returns for a message above its limit, by RESOURCE_EXHAUSTED, as in
/// other servers. coracle never returns OUT_OF_RANGE itself (`status`).
fn name_oversize(mut response: Response<Body>) -> Response<Body> {
    if let Some(status) = response.headers_mut().get_mut(Status::GRPC_STATUS)
        && status.as_bytes() == b"11"
    {
        *status = http::HeaderValue::from_static("8");
    }
    response
}

fn too_late(limit: Duration) -> Response<Body> {
    Status::deadline_exceeded(format!("the call's own limit of {} ms passed", limit.as_millis())).into_http()
}

/// The number of calls between request and response header; a drain waits until it is 0.
#[derive(Default)]
pub(super) struct Calls {
    active: Cell<usize>,
    active_max: Cell<usize>,
    total: Cell<u64>,
    drained: RefCell<Option<Waker>>,
}

impl Calls {
    pub(super) fn active(&self) -> usize {
        self.active.get()
    }

    /// The maximum number of concurrent calls so far.
    pub(super) fn active_max(&self) -> usize {
        self.active_max.get()
    }

    pub(super) fn total(&self) -> u64 {
        self.total.get()
    }

    /// Waits until no call is running. Only one task may wait, the drain.
    pub(super) async fn none_left(&self) {
        std::future::poll_fn(|context| {
            if self.active.get() == 0 {
                return Poll::Ready(());
            }
            *self.drained.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn enter(self: &Rc<Calls>) -> UnderWay {
        reclaim::schedule();
        self.active.set(self.active.get() + 1);
        self.active_max.set(self.active_max.get().max(self.active.get()));
        self.total.set(self.total.get() + 1);
        UnderWay(self.clone())
    }
}

/// A running call in the counter [`Calls`], until it completes, or its caller disconnects and the future is dropped.
struct UnderWay(Rc<Calls>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.active.set(self.0.active.get() - 1);
        if self.0.active.get() == 0 {
            let drained = self.0.drained.take();
            if let Some(waker) = drained {
                waker.wake();
            }
        }
    }
}
