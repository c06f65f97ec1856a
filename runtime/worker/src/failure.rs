//! Failures in the words of the job's contract: what kind, and one line that says what was tried on what.

use std::fmt::Display;
use std::io;
use std::path::Path;

use coracle_job::{Failure, FailureKind};

/// A failure of `kind`.
pub(crate) fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure { kind, message: message.into() }
}

/// What came from outside is malformed or does not verify.
pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    failure(FailureKind::Invalid, message)
}

/// A file operation that did not work.
pub(crate) fn io_failure(op: &str, path: &Path, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::NoSpace,
        _ => FailureKind::Internal,
    };
    failure(kind, format!("{op} {}: {error}", path.display()))
}

/// Puts what was tried at this level in front.
pub(crate) trait Context<T> {
    /// `tried` is only called for a failure.
    fn context<D: Display>(self, tried: impl FnOnce() -> D) -> Result<T, Failure>;
}

impl<T> Context<T> for Result<T, Failure> {
    fn context<D: Display>(self, tried: impl FnOnce() -> D) -> Result<T, Failure> {
        self.map_err(|failure| Failure { message: format!("{}: {}", tried(), failure.message), ..failure })
    }
}
