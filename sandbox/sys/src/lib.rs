//! System calls: one function for one call, without policy. A call that rustix has is made by rustix; what rustix lacks, or
//! makes larger, is here (docs/notes/016-system-calls.md). All `unsafe` code of the project is in this crate and in the
//! monitor's entry point, so that it can be reviewed in one place.
//!
//! ```text
//!   arch/       the system call instruction and the numbers of the calls that rustix lacks, per architecture
//!   errno, fd   the results of calls: error numbers, owned and borrowed descriptors
//!   process     clone3, exec, wait, namespaces, identity, limits, signals
//!   program     returns unused pages of the program's file
//!   sched       policy, slices and CPUs of the caller
//!   sibling     a child that is cloned by another child
//!   keys        session keyrings
//!   mark        calls that pass a seccomp filter that would refuse them
//!   mount       the path-based mount calls and the newer ones on descriptors
//!   fs          files, directories
//!   memory      memfds with seals, mappings
//!   pointers    the arguments and the environment of a program
//!   socket      SOCK_SEQPACKET with descriptors beside the message, epoll, signalfd
//!   netlink     sockets to the kernel's network configuration
//!   bpf         seccomp filters
//!   stack       returns unused pages of the stack
//! ```
//! `no_std` and without libc, because the monitor has neither; rustix needs neither. Descriptors are close-on-exec from their creation. The
//! documentation of a function names the Linux version if its call is newer than 5.10; the caller provides the
//! fallback.
//!
//! The error of every function is the kernel's error number, unless its documentation lists other errors.
#![cfg_attr(not(any(test, feature = "std")), no_std)]
#![expect(unsafe_code, reason = "this crate is where the project talks to the kernel")]

mod arch;
mod errno;
mod fd;

pub mod bpf;
pub mod fs;
pub mod keys;
pub mod mark;
pub mod memory;
pub mod mount;
pub mod netlink;
mod pointers;
pub mod process;
pub mod program;
pub mod sched;
pub mod sibling;
pub mod socket;
pub mod stack;

pub use errno::Errno;
pub use fd::{Fd, FdRef};

use arch::number;
