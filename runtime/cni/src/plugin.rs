//! One plugin: what it is asked, and what its answer means. [`coracle_programs`] executes it.

use std::fmt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Instant;

use coracle_programs::{Call, End, one_line};
use coracle_sandbox::describe_io;
use serde::Deserialize;

/// Maximum length of a result in bytes: sufficient for 10 000 routes.
const STDOUT_BYTES_MAX: usize = 1 << 20;

/// The CNI command that a plugin receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Del,
    Status,
}

impl Verb {
    /// Name of the command in errors, in lower case; in upper case it is the value of `CNI_COMMAND`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Verb::Add => "add",
            Verb::Del => "del",
            Verb::Status => "status",
        }
    }
}

/// The reason why a plugin returned no valid result.
#[derive(Debug)]
pub(super) enum PluginError {
    /// The program does not exist.
    Absent {
        /// The directories in which the program was searched.
        looked_in: String,
    },
    /// The plugin failed with a message. `code` is the code of the CNI specification; 0: none.
    ChildMessage { code: u64, message: String },
    /// The plugin was killed at the deadline of `limit_ms` milliseconds.
    Late { limit_ms: u128 },
    /// The plugin could not be executed, or violated the protocol; with a description.
    Broken(String),
}

impl PluginError {
    /// Creates the error from a plugin's message, which is converted into one line of limited length.
    pub(super) fn said(code: u64, message: &str) -> PluginError {
        PluginError::ChildMessage { code, message: one_line(message) }
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { looked_in } => write!(out, "no such program in {looked_in}"),
            Self::ChildMessage { message, .. } => out.write_str(message),
            Self::Late { limit_ms } => write!(out, "did not end within {limit_ms} ms and was killed"),
            Self::Broken(why) => out.write_str(why),
        }
    }
}

/// Runs `program` with `variables` added to the environment and `input` on standard input; returns its
/// standard output if it exits with 0 before `deadline`.
pub(super) fn call(
    program: &Path,
    variables: &[(&'static str, String)],
    input: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, PluginError> {
    let began = Instant::now();
    let call = Call {
        program,
        arguments: &[],
        variables,
        input,
        deadline,
        stdout_bytes_max: STDOUT_BYTES_MAX,
        is_judge: false,
        as_long_as: None,
    };
    let ended = coracle_programs::run(&call).map_err(|error| {
        PluginError::Broken(format!("run {}: {}", program.display(), describe_io(&error)))
    })?;
    match ended.end {
        End::Exited(status) if status.success() => {
            if !ended.stderr.trim().is_empty() {
                super::note(&format!("{}: {}", program.display(), one_line(&ended.stderr)));
            }
            Ok(ended.stdout)
        }
        End::Exited(status) => Err(explain(status, &ended.stdout, &ended.stderr)),
        End::TooLong => Err(PluginError::said(0, &format!("printed more than {STDOUT_BYTES_MAX} bytes"))),
        End::Late | End::Unwanted => {
            Err(PluginError::Late { limit_ms: deadline.duration_since(began).as_millis() })
        }
    }
}

/// The error object of a plugin (CNI spec 1.1.0, "Error").
#[derive(Deserialize)]
struct ErrorObject {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// The error of a plugin with a non-zero exit status: its error object, otherwise its standard error,
/// otherwise its exit status.
fn explain(status: ExitStatus, stdout: &[u8], last_words: &str) -> PluginError {
    // Parsed as a map first, because serde would also accept an array with the fields in order.
    let map = serde_json::from_slice::<serde_json::Map<_, _>>(stdout).ok();
    let object = map.and_then(|map| serde_json::from_value::<ErrorObject>(map.into()).ok());
    let (code, message) = match object {
        Some(ErrorObject { code, msg, details }) if msg.is_empty() || details.is_empty() => {
            (code, msg + &details)
        }
        Some(ErrorObject { code, msg, details }) => (code, format!("{msg}; {details}")),
        None => (0, String::new()),
    };
    if !message.trim().is_empty() {
        return PluginError::said(code, &message);
    }
    if !last_words.trim().is_empty() {
        return PluginError::said(code, last_words);
    }
    PluginError::said(code, &format!("ended with {status} and no message"))
}

#[cfg(test)]
mod tests {
    use super::{PluginError, explain};
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn the_error_is_taken_from_stdout_stderr_or_the_exit_status() {
        let cases: [(&[u8], &str, u64, &str); 7] = [
            (br#"{"cniVersion":"1.0.0","code":7,"msg":"bad conf"}"#, "noise", 7, "bad conf"),
            (br#"{"code":100,"msg":"a","details":"b"}"#, "", 100, "a; b"),
            (br#"{"code":11,"msg":"two\nlines\u0000"}"#, "", 11, "two lines"),
            (br#"{"code":11}"#, "from stderr\n", 11, "from stderr"),
            (b"panic: x", "goroutine 1\n\trunning", 0, "goroutine 1 running"),
            (b"", "", 0, "ended with exit status: 1 and no message"),
            (b"[3]", "", 0, "ended with exit status: 1 and no message"),
        ];
        for (stdout, stderr, expected_code, expected) in cases {
            let PluginError::ChildMessage { code, message } =
                explain(ExitStatus::from_raw(1 << 8), stdout, stderr)
            else {
                panic!("{stdout:?}")
            };
            assert_eq!((code, message.as_str()), (expected_code, expected), "{stdout:?} {stderr:?}");
        }
    }
}
