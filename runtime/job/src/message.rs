//! Framing on a worker's stdin and stdout: a little-endian u32 length, then postcard.

use std::fmt;
use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message: an image record with a config at its limit (4 MiB, the largest a registry serves as manifest),
/// with room for its neighbours.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// A message could not be read or written.
#[derive(Debug)]
pub enum MessageError {
    /// The pipe.
    Io(io::Error),
    /// The peer announced so many bytes, more than are read.
    TooLong(usize),
    /// The bytes are not such a message.
    Damaged,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            Self::TooLong(bytes) => write!(f, "a message of {bytes} bytes, more than are read"),
            Self::Damaged => f.write_str("a message that cannot be decoded"),
        }
    }
}

impl std::error::Error for MessageError {}

/// Writes one message.
pub fn write_message(to: &mut impl Write, message: &impl Serialize) -> Result<(), MessageError> {
    let body = postcard::to_allocvec(message).map_err(|_| MessageError::Damaged)?;
    if body.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong(body.len()));
    }
    let length = (body.len() as u32).to_le_bytes();
    to.write_all(&length)
        .and_then(|()| to.write_all(&body))
        .and_then(|()| to.flush())
        .map_err(MessageError::Io)
}

/// Reads one message; `Ok(None)` at the end of the stream between two messages.
pub fn read_message<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>, MessageError> {
    read_message_within(from, MESSAGE_BYTES_MAX)
}

/// The same for messages that have at most `bytes_max` bytes: of a peer that is trusted with less memory.
pub fn read_message_within<T: DeserializeOwned>(
    from: &mut impl Read,
    bytes_max: usize,
) -> Result<Option<T>, MessageError> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(MessageError::Io(error)),
    }
    read_body(from, length, bytes_max).map(Some)
}

/// The rest of a message whose first four bytes, its length, were read already.
pub fn read_body<T: DeserializeOwned>(
    from: &mut impl Read,
    length: [u8; 4],
    bytes_max: usize,
) -> Result<T, MessageError> {
    let length = u32::from_le_bytes(length) as usize;
    if length > bytes_max {
        return Err(MessageError::TooLong(length));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).map_err(MessageError::Io)?;
    postcard::from_bytes(&body).map_err(|_| MessageError::Damaged)
}
