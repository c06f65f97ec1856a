//! What exec, attach and port-forward stream: descriptors of a process's standard streams, its end, and sockets in a
//! pod's network namespace. Who moves the bytes is `stream/`; here they are made, and given back.

use std::cell::Cell;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_sandbox::{Exit, Failure, Request};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{SockaddrStorage, connect, getsockopt, sockopt};
use smol::channel::Receiver;

use crate::exec::{Running, pipe};
use crate::link::{Link, LinkError, errno_text};
use crate::{Container, Pod, Pods};

/// Longest wait for a request that the monitor answers at once.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Longest wait for a connection inside the node.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How far behind an attached client may fall before the monitor lets go of it: the most that any pipe may hold
/// (fs.pipe-max-size).
const ATTACH_PIPE_BYTES: i32 = 1 << 20;

/// Which streams a client asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Write to its stdin.
    pub stdin: bool,
    /// Read its stdout.
    pub stdout: bool,
    /// Read its stderr.
    pub stderr: bool,
    /// Its streams are a terminal.
    pub tty: bool,
}

/// Our ends of a process's streams. With a terminal all are one.
#[derive(Default)]
pub struct Ends {
    /// To write to.
    pub stdin: Option<Rc<Watched>>,
    /// To read from.
    pub stdout: Option<Rc<Watched>>,
    /// To read from.
    pub stderr: Option<Rc<Watched>>,
    /// The master side, to resize.
    pub terminal: Option<Rc<Watched>>,
}

/// A command that runs in a container for a client that watches.
pub struct Exec {
    running: Running,
    exited: Receiver<Exit>,
    exit: Cell<Option<Exit>>,
}

impl Exec {
    /// Waits until its process has ended.
    ///
    /// # Errors
    /// The pod's monitor is gone, and the process with it.
    pub async fn ended(&self) -> Result<Exit, Error> {
        if let Some(exit) = self.exit.get() {
            return Ok(exit);
        }
        let gone = |_| Error::new(Kind::Unknown, "the pod's monitor is gone");
        let exit = self.exited.recv().await.map_err(gone)?;
        self.exit.set(Some(exit));
        Ok(exit)
    }

    /// Gives it back once its process has ended; what it left running stays until its container is over.
    pub fn release(mut self) {
        self.running.has_ended();
    }

    /// The client is gone; the command runs on with its output thrown away, so that it does not block (
    /// streaming 6.5). A terminal is hung up instead.
    pub fn abandon(self, ends: Ends) {
        log::info!("exec runs on without its client"; ctr = self.running.container_id());
        reactor::spawn(async move {
            // Its end is its process's; children that hold the pipes lose them then, as with any other client.
            smol::future::or(async { drop(self.ended().await) }, async {
                if ends.terminal.is_some() {
                    drop(ends);
                } else {
                    smol::future::zip(discard(ends.stdout), discard(ends.stderr)).await;
                }
                std::future::pending().await
            })
            .await;
            self.release();
        })
        .detach();
    }
}

async fn discard(from: Option<Rc<Watched>>) {
    let mut buffer = [0; 4096];
    let Some(from) = from else { return };
    while from.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
}

impl Pods {
    /// Starts a command whose streams a client gets. Dropping the answer kills it.
    ///
    /// # Errors
    /// The container does not run; the command cannot be executed.
    pub async fn exec_streams(
        self: &Rc<Self>,
        container: Rc<Container>,
        command: Vec<String>,
        wanted: Wanted,
    ) -> Result<(Exec, Ends), Error> {
        let title = container.title();
        let running = Running::new(self, container)?;
        let exited = running.exited();
        let started = self.start_streams(&running, command, wanted).await;
        let ends = started.map_err(|error| error.context(format!("exec in {title}")))?;
        Ok((Exec { running, exited, exit: Cell::new(None) }, ends))
    }

    async fn start_streams(
        &self,
        running: &Running,
        command: Vec<String>,
        wanted: Wanted,
    ) -> Result<Ends, Error> {
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        if wanted.tty {
            let null = [null.as_fd(); 3];
            let mut answer = self.start_exec(running, command, null, true).await?.into_iter().skip(1);
            let master = answer.next().ok_or_else(|| Error::new(Kind::Internal, "it has no terminal"))?;
            let master = Rc::new(Watched::new(master)?);
            return Ok(Ends {
                stdin: wanted.stdin.then(|| Rc::clone(&master)),
                stdout: Some(Rc::clone(&master)),
                stderr: None,
                terminal: Some(master),
            });
        }
        let output = |is_wanted: bool| is_wanted.then(pipe).transpose();
        let (stdout, stderr) = (output(wanted.stdout)?, output(wanted.stderr)?);
        let stdin = wanted.stdin.then(|| nix::unistd::pipe2(OFlag::O_CLOEXEC)).transpose()?;
        let theirs = [
            stdin.as_ref().map_or(null.as_fd(), |(read, _)| read.as_fd()),
            stdout.as_ref().map_or(null.as_fd(), |(_, write)| write.as_fd()),
            stderr.as_ref().map_or(null.as_fd(), |(_, write)| write.as_fd()),
        ];
        self.start_exec(running, command, theirs, false).await?;
        Ok(Ends {
            stdin: stdin.map(|(_, write)| Watched::new(write)).transpose()?.map(Rc::new),
            stdout: stdout.map(|(read, _)| Rc::new(read)),
            stderr: stderr.map(|(read, _)| Rc::new(read)),
            terminal: None,
        })
    }

    /// Copies of a running container's output from now on, and its stdin where it has one.
    ///
    /// # Errors
    /// The container does not run; too many clients are attached.
    pub async fn attach_streams(&self, container: &Container, wanted: Wanted) -> Result<Ends, Error> {
        let title = container.title();
        self.attach_ends(container, wanted).await.map_err(|error| error.context(format!("attach to {title}")))
    }

    async fn attach_ends(&self, container: &Container, wanted: Wanted) -> Result<Ends, Error> {
        require_running(container)?;
        let (has_terminal, has_stdin) = {
            let record = container.record();
            (record.spec.tty, record.spec.stdin)
        };
        let link = container.pod.link()?;
        let stdout = (wanted.stdout || wanted.tty).then(wide_pipe).transpose()?;
        let stderr = (wanted.stderr && !has_terminal).then(wide_pipe).transpose()?;
        let request =
            Request::Attach { container: container.id, stdout: stdout.is_some(), stderr: stderr.is_some() };
        let theirs: Vec<BorrowedFd> =
            [&stdout, &stderr].into_iter().flatten().map(|(_, write)| write.as_fd()).collect();
        link.ask(request, &theirs, ASK_LIMIT).await.map_err(refused)?;
        let ours = if has_terminal || (wanted.stdin && has_stdin) {
            stdin_of(&link, container).await?.map(Rc::new)
        } else {
            None
        };
        Ok(Ends {
            stdin: ours.clone().filter(|_| wanted.stdin),
            stdout: stdout.map(|(read, _)| Rc::new(read)),
            stderr: stderr.map(|(read, _)| Rc::new(read)),
            terminal: ours.filter(|_| has_terminal),
        })
    }

    /// Ends a container's stdin for good; what others still hold of it ends with them.
    ///
    /// # Errors
    /// What its monitor refused.
    pub async fn close_stdin(&self, container: &Container) -> Result<(), Error> {
        let link = container.pod.link()?;
        let request = Request::CloseStdin { container: container.id };
        link.ask(request, &[], ASK_LIMIT).await.map(drop).map_err(refused)
    }

    /// A connection to a port on the loopback of a pod's network namespace: IPv4, else IPv6.
    ///
    /// # Errors
    /// What the second try said.
    pub async fn connect(&self, pod: &Pod, port: u16) -> Result<Watched, Error> {
        let link = pod.link()?;
        let first = connect_to(&link, SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
        match first {
            Ok(socket) => Ok(socket),
            Err(first) => match connect_to(&link, SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await {
                Ok(socket) => Ok(socket),
                // A node without IPv6 would hide why the first one failed.
                Err(second) if second.kind() == Kind::Unimplemented => Err(first),
                Err(second) => Err(second),
            },
        }
    }
}

/// The container must run, or there is nothing to talk to.
///
/// # Errors
/// `FailedPrecondition` where it does not run.
pub fn require_running(container: &Container) -> Result<(), Error> {
    match container.record().state.is_running() {
        true => Ok(()),
        false => {
            let text = format!("{}: it is not running", container.title());
            Err(Error::new(Kind::FailedPrecondition, text))
        }
    }
}

async fn stdin_of(link: &Link, container: &Container) -> Result<Option<Watched>, Error> {
    match link.ask(Request::Stdin { container: container.id }, &[], ASK_LIMIT).await {
        Ok(descriptors) => Ok(descriptors.into_iter().next().map(Watched::new).transpose()?),
        // It had one, and stdin_once has used it up.
        Err(LinkError::Failed(Failure::Refused { errno })) if errno == nix::libc::ENXIO => Ok(None),
        Err(error) => Err(refused(error)),
    }
}

fn refused(error: LinkError) -> Error {
    match error {
        LinkError::Failed(Failure::Refused { errno }) if errno == nix::libc::ESRCH => {
            Error::new(Kind::FailedPrecondition, "it is not running")
        }
        LinkError::Failed(Failure::Refused { errno }) if errno == nix::libc::EAGAIN => {
            Error::new(Kind::ResourceExhausted, "too many clients are attached to this pod")
        }
        error => Error::new(Kind::Unknown, error.to_string()),
    }
}

/// A pipe that holds as much as one may. Where the limit of pipe pages is reached it holds less.
fn wide_pipe() -> Result<(Watched, OwnedFd), Error> {
    let (read, write) = pipe()?;
    let _ = fcntl(&write, FcntlArg::F_SETPIPE_SZ(ATTACH_PIPE_BYTES));
    Ok((read, write))
}

async fn connect_to(link: &Link, address: SocketAddr) -> Result<Watched, Error> {
    let failed = |errno: Errno| {
        let kind = if errno == Errno::EAFNOSUPPORT { Kind::Unimplemented } else { Kind::Unavailable };
        Error::new(kind, format!("connect to {address}: {}", errno_text(errno as i32)))
    };
    let socket = match link.ask(Request::TcpSocket { is_ipv6: address.is_ipv6() }, &[], ASK_LIMIT).await {
        Ok(descriptors) => descriptors.into_iter().next(),
        Err(LinkError::Failed(Failure::Refused { errno })) => return Err(failed(Errno::from_raw(errno))),
        Err(error) => return Err(Error::new(Kind::Unknown, error.to_string())),
    };
    let socket = socket.ok_or_else(|| Error::new(Kind::Internal, "the monitor sent no socket"))?;
    let socket = Watched::new(socket)?;
    match connect(socket.fd().as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => return Ok(socket),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let connected = reactor::deadline(CONNECT_LIMIT, socket.writable()).await;
    connected.map_err(|_| failed(Errno::ETIMEDOUT))??;
    match getsockopt(&socket.fd(), sockopt::SocketError)? {
        0 => Ok(socket),
        errno => Err(failed(Errno::from_raw(errno))),
    }
}
