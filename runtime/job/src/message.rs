//! Framing of messages on a worker's standard input and output: a little-endian u32 length, then postcard.

use std::fmt;
use std::io::{self, Read, Write};

use postcard::de_flavors::{Flavor, Slice};
use postcard::{Deserializer, Error};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of a message in bytes: an image record with a config of the maximum size (4 MiB, the largest
/// manifest that registries serve) and the other fields.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Maximum memory in bytes that a message, record or index may need when it is decoded: both files of users of the maximum size, each
/// byte of which is counted as [`ITEM_BYTES`], and as many digests as a message can have.
const DECODED_BYTES_MAX: usize = 64 << 20;

/// The memory that one byte of input makes at most: an empty text or list, or an option without a value.
const ITEM_BYTES: usize = size_of::<String>();

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
    decode(&body).map_err(|_| MessageError::Damaged)
}

/// Decodes the body of a message, record or index. Its size does not bound what it makes: a list of empty texts needs 24 times its size.
///
/// # Errors
/// The decoder's error; [`Error::DeserializeUnexpectedEnd`] also for a body that would need more than 64 MiB of memory.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    T::deserialize(&mut Deserializer::from_flavor(Counted {
        input: Slice::new(body),
        left: DECODED_BYTES_MAX,
    }))
}

/// Input of the decoder that ends when what was read may have made [`DECODED_BYTES_MAX`]. Numbers, lengths and tags are read as single
/// bytes, the content of texts as a whole.
struct Counted<'de> {
    input: Slice<'de>,
    left: usize,
}

impl Counted<'_> {
    fn count(&mut self, bytes: usize) -> Result<(), Error> {
        self.left = self.left.checked_sub(bytes).ok_or(Error::DeserializeUnexpectedEnd)?;
        Ok(())
    }
}

impl<'de> Flavor<'de> for Counted<'de> {
    type Remainder = &'de [u8];
    type Source = &'de [u8];

    fn pop(&mut self) -> Result<u8, Error> {
        self.count(ITEM_BYTES)?;
        self.input.pop()
    }

    fn size_hint(&self) -> Option<usize> {
        self.input.size_hint()
    }

    fn try_take_n(&mut self, count: usize) -> Result<&'de [u8], Error> {
        self.count(count)?;
        self.input.try_take_n(count)
    }

    fn finalize(self) -> Result<&'de [u8], Error> {
        self.input.finalize()
    }
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

    /// Finding S3 in the lists of messages: an empty text is one byte of input and 24 of memory.
    #[test]
    fn lists_that_make_more_memory_than_is_permitted_are_refused() {
        let read = |list: &Vec<&str>| {
            let mut bytes = Vec::new();
            write_message(&mut bytes, list).unwrap();
            read_message::<Vec<String>>(&mut bytes.as_slice())
        };
        for count in [16384, DECODED_BYTES_MAX / ITEM_BYTES - 4] {
            assert_eq!(read(&vec![""; count]).unwrap().map(|list| list.len()), Some(count));
        }
        for count in [DECODED_BYTES_MAX / ITEM_BYTES, MESSAGE_BYTES_MAX - 4] {
            assert!(matches!(read(&vec![""; count]), Err(MessageError::Damaged)), "{count}");
        }
        // Long texts are counted by their length, so that as much of them as a message can have is read.
        let digests =
            vec!["sha256:0123456789012345678901234567890123456789012345678901234567890123"; 100_000];
        assert_eq!(read(&digests).unwrap().map(|list| list.len()), Some(100_000));
    }
}
