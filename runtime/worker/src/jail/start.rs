//! The inmate as its worker sees it: started in its directory, heard, and gone when this returns.

use std::fs::File;
use std::io::BufReader;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use coracle_job::{Failure, FailureKind, read_message};
use nix::sys::signal::Signal;

use super::inmate::{Hear, SUBCOMMAND, Said, Task};
use crate::failure::{failure, invalid};

/// Starts the process in `directory` and hears it to its end.
pub(super) fn run(task: Task, directory: &Path, input: File, hear: Hear<'_>) -> Result<(), Failure> {
    let tried = |error: std::io::Error| {
        failure(FailureKind::Internal, format!("start the process that reads the archive: {error}"))
    };
    let mut child = Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .args(words(task))
        .current_dir(directory)
        .stdin(input)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(tried)?;
    let heard = listen(&mut child, hear);
    if heard.is_err() {
        // It may be in the middle of something; where it is gone already there is nothing to end.
        let _ = child.kill();
    }
    let status = child.wait().map_err(tried)?;
    match heard {
        Ok(true) => Ok(()),
        Ok(false) => Err(ended(status)),
        Err(error) => Err(error),
    }
}

/// Whether it said its last word.
fn listen(child: &mut Child, hear: Hear<'_>) -> Result<bool, Failure> {
    let Some(stdout) = child.stdout.take() else { return Ok(false) };
    let mut stdout = BufReader::new(stdout);
    loop {
        match read_message::<Said>(&mut stdout) {
            Ok(Some(Said::Failed(failure))) => return Err(failure),
            Ok(Some(said)) => {
                if hear(said)? {
                    return Ok(true);
                }
            }
            // It ended, maybe in the middle of a word.
            Ok(None) => return Ok(false),
            Err(error) => return Err(invalid(format!("the process that reads the archive: {error}"))),
        }
    }
}

/// It met a bound of the kernel's, or was killed.
fn ended(status: ExitStatus) -> Failure {
    let kind = match status.signal() {
        Some(signal) if signal == Signal::SIGKILL as i32 => FailureKind::Internal,
        _ => FailureKind::Invalid,
    };
    failure(kind, format!("archive: the process that reads it ended: {status}"))
}

fn words(task: Task) -> Vec<String> {
    match task {
        Task::Unpack(limits) => {
            vec!["unpack".into(), limits.layer_bytes_max.to_string(), limits.layer_entries_max.to_string()]
        }
        Task::Spool(bytes_max) => vec!["spool".into(), bytes_max.to_string()],
    }
}
