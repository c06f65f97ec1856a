//! What the Container Device Interface adds to a container (CDI specification, "containerEdits").

use serde::{Deserialize, Serialize};

/// Edits of all devices of a container, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEdits {
    /// Name and value; they win over what the image and the request say.
    pub environment: Vec<(String, String)>,
    /// Nodes.
    pub devices: Vec<EditedDevice>,
    /// Files and directories of the host.
    pub mounts: Vec<EditedMount>,
    /// Further groups of the process.
    pub groups: Vec<u32>,
    /// Programs to run.
    pub hooks: crate::Hooks,
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedDevice {
    /// In the container.
    pub path: String,
    /// On the host.
    pub host_path: String,
    /// Some of `rwm`.
    pub permissions: String,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedMount {
    /// On the host.
    pub host_path: String,
    /// In the container.
    pub container_path: String,
    /// `ro`
    pub is_read_only: bool,
    /// Of `noexec`, `nosuid`, `nodev`.
    pub options: Vec<String>,
}
