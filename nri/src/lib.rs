//! The runtime side of the Node Resource Interface (NRI), module version v0.12: plugins that follow the life of pods and
//! containers, and change containers before they are created.
//!
//! ```text
//!   Host ─► Dispatcher ─► Section: one event, plugin by plugin ─► Plugin ─► message (ttrpc) ─► mux ─► bytes
//!  (pods)       │             │
//!               │             └── adjust (merge, owners, conflicts) ─► validate
//!               └── join: register, configure, synchronize
//! ```
//!
//! Knows NRI, bytes and a clock it is given; no sockets, processes, cgroups, CRI. What it wants done to a container it says
//! in NRI's own messages; `Host` does it. One thread: a plugin is a few tasks on the executor of the program around it.
//! Rules: NRI-S (pods), NRI-C (containers), NRI-R (robustness), each with a test named after it in `tests/nri`.
#![forbid(unsafe_code)]

mod adjust;
mod connection;
mod dispatch;
mod io;
mod join;
mod message;
mod mux;
mod plugin;
mod report;
mod required;
mod section;
mod semaphore;
mod settings;
mod synchronize;
mod validate;

pub use adjust::{apply_to, is_empty, overlay};
pub use dispatch::{Dispatcher, Failure};
pub use io::{Host, Level, Snapshot, Stream, Task, Verdict};
pub use join::{Launched, Peer, Running};
pub use report::{BUCKETS_US, EventReport, PluginReport};
pub use required::ANNOTATION as REQUIRED_ANNOTATION;
pub use section::{Created, Section, Updated};
pub use settings::{DefaultValidator, Duplicates, Settings};

/// NRI's messages, as generated from `proto/nri.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod api {
    include!(concat!(env!("OUT_DIR"), "/nri.pkg.api.v1alpha1.rs"));
}

/// The version of NRI that plugins are told; an empty one makes their library guess (NRI 2.4).
pub const NRI_VERSION: &str = "v0.12.2";

/// All events that may be subscribed to.
pub(crate) const EVENTS_ALL: i32 = 0x3fff;
