//! A jailed child as its worker sees it: started, heard, and gone when the value is.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use coracle_job::{Failure, FailureKind, read_message};
use coracle_sandbox::jail::{self, Ended, Jailed};

use super::inmate::{Hear, SUBCOMMAND, Said, Task};
use crate::failure::{failure, invalid};

/// A child at work.
pub(super) struct Inmate {
    pub(super) child: Jailed,
    /// Its stdout.
    pub(super) said: BufReader<io::PipeReader>,
}

impl Inmate {
    /// Starts one for `task`; what it reads is its stdin, and `output` its descriptor 3.
    pub(super) fn start(
        task: Task,
        directory: &Path,
        input: BorrowedFd<'_>,
        output: Option<BorrowedFd<'_>>,
    ) -> Result<Self, Failure> {
        let tried = |error: io::Error| {
            failure(FailureKind::Internal, format!("start the process that reads the archive: {error}"))
        };
        let program = File::open("/proc/self/exe").map_err(tried)?;
        let directory = File::open(directory).map_err(tried)?;
        let (said, stdout) = io::pipe().map_err(tried)?;
        let mut arguments = vec![c"coracle-worker".to_owned()];
        for word in [SUBCOMMAND.to_owned()].into_iter().chain(words(task)) {
            // Numbers and names of tasks.
            arguments.push(CString::new(word).map_err(|error| tried(error.into()))?);
        }
        let start = jail::Start {
            program: program.as_fd(),
            arguments: &arguments,
            directory: directory.as_fd(),
            streams: [input, stdout.as_fd()],
            output,
        };
        let child = jail::start(&start).map_err(|error| jailing(&error))?;
        Ok(Self { child, said: BufReader::new(said) })
    }

    /// Hears it to its end.
    pub(super) fn hear(mut self, hear: Hear<'_>) -> Result<(), Failure> {
        // With a failure the value goes, and the child with it: it may be in the middle of something.
        match self.listen(hear)? {
            true => self.child.wait().map(drop).map_err(|error| jailing(&error)),
            false => Err(match self.child.wait() {
                Ok(ended) => why(ended),
                Err(error) => jailing(&error),
            }),
        }
    }

    /// Whether it said its last word.
    fn listen(&mut self, hear: Hear<'_>) -> Result<bool, Failure> {
        loop {
            match read_message::<Said>(&mut self.said) {
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
}

/// A step of the jail that this host does not allow.
pub(super) fn jailing(error: &coracle_sandbox::Error) -> Failure {
    super::not_without(&error.to_string(), "archives are not read")
}

/// It met a bound of the kernel's, or was killed.
pub(super) fn why(ended: Ended) -> Failure {
    let kind = match ended {
        Ended::Signal(9) | Ended::Code(127) => FailureKind::Internal,
        Ended::Signal(_) | Ended::Code(_) => FailureKind::Invalid,
    };
    failure(kind, format!("archive: the process that reads it ended: {ended}"))
}

fn words(task: Task) -> Vec<String> {
    match task {
        Task::Decompress => vec!["decompress".into()],
        Task::Unpack(limits) => {
            vec!["unpack".into(), limits.layer_bytes_max.to_string(), limits.layer_entries_max.to_string()]
        }
        Task::Spool(bytes_max) => vec!["spool".into(), bytes_max.to_string()],
    }
}
