//! The confined child processes that parse untrusted archives: their tasks and their messages.
//!
//! | task | reads | writes | root directory |
//! |---|---|---|---|
//! | decompress | stdin: a blob or an archive | descriptor 3: the decompressed data | empty |
//! | unpack, spool | stdin: a tar archive | the directory; descriptor 3: the outline of the archive, if it gets one | the directory |
//!
//! Each child reports its result on its standard output. The worker does not trust the result: the digest is
//! computed by the worker ([`super::pipeline`]), names are checked, and files are opened without following
//! links, only after the child has ended.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use coracle_chunked::outline::Purpose;
use coracle_decompress::{ZSTD_WINDOW_LOG_MAX, decompress};
use coracle_filelist::Sum;
use coracle_job::{Failure, FailureKind, Limits, write_message};
use coracle_sandbox::describe_io;
use coracle_sandbox::jail::{self, Root};
use serde::{Deserialize, Serialize};

#[cfg(not(test))]
use super::pipeline::run;
use crate::import::Piece;
use crate::unpack::{Unpacked, broken, unpack_to};

/// The first argument of a confined child.
pub(crate) const SUBCOMMAND: &str = "confined";
/// Limit of a parser's address space in bytes: the metadata and the names of a layer.
const MEMORY_BYTES_MAX: u64 = 384 << 20;
/// Limit of a decompressor's address space in bytes: the largest zstd window and its buffers.
const DECOMPRESS_BYTES_MAX: u64 = (1 << ZSTD_WINDOW_LOG_MAX) + (128 << 20);
/// Limit of open files: the directories of a path, and one file.
const DESCRIPTORS_MAX: u64 = 64;
/// Interval of keep-alive messages.
pub(super) const PULSE: Duration = Duration::from_millis(200);
/// Buffer size in bytes of a decompressor.
const COPY_BYTES: usize = 128 << 10;
/// The inherited descriptor to which a decompressor writes.
const OUTPUT: &str = "/proc/self/fd/3";

/// The child's task, whose input is its standard input.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// Decompress standard input.
    Decompress,
    /// Unpack a layer's archive into the current directory.
    Unpack {
        limits: Limits,
        /// Whether this is the lowest layer of its image.
        is_lowest: bool,
        /// The purpose of the outline that is written, too.
        outline: Option<Purpose>,
    },
    /// Write the files of an archive of images to the current directory, at most this number of bytes.
    Spool(u64),
}

/// A message of the child.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ChildMessage {
    /// All input was decompressed and written.
    Decompressed,
    /// Keep-alive message, sent if the child has no other message to send.
    Busy,
    /// An entry of an archive of images.
    Piece(Piece),
    /// Checksums of files of the layer.
    Sums(Vec<Sum>),
    /// The layer was unpacked.
    Unpacked(Unpacked),
    /// The archive was spooled.
    Spooled,
    /// The task of the child failed.
    Failed(Failure),
}

/// The result of the input stream for a child that succeeded.
pub(super) struct StreamResult {
    /// Digest `sha256:…` of the whole stream, or the reason why the stream was not read completely.
    pub(super) digest: Result<String, Failure>,
}

/// Unpacks a layer's archive into `directory` in confined processes; returns the result and the digest. `outline` gets the
/// outline of the archive. `pulse` receives the number of bytes of `blob` that were read, or 0 if it is a pipe.
pub(crate) fn unpack(
    directory: &Path,
    blob: File,
    limits: &Limits,
    is_lowest: bool,
    outline: Option<(&File, Purpose)>,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(Unpacked, String), Failure> {
    let (mut unpacked, mut sums) = (None, Vec::new());
    let (file, purpose) = outline.unzip();
    let task = Task::Unpack { limits: *limits, is_lowest, outline: purpose };
    let passed = run(task, directory, (blob, file), limits.layer_bytes_max, pulse, &mut |said| match said {
        ChildMessage::Busy => Ok(false),
        ChildMessage::Sums(more) if (sums.len() + more.len()) as u64 <= limits.layer_entries_max => {
            sums.extend(more);
            Ok(false)
        }
        ChildMessage::Unpacked(found) => {
            unpacked = Some(found);
            Ok(true)
        }
        _ => Err(nonsense()),
    })?;
    let mut unpacked = unpacked.ok_or_else(nonsense)?;
    unpacked.sums = sums;
    Ok((unpacked, passed.digest?))
}

/// Spools an archive of images into `directory` in confined processes; `take` receives each entry. `pulse`
/// receives the number of bytes of `archive` that were read.
pub(crate) fn spool(
    directory: &Path,
    archive: File,
    bytes_max: u64,
    take: &mut dyn FnMut(Piece) -> Result<(), Failure>,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(), Failure> {
    // The limit applies to its files, because an archive also has headers and padding.
    let task = Task::Spool(bytes_max);
    let pulse = &mut |bytes| {
        // The progress of a pipe is unknown.
        if bytes > 0 {
            pulse(bytes);
        }
    };
    run(task, directory, (archive, None), u64::MAX, pulse, &mut |said| match said {
        ChildMessage::Busy => Ok(false),
        ChildMessage::Piece(piece) => take(piece).map(|()| false),
        ChildMessage::Spooled => Ok(true),
        _ => Err(nonsense()),
    })
    .map(drop)
}

pub(super) fn nonsense() -> Failure {
    Failure::new(FailureKind::Internal, "unexpected message of the process that parses the archive")
}

/// A handler of messages; returns whether the message was the last one.
pub(super) type OnMessage<'a> = &'a mut dyn FnMut(ChildMessage) -> Result<bool, Failure>;

/// Executes the task in this process, without confinement: unit tests have no worker program.
#[cfg(test)]
fn run(
    task: Task,
    directory: &Path,
    (input, outline): (File, Option<&File>),
    bytes_max: u64,
    _pulse: &mut (dyn FnMut(u64) + Send),
    hear: OnMessage<'_>,
) -> Result<StreamResult, Failure> {
    let mut stream = Vec::new();
    let from = decompress(input).map_err(broken)?;
    from.take(bytes_max.saturating_add(1)).read_to_end(&mut stream).map_err(broken)?;
    if stream.len() as u64 > bytes_max {
        return Err(Failure::invalid(format!("archive: {}", crate::unpack::TOO_LONG)));
    }
    let mut heard = Ok(false);
    let outline = outline.map(|file| file.try_clone().map_err(broken)).transpose()?;
    let say = &mut |said| heard = heard.clone().and_then(|_| hear(said));
    let said = perform(task, directory, &stream[..], outline, say);
    heard?;
    match said {
        ChildMessage::Failed(failure) => return Err(failure),
        said => hear(said)?,
    };
    Ok(StreamResult { digest: Ok(coracle_manifest::digest_of(&stream)) })
}

fn task(mut arguments: impl Iterator<Item = OsString>) -> Option<Task> {
    let kind = arguments.next()?;
    let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
    match kind.to_str()? {
        "decompress" => Some(Task::Decompress),
        "unpack" => {
            let (layer_bytes_max, layer_entries_max) = (number()?, number()?);
            let limits = Limits { layer_bytes_max, layer_entries_max, ..Limits::default() };
            let is_lowest = number()? != 0;
            let outline = match number()? {
                0 => None,
                1 => Some(Purpose::Neighbours),
                _ => Some(Purpose::Headers),
            };
            Some(Task::Unpack { limits, is_lowest, outline })
        }
        "spool" => Some(Task::Spool(number()?)),
        _ => None,
    }
}

/// Main function of the child; reports failures on standard output.
pub(crate) fn live(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(task) = task(arguments) else {
        eprintln!("{SUBCOMMAND}: decompress | unpack BYTES ENTRIES LOWEST OUTLINE | spool BYTES");
        return ExitCode::FAILURE;
    };
    let last = match confine(task) {
        Ok(output) => perform_and_tell(task, output),
        // Not one byte was read: an archive is parsed only if the confinement is complete.
        Err(why) => ChildMessage::Failed(super::not_without(&why)),
    };
    match write_message(&mut std::io::stdout(), &last) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Confines this process permanently; returns the file of descriptor 3. The error names the step that
/// failed.
fn confine(task: Task) -> Result<Option<File>, String> {
    let bytes_max = match task {
        // It writes only to the pipe, to which this limit does not apply.
        Task::Decompress => 0,
        Task::Unpack { limits: Limits { layer_bytes_max, .. }, .. } => layer_bytes_max,
        Task::Spool(bytes_max) => bytes_max,
    };
    // One byte more, so that the task's own error precedes the kernel's signal.
    let file_bytes_max = bytes_max.saturating_add(1);
    let has_output = matches!(task, Task::Decompress | Task::Unpack { outline: Some(_), .. });
    jail::close_descriptors(if has_output { 4 } else { 3 }).map_err(|error| error.to_string())?;
    let open = || File::options().write(true).open(OUTPUT);
    let output = has_output.then(open).transpose();
    let output = output.map_err(|error| format!("open {OUTPUT}: {}", describe_io(&error)))?;
    let memory = if let Task::Decompress = task { DECOMPRESS_BYTES_MAX } else { MEMORY_BYTES_MAX };
    let limits =
        jail::Limits { memory_bytes: memory, descriptors: DESCRIPTORS_MAX, file_bytes: file_bytes_max };
    jail::limit(limits).map_err(|error| error.to_string())?;
    if let Task::Unpack { .. } = task {
        // Files are created with exactly the requested mode.
        rustix::process::umask(rustix::fs::Mode::empty());
    }
    match task {
        Task::Decompress => {
            super::shut_in(Root::Empty, &[], super::DECOMPRESS_CALLS).map_err(|error| error.to_string())?;
        }
        Task::Unpack { .. } | Task::Spool(_) => {
            super::shut_in(Root::WorkingDirectory, &super::UNPACK, super::UNPACK_CALLS)
                .map_err(|error| error.to_string())?;
        }
    }
    Ok(output)
}

fn perform_and_tell(task: Task, output: Option<File>) -> ChildMessage {
    let input = std::io::stdin().lock();
    match (task, output) {
        (Task::Decompress, Some(output)) => decompress_to(input, output),
        (task, output) => perform(task, Path::new("."), input, output, &mut |said| {
            if write_message(&mut std::io::stdout(), &said).is_err() {
                std::process::exit(1); // the worker has ended
            }
        }),
    }
}

/// Decompresses standard input; returns the last message.
fn decompress_to(input: impl Read, mut output: File) -> ChildMessage {
    let mut buffer = vec![0; COPY_BYTES];
    let copy = || -> std::io::Result<()> {
        let mut from = decompress(input)?;
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                count => match output.write_all(&buffer[..count]) {
                    // The reader has stopped; its own message has the reason.
                    Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                    written => written?,
                },
            }
        }
    };
    match copy() {
        Ok(()) => ChildMessage::Decompressed,
        Err(error) => ChildMessage::Failed(broken(error)),
    }
}

/// Executes the task; returns the last message.
fn perform(
    task: Task,
    directory: &Path,
    input: impl Read,
    outline: Option<File>,
    say: &mut dyn FnMut(ChildMessage),
) -> ChildMessage {
    let say = std::cell::RefCell::new(say);
    let input = Pulsing { inner: input, said: Instant::now(), say: &say };
    let done = match task {
        Task::Decompress => Err(nonsense()),
        Task::Unpack { limits, is_lowest, outline: purpose } => {
            let outline = outline.zip(purpose);
            let mut tell = |sums| say.borrow_mut()(ChildMessage::Sums(sums));
            unpack_to(directory, input, &limits, is_lowest, outline, &mut tell).map(ChildMessage::Unpacked)
        }
        Task::Spool(bytes_max) => {
            let mut take = |piece| say.borrow_mut()(ChildMessage::Piece(piece));
            crate::import::scatter(directory, input, bytes_max, &mut take).map(|()| ChildMessage::Spooled)
        }
    };
    done.unwrap_or_else(ChildMessage::Failed)
}

/// A reader that sends keep-alive messages; the process ends if the worker no longer receives them.
struct Pulsing<'a, 'b, R> {
    inner: R,
    said: Instant,
    say: &'a std::cell::RefCell<&'b mut dyn FnMut(ChildMessage)>,
}

impl<R: Read> Read for Pulsing<'_, '_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if self.said.elapsed() >= PULSE {
            self.said = Instant::now();
            self.say.borrow_mut()(ChildMessage::Busy);
        }
        Ok(count)
    }
}
