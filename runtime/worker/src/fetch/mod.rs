//! The network side of a pull: `coracle-worker fetch`, a child of the worker that writes the store. It is the only process of a
//! pull that has a network, and what speaks TLS and HTTP there has nothing else: no file of the node, no capability, no other
//! process in view. The worker leaves the node's network as soon as its fetcher is started. Whoever takes over the one
//! reaches no file, whoever takes over the other no network.
//!
//! ```text
//!   worker: endpoints, digests, parts, unpacking, store          fetcher: names, proxies, TLS, HTTP, redirects, tokens
//!     client ── control: setup, requests ──────────────────────►  process ─► endpoint ─► agent ─► registry
//!            ◄─ a pipe for each request: answer, chunks, end ───
//! ```
//! Certificates, keys, credentials, proxies and the files of the resolver are read by the worker and go over the control
//! socket ([`protocol`]). The worker trusts nothing that comes back: lengths are bounded, digests are computed on its side,
//! and each of its waits has a limit. The fetcher ends with the worker's first thread (the parent-death signal), and when
//! the control socket closes.

mod agent;
mod challenge;
mod client;
mod endpoint;
mod names;
mod process;
mod protocol;
mod setup;
mod trouble;

pub(crate) use client::{Body, Fetcher};
pub(crate) use names::FILES;
pub(crate) use process::live;
pub(crate) use protocol::{Begin, Head};
pub(crate) use trouble::Trouble;

/// The first argument.
pub(crate) const SUBCOMMAND: &str = "fetch";
