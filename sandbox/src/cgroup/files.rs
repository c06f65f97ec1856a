//! Reading, writing and removing in a cgroup file system: one call each, bounded, and errors that name the file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::Mode;

use crate::{Error, umask};

/// Most bytes read of one file: `cgroup.procs` of 30 000 processes; everything else is far shorter.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Most directories looked at below one cgroup in one call. A container that nests more keeps its cgroup until it has
/// been called for again, and the daemon its memory.
const DIRECTORIES_MAX: usize = 4096;

pub(super) fn read(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
        .map_err(|error| Error::io("read", path.display(), &error))?;
    Ok(text)
}

/// Writes `value` in one call, as the kernel takes each call for a whole value. The file is never made.
pub(super) fn write(path: &Path, value: &str) -> Result<(), Error> {
    let outcome = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write(value.as_bytes()));
    match outcome {
        Ok(count) if count == value.len() => Ok(()),
        Ok(_) => Err(Error::kernel("write", format!("{value:?} to {}", path.display()), Errno::EIO)),
        Err(error) => Err(Error::io("write", format!("{value:?} to {}", path.display()), &error)),
    }
}

/// The directory and those below it, parents first; empty where it is missing.
pub(super) fn tree(top: &Path) -> Result<Vec<PathBuf>, Error> {
    if !top.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = vec![top.to_path_buf()];
    let mut next = 0;
    while next < found.len() {
        let entries = match std::fs::read_dir(&found[next]) {
            Ok(entries) => entries,
            // Gone while we looked.
            Err(error) if is_gone(&error) => {
                next += 1;
                continue;
            }
            Err(error) => return Err(Error::io("list cgroup", found[next].display(), &error)),
        };
        for entry in entries.flatten() {
            if found.len() < DIRECTORIES_MAX && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(entry.path());
            }
        }
        next += 1;
    }
    Ok(found)
}

/// Makes one directory; being there already is success.
pub(super) fn make_directory(path: &Path) -> Result<(), Error> {
    // A container's own users read the files of its cgroup.
    let _mask = umask::Public::begin();
    match nix::unistd::mkdir(path, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(Error::kernel("make cgroup", path.display(), errno)),
    }
}

/// Removes the directory and those below it, children first. Missing is success; the first error is told after the
/// rest was tried.
pub(super) fn remove_tree(top: &Path) -> Result<(), Error> {
    match remove_directory(top) {
        // It has children, or processes.
        Err(error) if error.errno() == Some(Errno::EBUSY) => {}
        outcome => return outcome,
    }
    let mut outcome = Ok(());
    for directory in tree(top)?.iter().rev() {
        outcome = outcome.and(remove_directory(directory));
    }
    outcome
}

fn remove_directory(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir(path) {
        Err(error) if !is_gone(&error) => Err(Error::io("remove cgroup", path.display(), &error)),
        _ => Ok(()),
    }
}

/// A cgroup that is removed while it is used answers ENODEV as well as ENOENT.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENOENT | Errno::ENODEV))
}

/// The same for our own errors.
pub(super) fn names_gone(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::ENOENT | Errno::ENODEV))
}
