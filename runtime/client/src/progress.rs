//! The progress of pulls and imports on standard error while their answers are awaited: on a terminal one line that is
//! updated, otherwise a plain line from time to time, so that a log of a long operation shows that it continues.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::text::Escaped;
use coracle_control::{Answer, Request};

use crate::ask::ask_on;
use crate::image::size;

/// Interval of updates.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

/// Interval of lines that do not go to a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Number of characters of a bar.
const BAR: u64 = 14;

/// Maximum number of characters of a name, so that the line fits into 80 columns.
const NAME_MAX: usize = 20;

/// The progress that is shown.
pub(crate) struct Shown {
    /// Whether the request has a progress.
    is_wanted: bool,
    is_terminal: bool,
    /// Whether the terminal's line has text.
    is_drawn: Cell<bool>,
    last: Cell<Instant>,
}

impl Shown {
    pub(crate) fn new(request: &Request) -> Shown {
        let is_wanted =
            matches!(request, Request::Pull { .. } | Request::Import { .. } | Request::TakeOver { .. });
        Shown {
            is_wanted,
            is_terminal: io::stderr().is_terminal(),
            is_drawn: Cell::new(false),
            last: Cell::new(Instant::now()),
        }
    }

    /// Asks the daemon for the progress and shows it. Without an answer nothing is shown: the operation itself reports errors.
    pub(crate) fn update(&self, socket: &Path) {
        let is_due = self.is_terminal || self.last.get().elapsed() >= PLAIN_INTERVAL;
        if !self.is_wanted || !is_due {
            return;
        }
        self.last.set(Instant::now());
        let answers = ask_on(socket, &Request::Pulling {}, INTERVAL).unwrap_or_default();
        let lines: Vec<String> = answers.iter().filter_map(|answer| line(answer, self.is_terminal)).collect();
        // Without standard error there is no place for it.
        let _ = match self.is_terminal {
            true => self.draw(lines.first().map_or("", String::as_str), lines.len()),
            false => lines.iter().try_for_each(|line| writeln!(io::stderr(), "{}", Escaped(line))),
        };
    }

    /// Replaces the terminal's line; of several operations the first one is shown, and the number of the others.
    fn draw(&self, line: &str, count: usize) -> io::Result<()> {
        let others = if count > 1 { format!(" +{}", count - 1) } else { String::new() };
        self.is_drawn.set(true);
        write!(io::stderr(), "\r{}{others}\x1b[K", Escaped(line))
    }

    /// Removes the terminal's line, before something else is printed.
    pub(crate) fn clear(&self) {
        if self.is_drawn.replace(false) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.clear();
    }
}

/// One operation as a line.
fn line(answer: &Answer, has_bar: bool) -> Option<String> {
    let Answer::Pulling { name, bytes_done, bytes_total, rate, left_s, .. } = answer else { return None };
    let skipped = name.chars().count().saturating_sub(NAME_MAX);
    let mut line: String = match has_bar && skipped > 0 {
        true => std::iter::once('…').chain(name.chars().skip(skipped + 1)).collect(),
        false => name.clone(),
    };
    // Nothing is known before the manifest or the archive's header is read.
    if *bytes_total > 0 {
        if has_bar {
            let full = (bytes_done.saturating_mul(BAR) / bytes_total).min(BAR) as usize;
            let _ = write!(line, " [{:<width$}]", "=".repeat(full), width = BAR as usize);
        }
        let _ = write!(line, " {} of {}", size(*bytes_done), size(*bytes_total));
    } else if *bytes_done > 0 {
        let _ = write!(line, " {}", size(*bytes_done));
    }
    if *rate > 0 {
        let _ = write!(line, ", {}/s", size(*rate));
    }
    if let Some(left) = left_s {
        let _ = write!(line, ", {left} s left");
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::line;
    use coracle_control::Answer;

    fn at(bytes_done: u64, bytes_total: u64, name: &str) -> Answer {
        Answer::Pulling {
            name: name.to_owned(),
            bytes_done,
            bytes_total,
            layers_done: 0,
            layers_total: 0,
            rate: 2_000_000,
            left_s: Some(7),
            since_s: 3,
        }
    }

    #[test]
    fn a_line_has_a_bar_on_a_terminal_and_fits_into_it() {
        let text = line(&at(25_000_000, 100_000_000, "busybox:1"), true).unwrap();
        assert_eq!(text, "busybox:1 [===           ] 25.0MB of 100MB, 2.0MB/s, 7 s left");
        let text = line(&at(25_000_000, 100_000_000, "busybox:1"), false).unwrap();
        assert_eq!(text, "busybox:1 25.0MB of 100MB, 2.0MB/s, 7 s left");
        let long = "/media/usb/images/".repeat(20);
        let text = line(&at(999_900_000, 999_900_000, &long), true).unwrap();
        assert!(text.starts_with('…') && text.chars().count() <= 78, "{text}");
        // A daemon that says more than there is, or nothing.
        assert!(line(&at(u64::MAX, 1, "x"), true).unwrap().contains("[==============]"));
        assert_eq!(line(&at(0, 0, "x"), true).unwrap(), "x, 2.0MB/s, 7 s left");
        assert_eq!(line(&Answer::End {}, true), None);
    }
}
