//! Requests to the daemon over its control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use coracle_base::error::describe_io;
use coracle_control::{ANSWER_BYTES_MAX, Answer, Request, socket};

/// The message for a request that failed. If no daemon listens, it says what to look at.
pub(crate) fn unanswered(socket: &Path, error: &io::Error) -> String {
    let hint = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ": the daemon does not run, or has another --config or --state"
        }
        _ => "",
    };
    format!("ask the daemon at {}: {}{hint}", socket.display(), describe_io(error))
}

/// Sends the request and calls `hear` with each answer when it arrives.
///
/// # Errors
/// The daemon does not answer; the error of `hear`.
pub(crate) fn converse(
    socket: &Path,
    request: &Request,
    hear: impl FnMut(Answer) -> io::Result<()>,
) -> io::Result<()> {
    converse_on(UnixStream::connect(socket)?, request, hear)
}

/// Sends the request like [`converse`], and calls `idle` after each `interval` without an answer.
///
/// # Errors
/// Those of [`converse`].
pub(crate) fn converse_patiently(
    socket: &Path,
    request: &Request,
    interval: Duration,
    mut idle: impl FnMut(),
    hear: impl FnMut(Answer) -> io::Result<()>,
) -> io::Result<()> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(interval))?;
    let is_idle = |error: &io::Error| {
        let is_idle = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        if is_idle {
            idle();
        }
        is_idle
    };
    exchange_on(stream, request, is_idle, hear)
}

fn converse_on(
    stream: UnixStream,
    request: &Request,
    hear: impl FnMut(Answer) -> io::Result<()>,
) -> io::Result<()> {
    exchange_on(stream, request, |_| false, hear)
}

/// Sends the request and calls `hear` with each answer; after an error for which `goes_on` returns true the next
/// bytes are waited for again.
fn exchange_on(
    mut stream: UnixStream,
    request: &Request,
    mut goes_on: impl FnMut(&io::Error) -> bool,
    mut hear: impl FnMut(Answer) -> io::Result<()>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    send(&mut stream, &line)?;
    let mut from = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        // What was read before an error stays in the line.
        while let Err(error) =
            (from.by_ref()).take((ANSWER_BYTES_MAX - line.len()) as u64).read_until(b'\n', &mut line)
        {
            if !goes_on(&error) {
                return Err(error);
            }
        }
        if line.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon ended during its answer"));
        }
        if line.len() >= ANSWER_BYTES_MAX {
            return Err(io::Error::other("the daemon's answer is too long"));
        }
        match serde_json::from_slice(&line)? {
            Answer::End {} => return Ok(()),
            answer => hear(answer)?,
        }
    }
}

/// Sends a request. A daemon that refuses the request may close the connection before it has read everything;
/// its answer contains the reason, so EPIPE is ignored.
///
/// # Errors
/// Those of `write(2)`, except EPIPE.
pub(crate) fn send(stream: &mut UnixStream, line: &[u8]) -> io::Result<()> {
    match stream.write_all(line) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        sent => sent,
    }
}

/// Returns all answers to a request to the daemon with the state directory `state`. They must arrive within
/// `limit`.
///
/// # Errors
/// No daemon listens, or it does not answer in time.
pub(crate) fn ask_within(state: &Path, request: &Request, limit: Duration) -> io::Result<Vec<Answer>> {
    ask_on(&socket(state), request, limit)
}

/// Returns all answers to a request to the daemon that listens on `socket`, like [`ask_within`].
///
/// # Errors
/// Those of [`ask_within`].
pub(crate) fn ask_on(socket: &Path, request: &Request, limit: Duration) -> io::Result<Vec<Answer>> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let mut answers = Vec::new();
    converse_on(stream, request, |answer| {
        answers.push(answer);
        Ok(())
    })?;
    Ok(answers)
}

/// Returns all answers to a request.
///
/// # Errors
/// Those of [`converse`].
pub(crate) fn exchange(socket: &Path, request: &Request) -> io::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    converse(socket, request, |answer| {
        answers.push(answer);
        Ok(())
    })?;
    Ok(answers)
}
