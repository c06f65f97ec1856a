//! The runtime side of the Node Resource Interface (NRI), module version v0.12: plugins get events about pods and
//! containers and can adjust containers before their creation.
//!
//! ```text
//!   Host ─► Dispatcher ─► Section: one event, plugin by plugin ─► Plugin ─► message (ttrpc) ─► mux ─► bytes
//!  (pods)       │             │
//!               │             └── adjust (merge, owners, conflicts) ─► validate
//!               └── join: register, configure, synchronize
//! ```
//!
//! This crate depends on byte streams and a clock that the runtime provides; it knows nothing about sockets, processes,
//! cgroups or the CRI. Changes of containers are NRI messages, which `Host` applies. It has one thread: a plugin is a
//! few tasks on the runtime's executor. Rules: NRI-S (pods), NRI-C (containers), NRI-R (robustness), each with a test,
//! here or in `tests/nri`, whose doc comment names it.
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

/// The NRI version that is sent to plugins; with an empty version their library would guess (NRI 2.4).
pub const NRI_VERSION: &str = "v0.12.2";

/// Bit mask of all events.
pub(crate) const EVENTS_ALL: i32 = 0x3fff;
