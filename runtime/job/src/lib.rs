//! What a worker is asked and what it answers: the wall between the daemon, which never waits for a network or a
//! disk, and the short-lived processes that do.
//!
//! The daemon starts `coracle-worker` with the job on its stdin (one [`Job`], then end of file) and reads
//! [`Answer`]s from its stdout until [`Answer::Done`] or [`Answer::Failed`]; stderr is the worker's log. Each message
//! is a little-endian u32 length and that many bytes of postcard. Credentials travel only here: never in arguments,
//! the environment, or a file. Daemon and worker are always of the same release, so this format may change freely.
#![forbid(unsafe_code)]

mod cdi;
mod cni;
mod credentials;
mod hook;
mod host;
mod image;
mod message;
mod registries;
mod scope;

pub use cdi::{ContainerEdits, EditedDevice, EditedMount};
pub use cni::{Attachment, CNI_VERSIONS, CniCommand, CniJob, CniOutcome, Interface, PortMapping};
pub use credentials::Credentials;
pub use hook::{Hook, HookJob, Hooks};
pub use host::{HostAnswer, HostDevice, HostQuestion};
pub use image::{
    CheckJob, ExportJob, ExportedImage, Finding, ImageConfig, ImageRecord, ImportJob, Layer, Limits, PullJob,
};
pub use message::{
    MESSAGE_BYTES_MAX, MessageError, read_body, read_message, read_message_within, write_message,
};
pub use registries::{ExplainJob, ExplainedEndpoint, Patience, Progress, Registries};
pub use scope::{ScopeCommand, ScopeJob, ScopeProperty};

use serde::{Deserialize, Serialize};

/// One piece of slow or risky work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Pull an image into the store.
    Pull(PullJob),
    /// Import an archive into the store.
    Import(ImportJob),
    /// Look at every part of an image in the store.
    Check(CheckJob),
    /// Write images into an archive.
    Export(ExportJob),
    /// Say where an image would be asked for.
    Explain(ExplainJob),
    /// Say which of the node's registries' files cannot be read as a whole.
    CheckRegistries {
        /// The store: `--root`.
        root: std::path::PathBuf,
        /// The files.
        registries: Registries,
    },
    /// Delete trees (container upper directories, layers, blobs) that nothing refers to any more.
    RemoveTrees {
        /// Absolute paths; a missing one is success.
        paths: Vec<std::path::PathBuf>,
    },
    /// Run the plugins of one CNI network for one pod.
    Cni(CniJob),
    /// Look devices up by their CDI names.
    Cdi {
        /// `vendor/class=device`
        names: Vec<String>,
        /// Where spec files are; a later one counts more, a missing one is empty.
        directories: Vec<std::path::PathBuf>,
    },
    /// Move network interfaces of the node into a network namespace.
    TakeNetDevices {
        /// The namespace's file.
        netns: std::path::PathBuf,
        /// Each one's name on the node, and its name there.
        devices: Vec<(String, String)>,
    },
    /// Remove a network interface of the node.
    RemoveLink {
        /// Its name; a missing one is success.
        name: String,
    },
    /// Run an OCI hook.
    Hook(HookJob),
    /// Ask systemd about one scope.
    Scope(ScopeJob),
    /// Give files an SELinux label: volumes of a container.
    Relabel {
        /// Absolute paths of files and directories, each with all below it.
        paths: Vec<std::path::PathBuf>,
        /// The label.
        label: String,
    },
    /// Measure what trees use of the disk: writable layers.
    MeasureTrees {
        /// Absolute paths; a missing one uses nothing.
        paths: Vec<std::path::PathBuf>,
    },
    /// Look at a path of the node that may not answer.
    LookAtHost(HostQuestion),
}

/// What a tree uses of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeUsage {
    /// Allocated; a file with several names counts once.
    pub bytes: u64,
    /// Files, directories, links and the rest.
    pub inodes: u64,
}

/// What a worker says.
#[expect(clippy::large_enum_variant, reason = "one is alive at a time, in a stream of a few a second")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// How far a pull or an import is.
    Progress(Progress),
    /// The job is done.
    Done(Outcome),
    /// It did not work; what was made aside stays only where a retry can use it (parts of blobs).
    Failed(Failure),
}

/// Results, one per kind of job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// Pulled: blobs, layers and users files are in the store and synced; the record is for the daemon to commit.
    Pulled(ImageRecord),
    /// Imported: as Pulled, for each image of the archive; and why others were not.
    Imported(Vec<ImageRecord>, Vec<Failure>),
    /// What is wrong with the image.
    Checked(Vec<Finding>),
    /// The archive is there.
    Exported,
    /// The endpoints, in the order they would be tried.
    Explained(Vec<ExplainedEndpoint>),
    /// One line for each broken file.
    RegistriesChecked(Vec<String>),
    /// Trees are gone, or the link.
    Removed,
    /// Files have their label.
    Relabelled,
    /// Network interfaces are where they shall be.
    Moved,
    /// The hook has ended well.
    Hooked,
    /// systemd has done it.
    Scoped,
    /// The plugins ran.
    Cni(CniOutcome),
    /// What the devices ask for.
    Cdi(ContainerEdits),
    /// One for each tree, in order.
    Measured(Vec<TreeUsage>),
    /// What is known of the path.
    Looked(HostAnswer),
}

/// Why a job failed, as far as the daemon's answer depends on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind.
    pub kind: FailureKind,
    /// For people: what was tried, on what, why. No credentials, no query strings.
    pub message: String,
}

/// Kinds of failure a client acts on (CRI 1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// No endpoint could be reached, or they answered 5xx or 429.
    Unavailable,
    /// 401 or 403.
    Denied,
    /// 404, unknown manifest, no platform match.
    NotFound,
    /// What came does not verify, is malformed, hostile, or over a limit.
    Invalid,
    /// ENOSPC or EDQUOT.
    NoSpace,
    /// A CNI plugin said no: its type and message are in the text.
    Plugin,
    /// Anything else.
    Internal,
}
