//! Directories below the daemon's root and state directories.

use std::io::ErrorKind;
use std::path::Path;

use coracle_base::error::{Error, failed};
use coracle_base::store;
use coracle_sandbox::{disk, umask};

/// Maximum number of times that a directory is made again, which another program has removed before it was restricted.
const ATTEMPTS_MAX: u32 = 3;

/// Creates a directory with its parents, accessible to root only.
pub(crate) fn make_directory(path: &Path) -> Result<(), Error> {
    disk::create_dir_all(path).map_err(|error| failed("make directory", path, &error))
}

/// Creates a world-readable directory (0755) with its parents.
pub(crate) fn make_public_directory(path: &Path) -> Result<(), Error> {
    let _mask = umask::Public::begin();
    make_directory(path)
}

/// Creates a directory that only root can access, or restricts an existing one: earlier builds created it
/// with other permissions.
pub(crate) fn make_private_directory(path: &Path) -> Result<(), Error> {
    let mut attempts = 0..ATTEMPTS_MAX;
    loop {
        make_directory(path)?;
        match store::close_directory(path) {
            Err(error) if error.kind() == ErrorKind::NotFound && attempts.next().is_some() => {}
            closed => return closed.map_err(|error| failed("set mode of", path, &error)),
        }
    }
}

/// Whether no file exists at `path`; false if this is not known.
pub(crate) fn is_missing(path: &Path) -> bool {
    disk::exists(path).is_ok_and(|exists| !exists)
}
