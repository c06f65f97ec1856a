//! The mapping from errors to gRPC codes. The kubelet's reaction to each code is documented at `Kind` and in
//! the CRI API.

use coracle_base::error::{Error, Kind};
use coracle_base::text::Escaped;
use tonic::{Code, Status};

/// Maximum length of a status message in bytes. It is sent in a header, percent-encoded (at most three times as long), and
/// clients limit headers to 16 KiB.
const TEXT_BYTES_MAX: usize = 4096;

/// The gRPC code of a kind of failure.
fn code(kind: Kind) -> Code {
    match kind {
        Kind::Cancelled => Code::Cancelled,
        Kind::Unknown => Code::Unknown,
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::DeadlineExceeded => Code::DeadlineExceeded,
        Kind::NotFound => Code::NotFound,
        Kind::AlreadyExists => Code::AlreadyExists,
        Kind::PermissionDenied => Code::PermissionDenied,
        Kind::ResourceExhausted => Code::ResourceExhausted,
        Kind::FailedPrecondition => Code::FailedPrecondition,
        Kind::Unimplemented => Code::Unimplemented,
        Kind::Internal => Code::Internal,
        Kind::Unavailable => Code::Unavailable,
    }
}

/// The gRPC status for `error`.
pub(super) fn from(error: &Error) -> Status {
    // Clients show it on terminals.
    let text = Escaped(error.message()).to_string();
    let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&index| text.is_char_boundary(index));
    Status::new(code(error.kind()), &text[..end.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::{TEXT_BYTES_MAX, from};
    use coracle_base::error::{Error, Kind};
    use tonic::Code;

    #[test]
    fn each_kind_of_error_has_its_grpc_code() {
        let rows = [
            (Kind::Cancelled, Code::Cancelled, 1),
            (Kind::Unknown, Code::Unknown, 2),
            (Kind::InvalidArgument, Code::InvalidArgument, 3),
            (Kind::DeadlineExceeded, Code::DeadlineExceeded, 4),
            (Kind::NotFound, Code::NotFound, 5),
            (Kind::AlreadyExists, Code::AlreadyExists, 6),
            (Kind::PermissionDenied, Code::PermissionDenied, 7),
            (Kind::ResourceExhausted, Code::ResourceExhausted, 8),
            (Kind::FailedPrecondition, Code::FailedPrecondition, 9),
            (Kind::Unimplemented, Code::Unimplemented, 12),
            (Kind::Internal, Code::Internal, 13),
            (Kind::Unavailable, Code::Unavailable, 14),
        ];
        for (kind, code, number) in rows {
            let status = from(&Error::new(kind, "text"));
            assert_eq!(
                (status.code(), status.code() as i32, status.message()),
                (code, number, "text"),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let status = from(&Error::new(Kind::Unknown, format!("x{}", "é".repeat(TEXT_BYTES_MAX))));
        assert_eq!(status.message().len(), TEXT_BYTES_MAX - 1);
    }
}
