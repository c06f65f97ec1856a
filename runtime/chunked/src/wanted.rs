//! The chunks of a layer that is pulled, and where the node has them.

use crate::index::{Found, Prefix, prefix};
use crate::{Contents, Digest, File, Problem};

/// Maximum length in bytes of the paths of all files with chunks that were found.
const PATHS_BYTES_MAX: usize = 2 << 20;

/// Place of a chunk on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Number of the layer, as it was given to [`Wanted::hear`].
    pub layer: u16,
    /// Path of the file in that layer.
    pub path: &'a [u8],
    /// Offset of the chunk in the file, in bytes.
    pub offset: u64,
}

/// A table of the chunks of a layer, each with its place on the node if it has one.
#[derive(Debug)]
pub struct Wanted {
    /// Prefix of the digest and index of each chunk, in ascending order of prefixes and sizes.
    order: Vec<(Prefix, u32)>,
    sizes: Vec<u64>,
    places: Vec<Option<Row>>,
    paths: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    offset: u64,
    path_begin: u32,
    path_length: u32,
    layer: u16,
}

impl Wanted {
    /// All chunks of `contents`, without a place; chunks of zeros need none.
    pub fn new(contents: &Contents) -> Self {
        let chunks = contents.chunks();
        let numbered = chunks.iter().zip(0_u32..).filter(|(chunk, _)| !chunk.is_zeros());
        let mut order: Vec<_> = numbered.map(|(chunk, index)| (prefix(&chunk.digest), index)).collect();
        let sizes: Vec<u64> = chunks.iter().map(|chunk| chunk.size).collect();
        order.sort_unstable_by_key(|(prefix, index)| (*prefix, sizes[*index as usize], *index));
        Self { order, sizes, places: vec![None; chunks.len()], paths: Vec::new() }
    }

    /// Remembers the place of a chunk of the node's layer number `layer`, if such a chunk is wanted and has no place yet.
    ///
    /// # Errors
    /// The paths are too long; the places that are known stay.
    pub fn hear(&mut self, layer: u16, found: &Found<'_>) -> Result<(), Problem> {
        let key = |entry: &(Prefix, u32)| (entry.0, self.sizes[entry.1 as usize]);
        let same_key = (found.prefix, found.size);
        let first = self.order.partition_point(|entry| key(entry) < same_key);
        // Equal chunks get their places together, so that the first says whether all have one.
        let is_wanted = |entry| key(entry) == same_key && self.places[entry.1 as usize].is_none();
        if !self.order.get(first).is_some_and(is_wanted) {
            return Ok(());
        }
        // The chunks of a file are found one after the other.
        if !self.paths.ends_with(found.path) {
            if self.paths.len() + found.path.len() > PATHS_BYTES_MAX {
                return Err(Problem::new(format!("paths of more than {PATHS_BYTES_MAX} bytes")));
            }
            self.paths.extend_from_slice(found.path);
        }
        let path_length = found.path.len() as u32;
        let path_begin = self.paths.len() as u32 - path_length;
        let row = Row { offset: found.offset, path_begin, path_length, layer };
        for entry in self.order[first..].iter().take_while(|entry| key(entry) == same_key) {
            self.places[entry.1 as usize] = Some(row);
        }
        Ok(())
    }

    /// Remembers the places of the chunks of a file of layer number `layer`, which follow each other from this offset on; returns the
    /// offset after them.
    ///
    /// # Errors
    /// Those of [`Wanted::hear`].
    pub fn hear_file(
        &mut self,
        layer: u16,
        path: &[u8],
        mut offset: u64,
        chunks: &[(Digest, u64)],
    ) -> Result<u64, Problem> {
        for (digest, size) in chunks {
            self.hear(layer, &Found { path, offset, size: *size, prefix: prefix(digest) })?;
            offset = offset.saturating_add(*size);
        }
        Ok(offset)
    }

    /// Number of bytes of a file that have no place, if they are more than an eighth of those that are not zeros.
    pub fn lacking(&self, file: &File<'_>) -> Option<u64> {
        let chunks = (file.first..).zip(file.chunks).filter(|(_, chunk)| !chunk.is_zeros());
        let (mut all, mut missing) = (0_u64, 0);
        for (index, chunk) in chunks {
            all += chunk.size;
            missing += if self.places[index].is_none() { chunk.size } else { 0 };
        }
        (missing > all / 8).then_some(missing)
    }

    /// Place of chunk `index` on the node, if it is known.
    pub fn place(&self, index: usize) -> Option<Place<'_>> {
        let row = self.places.get(index).copied().flatten()?;
        let path = &self.paths[row.path_begin as usize..][..row.path_length as usize];
        Some(Place { layer: row.layer, path, offset: row.offset })
    }

    /// Forgets the places in the layer of chunk `index`, in which several files are not what its index said.
    pub fn forget_layer_of(&mut self, index: usize) {
        let Some(bad) = self.places.get(index).copied().flatten() else { return };
        for place in &mut self.places {
            *place = place.filter(|row| row.layer != bad.layer);
        }
    }

    /// Forgets the places in the file of chunk `index`, whose content is not what its index said.
    pub fn forget_file_of(&mut self, index: usize) {
        let Some(bad) = self.places.get(index).copied().flatten() else { return };
        let path = self.paths[bad.path_begin as usize..][..bad.path_length as usize].to_vec();
        let paths = &self.paths;
        for place in &mut self.places {
            let is_bad = |row: &Row| {
                row.layer == bad.layer
                    && paths[row.path_begin as usize..][..row.path_length as usize] == path[..]
            };
            if place.as_ref().is_some_and(is_bad) {
                *place = None;
            }
        }
    }
}
