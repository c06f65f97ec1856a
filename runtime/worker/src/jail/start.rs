//! The worker's handle of a confined child: it starts the child, receives its messages, and ends it on drop.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use coracle_chunked::outline::Purpose;
use coracle_job::{Failure, FailureKind, Limits, WORKER, read_message};
use coracle_sandbox::describe_io;
use coracle_sandbox::jail::{self, Ended, Jailed};

use super::confined::{ChildMessage, OnMessage, SUBCOMMAND, Task};

/// A running confined child.
pub(super) struct ConfinedChild {
    pub(super) child: Jailed,
    /// Standard output of the child.
    pub(super) said: BufReader<io::PipeReader>,
}

impl ConfinedChild {
    /// Starts a child for `task` with its standard input and `output` as descriptor 3.
    pub(super) fn start(
        task: Task,
        directory: &Path,
        input: BorrowedFd<'_>,
        output: Option<BorrowedFd<'_>>,
    ) -> Result<Self, Failure> {
        let tried = |error: io::Error| {
            Failure::new(
                FailureKind::Internal,
                format!("start the process that parses the archive: {}", describe_io(&error)),
            )
        };
        let program = File::open("/proc/self/exe").map_err(tried)?;
        let directory = File::open(directory).map_err(tried)?;
        let (said, stdout) = io::pipe().map_err(tried)?;
        let mut arguments = Vec::new();
        for word in [WORKER, SUBCOMMAND].map(str::to_owned).into_iter().chain(words(task)) {
            // Numbers and names of tasks, which have no NUL.
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

    /// Receives all messages until the child ends; `hear` handles each.
    pub(super) fn hear(mut self, hear: OnMessage<'_>) -> Result<(), Failure> {
        // On a failure the value is dropped and the child killed, because it may still run.
        match self.listen(hear)? {
            true => self.child.wait().map(drop).map_err(|error| jailing(&error)),
            false => Err(match self.child.wait() {
                Ok(ended) => why(ended),
                Err(error) => jailing(&error),
            }),
        }
    }

    /// Receives messages; returns whether the last one was received.
    fn listen(&mut self, hear: OnMessage<'_>) -> Result<bool, Failure> {
        loop {
            match read_message::<ChildMessage>(&mut self.said) {
                Ok(Some(ChildMessage::Failed(failure))) => return Err(failure),
                Ok(Some(said)) => {
                    if hear(said)? {
                        return Ok(true);
                    }
                }
                // It ended, possibly within a message.
                Ok(None) => return Ok(false),
                Err(error) => {
                    return Err(Failure::invalid(format!("the process that parses the archive: {error}")));
                }
            }
        }
    }
}

/// The failure for a step of the confinement that this host does not permit.
pub(super) fn jailing(error: &coracle_sandbox::Error) -> Failure {
    super::not_without(&error.to_string())
}

/// The failure for a child that reached a resource limit or was killed.
pub(super) fn why(ended: Ended) -> Failure {
    let kind = match ended {
        Ended::Signal(9) | Ended::Code(127) => FailureKind::Internal,
        Ended::Signal(_) | Ended::Code(_) => FailureKind::Invalid,
    };
    Failure::new(kind, format!("archive: the process that parses it ended: {ended}"))
}

fn words(task: Task) -> Vec<String> {
    match task {
        Task::Decompress => vec!["decompress".into()],
        Task::Unpack { limits, is_lowest, outline } => {
            let outline = match outline {
                None => 0,
                Some(Purpose::Neighbours) => 1,
                Some(Purpose::Headers) => 2,
            };
            let Limits { layer_bytes_max, layer_entries_max, .. } = limits;
            let numbers = [layer_bytes_max, layer_entries_max, is_lowest.into(), outline];
            ["unpack".to_owned()].into_iter().chain(numbers.map(|number| number.to_string())).collect()
        }
        Task::Spool(bytes_max) => vec!["spool".into(), bytes_max.to_string()],
    }
}
