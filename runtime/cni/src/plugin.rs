//! Executes one plugin. The plugin may hang, fork, print any amount, close its pipes or ignore its input; the
//! call still ends at the deadline with an answer of limited size.
//!
//! ```text
//! worker ── spawn ──> coracle-worker cni-plugin WORKER_PID PROGRAM ── exec ──> PROGRAM
//! ```
//!
//! The intermediate process executes the worker program again: it sets its parent-death signal before exec,
//! so that the plugin is killed if the worker ends. Setting the signal between fork and exec would require
//! unsafe code.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
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
use serde::Deserialize;

/// First argument of the worker program in the intermediate process.
pub const PLUGIN_SUBCOMMAND: &str = "cni-plugin";
/// Maximum length of a result in bytes: sufficient for 10 000 routes.
const STDOUT_BYTES_MAX: usize = 1 << 20;
/// Number of bytes of standard error that are kept of its start (the cause of a Go crash) and of its end (of a shell's).
const STDERR_END_BYTES_MAX: usize = 4 << 10;
/// Maximum length of a plugin's message in an error: it becomes part of a Kubernetes event, which is limited
/// to 1 KiB.
const MESSAGE_CHARS_MAX: usize = 1000;
/// Number of attempts, 50 ms apart, to execute a program that fails with ETXTBSY: a program that is being
/// replaced does so until its writer closes the file.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE_MS: u8 = 50;
/// Time limit for the end of a killed plugin; a plugin that stays in an uninterruptible system call for
/// longer is abandoned.
const KILLED_WAIT: Duration = Duration::from_secs(2);
/// Exit status if the program could not be executed, as in shells.
const EXIT_NOT_EXECUTED: u8 = 126;

/// Error code "I/O failure" (CNI spec 1.1.0, "Error").
const CODE_IO: u64 = 5;

/// The CNI command that a plugin receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Del,
    Status,
}

impl Verb {
    /// Name of the command in errors, in lower case; in upper case it is the value of `CNI_COMMAND`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Verb::Add => "add",
            Verb::Del => "del",
            Verb::Status => "status",
        }
    }
}

/// The reason why a plugin returned no valid result.
#[derive(Debug)]
pub(super) enum PluginError {
    /// The program does not exist.
    Absent {
        /// The directories in which the program was searched.
        looked_in: String,
    },
    /// The plugin failed with a message. `code` is the code of the CNI specification; 0: none.
    ChildMessage { code: u64, message: String },
    /// The plugin was killed at the deadline of `limit_ms` milliseconds.
    Late { limit_ms: u128 },
    /// The plugin could not be executed, or violated the protocol; with a description.
    Broken(String),
}

impl PluginError {
    /// Creates the error from a plugin's message, which is converted into one line of limited length.
    pub(super) fn said(code: u64, message: String) -> PluginError {
        let words: String = message
            .chars()
            .map(|letter| if letter.is_control() || letter.is_whitespace() { ' ' } else { letter })
            .collect();
        let mut line = words.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        let length = line.chars().count();
        if length > MESSAGE_CHARS_MAX {
            let first: String = line.chars().take(MESSAGE_CHARS_MAX / 2).collect();
            let last: String = line.chars().skip(length - MESSAGE_CHARS_MAX / 2).collect();
            line = format!("{first}…{last}");
        }
        PluginError::ChildMessage { code, message: line }
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { looked_in } => write!(out, "no such program in {looked_in}"),
            Self::ChildMessage { message, .. } => out.write_str(message),
            Self::Late { limit_ms } => write!(out, "did not end within {limit_ms} ms and was killed"),
            Self::Broken(why) => out.write_str(why),
        }
    }
}

/// Executes a plugin in place of this process: `arguments` are the worker's process ID and the program.
/// Returns only on an error, which is printed to standard output in the format of plugins.
pub fn become_plugin(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let worker = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let why = match (worker, arguments.next()) {
        (Some(worker), Some(program)) => execute(worker, &program),
        _ => format!("{PLUGIN_SUBCOMMAND}: needs a process id and a program"),
    };
    let _ = writeln!(io::stdout(), "{}", serde_json::json!({ "code": CODE_IO, "msg": why }));
    ExitCode::from(EXIT_NOT_EXECUTED)
}

/// Replaces this process by `program`; returns the error.
fn execute(worker: Pid, program: &OsString) -> String {
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        return format!("set the parent-death signal: {}", describe_errno(errno));
    }
    // The worker may have ended before the call.
    if getppid() != worker {
        return "the worker has ended".to_owned();
    }
    let mut tries = 1;
    loop {
        let error = Command::new(program).exec();
        let busy = matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ETXTBSY | Errno::EBUSY));
        if !busy || tries == BUSY_TRIES {
            return format!("execute {}: {}", Path::new(program).display(), describe_io(&error));
        }
        tries += 1;
        let _ = poll(&mut [], BUSY_PAUSE_MS);
    }
}

/// Runs `program` with `variables` added to the environment and `input` on standard input; returns its
/// standard output if it exits with 0 before `deadline`.
pub(super) fn call(
    program: &Path,
    variables: &[(&'static str, String)],
    input: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, PluginError> {
    let began = Instant::now();
    let mut talk = spawn(program, variables).and_then(|child| Talk::new(child, input)).map_err(|error| {
        PluginError::Broken(format!("start {}: {}", program.display(), describe_io(&error)))
    })?;
    let end = watch_over(&mut talk, deadline);
    if !matches!(end, Ok(End::Exited(_))) {
        kill(&mut talk);
    }
    let last_words = talk.stderr.text();
    let status = match end {
        Ok(End::Exited(status)) => status,
        Ok(End::Late) => {
            return Err(PluginError::Late { limit_ms: deadline.duration_since(began).as_millis() });
        }
        Ok(End::TooLong) => {
            return Err(PluginError::said(0, format!("printed more than {STDOUT_BYTES_MAX} bytes")));
        }
        Err(error) => {
            return Err(PluginError::Broken(format!(
                "communicate with {}: {}",
                program.display(),
                describe_io(&error)
            )));
        }
    };
    if !status.success() {
        return Err(explain(status, &talk.stdout.first, &last_words));
    }
    if !last_words.trim().is_empty() {
        super::note(&format!("{}: {}", program.display(), PluginError::said(0, last_words)));
    }
    Ok(talk.stdout.first)
}

/// Transfers bytes until the child ends, the deadline passes or the output is too long. Does not wait for
/// other processes that keep the pipes open.
fn watch_over(talk: &mut Talk<'_>, deadline: Instant) -> io::Result<End> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(End::Late);
        }
        talk.wait(left)?;
        talk.write()?;
        // Checked before the pipes are read, so that all output from before its end is read.
        let ended = talk.child.try_wait()?;
        if talk.stdout.read()? > STDOUT_BYTES_MAX {
            return Ok(End::TooLong);
        }
        talk.stderr.read()?;
        if let Some(status) = ended {
            return Ok(End::Exited(status));
        }
    }
}

/// Kills the plugin's process group and reaps the plugin.
fn kill(talk: &mut Talk<'_>) {
    let group = Pid::from_raw(talk.child.id().cast_signed());
    let _ = killpg(group, Signal::SIGKILL);
    let until = Instant::now() + KILLED_WAIT;
    while let Ok(None) = talk.child.try_wait() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            super::note(&format!("plugin process {group} does not end after SIGKILL"));
            return;
        }
        let _ = poll(&mut [PollFd::new(talk.process.as_fd(), PollFlags::POLLIN)], timeout(left));
    }
}

/// The end of the execution.
enum End {
    Exited(ExitStatus),
    Late,
    TooLong,
}

/// Starts the intermediate process, as leader of a new process group, to execute `program`.
fn spawn(program: &Path, variables: &[(&'static str, String)]) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    // The program reads the name that it is started by.
    command.arg0(coracle_job::WORKER).arg(PLUGIN_SUBCOMMAND).arg(getpid().to_string()).arg(program);
    // Plugins must not inherit variables of an outer CNI call.
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_encoded_bytes().starts_with(b"CNI_")) {
        command.env_remove(key);
    }
    command.envs(variables.iter().map(|(key, value)| (key, value)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()
}

/// A running plugin and its three pipes.
struct Talk<'a> {
    child: Child,
    /// A pidfd of the plugin, readable when it has ended.
    process: OwnedFd,
    stdin: Option<ChildStdin>,
    unwritten: &'a [u8],
    stdout: Capture<ChildStdout>,
    stderr: Capture<ChildStderr>,
}

impl<'a> Talk<'a> {
    fn new(mut child: Child, input: &'a [u8]) -> io::Result<Talk<'a>> {
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
        let stdout = Capture::new(stdout, STDOUT_BYTES_MAX + 1, 0);
        let stderr = Capture::new(stderr, STDERR_END_BYTES_MAX, STDERR_END_BYTES_MAX);
        Ok(Talk { child, process, stdin, unwritten: input, stdout, stderr })
    }

    /// Waits until a pipe is ready, the plugin has ended, or `left` has passed.
    fn wait(&self, left: Duration) -> io::Result<()> {
        let mut fds = vec![PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.stdin.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)));
        fds.extend(self.stdout.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.stderr.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout(left)) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes what the pipe accepts; closes it after the last byte, or if the plugin closed its end.
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
/// also if a plugin prints endlessly.
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

/// The error object of a plugin (CNI spec 1.1.0, "Error").
#[derive(Deserialize)]
struct ErrorObject {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// The error of a plugin with a non-zero exit status: its error object, otherwise its standard error,
/// otherwise its exit status.
fn explain(status: ExitStatus, stdout: &[u8], last_words: &str) -> PluginError {
    // Parsed as a map first, because serde would also accept an array with the fields in order.
    let map = serde_json::from_slice::<serde_json::Map<_, _>>(stdout).ok();
    let object = map.and_then(|map| serde_json::from_value::<ErrorObject>(map.into()).ok());
    let (code, message) = match object {
        Some(ErrorObject { code, msg, details }) if msg.is_empty() || details.is_empty() => {
            (code, msg + &details)
        }
        Some(ErrorObject { code, msg, details }) => (code, format!("{msg}; {details}")),
        None => (0, String::new()),
    };
    if !message.trim().is_empty() {
        return PluginError::said(code, message);
    }
    if !last_words.trim().is_empty() {
        return PluginError::said(code, last_words.to_owned());
    }
    PluginError::said(code, format!("ended with {status} and no message"))
}

#[cfg(test)]
mod tests {
    use super::{Capture, MESSAGE_CHARS_MAX, PluginError, explain};
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn the_error_is_taken_from_stdout_stderr_or_the_exit_status() {
        let cases: [(&[u8], &str, u64, &str); 7] = [
            (br#"{"cniVersion":"1.0.0","code":7,"msg":"bad conf"}"#, "noise", 7, "bad conf"),
            (br#"{"code":100,"msg":"a","details":"b"}"#, "", 100, "a; b"),
            (br#"{"code":11,"msg":"two\nlines\u0000"}"#, "", 11, "two lines"),
            (br#"{"code":11}"#, "from stderr\n", 11, "from stderr"),
            (b"panic: x", "goroutine 1\n\trunning", 0, "goroutine 1 running"),
            (b"", "", 0, "ended with exit status: 1 and no message"),
            (b"[3]", "", 0, "ended with exit status: 1 and no message"),
        ];
        for (stdout, stderr, expected_code, expected) in cases {
            let PluginError::ChildMessage { code, message } =
                explain(ExitStatus::from_raw(1 << 8), stdout, stderr)
            else {
                panic!("{stdout:?}")
            };
            assert_eq!((code, message.as_str()), (expected_code, expected), "{stdout:?} {stderr:?}");
        }
    }

    #[test]
    fn messages_become_one_line_of_limited_length() {
        let text = format!("cause {} end", "ä".repeat(MESSAGE_CHARS_MAX));
        let text = PluginError::said(0, text).to_string();
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
