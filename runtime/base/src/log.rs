//! Logging to stderr: one line of `key=value` pairs per event, for people and for `grep`.
//!
//! ```text
//!   time=2026-11-20T22:34:13.123Z level=info msg="pod ready" pod=3f2a9c01b7d4e ms=4
//!   {"time":"2026-11-20T22:34:13.123Z","level":"info","msg":"pod ready","pod":"3f2a9c01b7d4e","ms":"4"}
//! ```
//! The second line is in the format of `log_format = "json"`. If stderr is the journal (`JOURNAL_STREAM`,
//! systemd.exec(5)), each line is sent to the journal with its priority and its keys as fields (`journal`); if that fails,
//! it is written to stderr and begins with its priority, `<4>`, which the journal removes (sd-daemon(3)).
//!
//! `log::info!("pod ready"; pod = id, ms = 4)`. Keys have the same spelling everywhere (`pod`, `ctr`, `op`,
//! `step`, `ms`); `pod` and `ctr` are cut to the 13 digits that crictl prints. Values with other than plain
//! printable characters are quoted and escaped, so that no image name or plugin message can forge a line. A
//! warning or error that equals one of the last minute is omitted and counted: see `repeats`. Writing never
//! blocks: if the reader of stderr is too slow, lines are dropped and counted, and the next line reports
//! their number. No line is longer than `LINE_BYTES_MAX`.

mod journal;
mod repeats;

use std::cell::{Cell, RefCell};
use std::fmt::{self, Display, Write as _};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_wire::{TIMESTAMP_BYTES, timestamp};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use self::journal::Journal;
use self::repeats::{Repeats, Verdict};
use crate::history;
use crate::text::is_hidden;

/// Maximum length of a line in bytes (`PIPE_BUF`): a pipe that is ready for writing accepts this number of
/// bytes at once, so that lines are complete and a write never blocks.
const LINE_BYTES_MAX: usize = 4096;

/// Maximum length of a value in bytes before escaping; leaves space for the other keys of a line.
const VALUE_BYTES_MAX: usize = 1024;

/// Messages that are never omitted as repetitions: they report requests or errors of others at that moment,
/// which are new although the text is equal, or do not name their object.
const EACH_WRITTEN: [&str; 4] = [
    "invalid configuration",
    "reload failed, keeping the old configuration",
    "reload: these keys take effect after a restart",
    "streaming: session ended with an error",
];

/// Maximum length in bytes of a text that is compared with others; a longer one is never omitted.
const COMPARED_BYTES_MAX: usize = 8192;

/// Number of digits of an ID that crictl prints.
const ID_DIGITS: usize = 13;

/// Beginnings of messages that are not recorded in the history: dumps of the current state, and output of
/// plugins.
const NOT_KEPT: [&str; 2] = ["dump", "NRI plugin output"];

/// Severity of a log message. Messages below the configured severity are not written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Data is lost or a function is broken; the administrator should act.
    Error,
    /// The daemon continues with reduced function.
    Warn,
    /// A state change that is visible in the CRI; there is one message for each change.
    #[default]
    Info,
    /// Details for troubleshooting; not written by default.
    Debug,
}

impl Level {
    /// Name of the level in the configuration and in log lines.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }

    /// The level as a priority of syslog(3) and the journal.
    fn priority(self) -> u8 {
        match self {
            Level::Error => 3,
            Level::Warn => 4,
            Level::Info => 6,
            Level::Debug => 7,
        }
    }
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// Pairs `key=value`.
    #[default]
    Text,
    /// One JSON object; all values are strings.
    Json,
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);
static IS_JSON: AtomicBool = AtomicBool::new(false);
static HAS_PRIORITIES: AtomicBool = AtomicBool::new(false);

thread_local! {
    static LINE: RefCell<Line> = const { RefCell::new(Line::new()) };
    static DROPPED: Cell<u64> = const { Cell::new(0) };
    /// `None`: stderr is not the journal.
    static JOURNAL: RefCell<Option<Journal>> = const { RefCell::new(None) };
}

/// Sets the level for later messages; called at the start and on SIGHUP.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Sets the format of later lines; called at the start and on SIGHUP.
pub fn set_format(format: Format) {
    IS_JSON.store(format == Format::Json, Ordering::Relaxed);
}

/// Enables the journal's protocol, and priorities in front of lines, if stderr is the journal's, according to `JOURNAL_STREAM`, which
/// contains `DEVICE:INODE` of the journal's stream.
pub fn detect_journal() {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let is_journal = nix::sys::stat::fstat(std::io::stderr().as_fd())
        .is_ok_and(|about| named == format!("{}:{}", about.st_dev, about.st_ino));
    HAS_PRIORITIES.store(is_journal, Ordering::Relaxed);
    JOURNAL.set(is_journal.then(|| Journal::new(journal::SOCKET).ok()).flatten());
}

/// Whether a message of `level` would be used; for values that are expensive to compute.
pub fn is_enabled(level: Level) -> bool {
    #[cfg(feature = "simulation")]
    if let Some(node) = coracle_sandbox::simulation::node() {
        return node.wants_log();
    }
    is_written(level) || is_kept(level)
}

fn is_written(level: Level) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Whether [`history`] records messages of this level, whatever level is configured.
fn is_kept(level: Level) -> bool {
    level <= Level::Info && history::is_open()
}

/// Logs one message; called by the macros.
pub fn write(level: Level, message: &dyn Display, fields: &[(&str, &dyn Display)]) {
    LINE.with(|line| match line.try_borrow_mut() {
        Ok(mut line) => line.write(level, message, fields),
        // The `Display` of a value logged a line itself; both lines must be written.
        Err(_) => Line::new().write(level, message, fields),
    });
}

/// Writes the number of omitted repetitions of each message, because the counts are lost when the daemon
/// ends.
pub fn tell_repeats() {
    LINE.with_borrow_mut(|line| {
        for (omitted, left_out) in line.repeats.clear() {
            line.emit_omitted(&omitted, left_out);
        }
    });
}

/// Buffers for the current line and the value that is being escaped; their memory is reused.
struct Line {
    text: String,
    value: String,
    repeats: Repeats<OmittedMessage>,
}

/// A message that was omitted as a repetition.
struct OmittedMessage {
    at: SystemTime,
    level: Level,
    message: String,
    fields: Vec<(Box<str>, String)>,
}

impl OmittedMessage {
    fn new(
        at: SystemTime,
        level: Level,
        message: &dyn Display,
        fields: &[(&str, &dyn Display)],
    ) -> OmittedMessage {
        let fields = fields.iter().map(|(key, value)| ((*key).into(), value.to_string())).collect();
        OmittedMessage { at, level, message: message.to_string(), fields }
    }
}

impl Line {
    const fn new() -> Line {
        Line { text: String::new(), value: String::new(), repeats: Repeats::new() }
    }

    fn write(&mut self, level: Level, message: &dyn Display, fields: &[(&str, &dyn Display)]) {
        let now = SystemTime::now();
        #[cfg(feature = "simulation")]
        if let Some(node) = coracle_sandbox::simulation::node() {
            self.text.clear();
            self.compose(Format::Text, now, level, message, fields);
            return node.log(&self.text);
        }
        let clock = crate::time::now();
        let compared = if level <= Level::Warn { compared(level, message, fields) } else { String::new() };
        for (omitted, left_out) in self.repeats.expire(clock, &compared) {
            self.emit_omitted(&omitted, left_out);
        }
        let omitted = || OmittedMessage::new(now, level, message, fields);
        let left_out = match compared.is_empty() {
            true => 0,
            false => match self.repeats.judge(&compared, clock, omitted) {
                Verdict::Write { left_out } => left_out,
                Verdict::LeaveOut => return,
            },
        };
        let is_out = match left_out {
            0 => self.emit(now, level, message, fields),
            _ => self.emit(now, level, message, &[fields, &[("repeated", &left_out)]].concat()),
        };
        if !is_out {
            // The log has no such line, so that the next one is no repetition.
            self.repeats.forget_line(&compared);
        }
    }

    /// Writes an omitted message with its time and the number of omitted ones.
    fn emit_omitted(&mut self, omitted: &OmittedMessage, left_out: u32) {
        let fields = omitted.fields.iter().map(|(key, value)| (&**key, value as &dyn Display));
        let fields: Vec<_> = fields.chain([("repeated", &left_out as &dyn Display)]).collect();
        self.emit(omitted.at, omitted.level, &omitted.message, &fields);
    }

    /// Writes a message to the history and to stderr, depending on its level. Returns false if stderr is full
    /// and the message is lost.
    fn emit(
        &mut self,
        now: SystemTime,
        level: Level,
        message: &dyn Display,
        fields: &[(&str, &dyn Display)],
    ) -> bool {
        let tells = || !NOT_KEPT.iter().any(|start| message.to_string().starts_with(start));
        if is_kept(level) && tells() {
            self.text.clear();
            self.compose(Format::Json, now, level, message, fields);
            let pod = fields.iter().find(|(key, _)| *key == "pod").map(|(_, value)| value.to_string());
            history::keep(pod.as_deref(), &self.text);
        }
        if is_written(level) {
            self.text.clear();
            let format = if IS_JSON.load(Ordering::Relaxed) { Format::Json } else { Format::Text };
            self.compose(format, now, level, message, fields);
            if HAS_PRIORITIES.load(Ordering::Relaxed) {
                if self.send_to_journal(level, message, fields) {
                    return true;
                }
                self.text.insert_str(0, &format!("<{}>", level.priority()));
            }
            return send(&self.text);
        }
        true
    }

    /// Sends the formatted line to the journal, with the keys of the message as fields. Returns false if that fails.
    fn send_to_journal(
        &mut self,
        level: Level,
        message: &dyn Display,
        fields: &[(&str, &dyn Display)],
    ) -> bool {
        JOURNAL.with_borrow(|journal| {
            let Some(journal) = journal else { return false };
            let mut text = String::new();
            journal::compose(&mut text, level, &self.text);
            for (key, value) in [("msg", message)].iter().chain(fields) {
                self.cut(key, *value);
                // Escaped, since a line break would begin another field.
                let escaped = format!("{}", crate::text::Escaped(&self.value)).replace('\n', "\\n");
                journal::field(&mut text, key, &escaped);
            }
            let is_sent = journal.send(&text).is_ok();
            if is_sent {
                DROPPED.set(0);
            }
            is_sent
        })
    }

    /// Stores the value of a key with the maximum length of such a value.
    fn cut(&mut self, key: &str, value: &dyn Display) {
        self.value.clear();
        let limit = if matches!(key, "pod" | "ctr") { ID_DIGITS } else { VALUE_BYTES_MAX };
        // An error means that the value was cut; the cut value is still logged.
        let _ = write!(Cut { text: &mut self.value, limit }, "{value}");
    }

    /// Appends the formatted line to the text.
    fn compose(
        &mut self,
        format: Format,
        now: SystemTime,
        level: Level,
        message: &dyn Display,
        fields: &[(&str, &dyn Display)],
    ) {
        let (time, name) = (Timestamp(now), level.name());
        let _ = match format {
            Format::Text => write!(self.text, "time={time} level={name}"),
            Format::Json => write!(self.text, "{{\"time\":\"{time}\",\"level\":\"{name}\""),
        };
        self.field(format, "msg", message);
        for (key, value) in fields {
            self.field(format, key, *value);
        }
        let dropped = DROPPED.get();
        if dropped > 0 {
            self.field(format, "dropped", &dropped);
        }
        self.text.push_str(match format {
            Format::Text => "\n",
            Format::Json => "}\n",
        });
    }

    /// Appends ` key=value`, or nothing if the line is full.
    fn field(&mut self, format: Format, key: &str, value: &dyn Display) {
        self.cut(key, value);
        let start = self.text.len();
        let _ = match format {
            Format::Text => write!(self.text, " {key}={}", Quoted(&self.value)),
            Format::Json => write!(self.text, ",\"{key}\":{}", Json(&self.value)),
        };
        if self.text.len() + "}\n".len() > LINE_BYTES_MAX {
            self.text.truncate(start);
        }
    }
}

/// The text that must be equal for a message to be a repetition; empty if the message is never omitted or is
/// too long to be compared.
fn compared(level: Level, message: &dyn Display, fields: &[(&str, &dyn Display)]) -> String {
    let message = message.to_string();
    if EACH_WRITTEN.contains(&message.as_str()) {
        return String::new();
    }
    let mut text = format!("{}\0{message}", level.name());
    for (key, value) in fields.iter().filter(|(key, _)| repeats::is_compared(key)) {
        // Writing to a String cannot fail.
        let _ = write!(text, "\0{key}={value}");
    }
    if text.len() > COMPARED_BYTES_MAX { String::new() } else { text }
}

/// A writer that accepts at most `limit` bytes and cuts at a character boundary.
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

/// Formats a value: without quotes if that is unambiguous, otherwise in quotes with `"`, `\` and control
/// characters escaped.
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
                _ if is_hidden(letter) => write!(out, "\\u{{{:x}}}", u32::from(letter))?,
                _ => out.write_char(letter)?,
            }
        }
        out.write_char('"')
    }
}

/// Formats a value as a JSON string; characters that a terminal must not receive are escaped, too.
struct Json<'a>(&'a str);

impl Display for Json<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_char('"')?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(out, "\\{letter}")?,
                // All of these are below U+10000: one escape each.
                _ if is_hidden(letter) => write!(out, "\\u{:04x}", u32::from(letter))?,
                _ => out.write_char(letter)?,
            }
        }
        out.write_char('"')
    }
}

/// Formats a time as RFC 3339 in UTC with milliseconds. Times before 1970 are written as 1970.
struct Timestamp(SystemTime);

impl Display for Timestamp {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let text = timestamp(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX));
        let milliseconds = std::str::from_utf8(&text[..TIMESTAMP_BYTES - "000000Z".len()]);
        write!(out, "{}Z", milliseconds.unwrap_or_default())
    }
}

/// Writes the line if this does not block; otherwise counts it as lost. Returns whether it was written.
fn send(line: &str) -> bool {
    let stderr = std::io::stderr();
    let mut poll = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    let has_room = nix::poll::poll(&mut poll, PollTimeout::ZERO).is_ok_and(|count| count > 0);
    let is_written = has_room && nix::unistd::write(stderr.as_fd(), line.as_bytes()).is_ok();
    DROPPED.set(if is_written { 0 } else { DROPPED.get() + 1 });
    is_written
}

/// Logs one message at a level: `log_line!(Level::Info, "text"; key = value, …)`. Values implement `Display`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_line {
    ($level:expr, $message:expr $(; $($key:ident = $value:expr),+ $(,)?)?) => {
        if $crate::log::is_enabled($level) {
            $crate::log::write($level, &$message, &[$($((stringify!($key), &$value as &dyn std::fmt::Display)),+)?]);
        }
    };
}

/// Logs lost data or a broken function: `log::error!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_error {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Error, $($line)+) };
}

/// Logs reduced function: `log::warn!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_warn {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Warn, $($line)+) };
}

/// Logs a state change: `log::info!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_info {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Info, $($line)+) };
}

/// Logs details for troubleshooting: `log::debug!("text"; key = value, …)`.
#[macro_export]
#[doc(hidden)]
macro_rules! log_debug {
    ($($line:tt)+) => { $crate::log_line!($crate::log::Level::Debug, $($line)+) };
}

pub use crate::{log_debug as debug, log_error as error, log_info as info, log_line, log_warn as warn};

#[cfg(test)]
mod tests {
    use super::{Cut, DROPPED, Format, Json, LINE_BYTES_MAX, Level, Line, Quoted, Timestamp, compared};
    use std::fmt::{Display, Write as _};
    use std::time::{Duration, UNIX_EPOCH};

    fn compose(message: &str, fields: &[(&str, &dyn Display)]) -> String {
        let mut line = Line::new();
        let now = UNIX_EPOCH + Duration::from_millis(1_795_213_000_042);
        line.compose(Format::Text, now, Level::Info, &message, fields);
        line.text
    }

    #[test]
    fn a_line_has_the_documented_format() {
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
    fn values_are_strings_of_json() {
        for (value, expected) in [
            ("plain", r#""plain""#),
            ("say \"x\" \\", r#""say \"x\" \\""#),
            ("a\nb", r#""a\u000ab""#),
            ("\u{1b}[2J\u{202e}", r#""\u001b[2J\u202e""#),
            ("größe", r#""größe""#),
        ] {
            assert_eq!(Json(value).to_string(), expected);
        }
    }

    #[test]
    fn only_lines_of_one_object_and_one_cause_are_the_same() {
        let long = "x".repeat(2000);
        let other = format!("{long}y");
        let of = |pod: &str, error: &str, ms: u32| {
            compared(Level::Warn, &"failed", &[("pod", &pod), ("error", &error), ("ms", &ms)])
        };
        assert_eq!(of("a", "full", 3), of("a", "full", 4));
        for (pod, error) in [
            ("b", "full"),
            ("a", "denied"),
            ("a", &long),
            ("a", &other),
            ("3f2a9c01b7d4e", "full"),
            ("3f2a9c01b7d4e5", "full"),
        ] {
            let same = [
                ("b", "full"),
                ("a", "denied"),
                ("a", &long),
                ("a", &other),
                ("3f2a9c01b7d4e", "full"),
                ("3f2a9c01b7d4e5", "full"),
            ]
            .into_iter()
            .filter(|(pod_2, error_2)| of(pod_2, error_2, 1) == of(pod, error, 1));
            assert_eq!(same.count(), 1, "{pod} {error}");
        }
        assert_ne!(
            of("a", "full", 1),
            compared(Level::Error, &"failed", &[("pod", &"a"), ("error", &"full")])
        );
        assert_eq!(of("a", &"x".repeat(9000), 1), "", "too long to be remembered");
        assert_eq!(compared(Level::Error, &"invalid configuration", &[("problem", &"a")]), "");
    }

    #[test]
    fn the_length_of_a_line_is_limited() {
        let long = "é ".repeat(4000);
        let line = compose(&long, &[("a", &long), ("b", &long), ("c", &long), ("d", &long), ("last", &1)]);
        assert!(line.len() <= LINE_BYTES_MAX && line.ends_with('\n'), "{} bytes", line.len());
    }

    #[test]
    fn values_are_cut_at_character_boundaries() {
        for limit in 0..8 {
            let mut text = String::new();
            let _ = write!(Cut { text: &mut text, limit }, "aé€b");
            assert!("aé€b".starts_with(&text) && text.len() <= limit);
        }
    }

    #[test]
    fn timestamps_have_milliseconds_and_are_not_before_1970() {
        let at = UNIX_EPOCH + Duration::from_nanos(1_700_000_000_012_945_678);
        assert_eq!(Timestamp(at).to_string(), "2023-11-14T22:13:20.012Z");
        assert_eq!(Timestamp(UNIX_EPOCH - Duration::from_secs(1)).to_string(), "1970-01-01T00:00:00.000Z");
    }
}
