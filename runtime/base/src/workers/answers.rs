//! Decoder of a worker's standard output. The module does no I/O: it takes bytes and returns complete
//! answers.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | length, little-endian; at most [`MESSAGE_BYTES_MAX`], otherwise the stream is aborted |
//! | 4 | length | an [`Answer`] in postcard |

use coracle_job::{Answer, MESSAGE_BYTES_MAX, MessageError, read_message};

/// Received bytes without the answers that were already returned.
#[derive(Default)]
pub(super) struct Answers {
    bytes: Vec<u8>,
}

impl Answers {
    /// Appends received bytes.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next answer, or `Ok(None)` if it has not arrived completely. After an error the rest of
    /// the stream cannot be decoded.
    pub(super) fn take(&mut self) -> Result<Option<Answer>, MessageError> {
        let Some((length, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(MessageError::TooLong(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let answer = read_message(&mut &self.bytes[..4 + length])?;
        self.bytes.drain(..4 + length);
        Ok(answer)
    }

    /// Whether the stream may end at this point, between two answers.
    pub(super) fn is_between(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::Answers;
    use coracle_job::{Answer, MESSAGE_BYTES_MAX, MessageError, Outcome, Progress, write_message};

    fn exchange() -> Vec<u8> {
        let mut bytes = Vec::new();
        for done in [0, 1, 300, u64::MAX] {
            write_message(
                &mut bytes,
                &Answer::Progress(Progress { bytes_done: done, ..Progress::default() }),
            )
            .unwrap();
        }
        write_message(&mut bytes, &Answer::Done(Outcome::Removed)).unwrap();
        bytes
    }

    fn drain(answers: &mut Answers, into: &mut Vec<String>) {
        while let Some(answer) = answers.take().unwrap() {
            into.push(format!("{answer:?}"));
        }
    }

    #[test]
    fn answers_do_not_depend_on_how_the_stream_is_split() {
        let bytes = exchange();
        let mut whole = Vec::new();
        let mut answers = Answers::default();
        answers.feed(&bytes);
        drain(&mut answers, &mut whole);
        assert_eq!(whole.len(), 5);
        assert!(answers.is_between());
        for cut in 0..=bytes.len() {
            let mut answers = Answers::default();
            let mut seen = Vec::new();
            answers.feed(&bytes[..cut]);
            drain(&mut answers, &mut seen);
            answers.feed(&bytes[cut..]);
            drain(&mut answers, &mut seen);
            assert_eq!(seen, whole, "cut at {cut}");
        }
    }

    #[test]
    fn oversized_and_malformed_answers_are_errors() {
        let mut answers = Answers::default();
        answers.feed(&(MESSAGE_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(matches!(answers.take(), Err(MessageError::TooLong(_))));
        let mut answers = Answers::default();
        answers.feed(b"\x03\0\0\0\xff\xff\xff");
        assert!(matches!(answers.take(), Err(MessageError::Damaged)));
    }
}
