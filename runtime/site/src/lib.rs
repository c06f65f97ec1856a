//! The protocol by which the nodes of a site pass images to each other: the OCI distribution protocol, read-only, with fields and paths of
//! coracle's own, and the rules by which they choose each other. It reads the file with the key and the name of the node, writes
//! announcements of pulls, and writes to connections; it opens none.
//!
//! | request | answer |
//! |---|---|
//! | `HEAD /v2/NAME/blobs/DIGEST?ns=REGISTRY&layer=CHAIN-ID` | [`STATE`]: the node's share of the blob; [`OUTLINE`]: it has the layer unpacked; both with [`PROOF`] |
//! | `GET` of it | the blob, as it grows |
//! | `GET /v2/NAME/outlines/CHAIN-ID`, `GET /v2/NAME/archives/CHAIN-ID` | the outline and the uncompressed archive of a layer |
//! | `GET /v2/NAME/manifests/…?ns=REGISTRY` | a manifest or index, with [`PROOF`] |
//!
//! What is done with a request is a matter of the worker's modules `mirror` and `pull`.
#![forbid(unsafe_code)]

pub mod announcement;
mod key;
pub mod pace;
pub mod request;
pub mod share;
pub mod slots;
pub mod turn;

pub use key::{Nonces, Signed, SiteKey};
pub use request::digits;

/// Name of the field of a neighbour's answer that says how much of a blob it has, and the name of the node.
pub const STATE: &str = "Coracle-State";
/// Name of the field of a neighbour's answer that says that it has the layer unpacked: the length of its outline in bytes.
pub const OUTLINE: &str = "Coracle-Outline";
/// Name of the field of a neighbour's answer that proves that a node of the site has sent a document, or its share of a blob.
pub const PROOF: &str = "Coracle-Proof";

/// The text for which an answer with these values of [`STATE`] and [`OUTLINE`] vouches in place of a digest.
pub fn share_text(state: &str, outline: &str) -> String {
    format!("{state} {outline}")
}

/// Name of the scheme by which a node proves that it belongs to the site.
pub const SCHEME: &str = "Coracle";
