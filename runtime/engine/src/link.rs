//! The daemon's connection to a monitor: requests are numbered and answered, events arrive without a request.
//!
//! One task per monitor reads; each caller waits for the answer with its number. If a monitor does not
//! respond, its callers time out, and no other code is affected.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Error, Kind, describe_io};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_sandbox::monitor::{self, Monitor};
use coracle_sandbox::{Event, Failure, FromMonitor, Reply, Request, ToMonitor, describe_errno};
use nix::errno::Errno;
use smol::channel::{Receiver, Sender};
use smol::lock::{OnceCell, Semaphore};

/// Maximum number of concurrent requests to one monitor; further requests wait. A monitor never waits for its
/// daemon: it closes the connection if the daemon's socket is full of answers. The socket has space for some
/// 250 frames, which events need, too.
const ASKS_MAX: usize = 32;

/// Maximum number of consecutive read or send errors, with a short pause after each, before the connection is
/// closed, or read with long pauses, or the request fails: one second in total.
const FAILURES_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);
/// Pause after each further read error.
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// Time limit of requests that the monitor answers immediately.
pub(crate) const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Maximum time between the end of a monitor's socket and the notification of the monitor's end.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Answer and descriptors of one request.
type Answer = (Reply, Vec<OwnedFd>);

/// A connection to a running monitor.
pub(crate) struct Link {
    monitor: Monitor,
    socket: Watched<Rc<OwnedFd>>,
    process: Watched<Rc<OwnedFd>>,
    /// Version of the frames in the monitor's Hello; 0 before Hello.
    version: Cell<u16>,
    last_number: Cell<u32>,
    waiting: RefCell<HashMap<u32, Sender<Answer>>>,
    /// Permits for concurrent requests.
    permits: Semaphore,
    is_closed: Cell<bool>,
    /// Set when the connection is no longer needed; see [`Link::abandon`].
    abandoned: OnceCell<()>,
    /// Set when the monitor has ended: the error of the monitor program; `None` inside if it ended without one.
    end: OnceCell<Option<monitor::Failure>>,
}

/// The reason why a request failed.
#[derive(Debug)]
pub(crate) enum LinkError {
    /// The monitor has ended.
    Gone,
    /// The monitor did not answer within the limit.
    Silent {
        /// The time limit within which the monitor did not answer.
        limit: Duration,
    },
    /// The monitor answered with a failure.
    Failed(Failure),
    /// An error of the socket; with the error text.
    Socket(String),
}

/// A message of the monitor that is not the answer to a request, or the end of the connection.
pub(crate) enum News {
    /// One event of the monitor.
    Event(Event),
    /// The monitor process has ended.
    Gone,
    /// The connection is lost, but the monitor is running: the daemon must connect again.
    Lost,
}

/// The result of reading all available frames.
enum Reading {
    /// All available frames were read; the connection is open.
    Open,
    /// Reading failed: the kernel has no memory, or a frame is malformed.
    Failed(monitor::LinkError),
    Closed,
}

impl Link {
    /// Starts a task that reads frames. The task calls `on_news`, which must not wait.
    pub(crate) fn open(monitor: Monitor, on_news: impl Fn(News) + 'static) -> Result<Rc<Self>, LinkError> {
        let watch = |fd: &Rc<OwnedFd>| {
            Watched::new(Rc::clone(fd)).map_err(|error| LinkError::Socket(describe_io(&error)))
        };
        let (socket, process) = (watch(&monitor.socket)?, watch(&monitor.pidfd)?);
        let link = Rc::new(Self {
            monitor,
            socket,
            process,
            version: Cell::new(0),
            last_number: Cell::new(0),
            waiting: RefCell::default(),
            permits: Semaphore::new(ASKS_MAX),
            is_closed: Cell::new(false),
            abandoned: OnceCell::new(),
            end: OnceCell::new(),
        });
        reactor::spawn(follow(Rc::downgrade(&link), on_news)).detach();
        Ok(link)
    }

    /// Closes the connection to a monitor that does not respond, because the daemon needs the descriptors.
    /// Does not call `on_news`; the daemon connects again later.
    pub(crate) fn abandon(&self) {
        self.is_closed.set(true);
        self.waiting.borrow_mut().clear();
        let _ = self.abandoned.try_set(());
    }

    /// The monitor's PID in the node's PID namespace.
    pub(crate) fn pid(&self) -> i32 {
        self.monitor.pid
    }

    /// Whether the monitor is of an older build than this daemon.
    pub(crate) fn is_outdated(&self) -> bool {
        (1..coracle_sandbox::FRAMES_VERSION).contains(&self.version.get())
    }

    /// Whether the monitor has answered Hello.
    pub(crate) fn is_greeted(&self) -> bool {
        self.version.get() != 0
    }

    /// The version of the monitor's frames and launch records from its Hello; 0 before Hello.
    pub(crate) fn version(&self) -> u16 {
        self.version.get()
    }

    /// Sends SIGKILL to the monitor's process.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn kill(&self) -> Result<(), Error> {
        // Once it was reaped, nothing is left to signal.
        if self.end.is_initialized() { Ok(()) } else { Ok(self.monitor.kill()?) }
    }

    /// Waits until the monitor's process has ended, and reaps it if it is a child of this daemon; init reaps
    /// monitors of an earlier daemon. Does not depend on the connection, which ends before the process.
    pub(crate) async fn ended(&self) {
        // Once: afterwards its pid may be another's.
        self.end.get_or_init(|| self.reap()).await;
    }

    async fn reap(&self) -> Option<monitor::Failure> {
        // Readable means ended. After an error of poll, the empty cgroup shows the end.
        let _ = self.process.readable().await;
        for _ in 0..FAILURES_MAX {
            if let Some(failure) = self.monitor.reap() {
                return failure;
            }
            reactor::sleep(PAUSE).await;
        }
        None
    }

    /// The error of a monitor program that could not start; `None` if it ended without one. Called after the monitor
    /// has disconnected.
    pub(crate) async fn failure(&self) -> Option<monitor::Failure> {
        let _ = reactor::deadline(END_LIMIT, self.ended()).await; // without its end there is no reason
        self.end.get().copied().flatten()
    }

    /// Sends a request and waits for the answer; a failure that the monitor reports is [`LinkError::Failed`].
    pub(crate) async fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Vec<OwnedFd>, LinkError> {
        let number = Cell::new(0);
        let asked = async {
            let _permit = self.permits.acquire().await;
            let (own, answer) = self.register()?;
            number.set(own);
            self.send(&ToMonitor { number: own, request }, descriptors).await?;
            answer.recv().await.map_err(|_| LinkError::Gone)
        };
        let answer = reactor::deadline(limit, asked).await;
        self.waiting.borrow_mut().remove(&number.get());
        match answer {
            Ok(Ok((Reply::Failed(failure), _))) => Err(LinkError::Failed(failure)),
            Ok(Ok((Reply::Hello { version }, descriptors))) => {
                self.version.set(version);
                Ok(descriptors)
            }
            Ok(Ok((Reply::Done | Reply::Started | Reply::Waiting, descriptors))) => Ok(descriptors),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(LinkError::Silent { limit }),
        }
    }

    fn register(&self) -> Result<(u32, Receiver<Answer>), LinkError> {
        if self.is_closed.get() {
            return Err(LinkError::Gone);
        }
        let number = self.last_number.get().wrapping_add(1).max(1); // 0 is not used
        self.last_number.set(number);
        let (sender, receiver) = smol::channel::bounded(1);
        self.waiting.borrow_mut().insert(number, sender);
        Ok((number, receiver))
    }

    async fn send(&self, frame: &ToMonitor, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let mut failures = 0;
        loop {
            match self.monitor.send(frame, descriptors) {
                Ok(()) => return Ok(()),
                Err(monitor::LinkError::WouldBlock) => {
                    self.socket.writable().await.map_err(|error| LinkError::Socket(describe_io(&error)))?;
                }
                Err(monitor::LinkError::Closed) => return Err(LinkError::Gone),
                // Nothing was sent. A stop signal that is not sent, for example, costs a container its graceful end.
                Err(monitor::LinkError::Failed(error)) if is_passing(&error) && failures < FAILURES_MAX => {
                    failures += 1;
                    reactor::sleep(PAUSE).await;
                }
                Err(monitor::LinkError::Failed(error)) => return Err(LinkError::Socket(error.to_string())),
            }
        }
    }

    /// Reads all available frames.
    fn read_all(&self, on_news: &impl Fn(News)) -> Reading {
        loop {
            match self.monitor.receive() {
                Ok(Some((FromMonitor::Reply { number, reply }, descriptors))) => {
                    let waiting = self.waiting.borrow_mut().remove(&number);
                    // The caller has timed out: the descriptors are closed here.
                    if let Some(sender) = waiting {
                        let _ = sender.try_send((reply, descriptors));
                    }
                }
                Ok(Some((FromMonitor::Event(event), _))) => on_news(News::Event(event)),
                Ok(None) => return Reading::Open,
                Err(monitor::LinkError::Closed) => return Reading::Closed,
                Err(error) => return Reading::Failed(error),
            }
        }
    }

    /// Reports the end of the connection. A monitor that ends closes its socket a moment before its pidfd
    /// becomes readable.
    async fn close(&self, on_news: &impl Fn(News)) {
        self.is_closed.set(true);
        self.waiting.borrow_mut().clear();
        if matches!(reactor::deadline(END_LIMIT, self.process.readable()).await, Ok(Ok(()))) {
            on_news(News::Gone);
            self.ended().await;
        } else {
            on_news(News::Lost);
        }
    }
}

/// Whether the error is temporary: the kernel has no memory for the socket.
fn is_passing(error: &coracle_sandbox::Error) -> bool {
    matches!(error.errno(), Some(Errno::ENOMEM | Errno::ENOBUFS))
}

/// Reads until the connection ends. A read error does not end the task, because the frames stay in the
/// socket. While the kernel has no memory, the connection is kept as long as the monitor runs: another one would need
/// memory, too, and cannot be made if another program has removed the monitor's socket.
async fn follow(link: Weak<Link>, on_news: impl Fn(News)) {
    let mut failures = 0_u32;
    loop {
        // Upgraded only while reading: if all other references are dropped, the task ends at its next
        // wake-up.
        let Some(link) = link.upgrade() else { return };
        match link.read_all(&on_news) {
            Reading::Open => failures = 0,
            Reading::Failed(error) => {
                failures += 1;
                if failures.is_power_of_two() {
                    log::warn!("cannot read the socket of a monitor, will retry"; pid = link.pid(), error = error, failures = failures);
                }
                if failures <= FAILURES_MAX {
                    reactor::sleep(PAUSE).await;
                    continue;
                }
                let may_pass = matches!(&error, monitor::LinkError::Failed(error) if is_passing(error));
                // Readable: its process has ended.
                if may_pass && reactor::deadline(LONG_PAUSE, link.process.readable()).await.is_err() {
                    continue;
                }
                return link.close(&on_news).await;
            }
            Reading::Closed => return link.close(&on_news).await,
        }
        // The socket is registered already.
        let readable = async {
            let _ = link.socket.readable_again().await;
        };
        let abandoned = async {
            link.abandoned.wait().await;
        };
        smol::future::or(readable, abandoned).await;
        if link.abandoned.is_initialized() {
            return;
        }
    }
}

impl LinkError {
    /// The failed operation of the launch record and its errno; `None` for other errors.
    pub(crate) fn operation(&self) -> Option<(u16, i32)> {
        match self {
            Self::Failed(Failure::Operation { index, errno }) => Some((*index, *errno)),
            Self::Failed(Failure::Unknown | Failure::Refused { .. })
            | Self::Gone
            | Self::Silent { .. }
            | Self::Socket(_) => None,
        }
    }

    /// The error of a start that the monitor has refused with EAGAIN; `most`: the most that a pod may have.
    pub(crate) fn exhausted(&self, most: &str) -> Error {
        let text =
            format!("{self}: the pod has {most}, the maximum, or the kernel permits no further process");
        Error::new(Kind::ResourceExhausted, text)
    }

    /// Whether the monitor has refused the request with this error number.
    pub(crate) fn is_refusal(&self, wanted: Errno) -> bool {
        matches!(self, Self::Failed(Failure::Refused { errno }) if Errno::from_raw(*errno) == wanted)
    }
}

impl std::fmt::Display for LinkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gone => f.write_str("the pod's monitor is gone"),
            Self::Silent { limit } => {
                write!(f, "the pod's monitor did not answer within {} s", limit.as_secs())
            }
            Self::Failed(Failure::Unknown) => f.write_str("the pod's monitor is older than this request"),
            Self::Failed(Failure::Refused { errno }) => {
                write!(f, "the pod's monitor: {}", errno_text(*errno))
            }
            Self::Failed(Failure::Operation { index, errno }) => {
                write!(f, "operation {index}: {}", errno_text(*errno))
            }
            Self::Socket(error) => write!(f, "the monitor's socket: {error}"),
        }
    }
}

/// The kernel's description of an errno.
pub(crate) fn errno_text(errno: i32) -> String {
    match errno {
        0 => "the launch record cannot be read".to_owned(),
        errno => describe_errno(Errno::from_raw(errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    /// The last actions of an ending process (leaving its mount namespace, for example) can take seconds on a busy node, and its
    /// sockets are closed by then.
    #[test]
    fn the_end_of_a_monitor_is_seen_long_after_that_of_its_connection() {
        reactor::run(async {
            let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
            let (ours, theirs) = UnixStream::pair().unwrap();
            let monitor = Monitor { socket: Rc::new(ours.into()), pid, pidfd: Rc::new(pidfd) };
            let (sender, news) = smol::channel::unbounded();
            let link = Link::open(monitor, move |it| {
                let _ = sender.try_send(matches!(it, News::Lost));
            })
            .unwrap();
            drop(theirs);
            assert_eq!(
                news.recv().await,
                Ok(true),
                "the connection is lost, and the process is not known to have ended"
            );
            child.kill().unwrap();
            reactor::deadline(Duration::from_secs(10), link.ended()).await.expect("it has ended");
            link.ended().await;
            assert!(child.wait().is_err(), "it is reaped");
        });
    }
}
