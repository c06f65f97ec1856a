//! Answers that are sent in the pieces in which they are kept. The ordinary way encodes a message into one buffer, so that
//! an answer of 14 MiB is there twice; this way each piece is freed once it is on its way.
//!
//! A handler puts [`Pieces`] beside an empty message ([`tonic::Response::extensions_mut`]); [`replace_body`] sends them in
//! its place, as one gRPC message (gRPC over HTTP/2: a byte "not compressed", the length, the message).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use coracle_base::reactor;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use send_wrapper::SendWrapper;
use smol::stream;
use tonic::Status;
use tonic::body::Body;

/// How long a client may take to read all of it. Longer, and the pieces would be held for a client that has stopped.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// The encoded message.
#[derive(Clone)]
pub(crate) struct Pieces(SendWrapper<Rc<RefCell<Waiting>>>);

#[derive(Default)]
struct Waiting {
    pieces: VecDeque<Bytes>,
    is_late: bool,
}

impl Pieces {
    /// Of a message that these are, one after the other.
    pub(crate) fn new(message: impl IntoIterator<Item = Bytes>) -> Pieces {
        let mut pieces: VecDeque<Bytes> = message.into_iter().collect();
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let mut head = vec![0];
        head.extend((length as u32).to_be_bytes());
        pieces.push_front(head.into());
        Pieces(SendWrapper::new(Rc::new(RefCell::new(Waiting { pieces, is_late: false }))))
    }
}

/// Where an answer has [`Pieces`], they are its body.
pub(super) fn replace_body(mut response: Response<Body>) -> Response<Body> {
    let Some(Pieces(waiting)) = response.extensions_mut().remove::<Pieces>() else { return response };
    let waiting = SendWrapper::take(waiting);
    let late = Rc::clone(&waiting);
    let limit = reactor::spawn(async move {
        reactor::sleep(READ_LIMIT).await;
        *late.borrow_mut() = Waiting { pieces: VecDeque::new(), is_late: true };
    });
    let mut trailers = HeaderMap::new();
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let mut end = Some(Frame::trailers(trailers));
    let frames = std::iter::from_fn(move || {
        // Dropped with the body, and the timer with it.
        let _limit = &limit;
        let mut waiting = waiting.borrow_mut();
        match waiting.pieces.pop_front() {
            Some(piece) => Some(Ok(Frame::data(piece))),
            None if waiting.is_late => {
                Some(Err(Status::deadline_exceeded("the answer was not read in time")))
            }
            None => end.take().map(Ok),
        }
    });
    response.map(|_| Body::new(StreamBody::new(SendWrapper::new(stream::iter(frames)))))
}
