//! One worker's process: its pipes, its end. Owns the child from the line that makes it; [`Drop`] kills the process
//! group and hands the rest to [`reap_all`], so that neither a cancelled future nor an error leaves anything behind.

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
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use smol::channel::{Receiver, Sender};

use super::Error;
use super::answers::Answers;
use crate::log;
use crate::reactor::{self, Task, Watched};

/// Bytes of one read from a worker.
const READ_BYTES: usize = 16 << 10;

/// Longest part of one line of its log that we pass on.
const LOG_LINE_BYTES_MAX: usize = 1024;

/// Lines of its log that we pass on: enough for every file of a noisy import, not for an endless one.
const LOG_LINES_MAX: u32 = 1000;

/// What a worker that closed its stdout gets to end before it is killed, and its log to be read to the end.
const END_GRACE: Duration = Duration::from_secs(1);

/// How long the reaper waits between two looks at a child without a pidfd.
const REAP_INTERVAL: Duration = Duration::from_millis(20);

/// A worker that nobody talks to any more, for [`reap_all`].
pub(super) struct Remains {
    child: Child,
    /// None where the kernel had no descriptor left for it.
    pidfd: Option<Watched>,
    log: Option<Task<String>>,
    /// Dropped with it: tells who started a worker that may hang in the kernel that it is gone.
    _held: Option<Rc<dyn Any>>,
}

/// A running worker.
pub(super) struct Process {
    /// None once it is reaped.
    remains: Option<Remains>,
    stdin: Option<Watched>,
    /// Its stdin is a socket, over which it sends a descriptor before its answer.
    sends_file: bool,
    stdout: Watched,
    reaper: Sender<Remains>,
}

impl Process {
    /// Starts `program` with three pipes, in a process group of its own. It waits for its job.
    pub(super) fn start(program: &Path, reaper: Sender<Remains>) -> Result<Process, Error> {
        Process::start_with(program, reaper, Stdio::piped(), None, None)
    }

    /// The same with a socket for stdin.
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

    /// Hands over the job, then reads answers until the last one.
    pub(super) async fn converse(
        &mut self,
        job: &Job,
        silence_max: Duration,
        mut on_progress: impl FnMut(Progress),
    ) -> Result<Outcome, Error> {
        let mut answers = Answers::default();
        let silent = |_| Error::Silent(silence_max);
        reactor::deadline(silence_max, self.hand_over(job)).await.map_err(silent)??;
        loop {
            let answer = reactor::deadline(silence_max, self.next_answer(&mut answers)).await;
            match answer.map_err(silent)?? {
                Some(Answer::Progress(progress)) => on_progress(progress),
                Some(Answer::Done(outcome)) => return Ok(outcome),
                Some(Answer::Failed(failure)) => return Err(Error::Failed(failure)),
                None => return Err(Error::Ended(self.end().await)),
            }
        }
    }

    /// Writes the job and closes stdin. A worker that is gone already is no error here: its end says more.
    async fn hand_over(&mut self, job: &Job) -> Result<(), Error> {
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

    /// The descriptor that came before the answer, if one did.
    pub(super) fn take_file(&mut self) -> Option<OwnedFd> {
        let socket = self.stdin.take()?;
        coracle_sandbox::hostpath::receive_file(socket.fd()).ok()
    }

    /// `None`: the stream ended between two answers.
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

    /// How it ended, and the last line it logged.
    async fn end(&mut self) -> String {
        let Some(Remains { child, pidfd: Some(pidfd), log, .. }) = &mut self.remains else {
            return "how is not known".into();
        };
        if reactor::deadline(END_GRACE, pidfd.readable()).await.is_err() {
            return "it closed its standard output and did not exit".into();
        }
        // Before it is reaped, while its pid names the group: what it started ends with it.
        kill_group(child);
        let how = match child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) | Err(_) => return "how is not known".into(),
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

/// Starts a worker that ends TLS between two sockets: its stdin is the client's, its stdout ours. It ends with either.
pub(super) fn start_tls(
    program: &Path,
    reaper: &Sender<Remains>,
    (client, plain): (OwnedFd, OwnedFd),
    (certificate, key): (&Path, &Path),
) -> Result<(), Error> {
    let mut child = Command::new(program)
        .args([OsStr::new("tls"), certificate.as_os_str(), key.as_os_str()])
        .current_dir("/")
        .stdin(client)
        .stdout(plain)
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| Error::Start { program: program.to_owned(), error })?;
    let stderr = child.stderr.take().and_then(|stderr| Watched::new(OwnedFd::from(stderr)).ok());
    let log = stderr.map(|stderr| reactor::spawn(pass_on_log(stderr, child.id())));
    let pidfd = open_pidfd(&child);
    if let Err(unsent) = reaper.try_send(Remains { child, pidfd, log, _held: None }) {
        kill_group(&unsent.into_inner().child);
    }
    Ok(())
}

/// Reaps every worker it is sent; runs as long as the daemon. Each waits in a task of its own, since one may hang in the
/// kernel (a dying disk) while others end.
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
        // Its last lines; a process that left the group may hold the pipe for ever.
        let _ = reactor::deadline(END_GRACE, log).await;
    }
}

/// Kills a worker with its group and sees to it that it is reaped.
fn kill(remains: Remains, reaper: &Sender<Remains>) {
    kill_group(&remains.child);
    if let Err(unsent) = reaper.try_send(remains) {
        // The daemon is ending and its tasks are gone. Not waited for: one that hangs in the kernel does not end.
        let _ = unsent.into_inner().child.try_wait();
    }
}

/// `child` is not reaped, so the number means its group and no other.
fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It fails only where all are gone.
        let _ = kill_process_group(group, Signal::KILL);
    }
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

/// The child is ours and not reaped, so its pid still means it.
fn open_pidfd(child: &Child) -> Option<Watched> {
    let pid = Pid::from_raw(i32::try_from(child.id()).ok()?)?;
    Watched::new(pidfd_open(pid, PidfdFlags::empty()).ok()?).ok()
}

/// Passes a worker's stderr on to the log, line by line; gives the last one. Lines and their number are bounded; the
/// pipe is read to its end all the same, so that a noisy worker is not held up.
async fn pass_on_log(stderr: Watched, pid: u32) -> String {
    let mut lines = LogLines::default();
    let mut buffer = vec![0; 1024];
    let mut count = 0;
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        lines.feed(&buffer[..read], |line| {
            count += 1;
            if count <= LOG_LINES_MAX {
                log::info!("worker"; pid = pid, line = line);
            }
        });
    }
    if count > LOG_LINES_MAX {
        log::warn!("worker logged too much"; pid = pid, lines = count, passed_on = LOG_LINES_MAX);
    }
    lines.last()
}

/// Cuts bytes into lines of bounded length.
#[derive(Default)]
pub struct LogLines {
    open: Vec<u8>,
    last: String,
}

impl LogLines {
    /// Calls `on_line` for each line that ends in `bytes`, without its end.
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

    /// The last line, ended or not.
    pub(super) fn last(mut self) -> String {
        if self.open.is_empty() { self.last } else { self.take_open() }
    }

    fn take_open(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.open)).into_owned()
    }
}
