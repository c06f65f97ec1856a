//! `coracle exec`: runs a command in a container. The daemon starts the command and passes the ends of its
//! streams to the client, so that data is not transferred by the daemon; afterwards the daemon only sends the
//! exit code.
//!
//! ```text
//!   stdin ──> pipe or terminal ──> command ──> pipes or terminal ──> stdout, stderr
//!   daemon: Started and the descriptors, later Exited
//! ```
//! If the client ends, the command continues, like with `kubectl exec`; a terminal is hung up.

mod terminal;

use std::io::{self, IsTerminal as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

use coracle_base::collect;
use coracle_control::{ANSWER_BYTES_MAX, Answer, Request, socket};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::ask::send;
use crate::list::all_containers;
use crate::{EXIT_USAGE, Typed, complain, find};
use terminal::Terminal;

/// Maximum number of bytes of one read.
const READ_BYTES: usize = 32 << 10;

/// Maximum number of reads after the exit: sufficient for the content of a pipe.
const LAST_READS: u32 = 64;

/// Character that ends the input of a terminal: Ctrl-D.
const END_OF_INPUT: u8 = 4;

/// Executes the command; the exit code is that of the command in the container. Exit code 1: the command was
/// not run, or its exit code is unknown; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let Some((wanted, words)) = command.arguments.split_first().filter(|(_, words)| !words.is_empty()) else {
        complain(["exec: a container and a command are expected; `coracle exec --help` says more"]);
        return ExitCode::from(EXIT_USAGE);
    };
    let is_set = |flag: &str| command.flags.contains(&flag);
    let (is_interactive, tty) = (is_set("--interactive"), is_set("--tty"));
    let done = all_containers(state).and_then(|mut containers| {
        // Only what runs can be meant, unless nothing else is called so.
        collect::sort_by_key(&mut containers, |container| container.state != "running");
        let running: Vec<_> = containers.iter().filter(|one| one.state == "running").cloned().collect();
        let found = find::container(wanted, &running).or_else(|_| find::container(wanted, &containers));
        let found = found.map_err(io::Error::other)?;
        let request = Request::Exec {
            container: found.id.clone(),
            command: words.to_vec(),
            stdin: is_interactive,
            tty,
        };
        let (streams, control) = start(state, &request, is_interactive, tty)?;
        streams.pump(control)
    });
    match done {
        // The CRI's codes are 0 to 255.
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(error) => complain([format!("exec: {}", error_text(state, &error))]),
    }
}

/// The text of an error; for connection errors it contains the path of the daemon's socket.
fn error_text(state: &Path, error: &io::Error) -> String {
    match error.get_ref() {
        Some(text) => text.to_string(),
        None => crate::ask::unanswered(&socket(state), error),
    }
}

/// The connection to the daemon while streams are copied.
struct Control {
    stream: UnixStream,
    /// Received bytes that are not a complete line yet.
    text: Vec<u8>,
}

impl Control {
    /// Reads once from the connection, and may block; received descriptors are appended to `descriptors`.
    /// `None`: the daemon has closed the connection.
    fn read(&mut self, descriptors: &mut Vec<OwnedFd>) -> io::Result<Option<()>> {
        let mut buffer = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [io::IoSliceMut::new(&mut buffer)];
        let count = loop {
            match recvmsg(&self.stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received.bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        self.text.extend_from_slice(&buffer[..count]);
        match self.text.len() <= ANSWER_BYTES_MAX {
            true => Ok((count > 0).then_some(())),
            false => Err(io::Error::other("the daemon's answer is too long")),
        }
    }

    /// The next complete answer among the received bytes; `None` if there is none.
    fn answer(&mut self) -> io::Result<Option<Answer>> {
        let Some(end) = self.text.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        let answer = serde_json::from_slice(&self.text[..end])?;
        self.text.drain(..=end);
        match answer {
            Answer::Failed { message } => Err(io::Error::other(message)),
            answer => Ok(Some(answer)),
        }
    }
}

/// Sends the request to the daemon, and waits until the command is running.
fn start(state: &Path, request: &Request, stdin: bool, tty: bool) -> io::Result<(Streams, Control)> {
    let mut stream = UnixStream::connect(socket(state))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    send(&mut stream, &line)?;
    let mut control = Control { stream, text: Vec::new() };
    let mut descriptors = Vec::new();
    loop {
        if let Some(answer) = control.answer()? {
            match answer {
                Answer::Started {} => break,
                _ => return Err(io::Error::other("an answer of the daemon is not understood")),
            }
        }
        control
            .read(&mut descriptors)?
            .ok_or_else(|| io::Error::other("the daemon ended before the command ran"))?;
    }
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or_else(|| io::Error::other("the daemon has sent no streams"));
    let mut streams = Streams::default();
    if tty {
        let master = next()?;
        streams.input = if stdin { Some(master.try_clone()?) } else { None };
        streams.terminal = Some(Terminal::take(master.try_clone()?, stdin)?);
        streams.output = Some(master);
    } else {
        streams.input = if stdin { Some(next()?) } else { None };
        streams.output = Some(next()?);
        streams.error = Some(next()?);
    }
    Ok((streams, control))
}

/// The client's ends of the command's streams, non-blocking; `None` for a closed stream.
#[derive(Default)]
struct Streams {
    input: Option<OwnedFd>,
    output: Option<OwnedFd>,
    error: Option<OwnedFd>,
    terminal: Option<Terminal>,
    /// Bytes from standard input that were not written to the command yet.
    waiting: Vec<u8>,
    /// Whether standard input has ended.
    is_input_over: bool,
}

impl Streams {
    /// Copies data until the command has ended and its output is printed. Returns its exit code.
    fn pump(mut self, control: Control) -> io::Result<i32> {
        let (mut control, mut code) = (Some(control), None);
        loop {
            if let Some(code) = code {
                // Processes that the command left running may hold its output open: only bytes already written are printed.
                for _ in 0..LAST_READS {
                    if !self.copy_output()? {
                        break;
                    }
                }
                return Ok(code);
            }
            if control.is_none() && self.output.is_none() && self.error.is_none() {
                return Err(io::Error::other(
                    "the daemon ended: the command continues or has ended, its exit code is not known",
                ));
            }
            let ready = self.wait(control.as_ref())?;
            if ready.signal
                && let Some(terminal) = &mut self.terminal
            {
                terminal.on_signal()?;
            }
            if ready.output {
                self.copy_output()?;
            }
            if ready.input {
                self.copy_input()?;
            }
            let Some(daemon) = control.as_mut().filter(|_| ready.control) else { continue };
            let is_alive = daemon.read(&mut Vec::new())?.is_some();
            while let Some(answer) = daemon.answer()? {
                if let Answer::Exited { code: exited } = answer {
                    code = Some(exited);
                }
            }
            if !is_alive {
                // The streams lead to the command itself, so they work without the daemon.
                control = None;
            }
        }
    }

    /// Waits until a descriptor is ready.
    fn wait(&self, control: Option<&Control>) -> io::Result<Ready> {
        let stdin = io::stdin();
        let (mut fds, mut kinds) = (Vec::new(), Vec::new());
        if let Some(control) = control {
            fds.push(PollFd::new(control.stream.as_fd(), PollFlags::POLLIN));
            kinds.push(Kind::Control);
        }
        for output in [&self.output, &self.error].into_iter().flatten() {
            fds.push(PollFd::new(output.as_fd(), PollFlags::POLLIN));
            kinds.push(Kind::Output);
        }
        if let Some(terminal) = &self.terminal {
            fds.push(PollFd::new(terminal.signals(), PollFlags::POLLIN));
            kinds.push(Kind::Signal);
        }
        if let Some(input) = &self.input {
            let wanted = if self.waiting.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
            // Without a reader it is an error, which is noticed here. A terminal has its end at its output.
            if self.terminal.is_none() || !self.waiting.is_empty() {
                fds.push(PollFd::new(input.as_fd(), wanted));
                kinds.push(Kind::Input);
            }
            if self.waiting.is_empty() && !self.is_input_over {
                fds.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
                kinds.push(Kind::Input);
            }
        }
        poll(&mut fds)?;
        let mut ready = Ready::default();
        for (fd, kind) in fds.iter().zip(kinds) {
            if fd.revents().is_none_or(|found| !found.is_empty()) {
                match kind {
                    Kind::Control => ready.control = true,
                    Kind::Output => ready.output = true,
                    Kind::Signal => ready.signal = true,
                    Kind::Input => ready.input = true,
                }
            }
        }
        Ok(ready)
    }

    /// Prints available output. Returns whether more may be available.
    fn copy_output(&mut self) -> io::Result<bool> {
        let output = copy(&mut self.output, &mut io::stdout().lock())?;
        let error = copy(&mut self.error, &mut io::stderr().lock())?;
        Ok(output || error)
    }

    /// Reads standard input if no bytes are pending, and writes as many bytes to the command as it accepts.
    fn copy_input(&mut self) -> io::Result<()> {
        let stdin = io::stdin();
        let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        let is_there = self.waiting.is_empty()
            && !self.is_input_over
            && nix::poll::poll(&mut fds, PollTimeout::ZERO).is_ok_and(|count| count > 0);
        if is_there {
            let mut buffer = [0; READ_BYTES];
            // A terminal that is hung up is an end, too.
            let count = retry(|| nix::unistd::read(stdin.as_fd(), &mut buffer)).unwrap_or(0);
            self.waiting.extend_from_slice(&buffer[..count]);
            self.is_input_over = count == 0;
            if self.is_input_over && self.terminal.is_some() && !stdin.is_terminal() {
                self.waiting.push(END_OF_INPUT);
            }
        }
        let Some(input) = &self.input else { return Ok(()) };
        if self.waiting.is_empty() {
            // A write of nothing tells nothing; a pipe without a reader is noticed by its state.
            let mut fds = [PollFd::new(input.as_fd(), PollFlags::empty())];
            let has_reader = matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(0));
            if self.is_input_over || !has_reader {
                self.input = None;
            }
            return Ok(());
        }
        match retry(|| nix::unistd::write(input, &self.waiting)) {
            Ok(count) => drop(self.waiting.drain(..count)),
            Err(Errno::EAGAIN) => {}
            // The command has closed its input, or has ended.
            Err(_) => {
                self.waiting.clear();
                self.input = None;
            }
        }
        if self.waiting.is_empty() && self.is_input_over {
            self.input = None;
        }
        Ok(())
    }
}

/// Descriptors that are ready.
#[derive(Default)]
struct Ready {
    control: bool,
    output: bool,
    input: bool,
    signal: bool,
}

/// The use of a polled descriptor.
enum Kind {
    Control,
    Output,
    Input,
    Signal,
}

/// Copies the data of one read. Returns whether more may be available.
fn copy(from: &mut Option<OwnedFd>, to: &mut impl io::Write) -> io::Result<bool> {
    let Some(fd) = from else { return Ok(false) };
    let mut buffer = [0; READ_BYTES];
    match retry(|| nix::unistd::read(&*fd, &mut buffer)) {
        // A terminal whose last process has ended gives EIO.
        Ok(0) | Err(Errno::EIO) => {
            *from = None;
            Ok(false)
        }
        Ok(count) => {
            to.write_all(&buffer[..count])?;
            to.flush()?;
            Ok(true)
        }
        Err(Errno::EAGAIN) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn poll(fds: &mut [PollFd<'_>]) -> io::Result<()> {
    match nix::poll::poll(fds, PollTimeout::NONE) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            done => return done,
        }
    }
}
