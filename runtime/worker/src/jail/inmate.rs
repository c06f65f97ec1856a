//! The jailed children: what they are asked, what they do and what they say.
//!
//! | task | reads | writes | root |
//! |---|---|---|---|
//! | decompress | stdin: a blob or an archive | descriptor 3: what it unpacks to | empty |
//! | unpack, spool | stdin: a tar archive | the directory | the directory |
//!
//! Each says on its stdout how it ended. What it says is not trusted more than the archive: the digest is computed outside
//! ([`super::pipeline`]), names are checked, files are opened without following links, and only once it has ended.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, Limits, write_message};
use coracle_sandbox::jail::Root;
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};

#[cfg(not(test))]
use super::pipeline::run;
use crate::failure::failure;
use crate::import::Piece;
use crate::unpack::{self, Unpacked};

/// The first argument.
pub(crate) const SUBCOMMAND: &str = "inmate";
/// Most memory: a zstd window of 128 MiB, twice, and names.
const MEMORY_BYTES_MAX: u64 = 384 << 20;
/// Open files: directories on the way down, one file.
const DESCRIPTORS_MAX: u64 = 64;
/// From one sign of life to the next.
pub(super) const PULSE: Duration = Duration::from_millis(200);
/// One read and write of a decompressor.
const COPY_BYTES: usize = 128 << 10;
/// Where a decompressor writes to, as it is inherited.
const OUTPUT: &str = "/proc/self/fd/3";

/// What it is to do with its stdin.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// To decompress it.
    Decompress,
    /// A layer's archive, into the current directory.
    Unpack(Limits),
    /// Files of an archive of images, into the current directory; at most so many bytes.
    Spool(u64),
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// All of the input was decompressed and written.
    Decompressed,
    /// A sign of life.
    Busy,
    /// Something an archive of images holds.
    Piece(Piece),
    /// The layer is all there.
    Unpacked(Unpacked),
    /// The archive is all there.
    Spooled,
    /// It is not.
    Failed(Failure),
}

/// What came of a stream that a child has read to its satisfaction.
pub(super) struct Passed {
    /// `sha256:…` of all of it; or why not all of it passed.
    pub(super) digest: Result<String, Failure>,
}

/// Unpacks a layer's archive into `directory`, in jails; gives what came of it and its digest. `pulse` hears of bytes of
/// `blob` that were read.
pub(crate) fn unpack(
    directory: &Path,
    blob: File,
    limits: &Limits,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(Unpacked, String), Failure> {
    let mut unpacked = None;
    let task = Task::Unpack(*limits);
    let passed = run(task, directory, blob, limits.layer_bytes_max, pulse, &mut |said| match said {
        Said::Busy => Ok(false),
        Said::Unpacked(found) => {
            unpacked = Some(found);
            Ok(true)
        }
        _ => Err(nonsense()),
    })?;
    Ok((unpacked.ok_or_else(nonsense)?, passed.digest?))
}

/// Writes the files of an archive of images into `directory`, in jails; `take` gets each piece. `pulse` hears of bytes of
/// `archive` that were read.
pub(crate) fn spool(
    directory: &Path,
    archive: File,
    bytes_max: u64,
    take: &mut dyn FnMut(Piece) -> Result<(), Failure>,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(), Failure> {
    // Its files are what is bounded: an archive has headers and padding, too.
    let task = Task::Spool(bytes_max);
    run(task, directory, archive, u64::MAX, pulse, &mut |said| match said {
        Said::Busy => Ok(false),
        Said::Piece(piece) => take(piece).map(|()| false),
        Said::Spooled => Ok(true),
        _ => Err(nonsense()),
    })
    .map(drop)
}

pub(super) fn nonsense() -> Failure {
    failure(FailureKind::Internal, "the process that reads the archive said something else than it should")
}

/// Hears what is said until `hear` says that it was the last.
pub(super) type Hear<'a> = &'a mut dyn FnMut(Said) -> Result<bool, Failure>;

/// Unit tests have no program to start, and no jail: the same work in this process.
#[cfg(test)]
fn run(
    task: Task,
    directory: &Path,
    input: File,
    bytes_max: u64,
    _pulse: &mut (dyn FnMut(u64) + Send),
    hear: Hear<'_>,
) -> Result<Passed, Failure> {
    let mut stream = Vec::new();
    let from = unpack::decompress(input).map_err(unpack::broken)?;
    from.take(bytes_max.saturating_add(1)).read_to_end(&mut stream).map_err(unpack::broken)?;
    if stream.len() as u64 > bytes_max {
        return Err(crate::failure::invalid(format!("archive: {}", unpack::TOO_LONG)));
    }
    let mut heard = Ok(false);
    let said =
        perform(task, directory, &stream[..], &mut |said| heard = heard.clone().and_then(|_| hear(said)));
    heard?;
    match said {
        Said::Failed(failure) => return Err(failure),
        said => hear(said)?,
    };
    Ok(Passed { digest: Ok(crate::image_config::digest_of(&stream)) })
}

fn task(mut arguments: impl Iterator<Item = OsString>) -> Option<Task> {
    let kind = arguments.next()?;
    let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
    match kind.to_str()? {
        "decompress" => Some(Task::Decompress),
        "unpack" => {
            let (layer_bytes_max, layer_entries_max) = (number()?, number()?);
            Some(Task::Unpack(Limits { layer_bytes_max, layer_entries_max, ..Limits::default() }))
        }
        "spool" => Some(Task::Spool(number()?)),
        _ => None,
    }
}

/// The child's life. It says why it failed, on its stdout.
pub(crate) fn live(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(task) = task(arguments) else {
        eprintln!("{SUBCOMMAND}: decompress | unpack BYTES ENTRIES | spool BYTES");
        return ExitCode::FAILURE;
    };
    let last = match confine(task) {
        Ok(output) => perform_and_tell(task, output),
        // Not one byte was read: an archive is read in the whole jail or not at all.
        Err(why) => Said::Failed(super::not_without(&why, "archives are not read")),
    };
    match write_message(&mut std::io::stdout(), &last) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Confines this process for good, or fails; gives the decompressor's output.
fn confine(task: Task) -> Result<Option<File>, String> {
    let bytes_max = match task {
        // It has nothing to write to but the pipe, which is no file in the sense of this limit.
        Task::Decompress => 0,
        Task::Unpack(Limits { layer_bytes_max, .. }) => layer_bytes_max,
        Task::Spool(bytes_max) => bytes_max,
    };
    // One byte more, so that our own words come before the kernel's signal.
    let file_bytes_max = bytes_max.saturating_add(1);
    let first = if let Task::Decompress = task { 4 } else { 3 };
    coracle_sandbox::jail::close_descriptors(first).map_err(|error| error.to_string())?;
    for (resource, most) in [
        (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, file_bytes_max),
    ] {
        setrlimit(resource, most, most).map_err(|errno| format!("set {resource:?}: {errno}"))?;
    }
    if let Task::Unpack(_) = task {
        // What is made has the mode that is asked for.
        rustix::process::umask(rustix::fs::Mode::empty());
    }
    match task {
        Task::Decompress => {
            let output = File::options().write(true).open(OUTPUT);
            let output = output.map_err(|error| format!("open {OUTPUT}: {error}"))?;
            super::shut_in(Root::Empty, &[], super::DECOMPRESS_CALLS).map_err(|error| error.to_string())?;
            Ok(Some(output))
        }
        Task::Unpack(_) | Task::Spool(_) => {
            super::shut_in(Root::WorkingDirectory, &super::UNPACK, super::UNPACK_CALLS)
                .map_err(|error| error.to_string())?;
            Ok(None)
        }
    }
}

fn perform_and_tell(task: Task, output: Option<File>) -> Said {
    let input = std::io::stdin().lock();
    match output {
        Some(output) => decompress(input, output),
        None => perform(task, Path::new("."), input, &mut |said| {
            if write_message(&mut std::io::stdout(), &said).is_err() {
                std::process::exit(1); // nobody hears it any more
            }
        }),
    }
}

/// Decompresses; gives the last word.
fn decompress(input: impl Read, mut output: File) -> Said {
    let mut buffer = vec![0; COPY_BYTES];
    let copy = || -> std::io::Result<()> {
        let mut from = unpack::decompress(input)?;
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                count => match output.write_all(&buffer[..count]) {
                    // The worker has seen enough: what ended it is said elsewhere.
                    Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                    written => written?,
                },
            }
        }
    };
    match copy() {
        Ok(()) => Said::Decompressed,
        Err(error) => Said::Failed(unpack::broken(error)),
    }
}

/// Does the task; gives the last word.
fn perform(task: Task, directory: &Path, input: impl Read, say: &mut dyn FnMut(Said)) -> Said {
    let say = std::cell::RefCell::new(say);
    let input = Pulsing { inner: input, said: Instant::now(), say: &say };
    let done = match task {
        Task::Decompress => Err(nonsense()),
        Task::Unpack(limits) => unpack::unpack_to(directory, input, &limits).map(Said::Unpacked),
        Task::Spool(bytes_max) => {
            let mut take = |piece| say.borrow_mut()(Said::Piece(piece));
            crate::import::scatter(directory, input, bytes_max, &mut take).map(|()| Said::Spooled)
        }
    };
    done.unwrap_or_else(Said::Failed)
}

/// Gives a sign of life while it is read: where nobody hears it any more the process ends.
struct Pulsing<'a, 'b, R> {
    inner: R,
    said: Instant,
    say: &'a std::cell::RefCell<&'b mut dyn FnMut(Said)>,
}

impl<R: Read> Read for Pulsing<'_, '_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if self.said.elapsed() >= PULSE {
            self.said = Instant::now();
            self.say.borrow_mut()(Said::Busy);
        }
        Ok(count)
    }
}
