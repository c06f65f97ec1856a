//! Responses that are sent from several buffers. Normally a message is encoded into one buffer, so a response of 14 MiB would
//! be in memory twice; with this module each buffer is freed when it has been sent.
//!
//! The items of a list are encoded one by one ([`Items`]), also those of which an encoded form is kept.
//!
//! A handler adds [`Pieces`] to an empty message ([`tonic::Response::extensions_mut`]); [`replace_body`] sends them as one gRPC
//! message (gRPC over HTTP/2: a byte "not compressed", the length, the message).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message;
use prost::encoding::message;
use send_wrapper::SendWrapper;
use smol::stream;
use tonic::Status;
use tonic::body::Body;

use super::MESSAGE_BYTES_MAX;
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
        pieces.push_front(Bytes::copy_from_slice(&head(length)));
        Pieces::with_head(pieces, length)
    }

    /// Creates a message of `bytes` bytes from buffers that begin with its head.
    fn with_head(pieces: VecDeque<Bytes>, bytes: usize) -> Pieces {
        let waiting = Rc::new(RefCell::new(Waiting { pieces, is_late: false }));
        Pieces { waiting: SendWrapper::new(waiting), bytes }
    }
}

/// The head of a message of `bytes` bytes.
fn head(bytes: usize) -> [u8; HEAD_BYTES] {
    let length = (bytes as u32).to_be_bytes();
    [0, length[0], length[1], length[2], length[3]]
}

/// Size of the head of a gRPC message in bytes.
const HEAD_BYTES: usize = 5;
/// Size of the buffers of a list in bytes: the longest frame that HTTP/2 sends unless the client permits more.
const BUFFER_BYTES: usize = 16 << 10;
/// Number of the field with the items in every list of the CRI.
const ITEMS: u32 = 1;

/// Encodes an item for [`Items::push_encoded`].
pub(crate) fn encode_item(item: &impl Message) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(message::encoded_len(ITEMS, item));
    message::encode(ITEMS, item, &mut encoded);
    encoded
}

/// A list that is encoded item by item, so that neither the items nor their encoded forms are in memory twice.
pub(crate) struct Items {
    full: VecDeque<Bytes>,
    /// Begins with room for the head if no buffer is full yet.
    current: Vec<u8>,
    bytes: usize,
}

impl Items {
    pub(crate) fn new() -> Items {
        // Its pages are allocated when they are written, so a short list costs no more than a small buffer; a buffer that grows is
        // mapped, copied and unmapped with each step.
        let mut current = Vec::with_capacity(BUFFER_BYTES);
        current.resize(HEAD_BYTES, 0);
        Items { full: VecDeque::new(), current, bytes: 0 }
    }

    /// Adds an item.
    pub(crate) fn push(&mut self, item: &impl Message) {
        let length = message::encoded_len(ITEMS, item);
        self.reserve(length);
        message::encode(ITEMS, item, &mut self.current);
    }

    /// Adds an item that [`encode_item`] has encoded.
    pub(crate) fn push_encoded(&mut self, item: &[u8]) {
        self.reserve(item.len());
        self.current.extend_from_slice(item);
    }

    fn reserve(&mut self, length: usize) {
        self.bytes += length;
        if self.current.len() + length > BUFFER_BYTES && self.current.len() > HEAD_BYTES {
            let next = Vec::with_capacity(BUFFER_BYTES.max(length));
            self.full.push_back(std::mem::replace(&mut self.current, next).into());
        }
    }

    /// The response with the list.
    ///
    /// # Errors
    /// `ResourceExhausted` if the list is longer than clients accept.
    pub(crate) fn respond<M: Default>(mut self) -> Result<tonic::Response<M>, Error> {
        if self.bytes > MESSAGE_BYTES_MAX {
            let text = format!("the list has {} bytes, a message at most {MESSAGE_BYTES_MAX}", self.bytes);
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        let head = head(self.bytes);
        match self.full.front_mut() {
            None => self.current[..HEAD_BYTES].copy_from_slice(&head),
            Some(first) => {
                let mut bytes = Vec::from(std::mem::take(first));
                bytes[..HEAD_BYTES].copy_from_slice(&head);
                *first = bytes.into();
            }
        }
        self.full.push_back(self.current.into());
        let mut response = tonic::Response::new(M::default());
        response.extensions_mut().insert(Pieces::with_head(self.full, self.bytes));
        Ok(response)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::v1;

    /// The message of a response without its head, and the number of buffers.
    fn message(response: tonic::Response<v1::ListPodSandboxResponse>) -> (Vec<u8>, usize) {
        let Pieces { waiting, bytes } = response.extensions().get::<Pieces>().expect("pieces").clone();
        let waiting = SendWrapper::take(waiting);
        let pieces = std::mem::take(&mut waiting.borrow_mut().pieces);
        let whole = pieces.iter().flatten().copied().collect::<Vec<u8>>();
        assert_eq!(whole[..HEAD_BYTES], head(bytes));
        assert_eq!(whole.len(), HEAD_BYTES + bytes);
        (whole[HEAD_BYTES..].to_vec(), pieces.len())
    }

    #[test]
    fn a_list_of_items_is_the_message_that_it_would_be_as_a_whole() {
        let item = |number: usize, bytes: usize| v1::PodSandbox {
            id: format!("pod{number}"),
            runtime_handler: "x".repeat(bytes),
            ..Default::default()
        };
        for (count, bytes, buffers) in
            [(0, 0, 1), (1, 10, 1), (3, BUFFER_BYTES, 3), (100, 1000, 7), (2, 3 * BUFFER_BYTES, 2)]
        {
            let whole =
                v1::ListPodSandboxResponse { items: (0..count).map(|one| item(one, bytes)).collect() };
            let mut items = Items::new();
            for (index, item) in whole.items.iter().enumerate() {
                match index % 2 {
                    0 => items.push(item),
                    _ => items.push_encoded(&encode_item(item)),
                }
            }
            let (encoded, pieces) = message(items.respond().unwrap());
            assert_eq!(encoded, whole.encode_to_vec(), "{count} of {bytes} bytes");
            assert_eq!(pieces, buffers, "{count} of {bytes} bytes");
        }
    }

    #[test]
    fn a_list_that_no_client_would_accept_is_an_error() {
        let item = v1::PodSandbox { id: "x".repeat(1 << 20), ..Default::default() };
        let mut items = Items::new();
        (0..17).for_each(|_| items.push(&item));
        let refused = items.respond::<v1::ListPodSandboxResponse>().unwrap_err();
        assert_eq!(refused.kind(), Kind::ResourceExhausted);
    }
}
