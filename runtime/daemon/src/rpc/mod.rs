//! The gRPC server: a unix socket, HTTP/2 connections, deadlines, limits, and the mapping from errors to gRPC
//! codes.
//!
//! ```text
//! listen ── accepted socket ──> server ── HTTP/2 stream ──> dispatch ──> service ── by path ──> cri/…
//! (path, mode, rename)          (hyper)                     (deadline,   (one line
//!                                                            count)       per RPC)
//! ```
//!
//! hyper and tonic run on coracle's executor and reactor; tokio's runtime is not used. No
//! rules of the CRI are implemented here. Both services share the socket; all other services, including
//! `v1alpha2`, return UNIMPLEMENTED without closing the connection. Requests may have any `:authority` (`authority`).

mod authority;
mod dispatch;
mod failed;
mod io;
mod peers;
mod pieces;
mod raw;
mod requests;
mod server;
mod service;
mod status;
#[cfg(test)]
mod tests;
mod timeout;

pub(crate) use dispatch::Answer;
pub(crate) use io::free_spare_buffer;
pub(crate) use pieces::{Items, Pieces, encode_item};
pub(crate) use raw::Raw;
pub(crate) use requests::Counted;
pub(crate) use server::Server;
pub(crate) use service::answers;

/// Maximum message size in both directions in bytes: the limit of the kubelet, and the minimum that a runtime
/// must support (16 MiB).
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Messages of `proto/cri.proto`, generated from it (tests/protocols).
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    dead_code,
    clippy::all,
    reason = "generated code"
)]
pub(crate) mod v1 {
    include!("../../proto/runtime.v1.rs");
}
