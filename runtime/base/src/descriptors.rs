//! The limit of open files. The daemon raises its own soft limit, because it is often 1024 for programs with `select`
//! and a full node with streams needs more. Programs of others that the daemon starts get the soft limit that it was
//! started with, as Go's runtime does for the children of containerd.

use std::io;
use std::sync::OnceLock;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

use crate::error::describe_io;
use crate::log;

static STARTED_WITH: OnceLock<Rlimit> = OnceLock::new();

/// Raises this process's soft limit to the hard limit.
///
/// # Errors
/// The error of `setrlimit`.
pub fn raise_limit() -> io::Result<()> {
    let before = STARTED_WITH.get_or_init(|| getrlimit(Resource::Nofile));
    Ok(setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..*before })?)
}

/// Gives the child process `pid` the limit that this process was started with.
pub fn restore_limit_of(pid: Pid) {
    let Some(limit) = STARTED_WITH.get() else { return };
    if let Err(errno) = prlimit(Some(pid), Resource::Nofile, *limit) {
        log::warn!("cannot lower the limit of open files of a program that was started, it has the daemon's"; pid = pid, error = describe_io(&errno.into()));
    }
}
