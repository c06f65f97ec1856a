//! Registry configuration for workers, timeouts, progress, and the explanation of endpoints.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The node's registry configuration: files that workers read for each job, and timeouts. All files are
/// optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registries {
    /// Path of k3s' `registries.yaml`.
    pub config: PathBuf,
    /// Directory with containerd's `HOST/hosts.toml` files.
    pub certs_dir: PathBuf,
    /// Path of Docker's `config.json` with credentials; `None`: not used.
    pub docker_config: Option<PathBuf>,
    /// Whether a registry that has mirrors in `config` is itself asked after them.
    pub has_default_endpoint: bool,
    /// Timeouts and connection limits.
    pub timeouts: Timeouts,
    /// Nodes of the site that are asked for content before a registry.
    pub neighbours: Neighbours,
}

/// The nodes of a site that pass content to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbours {
    /// `ADDRESS:PORT` of a node, or `dns:NAME:PORT`: all addresses of a name. This node may be among them. Empty: no node is
    /// asked.
    pub names: Vec<String>,
    /// Path of the file with the key that the site shares; `None`: the neighbours require none.
    pub key_file: Option<PathBuf>,
    /// Port on which this node itself serves its neighbours; `None`: it does not.
    pub port: Option<u16>,
    /// Whether manifests and configs, also those of tags, are requested from neighbours while their registry cannot be reached.
    pub have_documents: bool,
}

/// The settings of the process that serves neighbours, which the daemon sends to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serve {
    /// The daemon's root directory.
    pub root: PathBuf,
    /// Path of the file with the key that the site shares; `None`: every client is served.
    pub key_file: Option<PathBuf>,
    /// Maximum number of bytes per second; 0: no limit.
    pub rate: u32,
    /// The images whose manifests are served.
    pub images: Vec<ServedImage>,
}

/// An image whose manifests are served under its names only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedImage {
    /// The digests of its manifests or indexes, each `REGISTRY/NAME@DIGEST`.
    pub digests: Vec<String>,
    /// The tags that are answered, each `REGISTRY/NAME:TAG`.
    pub tags: Vec<String>,
}

/// Timeouts for registries. There is no limit on the total time: a download over a slow network continues
/// while data arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeouts {
    /// Time limit for a TCP connection, in milliseconds.
    pub connect_ms: u64,
    /// Time limit for the TLS handshake, in milliseconds.
    pub tls_ms: u64,
    /// Time limit from a request to the response header, in milliseconds.
    pub first_byte_ms: u64,
    /// Minimum rate of a response body in bytes per second, averaged over `rate_window_ms`; a slower transfer
    /// is aborted.
    pub rate_bytes_min: u64,
    /// Time window for `rate_bytes_min` in milliseconds; also the maximum time without any data.
    pub rate_window_ms: u64,
    /// Number of layers of one image that are downloaded concurrently.
    pub connections: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect_ms: 30_000,
            tls_ms: 30_000,
            first_byte_ms: 60_000,
            rate_bytes_min: 1024,
            rate_window_ms: 60_000,
            connections: 3,
        }
    }
}

/// Job: lists the endpoints from which a reference would be pulled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExplainJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// Registry host as in [`PullJob::registry`](crate::PullJob::registry).
    pub registry: String,
    /// Repository path as in [`PullJob::repository`](crate::PullJob::repository).
    pub repository: String,
    /// The normalised reference.
    pub reference: String,
    /// The node's registry configuration.
    pub registries: Registries,
    /// The policy of signatures; `None`: there is none.
    pub policy: Option<crate::ImagePolicy>,
    /// The programs that are asked, too; `None`: none.
    pub verifiers: Option<crate::ImageVerifiers>,
}

/// Human-readable description of one endpoint, without secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedEndpoint {
    /// URL with scheme, prefix and repository.
    pub url: String,
    /// The use of the endpoint and the source of the setting: a file and a line, or the reference itself.
    pub source: String,
    /// Kind and source of the credentials, or that there are none.
    pub credentials: String,
    /// TLS settings, or that TLS is not used.
    pub tls: String,
    /// URL of the proxy; empty for a direct connection.
    pub proxy: String,
}

/// Progress of a pull or an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of compressed bytes that are on disk.
    pub bytes_done: u64,
    /// Total number of compressed bytes; 0: not known yet.
    pub bytes_total: u64,
    /// The part of `bytes_done` that was downloaded by this job.
    pub bytes_fetched: u64,
    /// The part of `bytes_fetched` that came from neighbours.
    pub bytes_from_neighbours: u64,
    /// The part of `bytes_done` that was taken from other layers of the node.
    pub bytes_reused: u64,
    /// Number of unpacked layers.
    pub layers_done: u32,
    /// Number of layers of the image; 0: not known yet.
    pub layers_total: u32,
}
