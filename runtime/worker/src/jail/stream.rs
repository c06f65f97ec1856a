//! A confined decompressor whose output this process reads: tables of contents, and the chunks of a pull of what changed.

use std::io::{self, Read};
use std::os::fd::OwnedFd;

use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;

use crate::failure::{pipe, thread_failure};

/// The decompressed bytes of an input. Dropping the value ends the decompressor.
pub(crate) struct Decompressed {
    output: io::PipeReader,
    #[cfg(not(test))]
    child: super::start::ConfinedChild,
}

impl Decompressed {
    /// Starts a decompressor of `input`, a file or a pipe.
    #[cfg(not(test))]
    pub(crate) fn start(input: OwnedFd) -> Result<Self, Failure> {
        use std::os::fd::AsFd;
        let (output, into) = pipe()?;
        // The mount point of its empty root: a directory that always exists.
        let directory = std::path::Path::new("/proc");
        let task = super::confined::Task::Decompress;
        let child = super::start::ConfinedChild::start(task, directory, input.as_fd(), Some(into.as_fd()))?;
        Ok(Self { output, child })
    }

    /// Decompresses in a thread: unit tests have no worker program.
    #[cfg(test)]
    pub(crate) fn start(input: OwnedFd) -> Result<Self, Failure> {
        let (output, mut into) = pipe()?;
        let copy = move || {
            let from = coracle_decompress::decompress(std::fs::File::from(input));
            drop(from.and_then(|mut from| io::copy(&mut from, &mut into)));
        };
        std::thread::Builder::new().spawn(copy).map_err(|error| thread_failure("decompresses", &error))?;
        Ok(Self { output })
    }

    /// Starts a decompressor of bytes in memory, which a thread passes to it.
    pub(crate) fn of(bytes: impl AsRef<[u8]> + Send + 'static) -> Result<Self, Failure> {
        /// Stack size in bytes of that thread.
        const STACK_BYTES: usize = 64 << 10;
        let (from, mut into) = pipe()?;
        // If the decompressor ends early, its output ends, too.
        let pass = move || drop(io::Write::write_all(&mut into, bytes.as_ref()));
        std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(pass)
            .map_err(|error| thread_failure("passes compressed data", &error))?;
        Self::start(OwnedFd::from(from))
    }

    /// Reads the end of the output and the decompressor's message.
    ///
    /// # Errors
    /// There is more output, or the input was not decompressed completely.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        match self.output.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => return Err(Failure::invalid("more data than expected")),
            Err(error) => {
                let text = format!("read decompressed data: {}", describe_io(&error));
                return Err(Failure::new(FailureKind::Internal, text));
            }
        }
        #[cfg(not(test))]
        self.child.hear(&mut |said| match said {
            super::confined::ChildMessage::Decompressed => Ok(true),
            _ => Err(super::confined::nonsense()),
        })?;
        Ok(())
    }
}

impl Read for Decompressed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.output.read(buffer)
    }
}
