//! Limits the length of strings and numbers in JSON, of which a parser keeps one at a time in memory.

use std::io::{self, Read};

/// A reader of JSON that fails at a string or number of more than a number of bytes, or when all of it is too long.
pub(crate) struct Bounded<R> {
    inner: R,
    /// Number of bytes that may still be read.
    left: u64,
    /// Maximum length in bytes of one string or number.
    token_bytes_max: usize,
    /// Length of the current string or number in bytes.
    token: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Outside,
    String,
    Escape,
}

impl<R: Read> Bounded<R> {
    pub(crate) fn new(inner: R, bytes_max: u64, token_bytes_max: usize) -> Self {
        Self { inner, left: bytes_max, token_bytes_max, token: 0, state: State::Outside }
    }

    fn pass(&mut self, byte: u8) {
        self.token += 1;
        self.state = match (self.state, byte) {
            (State::Outside, b'"') => {
                self.token = 0;
                State::String
            }
            (State::Outside, b',' | b':' | b'{' | b'}' | b'[' | b']' | b'\n') => {
                self.token = 0;
                State::Outside
            }
            (State::Outside, _) => State::Outside,
            (State::String, b'\\') => State::Escape,
            (State::String, b'"') => State::Outside,
            (State::String | State::Escape, _) => State::String,
        };
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let too_long = |what: String| io::Error::new(io::ErrorKind::FileTooLarge, what);
        self.left =
            self.left.checked_sub(count as u64).ok_or_else(|| too_long("it is too long".to_owned()))?;
        for byte in &buffer[..count] {
            self.pass(*byte);
            if self.token > self.token_bytes_max {
                return Err(too_long(format!("a value of more than {} bytes", self.token_bytes_max)));
            }
        }
        Ok(count)
    }
}
