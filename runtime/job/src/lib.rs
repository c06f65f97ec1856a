//! Jobs and answers that daemon and workers exchange. Workers are short-lived processes for work that may
//! block on a network or a disk; the daemon never blocks.
//!
//! The daemon starts `coracle-worker` and writes one [`Job`] to its standard input, followed by end of file.
//! It reads [`Answer`]s from the worker's standard output until [`Answer::Done`] or [`Answer::Failed`];
//! standard error is the worker's log. Each message is a little-endian u32 length followed by that many bytes
//! of postcard. Credentials are passed only in this way, never in arguments, the environment or a file.
//! Daemon and worker are always of the same release, so the format needs no compatibility.
#![forbid(unsafe_code)]

mod additional;
mod cdi;
mod checked;
mod cni;
mod credentials;
mod hook;
mod host;
mod image;
mod message;
mod policy;
mod registries;
mod scope;
mod users;

pub use additional::{STORE_INDEX, STORE_INDEX_BYTES_MAX, StoreIndex};
pub use cdi::{ContainerEdits, DeviceNumbers, EditedDevice, EditedMount};
pub use cni::{Attachment, CNI_VERSIONS, CniCommand, CniJob, CniOutcome, Interface, PortMapping};
pub use credentials::{AuthFields, Credentials, Precedence};
pub use hook::{Hook, HookJob, Hooks};
pub use host::{HostAnswer, HostDevice, HostQuestion};
pub use image::{
    CheckJob, CheckLayerJob, CheckedLayer, CheckedParts, ContainerdImage, ExportJob, ExportedImage, Finding,
    FoundImage, ImageConfig, ImageRecord, ImportJob, ImportSource, Layer, Limits, ListContainerdJob, PullJob,
    Remake, Severity,
};
pub use message::{
    MESSAGE_BYTES_MAX, MessageError, decode, read_body, read_message, read_message_within, write_message,
};
pub use policy::{ImagePolicy, ImageVerifiers, JudgeJob, Judged};
pub use registries::{
    ExplainJob, ExplainedEndpoint, Neighbours, Progress, Registries, Serve, ServedImage, Timeouts,
};
pub use scope::{ScopeCommand, ScopeJob, ScopeProperty};
pub use users::{USERS_FILE_BYTES_MAX, USERS_RECORD, USERS_RECORD_BYTES_MAX, UsersFiles};

use serde::{Deserialize, Serialize};

/// File name of the worker's program: a symbolic link to that of the command line, which becomes a worker if it is started by
/// this name.
pub const WORKER: &str = "coracle-worker";

/// One job for a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Pulls an image into the store.
    Pull(PullJob),
    /// Imports an archive, or an image of a containerd, into the store.
    Import(ImportJob),
    /// Lists the images in the store of a containerd.
    ListContainerd(ListContainerdJob),
    /// Verifies all parts of an image in the store.
    Check(CheckJob),
    /// Exports images to an archive.
    Export(ExportJob),
    /// Lists the endpoints from which an image would be pulled.
    Explain(ExplainJob),
    /// Reads the policy of signatures and its keys.
    ReadPolicy {
        /// Path of the policy's file.
        path: std::path::PathBuf,
    },
    /// Judges images of the store by their signatures.
    Judge(JudgeJob),
    /// Lists the registry configuration files of the node that cannot be parsed.
    CheckRegistries {
        /// The store: the directory of `--root`.
        root: std::path::PathBuf,
        /// The node's registry configuration.
        registries: Registries,
    },
    /// Removes trees without references (writable layers of containers, image layers, blobs).
    RemoveTrees {
        /// Absolute paths of the trees; a missing one is not an error.
        paths: Vec<std::path::PathBuf>,
    },
    /// Executes the plugins of one CNI network for one pod.
    Cni(CniJob),
    /// Resolves CDI device names.
    Cdi {
        /// Device names `vendor/class=device`.
        names: Vec<String>,
        /// Directories of CDI specs; a later one has precedence, a missing one is ignored.
        directories: Vec<std::path::PathBuf>,
    },
    /// Moves network interfaces of the node into a network namespace.
    TakeNetDevices {
        /// Path of the network namespace.
        netns: std::path::PathBuf,
        /// For each interface its name on the node and its name in the namespace.
        devices: Vec<(String, String)>,
    },
    /// Removes a network interface from the node.
    RemoveLink {
        /// Name of the interface; a missing one is not an error.
        name: String,
    },
    /// Executes an OCI hook.
    Hook(HookJob),
    /// Makes a request to systemd about one scope unit.
    Scope(ScopeJob),
    /// Sets the SELinux label of a container's volumes.
    Relabel {
        /// Absolute paths of files and directories; directories are labelled recursively.
        paths: Vec<std::path::PathBuf>,
        /// The SELinux label.
        label: String,
    },
    /// Measures the disk usage of trees: writable layers.
    MeasureTrees {
        /// Absolute paths of the trees; the usage of a missing one is zero.
        paths: Vec<std::path::PathBuf>,
    },
    /// Accesses a host path whose file system may not respond.
    LookAtHost(HostQuestion),
    /// Verifies the layer whose check is longest ago.
    CheckLayer(CheckLayerJob),
}

impl Job {
    /// Whether the job executes programs of others: CNI plugins or an OCI hook. These start with the process attributes
    /// that the daemon was started with, as under libcni and runc.
    pub fn runs_programs(&self) -> bool {
        matches!(self, Self::Cni(_) | Self::Hook(_))
    }

    /// Whether the worker or a process that it starts executes programs of others, so that it gets the limit of open files that the
    /// daemon was started with.
    pub fn starts_programs(&self) -> bool {
        self.runs_programs() || matches!(self, Self::Pull(pull) if pull.verifiers.is_some())
    }
}

/// Disk usage of a tree of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeUsage {
    /// Allocated bytes; a file with several hard links counts once.
    pub bytes: u64,
    /// Number of inodes: files, directories, links and others.
    pub inodes: u64,
}

/// One message of a worker.
#[expect(clippy::large_enum_variant, reason = "one is alive at a time, in a stream of a few a second")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Progress of a pull or an import.
    Progress(Progress),
    /// Description of the external program for which the job now waits.
    Waiting(String),
    /// The job is complete; with its result.
    Done(Outcome),
    /// The job failed. Temporary data is kept only if a retry uses it (partly downloaded blobs).
    Failed(Failure),
}

/// Results, one variant per kind of job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// The image was pulled: blobs, layers and user files are in the store and synced. The daemon commits the
    /// record. With one line for each requirement of the policy that the image meets; none without a policy.
    Pulled(ImageRecord, Vec<String>),
    /// The images were imported.
    Imported {
        /// Records of the images, as in `Pulled`.
        images: Vec<ImageRecord>,
        /// Failures of the other images of the archive or store.
        refused: Vec<Failure>,
        /// Names of layers in the store that are links to damaged ones of the additional store: no image may use them any more.
        damaged: Vec<String>,
    },
    /// The images in the store of a containerd, ordered by name.
    ContainerdImages(Vec<ContainerdImage>),
    /// The findings of a check of an image.
    Checked {
        /// The defects that were found.
        findings: Vec<Finding>,
        /// Number of layers that could be read, but have neither a list nor a blob with which they could be compared.
        not_compared: u32,
    },
    /// The archive was written.
    Exported,
    /// The endpoints in the order in which they would be tried, and the rules of the policy for the image as text.
    Explained(Vec<ExplainedEndpoint>, Vec<String>),
    /// The policy with its keys for [`ImagePolicy::bytes`], and the parts of it that are not supported, as text.
    PolicyRead(Vec<u8>, Vec<String>),
    /// The judgements of all names.
    Judged(Vec<Judged>),
    /// One message per file that cannot be parsed.
    RegistriesChecked(Vec<String>),
    /// The trees or the network interface were removed.
    Removed,
    /// The labels were set.
    Relabelled,
    /// The network interfaces were moved.
    Moved,
    /// The hook succeeded.
    Hooked,
    /// systemd completed the request.
    Scoped,
    /// The result of the CNI plugins.
    Cni(CniOutcome),
    /// The container edits of the devices.
    Cdi(ContainerEdits),
    /// The usage of each tree, in the order of the paths.
    Measured(Vec<TreeUsage>),
    /// The result of the operation on a host path.
    Looked(HostAnswer),
    /// The result of a [`CheckLayerJob`].
    LayerChecked(CheckedLayer),
}

/// The failure of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure, from which the daemon derives the gRPC code.
    pub kind: FailureKind,
    /// Human-readable text: the failed operation, its object and the cause. Contains no credentials and no
    /// query strings.
    pub message: String,
}

impl Failure {
    /// Creates a failure with this kind and message.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Creates the failure for input that is malformed or fails verification.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Invalid, message)
    }

    /// The failure with a description of the operation in front of its text.
    pub fn during(self, operation: &str) -> Self {
        Self { message: format!("{operation}: {}", self.message), ..self }
    }
}

/// Kinds of failures that clients distinguish (CRI 1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// No endpoint could be reached, or all answered 5xx or 429.
    Unavailable,
    /// The registry answered 401 or 403.
    Denied,
    /// The registry answered 404, the manifest is unknown, or no manifest matches the platform.
    NotFound,
    /// Received data fails verification, is malformed or malicious, or exceeds a limit.
    Invalid,
    /// The disk is full or the quota is exceeded (ENOSPC, EDQUOT).
    NoSpace,
    /// A CNI plugin failed; the text contains its type and message.
    Plugin,
    /// Any other failure.
    Internal,
    /// The registry answered 429, because a limit on requests was exceeded.
    RateLimited,
    /// The server's certificate is not trusted, not valid now, or for another name.
    Certificate,
    /// The name of a host has no address.
    NameResolution,
    /// The image has not the signatures that the policy of the node requires.
    Signature,
}
