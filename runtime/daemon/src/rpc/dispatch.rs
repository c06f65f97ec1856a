//! Routes HTTP/2 requests to services, applies the caller's deadline and counts running calls.

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
use tonic::codegen::Service as _;

use super::peers::{self, Peer, Peers};
use super::requests::Counted;
use super::v1::image_service_server::{ImageService, ImageServiceServer};
use super::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use super::{MESSAGE_BYTES_MAX, pieces, timeout};
use crate::reclaim;

/// A handler of requests to sockets other than the CRI's.
pub(crate) type Answer = Rc<dyn Fn(Request<Incoming>) -> Answering>;

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>;

/// The handler of all connections' requests; clones share it.
pub(super) struct Dispatch<S> {
    services: Services<S>,
    calls: Rc<Calls>,
}

/// The service that answers the requests of one connection.
pub(super) struct PeerDispatch<S> {
    pub(super) dispatch: Dispatch<S>,
    pub(super) peers: Rc<Peers>,
    pub(super) peer: Rc<Peer>,
}

enum Services<S> {
    Cri {
        runtime: RuntimeServiceServer<S>,
        image: ImageServiceServer<S>,
    },
    /// A handler of another API. It is a variant of the same enum, so that the HTTP/2 code is compiled only once.
    Other(Answer),
}

// Not derived, because a derive would require `S: Clone`, although tonic shares one `S`.
impl<S> Clone for Dispatch<S> {
    fn clone(&self) -> Dispatch<S> {
        let services = match &self.services {
            Services::Cri { runtime, image } => {
                Services::Cri { runtime: runtime.clone(), image: image.clone() }
            }
            Services::Other(answer) => Services::Other(Rc::clone(answer)),
        };
        Dispatch { services, calls: self.calls.clone() }
    }
}

impl<S: RuntimeService + ImageService> Dispatch<S> {
    pub(super) fn new(service: S, calls: Rc<Calls>) -> Dispatch<S> {
        let service = std::sync::Arc::new(service);
        let runtime = RuntimeServiceServer::from_arc(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let image = ImageServiceServer::from_arc(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Dispatch { services: Services::Cri { runtime, image }, calls }
    }

    pub(super) fn other(answer: Answer, calls: Rc<Calls>) -> Dispatch<S> {
        Dispatch { services: Services::Other(answer), calls }
    }
}

impl<S: RuntimeService + ImageService> hyper::service::Service<Request<Incoming>> for PeerDispatch<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let under_way = self.dispatch.calls.enter();
        let (peers, call) = (Rc::clone(&self.peers), self.peer.call());
        let limit = timeout::of(request.headers());
        let count = |body| Counted::new(body, &self.peers, &self.peer);
        let answer: Answering = match (&self.dispatch.services, service_of(request.uri().path())) {
            (Services::Other(answer), _) => answer(request),
            (Services::Cri { runtime, .. }, "runtime.v1.RuntimeService") => {
                runtime.clone().call(request.map(count))
            }
            (Services::Cri { image, .. }, "runtime.v1.ImageService") => {
                image.clone().call(request.map(count))
            }
            (Services::Cri { .. }, other) => {
                let status =
                    Status::unimplemented(format!("service {other:?} is not served, only runtime.v1"));
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        };
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

/// The service in a path: `/SERVICE/METHOD` → `SERVICE`.
fn service_of(path: &str) -> &str {
    path.strip_prefix('/').and_then(|path| path.split_once('/')).map_or("", |(service, _)| service)
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

#[cfg(test)]
mod tests {
    use super::service_of;

    #[test]
    fn the_service_is_the_first_part_of_the_path() {
        let cases = [
            ("/runtime.v1.RuntimeService/Version", "runtime.v1.RuntimeService"),
            ("/runtime.v1.RuntimeService", ""),
            ("/", ""),
            ("*", ""),
            ("//Version", ""),
        ];
        for (path, expected) in cases {
            assert_eq!(service_of(path), expected, "{path:?}");
        }
    }
}
