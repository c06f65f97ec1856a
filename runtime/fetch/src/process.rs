//! The fetcher process, which is confined to network access. It receives requests from the control socket,
//! handles each in its own thread, and writes the answer to the pipe of the request. If the worker closes the
//! pipe, the request ends.

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use coracle_job::{Failure, FailureKind, MESSAGE_BYTES_MAX, MessageError, read_body, write_message};
use coracle_sandbox::describe_io;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use ureq::http::header::{CONTENT_RANGE, CONTENT_TYPE};
use ureq::http::{Response, StatusCode};
use ureq::{Body, BodyReader};

use super::confine::{confine, not_without};
use super::decoded::Codings;
use super::endpoint::Connection;
use super::neighbour::{self, Neighbours};
use super::protocol::{
    Answer, Begin, CHUNK_BYTES_MAX, Get, Head, Names, Order, Ready, write_answer, write_end,
};
use super::request_failure::RequestFailure;
use coracle_site::{OUTLINE, PROOF, STATE};

/// Stack size in bytes of a request's thread: TLS and HTTP need some 40 KiB.
const STACK_BYTES: usize = 256 << 10;

/// Maximum number of concurrent requests: a worker makes six per connection (`[registry] connections`, 16 at
/// most), and aborted ones continue until the registry's read timeout.
const REQUESTS_MAX: usize = 128;

/// Main function of the fetcher: its standard input is the control socket.
pub fn live() -> ExitCode {
    match confine_and_serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {}", super::SUBCOMMAND, describe_io(&error));
            ExitCode::FAILURE
        }
    }
}

fn confine_and_serve() -> io::Result<()> {
    // This closes all descriptors except the standard ones, so the socket is opened afterwards.
    let confined = confine();
    let mut control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (ready, files): (Ready, _) = match confined {
        Ok(files) => (Ok(()), files),
        Err(why) => (Err(not_without(&why)), Vec::new()),
    };
    write_message(&mut control, &ready)?;
    // No order is read unless the confinement is complete.
    if ready.is_ok() { serve(control, files) } else { Ok(()) }
}

/// Executes the worker's orders until the worker closes the control socket.
pub(super) fn serve(mut control: UnixStream, files: Vec<File>) -> io::Result<()> {
    let mut connections: Arc<Vec<Connection>> = Arc::default();
    let neighbours = Arc::new(Neighbours::new());
    let at_work = Arc::new(AtomicUsize::new(0));
    while let Some((order, pipe)) = receive(&mut control)? {
        match (order, pipe) {
            (Order::Setup(setup), _) => connections = Arc::new(Connection::all(setup)),
            (Order::Names(names), _) => write_names(&files, &names)?,
            (Order::Get(get), Some(pipe)) => {
                let (connections, neighbours) = (connections.clone(), neighbours.clone());
                let work = move |guard| answer(&connections, &neighbours, &get, pipe, guard);
                start(work, at_work.clone())?;
            }
            (Order::Resolve(names), Some(pipe)) => {
                // A worker that waits no longer has closed the pipe.
                let work = move |_| drop(write_message(&mut File::from(pipe), &neighbour::resolve(&names)));
                start(work, at_work.clone())?;
            }
            (Order::Get(_) | Order::Resolve(_), None) => {
                return Err(io::Error::other("a request without a pipe"));
            }
        }
    }
    Ok(())
}

/// A running request in the counter; dropping the value decrements the counter.
struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work` in a thread; the argument of `work` is whether the number of requests is within the limit.
fn start(work: impl FnOnce(bool) + Send + 'static, at_work: Arc<AtomicUsize>) -> io::Result<()> {
    let is_allowed = at_work.fetch_add(1, Ordering::Relaxed) < REQUESTS_MAX;
    let guard = Guard(at_work);
    let work = move || {
        work(is_allowed);
        drop(guard);
    };
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work).map(drop).map_err(|error| {
        io::Error::other(format!("start a thread that makes a request: {}", describe_io(&error)))
    })
}

/// Receives the next order and its descriptor; `None` after the worker closed the socket.
pub(super) fn receive(control: &mut UnixStream) -> io::Result<Option<(Order, Option<OwnedFd>)>> {
    // The descriptor arrives with the first byte of a message, so the length is received with recvmsg and the
    // rest is read.
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [io::IoSliceMut::new(&mut length)];
    let received = retry_on_intr(|| recvmsg(&*control, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
    let count = received.bytes;
    let mut pipe = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            pipe = descriptors.into_iter().next();
        }
    }
    if count == 0 {
        return Ok(None);
    }
    control.read_exact(&mut length[count..])?;
    let order = read_body(control, length, MESSAGE_BYTES_MAX)?;
    Ok(Some((order, pipe)))
}

/// Writes the resolver files in place. A concurrent lookup may read a partial file and fail; it is then
/// retried like any failure.
fn write_names(files: &[File], names: &Names) -> io::Result<()> {
    for (file, text) in files.iter().zip(&names.files) {
        if let Some(text) = text {
            file.write_all_at(text.as_bytes(), 0)?;
            file.set_len(text.len() as u64)?;
        }
    }
    Ok(())
}

/// Handles one request. A broken pipe means that the worker no longer needs the answer.
fn answer(connections: &[Connection], neighbours: &Neighbours, get: &Get, pipe: OwnedFd, is_allowed: bool) {
    let mut pipe = File::from(pipe);
    let failed = |kind, text: &str| Err(RequestFailure::from(Failure::new(kind, text)));
    let response = match (&get.neighbour, connections.get(get.remote as usize)) {
        _ if !is_allowed => failed(FailureKind::Unavailable, "too many requests at once"),
        (Some(ask), _) => neighbours.get(ask, get),
        (None, Some(connection)) => connection.get(get),
        (None, None) => failed(FailureKind::Internal, "a request to an unknown endpoint"),
    };
    match response {
        Ok((response, codings)) => {
            let length = response.body().content_length().filter(|_| codings.is_identity());
            let head = Head {
                begin: begin(&response, &codings, get.offset),
                length,
                digest: field(&response, "docker-content-digest"),
                media_type: field(&response, CONTENT_TYPE.as_str()),
                has_more: response.headers().contains_key("link"),
                state: field(&response, STATE),
                outline: field(&response, OUTLINE),
                proof: field(&response, PROOF),
                ..Head::default()
            };
            if write_answer(&mut pipe, Answer::Body(head)).is_ok() {
                let _ = pass_on(response, &codings, &mut pipe);
            }
        }
        Err(failed) => drop(write_answer(&mut pipe, Answer::RequestFailure(failed))),
    }
}

/// The value of a header field without parameters; empty if there is none, or one that is too long for a message.
fn field(response: &Response<Body>, name: &str) -> String {
    const BYTES_MAX: usize = 1024;
    let value = response.headers().get(name).and_then(|value| value.to_str().ok());
    let value = value.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    if value.len() > BYTES_MAX { String::new() } else { value.to_owned() }
}

/// Determines the offset of the body; a partial response without `Content-Range` is assumed to be the
/// requested range.
fn begin(response: &Response<Body>, codings: &Codings, offset: u64) -> Begin {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return Begin::First;
    }
    // Several parts have their offsets in the body, and a range of encoded content has another unit.
    let kind = response.headers().get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let is_multipart = kind.get(..10).is_some_and(|kind| kind.eq_ignore_ascii_case(b"multipart/"));
    if is_multipart || !codings.is_identity() {
        return Begin::Elsewhere;
    }
    let range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let first = range.and_then(|range| range.trim().strip_prefix("bytes ")?.split('-').next());
    match first.is_none_or(|first| first.parse() == Ok(offset)) {
        true => Begin::AsAsked,
        false => Begin::Elsewhere,
    }
}

/// A body that ends when the worker has closed the pipe of its request. What decodes to nothing is never written there, so that no
/// write would fail.
struct WhileWanted<'a> {
    body: BodyReader<'a>,
    pipe: File,
}

impl Read for WhileWanted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut fds = [PollFd::new(self.pipe.as_fd(), PollFlags::empty())];
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(0) | Err(_) => self.body.read(buffer),
            Ok(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Writes the body in chunks, one for each read.
fn pass_on(mut response: Response<Body>, codings: &Codings, pipe: &mut File) -> Result<(), MessageError> {
    const HEADER_BYTES: usize = 4;
    let wanted = pipe.try_clone().map_err(MessageError::Io)?;
    let mut body = match codings.decode(WhileWanted { body: response.body_mut().as_reader(), pipe: wanted }) {
        Ok(body) => body,
        Err(error) => return write_end(pipe, Some(describe_io(&error))),
    };
    let mut buffer = vec![0; HEADER_BYTES + CHUNK_BYTES_MAX];
    loop {
        match body.read(&mut buffer[HEADER_BYTES..]) {
            Ok(0) => return write_end(pipe, None),
            Ok(count) => {
                buffer[..HEADER_BYTES].copy_from_slice(&(count as u32).to_le_bytes());
                pipe.write_all(&buffer[..HEADER_BYTES + count]).map_err(MessageError::Io)?;
            }
            Err(error) => return write_end(pipe, Some(describe_io(&error))),
        }
    }
}
