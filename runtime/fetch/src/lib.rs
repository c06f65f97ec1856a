//! The network side of a pull: `coracle-worker fetch`, a child of the worker that writes the store. It is the
//! only process of a pull with network access, and has no other access: no files of the node, no
//! capabilities, no view of other processes. The worker leaves the node's network namespace as soon as its
//! fetcher is started. An attacker who compromises one of the two gets either the network or the files, but
//! not both.
//!
//! ```text
//! worker: endpoints, digests, parts, unpacking, store          fetcher: names, proxies, TLS, HTTP,
//! redirects, tokens
//!     client ── control: setup, requests ──────────────────────►  process ─► endpoint ─► agent ─► registry
//!            ◄─ a pipe for each request: answer, chunks, end ───
//! ```
//! The worker reads certificates, keys, credentials, proxies and the resolver's files and sends them over the
//! control socket (`protocol`). It does not trust answers: lengths are limited, the worker computes the
//! digests, and each wait has a limit. The fetcher ends with the worker's main thread (parent-death signal),
//! and when the control socket is closed.
#![forbid(unsafe_code)]

mod absolute;
mod agent;
mod arrival;
mod certificate;
mod challenge;
mod client;
mod confine;
mod decoded;
mod elliptic;
mod endpoint;
mod floor;
mod location;
mod names;
mod neighbour;
mod process;
mod protocol;
mod ranges;
mod request_failure;
mod setup;
mod tls;
pub mod unverified;

pub use arrival::{Arrival, Next};
pub use client::{Asked, Body, Fetcher};
pub use floor::Floor;
pub use process::live;
pub use protocol::{AskNeighbour, Begin, Get, Head, Resolved};
pub use ranges::{AT_ONCE_MAX, Ranges};
pub use request_failure::RequestFailure;

/// The first argument of the fetcher process.
pub const SUBCOMMAND: &str = "fetch";
