//! The byte ranges of a blob that a partial pull downloads.

use crate::{Chunk, Contents};

/// A range of bytes of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the first byte.
    pub begin: u64,
    /// Offset of the first byte after it.
    pub end: u64,
}

impl Extent {
    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.end - self.begin
    }
}

/// Number of bytes between two ranges below which they become one: what a request costs on a slow line, with its header fields
/// and the time of its answer.
const GAP_BYTES: u64 = 16 << 10;
/// Maximum number of ranges of a registry's blob: as many requests are made, or twice as many if the registry redirects, six at once. With
/// round trips of 100 ms the answers begin within half a minute.
pub const REGISTRY_EXTENTS_MAX: usize = 1024;
/// Maximum number of ranges of a neighbour's layer: one request follows the other, on a fast line.
pub const NEIGHBOUR_EXTENTS_MAX: usize = 512;

/// A pull is partial if it saves at least this part of the blob.
const SAVED_MIN: f64 = 0.1;

/// Whether a pull that downloads `bytes` of a blob of `size` bytes saves enough for its requests.
pub fn saves(bytes: u64, size: u64) -> bool {
    bytes as f64 <= size as f64 * (1.0 - SAVED_MIN)
}

/// The ranges of a blob that a partial pull downloads. Their bytes are stored one range after the other.
#[derive(Debug)]
pub struct Plan {
    /// The ranges, in ascending order.
    extents: Vec<Extent>,
    /// For each chunk its position in the stored bytes; `None` if it is in no range.
    positions: Vec<Option<u64>>,
}

impl Plan {
    /// Chooses at most `extents_max` ranges that contain all chunks that are missing on the node; `is_missing` gets the index of a chunk.
    /// Ranges with a short gap between them are one, and if there are too many, those with the shortest gaps are joined.
    pub fn new(contents: &Contents, extents_max: usize, is_missing: impl Fn(usize) -> bool) -> Self {
        let mut gap_bytes = GAP_BYTES;
        loop {
            let extents = extents(contents, &is_missing, gap_bytes);
            if extents.len() <= extents_max {
                let positions = positions(contents.chunks(), &extents);
                return Self { extents, positions };
            }
            gap_bytes = gap_bytes.saturating_mul(2);
        }
    }

    /// The ranges, in ascending order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Number of bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.extents.iter().map(Extent::length).fold(0, u64::saturating_add)
    }

    /// The position of chunk `index` in the stored bytes; `None` if it is not downloaded.
    pub fn position(&self, index: usize) -> Option<u64> {
        self.positions.get(index).copied().flatten()
    }
}

fn extents(contents: &Contents, is_missing: impl Fn(usize) -> bool, gap_bytes: u64) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for (_, chunk) in contents.chunks().iter().enumerate().filter(|(index, _)| is_missing(*index)) {
        match extents.last_mut() {
            Some(last) if chunk.begin.saturating_sub(last.end) <= gap_bytes => last.end = chunk.end,
            _ => extents.push(Extent { begin: chunk.begin, end: chunk.end }),
        }
    }
    extents
}

/// The position of each chunk in the concatenated `extents`, `None` if no extent has it. Both are in ascending order.
fn positions(chunks: &[Chunk], extents: &[Extent]) -> Vec<Option<u64>> {
    let (mut rest, mut before) = (extents, 0);
    let position = |chunk: &Chunk| {
        while let Some((first, others)) = rest.split_first() {
            if chunk.begin < first.end {
                let is_inside = chunk.begin >= first.begin && chunk.end <= first.end;
                return is_inside.then(|| before + (chunk.begin - first.begin));
            }
            before += first.length();
            rest = others;
        }
        None
    };
    chunks.iter().map(position).collect()
}
