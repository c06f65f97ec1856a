//! Jobs that pull, import, check and export images, and the resulting image record.
//!
//! Layout below `--root`. Each entry is written under a temporary name, synced and renamed, so it is either
//! complete or absent:
//!
//! | path | content |
//! |---|---|
//! | `images/blobs/sha256/HEX` | manifests, configs, and (with `keep_blobs`) compressed layers |
//! | `images/parts/HEX` | partly downloaded blobs, for the next attempt |
//! | `images/parts/HEX.KEY` | the ranges of a blob that the node does not have; KEY depends on the ranges |
//! | `images/contents/NAME` | index of layer NAME: digests of its files' chunks; its outline if the node serves neighbours, took it from one, or its blob is in eStargz. A hint, which may be damaged, missing or left over |
//! | `images/lists/NAME` | list of the files of layer NAME with checksums (`coracle-filelist`), written when the layer is unpacked |
//! | `images/damage/NAME` | text about damage of layer NAME that a check found, until it is repaired |
//! | `images/checked` | the layer that was checked last in the background, and when |
//! | `images/users/HEX/record` | /etc/passwd and /etc/group of image HEX, with a checksum ([`crate::UsersFiles`]) |
//! | `images/signatures/HEX` | the signatures by which image HEX was accepted; written if a policy requires some |
//! | `images/records/HEX` | the record of image HEX (its config digest), written by the daemon; the image exists if its record exists |
//! | `images/index` | in an additional store only: the records of its images ([`crate::StoreIndex`]) |
//! | `layers/NAME/` | an unpacked layer in the format of overlayfs; NAME is [`Layer::name`]. A link if the layer is that of an additional store |
//! | `layers/l/SHORT` | a link to `../NAME` for mount options, created by the daemon |
//! | `layers/tmp-*` | layers that are being unpacked; those that exist at the start of the daemon are garbage |
//! | `replaced/N/` | a damaged layer that was replaced while containers used it, and their IDs |

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Credentials, ImagePolicy, Registries};

/// Job: pulls one image reference for this platform.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PullJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// Registry host of the normalised reference, with the port if there is one, for example `docker.io` or
    /// `localhost:5000`.
    pub registry: String,
    /// Repository path, for example `library/busybox`.
    pub repository: String,
    /// Tag; empty for a reference by digest.
    pub tag: String,
    /// Digest `sha256:…`; empty for a reference by tag.
    pub digest: String,
    /// The node's registry configuration.
    pub registries: Registries,
    /// Credentials of the client's request; they apply to the registry itself, not to its mirrors.
    pub credentials: Credentials,
    /// Limits on the image's size and number of parts.
    pub limits: Limits,
    /// Whether to keep the compressed layers in addition to the unpacked ones.
    pub keep_blobs: bool,
    /// Names of the layers of all images of the same repository, in which most of an update is found by its chunks or paths, those of the
    /// newest image first. `None`: blobs are downloaded whole.
    pub relatives: Option<Vec<String>>,
    /// The policy by which the image is judged before it is unpacked; `None`: it is not judged.
    pub policy: Option<ImagePolicy>,
    /// The programs that are asked, too; `None`: none.
    pub verifiers: Option<crate::ImageVerifiers>,
    /// Damaged layers that are made again; the image is then neither new nor changed. `None`: layers that are there are complete.
    pub remake: Option<Remake>,
}

/// Layers that are made again beside the damaged ones, with which the daemon exchanges them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remake {
    /// Names of the layers.
    pub layers: Vec<String>,
    /// The directory that gets them, by their names; it is created.
    pub into: PathBuf,
}

impl Remake {
    /// Whether a layer is one of these and was not made yet.
    pub fn lacks(&self, layer: &str) -> bool {
        self.layers.iter().any(|name| name == layer) && !self.into.join(layer).is_dir()
    }
}

/// Job: imports the images of an archive, or one image of a containerd.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImportJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// The archive or store from which the images are read.
    pub source: ImportSource,
    /// Limits on the images' size and number of parts.
    pub limits: Limits,
    /// Whether to keep the compressed layers in addition to the unpacked ones.
    pub keep_blobs: bool,
    /// Whether to run with background scheduling priority.
    pub is_background: bool,
    /// Whether the node passes its layers on to neighbours.
    pub serves_neighbours: bool,
    /// The policy by which the images are judged before they are unpacked; `None`: they are not judged.
    pub policy: Option<ImagePolicy>,
}

/// The source of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImportSource {
    /// Path of an archive (docker-archive or OCI layout; uncompressed, gzip or zstd), with any number of images.
    Archive(PathBuf),
    /// Directory of an additional store: its images are verified, and its layers used where they are.
    Additional(PathBuf),
    /// One image in the content store of a containerd.
    Containerd {
        /// containerd's root directory.
        store: PathBuf,
        /// Digest of the image's manifest or index.
        digest: String,
        /// Names of the image in containerd's metadata.
        names: Vec<String>,
    },
}

impl ImportSource {
    /// The file or directory from which the images are read.
    pub fn path(&self) -> &Path {
        match self {
            Self::Archive(path) | Self::Additional(path) | Self::Containerd { store: path, .. } => path,
        }
    }
}

/// Job: lists the images in the store of a containerd.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ListContainerdJob {
    /// containerd's root directory.
    pub store: PathBuf,
    /// Namespace of the images; that of the CRI is `k8s.io`.
    pub namespace: String,
}

/// An image in the store of a containerd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerdImage {
    /// Names in containerd's metadata; containerd's CRI gives an image its tags, its repo digests, and its ID.
    pub names: Vec<String>,
    /// Digest of the image's manifest or index.
    pub digest: String,
    /// Whether containerd's CRI pins the image.
    pub is_pinned: bool,
    /// The complete image for this node's platform, or the reason why it cannot be imported.
    pub found: Result<FoundImage, String>,
}

/// A complete image that has not been imported yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundImage {
    /// Image ID: digest `sha256:HEX` of the config blob.
    pub id: String,
    /// Compressed size in bytes of config, manifests and layers.
    pub size_bytes: u64,
}

/// Job: verifies all parts of an image in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// The record of the image.
    pub image: ImageRecord,
    /// Limits on the image's size and number of parts.
    pub limits: Limits,
    /// The parts to verify.
    pub parts: CheckedParts,
    /// Whether to repair damaged parts, and to remove other damaged blobs.
    pub repair: bool,
    /// The directory for layers that are made again, by their names; it is created if there is one.
    pub into: PathBuf,
}

/// The parts of an image that [`CheckJob`] verifies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckedParts {
    /// All parts.
    All,
    /// Only the layers of these names.
    Layers(Vec<String>),
    /// The copies of /etc/passwd and /etc/group, which are compared with those in the layers.
    Users,
}

impl CheckedParts {
    /// Whether the layer of this name is verified.
    pub fn have(&self, layer: &str) -> bool {
        match self {
            Self::All => true,
            Self::Layers(names) => names.iter().any(|name| name == layer),
            Self::Users => false,
        }
    }
}

/// Job: verifies the layer of the store whose check is longest ago, at a limited rate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckLayerJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// Name of the layer that was checked last, if it cannot be written into the store; may be empty.
    pub after: String,
    /// Time in seconds in which each layer of the store is checked once.
    pub interval_s: u64,
}

/// The result of a [`CheckLayerJob`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedLayer {
    /// Name of the layer; empty if none was due, or it was removed meanwhile.
    pub layer: String,
    /// The damage that was found.
    pub damage: Option<String>,
    /// Number of bytes that were read.
    pub bytes: u64,
    /// Time in seconds until the next layer is due.
    pub pause_s: u64,
}

/// Job: exports images to an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// Absolute path of the archive.
    pub output: PathBuf,
    /// The images to export.
    pub images: Vec<ExportedImage>,
}

/// One image to export.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportedImage {
    /// Names of the image in the archive.
    pub names: Vec<String>,
    /// The record of the image.
    pub image: ImageRecord,
}

/// One defect of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The damaged part and the defect.
    pub what: String,
    /// Name of the damaged layer, which then begins the text; empty for another part.
    pub layer: String,
    /// The meaning for the image.
    pub severity: Severity,
    /// Whether the part was repaired.
    pub is_repaired: bool,
}

/// The meaning of a [`Finding`] for its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Severity {
    /// The image cannot be used as it is.
    Damaged,
    /// The layer itself may be whole, or a new one is there that could not take its place: the image stays.
    MayBeWhole,
    /// The layer could not be checked, and nothing is known of it.
    NotChecked,
}

impl Finding {
    /// The defect without the name of the layer.
    pub fn damage(&self) -> &str {
        self.what.split_once(": ").map_or(&self.what, |(_, damage)| damage)
    }
}

/// Limits on the size and the number of parts of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Maximum unpacked size of one layer in bytes, with holes of sparse files; protects against
    /// decompression bombs.
    pub layer_bytes_max: u64,
    /// Maximum number of entries of one layer.
    pub layer_entries_max: u64,
    /// Maximum number of layers of an image (overlayfs supports 500 lower directories).
    pub layers_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { layer_bytes_max: 16 << 30, layer_entries_max: 4 << 20, layers_max: 256 }
    }
}

/// A complete image: the content of `images/records/HEX`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Image ID: digest `sha256:HEX` of the config blob (CRI 2.27).
    pub id: String,
    /// Tags as normalised `registry/path:tag`.
    pub tags: Vec<String>,
    /// Repo digests `registry/path@sha256:…` of pulled references (the digest of the index for a
    /// multi-platform image).
    pub digests: Vec<String>,
    /// Compressed size in bytes of config, manifests and layers; never 0.
    pub size_bytes: u64,
    /// Layers of the image, lowest first.
    pub layers: Vec<Layer>,
    /// Digests of the image's blobs: manifests, config, kept layers.
    pub blobs: Vec<String>,
    /// The part of the image config that containers need.
    pub config: ImageConfig,
}

impl ImageRecord {
    /// Adds the names and blobs of another record of the same image.
    pub fn add(&mut self, other: Self) {
        let new = other.tags.into_iter().filter(|tag| !self.tags.contains(tag));
        let new: Vec<String> = new.collect();
        self.tags.extend(new);
        for (known, more) in [(&mut self.digests, other.digests), (&mut self.blobs, other.blobs)] {
            let mut all = BTreeSet::new();
            all.extend(known.drain(..).chain(more));
            known.extend(all);
        }
    }
}

/// One unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Digest `sha256:…` of the uncompressed tar archive.
    pub diff_id: String,
    /// Chain ID of this layer and all layers below it (OCI image specification, "Layer ChainID").
    pub chain_id: String,
    /// Name of the layer's directory below `layers/`: the 64 hexadecimal digits of the chain ID. All digits
    /// are needed, because an existing layer is reused by every image with the same chain ID. In images of
    /// builds before 0.1.0 the name has only the first 32 digits.
    pub name: String,
}

impl Layer {
    /// Whether no layer is below this one.
    pub fn is_lowest(&self) -> bool {
        self.chain_id == self.diff_id
    }
}

/// The fields of the image config's `config` object that coracle uses (OCI image specification, "Image
/// Configuration").
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Member `User`, not parsed.
    pub user: String,
    /// Member `Env`: `NAME=value`.
    pub environment: Vec<String>,
    /// Member `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// Member `Cmd`.
    pub command: Vec<String>,
    /// Member `WorkingDir`.
    pub working_directory: String,
    /// Member `StopSignal`, not parsed.
    pub stop_signal: String,
    /// Member `Volumes`: container paths.
    pub volumes: Vec<String>,
    /// Member `Labels`, sorted.
    pub labels: Vec<(String, String)>,
}
