//! Programs that run at points of a container's life (OCI runtime specification, "POSIX-platform Hooks").

use serde::{Deserialize, Serialize};

/// One program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Absolute.
    pub path: String,
    /// argv, its name first; empty: the path.
    pub arguments: Vec<String>,
    /// `NAME=value` each; nothing else.
    pub environment: Vec<String>,
    /// Seconds; 0: the runtime's own limit.
    pub timeout_s: u32,
}

/// The hooks of a container, by the point at which they run, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// As `create_runtime`, before them: the older name.
    pub prestart: Vec<Hook>,
    /// Namespaces are made, the root is not entered; in the node's namespaces.
    pub create_runtime: Vec<Hook>,
    /// At the same point, in the container's namespaces, with the node's files.
    pub create_container: Vec<Hook>,
    /// Before the program, in the container's namespaces, with its files.
    pub start_container: Vec<Hook>,
    /// The program runs; in the node's namespaces.
    pub poststart: Vec<Hook>,
    /// The container is gone; in the node's namespaces.
    pub poststop: Vec<Hook>,
}

impl Hooks {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether any runs before the root is entered.
    pub fn has_before_root(&self) -> bool {
        !(self.prestart.is_empty() && self.create_runtime.is_empty() && self.create_container.is_empty())
    }

    /// Appends others.
    pub fn extend(&mut self, more: Self) {
        self.prestart.extend(more.prestart);
        self.create_runtime.extend(more.create_runtime);
        self.create_container.extend(more.create_container);
        self.start_container.extend(more.start_container);
        self.poststart.extend(more.poststart);
        self.poststop.extend(more.poststop);
    }
}

/// One hook to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HookJob {
    /// Which.
    pub hook: Hook,
    /// The container's state as JSON, for its stdin.
    pub state: String,
    /// The process whose namespaces it runs in; 0: the node's.
    pub inside: i32,
    /// Milliseconds.
    pub limit_ms: u64,
}
