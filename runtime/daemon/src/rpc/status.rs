//! The only table from our errors to gRPC codes. What a kubelet makes of each code: `Kind`'s docs and the CRI API.

use coracle_base::error::{Error, Kind};
use tonic::{Code, Status};

/// Longest message of a status. It travels in a header, percent-encoded (threefold at worst), and clients bound their
/// headers at 16 KiB.
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

/// The status a client gets for `error`.
pub(super) fn from(error: &Error) -> Status {
    let text = error.message();
    let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&index| text.is_char_boundary(index));
    Status::new(code(error.kind()), &text[..end.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::{TEXT_BYTES_MAX, from};
    use coracle_base::error::{Error, Kind};
    use tonic::Code;

    #[test]
    fn each_kind_has_its_code() {
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
