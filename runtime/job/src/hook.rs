//! OCI hooks: programs that run at points of a container's lifecycle (OCI runtime specification,
//! "POSIX-platform Hooks").

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One OCI hook.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Absolute path of the program.
    pub path: String,
    /// Arguments including `argv[0]`; if empty, the path is `argv[0]`.
    pub arguments: Vec<String>,
    /// The complete environment, each entry `NAME=value`.
    pub environment: Vec<String>,
    /// Time limit in seconds; 0: the runtime's default.
    pub timeout_s: u32,
}

/// The hooks of a container by lifecycle point; hooks of one point run in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// Hooks `prestart`: a deprecated point, run before `create_runtime` at the same point.
    pub prestart: Vec<Hook>,
    /// Hooks `createRuntime`: run after the mounts were made and before pivot_root, in the runtime's namespaces.
    pub create_runtime: Vec<Hook>,
    /// Hooks `createContainer`: run at the same point as `create_runtime`, but in the container's namespaces.
    pub create_container: Vec<Hook>,
    /// Hooks `startContainer`: run before the container's program is executed, in the container's namespaces
    /// and root file system.
    pub start_container: Vec<Hook>,
    /// Hooks `poststart`: run after the container's program was started, in the runtime's namespaces.
    pub poststart: Vec<Hook>,
    /// Hooks `poststop`: run after the container's process ended, in the runtime's namespaces.
    pub poststop: Vec<Hook>,
}

impl Hooks {
    /// Whether there are no hooks.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether any hook runs before pivot_root.
    pub fn has_before_root(&self) -> bool {
        !(self.prestart.is_empty() && self.create_runtime.is_empty() && self.create_container.is_empty())
    }

    /// Appends the hooks of `more` to each lifecycle point.
    pub fn extend(&mut self, more: Self) {
        self.prestart.extend(more.prestart);
        self.create_runtime.extend(more.create_runtime);
        self.create_container.extend(more.create_container);
        self.start_container.extend(more.start_container);
        self.poststart.extend(more.poststart);
        self.poststop.extend(more.poststop);
    }
}

/// Job: executes one OCI hook.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HookJob {
    /// The hook to execute.
    pub hook: Hook,
    /// The container's state as JSON (OCI runtime specification, "State"), for the hook's standard input.
    pub state: String,
    /// PID of the process whose namespaces the hook enters; 0: the hook runs in the runtime's namespaces.
    pub inside: i32,
    /// Working directory, a path in the mount namespace of the hook.
    pub directory: PathBuf,
    /// Time limit in milliseconds.
    pub limit_ms: u64,
}
