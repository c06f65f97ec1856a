//! Parses the `grpc-timeout` header, the caller's deadline, which hyper and tonic's service layer do not
//! handle. Format: one to eight digits and a unit (`TimeoutValue TimeoutUnit` of the gRPC-over-HTTP/2
//! specification).

use std::time::Duration;

use http::HeaderMap;

/// Maximum number of digits according to the specification.
const DIGITS_MAX: usize = 8;

/// The caller's time limit; `None` if the header is missing or malformed. The specification does not define the handling of
/// malformed values, and grpc-go refuses them; a call without a limit does no harm, because the caller cancels it.
pub(super) fn of(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get("grpc-timeout")?.as_bytes())
}

fn parse(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > DIGITS_MAX || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let value = digits.iter().fold(0, |value, digit| value * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(value * 3600),
        b'M' => Duration::from_secs(value * 60),
        b'S' => Duration::from_secs(value),
        b'm' => Duration::from_millis(value),
        b'u' => Duration::from_micros(value),
        b'n' => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::time::Duration;

    #[test]
    fn timeouts_of_grpc_are_parsed_in_every_unit() {
        let cases: [(&str, Option<Duration>); 12] = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("150m", Some(Duration::from_millis(150))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("123456789m", None),
            ("m", None),
            ("", None),
            ("5", None),
            ("-1S", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text.as_bytes()), expected, "{text:?}");
        }
    }
}
