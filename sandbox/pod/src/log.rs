//! Converts output of a container to lines of its log file, in the format that the kubelet reads (CRI 2.18):
//!
//! ```text
//!   2026-03-01T07:05:09.004020000Z stderr F disk is almost full
//! ```
//! [`split`] is pure: the same bytes give the same lines, regardless of how reads divide them. A line is written with
//! one call. On a full disk lines are lost and counted, and the container keeps running.

use coracle_sys::process::{self, Clock};
use coracle_sys::{Errno, FdRef, fs};
use coracle_wire::{TIMESTAMP_BYTES, timestamp};

/// Maximum length of a line's content in bytes; longer lines are split into parts with the tag `P` (containerd's
/// max_container_log_line_size, which log collectors assume).
pub(crate) const LINE_BYTES_MAX: usize = 16 * 1024;

/// Length of timestamp (30), stream (6), tag (1) and a space after each.
const PREFIX_BYTES: usize = 40;

/// Whether a line of the log is the end of a line of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// The end of a line.
    Full,
    /// The reader appends the next line of the same stream.
    Partial,
}

/// Splits `bytes` into lines. The first `held` bytes of `buffer` are an incomplete line of earlier calls; the
/// incomplete line at the end of `bytes` is stored there. Each line is emitted in two parts, the held one and the new
/// one.
pub(crate) fn split(
    buffer: &mut [u8],
    held: &mut usize,
    mut bytes: &[u8],
    mut emit: impl FnMut(Tag, &[u8], &[u8]),
) {
    debug_assert!(buffer.len() == LINE_BYTES_MAX && *held <= LINE_BYTES_MAX);
    while !bytes.is_empty() {
        let room = LINE_BYTES_MAX - *held;
        // A part of maximum length that is followed by a newline is a full line.
        let window = &bytes[..bytes.len().min(room + 1)];
        let (tag, used, skipped) = match window.iter().position(|byte| *byte == b'\n') {
            Some(end) => (Tag::Full, end, 1),
            None if window.len() > room => (Tag::Partial, room, 0),
            None => {
                buffer[*held..*held + bytes.len()].copy_from_slice(bytes);
                *held += bytes.len();
                return;
            }
        };
        let (mut old, mut new) = (&buffer[..*held], &bytes[..used]);
        if tag == Tag::Full {
            // Terminals end lines with "\r
            // "; the "\r" may be from the previous read.
            match new.strip_suffix(b"\r") {
                Some(stripped) => new = stripped,
                None if new.is_empty() => old = old.strip_suffix(b"\r").unwrap_or(old),
                None => {}
            }
        }
        emit(tag, old, new);
        *held = 0;
        bytes = &bytes[used + skipped..];
    }
}

/// The stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output, or the output of a terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// State of a log between two lines.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// Time of the last line: the next is never earlier, even if the wall clock is set back.
    last_ns: i64,
    /// Number of lines that could not be written.
    pub(crate) lost: u64,
}

impl Writer {
    /// Returns the timestamp for lines that are read now.
    pub(crate) fn stamp(&mut self) -> i64 {
        self.last_ns = self.last_ns.max(process::now_ns(Clock::Wall));
        self.last_ns
    }

    /// Appends one line to `file`; if that fails, counts it as lost.
    pub(crate) fn write(&mut self, file: FdRef<'_>, time_ns: i64, line: (Stream, Tag, &[u8], &[u8])) {
        let (stream, tag, old, new) = line;
        let prefix = prefix(time_ns, stream, tag);
        let length = PREFIX_BYTES + old.len() + new.len() + 1;
        match fs::write_parts(file, [&prefix, old, new, b"\n"]) {
            Ok(written) if written == length => {}
            // The disk became full in the middle of the line: remove the incomplete line, so that the next one is
            // valid.
            Ok(written) => {
                self.lost += 1;
                take_back(file, written);
            }
            Err(_) => self.lost += 1,
        }
    }
}

/// Removes the last `written` bytes, which this process has just appended. Errors are ignored: a reader skips an
/// incomplete line.
fn take_back(file: FdRef<'_>, written: usize) {
    if let Ok(start) = fs::position(file).and_then(|end| end.checked_sub(written as u64).ok_or(Errno::EINVAL))
    {
        let _ = fs::truncate(file, start);
    }
}

/// `TIMESTAMP SP STREAM SP TAG SP`.
fn prefix(time_ns: i64, stream: Stream, tag: Tag) -> [u8; PREFIX_BYTES] {
    let mut text = *b"0000-00-00T00:00:00.000000000Z stdout F ";
    text[..TIMESTAMP_BYTES].copy_from_slice(&timestamp(time_ns));
    if stream == Stream::Stderr {
        text[31..37].copy_from_slice(b"stderr");
    }
    if tag == Tag::Partial {
        text[38] = b'P';
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deterministic random number generator, so that a failure can be reproduced from its seed.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % end as u64) as usize
        }
    }

    type Lines = Vec<(Tag, Vec<u8>)>;

    fn lines(chunks: &[&[u8]]) -> Lines {
        let mut buffer = vec![0; LINE_BYTES_MAX];
        let mut held = 0;
        let mut lines = Vec::new();
        for chunk in chunks {
            split(&mut buffer, &mut held, chunk, |tag, old, new| lines.push((tag, [old, new].concat())));
        }
        if held > 0 {
            lines.push((Tag::Partial, buffer[..held].to_vec()));
        }
        lines
    }

    /// A second implementation of CRI 2.18, applied to the whole output.
    fn expected(output: &[u8]) -> Lines {
        let mut lines = Vec::new();
        for line in output.split_inclusive(|byte| *byte == b'\n') {
            let (mut line, tag) = match line.strip_suffix(b"\n") {
                Some(line) => (line, Tag::Full),
                None => (line, Tag::Partial),
            };
            while line.len() > LINE_BYTES_MAX {
                lines.push((Tag::Partial, line[..LINE_BYTES_MAX].to_vec()));
                line = &line[LINE_BYTES_MAX..];
            }
            if tag == Tag::Full {
                line = line.strip_suffix(b"\r").unwrap_or(line);
            }
            lines.push((tag, line.to_vec()));
        }
        lines
    }

    #[test]
    fn any_cutting_of_the_same_output_gives_the_same_lines() {
        for seed in 1..300 {
            let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let mut output = Vec::new();
            while output.len() < 60_000 {
                let length = match random.below(4) {
                    0 => random.below(5),
                    1 => random.below(200),
                    2 => LINE_BYTES_MAX - 2 + random.below(5),
                    _ => random.below(40_000),
                };
                output.extend((0..length).map(|index| b"ab\r\0\xff"[(index * 7 + length) % 5]));
                output.extend_from_slice([&b"\n"[..], b"\r\n", b"\r\r\n", b"\n\n"][random.below(4)]);
            }
            output.truncate(output.len() - random.below(3));
            let mut chunks = Vec::new();
            let mut rest = &output[..];
            while !rest.is_empty() {
                let most = [2, 100, LINE_BYTES_MAX, LINE_BYTES_MAX + 1][random.below(4)];
                let (chunk, after) = rest.split_at(rest.len().min(1 + random.below(most)));
                chunks.push(chunk);
                rest = after;
            }
            assert!(lines(&chunks) == expected(&output), "seed {seed}");
        }
    }

    #[test]
    fn a_line_of_just_the_longest_length_is_one_full_line() {
        let line = [vec![b'x'; LINE_BYTES_MAX], b"\n".to_vec()].concat();
        assert_eq!(lines(&[&line]).len(), 1);
        let longer = [b"x".to_vec(), line].concat();
        let tags: Vec<_> = lines(&[&longer]).iter().map(|(tag, line)| (*tag, line.len())).collect();
        assert_eq!(tags, [(Tag::Partial, LINE_BYTES_MAX), (Tag::Full, 1)]);
    }

    #[test]
    fn prefixes() {
        let cases = [
            (
                1_772_348_709_004_020_000,
                Stream::Stderr,
                Tag::Full,
                "2026-03-01T07:05:09.004020000Z stderr F ",
            ),
            (0, Stream::Stdout, Tag::Partial, "1970-01-01T00:00:00.000000000Z stdout P "),
            (951_782_400_000_000_001, Stream::Stdout, Tag::Full, "2000-02-29T00:00:00.000000001Z stdout F "),
            (
                1_735_689_599_999_999_999,
                Stream::Stdout,
                Tag::Full,
                "2024-12-31T23:59:59.999999999Z stdout F ",
            ),
        ];
        for (time_ns, stream, tag, text) in cases {
            assert_eq!(core::str::from_utf8(&prefix(time_ns, stream, tag)), Ok(text));
        }
    }
}
