//! The one error type of this room: a variant for each thing a caller can act on, with what was tried and on what.
//! Each text says what was tried, on what, and why it failed; lower case, no full stop.

use std::fmt;

use nix::errno::Errno;

/// Why something asked of the kernel, or of a plan, did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The kernel refused `op` on `target`.
    Kernel {
        /// What was tried, as a verb: `write`, `make cgroup`.
        op: &'static str,
        /// On what: a path, or a path and a value.
        target: String,
        /// The kernel's answer.
        errno: Errno,
    },
    /// This kernel lacks `feature`.
    Missing {
        /// What is needed.
        feature: &'static str,
        /// The first Linux version that has it.
        since: &'static str,
    },
    /// What was asked cannot be done, whatever the kernel.
    Invalid {
        /// Which part of the request.
        field: String,
        /// What is wrong with it.
        why: String,
    },
}

impl Error {
    pub(crate) fn kernel(op: &'static str, target: impl fmt::Display, errno: Errno) -> Self {
        Self::Kernel { op, target: target.to_string(), errno }
    }

    /// For the file calls of `std`, whose errors carry an errno or are about content (shown as EIO).
    pub(crate) fn io(op: &'static str, target: impl fmt::Display, error: &std::io::Error) -> Self {
        Self::kernel(op, target, error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }

    pub(crate) fn invalid(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), why: why.into() }
    }

    /// The kernel's answer, where there was one.
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

/// The C library's words for an errno, in the house style: `no such file or directory`. A leading abbreviation
/// stays as it is: `I/O error`.
pub(crate) fn describe_errno(errno: Errno) -> String {
    let text = errno.desc();
    let mut characters = text.chars();
    match (characters.next(), characters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            format!("{}{}", first.to_lowercase(), &text[first.len_utf8()..])
        }
        _ => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_read_as_the_house_writes() {
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
