//! From an HTTP/2 request to the right service, with the caller's deadline around it and a count of what is under way.

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

use super::v1::image_service_server::{ImageService, ImageServiceServer};
use super::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use super::{MESSAGE_BYTES_MAX, pieces, timeout};
use crate::settle;

/// Answers the requests of a socket that is not CRI's.
pub(crate) type Answer = Rc<dyn Fn(Request<Incoming>) -> Answering>;

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>;

/// What answers the requests of every connection; a clone shares everything.
pub(super) struct Dispatch<S> {
    services: Services<S>,
    calls: Rc<Calls>,
}

enum Services<S> {
    Cri {
        runtime: RuntimeServiceServer<S>,
        image: ImageServiceServer<S>,
    },
    /// By whom else. One type for both, so that HTTP/2 is in the program once.
    Other(Answer),
}

// By hand: a derive would ask for `S: Clone`, and tonic shares one `S`.
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

impl<S: RuntimeService + ImageService> hyper::service::Service<Request<Incoming>> for Dispatch<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let under_way = self.calls.enter();
        let limit = timeout::of(request.headers());
        let answer: Answering = match (&self.services, service_of(request.uri().path())) {
            (Services::Other(answer), _) => answer(request),
            (Services::Cri { runtime, .. }, "runtime.v1.RuntimeService") => runtime.clone().call(request),
            (Services::Cri { image, .. }, "runtime.v1.ImageService") => image.clone().call(request),
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
            answer.map(name_oversize).map(pieces::replace_body)
        })
    }
}

/// `/SERVICE/METHOD` → `SERVICE`.
fn service_of(path: &str) -> &str {
    path.strip_prefix('/').and_then(|path| path.split_once('/')).map_or("", |(service, _)| service)
}

/// tonic says OUT_OF_RANGE to a message over its limit, where every other server says RESOURCE_EXHAUSTED. We never
/// answer OUT_OF_RANGE ourselves (`status`).
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

/// How many calls are between their request and the head of their answer: what a drain waits for.
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

    /// The most there ever were at once.
    pub(super) fn active_max(&self) -> usize {
        self.active_max.get()
    }

    pub(super) fn total(&self) -> u64 {
        self.total.get()
    }

    /// Waits until no call is under way. One waiter: the drain.
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
        settle::after_work();
        self.active.set(self.active.get() + 1);
        self.active_max.set(self.active_max.get().max(self.active.get()));
        self.total.set(self.total.get() + 1);
        UnderWay(self.clone())
    }
}

/// One call in [`Calls`], also when its caller goes away and the future is dropped.
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
