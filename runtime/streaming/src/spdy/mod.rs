//! The server side of SPDY/3.1 as Kubernetes clients use it, as a state machine over bytes. kubectl, crictl,
//! the kubelet and the API server all use the library moby/spdystream, which never sends WINDOW_UPDATE or
//! SETTINGS and ignores both. Therefore only the socket provides flow control (streaming 6.4), and this
//! module has none.
//!
//! ```text
//! word 0   1 | version 15 | type 16   control        0 | stream 31   data
//! word 1   flags 8 | length 24, then `length` bytes
//! ```
//! The module does no I/O: [`Session::next`] takes events from the start of the input, [`Session::output`] is
//! the pending output. Data is passed on as it arrives, whatever the length of its frame; a control frame is
//! buffered completely, up to [`frame::CONTROL_BYTES_MAX`].

mod frame;
mod headers;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::event::{Broken, Event, UNREAD_BYTES_MAX};
use frame::{Control, FIN, Head};
use headers::Inflater;

pub(crate) use frame::DATA_BYTES_MAX;

/// Maximum number of open streams. A port-forward uses two per TCP connection.
const STREAMS_MAX: usize = 1024;

/// RST_STREAM status: the peer's stream is invalid.
const PROTOCOL_ERROR: u32 = 1;
/// RST_STREAM status: the stream is no longer needed.
const CANCEL: u32 = 5;

/// The SPDY state of one connection.
pub(crate) struct Session {
    reading: Reading,
    inflater: Inflater,
    /// Streams that are open in at least one direction.
    streams: BTreeMap<u32, Halves>,
    /// Highest stream ID that the peer has used.
    last: u32,
    /// Stream of a data frame with FIN whose data was reported, so that its end is the next event; otherwise
    /// `None`.
    ending: Option<u32>,
    has_replied: bool,
    is_over: bool,
    output: Vec<u8>,
}

/// The directions of a stream that have ended.
#[derive(Clone, Copy, Default)]
struct Halves {
    theirs_ended: bool,
    ours_ended: bool,
}

/// The position within the current frame.
enum Reading {
    Head { bytes: [u8; frame::HEAD_BYTES], filled: usize },
    Control { kind: u16, flags: u8, payload: Vec<u8>, length: usize },
    Data { stream: u32, left: usize, is_last: bool },
}

const HEAD: Reading = Reading::Head { bytes: [0; frame::HEAD_BYTES], filled: 0 };

impl Session {
    /// Creates the state of a connection after the upgrade.
    pub(crate) fn new() -> Session {
        Session {
            reading: HEAD,
            inflater: Inflater::new(),
            streams: BTreeMap::new(),
            last: 0,
            ending: None,
            has_replied: false,
            is_over: false,
            output: Vec::new(),
        }
    }

    /// Takes the next event from the start of `input`; `None`: all input was consumed and more is needed.
    ///
    /// # Errors
    /// The peer violated the protocol; the connection cannot be used any longer.
    pub(crate) fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Broken> {
        if let Some(stream) = self.ending.take() {
            return Ok(Some(Event::Ended { stream }));
        }
        loop {
            match &mut self.reading {
                Reading::Head { bytes, filled } => {
                    let part = take(input, frame::HEAD_BYTES - *filled);
                    bytes[*filled..*filled + part.len()].copy_from_slice(part);
                    *filled += part.len();
                    if *filled < frame::HEAD_BYTES {
                        return Ok(None);
                    }
                    self.reading = match Head::decode(bytes)? {
                        Head::Control { kind, flags, length } => {
                            Reading::Control { kind, flags, payload: Vec::new(), length }
                        }
                        Head::Data { stream, flags, length } => {
                            Reading::Data { stream, left: length, is_last: flags & FIN != 0 }
                        }
                    };
                }
                Reading::Control { kind, flags, payload, length } => {
                    payload.extend_from_slice(take(input, *length - payload.len()));
                    if payload.len() < *length {
                        return Ok(None);
                    }
                    let (kind, flags, payload) = (*kind, *flags, std::mem::take(payload));
                    self.reading = HEAD;
                    if let Some(event) = self.control(kind, flags, &payload)? {
                        return Ok(Some(event));
                    }
                }
                Reading::Data { stream, left, is_last } => {
                    let (stream, is_last) = (*stream, *is_last);
                    if *left > 0 {
                        let bytes = take(input, *left);
                        if bytes.is_empty() {
                            return Ok(None);
                        }
                        *left -= bytes.len();
                        // Data after the end or a reset is a race, not an error.
                        if self.streams.get(&stream).is_some_and(|halves| !halves.theirs_ended) {
                            return Ok(Some(Event::Data { stream, bytes }));
                        }
                        continue;
                    }
                    self.reading = HEAD;
                    if is_last && self.end_theirs(stream) {
                        return Ok(Some(Event::Ended { stream }));
                    }
                }
            }
        }
    }

    fn control<'a>(&mut self, kind: u16, flags: u8, payload: &[u8]) -> Result<Option<Event<'a>>, Broken> {
        if self.output.len() > UNREAD_BYTES_MAX {
            return Err(Broken("it does not read the replies to its frames"));
        }
        match Control::decode(kind, payload)? {
            Control::SynStream { stream, block } => self.opened(stream, flags & FIN != 0, block),
            Control::Headers { stream, block } => {
                // The headers are ignored, but the inflater must process them.
                self.inflater.block(block)?;
                Ok((flags & FIN != 0 && self.end_theirs(stream)).then_some(Event::Ended { stream }))
            }
            Control::Reset { stream } => Ok(self.streams.remove(&stream).map(|_| Event::Reset { stream })),
            Control::Ping { id } => {
                if id == 0 || flags != 0 {
                    return Err(Broken("a PING without an ID"));
                }
                // Even IDs are replies to a server's PING; this server sends none.
                if id % 2 == 1 {
                    frame::ping(&mut self.output, id);
                }
                Ok(None)
            }
            Control::GoAway => {
                self.is_over = true;
                Ok(Some(Event::Closed))
            }
            Control::Ignored => Ok(None),
        }
    }

    fn opened<'a>(&mut self, stream: u32, is_last: bool, block: &[u8]) -> Result<Option<Event<'a>>, Broken> {
        let headers = self.inflater.block(block)?;
        let is_new = stream % 2 == 1 && stream > self.last;
        let Some(headers) = headers.filter(|_| is_new && !self.is_over) else {
            // Not for a stream ID that is open: RST_STREAM would end that stream.
            frame::reset(&mut self.output, stream, PROTOCOL_ERROR);
            self.last = self.last.max(if stream % 2 == 1 { stream } else { 0 });
            self.streams.remove(&stream);
            return Ok(None);
        };
        if self.streams.len() >= STREAMS_MAX {
            return Err(Broken("it opens too many streams"));
        }
        self.last = stream;
        self.streams.insert(stream, Halves { theirs_ended: is_last, ours_ended: false });
        self.ending = is_last.then_some(stream);
        Ok(Some(Event::Opened { stream, headers }))
    }

    /// Ends the peer's half of a stream; returns false if it had already ended.
    fn end_theirs(&mut self, stream: u32) -> bool {
        let Some(halves) = self.streams.get_mut(&stream).filter(|halves| !halves.theirs_ended) else {
            return false;
        };
        halves.theirs_ended = true;
        if halves.ours_ended {
            self.streams.remove(&stream);
        }
        true
    }

    /// Sends SYN_REPLY, after which the peer may send data.
    pub(crate) fn reply(&mut self, stream: u32) {
        frame::syn_reply(&mut self.output, stream, !std::mem::replace(&mut self.has_replied, true));
    }

    /// Sends data on a stream, at most [`DATA_BYTES_MAX`] per frame. Data for an ended stream is dropped.
    pub(crate) fn send(&mut self, stream: u32, bytes: &[u8]) {
        if self.is_writable(stream) {
            for part in bytes.chunks(DATA_BYTES_MAX) {
                frame::data(&mut self.output, stream, 0, part);
            }
        }
    }

    /// Ends the server's half of a stream.
    pub(crate) fn finish(&mut self, stream: u32) {
        if self.is_writable(stream) {
            frame::data(&mut self.output, stream, FIN, &[]);
            let halves = self.streams.entry(stream).or_default();
            halves.ours_ended = true;
            if halves.theirs_ended {
                self.streams.remove(&stream);
            }
        }
    }

    /// Resets a stream, which ends both directions.
    pub(crate) fn reset(&mut self, stream: u32) {
        if self.streams.remove(&stream).is_some() {
            frame::reset(&mut self.output, stream, CANCEL);
        }
    }

    /// Refuses a stream with invalid headers.
    pub(crate) fn refuse(&mut self, stream: u32) {
        if self.streams.remove(&stream).is_some() {
            frame::reset(&mut self.output, stream, PROTOCOL_ERROR);
        }
    }

    /// Resets all open streams and sends GOAWAY.
    pub(crate) fn close(&mut self) {
        for stream in std::mem::take(&mut self.streams).into_keys() {
            frame::reset(&mut self.output, stream, CANCEL);
        }
        frame::go_away(&mut self.output, self.last);
        self.is_over = true;
    }

    /// Pending output; the caller removes the bytes that it has written from the start.
    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Number of streams that are open in at least one direction.
    #[cfg(test)]
    pub(crate) fn streams(&self) -> usize {
        self.streams.len()
    }

    fn is_writable(&self, stream: u32) -> bool {
        self.streams.get(&stream).is_some_and(|halves| !halves.ours_ended)
    }
}

/// Takes at most `count` bytes from the start of `input`.
fn take<'a>(input: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (front, rest) = input.split_at(count.min(input.len()));
    *input = rest;
    front
}
