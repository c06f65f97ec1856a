//! The fetcher as its worker sees it: started while there is a network, asked by any of the worker's threads, never trusted
//! and never waited for without a limit. Once it has ended, hangs or speaks nonsense, every request says so: the network was
//! left, so there is no other fetcher in this worker. What came until then stays for the next pull.

use std::fs::File;
use std::io::{self, IoSlice, PipeReader, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, MessageError, Patience, read_message_within, write_message};
use coracle_sandbox::jail::{self, Jailed};
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::names::Watch;
use super::protocol::{Answer, Broken, Chunks, Get, Head, Order, Ready, read_answer};
use super::trouble::Trouble;
use super::{SUBCOMMAND, setup};
use crate::failure::{failure, invalid};
use crate::registries::Endpoint;

/// How long the jail may take, and how long an order may wait to be taken.
const CONTROL_MAX: Duration = Duration::from_secs(30);

/// What a fetcher gets beyond its own limits, which come first and say more.
const GRACE: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };

/// What looking up a name may take, each time: musl waits for five seconds for each domain of the search list.
const NAMES_MAX: Duration = if cfg!(test) { GRACE } else { Duration::from_secs(30) };

/// Requests that one answer may take: each redirect, and the same again with a token.
const STEPS_MAX: u32 = 13;

/// The longest wait for an answer, whatever the configuration allows: less than the daemon waits for a sign of life.
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// How long a fetcher that was told to end is waited for, so that it is reaped and its end can be told.
const END_MAX: Duration = Duration::from_secs(1);

/// Longest message that says whether the jail is closed.
const READY_BYTES_MAX: usize = 64 << 10;

/// Bytes of the pipe that a body comes through: several reads of the network.
const PIPE_BYTES: i32 = 256 << 10;

/// A fetcher at work.
pub(crate) struct Fetcher {
    control: Mutex<Control>,
    /// The same socket: to hang up, whoever is about to send.
    line: UnixStream,
    state: Mutex<State>,
    patience: Patience,
}

struct Control {
    socket: UnixStream,
    names: Watch,
}

struct State {
    child: Option<Jailed>,
    /// Why there will be no more answers.
    lost: Option<Failure>,
}

impl Fetcher {
    /// Starts one, in the network namespace of the caller. The caller's thread is to live as long as this process: with it the
    /// fetcher ends.
    pub(crate) fn start(patience: Patience) -> Result<Self, Failure> {
        let tried = |error: io::Error| {
            failure(FailureKind::Internal, format!("start the process that speaks to registries: {error}"))
        };
        let program = File::open("/proc/self/exe").map_err(tried)?;
        // Where its root is mounted, in a mount namespace of its own: a directory that is always there.
        let directory = File::open("/proc").map_err(tried)?;
        let (ours, theirs) = UnixStream::pair().map_err(tried)?;
        let start = jail::Start {
            program: program.as_fd(),
            arguments: &[
                c"coracle-worker".to_owned(),
                std::ffi::CString::new(SUBCOMMAND).unwrap_or_default(),
            ],
            directory: directory.as_fd(),
            streams: [theirs.as_fd(), theirs.as_fd()],
            output: None,
        };
        let child = jail::start(&start)
            .map_err(|error| crate::jail::not_without(&error.to_string(), "no registry is asked"))?;
        Self::over(ours, Some(child), patience).map_err(tried)
    }

    /// One at the other end of a socket.
    fn over(socket: UnixStream, child: Option<Jailed>, patience: Patience) -> io::Result<Self> {
        socket.set_read_timeout(Some(CONTROL_MAX))?;
        socket.set_write_timeout(Some(CONTROL_MAX))?;
        let line = socket.try_clone()?;
        let control = Mutex::new(Control { socket, names: Watch::default() });
        Ok(Self { control, line, state: Mutex::new(State { child, lost: None }), patience })
    }

    /// Waits until it is confined, and hands over what it needs for these endpoints of `registry`.
    pub(crate) fn set_up(&self, endpoints: &[Endpoint], registry: &str) -> Result<(), Failure> {
        let mut control = lock(&self.control);
        let ready = read_message_within::<Ready>(&mut control.socket, READY_BYTES_MAX);
        match ready {
            Ok(Some(Ok(()))) => {}
            Ok(Some(Err(refused))) => return Err(refused),
            Ok(None) => return Err(self.lose(Broken::Ended)),
            Err(error) => return Err(self.lose(Broken::Nonsense(error.to_string()))),
        }
        let setup = setup::gather(endpoints, registry, self.patience);
        match write_message(&mut control.socket, &Order::Setup(setup)) {
            Ok(()) => Ok(()),
            Err(MessageError::Io(error)) => Err(self.lose(broken_line(&error))),
            Err(error) => Err(invalid(format!("certificates and hosts of registry {registry}: {error}"))),
        }
    }

    /// How long these requests are waited for.
    pub(crate) fn patience(&self) -> &Patience {
        &self.patience
    }

    /// GET of `manifests/REFERENCE` or `blobs/DIGEST` of an endpoint, by its index in [`Fetcher::set_up`]'s list, from byte
    /// `offset` on.
    pub(crate) fn get(
        self: &Arc<Self>,
        endpoint: usize,
        what: &str,
        accept: &str,
        offset: u64,
    ) -> Result<(Head, Body), Trouble> {
        if let Some(lost) = &lock(&self.state).lost {
            return Err(Trouble::of_pull(lost.clone()));
        }
        let get = Get { remote: endpoint as u32, what: what.to_owned(), accept: accept.to_owned(), offset };
        let (pipe, theirs) =
            io::pipe().map_err(|error| failure(FailureKind::Internal, format!("make a pipe: {error}")))?;
        // Smaller pipes do as well.
        let _ = fcntl(&theirs, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        let sent = lock(&self.control).request(get, theirs);
        sent.map_err(|error| Trouble::of_pull(self.lose(broken_line(&error))))?;
        let limit = self.answer_limit();
        let mut body = Body {
            pipe: Timed { pipe, until: Instant::now() + limit },
            chunks: Chunks::default(),
            silence: Duration::from_millis(self.patience.rate_window_ms).saturating_add(GRACE),
            fetcher: self.clone(),
        };
        match read_answer(&mut body.pipe, limit) {
            Ok(Answer::Body(head)) => Ok((head, body)),
            Ok(Answer::Trouble(trouble)) => Err(trouble.of_peer()),
            Err(broken) => Err(Trouble::of_pull(self.lose(broken))),
        }
    }

    /// The longest that an answer may take by the configuration.
    fn answer_limit(&self) -> Duration {
        let Patience { connect_ms, tls_ms, first_byte_ms, .. } = self.patience;
        let step = connect_ms.saturating_add(tls_ms).saturating_add(first_byte_ms);
        let steps = Duration::from_millis(step).saturating_mul(STEPS_MAX);
        steps.saturating_add(NAMES_MAX).min(ANSWER_MAX)
    }

    /// Gives it up: tells why, the same to everybody.
    fn lose(&self, broken: Broken) -> Failure {
        let mut state = lock(&self.state);
        if let Some(lost) = &state.lost {
            return lost.clone();
        }
        const WHO: &str = "the process that speaks to registries";
        let ended = self.hang_up(&mut state);
        let (kind, text) = match (broken, ended) {
            (Broken::Nonsense(what), _) => (FailureKind::Internal, format!("{WHO} sent {what}")),
            (Broken::Silent(limit), None) => {
                (FailureKind::Unavailable, format!("{WHO} said nothing for {limit:?}"))
            }
            (_, Some(how)) => (FailureKind::Unavailable, format!("{WHO} ended: {how}")),
            (_, None) => (FailureKind::Unavailable, format!("{WHO} answers no more")),
        };
        let lost = failure(kind, text);
        state.lost = Some(lost.clone());
        lost
    }

    /// Ends it, and says how it ended where it ended by itself.
    fn hang_up(&self, state: &mut State) -> Option<jail::Ended> {
        // Fails only where the other end is closed.
        let _ = self.line.shutdown(Shutdown::Both);
        // Dropped it is killed and reaped.
        let mut child = state.child.take()?;
        child.wait_within(END_MAX).ok()?
    }

    /// The pull is over, well or not.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        if state.lost.is_none() {
            state.lost = Some(failure(FailureKind::Internal, "the pull is over"));
            self.hang_up(&mut state);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panics with it ends the process (`panic = "abort"`).
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An order that could not be sent.
fn broken_line(error: &io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Broken::Silent(CONTROL_MAX),
        _ => Broken::Ended,
    }
}

impl Control {
    /// Sends a request with the pipe for its answer; before it what has changed of the resolver's files.
    fn request(&mut self, get: Get, pipe: io::PipeWriter) -> io::Result<()> {
        if let Some(names) = self.names.changes(Path::new("/etc")) {
            write_message(&mut self.socket, &Order::Names(names)).map_err(|error| match error {
                MessageError::Io(error) => error,
                error => io::Error::other(error.to_string()),
            })?;
        }
        let mut message = Vec::new();
        write_message(&mut message, &Order::Get(get)).map_err(|error| io::Error::other(error.to_string()))?;
        let descriptors = [pipe.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("no room for a descriptor"));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
        self.socket.write_all(&message[sent..])
    }
}

/// The body of an answer, as it comes.
pub(crate) struct Body {
    pipe: Timed,
    chunks: Chunks,
    /// The longest wait for the next bytes: the fetcher gives a silent registry up before.
    silence: Duration,
    fetcher: Arc<Fetcher>,
}

impl Body {
    /// As [`Read::read`]: `Ok(0)` is the end of a complete body. `name` is in front of the failure's text.
    pub(crate) fn read(&mut self, buffer: &mut [u8], name: &str) -> Result<usize, Trouble> {
        self.pipe.until = Instant::now() + self.silence;
        self.chunks.read(&mut self.pipe, buffer, self.silence).map_err(|broken| match broken {
            Broken::Cut(why) => failure(FailureKind::Unavailable, format!("{name}: {why}")).into(),
            broken => Trouble::of_pull(self.fetcher.lose(broken)),
        })
    }
}

/// A pipe that is read until some instant.
struct Timed {
    pipe: PipeReader,
    until: Instant,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) | Err(nix::errno::Errno::EINTR) => {}
                // Nobody else reads it, so what is there stays there.
                Ok(_) => return self.pipe.read(buffer),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
