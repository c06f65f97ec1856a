//! Jobs that execute CNI plugins (CNI spec 1.1.0; CRI 5). A worker executes the plugins, because they may
//! hang, fork and print any output; the daemon keeps the configuration and the result in the pod's record.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Supported versions of the CNI specification, oldest first: code compares versions by their index. A
/// configuration or a result of any other version is refused.
pub const CNI_VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// One run of the plugins of a network configuration for one pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CniJob {
    /// The CNI command.
    pub command: CniCommand,
    /// The network configuration list as JSON text, prepared by the daemon: `cniVersion` (one of
    /// [`CNI_VERSIONS`]), `name` and the complete `plugins`; a single `.conf` file is already wrapped into a
    /// list.
    pub conflist: String,
    /// Directories that are searched for plugin executables, in order.
    pub bin_dirs: Vec<PathBuf>,
    /// The pod and its interface.
    pub attachment: Attachment,
    /// Time limit for the whole list, in milliseconds. The DEL after a failed ADD has the same limit again. A
    /// plugin that exceeds it is killed with its process group.
    pub timeout_ms: u64,
}

/// The commands of the CNI specification that coracle uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CniCommand {
    /// ADD of all plugins in order. If one fails, DEL of the whole list follows and the job fails with the
    /// error of the ADD.
    Add {
        /// `prevResult` for the first plugin as JSON text: the result of built-in plugins that precede this
        /// list; `None` if there are none.
        previous_result: Option<String>,
    },
    /// DEL of all plugins in reverse order, until the first error.
    Del {
        /// The final result of ADD as JSON text; `None` if it is unknown.
        previous_result: Option<String>,
    },
    /// STATUS of all plugins (only lists of CNI 1.1.0).
    Status,
}

/// The attachment of a pod to a network. It is also part of the pod's record and therefore must stay readable
/// across releases: fields are only added, and a field that a record lacks has its default value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attachment {
    /// Value of CNI_CONTAINERID: the sandbox's ID.
    pub container_id: String,
    /// Value of CNI_NETNS: path of the network namespace; empty for a DEL after the namespace was removed.
    pub netns: String,
    /// Value of CNI_IFNAME, for example `eth0`.
    pub interface: String,
    /// Value of CNI_ARGS as pairs of name and value, in order.
    pub arguments: Vec<(String, String)>,
    /// Capability argument `portMappings`; only mappings with a host port.
    pub port_mappings: Vec<PortMapping>,
    /// Further capability arguments (`dns`, `bandwidth`, …) as name and JSON text. A plugin receives those
    /// that it declares.
    pub capabilities: Vec<(String, String)>,
}

/// One port mapping from the node to the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// Port on the node.
    pub host_port: u16,
    /// Port in the pod.
    pub container_port: u16,
    /// Protocol: `tcp`, `udp` or `sctp`.
    pub protocol: String,
    /// Address on the node; empty: all addresses.
    pub host_ip: String,
}

/// The result of a [`CniJob`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniOutcome {
    /// IP addresses of the pod's interface without prefix length, the primary one (the first IPv4 address)
    /// first. Empty except after ADD.
    pub addresses: Vec<String>,
    /// The final result of the last plugin as JSON text. Empty except after ADD.
    pub result: String,
    /// Interfaces of the final result.
    pub interfaces: Vec<Interface>,
}

/// One interface in a CNI result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Hardware address of the interface; may be empty.
    pub mac: String,
    /// Path of the interface's network namespace; empty: the host's.
    pub sandbox: String,
}
