//! What is to be found out about a path of the node that may not answer.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One question; the worker may wait for its answer for ever, and is given up then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostQuestion {
    /// Where the source of a mount is.
    Source {
        /// The path.
        path: PathBuf,
        /// Make a directory (0755) with its parents where there is nothing.
        is_made: bool,
    },
    /// Which devices a path stands for.
    Devices {
        /// The path.
        path: PathBuf,
        /// Where they are to appear in a container.
        container: String,
    },
    /// What is in a regular file.
    File {
        /// The path.
        path: PathBuf,
        /// Longest.
        bytes_max: u64,
    },
    /// Open a log for appending, made with its directory where it is missing. The descriptor comes over the worker's stdin,
    /// which is a socket for this job.
    Log {
        /// The path.
        path: PathBuf,
    },
}

/// Its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostAnswer {
    /// The path without links.
    Source(PathBuf),
    /// The devices.
    Devices(Vec<HostDevice>),
    /// The file.
    File(Vec<u8>),
    /// The descriptor has been sent.
    Log,
}

/// A device node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevice {
    /// In the container.
    pub path: String,
    /// A block device, not a character device.
    pub is_block: bool,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
}

impl HostQuestion {
    /// The path that it is about.
    pub fn path(&self) -> &std::path::Path {
        match self {
            Self::Source { path, .. }
            | Self::Devices { path, .. }
            | Self::File { path, .. }
            | Self::Log { path } => path,
        }
    }
}
