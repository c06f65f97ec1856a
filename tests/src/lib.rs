//! The common parts of all tests. Tests observe the built programs from outside: no code of coracle is
//! linked, so tests see only what users and kubelets see.
//!
//! ```text
//!     image ──► registry ──┐
//!                          ▼
//!     request ──► cri ──► Node (own root, state, socket, cgroups, bridge) ◄── host (state of the machine)
//! ```
//!
//! A test starts a [`node::Node`], uses it through [`cri::Cri`], and ends with [`node::Node::stop`], which
//! fails if any object remains on the machine. All tests require root.
#![forbid(unsafe_code)]

pub use coracle_node::{cri, host, image, node, request};

pub mod cadvisor;
pub mod containerd;
pub mod converted;
pub mod fault;
pub mod floor;
pub mod fresh_disk;
mod fuse;
pub mod ginkgo;
pub mod go_test;
pub mod http;
pub mod kubelet;
pub mod layer;
pub mod mute_fs;
pub mod nginx;
pub mod nri;
pub mod page_rules;
pub mod peer;
pub mod pictures;
pub mod pod_fixture;
pub mod podman;
pub mod prometheus;
pub mod random;
pub mod registry;
pub mod signing;
pub mod site;
pub mod slow_flush_fs;
pub mod small_disk;
pub mod spdy;
pub mod squashed_fs;
pub mod update;
pub mod vendor;
