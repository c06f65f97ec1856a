//! The base of all other parts of the daemon: event loop, worker processes, records on disk, log lines, error
//! type, counters, listening sockets.
//!
//! ```text
//! coracle (daemon) ──► coracle-streaming ──► coracle-engine ──► coracle-network, coracle-images
//!        └───────────────────────┴───────────────────┴──────────────────┴──► coracle-base ──► coracle-sandbox, coracle-job
//! ```
//! The base is a separate crate, so that the compiler ensures that it does not depend on pods, images or
//! RPCs.
#![forbid(unsafe_code)]

pub mod clients;
pub mod counters;
pub mod descriptors;
pub mod error;
pub mod history;
pub mod hostpath;
pub mod listen;
pub mod log;
pub mod reactor;
pub mod settings;
pub mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testdir;
pub mod text;
pub mod time;
pub mod waits;
pub mod workers;

pub use coracle_sandbox::collect;
