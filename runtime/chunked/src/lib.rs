//! Which parts of a layer a node already has, so that a pull downloads only the others. The crate reads and computes; it opens
//! no file and makes no request.
//!
//! ```text
//! table of contents ─► toc, stargz ─► Contents ─┬─► Wanted ◄── index of each unpacked layer of the node
//!                                               └─► Plan: the byte ranges of the blob to download
//! tar-split data ─► split: headers and padding of the archive, between the files of Contents
//! outline of an unpacked layer ─► Contents, and headers and padding; stargz: headers of another layer
//! ```
//! | format | source |
//! |---|---|
//! | zstd:chunked: a layer of zstd frames, one for each chunk of a file, with a table of contents and tar-split data in skippable frames at its end | containers/storage 1.65, `pkg/chunked/internal/minimal/compression.go` and `pkg/chunked/compressor/compressor.go` |
//! | eStargz: a layer of gzip members, one for each chunk of a file, with a table of contents in the last but one ([`stargz`]) | stargz-snapshotter 0.19, its page `estargz.md` |
//! | tar-split: the bytes of an archive that are not the content of files | vbatts/tar-split 0.12, `tar/storage/entry.go` |
//! | chunks of a file: a rolling checksum over 64 bytes, and runs of zeros | containers/storage 1.65, `pkg/chunked/compressor/rollsum.go` |
//! | index and outline of a layer ([`index`], [`outline`]) | this crate |
//!
//! Tables and tar-split data come from the builder of an image and are not trusted: lengths are limited, and what is rebuilt with
//! them counts only if it has the digests of the manifest and of the image configuration.
#![forbid(unsafe_code)]

mod chunker;
mod contents;
mod elements;
mod extents;
mod headers;
pub mod index;
pub mod outline;
#[cfg(test)]
mod outline_tests;
mod room;
pub mod split;
pub mod stargz;
#[cfg(test)]
mod stargz_tests;
#[cfg(test)]
mod tests;
pub mod toc;
mod wanted;

use std::fmt;

pub use chunker::{Average, Chunker};
pub use contents::{Chunk, Contents, Digest, Division, File, MEMORY_BYTES_MAX};
pub use extents::{Extent, NEIGHBOUR_EXTENTS_MAX, Plan, REGISTRY_EXTENTS_MAX, saves};
pub use headers::Headers;
pub use room::{Room, Taken};
pub use wanted::{Place, Wanted};

/// The reason why a table, an index or tar-split data cannot be used, as text for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem(pub(crate) String);

impl Problem {
    fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Problem {}

impl From<std::io::Error> for Problem {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for Problem {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}
