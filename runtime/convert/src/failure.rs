//! Errors as text for users, with what was being done.

use std::fmt;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Prepends to an error the operation that failed.
pub(crate) trait Context<T> {
    fn context<S: fmt::Display>(self, what: impl FnOnce() -> S) -> Result<T, Failure>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context<S: fmt::Display>(self, what: impl FnOnce() -> S) -> Result<T, Failure> {
        self.map_err(|error| Failure(format!("{}: {error}", what())))
    }
}
