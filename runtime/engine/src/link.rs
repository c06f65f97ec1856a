//! The daemon's end of a monitor's socket: requests are numbered and answered, events come unasked.
//!
//! One task per monitor reads; whoever asks waits for its own number. A monitor that answers nothing costs its caller
//! the limit given, never the daemon: nothing else waits for it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_sandbox::monitor::{self, Monitor};
use coracle_sandbox::{Event, Failure, FromMonitor, Reply, Request, ToMonitor};
use smol::channel::{Receiver, Sender};
use smol::lock::{OnceCell, Semaphore};

/// Requests under way at one monitor; more wait here. A monitor never waits for its daemon: one that leaves a socket full
/// of answers is disconnected, and a socket holds some 250. What it tells unasked needs room, too.
const ASKS_MAX: usize = 32;

/// Errors of reading that follow each other, with a pause behind each, before the connection is given up: a second in all.
const READ_FAILURES_MAX: u32 = 20;
const READ_PAUSE: Duration = Duration::from_millis(50);

/// How much later than its socket's end a monitor's own end may be seen.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Answer and descriptors of one request.
type Answer = (Reply, Vec<OwnedFd>);

/// A live connection to a monitor.
pub(crate) struct Link {
    monitor: Monitor,
    socket: Watched,
    process: Watched,
    /// Of the frames, as the monitor said in its Hello; 0 before.
    version: Cell<u16>,
    last_number: Cell<u32>,
    waiting: RefCell<HashMap<u32, Sender<Answer>>>,
    /// Places for requests under way.
    places: Semaphore,
    is_closed: Cell<bool>,
    /// Nobody wants it any more; see [`Link::abandon`].
    abandoned: OnceCell<()>,
    ended: OnceCell<()>,
}

/// Why a request has no good answer.
#[derive(Debug)]
pub(crate) enum LinkError {
    /// The monitor is gone.
    Gone,
    /// It did not answer within the limit.
    Silent {
        /// Which.
        limit: Duration,
    },
    /// It says why it could not.
    Failed(Failure),
    /// The socket.
    Socket(String),
}

/// What a monitor tells unasked.
pub(crate) enum News {
    /// One event.
    Event(Event),
    /// The monitor has ended.
    Gone,
    /// The connection is lost, and the monitor lives: it is to be connected to again.
    Lost,
}

/// What came of reading everything that is there.
enum Reading {
    /// There is nothing more for now.
    Open,
    /// The kernel has no memory, or a frame cannot be read.
    Failed(monitor::LinkError),
    Closed,
}

impl Link {
    /// Starts reading. `on_news` is called from the link's own task, and must not wait.
    pub(crate) fn open(monitor: Monitor, on_news: impl Fn(News) + 'static) -> Result<Rc<Self>, LinkError> {
        let watch = |fd: &OwnedFd| {
            fd.try_clone().and_then(Watched::new).map_err(|error| LinkError::Socket(error.to_string()))
        };
        let (socket, process) = (watch(&monitor.socket)?, watch(&monitor.pidfd)?);
        let link = Rc::new(Self {
            monitor,
            socket,
            process,
            version: Cell::new(0),
            last_number: Cell::new(0),
            waiting: RefCell::default(),
            places: Semaphore::new(ASKS_MAX),
            is_closed: Cell::new(false),
            abandoned: OnceCell::new(),
            ended: OnceCell::new(),
        });
        reactor::spawn(follow(Rc::downgrade(&link), on_news)).detach();
        Ok(link)
    }

    /// Lets go of a monitor that does not answer, without a word to anybody: its descriptors are needed, and there will be
    /// another link to it.
    pub(crate) fn abandon(&self) {
        self.is_closed.set(true);
        self.waiting.borrow_mut().clear();
        let _ = self.abandoned.try_set(());
    }

    /// The monitor's pid, as the node sees it.
    pub(crate) fn pid(&self) -> i32 {
        self.monitor.pid
    }

    /// Whether the monitor is of an older build than this daemon.
    pub(crate) fn is_outdated(&self) -> bool {
        (1..coracle_sandbox::FRAMES_VERSION).contains(&self.version.get())
    }

    /// The version of its frames and launch records, as it said hello; 0 before that.
    pub(crate) fn version(&self) -> u16 {
        self.version.get()
    }

    /// Waits until the monitor's process has ended, and is reaped where it was this daemon's child.
    pub(crate) async fn ended(&self) {
        self.ended.wait().await;
    }

    async fn reap(&self) {
        // Readable is ended; an error of poll means that nobody can tell, and the cgroup's emptiness will.
        let _ = self.process.readable().await;
        // Reaps it where it is a child of this daemon; one of an earlier daemon's belongs to init.
        let _ = self.monitor.is_gone();
        let _ = self.ended.try_set(());
    }

    /// Asks and waits for the answer; a failure the monitor reports is [`LinkError::Failed`].
    pub(crate) async fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Vec<OwnedFd>, LinkError> {
        let number = Cell::new(0);
        let asked = async {
            let _place = self.places.acquire().await;
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
        loop {
            match self.monitor.send(frame, descriptors) {
                Ok(()) => return Ok(()),
                Err(monitor::LinkError::WouldBlock) => {
                    self.socket.writable().await.map_err(|error| LinkError::Socket(error.to_string()))?;
                }
                Err(monitor::LinkError::Closed) => return Err(LinkError::Gone),
                Err(monitor::LinkError::Failed(error)) => return Err(LinkError::Socket(error.to_string())),
            }
        }
    }

    /// Reads what is there.
    fn read_all(&self, on_news: &impl Fn(News)) -> Reading {
        loop {
            match self.monitor.receive() {
                Ok(Some((FromMonitor::Reply { number, reply }, descriptors))) => {
                    let waiting = self.waiting.borrow_mut().remove(&number);
                    // Nobody waits any more where the limit has passed: descriptors close here.
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

    /// Nothing more comes: tells why. A monitor that ends closes its socket a moment before its pidfd says so.
    async fn close(&self, on_news: &impl Fn(News)) {
        self.is_closed.set(true);
        self.waiting.borrow_mut().clear();
        if matches!(reactor::deadline(END_LIMIT, self.process.readable()).await, Ok(Ok(()))) {
            on_news(News::Gone);
            self.reap().await;
        } else {
            on_news(News::Lost);
        }
    }
}

/// Reads until the connection ends. An error of one read is no end of it: what is there stays in the socket.
async fn follow(link: Weak<Link>, on_news: impl Fn(News)) {
    let mut failures = 0;
    loop {
        // Held only while reading: a link nobody else holds ends its task with the next wake-up.
        let Some(link) = link.upgrade() else { return };
        match link.read_all(&on_news) {
            Reading::Open => failures = 0,
            Reading::Failed(error) if failures < READ_FAILURES_MAX => {
                failures += 1;
                log::warn!("a monitor's socket cannot be read, tried again"; pid = link.pid(), error = error);
                reactor::sleep(READ_PAUSE).await;
                continue;
            }
            Reading::Failed(_) | Reading::Closed => return link.close(&on_news).await,
        }
        // An error of poll is met again by the read.
        let readable = async {
            let _ = link.socket.readable().await;
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
    /// Which operation of the record failed, and the errno, where that is what went wrong.
    pub(crate) fn operation(&self) -> Option<(u16, i32)> {
        match self {
            Self::Failed(Failure::Operation { index, errno }) => Some((*index, *errno)),
            Self::Failed(Failure::Unknown | Failure::Refused { .. })
            | Self::Gone
            | Self::Silent { .. }
            | Self::Socket(_) => None,
        }
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

/// The kernel's words for an errno.
pub(crate) fn errno_text(errno: i32) -> String {
    match errno {
        0 => "the launch record cannot be read".to_owned(),
        errno => nix::errno::Errno::from_raw(errno).desc().to_lowercase(),
    }
}
