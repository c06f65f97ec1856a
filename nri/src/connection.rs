//! The connection to one plugin: calls to the plugin, requests from it, and the two tasks that read and write the
//! socket.
//!
//! Only these two tasks wait for the socket. A call waits for its answer or its deadline, so a plugin that stops
//! reading or answering causes one timeout and blocks no other code. Stream IDs are allocated and queued in one step,
//! because the Go server refuses an ID that is not greater than the previous one (NRI 1.4).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::channel::{Receiver, Sender};
use smol::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::io::{Host, Stream};
use crate::message::{self, Code, Codec as _, Message, Request, Response, Status, get_status, has_code};
use crate::mux;

/// Name of the plugins' service.
const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";

/// Size of a read in bytes.
const READ_BYTES: usize = 4096;

/// Maximum number of concurrent requests of one plugin; further requests are refused with status 8
/// (RESOURCE_EXHAUSTED).
const REQUESTS_MAX: usize = 16;

/// Maximum number of bytes queued for a plugin that does not read: two of the largest messages.
const QUEUED_BYTES_MAX: usize = 9 << 20;

/// Maximum number of bytes of an unfinished message before the registration, whose request has some hundred bytes: such a
/// connection may be from any process.
const STRANGER_BYTES_MAX: usize = 64 << 10;

/// Maximum number of bytes of the unfinished messages of all connections together: two of the largest.
const UNFINISHED_BYTES_MAX: usize = 8 << 20;

/// Maximum number of bytes of the requests in progress of all plugins together: one of the largest.
const REQUESTS_BYTES_MAX: usize = message::DATA_BYTES_MAX;

/// Time limit for sending queued messages when the connection is closed.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Fraction of the deadline after which a plugin's "deadline exceeded" counts as a timeout, because the timers of
/// plugin and runtime may end in either order (NRI 1.5).
const TIMEOUT_SHARE: f64 = 0.95;

/// Outcome of a call (NRI 1.5).
#[derive(Debug)]
pub(crate) enum Outcome<T> {
    Ok(T),
    /// The plugin returned an error; the connection stays open.
    Refused(Status),
    TimedOut,
    /// The connection was lost.
    Lost,
}

/// A request from the plugin.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) stream: u32,
    pub(crate) method: String,
    pub(crate) payload: Vec<u8>,
    /// Timeout of the request; zero: no timeout.
    pub(crate) timeout: Duration,
    _share: Share,
}

/// The answer to a call: the payload or an error.
type Reply = Result<Vec<u8>, Status>;

/// A connection, open or closed.
pub(crate) struct Connection {
    host: Rc<dyn Host>,
    calls: RefCell<BTreeMap<u32, Sender<Reply>>>,
    last_stream: Cell<u32>,
    last_request: Cell<u32>,
    in_hand: Cell<usize>,
    outgoing: Sender<Vec<u8>>,
    queued_bytes: Cell<usize>,
    requests: Sender<Incoming>,
    /// A channel that is closed when the connection is closed.
    alive: Receiver<()>,
    cause: RefCell<Option<String>>,
    /// Number of unexpected frames and answers so far.
    strays: Cell<u64>,
    /// Whether the plugin has registered.
    is_registered: Cell<bool>,
    held: Held,
}

/// Number of bytes that all connections hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    unfinished: Rc<Cell<usize>>,
    requests: Rc<Cell<usize>>,
}

/// The part of one connection, or of one request, in a number of [`Held`].
#[derive(Debug)]
struct Share {
    all: Rc<Cell<usize>>,
    bytes: usize,
}

impl Share {
    fn of(all: &Rc<Cell<usize>>) -> Self {
        Self { all: Rc::clone(all), bytes: 0 }
    }

    /// Sets this part; returns the sum of all.
    fn set(&mut self, bytes: usize) -> usize {
        self.all.set(self.all.get() - self.bytes + bytes);
        self.bytes = bytes;
        self.all.get()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Connection {
    /// Starts the two tasks. Returns the connection and the channel with the plugin's requests.
    pub(crate) fn start(host: Rc<dyn Host>, held: &Held, stream: Stream) -> (Rc<Self>, Receiver<Incoming>) {
        let (outgoing, queue) = smol::channel::unbounded();
        let (requests, incoming) = smol::channel::unbounded();
        // Nothing is sent on this channel: it is open as long as the reader has its sender.
        let (keep, alive) = smol::channel::bounded::<()>(1);
        let connection = Rc::new(Self {
            host: Rc::clone(&host),
            calls: RefCell::default(),
            last_stream: Cell::new(0),
            last_request: Cell::new(0),
            in_hand: Cell::new(0),
            outgoing,
            queued_bytes: Cell::new(0),
            requests,
            alive,
            cause: RefCell::default(),
            strays: Cell::new(0),
            is_registered: Cell::new(false),
            held: held.clone(),
        });
        let Stream { reader, writer } = stream;
        let reading = Rc::clone(&connection);
        host.spawn(Box::pin(async move {
            let cause = smol::future::or(reading.read(reader), async {
                reading.ended().await;
                String::new()
            });
            let cause = cause.await;
            reading.close(&cause);
            drop(keep);
        }));
        let writing = Rc::clone(&connection);
        host.spawn(Box::pin(async move { writing.write(writer, queue).await }));
        (connection, incoming)
    }

    /// Closes the connection: calls in progress end as lost, queued messages are still sent. If the connection is
    /// already closed, the first cause is kept.
    pub(crate) fn close(&self, cause: &str) {
        self.cause.borrow_mut().get_or_insert_with(|| cause.to_owned());
        self.alive.close();
        self.outgoing.close();
        self.requests.close();
        self.calls.take();
    }

    /// Permits large messages.
    pub(crate) fn set_registered(&self) {
        self.is_registered.set(true);
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.alive.is_closed()
    }

    /// Waits until the connection is closed.
    pub(crate) async fn ended(&self) {
        let _ = self.alive.recv().await;
    }

    /// The cause of the connection's end; empty while it is open.
    pub(crate) fn cause(&self) -> String {
        self.cause.borrow().clone().unwrap_or_default()
    }

    /// Number of unexpected frames and answers so far.
    pub(crate) fn strays(&self) -> u64 {
        self.strays.get()
    }

    /// Makes a call to the plugin's service, with the time limit `limit`.
    pub(crate) async fn call(&self, method: &str, payload: &[u8], limit: Duration) -> Outcome<Vec<u8>> {
        let begun = Instant::now();
        let (stream, answer) = match self.send_request(method, payload, limit) {
            Ok(sent) => sent,
            Err(outcome) => return outcome,
        };
        let waiting = async { Some(answer.recv().await) };
        let answered = smol::future::or(waiting, async {
            self.host.sleep(limit).await;
            None
        });
        match answered.await {
            Some(Ok(Ok(payload))) => Outcome::Ok(payload),
            Some(Ok(Err(status)))
                if has_code(&status, Code::DEADLINE_EXCEEDED)
                    && begun.elapsed() >= limit.mul_f64(TIMEOUT_SHARE) =>
            {
                Outcome::TimedOut
            }
            Some(Ok(Err(status))) => Outcome::Refused(status),
            Some(Err(_)) => Outcome::Lost,
            None => {
                self.calls.borrow_mut().remove(&stream);
                Outcome::TimedOut
            }
        }
    }

    fn send_request(
        &self,
        method: &str,
        payload: &[u8],
        limit: Duration,
    ) -> Result<(u32, Receiver<Reply>), Outcome<Vec<u8>>> {
        let request = Request {
            service: PLUGIN_SERVICE.to_owned(),
            method: method.to_owned(),
            payload: payload.to_vec(),
            timeout_nano: i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX),
            ..Request::default()
        };
        let stream = match self.last_stream.get() {
            0 => 1,
            last => last + 2,
        };
        let Some(message) = message::encode_request(stream, &request) else {
            let text = format!("{method}: {} bytes are more than a message may have", payload.len());
            return Err(Outcome::Refused(get_status(Code::RESOURCE_EXHAUSTED, text)));
        };
        let (sender, answer) = smol::channel::bounded(1);
        self.calls.borrow_mut().insert(stream, sender);
        self.last_stream.set(stream);
        match self.queue(mux::frames(mux::PLUGIN, &message)) {
            true => Ok((stream, answer)),
            false => {
                self.calls.borrow_mut().remove(&stream);
                Err(Outcome::Lost)
            }
        }
    }

    /// Sends the answer to a request of the plugin.
    pub(crate) fn answer(&self, stream: u32, answer: Result<Vec<u8>, (Status, Vec<u8>)>) {
        self.in_hand.set(self.in_hand.get().saturating_sub(1));
        let mut response = Response::default();
        match answer {
            Ok(payload) => response.payload = payload,
            Err((status, payload)) => {
                response.set_status(status);
                response.payload = payload;
            }
        }
        self.respond(stream, &response);
    }

    fn refuse(&self, stream: u32, code: Code, text: &str) {
        let mut response = Response::default();
        response.set_status(get_status(code, text));
        self.respond(stream, &response);
    }

    fn respond(&self, stream: u32, response: &Response) {
        if let Some(message) = message::encode_response(stream, response) {
            self.queue(mux::frames(mux::RUNTIME, &message));
        }
    }

    fn queue(&self, frames: Vec<u8>) -> bool {
        let queued = self.queued_bytes.get() + frames.len();
        if queued > QUEUED_BYTES_MAX {
            self.close("it does not read its messages");
            return false;
        }
        self.queued_bytes.set(queued);
        self.outgoing.try_send(frames).is_ok()
    }

    async fn write(&self, mut writer: Box<dyn smol::io::AsyncWrite + Unpin>, queue: Receiver<Vec<u8>>) {
        let writing = async {
            while let Ok(frames) = queue.recv().await {
                if let Err(error) = writer.write_all(&frames).await {
                    return format!("write: {}", error.kind());
                }
                self.queued_bytes.set(self.queued_bytes.get().saturating_sub(frames.len()));
            }
            String::new()
        };
        let cut_off = async {
            self.ended().await;
            self.host.sleep(FLUSH_LIMIT).await;
            String::new()
        };
        let cause = smol::future::or(writing, cut_off).await;
        self.close(&cause);
    }

    async fn read(&self, mut reader: Box<dyn smol::io::AsyncRead + Unpin>) -> String {
        let mut buffer = vec![0; READ_BYTES];
        let mut frames = mux::Reader::default();
        let (mut answers, mut requests) = (message::Assembler::default(), message::Assembler::default());
        let mut share = Share::of(&self.held.unfinished);
        loop {
            let count = match reader.read(&mut buffer).await {
                Ok(0) => return "the plugin closed it".to_owned(),
                Ok(count) => count,
                Err(error) => return format!("read: {}", error.kind()),
            };
            let fed = frames.feed(&buffer[..count], |id, payload| match id {
                mux::PLUGIN => answers.feed(payload, |message| self.on_answer(message)),
                mux::RUNTIME => requests.feed(payload, |message| self.on_request(message)),
                _ => self.stray(),
            });
            if let Err(mux::TooLong(length)) = fed {
                return format!("a frame of {length} bytes");
            }
            let own = answers.held() + requests.held();
            let all = share.set(own);
            // Small messages are always finished.
            if own > STRANGER_BYTES_MAX && !self.is_registered.get() {
                return "a message that is too long before its registration".to_owned();
            }
            if own > STRANGER_BYTES_MAX && all > UNFINISHED_BYTES_MAX {
                return "too many bytes of unfinished messages of all plugins".to_owned();
            }
        }
    }

    fn stray(&self) {
        self.strays.set(self.strays.get() + 1);
    }

    fn on_answer(&self, message: Message) {
        let caller = match message.header.type_ {
            message::MESSAGE_TYPE_RESPONSE => self.calls.borrow_mut().remove(&message.header.stream_id),
            _ => None,
        };
        // The answer belongs to a call that timed out or was already answered, or to no call.
        let Some(caller) = caller else { return self.stray() };
        let undecodable = |text: &str| Err(get_status(Code::INTERNAL, text));
        let answer = match message.data {
            None => undecodable("its answer is larger than a message may be"),
            Some(data) => match Response::decode(&data) {
                Err(_) => undecodable("its answer is not a ttrpc response"),
                Ok(mut response) => match message::error_of(&mut response) {
                    Some(status) => Err(status),
                    None => Ok(response.payload),
                },
            },
        };
        let _ = caller.try_send(answer); // the caller may have timed out
    }

    fn on_request(&self, message: Message) {
        let stream = message.header.stream_id;
        match message.header.type_ {
            message::MESSAGE_TYPE_REQUEST => {}
            message::MESSAGE_TYPE_DATA => {
                return self.refuse(stream, Code::INVALID_ARGUMENT, "streaming calls are not supported");
            }
            _ => return self.stray(),
        }
        if stream.is_multiple_of(2) || stream <= self.last_request.get() {
            return self.refuse(stream, Code::INVALID_ARGUMENT, "the stream id must be odd and grow");
        }
        self.last_request.set(stream);
        let Some(data) = message.data else {
            return self.refuse(stream, Code::RESOURCE_EXHAUSTED, "the message is too large");
        };
        let Ok(request) = Request::decode(&data) else {
            return self.refuse(stream, Code::INVALID_ARGUMENT, "not a ttrpc request");
        };
        if request.service != RUNTIME_SERVICE {
            return self.refuse(
                stream,
                Code::UNIMPLEMENTED,
                &format!("unknown service {:?}", request.service),
            );
        }
        if self.in_hand.get() >= REQUESTS_MAX {
            return self.refuse(stream, Code::RESOURCE_EXHAUSTED, "too many requests at once");
        }
        let mut share = Share::of(&self.held.requests);
        let bytes = request.payload.len();
        if share.set(bytes) > REQUESTS_BYTES_MAX && bytes > STRANGER_BYTES_MAX {
            return self.refuse(stream, Code::RESOURCE_EXHAUSTED, "too many bytes of requests at once");
        }
        self.in_hand.set(self.in_hand.get() + 1);
        let timeout = Duration::from_nanos(u64::try_from(request.timeout_nano).unwrap_or(0));
        let incoming =
            Incoming { stream, method: request.method, payload: request.payload, timeout, _share: share };
        let _ = self.requests.try_send(incoming); // closed with the connection
    }
}
