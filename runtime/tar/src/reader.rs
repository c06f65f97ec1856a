//! Reads an archive from a stream: passes its blocks to the parser, and the content of entries to the caller.

use std::io::{self, BufRead, Read};

use crate::header::{BLOCK_BYTES, Block};
use crate::{Entry, Event, Parser, Problem, TOO_LONG};

/// A reader of an archive. [`Reader::next`] returns the entries; until the next one, the reader itself reads the stored bytes of
/// the entry, its [pieces](Entry::pieces) one after the other.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    parser: Parser,
    /// Number of bytes of the current entry that were not read.
    left: u64,
    /// Number of padding bytes after the body of the entry.
    padding: u64,
    /// Number of bytes before the current block.
    position: u64,
}

impl<R: BufRead> Reader<R> {
    /// A reader of the archive that begins with the next byte of `input`.
    pub fn new(input: R) -> Self {
        Self { input, parser: Parser::default(), left: 0, padding: 0, position: 0 }
    }

    /// Skips the rest of the current entry and returns the next one; `None` at the end of the archive.
    ///
    /// # Errors
    /// Errors of the input; [`io::ErrorKind::InvalidData`] with the position if the archive is invalid,
    /// [`io::ErrorKind::FileTooLarge`] if what describes an entry is too long, [`io::ErrorKind::UnexpectedEof`] if it is truncated.
    #[allow(
        clippy::should_implement_trait,
        reason = "a failed reader must not be asked again, and an entry has content"
    )]
    pub fn next(&mut self) -> io::Result<Option<Entry>> {
        if self.skip(self.left)? > 0 {
            return Err(truncated());
        }
        self.left = 0;
        if self.skip(self.padding)? > 0 {
            return Ok(None);
        }
        self.padding = 0;
        let mut block = [0; BLOCK_BYTES];
        loop {
            match self.block(&mut block)? {
                0 => {
                    self.parser.finish().map_err(|_| truncated())?;
                    return Ok(None);
                }
                BLOCK_BYTES => {}
                _ => return Err(truncated()),
            }
            let event = self.parser.feed(&block).map_err(|problem| self.invalid(problem))?;
            self.position += BLOCK_BYTES as u64;
            match event {
                Event::More => {}
                Event::End => return Ok(None),
                Event::Entry(entry) => {
                    self.left = entry.stored;
                    self.padding = entry.stored.next_multiple_of(BLOCK_BYTES as u64) - entry.stored;
                    return Ok(Some(*entry));
                }
            }
        }
    }

    /// Number of bytes before the current block: 0 if an error concerns the first header.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Whether a block of zeros ended the archive: without it, the archive may have been truncated between two entries.
    pub fn has_end(&self) -> bool {
        self.parser.has_end()
    }

    /// The input; the caller must not read from it.
    pub fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// The input, whose next byte is the one after the end of the archive.
    pub fn into_inner(self) -> R {
        self.input
    }

    /// Skips `count` bytes; returns how many of them the input lacks.
    fn skip(&mut self, count: u64) -> io::Result<u64> {
        let mut left = count;
        while left > 0 {
            let available = self.input.fill_buf()?.len();
            if available == 0 {
                break;
            }
            let skipped = usize::try_from(left).map_or(available, |left| left.min(available));
            self.input.consume(skipped);
            self.position += skipped as u64;
            left -= skipped as u64;
        }
        Ok(left)
    }

    /// Reads a block; returns fewer bytes only at the end of the input.
    fn block(&mut self, block: &mut Block) -> io::Result<usize> {
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match self.input.read(&mut block[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn invalid(&self, problem: Problem) -> io::Error {
        let text = format!("{problem} (at byte {})", self.position);
        let kind = if problem == TOO_LONG { io::ErrorKind::FileTooLarge } else { io::ErrorKind::InvalidData };
        io::Error::new(kind, text)
    }
}

impl<R: BufRead> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if most == 0 {
            return Ok(0);
        }
        let count = self.input.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(truncated());
        }
        self.left -= count as u64;
        self.position += count as u64;
        Ok(count)
    }
}

fn truncated() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "truncated")
}
