//! `coracle logs`: prints the log file of a container, with lines such as
//!
//! ```text
//!   2026-11-22T10:20:30.123456789Z stdout F a line
//! ```
//! The command requests the path of the file from the daemon once. While it follows the log, it regularly
//! requests whether the container is running; a daemon that does not answer has no effect, because the
//! container's monitor writes the file.

mod time;

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Read as _, Seek as _, SeekFrom, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use coracle_base::error::describe_io;
use coracle_base::text::Escaped;
use coracle_base::time::wall;
use coracle_control::{Container, socket};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::list::{all_containers, containers_within};
use crate::{EXIT_USAGE, Typed, complain, find};

/// Time in milliseconds between two reads at the end of a file.
const LOOK_MS: u16 = 100;

/// Time between two requests to the daemon whether the container is running.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit for the daemon's answer about the state of the container, during which no log lines are printed.
const ASK_PATIENCE: Duration = Duration::from_millis(500);

/// Size in bytes of the blocks in which the last lines of a file are searched.
const BLOCK_BYTES: u64 = 64 << 10;

/// Maximum length of a line in bytes; longer lines are printed in parts. The monitor writes lines of at most
/// 16 KiB.
const LINE_BYTES_MAX: u64 = 256 << 10;

/// Options that select the lines to print.
#[derive(Debug, Default)]
struct Options {
    is_following: bool,
    has_times: bool,
    /// Number of lines from the end of the log; `None`: all.
    tail: Option<usize>,
    /// Earliest time of lines in nanoseconds since 1970; `None`: no limit.
    since_ns: Option<i64>,
}

/// Executes the command. Exit code 1: there is no log; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let options = match options(command) {
        Ok(options) => options,
        Err(text) => {
            complain([text]);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let wanted = command.arguments.first().map_or("", String::as_str);
    let containers = match all_containers(state) {
        Ok(containers) => containers,
        Err(error) => {
            return complain([crate::ask::unanswered(&socket(state), &error)]);
        }
    };
    let container = match find::container(wanted, &containers) {
        Ok(container) => container,
        Err(text) => return complain([format!("logs: {text}")]),
    };
    if container.log_path.is_empty() {
        return complain([format!("logs: {wanted}: the container has no log file")]);
    }
    let path = PathBuf::from(&container.log_path);
    let printed = print(&path, &options, || is_running(state, container));
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(error) => complain([format!("logs: {}: {}", path.display(), describe_io(&error))]),
    }
}

fn options(command: &Typed) -> Result<Options, String> {
    let [_] = command.arguments.as_slice() else {
        return Err("logs: one container is expected; `coracle logs --help` says more".to_owned());
    };
    let tail = match command.value("--tail") {
        None | Some("-1") => None,
        Some(text) => {
            Some(text.parse().map_err(|_| format!("--tail {text}: a number of lines is expected"))?)
        }
    };
    let since_ns = match command.value("--since") {
        None => None,
        Some(text) => Some(time::since(text, wall()).ok_or_else(|| {
            format!(
                "--since {text}: a time such as 2026-11-22T10:20:30Z or a duration such as 10m is expected"
            )
        })?),
    };
    Ok(Options {
        is_following: command.flags.contains(&"--follow"),
        has_times: command.flags.contains(&"--timestamps"),
        tail,
        since_ns,
    })
}

/// Whether the log may get more lines: the container is running or created, or the daemon does not answer.
fn is_running(state: &Path, container: &Container) -> bool {
    match containers_within(state, ASK_PATIENCE) {
        Ok(all) => all
            .iter()
            .any(|one| one.id == container.id && matches!(one.state.as_str(), "running" | "created")),
        Err(_) => true,
    }
}

fn print(path: &Path, options: &Options, is_running: impl Fn() -> bool) -> io::Result<()> {
    let mut file = open(path)?;
    if let Some(lines) = options.tail {
        seek_to_last(&mut file, lines)?;
    }
    let (stdout, stderr) = (io::stdout(), io::stderr());
    let mut printer = Printer {
        out: io::BufWriter::new(stdout.lock()),
        err: stderr.lock(),
        is_terminal: stdout.is_terminal(),
        is_error_terminal: stderr.is_terminal(),
        options,
    };
    let mut reader = Lines { reader: BufReader::new(file), line: Vec::new() };
    let mut asked_at = Instant::now();
    let mut is_last = !options.is_following;
    loop {
        while let Some(line) = reader.next(is_last)? {
            printer.line(line)?;
        }
        printer.out.flush()?;
        if is_last {
            return Ok(());
        }
        // The reader of standard output may go away while there is nothing to print.
        let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
        if matches!(nix::poll::poll(&mut polled, PollTimeout::from(LOOK_MS)), Ok(1)) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if let Some(next) = rotated(path, reader.reader.get_ref())? {
            // What was written to the old file between the last look and its new name.
            while let Some(line) = reader.next(true)? {
                printer.line(line)?;
            }
            reader = Lines { reader: BufReader::new(next), line: Vec::new() };
        } else if asked_at.elapsed() >= ASK_INTERVAL {
            // One more look: lines may have come since the last one.
            is_last = !is_running();
            asked_at = Instant::now();
        }
    }
}

/// Opens a log file, without waiting for the other end if it is a FIFO.
fn open(path: &Path) -> io::Result<File> {
    coracle_base::history::open_file(path, File::options().read(true))
}

/// The new file with the log's name, if the opened one was renamed; otherwise `None`. During a rotation there
/// may be no file with the name.
fn rotated(path: &Path, opened: &File) -> io::Result<Option<File>> {
    let opened = opened.metadata()?;
    match open(path) {
        Ok(file) => {
            let found = file.metadata()?;
            Ok(((found.dev(), found.ino()) != (opened.dev(), opened.ino())).then_some(file))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Seeks to the beginning of the last `lines` lines. Text after the last line feed counts as a line.
fn seek_to_last(file: &mut File, lines: usize) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut start = length;
    let mut left = lines;
    let mut block = Vec::new();
    while start > 0 {
        let from = start.saturating_sub(BLOCK_BYTES);
        file.seek(SeekFrom::Start(from))?;
        block.clear();
        file.take(start - from).read_to_end(&mut block)?;
        for (index, byte) in block.iter().enumerate().rev() {
            let at = from + index as u64;
            // The line feed at the very end belongs to the last line.
            if *byte != b'\n' || at + 1 == length {
                continue;
            }
            left = left.saturating_sub(1);
            if left == 0 {
                file.seek(SeekFrom::Start(if lines == 0 { length } else { at + 1 }))?;
                return Ok(());
            }
        }
        start = from;
    }
    file.seek(SeekFrom::Start(if lines == 0 { length } else { 0 }))?;
    Ok(())
}

/// Reads complete lines of a file to which another process appends.
struct Lines {
    reader: BufReader<File>,
    line: Vec<u8>,
}

impl Lines {
    /// The next line, or `None` at the end of the file. If `is_last` is set, also returns an incomplete line
    /// at the end of the file.
    fn next(&mut self, is_last: bool) -> io::Result<Option<&[u8]>> {
        if self.line.ends_with(b"\n") || self.line.len() as u64 >= LINE_BYTES_MAX {
            self.line.clear();
        }
        let room = LINE_BYTES_MAX - self.line.len() as u64;
        (&mut self.reader).take(room).read_until(b'\n', &mut self.line)?;
        let is_whole = self.line.ends_with(b"\n") || self.line.len() as u64 >= LINE_BYTES_MAX;
        // A rest is given once: with a line feed it is not kept.
        let is_rest = is_last && !self.line.is_empty();
        if is_rest && !is_whole {
            self.line.push(b'\n');
        }
        Ok((is_whole || is_rest).then_some(&self.line))
    }
}

/// Prints lines of a log without the prefix of each line.
struct Printer<'a, Out: Write, Err: Write> {
    out: Out,
    err: Err,
    /// Whether output is written to a terminal: text of containers is then escaped, otherwise unchanged.
    is_terminal: bool,
    is_error_terminal: bool,
    options: &'a Options,
}

impl<Out: Write, Err: Write> Printer<'_, Out, Err> {
    fn line(&mut self, line: &[u8]) -> io::Result<()> {
        let mut words = line.splitn(4, |byte| *byte == b' ');
        let (time, stream, tag) = (words.next(), words.next(), words.next());
        let (Some(time), Some(stream), Some(tag), Some(text)) = (time, stream, tag, words.next()) else {
            // No line of a log: it is shown as it is.
            return write(&mut self.out, line, self.is_terminal);
        };
        let time = std::str::from_utf8(time).unwrap_or_default();
        let is_old = |since_ns| time::parse(time).is_some_and(|at| at < since_ns);
        if self.options.since_ns.is_some_and(is_old) {
            return Ok(());
        }
        // The line feed behind a part is not in what the container wrote.
        let text = if tag.starts_with(b"P") { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
        let stamp = if self.options.has_times { format!("{time} ") } else { String::new() };
        let is_error = stream == b"stderr";
        if is_error {
            // Both may be one terminal or file: lines keep their order.
            self.out.flush()?;
        }
        let (to, is_terminal): (&mut dyn Write, bool) = match is_error {
            true => (&mut self.err, self.is_error_terminal),
            false => (&mut self.out, self.is_terminal),
        };
        write(to, stamp.as_bytes(), is_terminal)?;
        write(to, text, is_terminal)
    }
}

fn write(to: &mut (impl Write + ?Sized), bytes: &[u8], is_terminal: bool) -> io::Result<()> {
    match is_terminal {
        true => write!(to, "{}", Escaped(&String::from_utf8_lossy(bytes))),
        false => to.write_all(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::{File, Lines, Options, Printer, rotated, seek_to_last, time};
    use coracle_base::testdir::TestDir;
    use std::io::{BufReader, Read as _, Write as _};

    const LOG: &str = "2026-11-22T10:00:00.000000001Z stdout F one\n\
                       2026-11-22T10:00:01.000000000Z stderr F bad\n\
                       2026-11-22T10:00:02.000000000Z stdout P tw\n\
                       2026-11-22T10:00:02.000000001Z stdout F o\n\
                       2026-11-22T10:00:03.000000000Z stdout F \u{1b}[2Jthree\n";

    fn printed(options: &Options, is_terminal: bool) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut printer =
            Printer { out: &mut out, err: &mut err, is_terminal, is_error_terminal: is_terminal, options };
        for line in LOG.split_inclusive('\n') {
            printer.line(line.as_bytes()).unwrap();
        }
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn lines_go_to_the_stream_that_the_container_wrote_to() {
        let (out, err) = printed(&Options::default(), false);
        assert_eq!((out.as_str(), err.as_str()), ("one\ntwo\n\u{1b}[2Jthree\n", "bad\n"));
        let (out, _) = printed(&Options::default(), true);
        assert!(out.ends_with("\\u{1b}[2Jthree\n") && !out.contains('\u{1b}'), "{out:?}");
        let since_ns = time::parse("2026-11-22T10:00:03Z");
        let (out, err) = printed(&Options { since_ns, has_times: true, ..Options::default() }, true);
        assert_eq!((out.as_str(), err.as_str()), ("2026-11-22T10:00:03.000000000Z \\u{1b}[2Jthree\n", ""));
    }

    #[test]
    fn lines_from_the_end_are_found_in_blocks() {
        let dir = TestDir::new("tail");
        let path = dir.path().join("log");
        let long = "x".repeat(100_000);
        for (text, lines, expected) in [
            ("a\nb\nc\n".to_owned(), 2, "b\nc\n".to_owned()),
            ("a\nb\nc".to_owned(), 2, "b\nc".to_owned()),
            ("a\nb\n".to_owned(), 5, "a\nb\n".to_owned()),
            ("a\nb\n".to_owned(), 0, String::new()),
            (String::new(), 3, String::new()),
            ("\n\n\n".to_owned(), 1, "\n".to_owned()),
            (format!("{long}\n{long}\n{long}\n"), 1, format!("{long}\n")),
            (format!("{long}\n{long}\n{long}\n"), 2, format!("{long}\n{long}\n")),
        ] {
            std::fs::write(&path, &text).unwrap();
            let mut file = File::open(&path).unwrap();
            seek_to_last(&mut file, lines).unwrap();
            let mut rest = String::new();
            file.read_to_string(&mut rest).unwrap();
            assert_eq!(rest.len(), expected.len(), "{lines} lines");
            assert!(rest == expected);
        }
    }

    #[test]
    fn a_line_is_returned_when_it_is_complete_and_a_rotated_file_is_followed() {
        let dir = TestDir::new("follow");
        let path = dir.path().join("log");
        let mut writer = File::create(&path).unwrap();
        let mut lines = Lines { reader: BufReader::new(File::open(&path).unwrap()), line: Vec::new() };
        writer.write_all(b"on").unwrap();
        assert_eq!(lines.next(false).unwrap(), None);
        writer.write_all(b"e\ntwo").unwrap();
        assert_eq!(lines.next(false).unwrap(), Some(&b"one\n"[..]));
        assert_eq!(lines.next(false).unwrap(), None);
        assert!(rotated(&path, lines.reader.get_ref()).unwrap().is_none());
        std::fs::rename(&path, dir.path().join("log.1")).unwrap();
        assert!(rotated(&path, lines.reader.get_ref()).unwrap().is_none());
        File::create(&path).unwrap();
        assert!(rotated(&path, lines.reader.get_ref()).unwrap().is_some());
        writer.write_all(b"!").unwrap();
        assert_eq!(lines.next(true).unwrap(), Some(&b"two!\n"[..]));
        assert_eq!(lines.next(true).unwrap(), None);
        writer.write_all(b"rest").unwrap();
        assert_eq!(lines.next(false).unwrap(), None);
        assert_eq!(lines.next(true).unwrap(), Some(&b"rest\n"[..]));
        assert_eq!(lines.next(true).unwrap(), None);
    }
}
