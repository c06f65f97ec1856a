//! What the two processes of a pull say to each other. No I/O of its own, and nothing here trusts its peer.
//!
//! | channel | who to whom | what |
//! |---|---|---|
//! | control, a stream socket | fetcher to worker | once: [`Ready`], a message |
//! | control | worker to fetcher | [`Order`]s, each a message; with a [`Order::Get`] comes a pipe to answer into |
//! | a pipe for each request | fetcher to worker | an [`Answer`], a message; behind [`Answer::Body`] the body in chunks |
//!
//! A message is a little-endian u32 length and that many bytes of postcard, as a worker's answers to the daemon. A chunk is a
//! little-endian u32 length, at most [`CHUNK_BYTES_MAX`], and that many bytes. A length of 0 ends the body, and an [`End`], a
//! message, says how: a pipe that ends without one says that the fetcher is gone, not that the body is complete.

use std::io::{self, Read, Write};
use std::time::Duration;

use coracle_job::{Credentials, Failure, MessageError, Patience, read_message_within, write_message};
use serde::{Deserialize, Serialize};

use super::trouble::Trouble;
use crate::registries::Environment;

/// Longest message in a pipe: a failure's text. The worker reads no more of a fetcher that may have been taken over.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Longest chunk of a body: one read from the network.
pub(super) const CHUNK_BYTES_MAX: usize = 64 << 10;

/// The jail is closed, or which step of it this host does not allow.
pub(super) type Ready = Result<(), Failure>;

/// What a worker tells its fetcher.
#[derive(Serialize, Deserialize)]
pub(super) enum Order {
    /// The first: everything that requests need of the node's files and environment.
    Setup(Setup),
    /// What the resolver is to read from now on.
    Names(Names),
    /// A request; a pipe comes with it.
    Get(Get),
}

/// All that a fetcher is given. It holds secrets, so there is no `Debug`.
#[derive(Serialize, Deserialize)]
pub(super) struct Setup {
    /// The registry's name, for mirrors.
    pub(super) registry: String,
    pub(super) remotes: Vec<Remote>,
    pub(super) patience: Patience,
    /// Which proxy is for what.
    pub(super) environment: Environment,
    /// The system's trusted roots, in PEM.
    pub(super) system_roots: String,
}

/// One endpoint.
#[derive(Serialize, Deserialize)]
pub(super) struct Remote {
    /// With scheme and prefix, without a trailing slash.
    pub(super) url: String,
    pub(super) repository: String,
    pub(super) credentials: Credentials,
    /// Sent with each request to it.
    pub(super) headers: Vec<(String, String)>,
    pub(super) is_mirror: bool,
    /// The server's certificate is not checked.
    pub(super) insecure_skip_verify: bool,
    /// The files of its TLS; or why one of them cannot be read, which every request that needs them fails with.
    pub(super) tls: Result<Pem, Failure>,
}

/// PEM files of one endpoint: their contents.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Pem {
    /// Roots that are trusted beside the system's.
    pub(super) roots: Vec<String>,
    pub(super) client: Option<ClientPem>,
}

/// The client's certificate.
#[derive(Serialize, Deserialize)]
pub(super) struct ClientPem {
    pub(super) certificate: String,
    pub(super) key: String,
    /// Of the key's file, for messages.
    pub(super) key_path: String,
}

/// The node's files of the resolver: their contents; `None`: as before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Names {
    pub(super) files: [Option<String>; 2],
}

/// GET of `manifests/REFERENCE` or `blobs/DIGEST`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Get {
    /// Index of a [`Remote`].
    pub(super) remote: u32,
    pub(super) what: String,
    pub(super) accept: String,
    /// The first byte that is wanted.
    pub(super) offset: u64,
}

/// What a request led to.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It is answered with success; the body follows.
    Body(Head),
    /// It is not.
    Trouble(Trouble),
}

/// What the worker has to know of a successful answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// Where its body begins.
    pub(crate) begin: Begin,
    /// Bytes of the body, where the registry says it.
    pub(crate) length: Option<u64>,
}

/// Where a body begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Begin {
    /// At the first byte of the whole, whatever was asked.
    First,
    /// Where it was asked to.
    AsAsked,
    /// At another byte than was asked.
    Elsewhere,
}

/// How a body ended.
#[derive(Debug, Serialize, Deserialize)]
enum End {
    /// With its last byte.
    Complete,
    /// Before, and why.
    Cut(String),
}

/// Why nothing more can be read of an answer.
#[derive(Debug)]
pub(super) enum Broken {
    /// The registry's side ended early: the fetcher says why.
    Cut(String),
    /// The fetcher closed the pipe without a word.
    Ended,
    /// It sent what it never sends.
    Nonsense(String),
    /// It sent nothing for so long.
    Silent(Duration),
}

impl Broken {
    /// An error of a reader, whose limit was `limit`.
    pub(super) fn from_io(error: &io::Error, limit: Duration) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => Self::Silent(limit),
            io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Nonsense(error.to_string()),
        }
    }

    fn from_message(error: &MessageError, limit: Duration) -> Self {
        match error {
            MessageError::Io(error) => Self::from_io(error, limit),
            error => Self::Nonsense(error.to_string()),
        }
    }
}

/// Reads the answer that comes first.
pub(super) fn read_answer(from: &mut impl Read, limit: Duration) -> Result<Answer, Broken> {
    match read_message_within(from, ANSWER_BYTES_MAX) {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(Broken::Ended),
        Err(error) => Err(Broken::from_message(&error, limit)),
    }
}

/// Writes it. A text that is longer than the worker reads is cut.
pub(super) fn write_answer(to: &mut impl Write, mut answer: Answer) -> Result<(), MessageError> {
    if let Answer::Trouble(trouble) = &mut answer {
        shorten(&mut trouble.failure.message);
    }
    write_message(to, &answer)
}

/// Leaves room for the rest of a message.
fn shorten(text: &mut String) {
    let mut end = text.len().min(ANSWER_BYTES_MAX / 2);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// Ends a body: with its last byte, or `why` before that.
pub(super) fn write_end(to: &mut impl Write, why: Option<String>) -> Result<(), MessageError> {
    to.write_all(&[0; 4]).map_err(MessageError::Io)?;
    let end = why.map_or(End::Complete, |mut why| {
        shorten(&mut why);
        End::Cut(why)
    });
    write_message(to, &end)
}

/// A body's chunks, as they are read.
#[derive(Default)]
pub(super) struct Chunks {
    /// Bytes of the current chunk that are still to come.
    left: usize,
    is_over: bool,
}

impl Chunks {
    /// As [`Read::read`]: `Ok(0)` is the end of a complete body, for a `buffer` that is not empty. `limit` is the reader's, for
    /// messages.
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
    use crate::failure::failure;
    use coracle_job::FailureKind;

    const LIMIT: Duration = Duration::from_secs(1);

    /// The same numbers for the same seed.
    fn generator(mut seed: u64) -> impl FnMut() -> u64 {
        move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            seed >> 33
        }
    }

    /// Gives out bytes in pieces of any size, as a pipe does.
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
    fn bodies_arrive_whole_however_they_are_cut_into_pieces() {
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

    /// Wherever the stream ends early, what was read is a beginning of the body, and the end is no end of a body.
    #[test]
    fn no_stream_that_ends_early_is_a_complete_body() {
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

    /// Whatever a fetcher that was taken over sends, the reader ends, holds no more than the bounds, and gives no more bytes
    /// than came. Every second stream is one of a fetcher with one byte changed, so that each field is reached.
    #[test]
    fn garbage_ends_and_costs_no_memory() {
        let mut next = generator(7);
        let mut outcomes = [0; 4];
        for round in 0..20_000_u64 {
            let mut stream: Vec<u8> = (0..next() % 60).map(|_| next() as u8).collect();
            if round % 2 == 0 {
                (stream, _) = body(&[1 + next() as usize % 20, 1 + next() as usize % 20]);
                write_end(&mut stream, (round % 4 == 0).then(|| "reset".into())).unwrap();
                let place = next() as usize % stream.len();
                stream[place] = next() as u8;
            }
            let (read, end) = read_all(&mut &stream[..]);
            assert!(read.len() <= stream.len());
            outcomes[match end {
                Ok(()) => 0,
                Err(Broken::Cut(_)) => 1,
                Err(Broken::Ended) => 2,
                Err(Broken::Nonsense(_) | Broken::Silent(_)) => 3,
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
    fn texts_are_cut_to_what_the_worker_reads() {
        let mut stream = Vec::new();
        let long = failure(FailureKind::Denied, "é".repeat(ANSWER_BYTES_MAX));
        write_answer(&mut stream, Answer::Trouble(Trouble::lasting(long))).unwrap();
        let Ok(Answer::Trouble(trouble)) = read_answer(&mut &stream[..], LIMIT) else { panic!("an answer") };
        assert_eq!(trouble.failure.message.len(), ANSWER_BYTES_MAX / 2);
        stream.clear();
        write_end(&mut stream, Some("x".repeat(ANSWER_BYTES_MAX * 2))).unwrap();
        let (_, end) = read_all(&mut &stream[..]);
        assert!(matches!(&end, Err(Broken::Cut(why)) if why.len() == ANSWER_BYTES_MAX / 2));
    }
}
