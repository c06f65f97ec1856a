//! One line per event to stderr, `key=value`, in a form both people and `grep` read.
//!
//! ```text
//!   time=2026-11-20T22:34:13.123Z level=info msg="pod ready" pod=3f2a9c01b7d4e ms=4
//! ```
//!
//! `log::info!("pod ready"; pod = id, ms = 4)`. Keys are spelled alike everywhere (`pod`, `ctr`, `op`, `step`, `ms`); `pod` and `ctr` are cut to the 13
//! digits that crictl prints. Values with anything but plain printable characters are quoted and escaped, so that no image
//! name or plugin's message can forge a line. Writing never blocks: a line that stderr's reader leaves no room for is
//! dropped and counted, and the next one says how many. No line is longer than `LINE_BYTES_MAX`.

use std::cell::{Cell, RefCell};
use std::fmt::{self, Display, Write as _};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_wire::{TIMESTAMP_BYTES, timestamp};
use nix::poll::{PollFd, PollFlags, PollTimeout};

/// `PIPE_BUF`: what a pipe that polls writable takes at once, so that lines are whole and never block.
const LINE_BYTES_MAX: usize = 4096;

/// Longest value, before escaping: leaves room for the other keys of a line.
const VALUE_BYTES_MAX: usize = 1024;

/// As many digits of an id as crictl prints.
const ID_DIGITS: usize = 13;

/// How much a line matters. Lines above the set level are not written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something is lost or broken and a person should look.
    Error,
    /// We went on, with less.
    Warn,
    /// One per change of state that CRI can see.
    #[default]
    Info,
    /// For whoever looks for a fault.
    Debug,
}

impl Level {
    /// As in the configuration and on the line.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);

thread_local! {
    static LINE: RefCell<Line> = const { RefCell::new(Line { text: String::new(), value: String::new() }) };
    static DROPPED: Cell<u64> = const { Cell::new(0) };
}

/// Sets the level from now on (start, SIGHUP).
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Whether a line of `level` would be written: for values that are dear to compute.
pub fn is_enabled(level: Level) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes one line; the macros call this.
pub fn write(level: Level, message: &dyn Display, fields: &[(&str, &dyn Display)]) {
    if !is_enabled(level) {
        return;
    }
    LINE.with(|line| match line.try_borrow_mut() {
        Ok(mut line) => line.write(level, message, fields),
        // A value's `Display` logs in turn: both lines are wanted.
        Err(_) => Line { text: String::new(), value: String::new() }.write(level, message, fields),
    });
}

/// Text of a line under way and of the value being escaped; both keep their memory from line to line.
struct Line {
    text: String,
    value: String,
}

impl Line {
    fn write(&mut self, level: Level, message: &dyn Display, fields: &[(&str, &dyn Display)]) {
        self.compose(SystemTime::now(), level, message, fields);
        send(&self.text);
    }

    fn compose(
        &mut self,
        now: SystemTime,
        level: Level,
        message: &dyn Display,
        fields: &[(&str, &dyn Display)],
    ) {
        self.text.clear();
        let _ = write!(self.text, "time={} level={}", Timestamp(now), level.name());
        self.field("msg", message);
        for (key, value) in fields {
            self.field(key, *value);
        }
        let dropped = DROPPED.get();
        if dropped > 0 {
            self.field("dropped", &dropped);
        }
        self.text.push('\n');
    }

    /// Adds ` key=value`, or nothing where the line is full.
    fn field(&mut self, key: &str, value: &dyn Display) {
        self.value.clear();
        let limit = if matches!(key, "pod" | "ctr") { ID_DIGITS } else { VALUE_BYTES_MAX };
        // An error means that the value was cut, which the line may show.
        let _ = write!(Cut { text: &mut self.value, limit }, "{value}");
        let start = self.text.len();
        let _ = write!(self.text, " {key}={}", Quoted(&self.value));
        if self.text.len() >= LINE_BYTES_MAX {
            self.text.truncate(start);
        }
    }
}

/// Takes at most `limit` bytes, on a character's boundary.
struct Cut<'a> {
    text: &'a mut String,
    limit: usize,
}

impl fmt::Write for Cut<'_> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = self.limit - self.text.len();
        if part.len() <= room {
            self.text.push_str(part);
            return Ok(());
        }
        let end = (0..=room).rev().find(|&index| part.is_char_boundary(index)).unwrap_or(0);
        self.text.push_str(&part[..end]);
        Err(fmt::Error)
    }
}

/// A value as it stands on the line: bare where that is unmistakable, else in quotes with `"`, `\` and controls escaped.
struct Quoted<'a>(&'a str);

impl Display for Quoted<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |letter: char| letter.is_ascii_graphic() && !matches!(letter, '"' | '=' | '\\');
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return out.write_str(self.0);
        }
        out.write_char('"')?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(out, "\\{letter}")?,
                '\n' => out.write_str("\\n")?,
                // Also what would turn a terminal's text round or hide it.
                _ if letter.is_control()
                    || matches!(letter, '\u{200b}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
                {
                    write!(out, "\\u{{{:x}}}", u32::from(letter))?;
                }
                _ => out.write_char(letter)?,
            }
        }
        out.write_char('"')
    }
}

/// RFC 3339 in UTC with milliseconds. A clock before 1970 reads as 1970.
struct Timestamp(SystemTime);

impl Display for Timestamp {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let text = timestamp(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX));
        let milliseconds = std::str::from_utf8(&text[..TIMESTAMP_BYTES - "000000Z".len()]);
        write!(out, "{}Z", milliseconds.unwrap_or_default())
    }
}

/// Writes where that does not block; otherwise counts.
fn send(line: &str) {
    let stderr = std::io::stderr();
    let mut poll = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    let has_room = nix::poll::poll(&mut poll, PollTimeout::ZERO).is_ok_and(|count| count > 0);
    if has_room && nix::unistd::write(stderr.as_fd(), line.as_bytes()).is_ok() {
        DROPPED.set(0);
    } else {
        DROPPED.set(DROPPED.get() + 1);
    }
}

/// One line at a level: `log_line!(Level::Info, "text"; key = value, …)`. Values are anything with `Display`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_line {
    ($level:expr, $message:expr $(; $($key:ident = $value:expr),+ $(,)?)?) => {
        if $crate::log::is_enabled($level) {
            $crate::log::write($level, &$message, &[$($((stringify!($key), &$value as &dyn std::fmt::Display)),+)?]);
        }
    };
}

/// Something is lost or broken: `log::error!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_error {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Error, $($line)+) };
}

/// We went on with less: `log::warn!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_warn {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Warn, $($line)+) };
}

/// A change of state: `log::info!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_info {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Info, $($line)+) };
}

/// For whoever looks for a fault: `log::debug!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_debug {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Debug, $($line)+) };
}

pub use crate::{log_debug as debug, log_error as error, log_info as info, log_line, log_warn as warn};

#[cfg(test)]
mod tests {
    use super::{Cut, DROPPED, LINE_BYTES_MAX, Level, Line, Quoted, Timestamp};
    use std::fmt::{Display, Write as _};
    use std::time::{Duration, UNIX_EPOCH};

    fn compose(message: &str, fields: &[(&str, &dyn Display)]) -> String {
        let mut line = Line { text: String::new(), value: String::new() };
        line.compose(UNIX_EPOCH + Duration::from_millis(1_795_213_000_042), Level::Info, &message, fields);
        line.text
    }

    #[test]
    fn a_line_reads_as_documented() {
        let id = "3f2a9c01b7d4e5f60718293a4b5c6d7e";
        assert_eq!(
            compose("pod ready", &[("pod", &id), ("ms", &4)]),
            "time=2026-11-20T22:16:40.042Z level=info msg=\"pod ready\" pod=3f2a9c01b7d4e ms=4\n"
        );
        DROPPED.set(2);
        assert!(compose("x", &[]).ends_with(" msg=x dropped=2\n"));
    }

    #[test]
    fn values_cannot_forge_a_line() {
        let cases = [
            ("plain/value:1", "plain/value:1"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a=b", "\"a=b\""),
            ("say \"x\" \\", "\"say \\\"x\\\" \\\\\""),
            ("a\nlevel=error", "\"a\\nlevel=error\""),
            ("\u{1b}[2J", "\"\\u{1b}[2J\""),
            ("\u{202e}txt", "\"\\u{202e}txt\""),
            ("größe", "\"größe\""),
        ];
        for (value, expected) in cases {
            assert_eq!(Quoted(value).to_string(), expected, "{value:?}");
        }
    }

    #[test]
    fn a_line_has_an_end() {
        let long = "é ".repeat(4000);
        let line = compose(&long, &[("a", &long), ("b", &long), ("c", &long), ("d", &long), ("last", &1)]);
        assert!(line.len() <= LINE_BYTES_MAX && line.ends_with('\n'), "{} bytes", line.len());
    }

    #[test]
    fn cut_keeps_characters_whole() {
        for limit in 0..8 {
            let mut text = String::new();
            let _ = write!(Cut { text: &mut text, limit }, "aé€b");
            assert!("aé€b".starts_with(&text) && text.len() <= limit);
        }
    }

    #[test]
    fn timestamps_have_milliseconds_and_begin_in_1970() {
        let at = UNIX_EPOCH + Duration::from_nanos(1_700_000_000_012_945_678);
        assert_eq!(Timestamp(at).to_string(), "2023-11-14T22:13:20.012Z");
        assert_eq!(Timestamp(UNIX_EPOCH - Duration::from_secs(1)).to_string(), "1970-01-01T00:00:00.000Z");
    }
}
