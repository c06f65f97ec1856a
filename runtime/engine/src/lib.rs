//! Pods and containers: their life, from the request that CRI has validated to the last object that is gone.
//!
//! ```text
//!   cri/  ──►  Pods  ──►  steps (pod up, pod down)      container (create, start, stop, remove)     exec
//!               │              │                             │
//!               │            state (pure)    record (durable)    link (the monitor)
//!               └── recover: the same steps, after a crash or a reboot
//! ```
//!
//! One owner: a pod's or container's state is changed by the task that holds its `operation` lock; lists and status
//! read the published value and never wait. No lock spans two pods. Knows no gRPC, no CRI types, no CNI JSON, and of NRI only
//! what [`lifecycle`] says: who builds the engine hands in who follows the life of its pods.
#![forbid(unsafe_code)]

mod again;
mod attachment;
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
pub mod record;
mod recover;
mod scope;
pub mod signal;
pub mod spec;
pub mod state;
mod steps;
pub mod streams;
mod table;
mod unknown;
mod unlisted;

pub use container::{OPEN_FILES_HARD, OPEN_FILES_SOFT, Resolved, compile_filter};
pub use node::{Host, Kernel, Monitors, Node, Placement, PodNetworks};
pub use table::{Container, Pod, Pods};
