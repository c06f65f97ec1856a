//! Pulling and importing images, and the record of an image that comes out of it.
//!
//! Where things are, below `--root` (all written aside, synced and renamed, so each is whole or absent):
//!
//! | path | what |
//! |---|---|
//! | `images/blobs/sha256/HEX` | manifests, configs, and (with `keep_blobs`) compressed layers |
//! | `images/parts/HEX` | half-downloaded blobs, for the next try |
//! | `images/users/HEX/{passwd,group}` | /etc/passwd and /etc/group of image HEX, where it has them; at most 1 MiB each |
//! | `images/records/HEX` | the record of image HEX (its config digest): the daemon's, the image exists once it does |
//! | `layers/NAME/` | an unpacked layer, as overlayfs wants it; NAME is [`Layer::name`] |
//! | `layers/l/SHORT` | a link to `../NAME`, for mounts: the daemon's |
//! | `layers/tmp-*` | layers being unpacked; whatever is there at the start of the daemon is garbage |

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Credentials, Registries};

/// Pull one reference for this platform.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PullJob {
    /// The store: `--root`.
    pub root: PathBuf,
    /// Registry host of the normalised reference, with port if any: `docker.io`, `localhost:5000`.
    pub registry: String,
    /// Repository path: `library/busybox`.
    pub repository: String,
    /// Tag; empty where the digest decides.
    pub tag: String,
    /// `sha256:…`; empty for a tag.
    pub digest: String,
    /// The node's registries.
    pub registries: Registries,
    /// The client's, for the registry itself.
    pub credentials: Credentials,
    /// Bounds.
    pub limits: Limits,
    /// Keep the compressed layers beside the unpacked ones.
    pub keep_blobs: bool,
}

/// Import an archive (docker-archive or OCI layout; plain, gzip or zstd).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImportJob {
    /// The store: `--root`.
    pub root: PathBuf,
    /// The archive.
    pub archive: PathBuf,
    /// Bounds.
    pub limits: Limits,
    /// Keep the compressed layers beside the unpacked ones.
    pub keep_blobs: bool,
    /// Give way to everything else on the node.
    pub is_background: bool,
}

/// Look at every part of an image in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckJob {
    /// The store: `--root`.
    pub root: PathBuf,
    /// As it is recorded.
    pub image: ImageRecord,
    /// Bounds.
    pub limits: Limits,
    /// Mend what can be mended, and put the rest of what is broken out of the way.
    pub repair: bool,
    /// Names of layers that containers use.
    pub in_use: Vec<String>,
}

/// Write images into an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportJob {
    /// The store: `--root`.
    pub root: PathBuf,
    /// The archive: an absolute path.
    pub output: PathBuf,
    /// What goes into it.
    pub images: Vec<ExportedImage>,
}

/// One image of an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportedImage {
    /// What it is called there.
    pub names: Vec<String>,
    /// As it is recorded.
    pub image: ImageRecord,
}

/// What is wrong with an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which part, and what.
    pub what: String,
    /// It is right now.
    pub is_mended: bool,
}

/// Bounds on what an image may make us do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Unpacked bytes of one layer, sparse or not: stops a gzip bomb and a huge sparse file.
    pub layer_bytes_max: u64,
    /// Entries of one layer.
    pub layer_entries_max: u64,
    /// Layers of an image (overlayfs takes 500 below one mount).
    pub layers_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { layer_bytes_max: 16 << 30, layer_entries_max: 4 << 20, layers_max: 256 }
    }
}

/// An image, whole: what is committed to `images/records/HEX`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// `sha256:HEX` of the config blob (CRI 2.27).
    pub id: String,
    /// Normalised `registry/path:tag`.
    pub tags: Vec<String>,
    /// `registry/path@sha256:…` of what was pulled (an index's digest for a multi-platform name).
    pub digests: Vec<String>,
    /// Compressed bytes of config, manifests and layers; never 0.
    pub size_bytes: u64,
    /// Lowest first.
    pub layers: Vec<Layer>,
    /// Blobs (digests) that belong to it: manifests, config, kept layers.
    pub blobs: Vec<String>,
    /// What a container needs of the config.
    pub config: ImageConfig,
}

/// One unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// `sha256:…` over the uncompressed tar.
    pub diff_id: String,
    /// Chain ID (OCI image spec, "Layer ChainID") of it and everything below.
    pub chain_id: String,
    /// Directory below `layers/`: the 64 hex digits of the chain ID. All of them, because a layer that is there is used for
    /// every image that names it. Images of builds before 0.1.0 have the first 32 digits.
    pub name: String,
}

/// The image config's `config` object, as far as it matters to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// `User`, as it stands.
    pub user: String,
    /// `Env`.
    pub environment: Vec<String>,
    /// `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// `Cmd`.
    pub command: Vec<String>,
    /// `WorkingDir`.
    pub working_directory: String,
    /// `StopSignal`, as it stands.
    pub stop_signal: String,
    /// `Volumes`: container paths.
    pub volumes: Vec<String>,
    /// `Labels`, sorted.
    pub labels: Vec<(String, String)>,
}
