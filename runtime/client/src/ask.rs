//! Requests to the daemon over its control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::protocol::{ANSWER_BYTES_MAX, Answer, Request, socket};

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

fn converse_on(
    mut stream: UnixStream,
    request: &Request,
    mut hear: impl FnMut(Answer) -> io::Result<()>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    send(&mut stream, &line)?;
    let mut from = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        from.by_ref().take(ANSWER_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon ended before it was done"));
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
    let stream = UnixStream::connect(socket(state))?;
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
