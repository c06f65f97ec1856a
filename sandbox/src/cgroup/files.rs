//! Reads, writes and removes files and directories of a cgroup file system, with bounds and with errors that name the
//! file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::Mode;

use crate::{Error, disk, umask};

/// Maximum number of bytes read from a file: `cgroup.procs` with 30 000 processes; other files are far shorter.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Maximum number of directories visited below one cgroup in one call, which limits the daemon's memory. If a container
/// has created more, further calls are needed to remove its cgroup.
const DIRECTORIES_MAX: usize = 4096;

pub(super) fn read(path: &Path) -> Result<String, Error> {
    disk::read_text_up_to(path, FILE_BYTES_MAX).map_err(|error| Error::io("read", path.display(), &error))
}

/// Writes `value` with one write(2), because the kernel interprets each write as a complete value. The file is never
/// created.
pub(super) fn write(path: &Path, value: &str) -> Result<(), Error> {
    let outcome = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write(value.as_bytes()));
    match outcome {
        Ok(count) if count == value.len() => Ok(()),
        Ok(_) => Err(Error::kernel("write", format!("{value:?} to {}", path.display()), Errno::EIO)),
        Err(error) => Err(Error::io("write", format!("{value:?} to {}", path.display()), &error)),
    }
}

/// The directory and its descendants, parents first; empty if the directory is missing.
pub(super) fn tree(top: &Path) -> Result<Vec<PathBuf>, Error> {
    if !top.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = vec![top.to_path_buf()];
    let mut next = 0;
    while next < found.len() {
        let entries = match std::fs::read_dir(&found[next]) {
            Ok(entries) => entries,
            // The directory was removed meanwhile.
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

/// Creates one directory; an existing one is success.
pub(super) fn make_directory(path: &Path) -> Result<(), Error> {
    // Users inside the container must be able to read the files of its cgroup.
    let _mask = umask::Public::begin();
    match nix::unistd::mkdir(path, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(Error::kernel("make cgroup", path.display(), errno)),
    }
}

/// Removes the directory and its descendants, children first. A missing directory is success. After an error the
/// remaining directories are still tried, and the first error is returned.
pub(super) fn remove_tree(top: &Path) -> Result<(), Error> {
    match remove_directory(top) {
        // The cgroup has children or processes.
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

/// Whether the error means that the cgroup has been removed: ENODEV if it was removed while in use, or ENOENT.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENOENT | Errno::ENODEV))
}

/// Whether an [`Error`] means that the cgroup has been removed.
pub(super) fn names_gone(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::ENOENT | Errno::ENODEV))
}
