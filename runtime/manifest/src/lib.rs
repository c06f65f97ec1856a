//! Documents of images: manifests, indexes and configs of OCI and Docker. Registries, archives and content stores have the same ones, so that
//! pulls, imports, checks and policies read them here only. The crate reads no file and makes no request: its callers read documents,
//! verify their digests and limit their length ([`DOCUMENT_BYTES_MAX`]).
//!
//! | module | does |
//! |---|---|
//! | `manifest` | parses manifests and indexes |
//! | [`config`] | parses the config of an image |
//! | `platform` | says which platforms this node supports |
//! | `resolve` | follows a document to the image of this node's platform |
//! | `digest` | digests as text |
#![forbid(unsafe_code)]

pub mod config;
mod digest;
mod manifest;
mod platform;
mod resolve;

pub use digest::{digest_of, digest_text, hex};
pub use manifest::{
    CONFIG, Descriptor, Document, INDEX_TYPE, MANIFEST, accept, foreign_image, no_match, parse,
};
pub use platform::ARCHITECTURE;
pub use resolve::{Kind, ReadDocument, Resolution, Resolved, foreign, resolve};

/// Maximum length in bytes of a manifest, index or config: the limit of registries.
pub const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
