//! The protocol between a worker and its fetcher. The module does no I/O of its own, and neither process
//! trusts the other.
//!
//! | channel | direction | content |
//! |---|---|---|
//! | control, a stream socket | fetcher to worker | once: [`Ready`], a message |
//! | control | worker to fetcher | [`Order`]s, each a message; [`Order::Get`] and [`Order::Resolve`] include a pipe for the answer |
//! | a pipe for each request | fetcher to worker | an [`Answer`], a message; after [`Answer::Body`] the body in chunks |
//! | a pipe for names | fetcher to worker | a list of [`Resolved`], a message |
//!
//! A message is a little-endian u32 length and that many bytes of postcard, like a worker's answers to the
//! daemon. A chunk is a little-endian u32 length, at most [`CHUNK_BYTES_MAX`], and that many bytes. A length
//! of 0 ends the body; the message [`End`] follows. A pipe that ends without [`End`] means that the fetcher
//! has ended, not that the body is complete.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use coracle_job::{Credentials, Failure, MessageError, Timeouts, read_message_within, write_message};
use coracle_sandbox::describe_io;
use serde::{Deserialize, Serialize};

use super::request_failure::RequestFailure;
use coracle_registries::{Environment, Plain};

/// Maximum length in bytes of a message in a pipe, which contains at most the text of a failure. The worker
/// does not read longer messages, because the fetcher may be compromised.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Maximum length of a chunk in bytes: one read from the network.
pub(super) const CHUNK_BYTES_MAX: usize = 64 << 10;

/// The result of the confinement; the failure names the step that failed on this host.
pub(super) type Ready = Result<(), Failure>;

/// An order of the worker.
#[derive(Serialize, Deserialize)]
pub(super) enum Order {
    /// The first order: all files and settings of the node that requests need.
    Setup(Setup),
    /// New content of the resolver's files.
    Names(Names),
    /// A request; the pipe for its answer is passed with the message.
    Get(Get),
    /// Names of neighbours to resolve; the pipe for the answer is passed with the message.
    Resolve(Vec<String>),
}

/// An address of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resolved {
    /// The address of the node.
    pub address: SocketAddr,
    /// The address from which this node contacts it; equal to the neighbour's if that is one of this node's own.
    pub from: Option<IpAddr>,
}

/// The settings of a fetcher. The type has no `Debug`, because the settings contain secrets.
#[derive(Serialize, Deserialize)]
pub(super) struct Setup {
    /// Name of the registry, which requests to mirrors contain.
    pub(super) registry: String,
    pub(super) remotes: Vec<Remote>,
    pub(super) timeouts: Timeouts,
    /// Proxy settings from environment variables.
    pub(super) environment: Environment,
    /// The system's trusted root certificates in PEM.
    pub(super) system_roots: String,
}

/// An endpoint of a registry, with the content of its files.
#[derive(Serialize, Deserialize)]
pub(super) struct Remote {
    /// URL with scheme and prefix, without a trailing slash.
    pub(super) url: String,
    pub(super) repository: String,
    pub(super) credentials: Credentials,
    /// Additional headers of each request.
    pub(super) headers: Vec<(String, String)>,
    pub(super) is_mirror: bool,
    /// Whether an endpoint with `http://` may have TLS.
    pub(super) plain: Plain,
    /// Whether the server's certificate is not verified.
    pub(super) insecure_skip_verify: bool,
    /// Content of the TLS files; or the error of reading a file, with which all requests over TLS fail.
    pub(super) tls: Result<Pem, Failure>,
}

/// Content of the PEM files of one endpoint.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Pem {
    /// Trusted root certificates in PEM, in addition to the system's.
    pub(super) roots: Vec<String>,
    pub(super) client: Option<ClientPem>,
}

/// The client's certificate and key in PEM.
#[derive(Serialize, Deserialize)]
pub(super) struct ClientPem {
    pub(super) certificate: String,
    pub(super) key: String,
    /// Path of the key file, for messages.
    pub(super) key_path: String,
}

/// Content of the node's resolver files; `None`: the file is unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Names {
    pub(super) files: [Option<String>; 2],
}

/// Request of `manifests/REFERENCE` or `blobs/DIGEST`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Get {
    /// Index of an endpoint in the list of [`Fetcher::set_up`](super::Fetcher::set_up).
    pub remote: u32,
    /// A neighbour that is asked instead of the remote.
    pub neighbour: Option<AskNeighbour>,
    /// The path below the repository: `manifests/…` or `blobs/…`.
    pub what: String,
    /// A URL of the same content on any host, which is requested instead, without credentials.
    pub url: Option<String>,
    /// Value of the field `Accept`.
    pub accept: String,
    /// Offset of the first requested byte.
    pub offset: u64,
    /// Offset of the first byte after the requested ones; `None`: to the end.
    pub end: Option<u64>,
    /// Length of the whole content in bytes, if it is known.
    pub size: Option<u64>,
}

/// A request to a neighbour, for the content and the range of a [`Get`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskNeighbour {
    /// The address of the neighbour.
    pub address: SocketAddr,
    /// Path and query.
    pub target: String,
    /// Whether only the head of the answer is wanted.
    pub is_head: bool,
    /// The proof of the site's key, which the fetcher does not have; empty: none.
    pub authorization: String,
}

impl Get {
    /// The value of the field `Range`; empty if all is requested.
    pub fn range(&self) -> String {
        match self.end {
            Some(end) => format!("bytes={}-{}", self.offset, end.saturating_sub(1)),
            None if self.offset > 0 => format!("bytes={}-", self.offset),
            None => String::new(),
        }
    }
}

/// The result of a request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Success; the body follows.
    Body(Head),
    /// The request failed; with the reason.
    RequestFailure(RequestFailure),
}

/// The parts of a successful response that the worker needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Offset of the body.
    pub begin: Begin,
    /// Length of the body in bytes; `None` if the registry did not send it.
    pub length: Option<u64>,
    /// The field `Docker-Content-Digest`; empty if the registry did not send it.
    pub digest: String,
    /// The field `Content-Type` without parameters; empty if the registry did not send it.
    pub media_type: String,
    /// Whether there is a field `Link`: the list has further parts (OCI distribution specification 1.1).
    pub has_more: bool,
    /// The field [`STATE`](coracle_site::STATE) of a neighbour; empty if it did not send it.
    pub state: String,
    /// The field [`OUTLINE`](coracle_site::OUTLINE) of a neighbour; empty if it did not send it.
    pub outline: String,
    /// The field [`PROOF`](coracle_site::PROOF) of a neighbour; empty if it did not send it.
    pub proof: String,
    /// The field `Authorization` with which the worker asked a neighbour; the fetcher does not send it back.
    #[serde(skip)]
    pub authorization: String,
}

/// Offset of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Begin {
    /// The body begins with the first byte of the blob, whatever offset was requested.
    #[default]
    First,
    /// The body begins at the requested offset.
    AsAsked,
    /// The body begins at another offset.
    Elsewhere,
}

/// How a body ended.
#[derive(Debug, Serialize, Deserialize)]
enum End {
    /// The body is complete.
    Complete,
    /// The body is incomplete; with the reason.
    Cut(String),
}

/// The reason why an answer cannot be read any further.
#[derive(Debug)]
pub(super) enum Broken {
    /// The registry closed its connection early; with the fetcher's error.
    Cut(String),
    /// The fetcher closed the pipe without an end message.
    Ended,
    /// An order could not be sent to the fetcher; with the error.
    Unsent(String),
    /// The fetcher violated the protocol; with a description.
    Nonsense(String),
    /// The fetcher sent no data for this time.
    Silent(Duration),
}

impl Broken {
    /// Converts a read error; `limit` is the reader's timeout.
    pub(super) fn from_io(error: &io::Error, limit: Duration) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent(limit),
            io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Nonsense(describe_io(error)),
        }
    }

    /// Converts an error of reading a message, as [`Broken::from_io`].
    pub(super) fn from_message(error: &MessageError, limit: Duration) -> Self {
        match error {
            MessageError::Io(error) => Self::from_io(error, limit),
            error => Self::Nonsense(error.to_string()),
        }
    }
}

/// Reads the addresses at the start of a pipe.
pub(super) fn read_resolved(from: &mut impl Read, limit: Duration) -> Result<Vec<Resolved>, Broken> {
    match read_message_within(from, ANSWER_BYTES_MAX) {
        Ok(Some(resolved)) => Ok(resolved),
        Ok(None) => Err(Broken::Ended),
        Err(error) => Err(Broken::from_message(&error, limit)),
    }
}

/// Reads the answer at the start of a pipe.
pub(super) fn read_answer(from: &mut impl Read, limit: Duration) -> Result<Answer, Broken> {
    match read_message_within(from, ANSWER_BYTES_MAX) {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(Broken::Ended),
        Err(error) => Err(Broken::from_message(&error, limit)),
    }
}

/// Writes the answer. The text of a failure is cut at the maximum length.
pub(super) fn write_answer(to: &mut impl Write, mut answer: Answer) -> Result<(), MessageError> {
    if let Answer::RequestFailure(failed) = &mut answer {
        shorten(&mut failed.failure.message);
    }
    write_message(to, &answer)
}

/// Cuts the text, leaving space for the rest of a message.
fn shorten(text: &mut String) {
    let mut end = text.len().min(ANSWER_BYTES_MAX / 2);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// Ends a body: complete if `why` is `None`, otherwise incomplete for this reason.
pub(super) fn write_end(to: &mut impl Write, why: Option<String>) -> Result<(), MessageError> {
    to.write_all(&[0; 4]).map_err(MessageError::Io)?;
    let end = why.map_or(End::Complete, |mut why| {
        shorten(&mut why);
        End::Cut(why)
    });
    write_message(to, &end)
}

/// Reads a body from its chunks.
#[derive(Default)]
pub(super) struct Chunks {
    /// Remaining bytes of the current chunk.
    left: usize,
    is_over: bool,
}

impl Chunks {
    /// Reads like [`Read::read`]: `Ok(0)` is the end of a complete body if `buffer` is not empty. `limit` is
    /// the reader's timeout, for messages.
    pub(super) fn read(
        &mut self,
        from: &mut impl Read,
        buffer: &mut [u8],
        limit: Duration,
    ) -> Result<usize, Broken> {
        if self.is_over {
            return Ok(0);
        }
        if self.left == 0 {
            let mut length = [0; 4];
            from.read_exact(&mut length).map_err(|error| Broken::from_io(&error, limit))?;
            self.left = u32::from_le_bytes(length) as usize;
            if self.left > CHUNK_BYTES_MAX {
                return Err(Broken::Nonsense(format!("a chunk of {} bytes", self.left)));
            }
            if self.left == 0 {
                self.is_over = true;
                return match read_message_within(from, ANSWER_BYTES_MAX) {
                    Ok(Some(End::Complete)) => Ok(0),
                    Ok(Some(End::Cut(why))) => Err(Broken::Cut(why)),
                    Ok(None) => Err(Broken::Ended),
                    Err(error) => Err(Broken::from_message(&error, limit)),
                };
            }
        }
        let most = buffer.len().min(self.left);
        match from.read(&mut buffer[..most]) {
            Ok(0) => Err(Broken::Ended),
            Ok(count) => {
                self.left -= count;
                Ok(count)
            }
            Err(error) => Err(Broken::from_io(&error, limit)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_job::FailureKind;

    const LIMIT: Duration = Duration::from_secs(1);

    /// A generator of pseudo-random numbers; equal seeds give equal numbers.
    fn generator(mut seed: u64) -> impl FnMut() -> u64 {
        move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            seed >> 33
        }
    }

    /// A reader that returns its bytes in pieces of random length, like a pipe.
    struct Pieces<'a, F>(&'a [u8], F);

    impl<F: FnMut() -> u64> Read for Pieces<'_, F> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = (1 + (self.1)() as usize % 100_000).min(buffer.len());
            self.0.read(&mut buffer[..most])
        }
    }

    /// A body in chunks of these lengths, and its bytes.
    fn body(lengths: &[usize]) -> (Vec<u8>, Vec<u8>) {
        let (mut stream, mut bytes) = (Vec::new(), Vec::new());
        for (number, length) in lengths.iter().enumerate() {
            stream.extend((*length as u32).to_le_bytes());
            stream.extend(std::iter::repeat_n(number as u8, *length));
            bytes.extend(std::iter::repeat_n(number as u8, *length));
        }
        (stream, bytes)
    }

    fn read_all(from: &mut impl Read) -> (Vec<u8>, Result<(), Broken>) {
        let (mut chunks, mut bytes, mut buffer) = (Chunks::default(), Vec::new(), vec![0; 10_000]);
        loop {
            match chunks.read(from, &mut buffer, LIMIT) {
                Ok(0) => return (bytes, Ok(())),
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(broken) => return (bytes, Err(broken)),
            }
        }
    }

    #[test]
    fn bodies_do_not_depend_on_how_the_stream_is_split() {
        let mut next = generator(1);
        for _ in 0..200 {
            let count = next() % 6;
            let lengths: Vec<usize> = (0..count).map(|_| 1 + next() as usize % CHUNK_BYTES_MAX).collect();
            let (mut stream, bytes) = body(&lengths);
            write_end(&mut stream, None).unwrap();
            let (read, end) = read_all(&mut Pieces(&stream, &mut next));
            assert!(read == bytes && end.is_ok(), "{lengths:?}: {end:?}");
        }
    }

    /// A truncated stream results in the first bytes of the body and an error.
    #[test]
    fn a_truncated_stream_is_never_a_complete_body() {
        let (mut stream, bytes) = body(&[3, 1, 200]);
        write_end(&mut stream, None).unwrap();
        for end in 0..stream.len() {
            let (read, ended) = read_all(&mut &stream[..end]);
            assert!(matches!(ended, Err(Broken::Ended)), "{end}: {ended:?}");
            assert!(bytes.starts_with(&read), "{end}");
        }
        let (mut stream, _) = body(&[3]);
        write_end(&mut stream, Some("reset".into())).unwrap();
        let (read, ended) = read_all(&mut &stream[..]);
        assert!(matches!(&ended, Err(Broken::Cut(why)) if why == "reset"), "{ended:?}");
        assert_eq!(read, [0, 0, 0]);
    }

    /// Any stream of a compromised fetcher ends, uses bounded memory, and returns no more bytes than it
    /// contains. Every second stream is a valid one with one changed byte, so that each field is tested.
    #[test]
    fn malformed_streams_end_and_use_bounded_memory() {
        let mut next = generator(7);
        let mut outcomes = [0; 4];
        for round in 0..20_000_u64 {
            let mut stream: Vec<u8> = (0..next() % 60).map(|_| next() as u8).collect();
            if round % 2 == 0 {
                (stream, _) = body(&[1 + next() as usize % 20, 1 + next() as usize % 20]);
                write_end(&mut stream, (round % 4 == 0).then(|| "reset".into())).unwrap();
                let offset = next() as usize % stream.len();
                stream[offset] = next() as u8;
            }
            let (read, end) = read_all(&mut &stream[..]);
            assert!(read.len() <= stream.len());
            outcomes[match end {
                Ok(()) => 0,
                Err(Broken::Cut(_)) => 1,
                Err(Broken::Ended) => 2,
                Err(Broken::Nonsense(_) | Broken::Silent(_) | Broken::Unsent(_)) => 3,
            }] += 1;
            let _ = read_answer(&mut &stream[..], LIMIT);
        }
        assert!(outcomes.iter().all(|count| *count > 100), "every outcome was reached: {outcomes:?}");
        for too_long in [ANSWER_BYTES_MAX as u32 + 1, u32::MAX] {
            let refused = read_answer(&mut &too_long.to_le_bytes()[..], LIMIT);
            assert!(matches!(refused, Err(Broken::Nonsense(_))), "{refused:?}");
        }
        let too_long = (CHUNK_BYTES_MAX as u32 + 1).to_le_bytes();
        assert!(matches!(read_all(&mut &too_long[..]).1, Err(Broken::Nonsense(_))));
    }

    #[test]
    fn texts_are_cut_to_the_maximum_length() {
        let mut stream = Vec::new();
        let long = Failure::new(FailureKind::Denied, "é".repeat(ANSWER_BYTES_MAX));
        write_answer(&mut stream, Answer::RequestFailure(RequestFailure::lasting(long))).unwrap();
        let Ok(Answer::RequestFailure(failed)) = read_answer(&mut &stream[..], LIMIT) else {
            panic!("an answer")
        };
        assert_eq!(failed.failure.message.len(), ANSWER_BYTES_MAX / 2);
        stream.clear();
        write_end(&mut stream, Some("x".repeat(ANSWER_BYTES_MAX * 2))).unwrap();
        let (_, end) = read_all(&mut &stream[..]);
        assert!(matches!(&end, Err(Broken::Cut(why)) if why.len() == ANSWER_BYTES_MAX / 2));
    }
}
