//! Responses that are sent from several buffers. Normally a message is encoded into one buffer, so a response of 14 MiB would
//! be in memory twice; with this module each buffer is freed when it has been sent.
//!
//! A handler adds [`Pieces`] to an empty message ([`tonic::Response::extensions_mut`]); [`replace_body`] sends them as one gRPC
//! message (gRPC over HTTP/2: a byte "not compressed", the length, the message).

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

use super::peers::AnswerBytes;

/// Time limit for a client to read the whole response; the buffers are kept until then.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// An encoded message in several buffers.
#[derive(Clone)]
pub(crate) struct Pieces {
    waiting: SendWrapper<Rc<RefCell<Waiting>>>,
    bytes: usize,
}

#[derive(Default)]
struct Waiting {
    pieces: VecDeque<Bytes>,
    is_late: bool,
}

impl Pieces {
    /// Creates a message from consecutive buffers.
    pub(crate) fn new(message: impl IntoIterator<Item = Bytes>) -> Pieces {
        let mut pieces: VecDeque<Bytes> = message.into_iter().collect();
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let mut head = vec![0];
        head.extend((length as u32).to_be_bytes());
        pieces.push_front(head.into());
        let waiting = Rc::new(RefCell::new(Waiting { pieces, is_late: false }));
        Pieces { waiting: SendWrapper::new(waiting), bytes: length }
    }
}

/// Replaces the body of a response that has [`Pieces`]; other responses are not changed.
pub(super) fn replace_body(mut response: Response<Body>) -> Response<Body> {
    let Some(Pieces { waiting, bytes }) = response.extensions_mut().remove::<Pieces>() else {
        return response;
    };
    response.extensions_mut().insert(AnswerBytes(bytes));
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
        // Dropped with the body, together with the timer.
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
