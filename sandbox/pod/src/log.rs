//! Converts output of a container to lines of its log file, in the format that the kubelet reads (CRI 2.18):
//!
//! ```text
//!   2026-03-01T07:05:09.004020000Z stderr F disk is almost full
//! ```
//! [`split`] is pure: the same bytes give the same lines, regardless of how reads divide them. The lines of one read are
//! written together, and none of them in part. On a full disk lines are lost and counted, and the container keeps running.

use coracle_sys::process::{self, Clock};
use coracle_sys::{Errno, FdRef, fs};
use coracle_wire::{TIMESTAMP_BYTES, timestamp};

/// Maximum length of a line's content in bytes; longer lines are split into parts with the tag `P` (containerd's
/// max_container_log_line_size, which log collectors assume).
pub(crate) const LINE_BYTES_MAX: usize = 16 * 1024;

/// Length of a line's prefix in bytes: timestamp (30), stream (6), tag (1) and a space after each.
const PREFIX_BYTES: usize = 40;

/// Position of the tag in the prefix.
const TAG_AT: usize = PREFIX_BYTES - 2;

/// Whether a line of the log ends a line of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// `F`: the whole line, or the last part of a line.
    Full,
    /// `P`: a part of a line; the next line of the same stream continues it.
    Partial,
}

impl Tag {
    fn letter(self) -> u8 {
        match self {
            Self::Full => b'F',
            Self::Partial => b'P',
        }
    }
}

/// Splits `bytes` into lines. The first `held` bytes of `buffer` are an incomplete line of earlier calls; the
/// incomplete line at the end of `bytes` is stored there. Each line is passed to `emit` in two parts: the part in
/// `buffer` and the part in `bytes`.
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

/// State of a log between two reads.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// Time of the last line in nanoseconds since 1970: the next line's time is not earlier, even if the wall clock is
    /// set back.
    last_ns: i64,
    /// Number of lines that could not be written.
    pub(crate) lost: u64,
}

/// The lines of one read. Lines that fit into the buffer are written with one call: a call for each line would be most
/// of the cost of a container that logs much.
pub(crate) struct Batch<'a> {
    writer: &'a mut Writer,
    file: FdRef<'a>,
    prefix: [u8; PREFIX_BYTES],
    buffer: &'a mut [u8],
    used: usize,
}

impl Writer {
    /// Begins a batch of lines of `stream`; their timestamp is the current time. `file` is the log, and `buffer`
    /// contains the batch. The lines are written at the latest by [`Batch::write`].
    pub(crate) fn batch<'a>(
        &'a mut self,
        file: FdRef<'a>,
        stream: Stream,
        buffer: &'a mut [u8],
    ) -> Batch<'a> {
        self.last_ns = self.last_ns.max(process::now_ns(Clock::Wall));
        let prefix = prefix(self.last_ns, stream);
        Batch { writer: self, file, prefix, buffer, used: 0 }
    }
}

impl Batch<'_> {
    /// Appends one line to the log, in two parts.
    pub(crate) fn add(&mut self, tag: Tag, old: &[u8], new: &[u8]) {
        self.prefix[TAG_AT] = tag.letter();
        let length = PREFIX_BYTES + old.len() + new.len() + 1;
        if length > self.buffer.len() - self.used {
            self.write();
        }
        let parts = [&self.prefix[..], old, new, b"\n"];
        let Some(room) = self.buffer[self.used..].get_mut(..length) else {
            // Longer than the whole buffer.
            let written = fs::write_parts(self.file, parts);
            return self.writer.account(self.file, written, parts);
        };
        let mut rest = room;
        for part in parts {
            let (to, after) = rest.split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = after;
        }
        self.used += length;
    }

    /// Writes the lines that the buffer holds.
    pub(crate) fn write(&mut self) {
        let lines = &self.buffer[..core::mem::take(&mut self.used)];
        if !lines.is_empty() {
            let written = fs::write(self.file, lines);
            self.writer.account(self.file, written, [lines, b"", b"", b""]);
        }
    }
}

impl Writer {
    /// Counts the lines of `parts` that a write has not written completely. If the disk became full during the write,
    /// removes the incomplete line from the file, so that the next line is valid.
    fn account(&mut self, file: FdRef<'_>, written: Result<usize, Errno>, parts: [&[u8]; 4]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let written = match written {
            Ok(written) if written == length => return,
            Ok(written) => written,
            Err(_) => 0,
        };
        let (lost, incomplete) = lost(written, parts);
        self.lost += lost;
        if incomplete > 0 {
            take_back(file, incomplete);
        }
    }
}

/// Counts the lines that are incomplete if only the first `written` bytes were written; also returns the number of
/// written bytes of the first incomplete line.
fn lost(written: usize, parts: [&[u8]; 4]) -> (u64, usize) {
    let (mut lost, mut complete) = (0, 0);
    for (index, byte) in parts.into_iter().flatten().enumerate() {
        match byte {
            b'\n' if index < written => complete = index + 1,
            b'\n' => lost += 1,
            _ => {}
        }
    }
    (lost, written - complete)
}

/// Removes the last `written` bytes of the file, which this process has just appended. Errors are ignored: readers skip
/// an incomplete line.
fn take_back(file: FdRef<'_>, written: usize) {
    if let Ok(start) = fs::position(file).and_then(|end| end.checked_sub(written as u64).ok_or(Errno::EINVAL))
    {
        let _ = fs::truncate(file, start);
    }
}

/// The prefix of a line, `TIMESTAMP SP STREAM SP TAG SP`, with the tag of a full line.
fn prefix(time_ns: i64, stream: Stream) -> [u8; PREFIX_BYTES] {
    let mut text = *b"0000-00-00T00:00:00.000000000Z stdout F ";
    text[..TIMESTAMP_BYTES].copy_from_slice(&timestamp(time_ns));
    if stream == Stream::Stderr {
        text[31..37].copy_from_slice(b"stderr");
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

    /// A second implementation of CRI 2.18, which is applied to the whole output at once.
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
    fn log_lines_do_not_depend_on_how_output_is_split() {
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
    fn log_lines_begin_with_time_stream_and_tag() {
        let cases = [
            (1_772_348_709_004_020_000, Stream::Stderr, "2026-03-01T07:05:09.004020000Z stderr F "),
            (0, Stream::Stdout, "1970-01-01T00:00:00.000000000Z stdout F "),
            (951_782_400_000_000_001, Stream::Stdout, "2000-02-29T00:00:00.000000001Z stdout F "),
            (1_735_689_599_999_999_999, Stream::Stdout, "2024-12-31T23:59:59.999999999Z stdout F "),
        ];
        for (time_ns, stream, text) in cases {
            let prefix = prefix(time_ns, stream);
            assert_eq!(core::str::from_utf8(&prefix), Ok(text));
            assert_eq!(prefix[TAG_AT], Tag::Full.letter());
        }
    }

    #[test]
    fn batches_of_any_size_write_the_same_lines() {
        for size in [1, PREFIX_BYTES, 64, 200, 8 << 10] {
            let file = coracle_sys::memory::memory_file(c"log").unwrap();
            let (mut writer, mut buffer) = (Writer::default(), vec![0; size]);
            let mut batch = writer.batch(file.borrow(), Stream::Stderr, &mut buffer);
            let mut expected = Vec::new();
            let lines =
                [("", ""), ("one", ""), ("t", "wo"), ("", "three"), ("", &"x".repeat(300)), ("", "end")];
            for (tag, (old, new)) in [Tag::Partial, Tag::Full].into_iter().cycle().zip(lines) {
                batch.add(tag, old.as_bytes(), new.as_bytes());
                expected.push(format!("stderr {} {old}{new}", char::from(tag.letter())));
            }
            batch.write();
            batch.write();
            assert_eq!(writer.lost, 0);
            let mut content = vec![0; 4096];
            let length = fs::read_from_start(file.borrow(), &mut content).unwrap();
            let content = core::str::from_utf8(&content[..length]).unwrap();
            let found: Vec<_> = content.lines().map(|line| &line[TIMESTAMP_BYTES + 1..]).collect();
            assert_eq!(found, expected, "{size} bytes");
        }
    }

    #[test]
    fn an_incomplete_line_of_a_short_write_is_lost() {
        let parts = [&b"one\ntw"[..], b"o", b"", b"\n"];
        let cases = [(0, (2, 0)), (3, (2, 3)), (4, (1, 0)), (5, (1, 1)), (7, (1, 3)), (8, (0, 0))];
        for (written, expected) in cases {
            assert_eq!(lost(written, parts), expected, "{written} bytes");
        }
    }
}
