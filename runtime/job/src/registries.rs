//! Where workers learn which endpoints serve a registry and how long they wait for them, and what they say of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The node's registries: files that workers read anew for each job, and how patient they are. No file need exist.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registries {
    /// k3s' `registries.yaml`.
    pub config: PathBuf,
    /// containerd's `HOST/hosts.toml`.
    pub certs_dir: PathBuf,
    /// Docker's `config.json`, for credentials.
    pub docker_config: Option<PathBuf>,
    /// How long to wait for what.
    pub patience: Patience,
}

/// How long a registry is waited for. There is no limit in all: a slow link gets on for as long as it gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patience {
    /// For a TCP connection.
    pub connect_ms: u64,
    /// For TLS on it.
    pub tls_ms: u64,
    /// From a request to the head of its answer.
    pub first_byte_ms: u64,
    /// A body that brings fewer bytes a second, over `rate_window_ms`, is given up.
    pub rate_bytes_min: u64,
    /// See `rate_bytes_min`; it is also the longest silence.
    pub rate_window_ms: u64,
    /// Layers of one image that are downloaded at once.
    pub connections: u32,
}

impl Default for Patience {
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

/// Say which endpoints a reference would be asked of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExplainJob {
    /// The store: `--root`.
    pub root: PathBuf,
    /// As in a pull.
    pub registry: String,
    /// As in a pull.
    pub repository: String,
    /// The node's registries.
    pub registries: Registries,
}

/// What is known of one endpoint. Words only, and no secret in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedEndpoint {
    /// With scheme, prefix and repository.
    pub url: String,
    /// What it is asked for and where that stands: a file and a line, or the reference itself.
    pub source: String,
    /// Which kind of credentials it gets and from where; or none.
    pub credentials: String,
    /// How TLS is done; or that it is not.
    pub tls: String,
    /// The proxy in between; empty where there is none.
    pub proxy: String,
}

/// How far a pull or an import is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Compressed bytes that are on disk.
    pub bytes_done: u64,
    /// Compressed bytes in all; 0: not known yet.
    pub bytes_total: u64,
    /// Of `bytes_done`, what came over the network in this job.
    pub bytes_fetched: u64,
    /// Layers that are unpacked.
    pub layers_done: u32,
    /// Layers of the image; 0: not known yet.
    pub layers_total: u32,
}
