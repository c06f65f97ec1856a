//! Container edits of the Container Device Interface (CDI specification, "containerEdits").

use serde::{Deserialize, Serialize};

/// The merged edits of all CDI devices of a container, in the order of the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEdits {
    /// Environment variables as name and value. They override the variables of the image and of the request.
    pub environment: Vec<(String, String)>,
    /// Device nodes to create.
    pub devices: Vec<EditedDevice>,
    /// Bind mounts of files and directories of the host.
    pub mounts: Vec<EditedMount>,
    /// Supplementary group IDs of the container's process.
    pub groups: Vec<u32>,
    /// OCI hooks to run.
    pub hooks: crate::Hooks,
}

/// A device node to create in the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedDevice {
    /// Path in the container.
    pub path: String,
    /// Path on the host.
    pub host_path: String,
    /// Permissions of the device cgroup: any of `r`, `w` and `m`.
    pub permissions: String,
}

/// A bind mount to add to the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedMount {
    /// Source path on the host.
    pub host_path: String,
    /// Target path in the container.
    pub container_path: String,
    /// Whether the mount is read-only (option `ro`).
    pub is_read_only: bool,
    /// Additional mount options: any of `noexec`, `nosuid` and `nodev`.
    pub options: Vec<String>,
}
