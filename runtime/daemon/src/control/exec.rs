//! `coracle exec`: starts a command in a container and passes the ends of its streams to the client, so that its data is not
//! transferred by the daemon. The daemon only waits for the exit, and keeps the descriptors that let the command continue
//! without a client.

use std::io::IoSlice;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor::Watched;
use coracle_control::Answer;
use coracle_engine::streams::{Ends, Exec, Wanted};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use super::server::disconnected;
use crate::daemon::Daemon;

/// A running command, until its exit is known.
pub(super) struct Started {
    exec: Exec,
    /// The read ends of the command's output; `None` with a terminal, which is hung up when the client closes it.
    output: [Option<OwnedFd>; 2],
}

/// The command that a client has requested.
pub(super) struct Command {
    pub(super) container: String,
    pub(super) words: Vec<String>,
    pub(super) stdin: bool,
    pub(super) tty: bool,
}

/// Starts the command and sends the first answer with the descriptors: those of standard input (if requested), output and
/// error, or that of the terminal.
///
/// # Errors
/// The container is not running; the command cannot be executed; the client has disconnected.
pub(super) async fn start(daemon: &Rc<Daemon>, stream: &Watched, command: Command) -> Result<Started, Error> {
    let Command { container, words, stdin, tty } = command;
    if words.is_empty() || words.iter().any(|word| word.contains('\0')) {
        return Err(Error::new(Kind::InvalidArgument, "exec: the command is empty or holds a NUL"));
    }
    let container = daemon.pods.container(&container)?;
    let wanted = Wanted { stdin, stdout: true, stderr: !tty, tty };
    let (exec, ends) = container.exec_streams(words, wanted).await?;
    let of_client = match &ends.terminal {
        Some(terminal) => vec![terminal],
        None => [&ends.stdin, &ends.stdout, &ends.stderr].into_iter().flatten().collect(),
    };
    let descriptors: Vec<_> = of_client.iter().map(|end| end.fd().as_raw_fd()).collect();
    let mut line = serde_json::to_vec(&Answer::Started {}).unwrap_or_default();
    line.push(b'\n');
    // A line of a few bytes fits into the socket's buffer, to which nothing was written yet.
    stream
        .write_with(|fd| {
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let parts = [IoSlice::new(&line)];
            Ok(sendmsg::<()>(fd.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None)?)
        })
        .await?;
    // Not watched any more: each line of output would wake the daemon.
    let kept = |end: &Option<Rc<Watched>>| {
        end.as_ref().filter(|_| !tty).map(|end| end.fd().try_clone_to_owned()).transpose()
    };
    Ok(Started { exec, output: [kept(&ends.stdout)?, kept(&ends.stderr)?] })
}

/// Waits for the exit of the command and returns it as an answer. `None` if the client has disconnected; the command then
/// continues without a client.
pub(super) async fn exit(started: Started, stream: &Watched) -> Option<Answer> {
    let Started { exec, output } = started;
    let ended = async { Some(exec.ended().await) };
    let gone = async {
        disconnected(stream).await;
        None
    };
    match smol::future::or(ended, gone).await {
        Some(ended) => {
            let answer = match ended {
                Ok(exit) => Answer::Exited { code: exit.code() },
                Err(error) => Answer::Failed { message: error.to_string() },
            };
            exec.release();
            Some(answer)
        }
        None => {
            let [stdout, stderr] = output.map(|end| end.and_then(|end| Watched::new(end).ok()).map(Rc::new));
            exec.abandon(Ends { stdout, stderr, ..Ends::default() });
            None
        }
    }
}
