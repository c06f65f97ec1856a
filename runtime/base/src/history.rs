//! The recent history of each pod, for `coracle why`. Log messages about a pod are also appended to a small
//! file below `--state`, so that they can be read if the log is lost or has another level, if the daemon is
//! not running, and after the pod was removed.
//!
//! ```text
//! log::warn!("container not created"; pod = id, error = …) ──> stderr
//! └─> STATE/history/pods/ID   lines that name a pod sandbox
//! STATE/history/node      other lines: pulls, refused calls, records
//! ```
//! Each line is one JSON object, as with `log_format = "json"`. A line is appended by one write and without a
//! sync, which needs four system calls. If a file would exceed its maximum size, lines that are repeated
//! later are removed, then the oldest lines. The files of removed pods are deleted after [`KEPT`], and
//! earlier if there are more than [`GONE_MAX`]. If a file cannot be written, its lines are lost: a full
//! `--state` must not affect pods.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use coracle_sandbox::collect;

/// Maximum size of a pod's file in bytes.
pub const POD_BYTES_MAX: usize = 4096;

/// Maximum size in bytes of the file with all lines that name no pod sandbox.
pub const NODE_BYTES_MAX: usize = 16 << 10;

/// Maximum number of files of removed pods; each has at most [`POD_BYTES_MAX`] and usually one page of
/// memory.
pub const GONE_MAX: usize = 128;

/// Time for which the file of a removed pod is kept.
pub const KEPT: Duration = Duration::from_secs(60 * 60);

/// Maximum length of a line in bytes; longer lines are not recorded. A message and one value of maximum
/// length fit.
const LINE_BYTES_MAX: usize = POD_BYTES_MAX / 2;

/// Number of new files after which files of removed pods are searched, because the search reads the
/// directory.
const SWEEP_INTERVAL: u32 = 32;

/// Number of digits of a pod sandbox's ID.
const ID_DIGITS: usize = 64;

thread_local! {
    static OPENED: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
    static NEW_FILES: Cell<u32> = const { Cell::new(0) };
}

/// Path of the directory with the history.
pub fn directory(state: &Path) -> PathBuf {
    state.join("history")
}

/// Path of the directory with the files of pods, whose names are the pods' IDs.
pub fn pods(state: &Path) -> PathBuf {
    directory(state).join("pods")
}

/// Path of the file with lines that name no pod sandbox.
pub fn node(state: &Path) -> PathBuf {
    directory(state).join("node")
}

/// Starts recording the log messages of this thread, and deletes old files.
///
/// # Errors
/// The directory cannot be created; nothing is recorded then.
pub fn open(state: &Path) -> io::Result<()> {
    coracle_sandbox::disk::create_all(fs::DirBuilder::new().recursive(true), &pods(state))?;
    sweep(state, SystemTime::now());
    OPENED.set(Some(state.to_owned()));
    Ok(())
}

/// Whether [`open`] was called, so that log messages are recorded.
pub(crate) fn is_open() -> bool {
    OPENED.with_borrow(Option::is_some)
}

/// Records a line, which ends with a line feed. `pod` is the value of the field `pod`; the line is added to a
/// pod's file only if this is a complete ID.
pub(crate) fn keep(pod: Option<&str>, line: &str) {
    OPENED.with_borrow(|opened| {
        let Some(state) = opened else { return };
        let is_new = match pod.filter(|id| is_id(id)) {
            Some(id) => append(&pods(state).join(id), line, POD_BYTES_MAX),
            None => append(&node(state), line, NODE_BYTES_MAX),
        };
        // An error has no place to be reported: the log has the line.
        if is_new.unwrap_or(false) {
            NEW_FILES.set(NEW_FILES.get() + 1);
            if NEW_FILES.get().is_multiple_of(SWEEP_INTERVAL) {
                sweep(state, SystemTime::now());
            }
        }
    });
}

/// Whether a text is the complete ID of a pod sandbox, and thus a safe file name.
fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Appends a line to a file, whose size stays within `bytes_max`. Returns whether the file is new.
fn append(path: &Path, line: &str, bytes_max: usize) -> io::Result<bool> {
    if line.len() > LINE_BYTES_MAX {
        return Ok(false);
    }
    let mut file = open_file(path, OpenOptions::new().append(true).create(true).mode(0o600))?;
    let length = file.metadata()?.len();
    if length + line.len() as u64 <= bytes_max as u64 {
        // A part of a line, because the disk is full, would spoil the next one.
        let written = file.write_all(line.as_bytes()).or_else(|error| file.set_len(length).and(Err(error)));
        return written.map(|()| length == 0);
    }
    let mut text = Vec::new();
    let file = open_file(path, OpenOptions::new().read(true))?;
    file.take(2 * bytes_max as u64).read_to_end(&mut text)?;
    // Another name first: a daemon that is killed in between loses no line.
    let aside = path.with_extension("new");
    fs::write(&aside, shorten(&text, line, bytes_max))?;
    fs::rename(&aside, path)?;
    Ok(false)
}

/// Opens a regular file, without waiting for the other end of a FIFO.
///
/// # Errors
/// The kernel's error; `InvalidInput` if the file is not a regular file.
pub fn open_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    let file = options.custom_flags(flags.bits()).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// Returns the lines of `text`, followed by `last`. Lines that a later line repeats are removed, then the
/// oldest lines until half of the maximum size is free.
fn shorten(text: &[u8], last: &str, bytes_max: usize) -> Vec<u8> {
    let lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').chain([last.as_bytes()]).collect();
    let (mut kept, mut size, mut seen) = (Vec::new(), 0, HashSet::new());
    for line in lines.into_iter().rev() {
        if !line.ends_with(b"\n") || !seen.insert(without_time(line)) {
            continue;
        }
        size += line.len();
        if size > bytes_max / 2 && !kept.is_empty() {
            break;
        }
        kept.push(line);
    }
    kept.reverse();
    kept.concat()
}

/// The part of a line after the time, which is the first value.
fn without_time(line: &[u8]) -> &[u8] {
    let end = line.iter().position(|byte| *byte == b',').unwrap_or(0);
    &line[end..]
}

/// Deletes files of removed pods: old files, and the oldest files if there are too many. Also called by
/// `coracle why`, which reads the files.
pub fn sweep(state: &Path, now: SystemTime) {
    let mut gone = Vec::new();
    for entry in fs::read_dir(pods(state)).into_iter().flatten().flatten() {
        if state.join("pods").join(entry.file_name()).exists() {
            continue;
        }
        let changed = entry.metadata().and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        gone.push((changed, entry.path()));
    }
    collect::sort_by(&mut gone, |one, other| other.cmp(one));
    for (index, (changed, path)) in gone.iter().enumerate() {
        // A time in the future: the clock was set meanwhile.
        if index >= GONE_MAX || now.duration_since(*changed).is_ok_and(|age| age > KEPT) {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log;
    use crate::testdir::TestDir;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn lines_go_to_their_pod_or_to_the_node_whatever_the_level() {
        let dir = TestDir::new("history");
        open(dir.path()).unwrap();
        log::set_level(log::Level::Error);
        log::info!("pod sandbox ready"; pod = ID, ms = 4);
        log::warn!("image not pulled"; image = "app:1", error = "a\n\u{1b}[2J\"b");
        log::debug!("details"; pod = ID);
        log::info!("dump of a pod"; pod = ID);
        for other in ["../../x", "", "0123", &ID.to_uppercase()] {
            log::warn!("no id"; pod = other);
        }
        log::set_level(log::Level::Info);
        let own = read(&pods(dir.path()).join(ID));
        assert!(
            own.contains("\"msg\":\"pod sandbox ready\",\"pod\":\"0123456789abc\",\"ms\":\"4\""),
            "{own}"
        );
        assert_eq!(own.lines().count(), 1, "{own}");
        let others = read(&node(dir.path()));
        assert!(others.contains("\\u000a\\u001b[2J\\\"b") && others.lines().count() == 5, "{others}");
        assert_eq!(fs::read_dir(pods(dir.path())).unwrap().count(), 1);
        OPENED.set(None);
    }

    #[test]
    fn a_file_stays_small_and_keeps_what_is_new_and_different() {
        let dir = TestDir::new("history-ring");
        let path = dir.path().join("ring");
        append(&path, "{\"time\":\"0\",\"msg\":\"first\"}\n", POD_BYTES_MAX).unwrap();
        for number in 0..500 {
            append(&path, &format!("{{\"time\":\"{number}\",\"msg\":\"again\"}}\n"), POD_BYTES_MAX).unwrap();
            assert!(fs::metadata(&path).unwrap().len() <= POD_BYTES_MAX as u64);
        }
        let text = read(&path);
        assert!(
            text.contains("first") && text.contains("\"499\""),
            "a repeated line displaces nothing: {text}"
        );
        for number in 0..500 {
            append(&path, &format!("{{\"time\":\"0\",\"msg\":\"{number}\"}}\n"), POD_BYTES_MAX).unwrap();
            assert!(fs::metadata(&path).unwrap().len() <= POD_BYTES_MAX as u64);
        }
        let text = read(&path);
        assert!(!text.contains("first") && text.contains("\"499\""), "{text}");
        assert!(text.lines().all(|line| line.starts_with('{') && line.ends_with('}')), "{text}");
        append(&path, &format!("{}\n", "x".repeat(LINE_BYTES_MAX)), POD_BYTES_MAX).unwrap();
        assert_eq!(read(&path), text, "a line that is too long is left out");
        assert!(!path.with_extension("new").exists());
    }

    #[test]
    fn a_file_that_is_not_a_history_is_not_changed() {
        let dir = TestDir::new("history-odd");
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "other").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for path in [&fifo, &link, dir.path()] {
            assert!(append(path, "{}\n", POD_BYTES_MAX).is_err(), "{}", path.display());
        }
        assert_eq!(read(&target), "other");
        // Longer than ever written, and without a line feed: the rest is small and whole.
        let path = dir.path().join("long");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        append(&path, "{}\n", POD_BYTES_MAX).unwrap();
        assert_eq!(read(&path), "{}\n");
    }

    #[test]
    fn files_of_pods_that_are_gone_are_removed_after_an_hour_or_if_there_are_many() {
        let dir = TestDir::new("history-sweep");
        let state = dir.path();
        fs::create_dir_all(pods(state)).unwrap();
        let now = SystemTime::now();
        let make = |name: &str, age: Duration| {
            let file = File::create(pods(state).join(name)).unwrap();
            file.set_modified(now - age).unwrap();
        };
        make("old", KEPT + Duration::from_secs(5));
        make("alive", KEPT * 50);
        make("new", Duration::ZERO);
        fs::create_dir_all(state.join("pods/alive")).unwrap();
        sweep(state, now);
        let exists = |name: &str| pods(state).join(name).exists();
        assert!(!exists("old") && exists("alive") && exists("new"));
        for number in 0..GONE_MAX + 20 {
            make(&format!("n{number}"), Duration::from_secs(number as u64 + 1));
        }
        sweep(state, now);
        assert_eq!(fs::read_dir(pods(state)).unwrap().count(), GONE_MAX + 1);
        assert!(exists("alive") && exists("new") && exists("n0") && !exists(&format!("n{}", GONE_MAX + 10)));
    }
}
