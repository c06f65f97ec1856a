//! System calls without a safe wrapper in nix or rustix: clone3 into a cgroup, keyrings, and the scheduler's
//! slices. This is the only `unsafe` code of the floor.
#![expect(unsafe_code, reason = "system calls without a safe wrapper in nix or rustix")]

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc::{self, c_long};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, pipe2};

use crate::{Outcome, failed};

/// `keyctl(2)`: KEYCTL_JOIN_SESSION_KEYRING.
const JOIN_SESSION_KEYRING: c_long = 1;
/// `keyctl(2)`: KEYCTL_SETPERM.
const SET_PERMISSIONS: c_long = 5;
/// Permissions of coracle's keyrings: all for the possessor, search for the owner.
const KEYRING_PERMISSIONS: c_long = 0x3f08_0000;
/// Size of `struct sched_attr` in its first version.
const ATTRIBUTES_BYTES: usize = 48;
/// Position of `sched_runtime` in `struct sched_attr`, which is the slice of an ordinary process since Linux 6.12.
const SLICE_INDEX: usize = 3;
/// Number of 64-bit fields in `struct clone_args` up to `cgroup` (Linux 5.7). An array, because libc has no such struct on armv7.
const CLONE_FIELDS: usize = 11;
/// Position of `flags` in `struct clone_args`.
const FLAGS_INDEX: usize = 0;
/// Position of `pidfd` in `struct clone_args`, the address to which the kernel writes the descriptor.
const PIDFD_INDEX: usize = 1;
/// Position of `exit_signal` in `struct clone_args`.
const EXIT_SIGNAL_INDEX: usize = 4;
/// Position of `cgroup` in `struct clone_args`.
const CGROUP_INDEX: usize = 10;
/// `clone3(2)`: CLONE_INTO_CGROUP.
const INTO_CGROUP: u64 = 0x2_0000_0000;
/// Exit code of a child that could not do its work.
const FAILED: i32 = 127;

/// A child process.
#[derive(Debug)]
pub(crate) struct Child {
    /// Process id in this PID namespace.
    pub(crate) pid: Pid,
    /// A descriptor of the process, for `setns`.
    pub(crate) pidfd: OwnedFd,
    /// Closed by the child when its work is done; carries the error if it fails.
    ready: File,
}

/// The end of the pipe on which a child reports: closing it, which a successful exec does too, means success.
#[derive(Debug)]
pub(crate) struct Ready(Option<File>);

impl Ready {
    /// Reports that the work is done.
    pub(crate) fn done(&mut self) {
        self.0 = None;
    }
}

impl Child {
    /// Creates a process in a cgroup of version 2 with further `CLONE_NEW…` flags, which runs `work`. The work
    /// must not return unless it fails.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn new(
        cgroup: impl AsFd,
        flags: i32,
        work: impl FnOnce(&mut Ready) -> Outcome<Infallible>,
    ) -> Outcome<Child> {
        let (ready, write) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| failed("make a pipe", errno))?;
        let mut pidfd = -1;
        let mut arguments = [0u64; CLONE_FIELDS];
        arguments[FLAGS_INDEX] = flags as u64 | libc::CLONE_PIDFD as u64 | INTO_CGROUP;
        arguments[PIDFD_INDEX] = &raw mut pidfd as u64;
        arguments[EXIT_SIGNAL_INDEX] = libc::SIGCHLD as u64;
        arguments[CGROUP_INDEX] = cgroup.as_fd().as_raw_fd() as u64;
        // SAFETY: without CLONE_VM the child has a copy of all memory and of the only thread of this program, so no
        // lock is held by a thread that it lacks; the array lives through the call, and so does the number that the
        // kernel writes.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, arguments.as_ptr(), size_of_val(&arguments)) };
        match Errno::result(pid).map_err(|errno| failed("clone", errno))? {
            0 => {
                let mut ready = Ready(Some(File::from(write)));
                let Err(error) = work(&mut ready);
                // If the reader has ended, no process is interested in the error.
                let _ = ready.0.map(|mut report| report.write_all(error.as_bytes()));
                // SAFETY: ends the process without running the parent's destructors.
                unsafe { libc::_exit(FAILED) }
            }
            pid => {
                // SAFETY: the kernel has just created this descriptor, and this program has no other owner of it.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                Ok(Child { pid: Pid::from_raw(pid as i32), pidfd, ready: File::from(ready) })
            }
        }
    }

    /// Waits until the child has done its work, or has executed its program.
    ///
    /// # Errors
    /// The error of the child.
    pub(crate) fn ready(&mut self) -> Outcome<()> {
        let mut error = String::new();
        self.ready.read_to_string(&mut error).map_err(|error| failed("read from the child", error))?;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn ended(&self) -> Outcome<WaitStatus> {
        waitpid(self.pid, None).map_err(|errno| failed("wait for a child", errno))
    }
}

/// Requests slices of this length in nanoseconds for this process and its later children; 0: the default. A
/// kernel before Linux 6.12 ignores it.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn set_slice(nanoseconds: u64) -> Outcome<()> {
    // Size and policy, flags, nice value and priority, runtime, deadline, period.
    let mut attributes = [0_u64; ATTRIBUTES_BYTES / size_of::<u64>()];
    // SAFETY: the kernel writes at most the given number of bytes, which the array has; process 0 is the caller.
    let answer =
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, attributes.as_mut_ptr(), ATTRIBUTES_BYTES, 0) };
    Errno::result(answer).map_err(|errno| failed("read the slice", errno))?;
    attributes[SLICE_INDEX] = nanoseconds;
    // SAFETY: the array begins with its size, as the kernel has written it, and lives through the call.
    let answer = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attributes.as_ptr(), 0) };
    Errno::result(answer).map(drop).map_err(|errno| failed("set the slice", errno))
}

/// Joins the session keyring of this name, which is created if it is missing. A kernel without keyrings is
/// success.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn join_keyring(name: &str) -> Outcome<()> {
    let name = CString::new(name).map_err(|error| failed("name a keyring", error))?;
    // SAFETY: a terminated string that lives through the call.
    let answer = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name.as_ptr()) };
    let key = match Errno::result(answer) {
        Err(Errno::ENOSYS) => return Ok(()),
        answer => answer.map_err(|errno| failed("join a keyring", errno))?,
    };
    // SAFETY: numbers only.
    let answer = unsafe { libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, key, KEYRING_PERMISSIONS) };
    Errno::result(answer).map(drop).map_err(|errno| failed("set permissions of a keyring", errno))
}
