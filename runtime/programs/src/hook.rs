//! Runs one OCI hook: a program of an NRI plugin or a vendor, with the container's state on standard input.
//! At the time limit the program and its child processes are killed. Its output is written to the worker's
//! log.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, HookJob};
use coracle_sandbox::describe_io;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Runs the hook to its end.
///
/// # Errors
/// It failed, cannot be started, or did not end within its time; the text names it.
pub fn run(job: &HookJob) -> Result<(), Failure> {
    let path = &job.hook.path;
    let failed = |what: String| Failure::new(FailureKind::Plugin, format!("hook {path}: {what}"));
    let state =
        state(&job.state).map_err(|error| failed(format!("create its state: {}", describe_io(&error))))?;
    if job.inside != 0 {
        enter(job.inside).map_err(|error| failed(format!("enter the container: {}", describe_io(&error))))?;
    }
    let child = start(job, state).map_err(|error| failed(describe_io(&error)))?;
    match wait(child, Duration::from_millis(job.limit_ms)).map_err(|error| failed(describe_io(&error)))? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(failed(status.to_string())),
        None => Err(failed(format!("did not end within {} ms and was killed", job.limit_ms))),
    }
}

/// Creates a file with the container's state. A file and not a pipe, because a hook need not read its input.
fn state(text: &str) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create(c"state", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// Enters the namespaces of the container's process. A PID namespace applies to child processes only, which
/// is sufficient.
fn enter(pid: i32) -> io::Result<()> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let process = pidfd_open(Pid::from_raw(pid).ok_or_else(gone)?, PidfdFlags::empty())?;
    let all = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP
        | CloneFlags::CLONE_NEWPID;
    match setns(&process, all | CloneFlags::CLONE_NEWUSER) {
        // The process is in the same user namespace, which cannot be joined again.
        Err(nix::errno::Errno::EINVAL) => Ok(setns(&process, all)?),
        Err(errno) => Err(errno.into()),
        Ok(()) => {
            nix::unistd::setgid(nix::unistd::Gid::from_raw(0))?;
            Ok(nix::unistd::setuid(nix::unistd::Uid::from_raw(0))?)
        }
    }
}

fn start(job: &HookJob, state: File) -> io::Result<Child> {
    let hook = &job.hook;
    let mut command = Command::new(&hook.path);
    if let Some((name, arguments)) = hook.arguments.split_first() {
        command.arg0(name).args(arguments);
    }
    let variables = hook.environment.iter().filter_map(|text| text.split_once('='));
    // Standard output is for answers.
    let output = || io::stderr().as_fd().try_clone_to_owned().map(Stdio::from);
    command
        .env_clear()
        .envs(variables)
        .current_dir(&job.directory)
        .stdin(state)
        .stdout(output()?)
        .stderr(output()?)
        .process_group(0)
        .spawn()
}

/// Waits for the end of a child process; `None` if the time limit passed.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let millis = u16::try_from(left.as_millis()).unwrap_or(u16::MAX);
        let mut files = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, PollTimeout::from(millis)) {
            Ok(0) if left.is_zero() => {
                let _ = kill_process_group(pid, Signal::KILL); // fails if it has just ended
                child.wait()?;
                return Ok(None);
            }
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return child.wait().map(Some),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_job::Hook;

    use super::*;

    fn shell(script: &str, limit_ms: u64) -> Result<(), Failure> {
        let hook = Hook {
            path: "/bin/sh".into(),
            arguments: vec!["sh".into(), "-c".into(), script.into()],
            environment: vec!["MARK=1".into()],
            timeout_s: 0,
        };
        let state = "{\"id\":\"c\"}".into();
        run(&HookJob { hook, state, inside: 0, directory: "/".into(), limit_ms })
    }

    #[test]
    fn a_hook_reads_the_state_and_has_only_its_own_environment() {
        shell("read -r line || true; [ \"$line\" = '{\"id\":\"c\"}' ] && [ \"$MARK\" = 1 ] && [ -z \"$CARGO\" ]", 5000).unwrap_or_else(|failure| {
            // `read` fails for input without a newline, but sets the variable.
            panic!("{}", failure.message)
        });
    }

    #[test]
    fn the_error_of_a_failed_or_blocked_hook_names_it() {
        let error = shell("exit 3", 5000).unwrap_err();
        assert_eq!(error.kind, FailureKind::Plugin);
        assert!(error.message.starts_with("hook /bin/sh: exit status: 3"), "{}", error.message);
        let begun = Instant::now();
        let error = shell("sleep 60 & wait", 200).unwrap_err();
        assert!(error.message.contains("200 ms"), "{}", error.message);
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
