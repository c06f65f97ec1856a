//! The engine: the lifecycle of pods and containers, from the validated CRI request to the removal of the
//! last object.
//!
//! ```text
//! cri/  ──►  Pods  ──►  Pod: steps (up, down)      Container: create, start, stop, remove, exec
//!               │              │                             │
//!               │            state (pure)    record (durable)    link (the monitor)
//!               └── recover: the same steps, after a crash or a reboot
//! ```
//!
//! [`Pods`] is the table. The operations on one pod are methods of [`Pod`], in `pod` and the modules below it;
//! those on one container are methods of [`Container`], in the module of their subject. What all pods share is in
//! [`Engine`].
//!
//! The state of a pod or container is changed only by the task that holds its `operation` lock; lists and
//! statuses read the published state and never wait. No lock covers two pods. The engine knows neither gRPC
//! nor CRI types nor CNI JSON, and of NRI only the trait in [`lifecycle`], whose implementation is passed to
//! it.
#![forbid(unsafe_code)]

pub mod clock;
mod container;
pub mod exec;
mod files;
mod filesystem;
mod garbage;
mod hooks;
pub mod lifecycle;
mod link;
pub mod modules;
mod node;
pub mod notices;
mod operations;
pub mod output;
pub mod paths;
mod pod;
mod published;
mod reconcile;
pub mod record;
mod recover;
mod retries;
pub mod signal;
pub mod spec;
pub mod state;
pub mod streams;
mod systemd_scopes;
mod table;
mod times;
mod unknown;
mod unlinked;
mod unread;

pub use container::{Resolved, compile_filter};
pub use files::node_hostname;
pub use node::{Host, Kernel, Monitors, Node, Placement, PodNetworks};
pub use pod::{Container, Pod};
pub use table::{Engine, Pods};
