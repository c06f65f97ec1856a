//! Trees of directories whose content is untrusted and may change meanwhile: removes, measures and labels them. Symbolic links are not
//! followed and mounts not crossed.
#![forbid(unsafe_code)]

pub mod measure;
pub mod relabel;
pub mod remove;

use std::io;
use std::path::Path;

use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;

/// Creates the failure of the file operation `op` on `path`.
pub fn io_failure(op: &str, path: &Path, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::NoSpace,
        _ => FailureKind::Internal,
    };
    Failure::new(kind, format!("{op} {}: {}", path.display(), describe_io(error)))
}
