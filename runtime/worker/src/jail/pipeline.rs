//! From a compressed blob to what its archive holds, through two jailed children and this process between them:
//!
//! ```text
//!   blob ─► `inmate decompress` ─► pipe ─► this process: count, hash ─► pipe ─► `inmate unpack` or `spool` ─► directory
//!           no file, no capability                                             one directory
//! ```
//! The digest is over the bytes that the second child is given, and is computed here: whoever takes over a decompressor can
//! change the stream, and then its digest is another. The bytes are copied, not spliced: a spliced page could be changed by
//! its writer after it was hashed.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use coracle_job::{Failure, FailureKind, read_message};
use coracle_sandbox::jail::Ended;
use nix::fcntl::{FcntlArg, fcntl};
use sha2::{Digest, Sha256};

use super::inmate::{Hear, PULSE, Passed, Said, Task, nonsense};
use super::start::{Inmate, jailing, why};
use crate::failure::{failure, invalid};
use crate::image_config::digest_text;
use crate::unpack::TOO_LONG;

/// Bytes of each pipe, the most an unprivileged process may ask for (/proc/sys/fs/pipe-max-size): fewer switches between the
/// processes. Smaller pipes do as well.
const PIPE_BYTES: i32 = 1 << 20;
/// One read and write.
const COPY_BYTES: usize = 128 << 10;

/// Of the thread that copies: it holds one buffer, on the heap.
const STACK_BYTES: usize = 128 << 10;

/// Decompresses `input` in one child and has another do `task` with what comes out, in `directory`; `hear` gets what that one
/// says. At most `bytes_max` bytes may come out.
pub(super) fn run(
    task: Task,
    directory: &Path,
    input: File,
    bytes_max: u64,
    pulse: &mut (dyn FnMut(u64) + Send),
    hear: Hear<'_>,
) -> Result<Passed, Failure> {
    let tried = |error: io::Error| failure(FailureKind::Internal, format!("make a pipe: {error}"));
    let (from, output) = io::pipe().map_err(tried)?;
    let (stdin, into) = io::pipe().map_err(tried)?;
    for pipe in [from.as_fd(), into.as_fd()] {
        // A user over the limit of pipe-user-pages-soft gets smaller pipes.
        let _ = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    }
    let position = input.try_clone().map_err(tried)?;
    let decompressor = Inmate::start(Task::Decompress, directory, input.as_fd(), Some(output.as_fd()))?;
    let reader = Inmate::start(task, directory, stdin.as_fd(), None)?;
    // Their ends: what stays open here would hide that a child has ended.
    drop((input, output, stdin));
    let Inmate { child: decompressor, said } = decompressor;
    std::thread::scope(|scope| {
        let pump = Pump { from, into, position, left: bytes_max, hash: Sha256::new() };
        let pumped = std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, move || pump.run(said, pulse))
            .map_err(tried)?;
        // However this ends, the child is gone then, and with it the end of the pipe that the thread writes to.
        let heard = reader.hear(hear);
        // What is left behind an archive's end is of no interest; a decompressor that has ended is left as it is.
        decompressor.kill();
        let pumped = pumped.join().map_err(|_| failure(FailureKind::Internal, "decompression: panicked"))?;
        let ended = decompressor.wait();
        let digest = pumped.map_err(|stopped| match (stopped, ended, &heard) {
            // It says why the stream ended early, of which the reader only sees the effect.
            (Stopped::Failed(failure), _, _) => failure,
            (Stopped::ByReader, _, Err(failure)) => failure.clone(),
            (Stopped::ByReader, _, Ok(())) => invalid("archive: not read to its end"),
            (Stopped::Silently, Ok(Ended::Signal(SIGKILL)), Err(failure)) => failure.clone(),
            (Stopped::Silently, Ok(ended), _) => why(ended),
            (Stopped::Silently, Err(error), _) => jailing(&error),
        });
        match (digest, heard) {
            (digest, Ok(())) => Ok(Passed { digest }),
            (Err(failure), Err(_)) => Err(failure),
            (Ok(_), Err(failure)) => Err(failure),
        }
    })
}

const SIGKILL: u8 = 9;

/// Why not all of a stream passed.
enum Stopped {
    /// The decompressor, or this process, says why.
    Failed(Failure),
    /// The reader has seen enough, or something that it refuses.
    ByReader,
    /// The decompressor ended without a word.
    Silently,
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

struct Pump {
    from: io::PipeReader,
    into: io::PipeWriter,
    /// The same open file as the decompressor's stdin: says how far that is.
    position: File,
    left: u64,
    hash: Sha256,
}

impl Pump {
    /// Copies until the decompressor has no more, or the reader wants no more; gives the digest of what passed.
    fn run(
        mut self,
        mut said: BufReader<io::PipeReader>,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<String, Stopped> {
        let broken = |op: &str, error: &io::Error| failure(FailureKind::Internal, format!("{op}: {error}"));
        let (mut buffer, mut pulsed) = (vec![0; COPY_BYTES], Instant::now());
        loop {
            let read = self.from.read(&mut buffer);
            let count = read.map_err(|error| broken("read the unpacked archive", &error))?;
            if count == 0 {
                break;
            }
            let left = self.left.checked_sub(count as u64);
            self.left = left.ok_or_else(|| invalid(format!("archive: {TOO_LONG}")))?;
            self.hash.update(&buffer[..count]);
            match self.into.write_all(&buffer[..count]) {
                Ok(()) => {}
                // It has seen enough, or something that it refuses: its own words count.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(Stopped::ByReader),
                Err(error) => return Err(broken("pass the unpacked archive on", &error).into()),
            }
            if pulsed.elapsed() >= PULSE {
                pulsed = Instant::now();
                // An archive that is a pipe has no position.
                if let Ok(bytes) = self.position.stream_position() {
                    pulse(bytes);
                }
            }
        }
        match read_message::<Said>(&mut said) {
            Ok(Some(Said::Decompressed)) => {}
            Ok(Some(Said::Failed(failure))) => return Err(failure.into()),
            Ok(None) => return Err(Stopped::Silently),
            Ok(Some(_)) | Err(_) => return Err(nonsense().into()),
        }
        // The reader sees the end only of a stream that is whole.
        drop(self.into);
        Ok(digest_text(&self.hash.finalize()))
    }
}
