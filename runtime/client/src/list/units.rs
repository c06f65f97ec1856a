//! Formats times and sizes as crictl prints them, and text that is safe for a terminal. The module does no
//! I/O, except reading the clock.

use std::fmt::Write as _;
use std::time::Duration;

use coracle_base::text::is_hidden;
use coracle_base::time::wall;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Formats the time since a moment, which is given in nanoseconds since 1970.
pub(super) fn ago(at_ns: i64) -> String {
    let at = Duration::from_nanos(u64::try_from(at_ns).unwrap_or(0));
    format!("{} ago", rough(wall().saturating_sub(at).as_secs()))
}

/// Formats a duration in the largest unit that fits, like docker and crictl.
fn rough(seconds: u64) -> String {
    let hours = (seconds + HOUR / 2) / HOUR;
    match seconds {
        0 => "Less than a second".to_owned(),
        1 => "1 second".to_owned(),
        2..MINUTE => format!("{seconds} seconds"),
        _ if seconds < 2 * MINUTE => "About a minute".to_owned(),
        _ if seconds < HOUR => format!("{} minutes", seconds / MINUTE),
        _ if hours == 1 => "About an hour".to_owned(),
        _ if hours < 48 => format!("{hours} hours"),
        _ if hours < 2 * 7 * 24 => format!("{} days", hours / 24),
        _ if hours < 2 * 30 * 24 => format!("{} weeks", hours / 24 / 7),
        _ if hours < 2 * 365 * 24 => format!("{} months", hours / 24 / 30),
        _ => format!("{} years", seconds / DAY / 365),
    }
}

/// Formats a size in powers of 1000 with `digits` significant digits and without trailing zeros after the
/// decimal point.
pub(super) fn size(bytes: f64, digits: usize) -> String {
    let mut value = bytes;
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    let before_point = format!("{value:.0}").len();
    let text = format!("{value:.0$}", digits.saturating_sub(before_point));
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

/// Converts a text to one line of a table.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::new();
    for letter in text.chars() {
        match is_hidden(letter) {
            true => drop(write!(line, "\\u{{{:x}}}", u32::from(letter))),
            false => line.push(letter),
        }
    }
    line
}

/// Escapes hidden characters in JSON or YAML, where they can only occur in strings.
pub(super) fn escaped_json(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '\n' => escaped.push(letter),
            // All of these are below U+10000: one escape each.
            _ if is_hidden(letter) => drop(write!(escaped, "\\u{:04x}", u32::from(letter))),
            _ => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_in_crictl() {
        for (seconds, expected) in [
            (0, "Less than a second"),
            (1, "1 second"),
            (59, "59 seconds"),
            (60, "About a minute"),
            (119, "About a minute"),
            (120, "2 minutes"),
            (3599, "59 minutes"),
            (3600, "About an hour"),
            (5399, "About an hour"),
            (5400, "2 hours"),
            (47 * 3600, "47 hours"),
            (48 * 3600, "2 days"),
            (13 * 86400, "13 days"),
            (14 * 86400, "2 weeks"),
            (59 * 86400, "8 weeks"),
            (60 * 86400, "2 months"),
            (729 * 86400, "24 months"),
            (730 * 86400, "2 years"),
        ] {
            assert_eq!(rough(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn sizes_have_significant_digits() {
        for (bytes, digits, expected) in [
            (0.0, 3, "0B"),
            (999.0, 3, "999B"),
            (1000.0, 3, "1kB"),
            (1_500_000.0, 3, "1.5MB"),
            (12_345_678.0, 3, "12.3MB"),
            (123_456_789.0, 3, "123MB"),
            (12_345_678.0, 4, "12.35MB"),
            (123_456_789_012.0, 4, "123.5GB"),
        ] {
            assert_eq!(size(bytes, digits), expected);
        }
    }

    #[test]
    fn control_characters_are_escaped_for_terminals_only() {
        let hostile = "a\u{1b}[2J\n\u{9b}31m\u{202e}b";
        assert_eq!(one_line(hostile), "a\\u{1b}[2J\\u{a}\\u{9b}31m\\u{202e}b");
        let json = escaped_json(&serde_json::to_string(hostile).unwrap());
        assert!(!json.chars().any(is_hidden), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), hostile);
    }
}
