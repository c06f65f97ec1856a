//! The streaming server for kubectl exec, attach and port-forward (docs/specs/streaming.md).
//!
//! ```text
//! cri/{exec,attach,port_forward} ─► server::url ─► token                       (gRPC ends here)
//! client ─► server: header, token, upgrade ─► connection ◄─► spdy │ websocket  (bytes in, events out; no
//! I/O)
//!                                                 │
//!                              stdio: one process │ forward: sockets in a pod    ◄─► coracle_engine
//! ```
//! The number of tokens and sessions, the size of headers and frames, and the data that waits for a slow
//! client or process are limited. An error ends only its own session.
#![forbid(unsafe_code)]

mod connection;
#[cfg(test)]
mod damage;
mod event;
mod forward;
mod head;
mod peer;
mod queue;
mod server;
mod spdy;
mod status;
mod stdio;
mod tokens;
mod websocket;

pub use server::{Request, Streams};
