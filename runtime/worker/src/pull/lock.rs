//! The locks of part files: of the workers that pull a blob, one has its part.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coracle_job::Failure;

use crate::failure::io_failure;
use crate::report::{self, Report};
use crate::store::{Store, open_plain};

/// Removes the parts of a blob whose layers are in the store, also those of ranges, unless they are in use.
pub(super) fn forget(store: &Store, digest: &str) {
    for path in store.parts(digest) {
        if open_plain(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            // If this fails, the daemon removes it later.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Locks a part file; `None` if the blob is no longer needed. After the wait for the lock, the name may
/// belong to a new file, in which case the function tries again. Each holder of the lock ends eventually,
/// because its daemon limits its time.
pub(super) fn lock(
    path: &Path,
    is_unpacked: &dyn Fn() -> bool,
    report: &Report,
) -> Result<Option<File>, Failure> {
    loop {
        if is_unpacked() {
            return Ok(None);
        }
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let file = file.map_err(|error| io_failure("open", path, &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(io_failure("lock", path, &error)),
            Err(TryLockError::WouldBlock) => {
                report.pulse();
                std::thread::sleep(report::PAUSE);
                continue;
            }
        }
        let inode =
            |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|metadata| metadata.ino()).ok();
        if inode(file.metadata()) == inode(path.metadata()) {
            return Ok(Some(file));
        }
    }
}
