//! Reads tar-split data: the headers and the padding of an archive, with the files between them.

use std::io::{BufReader, Read};

use data_encoding::BASE64;
use serde::Deserialize;

use crate::Problem;
use crate::bounded::Bounded;
use crate::toc::TABLE_BYTES_MAX;

/// Maximum length in bytes of one segment in base64: a PAX header of the maximum length.
const SEGMENT_BYTES_MAX: usize = 2 << 20;

/// A part of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes: headers, padding.
    Bytes(Vec<u8>),
    /// The content of the next file, of this length in bytes, at least 1.
    File(u64),
}

/// Reads uncompressed tar-split data, part by part in the order of the archive.
pub fn read(from: impl Read) -> impl Iterator<Item = Result<Piece, Problem>> {
    let from = BufReader::new(Bounded::new(from, TABLE_BYTES_MAX, SEGMENT_BYTES_MAX));
    let entries = serde_json::Deserializer::from_reader(from).into_iter::<Entry>();
    entries.filter_map(|entry| entry.map_err(Problem::from).and_then(|entry| entry.piece()).transpose())
}

/// An entry of tar-split's `storage.Entry`; names and checksums are not used.
#[derive(Deserialize)]
struct Entry {
    r#type: u8,
    #[serde(default)]
    size: u64,
    payload: Option<String>,
}

/// `FileType` of tar-split's `storage.Type`.
const FILE: u8 = 1;
/// `SegmentType` of it.
const SEGMENT: u8 = 2;

impl Entry {
    /// The part; `None` of an entry without content.
    fn piece(self) -> Result<Option<Piece>, Problem> {
        match self.r#type {
            FILE => Ok((self.size > 0).then_some(Piece::File(self.size))),
            SEGMENT => {
                let bytes = BASE64.decode(self.payload.unwrap_or_default().as_bytes());
                bytes
                    .map(|bytes| Some(Piece::Bytes(bytes)))
                    .map_err(|_| Problem::new("a segment is not base64"))
            }
            other => Err(Problem::new(format!("an entry of type {other}"))),
        }
    }
}
