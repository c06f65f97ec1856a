//! CNI by exec of plugins (CNI spec 1.1.0; CRI 5). The worker runs them, because they may hang, fork,
//! and print anything; the daemon keeps the configuration and the result in the pod's record.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Versions of the CNI specification that we speak, oldest first: a version's age is its place here. A list or a
/// result of another version is refused.
pub const CNI_VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Run the list once for one pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CniJob {
    /// What to do.
    pub command: CniCommand,
    /// The network configuration list, as JSON text, made flat by the daemon: `cniVersion` (one of [`CNI_VERSIONS`]),
    /// `name` and `plugins` with everything inlined, `.conf` files already wrapped.
    pub conflist: String,
    /// Where plugin binaries are, in order.
    pub bin_dirs: Vec<PathBuf>,
    /// The pod.
    pub attachment: Attachment,
    /// For the whole list; the DEL after a failed ADD has as much again. A plugin that runs longer is killed with its
    /// process group.
    pub timeout_ms: u64,
}

/// Commands of the CNI specification that we call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CniCommand {
    /// All plugins in order; on an error DEL of the whole list, and the first error is the answer.
    Add {
        /// What plugins came to that are not in this list but before it, as JSON text.
        previous_result: Option<String>,
    },
    /// All plugins in reverse order.
    Del {
        /// Final result of ADD as JSON text, if it is known.
        previous_result: Option<String>,
    },
    /// Ask each plugin whether it is ready (spec 1.1.0 lists only).
    Status,
}

/// One pod on one network. Unlike the rest of a job it also lives in the pod's record, across releases: fields are only
/// added, and one that a record lacks has its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attachment {
    /// CNI_CONTAINERID: the sandbox's id.
    pub container_id: String,
    /// CNI_NETNS: path of the namespace; empty when it is gone (DEL).
    pub netns: String,
    /// CNI_IFNAME: `eth0`.
    pub interface: String,
    /// CNI_ARGS, in order.
    pub arguments: Vec<(String, String)>,
    /// Capability `portMappings`; only those with a host port.
    pub port_mappings: Vec<PortMapping>,
    /// Capability `dns`, `bandwidth`, … : name and JSON text, sent to plugins that declare them.
    pub capabilities: Vec<(String, String)>,
}

/// One published port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// Port of the node.
    pub host_port: u16,
    /// Port in the pod.
    pub container_port: u16,
    /// `tcp`, `udp`, `sctp`.
    pub protocol: String,
    /// Empty: all addresses.
    pub host_ip: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniOutcome {
    /// Addresses of the pod's interface, without prefix length, primary (first IPv4) first. ADD only.
    pub addresses: Vec<String>,
    /// The final result, as JSON text. ADD only.
    pub result: String,
    /// Interfaces of the result.
    pub interfaces: Vec<Interface>,
}

/// One interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Hardware address.
    pub mac: String,
    /// Namespace path; empty: the host's.
    pub sandbox: String,
}
