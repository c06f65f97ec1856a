//! The child that is shut in: how it is started and heard, and what it does.
//!
//! ```text
//!   worker: blob or archive ─► stdin of `coracle-worker inmate …` in the new directory
//!                              inmate: shut in ─► decompress, read entries, write ─► Said… ─► stdout ─► worker
//! ```
//! What it says is not trusted more than the archive: digests are compared, names are checked, files of it are opened
//! without following links, and only once it has ended.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, Limits, write_message};
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};

#[cfg(not(test))]
use super::start::run;
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
const PULSE: Duration = Duration::from_millis(200);

/// What it is to do with its stdin.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// A layer's archive, into the current directory.
    Unpack(Limits),
    /// Files of an archive of images, into the current directory; at most so many bytes.
    Spool(u64),
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// So many bytes were read.
    Read(u64),
    /// Something an archive of images holds.
    Piece(Piece),
    /// The layer is all there.
    Unpacked(Unpacked),
    /// The archive is all there.
    Spooled,
    /// It is not.
    Failed(Failure),
}

/// Unpacks a layer's archive into `directory`, in a jail. `pulse` hears of bytes read.
pub(crate) fn unpack(
    directory: &Path,
    blob: File,
    limits: &Limits,
    pulse: &mut dyn FnMut(u64),
) -> Result<Unpacked, Failure> {
    let mut unpacked = None;
    run(Task::Unpack(*limits), directory, blob, &mut |said| match said {
        Said::Read(bytes) => {
            pulse(bytes);
            Ok(false)
        }
        Said::Unpacked(found) => {
            unpacked = Some(found);
            Ok(true)
        }
        _ => Err(nonsense()),
    })?;
    unpacked.ok_or_else(nonsense)
}

/// Writes the files of an archive of images into `directory`, in a jail; `take` gets each piece.
pub(crate) fn spool(
    directory: &Path,
    archive: File,
    bytes_max: u64,
    take: &mut dyn FnMut(Piece) -> Result<(), Failure>,
    pulse: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    run(Task::Spool(bytes_max), directory, archive, &mut |said| match said {
        Said::Read(bytes) => {
            pulse(bytes);
            Ok(false)
        }
        Said::Piece(piece) => take(piece).map(|()| false),
        Said::Spooled => Ok(true),
        _ => Err(nonsense()),
    })
}

fn nonsense() -> Failure {
    failure(FailureKind::Internal, "the process that reads the archive said something else than it should")
}

/// Hears what is said until `hear` says that it was the last.
pub(super) type Hear<'a> = &'a mut dyn FnMut(Said) -> Result<bool, Failure>;

/// Unit tests have no program to start, and no jail: the same work in this process.
#[cfg(test)]
fn run(task: Task, directory: &Path, input: File, hear: Hear<'_>) -> Result<(), Failure> {
    let mut heard = Ok(false);
    let said = perform(task, directory, input, &mut |said| heard = heard.clone().and_then(|_| hear(said)));
    heard?;
    match said {
        Said::Failed(failure) => Err(failure),
        said => hear(said).map(drop),
    }
}

fn task(mut arguments: impl Iterator<Item = OsString>) -> Option<Task> {
    let kind = arguments.next()?;
    let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
    match kind.to_str()? {
        "unpack" => {
            let (layer_bytes_max, layer_entries_max) = (number()?, number()?);
            Some(Task::Unpack(Limits { layer_bytes_max, layer_entries_max, ..Limits::default() }))
        }
        "spool" => Some(Task::Spool(number()?)),
        _ => None,
    }
}

/// The child's life.
pub(crate) fn live(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(task) = task(arguments) else {
        eprintln!("{SUBCOMMAND}: unpack BYTES ENTRIES | spool BYTES");
        return ExitCode::FAILURE;
    };
    let (Task::Unpack(Limits { layer_bytes_max: bytes_max, .. }) | Task::Spool(bytes_max)) = task;
    // One byte more, so that our own words come before the kernel's signal.
    let file_bytes_max = bytes_max.saturating_add(1);
    for (resource, most) in [
        (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, file_bytes_max),
    ] {
        if let Err(errno) = setrlimit(resource, most, most) {
            eprintln!("jail: it goes on without: limit: {errno}");
        }
    }
    if let Task::Unpack(_) = task {
        // What is made has the mode that is asked for.
        rustix::process::umask(rustix::fs::Mode::empty());
    }
    super::shut_in();
    let stdout = &mut std::io::stdout();
    let last = perform(task, Path::new("."), std::io::stdin().lock(), &mut |said| {
        if write_message(&mut std::io::stdout(), &said).is_err() {
            std::process::exit(1); // nobody hears it any more
        }
    });
    match write_message(stdout, &last) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Does the task; gives the last word.
fn perform(task: Task, directory: &Path, input: impl Read, say: &mut dyn FnMut(Said)) -> Said {
    let say = std::cell::RefCell::new(say);
    let input = Counted { inner: input, bytes: 0, said: Instant::now(), say: &say };
    let done = match task {
        Task::Unpack(limits) => unpack::unpack_to(directory, input, &limits).map(Said::Unpacked),
        Task::Spool(bytes_max) => {
            let mut take = |piece| say.borrow_mut()(Said::Piece(piece));
            crate::import::scatter(directory, input, bytes_max, &mut take).map(|()| Said::Spooled)
        }
    };
    done.unwrap_or_else(Said::Failed)
}

/// Tells how much was read, as a sign of life.
struct Counted<'a, 'b, R> {
    inner: R,
    bytes: u64,
    said: Instant,
    say: &'a std::cell::RefCell<&'b mut dyn FnMut(Said)>,
}

impl<R: Read> Read for Counted<'_, '_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.bytes += count as u64;
        if self.said.elapsed() >= PULSE {
            self.said = Instant::now();
            self.say.borrow_mut()(Said::Read(self.bytes));
        }
        Ok(count)
    }
}
