//! Answers the requests on one connection of a neighbour, one after the other. Each wait has a limit: for the head of a request,
//! for a client that does not read, and for a pull whose part does not grow.

use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use coracle_site::pace::{Pace, Rate};
use coracle_site::request::{self, Content, HEAD_BYTES_MAX, PastEnd, Refused, Request};
use coracle_site::slots::Place;
use coracle_site::{Nonces, OUTLINE, PROOF, SCHEME, STATE, Signed, SiteKey, share_text};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::content::{Blob, Found, Manifest, Shelf};
use super::unpacked::{Layers, Unpacked};

/// Time limit for the head of a request, from the connection or the end of the answer before.
const HEAD_MAX: Duration = Duration::from_secs(5);
/// Number of requests without a proof after which a connection is closed: a client needs one to get a nonce.
const UNPROVEN_MAX: u32 = 2;
/// Time for which is read from a connection before it is closed.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// Time limit for a write: a client that reads nothing for this time has ended.
const WRITE_MAX: Duration = Duration::from_secs(10);
/// Time limit for growth of a part. A client asks again if the pull still runs.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Interval at which a growing part is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Number of looks after which the pull's announcement is looked at, too.
const LOOKS_PER_CHECK: u32 = 10;
/// Maximum size in bytes of the two buffers of an archive that is sent: 128 connections may send one.
const ARCHIVE_BUFFER_BYTES: usize = 16 << 10;
/// Time for which a file that has been removed is still sent: blobs are removed when their layers are unpacked, while others of the
/// site download them.
const REMOVED_MAX: Duration = Duration::from_secs(600);

/// The values that all connections share.
pub(super) struct Service {
    pub(super) shelf: Shelf,
    pub(super) layers: Layers,
    /// The name of this node ([`coracle_site::share::identity`]).
    pub(super) id: String,
    /// `None`: every client is served.
    pub(super) key: Option<SiteKey>,
    pub(super) nonces: Nonces,
    pub(super) rate: Rate,
}

/// The head of an answer.
struct Head<'a> {
    status: &'a str,
    length: u64,
    fields: String,
    keeps_alive: bool,
}

/// Serves the client until it or a limit ends the connection.
///
/// # Errors
/// The error that ended the connection, which says nothing about this node.
pub(super) fn serve(service: &Service, place: &mut Place) -> io::Result<()> {
    place.client().set_write_timeout(Some(WRITE_MAX))?;
    place.client().set_nodelay(true)?;
    let mut read = Vec::new();
    let mut unproven = 0;
    while let Some(mut request) = next_request(place.client(), &mut read)? {
        if !is_proven(service, place.client(), &request)? {
            unproven += 1;
            request.keeps_alive &= unproven < UNPROVEN_MAX;
            challenge(service, place.client(), &request)?;
        } else if place.serve() {
            answer(service, place.client(), &request)?;
        } else {
            let (status, why) = ("503 Service Unavailable", "this node serves too many others");
            return write_error(place.client(), status, why, "Retry-After: 1\r\n", request.is_head, false);
        }
        if !request.keeps_alive {
            break;
        }
    }
    Ok(())
}

/// Reads for a moment before the connection is closed: the kernel resets a connection with unread data, and the client would not
/// see the answer.
///
/// # Errors
/// The client has gone, or sends no end within [`LINGER_MAX`].
fn linger(mut client: &TcpStream) -> io::Result<()> {
    client.shutdown(Shutdown::Write)?;
    let until = Instant::now() + LINGER_MAX;
    let mut buffer = [0; 1024];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        client.set_read_timeout(Some(left))?;
        if client.read(&mut buffer)? == 0 {
            return Ok(());
        }
    }
}

/// Reads the next head; `None` if the client has closed the connection. `read` has the bytes after the request before.
fn next_request(mut client: &TcpStream, read: &mut Vec<u8>) -> io::Result<Option<Request>> {
    let until = Instant::now() + HEAD_MAX;
    let mut buffer = [0; 1024];
    loop {
        match request::parse(read) {
            Ok(Some((request, length))) => {
                read.drain(..length);
                return Ok(Some(request));
            }
            Ok(None) => {}
            Err(Refused { status, why }) => {
                write_error(client, status, why, "", false, false)?;
                linger(client)?;
                return Ok(None);
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || read.len() > HEAD_BYTES_MAX {
            return Err(ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        match client.read(&mut buffer) {
            Ok(0) => return Ok(None),
            Ok(count) => read.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether the client has the site's key, or needs none.
fn is_proven(service: &Service, client: &TcpStream, request: &Request) -> io::Result<bool> {
    let Some(key) = &service.key else { return Ok(true) };
    let signed = Signed {
        server: client.local_addr()?,
        method: if request.is_head { "HEAD" } else { "GET" },
        target: &request.target,
        range: &request.range,
    };
    Ok(key.verifies(&service.nonces, &request.authorization, signed))
}

fn challenge(service: &Service, client: &TcpStream, request: &Request) -> io::Result<()> {
    let field = format!("WWW-Authenticate: {SCHEME} {}\r\n", service.nonces.issue(Instant::now()));
    let (is_head, keeps_alive) = (request.is_head, request.keeps_alive);
    write_error(client, "401 Unauthorized", "the site's key is required", &field, is_head, keeps_alive)
}

fn answer(service: &Service, client: &TcpStream, request: &Request) -> io::Result<()> {
    let say = |status, why, fields: &str| {
        write_error(client, status, why, fields, request.is_head, request.keeps_alive)
    };
    let manifest = match request::content(&request.target) {
        Some(Content::Version) => return say("200 OK", "this node serves its neighbours", ""),
        Some(Content::Blob(digest, registry, layer)) => {
            let outline = layer.and_then(|name| service.layers.find(name)).map(|layer| layer.outline_bytes);
            match (service.shelf.blob(digest, &registry), outline) {
                (Found::Blob(blob), outline) => {
                    let field = format!("Docker-Content-Digest: {digest}\r\n");
                    return send_blob(service, client, request, &blob, (&field, outline));
                }
                (Found::Begun(stage, length), outline) => {
                    let fields = share_fields(service, request, stage.word(), length, outline);
                    return say("202 Accepted", "this node is about to get it", &fields);
                }
                (Found::Nothing, Some(_)) => {
                    let fields = share_fields(service, request, "nothing", 0, outline);
                    return say("202 Accepted", "this node has the layer unpacked", &fields);
                }
                (Found::Nothing, None) => None,
            }
        }
        Some(Content::Outline(name)) => match service.layers.find(name) {
            Some(Unpacked { outline, outline_bytes, .. }) => {
                let blob = Blob { file: outline, size: outline_bytes, growth: None };
                return send_blob(service, client, request, &blob, ("", None));
            }
            None => None,
        },
        Some(Content::Archive(name)) => match service.layers.find(name) {
            Some(layer) => return send_archive(service, client, request, layer),
            None => None,
        },
        Some(Content::Manifest(name, digest)) => service.shelf.manifest_of(&name, digest),
        Some(Content::Tag(name)) => service.shelf.tagged(&name),
        None => None,
    };
    match manifest {
        Some(manifest) => send_manifest(service, client, request, &manifest),
        None => say("404 Not Found", "this node does not have it", ""),
    }
}

/// Sends a manifest or index, with the proof that a node of the site sends it.
fn send_manifest(
    service: &Service,
    client: &TcpStream,
    request: &Request,
    manifest: &Manifest,
) -> io::Result<()> {
    let Manifest { media_type, digest, blob } = manifest;
    let mut fields = format!("Content-Type: {media_type}\r\nDocker-Content-Digest: {digest}\r\n");
    if let Some(key) = &service.key {
        fields += &format!("{PROOF}: {}\r\n", key.vouch(&request.authorization, digest));
    }
    let head = Head { status: "200 OK", length: blob.size, fields, keeps_alive: request.keeps_alive };
    write_head(client, head)?;
    match request.is_head {
        true => Ok(()),
        false => Body { blob, into: Sending::new(service, client), removed: None }.send(0, blob.size),
    }
}

/// The field [`STATE`]: a word, the number of bytes of a blob that the node has, and the name of the node
/// ([`coracle_site::share::identity`]); the field [`OUTLINE`], if the node has the layer unpacked; and the proof that a node of
/// the site says so, because it is waited for.
/// The word is `complete`, `nothing`, or that of a [`Stage`](coracle_site::announcement::Stage).
fn share_fields(
    service: &Service,
    request: &Request,
    word: &str,
    bytes: u64,
    outline: Option<u64>,
) -> String {
    let state = format!("{word} {bytes} {}", service.id);
    let outline = outline.map(|bytes| bytes.to_string()).unwrap_or_default();
    let mut fields = format!("{STATE}: {state}\r\n");
    if !outline.is_empty() {
        fields += &format!("{OUTLINE}: {outline}\r\n");
    }
    if let Some(key) = service.key.as_ref().filter(|_| request.is_head) {
        let proof = key.vouch(&request.authorization, &share_text(&state, &outline));
        fields += &format!("{PROOF}: {proof}\r\n");
    }
    fields
}

fn send_blob(
    service: &Service,
    client: &TcpStream,
    request: &Request,
    blob: &Blob,
    (field, outline): (&str, Option<u64>),
) -> io::Result<()> {
    let (word, bytes) = match &blob.growth {
        Some(growth) => (growth.stage.word(), blob.file.metadata()?.len()),
        None => ("complete", blob.size),
    };
    let share = share_fields(service, request, word, bytes, outline);
    match begin_content(client, request, blob.size, &format!("{field}{share}"))? {
        None => Ok(()),
        Some((begin, end)) => {
            Body { blob, into: Sending::new(service, client), removed: None }.send(begin, end)
        }
    }
}

/// Writes the head of an answer with content of `size` bytes; returns the requested range, if the content follows.
fn begin_content(
    client: &TcpStream,
    request: &Request,
    size: u64,
    fields: &str,
) -> io::Result<Option<(u64, u64)>> {
    let (is_head, keeps_alive) = (request.is_head, request.keeps_alive);
    let mut fields = format!("Content-Type: application/octet-stream\r\nAccept-Ranges: bytes\r\n{fields}");
    let (status, begin, end) = match request::range(&request.range, size) {
        Ok(None) => ("200 OK", 0, size),
        Ok(Some((begin, end))) => {
            fields += &format!("Content-Range: bytes {begin}-{}/{size}\r\n", end.saturating_sub(1));
            ("206 Partial Content", begin, end)
        }
        Err(PastEnd) => {
            let size = format!("Content-Range: bytes */{size}\r\n");
            let why = "the range begins after the end";
            write_error(client, "416 Range Not Satisfiable", why, &size, is_head, keeps_alive)?;
            return Ok(None);
        }
    };
    write_head(client, Head { status, length: end - begin, fields, keeps_alive })?;
    Ok((!is_head).then_some((begin, end)))
}

/// Sends a range of the archive of a layer. If it cannot be made any further, the connection ends, so that the client sees that these
/// are not all bytes.
fn send_archive(service: &Service, client: &TcpStream, request: &Request, layer: Unpacked) -> io::Result<()> {
    let Some((begin, end)) = begin_content(client, request, layer.archive_bytes, "")? else { return Ok(()) };
    let (mut archive, read) = service.layers.archive(layer, begin)?;
    let into = Sending::new(service, client);
    // To read an outline costs this node as much as to send it.
    into.wait_for_rate(read as usize)?;
    let mut buffer = vec![0; service.rate.piece().min(ARCHIVE_BUFFER_BYTES)];
    // Headers and short files are sent together.
    let mut into = BufWriter::with_capacity(buffer.len(), into);
    let sent = archive.send(begin, end, &mut buffer, &mut into).and_then(|()| into.flush());
    // Without a write, which may wait as long as the one that failed.
    drop(into.into_parts());
    sent.map(|()| service.layers.keep(archive))
}

/// The body of an answer: sends what is written to it, not faster than the rate.
struct Sending<'a> {
    service: &'a Service,
    client: &'a TcpStream,
    pace: Pace,
}

impl<'a> Sending<'a> {
    fn new(service: &'a Service, client: &'a TcpStream) -> Self {
        Self { service, client, pace: Pace::default() }
    }

    /// Waits until this number of bytes may be sent.
    fn wait_for_rate(&self, count: usize) -> io::Result<()> {
        while let Some(wait) = self.service.rate.wait_for(count) {
            wait_while_connected(self.client, wait.clamp(Duration::from_millis(1), LOOK))?;
        }
        Ok(())
    }
}

impl Write for Sending<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(self.service.rate.piece())];
        self.wait_for_rate(piece.len())?;
        self.pace.write(self.client, piece)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A blob that is being sent.
struct Body<'a> {
    blob: &'a Blob,
    into: Sending<'a>,
    /// Time at which the file was seen to be removed.
    removed: Option<Instant>,
}

impl Body<'_> {
    /// Sends the bytes from `begin` to `end`, as the part grows. Anything else than all of them ends the connection, so that the
    /// client sees that they are not all.
    fn send(mut self, begin: u64, end: u64) -> io::Result<()> {
        let mut buffer = vec![0; self.into.service.rate.piece()];
        let mut position = begin;
        while position < end {
            let most = buffer.len().min(usize::try_from(end - position).unwrap_or(usize::MAX));
            match self.blob.file.read_at(&mut buffer[..most], position)? {
                0 => self.wait_for_growth(position)?,
                count => {
                    self.end_if_removed()?;
                    self.into.write_all(&buffer[..count])?;
                    position += count as u64;
                }
            }
        }
        Ok(())
    }

    /// Ends a body whose file was removed a while ago: its space on the disk is free only then.
    fn end_if_removed(&mut self) -> io::Result<()> {
        if self.blob.file.metadata()?.nlink() > 0 {
            return Ok(());
        }
        match self.removed.get_or_insert_with(Instant::now).elapsed() < REMOVED_MAX {
            true => Ok(()),
            false => Err(ErrorKind::NotFound.into()),
        }
    }

    /// Waits until the part has data at `position`.
    fn wait_for_growth(&self, position: u64) -> io::Result<()> {
        let ended = |why| Err(io::Error::new(ErrorKind::UnexpectedEof, why));
        let Some(growth) = &self.blob.growth else { return ended("the blob is shorter than it was") };
        let begun = Instant::now();
        let mut last = (self.blob.file.metadata()?.len(), begun);
        for look in 1.. {
            let length = self.blob.file.metadata()?.len();
            if length > position {
                return Ok(());
            }
            if length < last.0 {
                return ended("the download began again");
            }
            if length > last.0 {
                last = (length, Instant::now());
            }
            if last.1.elapsed() >= SILENCE_MAX {
                return ended("the download makes no progress");
            }
            // All bytes are there before the announcement ends.
            if look % LOOKS_PER_CHECK == 0 && !growth.is_live() {
                return match self.blob.file.metadata()?.len() > position {
                    true => Ok(()),
                    false => ended("the download has ended"),
                };
            }
            wait_while_connected(self.into.client, LOOK)?;
        }
        Ok(())
    }
}

/// Waits for this time.
///
/// # Errors
/// The client has closed the connection.
fn wait_while_connected(client: &TcpStream, time: Duration) -> io::Result<()> {
    // Without it only a connection that is closed in both directions is reported.
    let has_ended = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);
    let mut fds = [PollFd::new(client.as_fd(), has_ended)];
    match poll(&mut fds, PollTimeout::try_from(time).unwrap_or(PollTimeout::ZERO)) {
        Ok(0) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Ok(_) => Err(ErrorKind::ConnectionReset.into()),
        Err(errno) => Err(errno.into()),
    }
}

fn write_head(mut client: &TcpStream, head: Head<'_>) -> io::Result<()> {
    let Head { status, length, fields, keeps_alive } = head;
    let connection = if keeps_alive { "" } else { "Connection: close\r\n" };
    let text = format!("HTTP/1.1 {status}\r\n{fields}Content-Length: {length}\r\n{connection}\r\n");
    client.write_all(text.as_bytes())
}

/// Writes an answer without content; `why` is its body.
fn write_error(
    client: &TcpStream,
    status: &str,
    why: &str,
    fields: &str,
    is_head: bool,
    keeps_alive: bool,
) -> io::Result<()> {
    let fields = format!("Content-Type: text/plain\r\n{fields}");
    let body = format!("{why}\n");
    write_head(client, Head { status, length: body.len() as u64, fields, keeps_alive })?;
    if is_head { Ok(()) } else { Pace::default().write(client, body.as_bytes()) }
}
