//! Verifier programs, by the convention of containerd (docs/image-verification.md of containerd 2): all files of a directory are
//! executed with the flags `-name`, `-digest` and `-stdin-media-type`, and the descriptor of the image on standard input. A program
//! accepts the image by exit code 0; its standard output is the reason. In one respect the rule is stricter: a directory that is
//! missing or empty refuses all images, because a misspelled path must not switch the rule off.
//!
//! A worker that pulls or imports has no network and few privileges, so a second process executes the programs. It is started before
//! the worker is confined, gets names and digests only, and ends with the worker.

use std::fs::{self, File};
use std::io::{self, PipeReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, ImagePolicy, Verifiers, WORKER, read_message_within, write_message};
use coracle_sandbox::describe_io;
use coracle_signature::{Document, Name};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::refused;

/// The first argument of the process that executes the programs.
pub(crate) const SUBCOMMAND: &str = "verify";
/// The beginning of a line about a program that accepted an image.
pub(crate) const KIND: &str = "verifier ";

/// Media type of standard input.
const INPUT_TYPE: &str = "application/vnd.oci.descriptor.v1+json";
/// Maximum number of programs; more are a mistake, and refuse all images.
const PROGRAMS_MAX: usize = 10;
/// Maximum number of bytes of a program's standard output that are kept, as in containerd.
const OUTPUT_BYTES_MAX: usize = 32 << 10;
/// Maximum number of bytes of the reason in a text for users.
const REASON_BYTES_MAX: usize = 1024;
/// Maximum length of a message of the second process: lines about all programs.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Interval in which the waiting worker says that it is alive.
const PULSE: Duration = Duration::from_secs(1);
/// Time beyond the limits of all programs for the second process itself.
const GRACE: Duration = Duration::from_secs(10);

/// Variables that programs get from the environment of the daemon: those with which they reach a registry.
const ENVIRONMENT: [&str; 10] = [
    "PATH",
    "HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
];

/// An image to judge.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    directory: PathBuf,
    limit_ms: u64,
    name: String,
    digest: String,
    media_type: String,
    size: u64,
}

/// One line about each program that accepted the image, or the reason why it is refused.
type Answer = Result<Vec<String>, String>;

/// The process that executes the programs, as its worker sees it.
pub(crate) struct Programs {
    verifiers: Verifiers,
    line: Mutex<(ChildStdin, ChildStdout)>,
    _child: Child,
}

impl Programs {
    /// Starts the process if the rules need it. Must be called before the worker is confined.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(policy: Option<&ImagePolicy>) -> Result<Option<Self>, Failure> {
        let Some(verifiers) = policy.and_then(|policy| policy.verifiers.clone()) else { return Ok(None) };
        let tried = |error: io::Error| {
            let text = format!("start the process for verifier programs: {}", describe_io(&error));
            Failure::new(FailureKind::Internal, text)
        };
        let mut command = Command::new("/proc/self/exe");
        let command = command.arg0(WORKER).arg(SUBCOMMAND).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(tried)?;
        let streams = child.stdin.take().zip(child.stdout.take());
        let streams = streams.ok_or_else(|| tried(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Some(Self { verifiers, line: Mutex::new(streams), _child: child }))
    }

    /// Judges an image by all programs; `pulse` is called while it waits.
    ///
    /// # Errors
    /// A program refused the image, did not end in time, or cannot be executed.
    pub(crate) fn judge(
        &self,
        name: &Name,
        top: &Document<'_>,
        pulse: &dyn Fn(),
    ) -> Result<Vec<String>, Failure> {
        let Verifiers { directory, limit_ms } = self.verifiers.clone();
        let limit = Duration::from_millis(limit_ms).saturating_mul(PROGRAMS_MAX as u32).saturating_add(GRACE);
        let ask = Ask {
            directory,
            limit_ms,
            name: name.to_string(),
            digest: top.digest.to_owned(),
            media_type: top.media_type.to_owned(),
            size: top.bytes.len() as u64,
        };
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = |why: String| refused(format!("verifier programs: their process {why}"));
        write_message(&mut line.0, &ask).map_err(|error| lost(error.to_string()))?;
        wait_for(&line.1, limit, pulse).map_err(lost)?;
        match read_message_within::<Answer>(&mut line.1, ANSWER_BYTES_MAX) {
            Ok(Some(answer)) => answer.map_err(refused),
            Ok(None) => Err(lost("ended".to_owned())),
            Err(error) => Err(lost(format!("answered {error}"))),
        }
    }
}

/// Waits until the process answers.
fn wait_for(answer: &ChildStdout, limit: Duration, pulse: &dyn Fn()) -> Result<(), String> {
    let end = Instant::now() + limit;
    loop {
        let mut files = [PollFd::new(answer.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, PollTimeout::try_from(PULSE).unwrap_or(PollTimeout::ZERO)) {
            Ok(0) if Instant::now() >= end => {
                return Err(format!("did not answer within {} s", limit.as_secs()));
            }
            Ok(0) => pulse(),
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(format!("cannot be awaited: {errno}")),
        }
    }
}

/// Main function of the process that executes the programs: judges images until its input ends.
pub(crate) fn live() -> ExitCode {
    while let Ok(Some(ask)) = read_message_within::<Ask>(&mut io::stdin(), ANSWER_BYTES_MAX) {
        if write_message(&mut io::stdout(), &judge(&ask)).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn judge(ask: &Ask) -> Answer {
    let directory = ask.directory.display();
    let programs =
        list(&ask.directory).map_err(|why| format!("image.policy.verifier_dir: {directory}: {why}"))?;
    programs.iter().map(|program| run(program, ask)).collect()
}

/// The programs in the order of their names.
fn list(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(directory).map_err(|error| describe_io(&error))?;
    let names: Result<Vec<PathBuf>, _> =
        entries.take(PROGRAMS_MAX + 1).map(|entry| entry.map(|entry| entry.path())).collect();
    let mut programs = names.map_err(|error| describe_io(&error))?;
    programs.sort();
    match programs.len() {
        0 => Err("it has no programs".to_owned()),
        1..=PROGRAMS_MAX => Ok(programs),
        _ => Err(format!("it has more than {PROGRAMS_MAX} programs")),
    }
}

/// Runs one program.
fn run(program: &Path, ask: &Ask) -> Result<String, String> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let failed = |why: String| format!("{KIND}{name}: {why}");
    let (child, output) = start(program, ask).map_err(|error| failed(describe_io(&error)))?;
    let ended = finish(child, output, Duration::from_millis(ask.limit_ms));
    let (status, said) = ended.map_err(|error| failed(describe_io(&error)))?;
    let reason = reason(&said);
    match status {
        Some(status) if status.success() => Ok(format!("{KIND}{name}: {reason}")),
        Some(status) => Err(failed(format!("it refused {} ({status}): {reason}", ask.digest))),
        None => Err(failed(format!("did not end within {} ms and was killed", ask.limit_ms))),
    }
}

fn start(program: &Path, ask: &Ask) -> io::Result<(Child, PipeReader)> {
    let descriptor = json!({ "mediaType": ask.media_type, "digest": ask.digest, "size": ask.size });
    // A file and not a pipe, because a program need not read its input.
    let mut input = File::from(rustix::fs::memfd_create(c"descriptor", rustix::fs::MemfdFlags::CLOEXEC)?);
    writeln!(input, "{descriptor}")?;
    input.seek(SeekFrom::Start(0))?;
    let (reader, writer) = io::pipe()?;
    let variables = ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    let child = Command::new(program)
        .args(["-name", &ask.name, "-digest", &ask.digest, "-stdin-media-type", INPUT_TYPE])
        .env_clear()
        .envs(variables)
        .current_dir("/")
        .stdin(input)
        .stdout(writer)
        .process_group(0)
        .spawn()?;
    Ok((child, reader))
}

/// Waits for the end of a program and reads its output; no status if the time limit passed. What it left running is killed.
fn finish(
    mut child: Child,
    mut output: PipeReader,
    limit: Duration,
) -> io::Result<(Option<ExitStatus>, Vec<u8>)> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let end = Instant::now() + limit;
    let (mut said, mut buffer, mut is_open) = (Vec::new(), [0; 4096], true);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let _ = kill_process_group(pid, Signal::KILL); // fails if it has just ended
            child.wait()?;
            return Ok((None, said));
        }
        let mut files = [process.as_fd(), output.as_fd()].map(|file| PollFd::new(file, PollFlags::POLLIN));
        let count = if is_open { 2 } else { 1 };
        let millis = u16::try_from(left.as_millis()).unwrap_or(u16::MAX).max(1);
        match poll(&mut files[..count], PollTimeout::from(millis)) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let [has_ended, has_output] = files.map(|file| file.any() == Some(true));
        if is_open && has_output {
            let read = output.read(&mut buffer)?;
            is_open = read > 0;
            said.extend_from_slice(&buffer[..read.min(OUTPUT_BYTES_MAX.saturating_sub(said.len()))]);
        } else if has_ended {
            let _ = kill_process_group(pid, Signal::KILL);
            return Ok((Some(child.wait()?), said));
        }
    }
}

/// The output of a program as one short line.
fn reason(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut line: String = words.join(" ").chars().filter(|letter| !letter.is_control()).collect();
    if line.len() > REASON_BYTES_MAX {
        let end = (0..=REASON_BYTES_MAX).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
        line.truncate(end);
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, scripts: &[(&str, &str)]) -> Self {
            let path = std::env::temp_dir().join(format!("coracle-verifiers-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            for (name, script) in scripts {
                let file = path.join(name);
                fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
                fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            }
            Self(path)
        }

        fn judge(&self, limit_ms: u64) -> Answer {
            judge(&Ask {
                directory: self.0.clone(),
                limit_ms,
                name: "reg.io/a:1".to_owned(),
                digest: "sha256:00".to_owned(),
                media_type: "text/x".to_owned(),
                size: 7,
            })
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn programs_get_containerds_flags_and_the_descriptor() {
        let script = r#"echo "$@"; cat; env | grep -q CARGO && exit 9; exit 0"#;
        let folder = Folder::new("flags", &[("b", "echo fine"), ("a", script)]);
        let lines = folder.judge(10_000).unwrap();
        assert_eq!(
            lines,
            [
                "verifier a: -name reg.io/a:1 -digest sha256:00 -stdin-media-type \
                 application/vnd.oci.descriptor.v1+json {\"digest\":\"sha256:00\",\"mediaType\":\"text/x\",\"size\":7}",
                "verifier b: fine"
            ]
        );
    }

    #[test]
    fn one_refusal_is_enough_and_what_cannot_be_run_refuses() {
        for (name, scripts, words) in [
            (
                "refused",
                &[("a", "exit 0"), ("b", "echo no such signer; exit 3")][..],
                "verifier b: it refused sha256:00",
            ),
            ("killed", &[("a", "kill -9 $$")][..], "it refused sha256:00 (signal: 9"),
            ("slow", &[("a", "sleep 60")][..], "did not end within 300 ms"),
            ("endless", &[("a", "yes")][..], "did not end within 300 ms"),
            ("empty", &[][..], "it has no programs"),
        ] {
            let begun = Instant::now();
            let error = Folder::new(name, scripts).judge(300).unwrap_err();
            assert!(error.contains(words), "{name}: {error}");
            assert!(begun.elapsed() < Duration::from_secs(20), "{name}");
        }
        let many: Vec<String> = (0..=PROGRAMS_MAX).map(|number| number.to_string()).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "exit 0")).collect();
        assert!(Folder::new("many", &many).judge(300).unwrap_err().contains("more than 10 programs"));
        let plain = Folder::new("plain", &[]);
        fs::write(plain.0.join("text"), "no program").unwrap();
        assert!(plain.judge(300).unwrap_err().starts_with("verifier text: "));
        let absent = Ask {
            directory: "/absent".into(),
            limit_ms: 1,
            name: String::new(),
            digest: String::new(),
            media_type: String::new(),
            size: 0,
        };
        assert!(judge(&absent).unwrap_err().starts_with("image.policy.verifier_dir: /absent: "));
    }

    #[test]
    fn what_a_program_leaves_behind_and_prints_is_limited() {
        let begun = Instant::now();
        let script = "sleep 60 & head -c 1000000 /dev/zero | tr '\\0' x; printf 'end\\033[2J'";
        let lines = Folder::new("left", &[("a", script)]).judge(20_000);
        // The child holds the output open: the reason is what was printed until then.
        assert!(begun.elapsed() < Duration::from_secs(15), "{lines:?}");
        let line = lines.unwrap().remove(0);
        assert!(line.len() < 2 * REASON_BYTES_MAX && line.ends_with('…'), "{}", line.len());
        assert_eq!(reason(b"a\n\x1b[2J b\xff"), "a [2J b\u{fffd}");
    }
}
