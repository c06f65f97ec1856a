//! Reads the policy of signatures with its keys: at the start of the daemon, at its reloads, and for `coracle config check`.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_job::Failure;
use coracle_registries::node_file;
use coracle_sandbox::describe_io;
use coracle_signature::Policy;

/// The first argument of a process that checks a policy.
pub(crate) const CHECK_SUBCOMMAND: &str = "check-image-policy";

/// Reads the policy.
///
/// # Errors
/// The mistake, with the file and the place.
pub(crate) fn run(path: &Path) -> Result<Policy, Failure> {
    let wrong = |why: String| Failure::invalid(format!("image.policy.file: {}: {why}", path.display()));
    let read = |path: &Path| node_file::read(path).map_err(|error| describe_io(&error));
    let bytes = read(path).map_err(wrong)?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("not UTF-8".to_owned()))?;
    coracle_signature::parse(&text, &|path| read(Path::new(path))).map_err(wrong)
}

/// Checks the policy whose path is the argument; prints the mistake.
pub(crate) fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let path = PathBuf::from(arguments.next().unwrap_or_default());
    match run(&path) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stdout(), "{}", failure.message);
            ExitCode::FAILURE
        }
    }
}
