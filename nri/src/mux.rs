//! The multiplexer: two logical byte streams over one socket (NRI 1.2), and the division of messages into frames.
//!
//! ```text
//!   | connection id, u32 | payload length, u32 | payload |       big endian
//! ```
//! Payloads of one id form one byte stream; message boundaries are independent of frames. Sent frames are limited in
//! length: the Go library reads a frame into a 4096-byte buffer and stops receiving after a larger frame (NRI 1.3).

use super::header::Header;

/// Connection id of the Plugin service, which the plugin provides.
pub(crate) const PLUGIN: u32 = 1;
/// Connection id of the Runtime service, which the runtime provides.
pub(crate) const RUNTIME: u32 = 2;

const HEADER_BYTES: usize = 8;

/// Maximum payload in bytes of a frame from a Go peer: header and data of the largest message.
pub(crate) const PAYLOAD_BYTES_MAX: usize = super::message::HEADER_BYTES + super::message::DATA_BYTES_MAX;

/// Maximum length in bytes of a message that is sent in one frame.
const WHOLE_BYTES_MAX: usize = 4096;

/// Divides a stream of bytes into payloads.
#[derive(Default)]
pub(crate) struct Reader {
    header: Header<HEADER_BYTES>,
    /// Number of payload bytes that have not arrived yet.
    left: usize,
}

/// Error: a frame of this length exceeds the limit; the connection must be closed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong(pub(crate) usize);

impl Reader {
    /// Processes bytes and calls `sink` with each part of a payload and its connection id.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut sink: impl FnMut(u32, &[u8])) -> Result<(), TooLong> {
        while !bytes.is_empty() {
            if !self.header.is_complete() {
                if self.header.complete(&mut bytes).is_none() {
                    return Ok(());
                }
                self.left = self.word(4) as usize;
                if self.left > PAYLOAD_BYTES_MAX {
                    return Err(TooLong(self.left));
                }
            }
            let count = bytes.len().min(self.left);
            if count > 0 {
                sink(self.word(0), &bytes[..count]);
            }
            bytes = &bytes[count..];
            self.left -= count;
            if self.left == 0 {
                self.header.clear();
            }
        }
        Ok(())
    }

    fn word(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.header.bytes()[at..at + 4]);
        u32::from_be_bytes(word)
    }
}

/// The frames of one ttrpc message: one frame up to 4096 bytes, otherwise one frame with the header and one with the
/// data.
pub(crate) fn frames(connection: u32, message: &[u8]) -> Vec<u8> {
    let (first, rest) = match message.len() <= WHOLE_BYTES_MAX {
        true => (message, &[][..]),
        false => message.split_at(super::message::HEADER_BYTES),
    };
    let mut frames = Vec::with_capacity(message.len() + 2 * HEADER_BYTES);
    for payload in [first, rest].into_iter().filter(|payload| !payload.is_empty()) {
        frames.extend(connection.to_be_bytes());
        frames.extend((payload.len() as u32).to_be_bytes());
        frames.extend(payload);
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], step: usize) -> Result<Vec<(u32, Vec<u8>)>, TooLong> {
        let mut reader = Reader::default();
        let mut streams: Vec<(u32, Vec<u8>)> = Vec::new();
        for part in bytes.chunks(step) {
            reader.feed(part, |id, bytes| match streams.iter_mut().find(|(known, _)| *known == id) {
                Some((_, stream)) => stream.extend(bytes),
                None => streams.push((id, bytes.to_vec())),
            })?;
        }
        Ok(streams)
    }

    #[test]
    fn streams_are_decoded_however_they_are_split() {
        let long = vec![7; 5000];
        let bytes =
            [frames(1, b"hello world"), frames(2, &long), frames(9, b"x"), vec![0, 0, 0, 1, 0, 0, 0, 0]];
        let bytes = bytes.concat();
        for step in [1, 3, 8, 9, 4096, 100_000] {
            let expected = vec![(1, b"hello world".to_vec()), (2, long.clone()), (9, b"x".to_vec())];
            assert_eq!(read(&bytes, step).unwrap(), expected, "in steps of {step}");
        }
    }

    #[test]
    fn a_message_is_never_in_a_frame_the_go_library_cannot_read() {
        for length in [10, 4095, 4096, 4097, 100_000] {
            let message = vec![1; length];
            let bytes = frames(1, &message);
            let first = u32::from_be_bytes(bytes[4..8].try_into().unwrap()) as usize;
            assert!(first <= 4096, "{length}: a first frame of {first}");
            assert_eq!(bytes.len(), length + if length <= 4096 { 8 } else { 16 });
        }
    }

    /// Tests rule NRI-R5 of docs/specs/nri.md.
    #[test]
    fn a_frame_above_the_limit_ends_the_connection() {
        let bytes = [0, 0, 0, 1, 255, 255, 255, 255];
        assert_eq!(read(&bytes, 8), Err(TooLong(0xffff_ffff)));
        let edge = [[0, 0, 0, 1], (PAYLOAD_BYTES_MAX as u32).to_be_bytes()].concat();
        assert!(read(&edge, 8).is_ok());
    }
}
