//! What every part of the daemon stands on, and what knows none of them: the event loop, worker processes, records on disk, log
//! lines, the error type, counters, listening sockets.
//!
//! ```text
//!   coracle (daemon) ──► coracle-streaming ──► coracle-engine ──► coracle-network, coracle-images
//!        └───────────────────────┴───────────────────┴──────────────────┴──► coracle-base ──► coracle-sandbox, coracle-job
//! ```
//! It is a crate of its own so that the arrows above it stay what they are: nothing here can name a pod, an image or an RPC.
#![forbid(unsafe_code)]

pub mod counters;
pub mod error;
pub mod hostpath;
pub mod listen;
pub mod log;
pub mod reactor;
pub mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testdir;
pub mod workers;
