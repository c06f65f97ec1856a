//! Scopes of systemd (systemd.scope(5), org.freedesktop.systemd1(5)): the cgroups of containers where systemd owns the
//! tree. The worker asks, because systemd is waited for, and D-Bus is none of the daemon's business.

use serde::{Deserialize, Serialize};

/// What to ask of systemd for one scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeJob {
    /// The unit: `coracle-ID.scope`.
    pub unit: String,
    /// Which.
    pub command: ScopeCommand,
    /// Its limits.
    pub properties: Vec<(String, ScopeProperty)>,
}

/// What to ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScopeCommand {
    /// Adopt a process with its cgroup: start the scope. Waits until systemd has.
    Start {
        /// The slice it is in.
        slice: String,
        /// For people: `systemctl status`.
        description: String,
        /// As the worker sees it.
        pid: u32,
    },
    /// Tell it other limits.
    Set,
    /// It is over. One that systemd does not know any more is success.
    Stop,
}

/// A value of a property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScopeProperty {
    /// `t`
    Number(u64),
    /// `s`
    Text(String),
    /// `ay`
    Mask(Vec<u8>),
}
