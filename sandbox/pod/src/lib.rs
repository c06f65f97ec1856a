//! A pod's monitor: one small process that is the parent of the pod's container and exec processes, holds its
//! namespaces, writes its logs and keeps its exit records. It outlives the daemon and never needs it.
//!
//! ```text
//!   entry ──► serve      the loop: socket, signals, reports of clones, output of containers
//!               ├── answer   requests of the daemon
//!               ├── init     the first process of a PID namespace that containers share
//!               ├── start    request → clone, and what the clone reports
//!               │     ├── second   a process that is made in two steps
//!               │     ├── launch   in the clone: from what it is given to its record
//!               │     └── child     walks a launch record up to exec
//!               │           ├── home    the namespaces of a container, remembered and joined
//!               │           ├── keyring its session keyring
//!               │           ├── root    paths of a container, resolved inside its root by descriptor
//!               │           ├── mounts  mounts of a container
//!               │           └── verify  what came of them, looked at before exec
//!               ├── output   streams → log
//!               │     └── log       bytes → CRI log lines
//!               ├── ends     reaping; a container's end
//!               │     └── exits     exit records on disk
//!               └── table    what there is, with its maxima
//! ```
//! Started with: 3 a listening SOCK_SEQPACKET socket, 4 the pod's state directory, 5 a sealed memfd with the pod's
//! setup record, 6 the pod's user namespace, where it has one. `no_std`, no heap, no panic that bad input could reach.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod serve;

mod answer;
mod init;
mod second;
mod start;

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
mod reap;

mod table;

pub use serve::{Inherited, run};
pub use table::Table;
