//! Directories and files of the daemon's own, below its root and state directories, and what an error there means.

use std::path::Path;

use coracle_base::error::{Error, Kind, plain};
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

/// The error of a file operation `op` that did not work. Not NotFound, whatever the errno: to a kubelet that means that the pod or
/// container is gone.
pub(crate) fn failed(op: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match Error::from(std::io::Error::from(error.kind())).kind() {
        Kind::ResourceExhausted => Kind::ResourceExhausted,
        _ => Kind::Internal,
    };
    Error::new(kind, format!("{op} {}: {}", path.display(), plain(error)))
}
