//! WebSocket (RFC 6455) as Kubernetes uses it: the first byte of each message is a channel number (streaming
//! 6.7). A library implements the protocol on buffers in memory; this module does no I/O. [`Session::next`]
//! takes events from the input, [`Session::output`] is the pending output.
//!
//! | subprotocol | message |
//! |---|---|
//! | `v5.channel.k8s.io` | like v4; 255, N: channel N is closed |
//! | `v4.channel.k8s.io`, `channel.k8s.io`, none | binary: channel number, then data |
//! | `v4.base64.channel.k8s.io`, `base64.channel.k8s.io` | text: channel as a digit, then base64 |
//! | `SPDY/3.1+portforward.k8s.io` | binary: a part of SPDY's byte stream |

#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};

use data_encoding::BASE64;
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tungstenite::{Error, Message, WebSocket};

use super::event::{Broken, Event, UNREAD_BYTES_MAX};

/// Maximum length in bytes of a sent message: the size of kubectl's buffer.
pub(crate) const MESSAGE_BYTES_MAX: usize = 32 << 10;
/// Maximum length in bytes of a received message with all its fragments.
const TAKEN_BYTES_MAX: usize = 1 << 20;
/// Maximum number of bytes that are passed to the library at once.
const PIECE_BYTES: usize = 16 << 10;
/// First byte of v5's close signal; the next byte is the number of the closed channel.
const CLOSE_SIGNAL: u8 = 255;

/// Format of the messages of a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The channel is a byte; `has_close_signal`: whether the close signal of v5 is supported.
    Binary { has_close_signal: bool },
    /// The channel is a digit; the rest is base64.
    Base64,
    /// Frames have no channel number: all data belongs to stream 0.
    Raw,
}

/// The WebSocket state of one connection.
pub(crate) struct Session {
    socket: WebSocket<Wire>,
    form: Form,
    /// The message that contains the last event's data.
    message: Vec<u8>,
}

/// Both directions as buffers in memory.
#[derive(Default)]
struct Wire {
    input: Vec<u8>,
    at: usize,
    output: Vec<u8>,
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.input[self.at..];
        if rest.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Session {
    /// Creates the state of a connection after the upgrade.
    pub(crate) fn new(form: Form) -> Session {
        let config = WebSocketConfig::default()
            .read_buffer_size(PIECE_BYTES)
            .write_buffer_size(0)
            .max_message_size(Some(TAKEN_BYTES_MAX))
            .max_frame_size(Some(TAKEN_BYTES_MAX));
        let socket = WebSocket::from_raw_socket(Wire::default(), Role::Server, Some(config));
        Session { socket, form, message: Vec::new() }
    }

    /// Takes the next event from the start of `input`; `None`: all input was consumed and more is needed.
    ///
    /// # Errors
    /// The peer violated the protocol; the connection cannot be used any longer.
    pub(crate) fn next<'a>(&'a mut self, input: &mut &[u8]) -> Result<Option<Event<'a>>, Broken> {
        loop {
            if self.socket.get_ref().output.len() > UNREAD_BYTES_MAX {
                return Err(Broken("it does not read the replies to its messages"));
            }
            let message = match self.socket.read() {
                Ok(message) => message,
                Err(Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    if input.is_empty() {
                        return Ok(None);
                    }
                    let (piece, rest) = input.split_at(input.len().min(PIECE_BYTES));
                    *input = rest;
                    let wire = self.socket.get_mut();
                    wire.input.clear();
                    wire.input.extend_from_slice(piece);
                    wire.at = 0;
                    continue;
                }
                Err(Error::ConnectionClosed | Error::AlreadyClosed) => return Ok(Some(Event::Closed)),
                Err(Error::Capacity(_)) => return Err(Broken("a message above the maximum length")),
                Err(_) => return Err(Broken("invalid WebSocket frames")),
            };
            match message {
                Message::Binary(bytes) if self.form != Form::Base64 => self.message = bytes.into(),
                Message::Text(text) if self.form == Form::Base64 => {
                    self.message = decode(text.as_str()).ok_or(Broken("a message that is not base64"))?;
                }
                Message::Binary(_) | Message::Text(_) => return Err(Broken("a message of the wrong kind")),
                Message::Close(_) => {
                    // The library replies; an error only affects the peer.
                    let _ = self.socket.flush();
                    return Ok(Some(Event::Closed));
                }
                Message::Ping(_) => {
                    self.socket.flush().map_err(|_| Broken("the connection is already closed"))?;
                    continue;
                }
                Message::Pong(_) | Message::Frame(_) => continue,
            }
            // A message without a channel and an empty part of a stream are ignored.
            if !self.message.is_empty() {
                return Ok(Some(self.event()));
            }
        }
    }

    fn event(&self) -> Event<'_> {
        match (self.form, &self.message[..]) {
            (Form::Raw, bytes) => Event::Data { stream: 0, bytes },
            (Form::Binary { has_close_signal: true }, [CLOSE_SIGNAL, channel]) => {
                Event::Ended { stream: u32::from(*channel) }
            }
            (_, [channel, bytes @ ..]) => Event::Data { stream: u32::from(*channel), bytes },
            (_, []) => Event::Data { stream: 0, bytes: &[] },
        }
    }

    /// Sends data on a channel in messages of at most [`MESSAGE_BYTES_MAX`]; without data, sends one empty
    /// message.
    pub(crate) fn send(&mut self, channel: u32, bytes: &[u8]) {
        // One byte is the channel; base64 encodes three bytes as four.
        let room = match self.form {
            Form::Binary { .. } => MESSAGE_BYTES_MAX - 1,
            Form::Base64 => (MESSAGE_BYTES_MAX - 1) / 4 * 3,
            Form::Raw => MESSAGE_BYTES_MAX,
        };
        let parts = bytes.chunks(room);
        for part in parts.chain(bytes.is_empty().then_some(bytes)) {
            let message = match self.form {
                Form::Raw => Message::binary(part.to_vec()),
                Form::Binary { .. } => Message::binary([&[channel as u8], part].concat()),
                Form::Base64 => Message::text(format!("{channel}{}", BASE64.encode(part))),
            };
            // Fails only after a close, when the peer no longer reads.
            let _ = self.socket.send(message);
        }
    }

    /// Sends a close message with code 1000; v5 clients treat any other code as an error.
    pub(crate) fn close(&mut self) {
        let normal = CloseFrame { code: CloseCode::Normal, reason: "".into() };
        // An error means that the connection is already closed.
        let _ = self.socket.close(Some(normal));
        let _ = self.socket.flush();
    }

    /// Pending output; the caller removes the bytes that it has written from the start.
    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.socket.get_mut().output
    }
}

/// Decodes a message such as `0aGVsbG8=`: channel 0, then base64.
fn decode(text: &str) -> Option<Vec<u8>> {
    let Some(digit) = text.bytes().next() else { return Some(Vec::new()) };
    let channel = digit.checked_sub(b'0').filter(|channel| *channel <= 9)?;
    let mut message = BASE64.decode(&text.as_bytes()[1..]).ok()?;
    message.insert(0, channel);
    Some(message)
}
