//! The process of one worker and its pipes. A [`Process`] owns the child from its creation; [`Drop`] kills
//! the process group and passes the child to [`reap_all`], so that cancelled futures and errors leave no
//! process behind.

use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use coracle_job::{Answer, Job, MessageError, Outcome, Progress, write_message};
use nix::errno::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use smol::channel::{Receiver, Sender};

use super::Error;
use super::answers::Answers;
use crate::reactor::{self, Task, Watched};
use crate::{descriptors, log};

/// Buffer size for reads from a worker, in bytes.
const READ_BYTES: usize = 16 << 10;

/// Maximum length in bytes of a worker's log line that is forwarded.
const LOG_LINE_BYTES_MAX: usize = 1024;

/// Maximum number of a worker's log lines that are forwarded: sufficient for one line per file of a large
/// import.
const LOG_LINES_MAX: u32 = 1000;

/// Time limit for a worker to exit after it closed its standard output, after which it is killed; also the
/// time limit for reading the rest of its log.
const END_GRACE: Duration = Duration::from_secs(1);

/// Interval at which the reaper polls a child that has no pidfd.
const REAP_INTERVAL: Duration = Duration::from_millis(20);

/// A killed or finished worker that [`reap_all`] reaps.
pub(super) struct Remains {
    child: Child,
    /// Pidfd of the worker; `None` if no descriptor was free.
    pidfd: Option<Watched>,
    log: Option<Task<String>>,
    /// Value that is dropped when the worker has been reaped; by this the starter of a worker that may block
    /// in the kernel is notified of its end.
    _held: Option<Rc<dyn Any>>,
}

/// A running worker.
pub(super) struct Process {
    /// The child process; `None` after it was passed to the reaper.
    remains: Option<Remains>,
    stdin: Option<Watched>,
    /// Whether the worker's standard input is a socket, over which it sends a descriptor before its answer.
    sends_file: bool,
    stdout: Watched,
    reaper: Sender<Remains>,
}

impl Process {
    /// Starts `program` with three pipes in a new process group. The worker waits for its job.
    pub(super) fn start(program: &Path, reaper: Sender<Remains>) -> Result<Process, Error> {
        Process::start_with(program, reaper, Stdio::piped(), None, None)
    }

    /// Starts `program` like [`Process::start`], but with a socket as standard input.
    pub(super) fn start_looking(
        program: &Path,
        reaper: Sender<Remains>,
        held: Rc<dyn Any>,
    ) -> Result<Process, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::Pipe)?;
        Process::start_with(program, reaper, OwnedFd::from(theirs).into(), Some(ours.into()), Some(held))
    }

    fn start_with(
        program: &Path,
        reaper: Sender<Remains>,
        stdin: Stdio,
        socket: Option<OwnedFd>,
        held: Option<Rc<dyn Any>>,
    ) -> Result<Process, Error> {
        let sends_file = socket.is_some();
        let mut child = Command::new(program)
            .current_dir("/")
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| Error::Start { program: program.to_owned(), error })?;
        let pipes = watch_pipes(&mut child, socket);
        let pidfd = open_pidfd(&child);
        let mut remains = Remains { child, pidfd, log: None, _held: held };
        match pipes {
            Ok((stdin, stdout, stderr)) => {
                remains.log = Some(reactor::spawn(pass_on_log(stderr, remains.child.id())));
                Ok(Process { remains: Some(remains), stdin: Some(stdin), sends_file, stdout, reaper })
            }
            Err(error) => {
                kill(remains, &reaper);
                Err(Error::Pipe(error))
            }
        }
    }

    /// Sends the job and reads answers until the last one.
    pub(super) async fn converse(
        &mut self,
        job: &Job,
        silence_max: Duration,
        on_progress: &mut dyn FnMut(Progress),
        on_waiting: &mut dyn FnMut(String),
    ) -> Result<Outcome, Error> {
        let mut answers = Answers::default();
        let silent = |_| Error::Silent(silence_max);
        reactor::deadline(silence_max, self.hand_over(job)).await.map_err(silent)??;
        loop {
            let answer = reactor::deadline(silence_max, self.next_answer(&mut answers)).await;
            match answer.map_err(silent)?? {
                Some(Answer::Progress(progress)) => on_progress(progress),
                Some(Answer::Waiting(what)) => on_waiting(what),
                Some(Answer::Done(outcome)) => return Ok(outcome),
                Some(Answer::Failed(failure)) => return Err(Error::Failed(failure)),
                None => return Err(Error::Ended(self.end().await)),
            }
        }
    }

    /// Sends the job and closes standard input. If the worker has already exited, this is not an error,
    /// because its exit status explains more.
    async fn hand_over(&mut self, job: &Job) -> Result<(), Error> {
        if job.starts_programs()
            && let Some(pid) = self.remains.as_ref().and_then(|remains| pid(&remains.child))
        {
            descriptors::restore_limit_of(pid);
        }
        let mut message = Vec::new();
        write_message(&mut message, job).map_err(Error::Garbled)?;
        let Some(stdin) = self.stdin.take() else { return Ok(()) };
        match stdin.write_all(&message).await {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(Error::Pipe(error)),
            Ok(()) | Err(_) => {}
        }
        if self.sends_file {
            self.stdin = Some(stdin);
        }
        Ok(())
    }

    /// The descriptor that the worker sent before its answer; `None` if it sent none.
    pub(super) fn take_file(&mut self) -> Result<Option<OwnedFd>, Error> {
        let Some(socket) = self.stdin.take() else { return Ok(None) };
        match coracle_sandbox::hostpath::receive_file(socket.fd()) {
            Ok(file) => Ok(Some(file)),
            // An answer without a descriptor.
            Err(error)
                if matches!(error.errno(), Some(Errno::EAGAIN | Errno::ENODATA | Errno::ECONNRESET)) =>
            {
                Ok(None)
            }
            Err(error) => {
                Err(Error::Pipe(error.errno().map_or_else(|| io::Error::other(error), io::Error::from)))
            }
        }
    }

    /// Reads the next answer; `None` if the stream ended between two answers.
    async fn next_answer(&self, answers: &mut Answers) -> Result<Option<Answer>, Error> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            if let Some(answer) = answers.take().map_err(Error::Garbled)? {
                return Ok(Some(answer));
            }
            match self.stdout.read(&mut buffer).await.map_err(Error::Pipe)? {
                0 if answers.is_between() => return Ok(None),
                0 => return Err(Error::Garbled(MessageError::Io(io::ErrorKind::UnexpectedEof.into()))),
                count => answers.feed(&buffer[..count]),
            }
        }
    }

    /// Describes the end of the worker: its exit status and its last log line.
    async fn end(&mut self) -> String {
        let Some(Remains { child, pidfd: Some(pidfd), log, .. }) = &mut self.remains else {
            return "exit status unknown".into();
        };
        if reactor::deadline(END_GRACE, pidfd.readable()).await.is_err() {
            return "it closed its standard output and did not exit".into();
        }
        // Before it is reaped, while its PID still identifies the process group: its child processes are
        // killed with it.
        kill_group(child);
        let how = match child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) | Err(_) => return "exit status unknown".into(),
        };
        let log = log.take();
        self.remains = None;
        match log.map(|log| reactor::deadline(END_GRACE, log)) {
            Some(last) => match last.await {
                Ok(line) if !line.is_empty() => format!("{how}: {line}"),
                Ok(_) | Err(_) => how,
            },
            None => how,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(remains) = self.remains.take() {
            kill(remains, &self.reaper);
        }
    }
}

/// Starts a worker that has no job but a subcommand, with sockets as standard input and output. It ends by itself; `held` is
/// dropped when it has been reaped.
pub(super) fn start_on_sockets(
    program: &Path,
    reaper: &Sender<Remains>,
    (stdin, stdout): (OwnedFd, OwnedFd),
    arguments: &[&OsStr],
    held: Option<Rc<dyn Any>>,
) -> Result<(), Error> {
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir("/")
        .stdin(stdin)
        .stdout(stdout)
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| Error::Start { program: program.to_owned(), error })?;
    let stderr = child.stderr.take().and_then(|stderr| Watched::new(OwnedFd::from(stderr)).ok());
    let log = stderr.map(|stderr| reactor::spawn(pass_on_log(stderr, child.id())));
    let pidfd = open_pidfd(&child);
    if let Err(unsent) = reaper.try_send(Remains { child, pidfd, log, _held: held }) {
        kill_group(&unsent.into_inner().child);
    }
    Ok(())
}

/// Reaps all workers that it receives, until the daemon ends. Each is awaited in a separate task, because one
/// may block in the kernel (a failing disk) while others end.
pub(super) async fn reap_all(dead: Receiver<Remains>) {
    while let Ok(remains) = dead.recv().await {
        reactor::spawn(reap(remains)).detach();
    }
}

async fn reap(remains: Remains) {
    let Remains { mut child, pidfd, log, _held } = remains;
    if let Some(pidfd) = pidfd {
        let _ = pidfd.readable().await;
    }
    while let Ok(None) = child.try_wait() {
        reactor::sleep(REAP_INTERVAL).await;
    }
    if let Some(log) = log {
        // Its last log lines. A process that left the group may keep the pipe open for ever.
        let _ = reactor::deadline(END_GRACE, log).await;
    }
}

/// Kills a worker with its process group and passes it to the reaper.
fn kill(remains: Remains, reaper: &Sender<Remains>) {
    kill_group(&remains.child);
    if let Err(unsent) = reaper.try_send(remains) {
        // The daemon is shutting down and its tasks were dropped. Not awaited, because a worker that blocks
        // in the kernel does not end.
        let _ = unsent.into_inner().child.try_wait();
    }
}

/// Kills the process group of `child`, which is not reaped yet, so the number still identifies the group.
fn kill_group(child: &Child) {
    if let Some(group) = pid(child) {
        // Fails only if all processes of the group have ended.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

fn watch_pipes(child: &mut Child, socket: Option<OwnedFd>) -> io::Result<(Watched, Watched, Watched)> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let stdin = match socket {
        Some(socket) => socket,
        None => OwnedFd::from(child.stdin.take().ok_or_else(gone)?),
    };
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(gone)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(gone)?);
    Ok((Watched::new(stdin)?, Watched::new(stdout)?, Watched::new(stderr)?))
}

/// Opens a pidfd of `child`, which is not reaped yet, so the PID still identifies it; `None` if no descriptor
/// is free.
fn open_pidfd(child: &Child) -> Option<Watched> {
    Watched::new(pidfd_open(pid(child)?, PidfdFlags::empty()).ok()?).ok()
}

/// Forwards a worker's standard error to the log line by line and returns the last line. Length and number of
/// forwarded lines are limited, but the pipe is read to its end, so that a worker with too much output does
/// not block.
async fn pass_on_log(stderr: Watched, pid: u32) -> String {
    let mut lines = LogLines::default();
    let mut buffer = vec![0; 1024];
    let mut count = 0;
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        lines.feed(&buffer[..read], |line| {
            count += 1;
            if count <= LOG_LINES_MAX {
                log::info!("output of a worker"; pid = pid, line = line);
            }
        });
        // Otherwise a worker that writes without a pause would occupy the event loop.
        reactor::yield_now().await;
    }
    if count > LOG_LINES_MAX {
        log::warn!("worker logged too many lines, rest dropped"; pid = pid, lines = count, passed_on = LOG_LINES_MAX);
    }
    lines.last()
}

/// Splits bytes into lines of limited length.
#[derive(Default)]
pub struct LogLines {
    open: Vec<u8>,
    last: String,
}

impl LogLines {
    /// Calls `on_line` for each line that is complete after `bytes`, without its line end.
    pub fn feed(&mut self, bytes: &[u8], mut on_line: impl FnMut(&str)) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, is_whole) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            let room = LOG_LINE_BYTES_MAX - self.open.len();
            self.open.extend_from_slice(&text[..text.len().min(room)]);
            if is_whole {
                self.last = self.take_open();
                on_line(&self.last);
            }
        }
    }

    /// The last line, also if it has no line end.
    pub(super) fn last(mut self) -> String {
        if self.open.is_empty() { self.last } else { self.take_open() }
    }

    fn take_open(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.open)).into_owned()
    }
}
