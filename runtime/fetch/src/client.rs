//! The worker's side of the fetcher process. The worker starts it before it leaves the node's network, uses
//! it from several threads, does not trust it, and limits each wait. If the fetcher ends, blocks or violates
//! the protocol, all requests fail: the worker has no network any more, so it cannot start another one.
//! Downloaded data is kept for the next pull.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSlice, PipeReader, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, MessageError, Timeouts, WORKER, read_message_within, write_message};
use coracle_sandbox::describe_io;
use coracle_sandbox::jail::{self, Jailed};
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::confine::not_without;
use super::endpoint::REDIRECTS_MAX;
use super::names::Watch;
use super::protocol::{
    Answer, Broken, Chunks, Get, Head, Order, Ready, Resolved, read_answer, read_resolved,
};
use super::request_failure::RequestFailure;
use super::{SUBCOMMAND, setup};
use coracle_registries::Endpoint;

/// Time limit for the fetcher's confinement, and for sending an order.
const CONTROL_MAX: Duration = Duration::from_secs(30);

/// Time that is added to the fetcher's own limits. The fetcher's limits should be reached first, because its
/// errors are more specific.
const GRACE: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };

/// Time limit for a name lookup: musl waits for five seconds for each domain of the search list.
const NAMES_MAX: Duration = if cfg!(test) { GRACE } else { Duration::from_secs(30) };

/// Time limit for the names of neighbours.
const RESOLVE_MAX: Duration = Duration::from_secs(2);

/// Maximum number of HTTP requests for one answer: one and its redirects, those for a token, and all again with the token.
const STEPS_MAX: u32 = 3 * (1 + REDIRECTS_MAX);

/// Maximum wait for an answer, whatever the configuration: less than the daemon's limit for a silent worker.
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// Time limit for the end of a fetcher after which it is reaped and its exit status is reported.
const END_MAX: Duration = Duration::from_secs(1);

/// Maximum length in bytes of the message that reports the confinement.
const READY_BYTES_MAX: usize = 64 << 10;

/// Capacity in bytes of the pipe for a body: several reads from the network.
const PIPE_BYTES: i32 = 256 << 10;

/// A running fetcher.
pub struct Fetcher {
    control: Mutex<Control>,
    /// Another handle of the control socket, to shut the socket down while a thread sends.
    line: UnixStream,
    state: Mutex<State>,
    timeouts: Timeouts,
}

struct Control {
    socket: UnixStream,
    names: Watch,
}

struct State {
    child: Option<Jailed>,
    /// The failure of all further requests; `None` while the fetcher works.
    lost: Option<Failure>,
}

impl Fetcher {
    /// Starts a fetcher in the network namespace of the caller. The calling thread must live as long as this
    /// process: the fetcher ends with it (parent-death signal).
    pub fn start(timeouts: Timeouts) -> Result<Self, Failure> {
        let tried = |error: io::Error| {
            Failure::new(FailureKind::Internal, format!("start the fetcher process: {}", describe_io(&error)))
        };
        let program = File::open("/proc/self/exe").map_err(tried)?;
        // Mount point of its root in its own mount namespace: a directory that always exists.
        let directory = File::open("/proc").map_err(tried)?;
        let (ours, theirs) = UnixStream::pair().map_err(tried)?;
        let start = jail::Start {
            program: program.as_fd(),
            arguments: &[WORKER, SUBCOMMAND].map(|word| CString::new(word).unwrap_or_default()),
            directory: directory.as_fd(),
            streams: [theirs.as_fd(), theirs.as_fd()],
            output: None,
        };
        let child = jail::start(&start).map_err(|error| not_without(&error.to_string()))?;
        Self::over(ours, Some(child), timeouts).map_err(tried)
    }

    /// Creates the client for the fetcher at the other end of a socket.
    fn over(socket: UnixStream, child: Option<Jailed>, timeouts: Timeouts) -> io::Result<Self> {
        socket.set_read_timeout(Some(CONTROL_MAX))?;
        socket.set_write_timeout(Some(CONTROL_MAX))?;
        let line = socket.try_clone()?;
        let control = Mutex::new(Control { socket, names: Watch::default() });
        Ok(Self { control, line, state: Mutex::new(State { child, lost: None }), timeouts })
    }

    /// Waits until the fetcher is confined, and sends the settings for the endpoints of `registry`.
    pub fn set_up(&self, endpoints: &[Endpoint], registry: &str) -> Result<(), Failure> {
        let mut control = lock(&self.control);
        let ready = read_message_within::<Ready>(&mut control.socket, READY_BYTES_MAX);
        match ready {
            Ok(Some(Ok(()))) => {}
            Ok(Some(Err(refused))) => return Err(refused),
            Ok(None) => return Err(self.lose(Broken::Ended)),
            Err(error) => return Err(self.lose(Broken::from_message(&error, CONTROL_MAX))),
        }
        let setup = setup::gather(endpoints, registry, self.timeouts);
        match write_message(&mut control.socket, &Order::Setup(setup)) {
            Ok(()) => Ok(()),
            Err(MessageError::Io(error)) => Err(self.lose(broken_line(&error))),
            Err(error) => {
                Err(Failure::invalid(format!("certificates and hosts of registry {registry}: {error}")))
            }
        }
    }

    /// The timeouts of the requests.
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Makes a request; its endpoint is an index in the list of [`Fetcher::set_up`].
    pub fn get(self: &Arc<Self>, get: Get) -> Result<(Head, Body), RequestFailure> {
        self.ask(get)?.answer()
    }

    /// Makes a request whose answer is read later. Until then its pipe has the first bytes of the body, and the others wait.
    pub fn ask(self: &Arc<Self>, get: Get) -> Result<Asked, RequestFailure> {
        if let Some(lost) = &lock(&self.state).lost {
            return Err(RequestFailure::of_pull(lost.clone()));
        }
        let (pipe, theirs) = pipe()?;
        // A smaller pipe works, too.
        let _ = fcntl(&theirs, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        let sent = lock(&self.control).request(&Order::Get(get), theirs);
        sent.map_err(|error| RequestFailure::of_pull(self.lose(broken_line(&error))))?;
        Ok(Asked(Body {
            pipe: Timed { pipe, until: Instant::now() },
            chunks: Chunks::default(),
            silence: Duration::from_millis(self.timeouts.rate_window_ms).saturating_add(GRACE),
            fetcher: self.clone(),
        }))
    }

    /// Resolves names of neighbours. The wait is short, because a pull works without neighbours.
    pub fn resolve(&self, names: Vec<String>) -> Result<Vec<Resolved>, Failure> {
        self.resolve_within(names, RESOLVE_MAX)
    }

    /// Whether the process still executes orders.
    fn responds(&self) -> bool {
        self.resolve_within(Vec::new(), GRACE).is_ok()
    }

    fn resolve_within(&self, names: Vec<String>, limit: Duration) -> Result<Vec<Resolved>, Failure> {
        let (pipe, theirs) = pipe()?;
        let sent = lock(&self.control).request(&Order::Resolve(names), theirs);
        sent.map_err(|error| self.lose(broken_line(&error)))?;
        let mut pipe = Timed { pipe, until: Instant::now() + limit };
        read_resolved(&mut pipe, limit).map_err(|broken| match broken {
            Broken::Silent(limit) => {
                let text = format!("names of neighbours were not resolved within {limit:?}");
                Failure::new(FailureKind::NameResolution, text)
            }
            broken => self.lose(broken),
        })
    }

    /// The maximum time for an answer with the configured timeouts.
    fn answer_limit(&self) -> Duration {
        let Timeouts { connect_ms, tls_ms, first_byte_ms, .. } = self.timeouts;
        let step = connect_ms.saturating_add(tls_ms).saturating_add(first_byte_ms);
        let steps = Duration::from_millis(step).saturating_mul(STEPS_MAX);
        steps.saturating_add(NAMES_MAX).min(ANSWER_MAX)
    }

    /// Marks the fetcher as failed; all requests fail with the same cause.
    fn lose(&self, broken: Broken) -> Failure {
        let mut state = lock(&self.state);
        if let Some(lost) = &state.lost {
            return lost.clone();
        }
        const WHO: &str = "the fetcher process";
        let ended = self.hang_up(&mut state);
        let (kind, text) = match (broken, ended) {
            (Broken::Nonsense(what), _) => (FailureKind::Internal, format!("{WHO} sent {what}")),
            (Broken::Unsent(why), _) => (FailureKind::Internal, format!("send an order to {WHO}: {why}")),
            (Broken::Silent(limit), None) => {
                (FailureKind::Unavailable, format!("{WHO} did not respond for {limit:?}"))
            }
            (_, Some(how)) => (FailureKind::Unavailable, format!("{WHO} ended: {how}")),
            (_, None) => (FailureKind::Unavailable, format!("{WHO} closed its connection")),
        };
        let lost = Failure::new(kind, text);
        state.lost = Some(lost.clone());
        lost
    }

    /// Shuts the connection down; returns the fetcher's exit status if it ended by itself.
    fn hang_up(&self, state: &mut State) -> Option<jail::Ended> {
        // Fails only if the other end is closed.
        let _ = self.line.shutdown(Shutdown::Both);
        // Dropping it kills and reaps the process.
        let mut child = state.child.take()?;
        child.wait_within(END_MAX).ok()?
    }

    /// Ends the fetcher at the end of a pull.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        if state.lost.is_none() {
            state.lost = Some(Failure::new(FailureKind::Internal, "the pull has ended"));
            self.hang_up(&mut state);
        }
    }
}

fn pipe() -> Result<(PipeReader, io::PipeWriter), Failure> {
    let text = |error| format!("create a pipe: {}", describe_io(&error));
    io::pipe().map_err(|error| Failure::new(FailureKind::Internal, text(error)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error for an order that could not be sent.
fn broken_line(error: &io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Broken::Silent(CONTROL_MAX),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Broken::Ended,
        _ => Broken::Unsent(describe_io(error)),
    }
}

impl Control {
    /// Sends a request with the pipe for its answer; sends changed resolver files before the request.
    fn request(&mut self, order: &Order, pipe: io::PipeWriter) -> io::Result<()> {
        if let Some(names) = self.names.changes(Path::new("/etc")) {
            write_message(&mut self.socket, &Order::Names(names))?;
        }
        let mut message = Vec::new();
        write_message(&mut message, order)?;
        let descriptors = [pipe.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("no space for a descriptor"));
        }
        let parts = [IoSlice::new(&message)];
        let sent = retry_on_intr(|| sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
        self.socket.write_all(&message[sent..])
    }
}

/// A request whose answer was not read. Dropping the value ends the request.
pub struct Asked(Body);

impl Asked {
    /// Waits for the answer.
    pub fn answer(self) -> Result<(Head, Body), RequestFailure> {
        let Self(mut body) = self;
        let limit = body.fetcher.answer_limit();
        body.pipe.until = Instant::now() + limit;
        match read_answer(&mut body.pipe, limit) {
            Ok(Answer::Body(head)) => Ok((head, body)),
            Ok(Answer::RequestFailure(failed)) => Err(failed.of_peer()),
            Err(broken) => Err(RequestFailure::of_pull(body.fetcher.lose(broken))),
        }
    }
}

/// The body of an answer.
pub struct Body {
    pipe: Timed,
    chunks: Chunks,
    /// Time limit for more data; the fetcher's own limit for silent registries is shorter.
    silence: Duration,
    fetcher: Arc<Fetcher>,
}

impl Body {
    /// Reads like [`Read::read`]: `Ok(0)` is the end of a complete body. `name` is put in front of the
    /// failure's text.
    pub fn read(&mut self, buffer: &mut [u8], name: &str) -> Result<usize, RequestFailure> {
        self.pipe.until = Instant::now() + self.silence;
        self.chunks.read(&mut self.pipe, buffer, self.silence).map_err(|broken| match broken {
            Broken::Cut(why) => Failure::new(FailureKind::Unavailable, format!("{name}: {why}")).into(),
            // A server can do this: it sends what decodes to nothing.
            Broken::Silent(limit) if self.fetcher.responds() => {
                Failure::new(FailureKind::Unavailable, format!("{name}: no data for {limit:?}")).into()
            }
            broken => RequestFailure::of_pull(self.fetcher.lose(broken)),
        })
    }
}

/// A pipe that can be read until a deadline.
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
                // There is no other reader, so the data stays available.
                Ok(_) => return self.pipe.read(buffer),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
