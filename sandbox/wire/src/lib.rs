//! The formats that the daemon and a pod's monitor exchange. This crate contains no logic of either side.
//!
//! ```text
//!   daemon                              coracle-pod
//!     │  Request (frame)  + descriptors      │
//!     ├─────────────────────────────────────►│   launch record: a sealed memfd, read by the
//!     │  Reply, Event (frame) + descriptors  │   cloned child alone, operation by operation
//!     │◄─────────────────────────────────────┤
//!     │                                      │   exit record: a file in the pod's state directory,
//!     │        exits/ID  (exit record)       │   written by the monitor also while no daemon lives
//! ```
//!
//! These formats outlive a process: a daemon controls monitors that an older daemon started. Therefore variants and
//! fields are only appended, never reordered or removed; tests compare the encoding with that of each release. The
//! crate is `no_std` and does not allocate, because the monitor has no heap.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;

mod exit;
mod frame;
mod id;
mod launch;
mod timestamp;

pub use exit::{DamagedExit, EXIT_RECORD_BYTES_MAX, Exit, ExitRecord, decode_exit, encode_exit};
pub use frame::{
    CONTAINERS_MAX, DESCRIPTORS_MAX, EXECS_MAX, Event, FRAME_BYTES_MAX, Failure, FromMonitor, PidNamespace,
    Reply, Request, Streams, ToMonitor, VERSION,
};
pub use id::{ContainerId, ExecId, InvalidId, PodId};
pub use launch::{
    Block, HOST_NAMESPACE, KernelDirectory, Mismatch, Op, Propagation, RECORD_VERSION, RecordHeader,
    SHARED_PROC, Text, Walk, walk,
};
pub use timestamp::{TIMESTAMP_BYTES, days, timestamp};
