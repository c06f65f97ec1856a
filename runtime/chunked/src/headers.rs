//! Finds the headers of a layer in eStargz among those of other layers.

use std::io;
use std::ops::Range;

use crate::stargz::{Described, fit};
use crate::{Contents, Problem};

/// Maximum number of bytes of all headers that are found: those of 65 000 files.
const FOUND_BYTES_MAX: usize = 32 << 20;
/// Maximum number of bytes of headers that are compared with those of the layer: some seconds on a board.
const COMPARED_BYTES_MAX: usize = 256 << 20;

/// The headers of a layer, and which of them were found. Those are in a file of the caller.
#[derive(Debug)]
pub struct Headers {
    /// The entries up to the last file, and for each file the number of entries up to it.
    entries: Vec<Described>,
    ends: Vec<u32>,
    /// Numbers of the entries, in the order of their keys.
    order: Vec<u32>,
    /// For each entry, the offset and length in bytes of its headers in the file; the length is 0 if they were not found.
    places: Vec<(u32, u32)>,
    /// Number of entries whose headers were not found.
    missing: usize,
    /// Number of bytes in the file, and of those that were compared.
    found: usize,
    compared: usize,
}

/// Number of bytes of memory for each entry.
pub(crate) const ENTRY_BYTES: usize = size_of::<Described>() + size_of::<u32>() + size_of::<(u32, u32)>();

impl Headers {
    /// The headers of these entries, of which none are found; `ends` has the number of entries up to each file.
    pub(crate) fn new(entries: Vec<Described>, ends: Vec<u32>) -> Self {
        let mut order: Vec<u32> = (0..entries.len() as u32).collect();
        order.sort_unstable_by_key(|number| (entries[*number as usize].key, *number));
        let (places, missing) = (vec![(0, 0); entries.len()], entries.len());
        Self { entries, ends, order, places, missing, found: 0, compared: 0 }
    }

    /// Whether an entry is one of this layer, with other times and sizes.
    pub fn has(&self, described: &Described) -> bool {
        let key = |number: &u32| self.entries[*number as usize].key;
        self.order.binary_search_by_key(&described.key, key).is_ok()
    }

    /// Whether the headers of all entries were found.
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Compares the headers of an entry of another layer; `keep` writes those of this layer at an offset of the file.
    ///
    /// # Errors
    /// Those of `keep`; the limit of what is found or compared is reached.
    pub fn hear(
        &mut self,
        described: &Described,
        bytes: &[u8],
        keep: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
    ) -> Result<(), Problem> {
        let Self { entries, order, places, missing, found, compared, .. } = self;
        // Those that are only passed cost time, too.
        *compared += bytes.len();
        let key = |number: &u32| entries[*number as usize].key;
        let first = order.partition_point(|number| key(number) < described.key);
        let mut headers = Vec::new();
        for number in order[first..].iter().take_while(|number| key(number) == described.key) {
            let number = *number as usize;
            if places[number].1 > 0 {
                continue;
            }
            *compared += bytes.len();
            if *found + bytes.len() > FOUND_BYTES_MAX {
                return Err(Problem::new("the headers that are found are too long"));
            }
            headers.clear();
            headers.extend_from_slice(bytes);
            if fit(&mut headers, described, &entries[number]) {
                keep(&headers, *found as u64)?;
                places[number] = (*found as u32, headers.len() as u32);
                *found += headers.len();
                *missing -= 1;
            }
        }
        match *compared > COMPARED_BYTES_MAX {
            true => Err(Problem::new("too many headers")),
            false => Ok(()),
        }
    }

    /// For each chunk, whether its member is necessary: it is the last one of a file before headers that were not found, or of the
    /// last file.
    pub fn needed(&self, contents: &Contents) -> Vec<bool> {
        let mut needed = vec![false; contents.chunks().len()];
        for (file, next) in contents.files().zip(1..) {
            needed[file.first + file.chunks.len() - 1] = !self.has_before(next);
        }
        needed
    }

    /// The numbers of the entries after the file before file `number` up to this file, if there is such a file.
    pub fn before(&self, number: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(number)? as usize;
        let begin = number.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(begin..end)
    }

    /// Whether all headers before file `number` were found.
    pub fn has_before(&self, number: usize) -> bool {
        self.before(number).is_some_and(|entries| self.places[entries].iter().all(|place| place.1 > 0))
    }

    /// Offset and length in bytes of the headers of an entry in the file, if they were found.
    pub fn place(&self, entry: usize) -> Option<(u64, usize)> {
        let (offset, length) = self.places.get(entry).filter(|place| place.1 > 0)?;
        Some((u64::from(*offset), *length as usize))
    }

    /// The entries, and for each file the number of entries up to it.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> (&[Described], &[u32]) {
        (&self.entries, &self.ends)
    }
}
