//! Omits warnings that equal one of the last minute: a lasting cause, such as a full disk, must not displace
//! all other messages from the log and from the histories of pods.
//!
//! ```text
//! 12:00:00 warn "cannot remove …" pod=a error=…              the first one is written at once
//! 12:00:10, 12:00:20, … equal messages                       counted
//! 12:01:00 warn "cannot remove …" pod=a error=… repeated=6   then one per minute, with the number of omitted
//! ones
//! ```
//! A message is omitted only if it is equal in level, message and all fields except [`TIMINGS`], so messages
//! about different objects or causes are never merged. A pending number is written with the next message of
//! any kind after the minute, before its entry is replaced by another one, and when the daemon stops. There
//! is no timer, so an idle daemon is not woken up. The module does no I/O: the clock is an argument.

use std::time::{Duration, Instant};

/// Minimum time between two equal messages.
const INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of remembered messages. A message that was removed from the memory is written again when it
/// occurs again.
const LINES_MAX: usize = 32;

/// Names of fields that are not compared, because they differ between attempts although the cause is the
/// same.
const TIMINGS: [&str; 3] = ["ms", "again_s", "after_s"];

/// Whether a field is compared: its value must be equal in a repetition.
pub(super) fn is_compared(key: &str) -> bool {
    !TIMINGS.contains(&key)
}

/// Decision about one log message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The message is written, with the number of equal messages omitted since the last written one.
    Write {
        left_out: u32,
    },
    LeaveOut,
}

/// The messages of the last minute.
#[derive(Debug, Default)]
pub(super) struct Repeats<Body> {
    lines: Vec<Remembered<Body>>,
}

/// A written message, and the number of its repetitions since.
#[derive(Debug)]
struct Remembered<Body> {
    /// The text that a message must equal to count as a repetition.
    text: Box<str>,
    /// Body of the last omitted message, which is written with the number of omitted ones; `None` if there is
    /// none.
    body: Option<Body>,
    written_at: Instant,
    left_out: u32,
}

impl<Body> Repeats<Body> {
    pub(super) const fn new() -> Repeats<Body> {
        Repeats { lines: Vec::new() }
    }

    /// Decides about a message. `body` is called if the message is omitted.
    pub(super) fn judge(&mut self, text: &str, now: Instant, body: impl FnOnce() -> Body) -> Verdict {
        let Some(line) = self.lines.iter_mut().find(|line| &*line.text == text) else {
            self.lines.push(Remembered { text: text.into(), body: None, written_at: now, left_out: 0 });
            return Verdict::Write { left_out: 0 };
        };
        if now.saturating_duration_since(line.written_at) < INTERVAL {
            line.left_out = line.left_out.saturating_add(1);
            line.body = Some(body());
            return Verdict::LeaveOut;
        }
        line.written_at = now;
        line.body = None;
        Verdict::Write { left_out: std::mem::take(&mut line.left_out) }
    }

    /// Forgets messages that are older than a minute, and the oldest ones if there is no space for `except`,
    /// the message that is judged next (empty: none). Returns the forgotten messages that were repeated, with
    /// the numbers of repetitions.
    pub(super) fn expire(&mut self, now: Instant, except: &str) -> Vec<(Body, u32)> {
        let is_new = !except.is_empty() && self.lines.iter().all(|line| &*line.text != except);
        let mut excess = (self.lines.len() + usize::from(is_new)).saturating_sub(LINES_MAX);
        self.forget(|line| {
            if &*line.text == except {
                return false;
            }
            // They are in the order in which they were first written.
            let is_over = excess > 0 || now.saturating_duration_since(line.written_at) >= INTERVAL;
            excess = excess.saturating_sub(usize::from(is_over));
            is_over
        })
    }

    /// Forgets a message that could not be written.
    pub(super) fn forget_line(&mut self, text: &str) {
        self.forget(|line| &*line.text == text);
    }

    /// Forgets all messages; returns those that were repeated, with the numbers of repetitions.
    pub(super) fn clear(&mut self) -> Vec<(Body, u32)> {
        self.forget(|_| true)
    }

    fn forget(&mut self, mut is_over: impl FnMut(&Remembered<Body>) -> bool) -> Vec<(Body, u32)> {
        let over = self.lines.extract_if(.., |line| is_over(line));
        let told = over.filter_map(|line| Some((line.body?, line.left_out)));
        let told = told.collect();
        if self.lines.is_empty() {
            // A daemon without trouble keeps no memory for it.
            self.lines = Vec::new();
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::{INTERVAL, LINES_MAX, Repeats, Verdict};
    use std::time::{Duration, Instant};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_line_is_written_once_and_then_once_a_minute_with_the_number_left_out() {
        let (mut repeats, start) = (Repeats::new(), Instant::now());
        let mut written = Vec::new();
        for second in 0..=180 {
            let now = start + second * SECOND;
            assert!(repeats.expire(now, "a").is_empty());
            if let Verdict::Write { left_out } = repeats.judge("a", now, || second) {
                written.push((second, left_out));
            }
        }
        assert_eq!(written, [(0, 0), (60, 59), (120, 59), (180, 59)]);
    }

    #[test]
    fn a_line_that_was_not_written_is_written_the_next_time() {
        let (mut repeats, now) = (Repeats::new(), Instant::now());
        for line in ["a", "b", "a", "a"] {
            assert_eq!(repeats.judge(line, now, || ()), Verdict::Write { left_out: 0 });
            repeats.forget_line("a");
        }
        assert_eq!(repeats.judge("b", now, || ()), Verdict::LeaveOut);
    }

    #[test]
    fn different_lines_are_all_written() {
        let (mut repeats, now) = (Repeats::new(), Instant::now());
        for number in 0..1000 {
            let line = format!("pod={number}");
            assert!(repeats.expire(now, &line).is_empty());
            assert_eq!(repeats.judge(&line, now, || ()), Verdict::Write { left_out: 0 });
            assert!(repeats.lines.len() <= LINES_MAX);
        }
    }

    #[test]
    fn each_omitted_line_is_counted() {
        let (mut repeats, start) = (Repeats::new(), Instant::now());
        let mut total = 0;
        // Of 100 lines that each come three times in a row, most give way to others.
        for number in 0..100 {
            let line = number.to_string();
            for _ in 0..3 {
                total += repeats.expire(start, &line).iter().map(|(_, count)| count).sum::<u32>();
                match repeats.judge(&line, start, || line.clone()) {
                    Verdict::Write { left_out } => total += 1 + left_out,
                    Verdict::LeaveOut => {}
                }
            }
        }
        total += repeats.clear().iter().map(|(_, count)| count).sum::<u32>();
        assert_eq!(total, 300);
        assert!(repeats.lines.is_empty());
    }

    #[test]
    fn the_last_count_is_reported_with_the_next_line_after_the_minute() {
        let (mut repeats, start) = (Repeats::new(), Instant::now());
        repeats.judge("a", start, || 0);
        repeats.judge("a", start + SECOND, || 1);
        repeats.judge("a", start + 2 * SECOND, || 2);
        assert!(repeats.expire(start + 59 * SECOND, "b").is_empty());
        assert_eq!(repeats.expire(start + INTERVAL, "b"), [(2, 2)]);
        // It is new again.
        assert_eq!(repeats.judge("a", start + INTERVAL, || 3), Verdict::Write { left_out: 0 });
    }
}
