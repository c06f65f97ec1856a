//! The error type of this crate, with one variant for each case that a caller can handle. An error text names the
//! operation, its object and the cause, in lower case and without a full stop.

use std::fmt;

use nix::errno::Errno;

/// An error of a system call or of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A system call failed.
    Kernel {
        /// The operation as a verb, for example `write` or `make cgroup`.
        op: &'static str,
        /// The object of the operation: a path, or a path and a value.
        target: String,
        /// The kernel's error number.
        errno: Errno,
    },
    /// The kernel does not have a feature.
    Missing {
        /// Name of the missing feature.
        feature: &'static str,
        /// The first Linux version that has the feature.
        since: &'static str,
    },
    /// The request is invalid.
    Invalid {
        /// The field of the request.
        field: String,
        /// The reason why the field is invalid.
        why: String,
    },
}

impl Error {
    pub(crate) fn kernel(op: &'static str, target: impl fmt::Display, errno: Errno) -> Self {
        Self::Kernel { op, target: target.to_string(), errno }
    }

    /// Converts an error of the standard library; an error without an error number becomes EIO.
    pub(crate) fn io(op: &'static str, target: impl fmt::Display, error: &std::io::Error) -> Self {
        Self::kernel(op, target, error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }

    pub(crate) fn invalid(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), why: why.into() }
    }

    /// The error number; `None` if the kernel returned none.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel { errno, .. } => Some(*errno),
            Self::Missing { .. } | Self::Invalid { .. } => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel { op, target, errno } => write!(f, "{op} {target}: {}", describe_errno(*errno)),
            Self::Missing { feature, since } => {
                write!(f, "{feature}: not in this kernel, Linux {since} has it")
            }
            Self::Invalid { field, why } => write!(f, "{field}: {why}"),
        }
    }
}

impl std::error::Error for Error {}

/// Converts without the operation and its object, which callers of functions of the standard library name themselves.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Kernel { errno, .. } => Self::from_raw_os_error(errno as i32),
            Error::Invalid { why, .. } => Self::other(why),
            Error::Missing { .. } => Self::other(error.to_string()),
        }
    }
}

/// The description of an error number in lower case: `no such file or directory`.
pub fn describe_errno(errno: Errno) -> String {
    coracle_sys::Errno(errno as i32).to_string()
}

/// The text of an I/O error as [`describe_errno`] describes its number, without the suffix ` (os error 2)` of the standard
/// library; for an error without a number its own text.
pub fn describe_io(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => describe_errno(Errno::from_raw(number)),
        None => error.to_string(),
    }
}

/// Describes why a thread could not be started. musl reports whatever the kernel refused as EAGAIN, whose usual text ("try
/// again") would hide the cause.
pub fn describe_thread_error(error: &std::io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EAGAIN) => "no memory is left, or a limit of processes is reached".to_owned(),
        _ => describe_io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_thread_names_its_causes() {
        let text = |errno: Errno| describe_thread_error(&std::io::Error::from_raw_os_error(errno as i32));
        assert_eq!(text(Errno::EAGAIN), "no memory is left, or a limit of processes is reached");
        assert_eq!(text(Errno::EPERM), "operation not permitted");
    }

    #[test]
    fn error_texts_name_operation_object_and_reason() {
        let table = [
            (
                Error::kernel("make cgroup", "/sys/fs/cgroup/a", Errno::ENOENT),
                "make cgroup /sys/fs/cgroup/a: no such file or directory",
            ),
            (Error::kernel("read", "/x", Errno::EIO), "read /x: I/O error"),
            (
                Error::Missing { feature: "recursive read-only mounts", since: "5.12" },
                "recursive read-only mounts: not in this kernel, Linux 5.12 has it",
            ),
            (Error::invalid("mounts[2].target", "is the root"), "mounts[2].target: is the root"),
        ];
        for (error, text) in table {
            assert_eq!(error.to_string(), text);
        }
    }
}
