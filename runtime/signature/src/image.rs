//! The image to judge, and the signatures that were found for it.

use std::collections::BTreeMap;

use coracle_reference::Name;
use serde::{Deserialize, Serialize};

/// A manifest or an index.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    /// Digest `sha256:…` of the bytes, which the caller verified.
    pub digest: &'a str,
    /// The media type that the document or its registry states; empty: none.
    pub media_type: &'a str,
    /// Content in bytes, as it is stored.
    pub bytes: &'a [u8],
}

/// The image to judge.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// The name by which the image is judged; `None`: it has none.
    pub name: Option<&'a Name>,
    /// The document to which the name refers.
    pub top: Document<'a>,
    /// The manifest of this node's platform; equal to `top` if that is no index.
    pub member: Document<'a>,
}

/// A signature that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The digest for which the signature was found.
    pub digest: String,
    /// The place where it was found, as text for users.
    pub place: String,
    /// Whether the manifest is one of notation, whose envelopes have a media type that other programs use, too.
    pub is_of_notation: bool,
    /// Media type of the content.
    pub media_type: String,
    /// The annotations of the content's descriptor that are read ([`ANNOTATIONS`](super::ANNOTATIONS)).
    pub annotations: BTreeMap<String, String>,
    /// Content in bytes, as it is stored.
    pub content: Vec<u8>,
}
