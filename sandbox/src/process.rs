//! Kills single processes, for those that are not in the cgroup in which they were started.

use std::os::fd::{AsFd, BorrowedFd};

use coracle_sys::{self as sys, process};
use nix::errno::Errno;

use crate::Error;

/// Sends SIGKILL to the process `pid` if `is_it` returns true, which is called while a descriptor refers to the process, so
/// that its PID is not another's by then. A process that has ended is success.
///
/// # Errors
/// [`Error::Kernel`] naming the process.
pub fn kill(pid: i32, is_it: impl FnOnce() -> bool) -> Result<(), Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        return if is_it() { node.kill_process(pid) } else { Ok(()) };
    }
    match process::pidfd_open(pid) {
        Ok(pidfd) if is_it() => signal(pidfd.borrow(), pid),
        Ok(_) | Err(sys::Errno::ESRCH | sys::Errno::EINVAL) => Ok(()),
        Err(errno) => Err(Error::kernel("open process", pid, Errno::from_raw(errno.0))),
    }
}

/// Sends SIGKILL to the process that a pidfd refers to. A process that has ended is success.
///
/// # Errors
/// [`Error::Kernel`].
pub fn kill_by(pidfd: BorrowedFd<'_>) -> Result<(), Error> {
    signal(pidfd.as_fd().into(), "of a pidfd")
}

fn signal(pidfd: sys::FdRef<'_>, target: impl std::fmt::Display) -> Result<(), Error> {
    match process::pidfd_signal(pidfd, process::SIGKILL) {
        Ok(()) | Err(sys::Errno::ESRCH) => Ok(()),
        Err(errno) => Err(Error::kernel("kill process", target, Errno::from_raw(errno.0))),
    }
}
