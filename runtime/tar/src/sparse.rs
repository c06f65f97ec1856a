//! The maps of sparse files (GNU tar manual, "Sparse Formats"): which parts of a file are stored.
//!
//! | format | map |
//! |---|---|
//! | old GNU, type `S` | four pairs in the header, and 21 in each block that follows it |
//! | PAX 0.0 | records `GNU.sparse.offset` and `GNU.sparse.numbytes`, which [`crate::pax`] joins to that of 0.1 |
//! | PAX 0.1 | record `GNU.sparse.map`: numbers with commas; `GNU.sparse.numblocks`: the number of pairs |
//! | PAX 1.0 | lines with decimal numbers at the begin of the body, in whole blocks: the number of pairs, then the pairs |

use crate::header::{Block, number};
use crate::pax::{Records, SPARSE, SPARSE_MAP, integer};
use crate::{MAP_BYTES_MAX, Piece, Problem};

const INVALID: Problem = Problem("the map of a sparse file is malformed");
const TOO_LONG: Problem = Problem("the map of a sparse file is too long");
/// The suffixes of the known keys `GNU.sparse.*`.
const KEYS: [&[u8]; 7] = [b"major", b"minor", b"name", b"size", b"realsize", b"numblocks", b"map"];

/// Offset and length, which are not checked yet.
pub(crate) type Pairs = Vec<(i64, i64)>;

/// The map of a sparse file in PAX records.
pub(crate) enum Map {
    /// The map is in extended records.
    Records(Pairs),
    /// The map is at the beginning of the body.
    Body,
}

/// The value of a record `GNU.sparse.KEY`, if it is not empty.
pub(crate) fn value<'a>(records: &'a Records, key: &str) -> Option<&'a [u8]> {
    let found = records.get(&[SPARSE, key.as_bytes()].concat());
    found.map(Vec::as_slice).filter(|value| !value.is_empty())
}

/// The map of an entry with these records; `None` if it is not sparse.
pub(crate) fn of_records(records: &Records) -> Result<Option<Map>, Problem> {
    let mut present = records.iter().filter(|(key, value)| key.starts_with(SPARSE) && !value.is_empty());
    if present.clone().next().is_none() {
        return Ok(None);
    }
    if present.any(|(key, _)| !KEYS.contains(&&key[SPARSE.len()..])) {
        return Err(Problem("an unknown record of a sparse file"));
    }
    match (value(records, "major"), value(records, "minor")) {
        (Some(b"1"), Some(b"0")) => Ok(Some(Map::Body)),
        (Some(b"0"), Some(b"0" | b"1")) => pairs_of(records).map(|pairs| Some(Map::Records(pairs))),
        (None, None) if records.get(SPARSE_MAP).is_some_and(|map| !map.is_empty()) => {
            pairs_of(records).map(|pairs| Some(Map::Records(pairs)))
        }
        (None, None) => Err(Problem("a sparse file without a map")),
        _ => Err(Problem("a sparse file of an unknown version")),
    }
}

/// The pairs of version 0.1.
fn pairs_of(records: &Records) -> Result<Pairs, Problem> {
    let stated = value(records, "numblocks").and_then(integer).ok_or(INVALID)?;
    let map = records.get(SPARSE_MAP).map(Vec::as_slice).unwrap_or_default();
    let mut numbers = map.split(|byte| *byte == b',').map(|text| integer(text).ok_or(INVALID));
    let mut pairs = Pairs::new();
    if !map.is_empty() {
        while let Some(offset) = numbers.next() {
            pairs.push((offset?, numbers.next().ok_or(INVALID)??));
        }
    }
    match i64::try_from(pairs.len()) == Ok(stated) {
        true => Ok(pairs),
        false => Err(INVALID),
    }
}

/// Adds the pairs of old GNU tar in a field of a header or the block after it; returns whether a further block follows.
pub(crate) fn add_old(pairs: &mut Pairs, field: &[u8], blocks: usize) -> Result<bool, Problem> {
    let (entries, is_extended) = (field.len() / 24, field[field.len() / 24 * 24] > 0);
    for entry in field.chunks_exact(24).take(entries) {
        if entry[0] == 0 {
            break;
        }
        pairs.push((number(&entry[..12])?, number(&entry[12..])?));
    }
    match is_extended && blocks * size_of::<Block>() >= MAP_BYTES_MAX {
        true => Err(TOO_LONG),
        false => Ok(is_extended),
    }
}

/// The text of a map of version 1.0 while it is read.
#[derive(Debug, Default)]
pub(crate) struct Text {
    bytes: Vec<u8>,
    lines: usize,
    /// Number of lines, once the first one is known.
    needed: Option<usize>,
}

impl Text {
    /// Adds a block; returns the pairs when all lines are complete. The rest of the last block is ignored.
    pub(crate) fn add(&mut self, block: &Block) -> Result<Option<Pairs>, Problem> {
        if self.bytes.len() + block.len() > MAP_BYTES_MAX {
            return Err(TOO_LONG);
        }
        self.bytes.extend_from_slice(block);
        self.lines += block.iter().filter(|byte| **byte == b'\n').count();
        if self.needed.is_none() && self.lines > 0 {
            let pairs = self.numbers().next().ok_or(INVALID)??;
            let pairs = usize::try_from(pairs).map_err(|_| INVALID)?;
            self.needed = Some(pairs.checked_mul(2).and_then(|lines| lines.checked_add(1)).ok_or(INVALID)?);
        }
        match self.needed {
            Some(needed) if self.lines >= needed => {
                let mut numbers = self.numbers().take(needed).skip(1);
                let mut pairs = Pairs::with_capacity(needed / 2);
                while let Some(offset) = numbers.next() {
                    pairs.push((offset?, numbers.next().ok_or(INVALID)??));
                }
                Ok(Some(pairs))
            }
            _ => Ok(None),
        }
    }

    fn numbers(&self) -> impl Iterator<Item = Result<i64, Problem>> {
        self.bytes.split(|byte| *byte == b'\n').map(|line| integer(line).ok_or(INVALID))
    }
}

/// Checks the pairs of a file of `size` bytes of which `stored` are in the archive.
pub(crate) fn pieces(pairs: &Pairs, size: i64, stored: u64) -> Result<Vec<Piece>, Problem> {
    let size = u64::try_from(size).map_err(|_| INVALID)?;
    let (mut end, mut total) = (0, 0);
    let mut pieces = Vec::with_capacity(pairs.len());
    for (offset, length) in pairs {
        let offset = u64::try_from(*offset).map_err(|_| INVALID)?;
        let length = u64::try_from(*length).map_err(|_| INVALID)?;
        // Both are below 2^63.
        if offset < end || offset + length > size {
            return Err(INVALID);
        }
        end = offset + length;
        total += length;
        if length > 0 {
            pieces.push(Piece { offset, length });
        }
    }
    match total == stored {
        true => Ok(pieces),
        false => Err(Problem("a sparse file has more or fewer bytes than its map")),
    }
}
