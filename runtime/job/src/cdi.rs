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
    /// Kind and numbers, if the spec file has them. The device then does not need a node on the host.
    pub numbers: Option<DeviceNumbers>,
    /// Permission bits of the node; `None`: those of the node on the host.
    pub mode: Option<u32>,
    /// User ID of the node's owner in the container; `None`: that of the container's process.
    pub uid: Option<u32>,
    /// Group ID of the node's owner in the container; `None`: that of the container's process.
    pub gid: Option<u32>,
}

/// Kind and numbers of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNumbers {
    /// Whether the device is a block device; otherwise it is a character device.
    pub is_block: bool,
    /// Major number of the device.
    pub major: u32,
    /// Minor number of the device.
    pub minor: u32,
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
