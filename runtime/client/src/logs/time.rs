//! Parses times of RFC 3339, in log lines and `--since`. The module does no I/O.

use std::time::Duration;

use coracle_wire::days;

use crate::duration;

/// Parses the value of `--since`, a time or a duration before `now`, to nanoseconds since 1970.
pub(super) fn since(text: &str, now: Duration) -> Option<i64> {
    parse(text).or_else(|| i64::try_from(now.saturating_sub(duration(text)?).as_nanos()).ok())
}

/// Parses a time such as `2026-11-22T10:20:30.123456789+01:00` to nanoseconds since 1970. Fraction and offset
/// may be missing; without the time of day, it is midnight in UTC.
pub(super) fn parse(text: &str) -> Option<i64> {
    let number = |range: std::ops::Range<usize>| {
        let digits = text.get(range).filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<i64>().ok()
    };
    let is_at = |index: usize, byte: u8| text.as_bytes().get(index) == Some(&byte);
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    if !is_at(4, b'-') || !is_at(7, b'-') || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let midnight = days(year, month, day) * 86_400;
    if text.len() == 10 {
        return midnight.checked_mul(1_000_000_000);
    }
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    let is_apart =
        matches!(text.as_bytes().get(10), Some(b'T' | b't' | b' ')) && is_at(13, b':') && is_at(16, b':');
    if !is_apart || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let (fraction, zone) = match text.get(19..)?.strip_prefix('.') {
        None => ("", text.get(19..)?),
        Some(rest) => rest.split_at(rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len())),
    };
    let mut ns: i64 = 0;
    for digit in fraction.bytes().chain(std::iter::repeat(b'0')).take(9) {
        ns = ns * 10 + i64::from(digit - b'0');
    }
    let seconds = midnight + hour * 3600 + minute * 60 + second - offset(zone)?;
    seconds.checked_mul(1_000_000_000)?.checked_add(ns)
}

/// Parses an offset from UTC to seconds east of Greenwich.
fn offset(zone: &str) -> Option<i64> {
    let sign = match zone.as_bytes().first() {
        None | Some(b'Z' | b'z') if zone.len() <= 1 => return Some(0),
        Some(b'+') => 1,
        Some(b'-') => -1,
        _ => return None,
    };
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let (hours, minutes) = (hours.parse::<u8>().ok()?, minutes.parse::<u8>().ok()?);
    (hours < 24 && minutes < 60).then(|| sign * (i64::from(hours) * 3600 + i64::from(minutes) * 60))
}

#[cfg(test)]
mod tests {
    use super::{parse, since};
    use std::time::Duration;

    #[test]
    fn times_are_parsed() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01", 0),
            ("1970-01-02", 86_400_000_000_000),
            ("2000-02-29T12:00:00Z", 951_825_600_000_000_000),
            ("2026-11-20T22:16:40.042Z", 1_795_213_000_042_000_000),
            ("2026-11-20T22:16:40.042", 1_795_213_000_042_000_000),
            ("2026-11-20 23:16:40.042000000+01:00", 1_795_213_000_042_000_000),
            ("2026-11-20T20:46:40.042-01:30", 1_795_213_000_042_000_000),
            ("2026-11-20T22:16:40.0420000009999Z", 1_795_213_000_042_000_000),
        ] {
            assert_eq!(parse(text), Some(expected), "{text}");
        }
        for text in [
            "",
            "10m",
            "2026-13-01",
            "2026-00-01",
            "2026-11-20T24:00:00Z",
            "2026-11-20T22:16",
            "2026-11-20T22:16:40X",
            "2026-11-20T22:16:40+1",
            "2026-11-20T22:16:40+25:00",
            "2026x11x20",
            "+026-11-20",
            "größe-größe-größe",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let now = Duration::from_secs(1000);
        assert_eq!(since("10m", now), Some(400_000_000_000));
        assert_eq!(since("1h", now), Some(0));
        assert_eq!(since("1970-01-01", now), Some(0));
        assert_eq!(since("yesterday", now), None);
    }
}
