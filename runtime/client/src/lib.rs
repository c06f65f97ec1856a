//! The commands that send requests to a running daemon over its control socket, or read its files: `coracle
//! pods`, `ps`, `images`, `stats`, `events`, `logs`, `exec`, `coracle image …`, `coracle config status`, `coracle why`, `coracle
//! support-dump`. They are parts of the program `coracle` that run in separate processes, so they may block.
//!
//! ```text
//!   coracle ps       ──>  list  ──┐
//!   coracle logs     ──>  logs  ──┤    (and the container's log file)
//!   coracle exec     ──>  exec  ──┤    (and the command's streams)
//!   coracle events   ──> events ──┤
//!   coracle image …  ──>  image ──┤
//!   coracle why NAME ──>  why   ──┴──> ask ──> control.sock (coracle_control)
//!                          └──> history below --state
//! ```
#![forbid(unsafe_code)]

mod ask;
pub mod configuration;
pub mod events;
pub mod exec;
mod find;
pub mod image;
pub mod list;
pub mod logs;
mod progress;
mod stream;
pub mod support;
mod take_over;
pub mod why;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

pub use coracle_base::collect;
pub use coracle_base::error::{EXIT_USAGE, describe_io};
use coracle_base::text::Escaped;
pub use coracle_base::text::print;

/// A parsed command with its own options.
#[derive(Debug, Default)]
pub struct Typed {
    /// Name of the command: `why` for example, or the second word of `coracle image`.
    pub name: &'static str,
    /// The arguments that are not options.
    pub arguments: Vec<String>,
    /// Names of the given options that have no value.
    pub flags: Vec<&'static str>,
    /// Names and values of the given options that have a value, in the order of the command line.
    pub values: Vec<(&'static str, String)>,
}

impl Typed {
    /// The last value of an option; `None` if the option is not given.
    pub fn value(&self, option: &str) -> Option<&str> {
        self.all(option).last()
    }

    /// All values of an option that may be repeated.
    pub fn all(&self, option: &str) -> impl Iterator<Item = &str> {
        self.values.iter().filter(move |(name, _)| *name == option).map(|(_, value)| value.as_str())
    }
}

/// Parses a duration of at most a year: `90` in seconds, `1.5s`, `10m`, `1h30m`, `2d`. `None` if it is
/// invalid.
fn duration(text: &str) -> Option<Duration> {
    const MAX_S: f64 = 365.0 * 86_400.0;
    let (mut seconds, mut number) = (0.0, String::new());
    let bare = text.ends_with(|letter: char| letter.is_ascii_digit() || letter == '.');
    for letter in text.chars().chain(bare.then_some('s')) {
        let unit = match letter {
            '0'..='9' | '.' => {
                number.push(letter);
                continue;
            }
            's' => 1.0,
            'm' => 60.0,
            'h' => 3600.0,
            'd' => 86_400.0,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * unit;
        number.clear();
    }
    (!text.is_empty() && seconds <= MAX_S).then(|| Duration::from_secs_f64(seconds))
}

/// Prints a text without characters that a terminal would execute to stdout. If the reader has closed the
/// pipe, the exit code is a failure, without a message.
fn print_raw(text: &str) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Prints the lines to stderr; returns the exit code of a failure.
pub fn complain<T: std::fmt::Display>(lines: impl IntoIterator<Item = T>) -> ExitCode {
    for line in lines {
        // Without a stderr there is no place for a message.
        let line = line.to_string();
        let _ = writeln!(std::io::stderr(), "coracle: {}", Escaped(&line));
    }
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::duration;
    use std::time::Duration;

    #[test]
    fn durations_are_parsed() {
        for (text, ms) in [
            ("90", 90_000),
            ("1.5s", 1_500),
            ("10m", 600_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("0", 0),
        ] {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "s", "m10", "1x", "-1", "1h-5m", "1..2s", "400d", "99999999999999999999", "nan", "inf"]
        {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
