//! What every test of coracle stands on. Everything here looks at the built programs from outside: nothing of ours is
//! linked, so a test can only see what a user or a kubelet sees.
//!
//! ```text
//!     image ──► registry ──┐
//!                          ▼
//!     request ──► cri ──► Node (own root, state, socket, cgroups, bridge) ◄── host (what the machine shows)
//! ```
//!
//! A test starts a [`node::Node`], asks it through [`cri::Cri`], and ends with [`node::Node::stop`], which fails when
//! anything is left on the machine. All of it needs root.
#![forbid(unsafe_code)]

mod config;
pub mod cri;
pub mod fault;
pub mod fresh_disk;
pub mod host;
pub mod http;
pub mod image;
pub mod layer;
pub mod mute_fs;
pub mod nginx;
pub mod node;
pub mod nri;
pub mod peer;
pub mod registry;
pub mod request;
pub mod spdy;
pub mod stage;
