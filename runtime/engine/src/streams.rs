//! The endpoints of exec and attach: descriptors of a process's standard streams, and its exit. The crate coracle-streaming
//! transfers the data; for port-forward it connects to the pod's ports (`pod::network`).

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_sandbox::{Exit, Request};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use smol::channel::Receiver;

use crate::Container;
use crate::exec::{Running, pipe};
use crate::link::{ASK_LIMIT, Link, LinkError};

/// Number of bytes between two pauses while the output of a command without a client is dropped.
const DISCARD_BYTES: usize = 256 << 10;
const DISCARD_PAUSE: Duration = Duration::from_millis(10);

/// Maximum number of unread bytes of an attached client before the monitor disconnects it: the maximum size
/// of a pipe (fs.pipe-max-size).
const ATTACH_PIPE_BYTES: i32 = 1 << 20;

/// The streams that a client requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Whether the client writes to standard input.
    pub stdin: bool,
    /// Whether the client reads standard output.
    pub stdout: bool,
    /// Whether the client reads standard error.
    pub stderr: bool,
    /// Whether the streams of the container are a terminal.
    pub tty: bool,
}

/// The daemon's ends of a process's streams. With a terminal, all are the same descriptor.
#[derive(Default)]
pub struct Ends {
    /// The write end of standard input; `None` if not requested.
    pub stdin: Option<Rc<Watched>>,
    /// The read end of standard output; `None` if not requested.
    pub stdout: Option<Rc<Watched>>,
    /// The read end of standard error; `None` if not requested.
    pub stderr: Option<Rc<Watched>>,
    /// The master side of the terminal, for resizing; `None` without a terminal.
    pub terminal: Option<Rc<Watched>>,
}

/// A running command with a streaming client.
pub struct Exec {
    running: Running,
    exited: Receiver<Exit>,
    exit: Cell<Option<Exit>>,
}

impl Exec {
    /// Waits until the command's process has exited.
    ///
    /// # Errors
    /// The pod's monitor has ended, and with it the process.
    pub async fn ended(&self) -> Result<Exit, Error> {
        if let Some(exit) = self.exit.get() {
            return Ok(exit);
        }
        let gone = |_| Error::new(Kind::Unknown, "the pod's monitor is gone");
        let exit = self.exited.recv().await.map_err(gone)?;
        self.exit.set(Some(exit));
        Ok(exit)
    }

    /// Releases the exec after its process has exited; its remaining child processes run until the container
    /// exits.
    pub fn release(mut self) {
        self.running.has_ended();
    }

    /// Continues an exec without a client: output is read and dropped, so that the command does not block
    /// (streaming 6.5). A terminal is hung up instead.
    pub fn abandon(self, ends: Ends) {
        log::info!("exec continues without its client"; ctr = self.running.container_id());
        reactor::spawn(async move {
            // Ends when its process exits; child processes then lose the pipes, as with a connected client.
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

/// Reads and drops the output of a command whose client has disconnected. The container determines the
/// amount, therefore each read lets other tasks run, and a fast writer is slowed to 25 MB/s.
async fn discard(from: Option<Rc<Watched>>) {
    let mut buffer = [0; 4096];
    let Some(from) = from else { return };
    let mut count = 0;
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        count += read;
        if count >= DISCARD_BYTES {
            count = 0;
            reactor::sleep(DISCARD_PAUSE).await;
        } else {
            reactor::yield_now().await;
        }
    }
}

impl Container {
    /// Starts a command and returns its streams. Dropping the returned [`Exec`] kills the command.
    ///
    /// # Errors
    /// The container is not running; the command cannot be executed.
    pub async fn exec_streams(
        self: &Rc<Self>,
        command: Vec<String>,
        wanted: Wanted,
    ) -> Result<(Exec, Ends), Error> {
        let title = self.title();
        let running = Running::new(Rc::clone(self))?;
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
        let null = self.node().monitors.null(&self.node().paths)?;
        if wanted.tty {
            let null = [null.as_fd(); 3];
            let master = self.start_exec(running, command, null, true).await?;
            let master = master.ok_or_else(|| Error::new(Kind::Internal, "it has no terminal"))?;
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

    /// Attaches to a running container: returns its further output, and its standard input if it has one.
    ///
    /// # Errors
    /// The container is not running; too many clients are attached.
    pub async fn attach(&self, wanted: Wanted) -> Result<Ends, Error> {
        let title = self.title();
        self.attach_ends(wanted).await.map_err(|error| error.context(format!("attach to {title}")))
    }

    async fn attach_ends(&self, wanted: Wanted) -> Result<Ends, Error> {
        require_running(self)?;
        let (has_terminal, has_stdin) = {
            let record = self.record();
            (record.spec.tty, record.spec.stdin)
        };
        let link = self.pod.link()?;
        let stdout = (wanted.stdout || wanted.tty).then(wide_pipe).transpose()?;
        let stderr = (wanted.stderr && !has_terminal).then(wide_pipe).transpose()?;
        let request =
            Request::Attach { container: self.id, stdout: stdout.is_some(), stderr: stderr.is_some() };
        let theirs: Vec<BorrowedFd> =
            [&stdout, &stderr].into_iter().flatten().map(|(_, write)| write.as_fd()).collect();
        link.ask(request, &theirs, ASK_LIMIT).await.map_err(refused)?;
        let ours = if has_terminal || (wanted.stdin && has_stdin) {
            stdin_of(&link, self).await?.map(Rc::new)
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

    /// Closes a container's standard input permanently, for all attached clients.
    ///
    /// # Errors
    /// The monitor's error.
    pub async fn close_stdin(&self) -> Result<(), Error> {
        let link = self.pod.link()?;
        let request = Request::CloseStdin { container: self.id };
        link.ask(request, &[], ASK_LIMIT).await.map(drop).map_err(refused)
    }
}

/// Checks that the container is running.
///
/// # Errors
/// `FailedPrecondition` if the container is not running.
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
        // Its standard input was closed because of stdin_once.
        Err(error) if error.is_refusal(Errno::ENXIO) => Ok(None),
        Err(error) => Err(refused(error)),
    }
}

fn refused(error: LinkError) -> Error {
    match error {
        error if error.is_refusal(Errno::ESRCH) => Error::new(Kind::FailedPrecondition, "it is not running"),
        error if error.is_refusal(Errno::EAGAIN) => {
            Error::new(Kind::ResourceExhausted, "too many clients are attached to this pod")
        }
        error => Error::new(Kind::Unknown, error.to_string()),
    }
}

/// Creates a pipe of the maximum size; smaller if the limit of pipe pages is reached.
fn wide_pipe() -> Result<(Watched, OwnedFd), Error> {
    let (read, write) = pipe()?;
    let _ = fcntl(&write, FcntlArg::F_SETPIPE_SZ(ATTACH_PIPE_BYTES));
    Ok((read, write))
}
