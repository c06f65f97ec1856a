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
//! The runtime provides byte streams and a clock; the crate does not depend on sockets, processes, cgroups or the CRI.
//! Changes of containers are NRI messages, which `Host` applies. The crate runs in one thread: each plugin has a few
//! tasks on the runtime's executor. Rules: NRI-S (pods), NRI-C (containers), NRI-R (robustness). Each rule has a test
//! in this crate or in `tests/nri`, and the test's doc comment names the rule.
#![forbid(unsafe_code)]

mod adjust;
mod bound;
mod connection;
mod dispatch;
mod header;
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

/// NRI's messages, generated from `proto/nri.proto` (tests/protocols).
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod api {
    include!("../proto/nri.pkg.api.v1alpha1.rs");
}

/// The NRI version that is sent to plugins; if it is empty, their library guesses a version (NRI 2.4).
pub const NRI_VERSION: &str = "v0.12.2";

/// Bit mask of all events.
pub(crate) const EVENTS_ALL: i32 = 0x3fff;
