//! Thin system calls: one function, one call, no policy. All `unsafe` of the project is here and in the monitor's
//! entry, so that what must be argued about can be read in one sitting.
//!
//! ```text
//!   arch/       the trap instruction and the numbers, per architecture
//!   errno, fd   what every call gives: an error number, a descriptor that is owned or borrowed
//!   process     clone3, exec, wait, namespaces, identity, limits, signals
//!   sibling     a child that is made by another child
//!   keys        session keyrings
//!   mark        calls that pass a filter which would refuse them
//!   mount       the old mount calls and the new ones that work on descriptors
//!   fs          files, directories, seals, mappings
//!   socket      SOCK_SEQPACKET with descriptors beside the message, epoll, signalfd
//!   netlink     sockets to the kernel's network configuration
//!   bpf         seccomp filters
//! ```
//! `no_std` and without libc: the monitor has neither. Descriptors are close-on-exec from the call that makes them.
//! A function whose call is newer than Linux 5.10 says so; the caller brings the way around.
#![cfg_attr(not(any(test, feature = "std")), no_std)]
#![expect(unsafe_code, reason = "this crate is where the project talks to the kernel")]

mod arch;
mod errno;
mod fd;

pub mod bpf;
pub mod fs;
pub mod keys;
pub mod mark;
pub mod mount;
pub mod netlink;
pub mod process;
pub mod sibling;
pub mod socket;

pub use errno::Errno;
pub use fd::{Fd, FdRef};

use arch::number;
