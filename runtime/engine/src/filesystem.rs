//! Directories of the daemon's own, below its root and state directories.

use std::path::Path;

use coracle_base::error::{Error, failed};
use coracle_base::store;
use coracle_sandbox::umask;

/// Makes a directory with its parents, for root alone.
pub(crate) fn make_directory(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|error| failed("make directory", path, &error))
}

/// Makes a directory with its parents that everybody may read (0755).
pub(crate) fn make_public_directory(path: &Path) -> Result<(), Error> {
    let _mask = umask::Public::begin();
    make_directory(path)
}

/// Makes a directory for root alone, and closes one that is there already to others: earlier builds left it open.
pub(crate) fn make_private_directory(path: &Path) -> Result<(), Error> {
    make_directory(path)?;
    store::close_directory(path).map_err(|error| failed("set mode of", path, &error))
}
