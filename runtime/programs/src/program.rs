//! Executes one program of others. It may hang, fork, print any amount, close its pipes or ignore its input; the
//! call still ends at the deadline with an answer of limited size.
//!
//! ```text
//! caller ── spawn ──> coracle-worker program CALLER_PID PROGRAM ARGUMENT… ── exec ──> PROGRAM
//! ```
//!
//! The intermediate process executes the worker program again: it sets its parent-death signal before exec,
//! so that the program is killed if the caller ends. Setting the signal between fork and exec would require
//! unsafe code.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use coracle_sandbox::{describe_errno, describe_io};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getpid, getppid};
use rustix::process::{PidfdFlags, pidfd_open};

/// First argument of the worker program in the intermediate process.
pub const SUBCOMMAND: &str = "program";
/// Number of bytes of standard error that are kept of its start (the cause of a Go crash) and of its end (of a shell's).
const STDERR_END_BYTES_MAX: usize = 4 << 10;
/// Maximum length of a program's message in an error: it becomes part of a Kubernetes event, which is limited
/// to 1 KiB.
const MESSAGE_CHARS_MAX: usize = 1000;
/// Number of attempts, 50 ms apart, to execute a program that fails with ETXTBSY: a program that is being
/// replaced does so until its writer closes the file.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE_MS: u8 = 50;
/// Time limit for the end of a killed program; one that stays in an uninterruptible system call for
/// longer is abandoned.
pub(crate) const KILLED_WAIT: Duration = Duration::from_secs(2);
/// Exit status if the program could not be executed, as in shells.
const EXIT_NOT_EXECUTED: u8 = 126;

/// One execution of a program.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// Path of the program.
    pub program: &'a Path,
    /// Arguments of the program.
    pub arguments: &'a [&'a str],
    /// Variables that are added to the environment.
    pub variables: &'a [(&'static str, String)],
    /// Content of its standard input.
    pub input: &'a [u8],
    /// Time at which it is killed.
    pub deadline: Instant,
    /// Number of bytes of its standard output that are kept.
    pub stdout_bytes_max: usize,
    /// Whether all processes that it left in its process group are killed when it ends, and whether it may print more than is kept.
    pub is_judge: bool,
    /// The program is killed when the other end of this pipe is closed.
    pub as_long_as: Option<BorrowedFd<'a>>,
}

/// The end of an execution, and the output up to then.
#[derive(Debug)]
pub struct Ended {
    /// Reason of the end.
    pub end: End,
    /// The first bytes of standard output, at most one more than are kept.
    pub stdout: Vec<u8>,
    /// The first and the last bytes of standard error.
    pub stderr: String,
}

/// The end of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The program ended.
    Exited(ExitStatus),
    /// The program was killed at the deadline.
    Late,
    /// The program was killed because it printed more than is kept.
    TooLong,
    /// The program was killed because the answer of its caller is no longer wanted.
    Unwanted,
}

/// Makes a program's message one line of limited length.
pub fn one_line(message: &str) -> String {
    let words: String = message
        .chars()
        .map(|letter| if letter.is_control() || letter.is_whitespace() { ' ' } else { letter })
        .collect();
    let line = words.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    let length = line.chars().count();
    if length <= MESSAGE_CHARS_MAX {
        return line;
    }
    let first: String = line.chars().take(MESSAGE_CHARS_MAX / 2).collect();
    let last: String = line.chars().skip(length - MESSAGE_CHARS_MAX / 2).collect();
    format!("{first}…{last}")
}

/// Executes a program in place of this process: `arguments` are the caller's process ID, the program and its arguments.
/// Returns only on an error, which is printed to standard error.
pub fn become_program(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let caller = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let why = match (caller, arguments.next()) {
        (Some(caller), Some(program)) => execute(caller, Command::new(&program).args(arguments), &program),
        _ => format!("{SUBCOMMAND}: needs a process id and a program"),
    };
    let _ = writeln!(io::stderr(), "{why}");
    ExitCode::from(EXIT_NOT_EXECUTED)
}

/// Replaces this process by `program`; returns the error.
fn execute(caller: Pid, command: &mut Command, program: &OsString) -> String {
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        return format!("set the parent-death signal: {}", describe_errno(errno));
    }
    // The caller may have ended before the call.
    if getppid() != caller {
        return "the worker has ended".to_owned();
    }
    let mut tries = 1;
    loop {
        let error = command.exec();
        let busy = matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ETXTBSY | Errno::EBUSY));
        if !busy || tries == BUSY_TRIES {
            return format!("execute {}: {}", Path::new(program).display(), describe_io(&error));
        }
        tries += 1;
        let _ = poll(&mut [], BUSY_PAUSE_MS);
    }
}

/// Runs a program to its end or the deadline.
///
/// # Errors
/// It cannot be started, or the communication with it failed.
pub fn run(call: &Call<'_>) -> io::Result<Ended> {
    let mut talk = Talk::new(spawn(call)?, call)?;
    let end = watch_over(&mut talk, call);
    if !matches!(end, Ok(End::Exited(_))) {
        kill(&mut talk);
    }
    Ok(Ended { end: end?, stderr: talk.stderr.text(), stdout: talk.stdout.first })
}

/// Transfers bytes until the child ends, the deadline passes or the output is too long. Does not wait for
/// other processes that keep the pipes open.
fn watch_over(talk: &mut Talk<'_>, call: &Call<'_>) -> io::Result<End> {
    loop {
        let left = call.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(End::Late);
        }
        let (has_ended, is_unwanted) = talk.wait(left)?;
        if is_unwanted {
            return Ok(End::Unwanted);
        }
        if has_ended && call.is_judge {
            // Before it is reaped: its ID is not that of another group yet.
            let _ = killpg(talk.group(), Signal::SIGKILL);
        }
        talk.write()?;
        // Checked before the pipes are read, so that all output from before its end is read.
        let ended = if has_ended { talk.child.try_wait()? } else { None };
        if talk.stdout.read()? > call.stdout_bytes_max && !call.is_judge {
            return Ok(End::TooLong);
        }
        talk.stderr.read()?;
        if let Some(status) = ended {
            return Ok(End::Exited(status));
        }
    }
}

/// Kills the program's process group and reaps the program.
fn kill(talk: &mut Talk<'_>) {
    let group = talk.group();
    let _ = killpg(group, Signal::SIGKILL);
    let until = Instant::now() + KILLED_WAIT;
    while let Ok(None) = talk.child.try_wait() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let _ = writeln!(io::stderr(), "process {group} of a program does not end after SIGKILL");
            return;
        }
        let _ = poll(&mut [PollFd::new(talk.process.as_fd(), PollFlags::POLLIN)], timeout(left));
    }
}

/// Starts the intermediate process, as leader of a new process group.
fn spawn(call: &Call<'_>) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    // The program reads the name that it is started by.
    command.arg0(coracle_job::WORKER).arg(SUBCOMMAND).arg(getpid().to_string());
    command.arg(call.program).args(call.arguments);
    // Plugins must not inherit variables of an outer CNI call.
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_encoded_bytes().starts_with(b"CNI_")) {
        command.env_remove(key);
    }
    command.envs(call.variables.iter().map(|(key, value)| (key, value)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()
}

/// A running program and its three pipes.
struct Talk<'a> {
    child: Child,
    /// A pidfd of the program, readable when it has ended.
    process: OwnedFd,
    stdin: Option<ChildStdin>,
    unwritten: &'a [u8],
    stdout: Capture<ChildStdout>,
    stderr: Capture<ChildStderr>,
    as_long_as: Option<BorrowedFd<'a>>,
}

impl<'a> Talk<'a> {
    fn new(mut child: Child, call: &Call<'a>) -> io::Result<Talk<'a>> {
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        for end in [
            stdin.as_ref().map(AsFd::as_fd),
            stdout.as_ref().map(AsFd::as_fd),
            stderr.as_ref().map(AsFd::as_fd),
        ] {
            let end = end.ok_or(io::ErrorKind::BrokenPipe)?;
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let pid = rustix::process::Pid::from_child(&child);
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        // One byte above the limit distinguishes an output that is too long.
        let stdout = Capture::new(stdout, call.stdout_bytes_max + 1, 0);
        let stderr = Capture::new(stderr, STDERR_END_BYTES_MAX, STDERR_END_BYTES_MAX);
        let (unwritten, as_long_as) = (call.input, call.as_long_as);
        Ok(Talk { child, process, stdin, unwritten, stdout, stderr, as_long_as })
    }

    /// The program's process group.
    fn group(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Waits until a pipe is ready, the program has ended, or `left` has passed. Returns whether the program has ended, and whether it is
    /// no longer wanted.
    fn wait(&self, left: Duration) -> io::Result<(bool, bool)> {
        let mut fds = vec![PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        // Without a request the kernel reports only that the other end is closed.
        fds.extend(self.as_long_as.map(|pipe| PollFd::new(pipe, PollFlags::empty())));
        fds.extend(self.stdin.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)));
        fds.extend(self.stdout.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.stderr.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout(left)) {
            Ok(_) => {
                let is_set = |index: usize| fds.get(index).and_then(PollFd::any).unwrap_or_default();
                Ok((is_set(0), self.as_long_as.is_some() && is_set(1)))
            }
            Err(Errno::EINTR) => Ok((false, false)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes what the pipe accepts; closes it after the last byte, or if the program closed its end.
    fn write(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.stdin else { return Ok(()) };
        while !self.unwritten.is_empty() {
            match pipe.write(self.unwritten) {
                Ok(written) => self.unwritten = &self.unwritten[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                Err(error) => return Err(error),
            }
        }
        self.stdin = None;
        Ok(())
    }
}

/// The read end of a pipe, `None` after end of file, and the first and last bytes that were read.
struct Capture<P> {
    pipe: Option<P>,
    first: Vec<u8>,
    first_max: usize,
    /// The last bytes of the output after `first`.
    last: Vec<u8>,
    last_max: usize,
}

/// Maximum number of bytes per read: the default capacity of a pipe. The deadline is checked between reads,
/// also if a program prints endlessly.
const READ_BYTES_MAX: usize = 64 << 10;

impl<P: Read> Capture<P> {
    fn new(pipe: Option<P>, first_max: usize, last_max: usize) -> Capture<P> {
        Capture { pipe, first: Vec::new(), first_max, last: Vec::new(), last_max }
    }

    /// Reads available bytes; returns the number of first bytes that are kept.
    fn read(&mut self) -> io::Result<usize> {
        let mut buffer = [0; 4096];
        let mut total = 0;
        while let Some(pipe) = &mut self.pipe
            && total < READ_BYTES_MAX
        {
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(read) => {
                    self.take(&buffer[..read]);
                    total += read;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.first.len())
    }

    fn take(&mut self, more: &[u8]) {
        let room = self.first_max - self.first.len();
        let (first, rest) = more.split_at(room.min(more.len()));
        self.first.extend_from_slice(first);
        self.last.extend_from_slice(rest);
        let excess = self.last.len().saturating_sub(self.last_max);
        self.last.drain(..excess);
    }

    /// The kept bytes as text.
    fn text(&self) -> String {
        let [first, last] = [&self.first, &self.last].map(|bytes| String::from_utf8_lossy(bytes));
        format!("{first}{last}")
    }
}

fn timeout(left: Duration) -> PollTimeout {
    // Rounded up: otherwise a wait of less than 1 ms would spin.
    PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Capture, MESSAGE_CHARS_MAX, one_line};

    #[test]
    fn messages_become_one_line_of_limited_length() {
        let text = one_line(&format!("cause {} end", "ä".repeat(MESSAGE_CHARS_MAX)));
        assert_eq!(text.chars().count(), MESSAGE_CHARS_MAX + 1);
        assert!(text.starts_with("cause ä") && text.contains("ä…ä") && text.ends_with("ä end"), "{text}");
    }

    #[test]
    fn the_first_and_the_last_bytes_of_the_output_are_kept() {
        let text = "runtime/cgo: pthread_create failed\n".to_owned() + &"x".repeat(100_000) + "\nexit 2";
        let mut capture = Capture::new(Some(text.as_bytes()), 10, 7);
        while capture.pipe.is_some() {
            capture.read().unwrap();
        }
        assert_eq!(capture.text(), "runtime/cg\nexit 2");
        let mut short = Capture::new(Some(&b"all of it"[..]), 4, 7);
        short.read().unwrap();
        assert_eq!(short.text(), "all of it");
    }
}
