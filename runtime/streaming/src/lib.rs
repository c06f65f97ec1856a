//! kubectl exec, attach and port-forward: the streaming server (docs/specs/streaming.md).
//!
//! ```text
//!   cri/{exec,attach,port_forward} ─► server::url ─► token                       (gRPC ends here)
//!   client ─► server: head, token, upgrade ─► connection ◄─► spdy │ websocket    (bytes in, events out; no I/O)
//!                                                 │
//!                              stdio: one process │ forward: sockets in a pod    ◄─► coracle_engine::streams
//! ```
//! Everything is bounded: tokens, sessions, heads, frames, what waits for a slow client, what waits for a slow process.
//! A session that breaks ends alone.
#![forbid(unsafe_code)]

mod connection;
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

pub use server::{Options, Request, Streams};
