//! A pod's monitor: one small process that is the parent of the pod's container and exec processes, holds its
//! namespaces, writes its logs and stores its exit records. It survives the daemon and works without it.
//!
//! ```text
//!   entry ──► serve      the event loop: socket, signals, reports of children, output of containers
//!               ├── answer   requests of the daemon
//!               ├── init     the first process of a PID namespace that containers share
//!               ├── start    clones children for requests and handles their reports
//!               │     ├── second   processes that are created in two steps
//!               │     ├── launch   in the child: from clone to the launch record
//!               │     └── child     executes a launch record up to exec
//!               │           ├── namespaces  the namespaces of a container
//!               │           ├── keyring the container's session keyring
//!               │           ├── root    paths of a container, resolved inside its root by descriptor
//!               │           ├── mounts  mounts of a container
//!               │           └── verify  verifies the resulting mounts before exec
//!               ├── output   streams → log
//!               │     └── log       bytes → CRI log lines
//!               ├── reap     reaps processes, handles a container's end
//!               │     ├── oom     OOM kills of containers
//!               │     └── exit_records  exit records on disk
//!               └── table    tables of containers, execs and attached clients, with their limits
//! ```
//! Inherited descriptors: 3 a listening SOCK_SEQPACKET socket, 4 the pod's state directory, 5 a sealed memfd with the
//! pod's setup record, 6 the pod's user namespace, if it has one. The crate is `no_std` and uses no heap; invalid input
//! cannot cause a panic.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod serve;

mod answer;
mod init;
mod second;
mod start;

mod capabilities;
mod child;
mod keyring;
mod launch;
mod mounts;
mod namespaces;
mod root;
mod verify;

mod log;
mod output;

mod exit_records;
mod oom;
mod reap;

mod table;
mod trees;

pub use serve::{Inherited, run};
pub use table::Table;
