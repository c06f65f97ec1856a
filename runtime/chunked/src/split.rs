//! Reads tar-split data: the headers and the padding of an archive, with the files between them.

use std::io::{BufRead, BufReader, Read};

use data_encoding::BASE64;
use serde::Deserialize;

use crate::Problem;
use crate::toc::TABLE_BYTES_MAX;

/// Maximum length in bytes of an entry, which has a segment in base64: a PAX header of the maximum length.
const SEGMENT_BYTES_MAX: u64 = 2 << 20;

/// A part of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Bytes of the archive that are in no file: headers, padding.
    Bytes(Vec<u8>),
    /// The content of the next file, of this length in bytes, at least 1.
    File(u64),
}

/// Reads uncompressed tar-split data, part by part in the order of the archive: a line for each.
pub fn read(from: impl Read) -> impl Iterator<Item = Result<Piece, Problem>> {
    let mut from = BufReader::new(from.take(TABLE_BYTES_MAX));
    let mut line = Vec::new();
    std::iter::from_fn(move || {
        loop {
            line.clear();
            match from.by_ref().take(SEGMENT_BYTES_MAX).read_until(b'\n', &mut line) {
                Err(error) => return Some(Err(error.into())),
                Ok(0) => return None,
                Ok(_) if line.len() as u64 == SEGMENT_BYTES_MAX => {
                    return Some(Err(Problem::new("an entry is too long")));
                }
                Ok(_) => {}
            }
            let piece = serde_json::from_slice::<Entry>(&line).map_err(Problem::from).and_then(Entry::piece);
            if let Some(piece) = piece.transpose() {
                return Some(piece);
            }
        }
    })
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
/// `SegmentType` of tar-split's `storage.Type`.
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
