//! The daemon's one error: what kind of failure a caller can act on, and a text that reads from the outside in.
//! The crates below have error enums of their own; where such an error enters the daemon it becomes an [`Error`] with a [`Kind`], and
//! each level on the way up puts in front what only it knows. `rpc/status.rs` of the daemon turns kinds into gRPC codes, nothing else does.
//! Each text says what was tried, on what, and why it failed; lower case, no full stop.

use std::fmt;
use std::path::Path;

/// What a caller can do about a failure. The variants stand in the order of the gRPC codes they become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The caller went away, or the daemon gave the work up.
    Cancelled,
    /// Anything no client acts on: shown to users as it is.
    Unknown,
    /// The request can never work as it is; the text names the field.
    InvalidArgument,
    /// A time limit passed; the text names what was waited for.
    DeadlineExceeded,
    /// The object is not known. The kubelet takes this for "gone".
    NotFound,
    /// The name belongs to another object; the text names the holder.
    AlreadyExists,
    /// The kernel or a registry refused for want of a right.
    PermissionDenied,
    /// A named limit, a full disk, a full table.
    ResourceExhausted,
    /// The object is in a state in which this cannot be done.
    FailedPrecondition,
    /// Not served, now or by this kernel.
    Unimplemented,
    /// The kernel, the disk or a peer broke a promise; or a bug of ours.
    Internal,
    /// The daemon is starting or stopping: try again.
    Unavailable,
}

/// A failure with its kind and its text. Boxed: it travels in every `Result` and is rare.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: Kind,
    message: String,
}

impl Error {
    /// A failure of `kind`; `message` says what was tried, on what, and why it went wrong.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into() }))
    }

    /// Puts what was tried at this level in front of the text; the kind stays.
    #[must_use]
    pub fn context(mut self, tried: impl fmt::Display) -> Error {
        self.0.message = format!("{tried}: {}", self.0.message);
        self
    }

    /// The same text as another kind, where a level knows better what the caller can do.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Error {
        self.0.kind = kind;
        self
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The whole text, outermost level first.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}: {}", self.0.kind, self.0.message)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    /// The kind follows the errno where one says what a caller can do, else [`Kind::Internal`].
    fn from(error: std::io::Error) -> Error {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::NotFound => Kind::NotFound,
            ErrorKind::PermissionDenied => Kind::PermissionDenied,
            ErrorKind::AlreadyExists => Kind::AlreadyExists,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::OutOfMemory => {
                Kind::ResourceExhausted
            }
            ErrorKind::TimedOut => Kind::DeadlineExceeded,
            _ => Kind::Internal,
        };
        Error::new(kind, plain(&error))
    }
}

impl From<nix::errno::Errno> for Error {
    fn from(errno: nix::errno::Errno) -> Error {
        std::io::Error::from(errno).into()
    }
}

impl From<coracle_sandbox::Error> for Error {
    /// The kinds that clients can act on; what the kernel refuses is [`Kind::Internal`].
    fn from(error: coracle_sandbox::Error) -> Self {
        use coracle_sandbox::Error as Sandbox;
        use nix::errno::Errno;
        let kind = match &error {
            // Not NotFound for ENOENT: to a kubelet that means the pod or container is gone.
            Sandbox::Kernel { errno: Errno::ENOSPC | Errno::EDQUOT | Errno::ENOMEM, .. } => {
                Kind::ResourceExhausted
            }
            Sandbox::Kernel { .. } => Kind::Internal,
            Sandbox::Missing { .. } => Kind::FailedPrecondition,
            Sandbox::Invalid { .. } => Kind::InvalidArgument,
        };
        Self::new(kind, error.to_string())
    }
}

/// An I/O error's text in our spelling: lower case, and without std's ` (os error 2)`.
pub fn plain(error: &std::io::Error) -> String {
    let text = match error.raw_os_error() {
        Some(number) => nix::errno::Errno::from_raw(number).desc().to_owned(),
        None => error.to_string(),
    };
    let mut letters = text.chars();
    match letters.next() {
        // An acronym at the front ("I/O error", "RPC version wrong") keeps its capitals.
        Some(first) if letters.clone().next().is_some_and(char::is_lowercase) => {
            first.to_lowercase().chain(letters).collect()
        }
        _ => text,
    }
}

/// The error of a file operation `op` of the daemon's own on `path`: [`Kind::ResourceExhausted`] where there is no room, else
/// [`Kind::Internal`]. Never [`Kind::NotFound`], whatever the errno: to a kubelet that means that the pod or container is gone.
pub fn failed(op: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match Error::from(std::io::Error::from(error.kind())).kind() {
        Kind::ResourceExhausted => Kind::ResourceExhausted,
        _ => Kind::Internal,
    };
    Error::new(kind, format!("{op} {}: {}", path.display(), plain(error)))
}

/// Context for results, so that a level reads in one line.
pub trait Context<T> {
    /// As [`Error::context`]; `tried` is only called for an error.
    ///
    /// # Errors
    /// The same, with what was tried in front of its text.
    fn context<D: fmt::Display>(self, tried: impl FnOnce() -> D) -> Result<T, Error>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context<D: fmt::Display>(self, tried: impl FnOnce() -> D) -> Result<T, Error> {
        self.map_err(|error| error.into().context(tried()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Context, Error, Kind};

    #[test]
    fn each_level_adds_what_it_knows_in_front() {
        let error = Error::new(Kind::NotFound, "no such file").context("open /a").context("create container");
        assert_eq!(error.to_string(), "create container: open /a: no such file");
        assert_eq!(error.kind(), Kind::NotFound);
    }

    #[test]
    fn errno_becomes_kind_and_plain_text() {
        let cases = [
            (nix::errno::Errno::ENOENT, Kind::NotFound, "x: no such file or directory"),
            (nix::errno::Errno::ENOSPC, Kind::ResourceExhausted, "x: no space left on device"),
            (nix::errno::Errno::EPERM, Kind::PermissionDenied, "x: operation not permitted"),
            (nix::errno::Errno::EIO, Kind::Internal, "x: I/O error"),
        ];
        for (errno, kind, text) in cases {
            let error = Err::<(), _>(errno).context(|| "x").unwrap_err();
            assert_eq!(error.kind(), kind, "{errno}");
            assert_eq!(error.to_string(), text, "{errno}");
        }
    }
}
