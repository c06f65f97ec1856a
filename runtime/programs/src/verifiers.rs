//! Programs that decide whether an image may be pulled, by the convention of containerd's plugin `io.containerd.image-verifier.v1.bindir`: each
//! file of a directory is executed with `-name`, `-digest` and `-stdin-media-type`, and reads the descriptor of the image as JSON. Exit status 0
//! accepts the image; what was printed is the reason.
//!
//! ```text
//! daemon ─ job ─► worker of a pull ── candidate ──► coracle-worker verify-image ─► program, one after the other
//!                 (no network, jailed) ◄── verdict ── (as the daemon was started)
//! ```
//! Guarantees: an image is accepted by all programs or refused; each has an end, and nothing that it started outlives the verdict or the pull. A
//! directory that is absent or empty refuses all images, and no program is left out: in containerd the first accepts them, and programs beyond
//! `max_verifiers` are skipped.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, ImageVerifiers, WORKER, read_message, write_message};
use coracle_sandbox::collect;
use coracle_sandbox::{describe_errno, describe_io};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid};
use serde::{Deserialize, Serialize};

use super::program::{self, Call, End, Ended, KILLED_WAIT, one_line};

/// First argument of the process that runs the programs.
pub const VERIFY_SUBCOMMAND: &str = "verify-image";
/// First argument of a process that checks the directory.
pub const CHECK_SUBCOMMAND: &str = "check-image-verifiers";
/// Media type of the input of programs.
const DESCRIPTOR: &str = "application/vnd.oci.descriptor.v1+json";
/// Number of bytes of a program's reason that are read, as in containerd 2.
const REASON_BYTES_MAX: usize = 32 << 10;
/// Maximum number of programs.
const PROGRAMS_MAX: usize = 64;
/// Interval at which the pull reports that it is alive.
const PULSE_MS: u16 = 1000;
/// Time for each program beside its own limit: until it has started, and until all its processes have ended.
const EACH_MORE: Duration = Duration::from_secs(5);
/// Time limit for the end of the process after its pull.
const END_WAIT: Duration = Duration::from_secs(5);
/// Interval at which processes that were killed are looked at.
const ENDED_PAUSE_MS: u8 = 5;
/// Mode bits by which others than the owner may write.
const WRITABLE: u32 = 0o022;
/// Mode bit of a directory in which only the owner of an entry may replace it.
const STICKY: u32 = 0o1000;

/// An image that would be pulled.
#[derive(Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// The normalised reference.
    pub name: String,
    /// Descriptor of the index or manifest that has this name.
    pub descriptor: Descriptor,
}

/// A descriptor, whose members are in the order in which containerd writes them.
#[derive(Debug, Serialize, Deserialize)]
pub struct Descriptor {
    /// Media type by the registry's answer.
    #[serde(rename = "mediaType")]
    pub media_type: String,
    /// Digest `sha256:…`.
    pub digest: String,
    /// Length in bytes.
    pub size: u64,
}

/// One line for each program that accepts the image, or the reason of the refusal.
type Verdict = Result<Vec<String>, String>;

/// The process that runs the programs. It ends with this value.
pub struct Verifiers {
    child: Child,
    /// Open until the verdict: the process kills its program when this is closed.
    question: Option<ChildStdin>,
    verdict: ChildStdout,
    /// Time limit for the verdict.
    limit: Duration,
}

impl Verifiers {
    /// Starts the process, before the caller leaves the network and the process attributes that programs need.
    ///
    /// # Errors
    /// It cannot be started, so that no image can be accepted.
    pub fn start(configured: &ImageVerifiers) -> Result<Self, Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(WORKER).arg(VERIFY_SUBCOMMAND).arg(&configured.directory);
        command.arg(configured.limit_ms.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A group of its own: what kills the group of the pull closes the pipe, and then the process ends the programs.
        let mut child = command.process_group(0).spawn().map_err(|error| broken(describe_io(&error)))?;
        let limit = (Duration::from_millis(configured.limit_ms) + EACH_MORE) * PROGRAMS_MAX as u32;
        match (child.stdin.take(), child.stdout.take()) {
            (question, Some(verdict)) => Ok(Self { child, question, verdict, limit }),
            _ => Err(broken("it has no pipes".to_owned())),
        }
    }

    /// Asks all programs; calls `alive` while they run. Returns one line for each.
    ///
    /// # Errors
    /// One of the programs refuses the image, or did not give a verdict.
    pub fn ask(mut self, image: &Candidate, alive: &dyn Fn()) -> Result<Vec<String>, Failure> {
        let question = self.question.as_mut().ok_or_else(|| broken("it has no input".to_owned()))?;
        write_message(question, image).map_err(|error| broken(error.to_string()))?;
        // The other side limits the time of each program, and its end closes the pipe; a directory on a network may block it.
        if !self.wait(self.limit, alive)? {
            return Err(broken(format!("no verdict within {} s", self.limit.as_secs())));
        }
        match read_message::<Verdict>(&mut self.verdict) {
            Ok(Some(verdict)) => verdict.map_err(|why| Failure::new(FailureKind::Signature, why)),
            Ok(None) => Err(broken("it has ended".to_owned())),
            Err(error) => Err(broken(error.to_string())),
        }
    }

    /// Waits until the process writes or ends; returns whether it does within `limit`.
    fn wait(&self, limit: Duration, alive: &dyn Fn()) -> Result<bool, Failure> {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            alive();
            let mut pipe = [PollFd::new(self.verdict.as_fd(), PollFlags::POLLIN)];
            let pause = limit.saturating_sub(begun.elapsed()).as_millis().clamp(1, PULSE_MS.into());
            match poll(&mut pipe, PollTimeout::from(pause as u16)) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(broken(errno.to_string())),
            }
        }
        Ok(false)
    }
}

impl Drop for Verifiers {
    /// Ends the process, with or without a verdict.
    fn drop(&mut self) {
        // It kills its program, and what that has started: more than a signal to the process itself would end.
        self.question = None;
        let _ = self.wait(END_WAIT, &|| {});
        let _ = self.child.kill();
        let begun = Instant::now();
        while let Ok(None) = self.child.try_wait()
            && begun.elapsed() < KILLED_WAIT
        {
            let _ = poll(&mut [], ENDED_PAUSE_MS);
        }
    }
}

/// The failure of a pull without a verdict.
fn broken(why: String) -> Failure {
    Failure::new(FailureKind::Signature, format!("the process that runs image verifiers: {why}"))
}

/// Asks the programs about the image on standard input; the arguments are the directory and the time limit in milliseconds.
pub fn verify(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let directory = PathBuf::from(arguments.next().unwrap_or_default());
    let limit = arguments.next().and_then(|text| text.to_str()?.parse().ok());
    // All that a program leaves behind becomes a child of this process, in whatever session it is.
    if let Err(errno) = set_child_subreaper(true) {
        let _ = writeln!(io::stderr(), "set the child subreaper: {}", describe_errno(errno));
        return ExitCode::FAILURE;
    }
    // Without a question the pull ended before.
    let (Some(limit_ms), Ok(Some(image))) = (limit, read_message::<Candidate>(&mut io::stdin())) else {
        return ExitCode::FAILURE;
    };
    let verdict = judge(&ImageVerifiers { directory, limit_ms }, &image);
    match write_message(&mut io::stdout(), &verdict) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Checks the directory that is the argument; prints the mistake.
pub fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match programs(Path::new(&arguments.next().unwrap_or_default())) {
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(io::stdout(), "{why}");
            ExitCode::FAILURE
        }
    }
}

/// The programs that would be asked, as text for users; or the mistake.
pub fn explain(configured: &ImageVerifiers) -> Vec<String> {
    match programs(&configured.directory) {
        Ok(programs) => programs.iter().map(|program| format!("verifier {}", program.display())).collect(),
        Err(why) => vec![why],
    }
}

fn judge(configured: &ImageVerifiers, image: &Candidate) -> Verdict {
    let mut accepted = Vec::new();
    let mut input = serde_json::to_vec(&image.descriptor).map_err(|error| error.to_string())?;
    input.push(b'\n');
    for program in programs(&configured.directory)? {
        let name = program.file_name().unwrap_or_default().display();
        let digest = &image.descriptor.digest;
        let pull = io::stdin();
        let call = Call {
            program: &program,
            arguments: &["-name", &image.name, "-digest", digest, "-stdin-media-type", DESCRIPTOR],
            variables: &[],
            input: &input,
            deadline: Instant::now() + Duration::from_millis(configured.limit_ms),
            stdout_bytes_max: REASON_BYTES_MAX,
            is_judge: true,
            as_long_as: Some(pull.as_fd()),
        };
        let ended = program::run(&call);
        end_children();
        let ended =
            ended.map_err(|error| format!("verifier {name} cannot be run: {}", describe_io(&error)))?;
        let Ended { end, stdout, stderr } = ended;
        let [mut reason, said] =
            [String::from_utf8_lossy(&stdout), stderr.as_str().into()].map(|text| one_line(&text));
        if !said.is_empty() {
            let _ = writeln!(io::stderr(), "image verifier {name} for {}: {said}", image.name);
        }
        match end {
            End::Exited(status) if status.success() => {
                accepted.push(format!(
                    "verifier {name}: {}",
                    if reason.is_empty() { "accepted" } else { &reason }
                ));
            }
            End::Exited(status) => {
                if reason.is_empty() {
                    reason = said;
                }
                let reason = if reason.is_empty() { "no reason printed".to_owned() } else { reason };
                return Err(format!("verifier {name} refuses the image: {reason} ({status})"));
            }
            End::Late | End::TooLong => {
                let limit = configured.limit_ms;
                return Err(format!("verifier {name} did not end within {limit} ms and was killed"));
            }
            End::Unwanted => return Err("the pull has ended".to_owned()),
        }
    }
    Ok(accepted)
}

/// Kills all children of this process, until it has none: those of a killed one become its own.
fn end_children() {
    let begun = Instant::now();
    while begun.elapsed() < KILLED_WAIT {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => {
                // Before one is reaped its ID is not that of another process.
                for child in children() {
                    let _ = kill(child, Signal::SIGKILL);
                }
                let _ = poll(&mut [], ENDED_PAUSE_MS);
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
    let _ = writeln!(io::stderr(), "processes that an image verifier has left do not end after SIGKILL");
}

/// The children of this process, also where the kernel has no list of them (CONFIG_PROC_CHILDREN).
fn children() -> impl Iterator<Item = Pid> {
    let this = getpid().to_string();
    let is_child = move |stat: &str| {
        stat.rsplit(") ").next().and_then(|fields| fields.split(' ').nth(1)) == Some(this.as_str())
    };
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(move |entry| {
        let pid = entry.file_name().to_str()?.parse().ok().map(Pid::from_raw)?;
        fs::read(entry.path().join("stat")).ok().filter(|stat| is_child(&String::from_utf8_lossy(stat)))?;
        Some(pid)
    })
}

/// The programs of the directory in the order of their names.
fn programs(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let wrong = |path: &Path, why: &str| format!("image.policy.verifiers: {}: {why}", path.display());
    let io = |path: &Path, error: io::Error| wrong(path, &describe_io(&error));
    let check = |path: &Path| {
        let about = fs::metadata(path).map_err(|error| io(path, error))?;
        match about.uid() == 0 && about.permissions().mode() & WRITABLE == 0 {
            true => Ok(about),
            false => Err(wrong(path, "it must be owned by root, and others must not be able to write it")),
        }
    };
    // Who may replace a directory on the way may replace the programs. In one with the sticky bit only owners may.
    let check_above = |path: &Path| {
        let real = fs::canonicalize(path).map_err(|error| io(path, error))?;
        for above in path.ancestors().chain(real.ancestors()).filter(|above| above.is_absolute()) {
            let about = fs::metadata(above).map_err(|error| io(above, error))?;
            let mode = about.permissions().mode();
            let is_safe = about.uid() == 0 && (mode & WRITABLE == 0 || mode & STICKY != 0);
            if !is_safe && above != path && above != real {
                return Err(wrong(
                    above,
                    "image verifiers are below it: it must be owned by root, and others must not be able to write it",
                ));
            }
        }
        Ok(())
    };
    check(directory)?;
    check_above(directory)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| io(directory, error))? {
        if found.len() == PROGRAMS_MAX {
            return Err(wrong(directory, &format!("it has more than {PROGRAMS_MAX} entries")));
        }
        found.push(entry.map_err(|error| io(directory, error))?.path());
    }
    if found.is_empty() {
        return Err(wrong(directory, "it has no program, so that no image can be accepted"));
    }
    collect::sort(&mut found);
    for path in &found {
        let about = check(path)?;
        check_above(path)?;
        if !about.is_file() || about.permissions().mode() & 0o111 == 0 {
            return Err(wrong(path, "it is no executable file"));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
