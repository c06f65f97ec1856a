//! Framing of messages on a worker's standard input and output: a little-endian u32 length, then postcard.

use std::fmt;
use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of a message in bytes: an image record with a config of the maximum size (4 MiB, the largest
/// manifest that registries serve) and the other fields.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// The reason why a message could not be read or written.
#[derive(Debug)]
pub enum MessageError {
    /// I/O error of the pipe or socket.
    Io(io::Error),
    /// The peer announced a message of this size, which exceeds the maximum.
    TooLong(usize),
    /// The bytes cannot be decoded.
    Damaged,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            Self::TooLong(bytes) => write!(f, "a message of {bytes} bytes, which is above the maximum"),
            Self::Damaged => f.write_str("a message that cannot be decoded"),
        }
    }
}

impl std::error::Error for MessageError {}

impl From<MessageError> for io::Error {
    /// Converts to the I/O error itself, or to one with the text of the error.
    fn from(error: MessageError) -> io::Error {
        match error {
            MessageError::Io(error) => error,
            MessageError::TooLong(_) | MessageError::Damaged => io::Error::other(error.to_string()),
        }
    }
}

/// Writes one message.
///
/// # Errors
/// [`MessageError::Io`] if writing fails; [`MessageError::TooLong`] for a message above
/// [`MESSAGE_BYTES_MAX`].
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
///
/// # Errors
/// [`MessageError::Io`] if reading fails or the stream ends within a message; [`MessageError::TooLong`] for a
/// message above [`MESSAGE_BYTES_MAX`]; [`MessageError::Damaged`] if it cannot be decoded.
pub fn read_message<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>, MessageError> {
    read_message_within(from, MESSAGE_BYTES_MAX)
}

/// Reads one message of at most `bytes_max` bytes, like [`read_message`]. For peers that are permitted less
/// memory.
///
/// # Errors
/// Those of [`read_message`], with `bytes_max` as the maximum.
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

/// Reads the rest of a message after its length, the first four bytes.
///
/// # Errors
/// Those of [`read_message`].
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_are_too_long_damaged_or_cut_are_refused() {
        let read = |bytes: &[u8]| read_message_within::<String>(&mut &bytes[..], 100);
        let mut right = Vec::new();
        write_message(&mut right, &"text").unwrap();
        assert_eq!(read(&right).unwrap().as_deref(), Some("text"));
        assert!(read(b"").unwrap().is_none());
        for cut in 4..right.len() {
            assert!(matches!(read(&right[..cut]), Err(MessageError::Io(_))), "{cut} bytes");
        }
        // Nothing is allocated for a length that is not permitted.
        assert!(matches!(read(&u32::MAX.to_le_bytes()), Err(MessageError::TooLong(0xffff_ffff))));
        assert!(matches!(read(&[101, 0, 0, 0]), Err(MessageError::TooLong(101))));
        // A text that is longer than the message.
        assert!(matches!(read(&[2, 0, 0, 0, 200, 1]), Err(MessageError::Damaged)));
        let long = "x".repeat(MESSAGE_BYTES_MAX);
        let mut written = Vec::new();
        assert!(matches!(write_message(&mut written, &long), Err(MessageError::TooLong(_))));
        assert!(written.is_empty());
    }
}
