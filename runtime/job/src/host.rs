//! Operations on host paths whose file system may not respond, for example a network file system.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One operation on a host path. The worker may block in the kernel forever; the daemon then abandons it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostQuestion {
    /// Resolves the source of a bind mount.
    Source {
        /// Path of the source.
        path: PathBuf,
        /// Whether to create a missing path as a directory (mode 0755), with its parents.
        is_made: bool,
    },
    /// Lists the devices of a path: the device itself, or all devices in the directory.
    Devices {
        /// Path of a device or a directory.
        path: PathBuf,
        /// Path at which the devices appear in the container.
        container: String,
    },
    /// Reads a regular file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Maximum size in bytes.
        bytes_max: u64,
    },
    /// Opens a log file for appending; creates it and its directory if missing. The worker sends the
    /// descriptor over its standard input, which is a socket for this job.
    Log {
        /// Path of the log file.
        path: PathBuf,
        /// The pod's directory of logs: from it on no part of the path may be a link.
        pod_directory: PathBuf,
    },
}

/// The answer to a [`HostQuestion`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostAnswer {
    /// The path with all symbolic links resolved.
    Source(PathBuf),
    /// The devices at the path.
    Devices(Vec<HostDevice>),
    /// Content of the requested file.
    File(Vec<u8>),
    /// The log file was opened, and its descriptor was sent.
    Log,
}

/// A device node on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevice {
    /// Path in the container.
    pub path: String,
    /// Whether the device is a block device; otherwise it is a character device.
    pub is_block: bool,
    /// Major number of the device.
    pub major: u32,
    /// Minor number of the device.
    pub minor: u32,
    /// Permission bits of the file mode.
    pub mode: u32,
}

impl HostQuestion {
    /// The host path of the operation.
    pub fn path(&self) -> &std::path::Path {
        match self {
            Self::Source { path, .. }
            | Self::Devices { path, .. }
            | Self::File { path, .. }
            | Self::Log { path, .. } => path,
        }
    }
}
