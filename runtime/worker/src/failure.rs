//! Failures of system calls in jobs, and context for failures.

use std::fmt::Display;
use std::io;

use coracle_job::{Failure, FailureKind};
use coracle_sandbox::{describe_io, describe_thread_error};
pub(crate) use coracle_trees::io_failure;

/// Creates the failure of the start of a thread that does `work`.
pub(crate) fn thread_failure(work: &str, error: &io::Error) -> Failure {
    Failure::new(
        FailureKind::Internal,
        format!("start a thread that {work}: {}", describe_thread_error(error)),
    )
}

/// Creates a pipe.
pub(crate) fn pipe() -> Result<(io::PipeReader, io::PipeWriter), Failure> {
    io::pipe().map_err(|error| {
        Failure::new(FailureKind::Internal, format!("create a pipe: {}", describe_io(&error)))
    })
}

/// Adds context in front of a failure's text.
pub(crate) trait Context<T> {
    /// Adds a description of the operation in front of a failure's text; `tried` is called only for a
    /// failure.
    fn context<D: Display>(self, tried: impl FnOnce() -> D) -> Result<T, Failure>;
}

impl<T> Context<T> for Result<T, Failure> {
    fn context<D: Display>(self, tried: impl FnOnce() -> D) -> Result<T, Failure> {
        self.map_err(|failure| failure.during(&tried().to_string()))
    }
}
