//! The error type of this crate: a request that the kernel refused. Its text names the operation, its object and the
//! cause, in lower case and without a full stop.

use std::fmt;

use nix::errno::Errno;

/// A request that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The operation as a verb, for example `add route`.
    pub op: &'static str,
    /// The object of the operation, followed by the kernel's own text in parentheses if there is one.
    pub target: String,
    /// The kernel's error number.
    pub errno: Errno,
}

impl Error {
    pub(crate) fn new(op: &'static str, target: impl fmt::Display, errno: Errno) -> Self {
        Self { op, target: target.to_string(), errno }
    }

    /// Converts an error of the standard library; an error without an error number becomes EIO.
    pub(crate) fn io(op: &'static str, target: impl fmt::Display, error: &std::io::Error) -> Self {
        Self::new(op, target, error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}: {}", self.op, self.target, coracle_sys::Errno(self.errno as i32))
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_operation_object_and_cause() {
        let table = [
            (Errno::EEXIST, "make link veth1: file exists"),
            (Errno::EIO, "make link veth1: I/O error"),
            (Errno::ENODEV, "make link veth1: no such device"),
        ];
        for (errno, text) in table {
            assert_eq!(Error::new("make link", "veth1", errno).to_string(), text);
        }
    }
}
