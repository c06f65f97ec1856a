//! The daemon's error type: a kind on which callers can act, and a text with the outermost context first. The
//! crates below the daemon have error enums of their own; such an error becomes an [`Error`] with a [`Kind`]
//! where it enters the daemon, and each level adds its context in front. Only `rpc/status.rs` of the daemon
//! maps kinds to gRPC codes. Each text contains the failed operation, its object and the cause; it starts in
//! lower case and has no full stop.

use std::fmt;
use std::path::Path;

pub use coracle_sandbox::describe_io;

/// Exit code for an invalid command line or configuration, as in shells.
pub const EXIT_USAGE: u8 = 2;

/// Kind of failure, by what a caller can do. The variants are in the order of the gRPC codes to which they
/// are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The client cancelled the call, or the daemon aborted the operation.
    Cancelled,
    /// A failure that clients do not act on; its text is shown to users.
    Unknown,
    /// The request is invalid and must be changed; the text names the field.
    InvalidArgument,
    /// A time limit passed; the text names the operation that did not complete.
    DeadlineExceeded,
    /// The object does not exist. The kubelet then treats it as removed.
    NotFound,
    /// The name is in use by another object, which the text names.
    AlreadyExists,
    /// The kernel or a registry denied access.
    PermissionDenied,
    /// A limit is reached, the disk is full, or a table is full.
    ResourceExhausted,
    /// The state of the object does not permit the operation.
    FailedPrecondition,
    /// The operation is not supported by coracle or by this kernel.
    Unimplemented,
    /// An unexpected error of the kernel, the disk or a peer, or a defect of coracle.
    Internal,
    /// The daemon is starting or shutting down; the client should retry.
    Unavailable,
}

/// A failure with its kind and its text. The content is boxed to keep every `Result` small.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: Kind,
    message: String,
    is_logged: bool,
}

impl Error {
    /// Creates an error of `kind`; `message` contains the failed operation, its object and the cause.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into(), is_logged: false }))
    }

    /// Adds the operation of the caller in front of the text; the kind does not change.
    #[must_use]
    pub fn context(mut self, tried: impl fmt::Display) -> Error {
        self.0.message = format!("{tried}: {}", self.0.message);
        self
    }

    /// Replaces the kind, for callers that have more information about what the client can do.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Error {
        self.0.kind = kind;
        self
    }

    /// Records that the log contains a message about this error, so that callers do not log it again.
    #[must_use]
    pub fn logged(mut self) -> Error {
        self.0.is_logged = true;
        self
    }

    /// Whether the log contains a message about this error.
    pub fn is_logged(&self) -> bool {
        self.0.is_logged
    }

    /// The kind of error, on which callers act.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The complete text, outermost context first.
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
    /// Converts an I/O error: for some error numbers the kind is one on which clients can act, otherwise
    /// [`Kind::Internal`].
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
        Error::new(kind, describe_io(&error))
    }
}

impl From<nix::errno::Errno> for Error {
    fn from(errno: nix::errno::Errno) -> Error {
        std::io::Error::from(errno).into()
    }
}

impl From<coracle_sandbox::Error> for Error {
    /// Converts a kernel error: for some error numbers the kind is one on which clients can act, otherwise
    /// [`Kind::Internal`].
    fn from(error: coracle_sandbox::Error) -> Self {
        use coracle_sandbox::Error as Sandbox;
        let kind = match &error {
            Sandbox::Kernel { errno, .. } => of_kernel(*errno),
            Sandbox::Missing { .. } => Kind::FailedPrecondition,
            Sandbox::Invalid { .. } => Kind::InvalidArgument,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<coracle_netlink::Error> for Error {
    /// Converts a kernel error like an error of the sandbox.
    fn from(error: coracle_netlink::Error) -> Self {
        Self::new(of_kernel(error.errno), error.to_string())
    }
}

/// The kind of a kernel error. ENOENT does not become [`Kind::NotFound`], which the kubelet takes to mean that the
/// pod or container was removed.
fn of_kernel(errno: nix::errno::Errno) -> Kind {
    use nix::errno::Errno;
    match errno {
        Errno::ENOSPC | Errno::EDQUOT | Errno::ENOMEM => Kind::ResourceExhausted,
        _ => Kind::Internal,
    }
}

/// Creates the error of file operation `op` on `path`, a file of the daemon: [`Kind::ResourceExhausted`] if
/// there is no space, otherwise [`Kind::Internal`]. Never [`Kind::NotFound`], which the kubelet interprets as
/// the removal of the pod or container.
pub fn failed(op: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match Error::from(std::io::Error::from(error.kind())).kind() {
        Kind::ResourceExhausted => Kind::ResourceExhausted,
        _ => Kind::Internal,
    };
    Error::new(kind, format!("{op} {}: {}{}", path.display(), describe_io(error), free_space(path, error)))
}

/// Text for the end of an error's message if the disk is full: the free space of the file system of `path`, a file of the daemon. Either
/// bytes or inodes may be missing. Empty for other errors.
pub(crate) fn free_space(path: &Path, error: &std::io::Error) -> String {
    if error.raw_os_error() != Some(nix::errno::Errno::ENOSPC as i32) {
        return String::new();
    }
    let folder = path.parent().unwrap_or(path);
    let Ok(room) = nix::sys::statvfs::statvfs(folder) else { return String::new() };
    let bytes = room.blocks_available().saturating_mul(room.fragment_size());
    format!("; {bytes} bytes and {} inodes are free at {}", room.files_available(), folder.display())
}

/// Adds context to the error of a result.
pub trait Context<T> {
    /// Adds context like [`Error::context`]; `tried` is called only for an error.
    ///
    /// # Errors
    /// The error of `self` with the context in front of its text.
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
    fn each_level_prepends_its_context() {
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
