//! One plugin process from start to end: it may hang, fork, print megabytes, close its pipes or ignore its input, and
//! still this ends by the deadline with an answer of bounded size.
//!
//! ```text
//!     worker ── spawn ──> coracle-worker cni-plugin WORKER_PID PROGRAM ── exec ──> PROGRAM
//! ```
//!
//! The step in between is this same program: between fork and exec it asks the kernel to be killed when the worker dies,
//! which cannot be done from outside without unsafe code.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid, getppid};
use serde::Deserialize;

/// First argument of this program when it is to become a plugin.
pub(crate) const PLUGIN_SUBCOMMAND: &str = "cni-plugin";
/// Longest result that is read: one with 10 000 routes fits.
const STDOUT_BYTES_MAX: usize = 1 << 20;
/// What is kept of stderr, from its end: the last words say why.
const STDERR_BYTES_MAX: usize = 4 << 10;
/// Longest message of a plugin in an error: it becomes a line of a Kubernetes event, whose own limit is 1 KiB.
const MESSAGE_CHARS_MAX: usize = 1000;
/// A program that is being replaced answers ETXTBSY until its writer closes it: waited for 10 times 50 ms.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE_MS: u8 = 50;
/// How long a killed plugin may take to die; one that sleeps in the kernel for longer is left behind.
const KILLED_WAIT: Duration = Duration::from_secs(2);
/// Exit status of a plugin that could not be executed, as shells have it.
const EXIT_NOT_EXECUTED: u8 = 126;

/// Error code "I/O failure" (CNI spec 1.1.0, "Error").
const CODE_IO: u64 = 5;

/// What a plugin is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Del,
    Status,
}

impl Verb {
    /// Its name in errors; in capitals, the value of `CNI_COMMAND`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Verb::Add => "add",
            Verb::Del => "del",
            Verb::Status => "status",
        }
    }
}

/// Why a plugin gave no answer, or no good one.
#[derive(Debug)]
pub(super) enum PluginError {
    /// There is no such program.
    Absent {
        /// The directories, for people.
        looked_in: String,
    },
    /// It said no. `code` as in the CNI specification; 0: it gave none.
    Said { code: u64, message: String },
    /// It did not end in time and was killed.
    Late { limit_ms: u128 },
    /// We could not run it.
    Broken(String),
}

impl PluginError {
    /// What a plugin said, made one line of bounded length.
    pub(super) fn said(code: u64, message: String) -> PluginError {
        let words: String = message
            .chars()
            .map(|letter| if letter.is_control() || letter.is_whitespace() { ' ' } else { letter })
            .collect();
        let mut line = words.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = line.char_indices().nth(MESSAGE_CHARS_MAX) {
            line.truncate(end);
            line.push('…');
        }
        PluginError::Said { code, message: line }
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { looked_in } => write!(out, "no such program in {looked_in}"),
            Self::Said { message, .. } => out.write_str(message),
            Self::Late { limit_ms } => write!(out, "did not end within {limit_ms} ms and was killed"),
            Self::Broken(why) => out.write_str(why),
        }
    }
}

/// Turns this process into a plugin: `arguments` are the worker's process id and the program. Returns only when that
/// did not work, with the reason on stdout in the form that plugins have.
pub(crate) fn become_plugin(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let worker = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let why = match (worker, arguments.next()) {
        (Some(worker), Some(program)) => execute(worker, &program),
        _ => format!("{PLUGIN_SUBCOMMAND}: needs a process id and a program"),
    };
    let _ = writeln!(io::stdout(), "{}", serde_json::json!({ "code": CODE_IO, "msg": why }));
    ExitCode::from(EXIT_NOT_EXECUTED)
}

/// Replaces this process with `program`; why it could not.
fn execute(worker: Pid, program: &OsString) -> String {
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        return format!("ask to die with the worker: {errno}");
    }
    // It may have died before we asked.
    if getppid() != worker {
        return "the worker is gone".to_owned();
    }
    // The worker blocks SIGCHLD, and std lets children inherit that.
    if let Err(errno) = SigSet::empty().thread_set_mask() {
        return format!("unblock signals: {errno}");
    }
    let mut tries = 1;
    loop {
        let error = Command::new(program).exec();
        let busy = matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ETXTBSY | Errno::EBUSY));
        if !busy || tries == BUSY_TRIES {
            return format!("execute {}: {error}", Path::new(program).display());
        }
        tries += 1;
        let _ = poll(&mut [], BUSY_PAUSE_MS);
    }
}

/// Tells when a child of this process ended: SIGCHLD, read from a descriptor.
pub(super) struct Children(SignalFd);

impl Children {
    /// Blocks SIGCHLD for this thread, the only one.
    pub(super) fn watch() -> io::Result<Children> {
        let signals = SigSet::from(Signal::SIGCHLD);
        signals.thread_block()?;
        Ok(Children(SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// Runs `program` with `variables` added to our environment and `input` on stdin; what it printed, if it exits with
    /// 0 before `deadline`.
    pub(super) fn call(
        &self,
        program: &Path,
        variables: &[(&'static str, String)],
        input: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, PluginError> {
        let began = Instant::now();
        let mut talk = spawn(program, variables)
            .and_then(|child| Talk::new(child, input))
            .map_err(|error| PluginError::Broken(format!("start {}: {error}", program.display())))?;
        let end = self.watch_over(&mut talk, deadline);
        if !matches!(end, Ok(End::Exited(_))) {
            self.kill(&mut talk.child);
        }
        let last_words = String::from_utf8_lossy(&talk.stderr.bytes).into_owned();
        let status = match end {
            Ok(End::Exited(status)) => status,
            Ok(End::Late) => {
                return Err(PluginError::Late { limit_ms: deadline.duration_since(began).as_millis() });
            }
            Ok(End::TooLong) => {
                return Err(PluginError::said(0, format!("printed more than {STDOUT_BYTES_MAX} bytes")));
            }
            Err(error) => return Err(PluginError::Broken(format!("talk to {}: {error}", program.display()))),
        };
        if !status.success() {
            return Err(explain(status, &talk.stdout.bytes, &last_words));
        }
        if !last_words.trim().is_empty() {
            super::note(&format!("{}: {}", program.display(), PluginError::said(0, last_words)));
        }
        Ok(talk.stdout.bytes)
    }

    /// Moves bytes until the child ends, the deadline passes or it prints too much. A process that outlives the plugin
    /// and holds its pipes is not waited for.
    fn watch_over(&self, talk: &mut Talk<'_>, deadline: Instant) -> io::Result<End> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(End::Late);
            }
            talk.wait(self.0.as_fd(), left)?;
            talk.write()?;
            while self.0.read_signal()?.is_some() {}
            // Asked before the pipes are read, so that what was printed before the end is in them.
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

    /// Kills the plugin with everything in its process group, and reaps it.
    fn kill(&self, child: &mut Child) {
        let group = Pid::from_raw(child.id().cast_signed());
        let _ = killpg(group, Signal::SIGKILL);
        let until = Instant::now() + KILLED_WAIT;
        while let Ok(None) = child.try_wait() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                super::note(&format!("plugin process {group} does not die of SIGKILL"));
                return;
            }
            let _ = poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout(left));
            while let Ok(Some(_)) = self.0.read_signal() {}
        }
    }
}

/// How watching a plugin ended.
enum End {
    Exited(ExitStatus),
    Late,
    TooLong,
}

/// Starts this program again to become `program`, as leader of its own process group.
fn spawn(program: &Path, variables: &[(&'static str, String)]) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(PLUGIN_SUBCOMMAND).arg(getpid().to_string()).arg(program);
    // Nothing of a CNI call around us, should there be one, may reach the plugin.
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_encoded_bytes().starts_with(b"CNI_")) {
        command.env_remove(key);
    }
    command.envs(variables.iter().map(|(key, value)| (key, value)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()
}

/// A started plugin and the three pipes to it.
struct Talk<'a> {
    child: Child,
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
        // One byte past the limit tells "too long" from "just as long".
        let stdout = Capture { pipe: stdout, bytes: Vec::new(), keep: Keep::Front(STDOUT_BYTES_MAX + 1) };
        let stderr = Capture { pipe: stderr, bytes: Vec::new(), keep: Keep::Back(STDERR_BYTES_MAX) };
        Ok(Talk { child, stdin, unwritten: input, stdout, stderr })
    }

    /// Sleeps until a pipe or `signals` has something, or `left` is over.
    fn wait(&self, signals: BorrowedFd<'_>, left: Duration) -> io::Result<()> {
        let mut fds = vec![PollFd::new(signals, PollFlags::POLLIN)];
        fds.extend(self.stdin.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)));
        fds.extend(self.stdout.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.stderr.pipe.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout(left)) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes what the pipe takes; closes it after the last byte, or when the plugin does not want them.
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

/// Which part of a stream that is too long is kept.
#[derive(Clone, Copy)]
enum Keep {
    /// The first bytes.
    Front(usize),
    /// The last bytes.
    Back(usize),
}

/// Our end of a pipe (`None`: at its end) and what came out of it.
struct Capture<P> {
    pipe: Option<P>,
    bytes: Vec<u8>,
    keep: Keep,
}

/// What one turn reads of a pipe at most: its default capacity, so that a plugin that prints without end does not keep us
/// from looking at the clock.
const READ_BYTES_MAX: usize = 64 << 10;

impl<P: Read> Capture<P> {
    /// Reads what is there; how many bytes are kept now.
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
        Ok(self.bytes.len())
    }

    fn take(&mut self, more: &[u8]) {
        match self.keep {
            Keep::Front(max) => {
                let room = max.saturating_sub(self.bytes.len());
                self.bytes.extend_from_slice(&more[..more.len().min(room)]);
            }
            Keep::Back(max) => {
                self.bytes.extend_from_slice(more);
                let excess = self.bytes.len().saturating_sub(max);
                self.bytes.drain(..excess);
            }
        }
    }
}

fn timeout(left: Duration) -> PollTimeout {
    // Rounded up: a wait of less than 1 ms would otherwise spin.
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

/// Why a plugin that did not exit with 0 says it failed: its error object, else its stderr, else how it ended.
fn explain(status: ExitStatus, stdout: &[u8], last_words: &str) -> PluginError {
    // By way of a map: serde would take an array for the object's fields in order.
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
    use super::{MESSAGE_CHARS_MAX, PluginError, explain};
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn a_plugin_says_why_in_many_ways() {
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
            let PluginError::Said { code, message } = explain(ExitStatus::from_raw(1 << 8), stdout, stderr)
            else {
                panic!("{stdout:?}")
            };
            assert_eq!((code, message.as_str()), (expected_code, expected), "{stdout:?} {stderr:?}");
        }
    }

    #[test]
    fn a_message_is_one_line_of_bounded_length() {
        let text = PluginError::said(0, "ä".repeat(MESSAGE_CHARS_MAX + 1)).to_string();
        assert_eq!(text.chars().count(), MESSAGE_CHARS_MAX + 1);
        assert!(text.ends_with('…'));
    }
}
