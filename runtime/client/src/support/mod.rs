//! `coracle support-dump FILE`: writes one archive with the data that a report about a problem needs. The
//! command works without a running daemon; a part that cannot be read is replaced by the error.
//!
//! The archive contains no secrets: of records only names and sizes are listed, because records contain the
//! environment of containers; files with credentials (registries.yaml, hosts.toml, docker's configuration)
//! are omitted; values in the daemon's configuration that could be secret, and user names and passwords in
//! its URLs, are replaced.

mod archive;
mod redact;

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_base::collect;
use coracle_base::error::describe_io;
use coracle_base::history;
use coracle_control::{Answer, Request};

use crate::ask::ask_within;
use crate::{EXIT_USAGE, Typed, complain};
use archive::Archive;

/// Time limit for one answer of the daemon.
const DAEMON_PATIENCE: Duration = Duration::from_secs(5);

/// Maximum number of listed files.
const LISTED_MAX: usize = 20_000;

/// Maximum size in bytes of one file in the archive.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Words in kernel messages about containers: messages about coracle's programs, and about processes that
/// were killed because of a lack of memory.
const KERNEL_WORDS: [&str; 7] =
    ["coracle", "oom", "Out of memory", "Memory cgroup", "Killed process", "I/O error", "ext4"];

/// Facts about this node that the daemon's crate supplies.
#[derive(Debug)]
pub struct Node {
    /// The daemon's root directory (`--root`).
    pub root: PathBuf,
    /// The daemon's state directory (`--state`).
    pub state: PathBuf,
    /// Paths of the configuration files; secrets in them are replaced when they are added.
    pub configuration: Vec<PathBuf>,
    /// Texts to be added to the archive: name of the file, text.
    pub texts: Vec<(&'static str, String)>,
}

/// Writes the archive. Exit code 1: it could not be written; 2: no file was named.
pub fn run(node: &Node, command: &Typed) -> ExitCode {
    let [file] = command.arguments.as_slice() else {
        complain(["support-dump: the name of the archive is expected; `-` is standard output"]);
        return ExitCode::from(EXIT_USAGE);
    };
    if file == "-" && io::stdout().is_terminal() {
        complain(["support-dump: an archive is not written to a terminal: name a file"]);
        return ExitCode::from(EXIT_USAGE);
    }
    let bytes = compose(node);
    let written = match file.as_str() {
        "-" => io::stdout().write_all(&bytes),
        path => File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .and_then(|mut file| file.write_all(&bytes)),
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain([format!("support-dump: write {file}: {}", describe_io(&error))]),
    }
}

fn compose(node: &Node) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut archive = Archive::default();
    let mut add = |name: &str, content: &[u8]| archive.add(&format!("coracle-support/{name}"), content, now);
    for (name, text) in &node.texts {
        add(name, text.as_bytes());
    }
    for path in &node.configuration {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        add(&format!("configuration/{name}"), redact::secrets(&text_of(path)).as_bytes());
    }
    add("files.txt", files(node).as_bytes());
    add("kernel.txt", kernel().as_bytes());
    for (name, request) in [
        ("conditions.json", Request::Conditions {}),
        ("pods.json", Request::Pods {}),
        ("containers.json", Request::Containers {}),
        ("waits.json", Request::Waits {}),
        ("images.json", Request::List {}),
        ("metrics.txt", Request::Metrics {}),
    ] {
        add(name, asked(&node.state, &request).as_bytes());
    }
    add("history/node", text_of(&history::node(&node.state)).as_bytes());
    for entry in fs::read_dir(history::pods(&node.state)).into_iter().flatten().flatten().take(LISTED_MAX) {
        let name = entry.file_name().to_string_lossy().into_owned();
        add(&format!("history/pods/{name}"), text_of(&entry.path()).as_bytes());
    }
    archive.finish()
}

/// The text of a regular file, or the error of reading it.
fn text_of(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = history::open_file(path, OpenOptions::new().read(true))
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
    match read {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => format!("{}: {}\n", path.display(), describe_io(&error)),
    }
}

/// The daemon's answers to a request as text, or the error.
fn asked(state: &Path, request: &Request) -> String {
    match ask_within(state, request, DAEMON_PATIENCE) {
        Ok(mut answers) => {
            answers.iter_mut().for_each(without_annotations);
            match answers.as_slice() {
                [Answer::Metrics { text }] => text.clone(),
                answers => serde_json::to_string_pretty(answers).unwrap_or_default() + "\n",
            }
        }
        Err(error) => format!("the daemon does not answer: {}\n", describe_io(&error)),
    }
}

/// Removes annotations, which may contain secrets: `kubectl apply` stores a pod's whole specification, with
/// the environment of containers, in an annotation.
fn without_annotations(answer: &mut Answer) {
    match answer {
        Answer::Pod(pod) => pod.annotations.clear(),
        Answer::Container(container) => container.annotations.clear(),
        _ => {}
    }
}

/// Lists every file of records and notes with its mode, size and time, without its content.
fn files(node: &Node) -> String {
    let mut text = String::new();
    let mut left = LISTED_MAX;
    for place in ["pods", "quarantine", "images"].map(|name| node.root.join(name)).iter().chain([&node.state])
    {
        list(place, &mut text, &mut left, 0);
    }
    text
}

/// Maximum depth of listed directories; deeper ones are layers of containers.
const DEPTH_MAX: usize = 4;

fn list(directory: &Path, text: &mut String, left: &mut usize, depth: usize) {
    let mut entries: Vec<_> = fs::read_dir(directory).into_iter().flatten().flatten().collect();
    collect::sort_by_key(&mut entries, fs::DirEntry::file_name);
    for entry in entries {
        let Ok(about) = entry.metadata() else { continue };
        *left = left.saturating_sub(1);
        if *left == 0 {
            return;
        }
        let path = entry.path();
        let _ =
            writeln!(text, "{:06o} {:>9} {} {}", about.mode(), about.len(), about.mtime(), path.display());
        let is_layer = matches!(entry.file_name().to_str(), Some("upper" | "work" | "shm" | "root"));
        if about.is_dir() && depth < DEPTH_MAX && !is_layer {
            list(&path, text, left, depth + 1);
        }
    }
}

/// The kernel's version, memory usage, and the kernel's messages about containers.
fn kernel() -> String {
    let mut text = text_of(Path::new("/proc/version")) + &text_of(Path::new("/proc/meminfo"));
    let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
    match File::options().read(true).custom_flags(flags).open("/dev/kmsg") {
        Ok(mut log) => {
            let mut record = [0; 8192];
            for _ in 0..LISTED_MAX {
                match log.read(&mut record) {
                    Ok(count) => {
                        let line = String::from_utf8_lossy(&record[..count]);
                        if KERNEL_WORDS.iter().any(|word| line.contains(word)) {
                            text.push_str(line.lines().next().unwrap_or_default());
                            text.push('\n');
                        }
                    }
                    // It was overwritten meanwhile; the next one is read.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                    Err(_) => break,
                }
            }
        }
        Err(error) => {
            let _ = writeln!(text, "kernel messages: {}", describe_io(&error));
        }
    }
    text
}
