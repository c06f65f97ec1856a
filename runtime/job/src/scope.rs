//! Scopes of systemd (systemd.scope(5), org.freedesktop.systemd1(5)): the cgroups of containers on nodes
//! where systemd manages the cgroup tree. A worker makes the D-Bus calls, because systemd may take long to
//! answer and the daemon has no D-Bus client.

use serde::{Deserialize, Serialize};

/// One request about a scope unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeJob {
    /// Name of the unit: `coracle-ID.scope`.
    pub unit: String,
    /// The request for the unit.
    pub command: ScopeCommand,
    /// Unit properties (limits): name, value.
    pub properties: Vec<(String, ScopeProperty)>,
}

/// The request to systemd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScopeCommand {
    /// StartTransientUnit with an existing process. Completes when systemd has started the scope.
    Start {
        /// Name of the slice that contains the scope.
        slice: String,
        /// Description for `systemctl status`.
        description: String,
        /// PID of the process in the worker's PID namespace.
        pid: u32,
    },
    /// SetUnitProperties: changes limits.
    Set,
    /// StopUnit. A scope that systemd does not have is not an error.
    Stop,
}

/// The value of a unit property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScopeProperty {
    /// Value of D-Bus type `t`, a 64-bit number.
    Number(u64),
    /// Value of D-Bus type `s`, a string.
    Text(String),
    /// Value of D-Bus type `ay`, bytes.
    Mask(Vec<u8>),
}
