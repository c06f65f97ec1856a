//! Unpacks a compressed archive with two confined children and this process between them:
//!
//! ```text
//! blob ─► `decompress` ─► pipe ─► this process: count, hash ─► pipe ─► `unpack` or `spool` ─► directory
//!           no file, no capability                                       one directory
//! ```
//! The digest is computed by this process, over the bytes that the second child receives: a compromised
//! decompressor can change the stream, but then the digest differs. The bytes are copied and not spliced,
//! because the writer of a spliced page could change it after it was hashed.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use coracle_job::{Failure, FailureKind, read_message};
use coracle_manifest::digest_text;
use coracle_sandbox::describe_io;
use coracle_sandbox::jail::Ended;
use nix::fcntl::{FcntlArg, fcntl};
use sha2::{Digest, Sha256};

use super::confined::{ChildMessage, OnMessage, PULSE, StreamResult, Task, nonsense};
use super::start::{ConfinedChild, jailing, why};
use crate::failure::{pipe, thread_failure};
use crate::store::Room;
use crate::unpack::TOO_LONG;

/// Size of the pipes in bytes: the maximum for unprivileged processes (/proc/sys/fs/pipe-max-size), for fewer
/// context switches. Smaller pipes work, too.
const PIPE_BYTES: i32 = 1 << 20;
/// Buffer size of the copy in bytes.
const COPY_BYTES: usize = 128 << 10;

/// Stack size in bytes of the copying thread, whose buffer is on the heap.
const STACK_BYTES: usize = 128 << 10;

/// Number of bytes between two checks of the free space; smaller than any reserve.
const ROOM_CHECK_BYTES: u64 = 4 << 20;

/// Decompresses `input` in one child; another child executes `task` on the result in `directory`, and `hear` receives its
/// messages; its descriptor 3 is the second file, if there is one. At most `bytes_max` bytes are decompressed, and the reserve of
/// the file system ([`Room`]) stays free. `pulse` receives the position in `input`, or 0 if it is a pipe.
pub(super) fn run(
    task: Task,
    directory: &Path,
    (input, outline): (File, Option<&File>),
    bytes_max: u64,
    pulse: &mut (dyn FnMut(u64) + Send),
    hear: OnMessage<'_>,
) -> Result<StreamResult, Failure> {
    let (from, output) = pipe()?;
    let (stdin, into) = pipe()?;
    for pipe in [from.as_fd(), into.as_fd()] {
        // A user above the limit pipe-user-pages-soft gets smaller pipes.
        let _ = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    }
    let tried = |error: io::Error| {
        Failure::new(FailureKind::Internal, format!("duplicate a descriptor: {}", describe_io(&error)))
    };
    let position = input.try_clone().map_err(tried)?;
    let decompressor =
        ConfinedChild::start(Task::Decompress, directory, input.as_fd(), Some(output.as_fd()))?;
    let reader = ConfinedChild::start(task, directory, stdin.as_fd(), outline.map(|file| file.as_fd()))?;
    // The children's ends: if they stayed open here, the end of a child would not be noticed.
    drop((input, output, stdin));
    let ConfinedChild { child: decompressor, said } = decompressor;
    std::thread::scope(|scope| {
        let pump = Pump { from, into, position, directory, bytes_max, hash: Sha256::new() };
        let pumped = std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, move || pump.run(said, pulse))
            .map_err(|error| thread_failure("decompresses", &error))?;
        // In any case the child has ended after this, so the thread's pipe is closed.
        let heard = reader.hear(hear);
        // Data after the end of the archive is ignored; a decompressor that has exited is not affected.
        decompressor.kill();
        let pumped =
            pumped.join().map_err(|_| Failure::new(FailureKind::Internal, "decompression: panicked"))?;
        let ended = decompressor.wait();
        let digest = pumped.map_err(|stopped| match (stopped, ended, &heard) {
            // The thread's failure is the cause; the reader only sees that the stream ended early.
            (Stopped::Failed(failure), _, _) => failure,
            (Stopped::ByReader, _, Err(failure)) => failure.clone(),
            (Stopped::ByReader, _, Ok(())) => Failure::invalid("archive: not read completely"),
            (Stopped::Silently, Ok(Ended::Signal(SIGKILL)), Err(failure)) => failure.clone(),
            (Stopped::Silently, Ok(ended), _) => why(ended),
            (Stopped::Silently, Err(error), _) => jailing(&error),
        });
        match (digest, heard) {
            (digest, Ok(())) => Ok(StreamResult { digest }),
            (Err(failure), Err(_)) => Err(failure),
            (Ok(_), Err(failure)) => Err(failure),
        }
    })
}

const SIGKILL: u8 = 9;

/// The reason why a stream was not copied completely.
enum Stopped {
    /// The decompressor or this process failed.
    Failed(Failure),
    /// The reader closed its pipe, because it has finished or failed.
    ByReader,
    /// The decompressor ended without a message.
    Silently,
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The failure for an archive above the configured size limit.
fn too_long(bytes_max: u64) -> Failure {
    Failure::invalid(format!("archive: {TOO_LONG} of {bytes_max} ([image] layer_mib_max)"))
}

struct Pump<'a> {
    from: io::PipeReader,
    into: io::PipeWriter,
    /// Handle that shares its position with the decompressor's standard input, so that the position shows the
    /// progress.
    position: File,
    /// A directory on the target file system, for checks of the free space.
    directory: &'a Path,
    bytes_max: u64,
    hash: Sha256,
}

impl Pump<'_> {
    /// Copies until the decompressor ends or the reader closes its pipe; returns the digest of the copied
    /// data.
    fn run(
        mut self,
        mut said: BufReader<io::PipeReader>,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<String, Stopped> {
        let broken = |op: &str, error: &io::Error| {
            Failure::new(FailureKind::Internal, format!("{op}: {}", describe_io(error)))
        };
        let (mut buffer, mut pulsed) = (vec![0; COPY_BYTES], Instant::now());
        let (mut passed, mut looked_at) = (0_u64, 0_u64);
        loop {
            let read = self.from.read(&mut buffer);
            let count = read.map_err(|error| broken("read the decompressed archive", &error))?;
            if count == 0 {
                break;
            }
            passed = passed.saturating_add(count as u64);
            if passed > self.bytes_max {
                return Err(too_long(self.bytes_max).into());
            }
            if passed - looked_at >= ROOM_CHECK_BYTES {
                looked_at = passed;
                self.make_sure_of_room(passed)?;
            }
            self.hash.update(&buffer[..count]);
            match self.into.write_all(&buffer[..count]) {
                Ok(()) => {}
                // The reader has finished or failed; its own message counts.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(Stopped::ByReader),
                Err(error) => {
                    return Err(broken("write the decompressed archive to the parser", &error).into());
                }
            }
            if pulsed.elapsed() >= PULSE {
                pulsed = Instant::now();
                // An archive that is a pipe has no position.
                pulse(self.position.stream_position().unwrap_or_default());
            }
        }
        match read_message::<ChildMessage>(&mut said) {
            Ok(Some(ChildMessage::Decompressed)) => {}
            Ok(Some(ChildMessage::Failed(failure))) => return Err(failure.into()),
            Ok(None) => return Err(Stopped::Silently),
            Ok(Some(_)) | Err(_) => return Err(nonsense().into()),
        }
        // Closed only if the stream is complete, because the reader takes this as the end of the archive.
        drop(self.into);
        Ok(digest_text(&self.hash.finalize()))
    }

    /// Fails if only the reserve of the file system is free: other processes of the node, and the removal of
    /// this image, need space.
    fn make_sure_of_room(&self, passed: u64) -> Result<(), Failure> {
        match Room::at(self.directory) {
            Some(room) if room.is_used_up() => {
                let text = format!(
                    "archive: stopped after {passed} unpacked bytes (at most {} are allowed): {} bytes are free, {} of \
                     them are reserved",
                    self.bytes_max, room.free, room.reserve
                );
                Err(Failure::new(FailureKind::NoSpace, text))
            }
            // If the free space is unknown, a full disk is detected by the write.
            _ => Ok(()),
        }
    }
}
