//! Makes the changes of a plan, one after the other. A file that is no longer as the plan found it is not changed. The first error
//! ends the command; the changes before it are complete, and the command may be repeated.

use crate::host::{self, Host, Problem};
use crate::plan::Change;

/// Makes the changes; returns the number of those that were made, and the error that ended them.
pub(crate) fn apply(host: &Host, changes: &[Change]) -> (usize, Option<Problem>) {
    for (count, change) in changes.iter().enumerate() {
        if let Err(problem) = one(host, change) {
            return (count, Some(problem));
        }
    }
    (changes.len(), None)
}

fn one(host: &Host, change: &Change) -> Result<(), Problem> {
    match change {
        Change::Write { path, from, text } => {
            host.make_directories(host::split(path).0)?;
            is_unchanged(host, path, from.as_deref())?;
            host.write(path, text)
        }
        Change::Remove { path, from } => {
            is_unchanged(host, path, Some(from))?;
            host.remove(path)
        }
        Change::RemoveDirectory { path } => host.remove_directory(path),
    }
}

fn is_unchanged(host: &Host, path: &str, from: Option<&str>) -> Result<(), Problem> {
    match host.read(path)?.as_deref() == from {
        true => Ok(()),
        false => Err(Problem(format!("{path}: another process changed it meanwhile: repeat the command"))),
    }
}
