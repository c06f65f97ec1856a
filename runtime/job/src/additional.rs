//! The index of an additional store, a directory with the layout of `--root` that is shipped with the system's image: the records of its
//! images in one file. `coracle image bundle` writes it last, so a store without one is incomplete.

use serde::{Deserialize, Serialize};

use crate::{ImageRecord, checked};

/// Path of the index below the store's directory.
pub const STORE_INDEX: &str = "images/index";

/// Maximum size of an index in bytes: a thousand images.
pub const STORE_INDEX_BYTES_MAX: u64 = 8 << 20;

const MAGIC: &[u8; 4] = b"CSTO";

/// The images of an additional store, and by which its layers are verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreIndex {
    /// Records of the images, by ID.
    pub images: Vec<ImageRecord>,
    /// Names of layers with the digests of their trees.
    pub trees: Vec<(String, String)>,
}

impl StoreIndex {
    /// Encodes the index.
    ///
    /// # Errors
    /// The encoder's error, which does not occur for records in memory.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        checked::encode(MAGIC, self)
    }

    /// Decodes an index.
    ///
    /// # Errors
    /// A description of the defect.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        checked::decode(MAGIC, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::{STORE_INDEX_BYTES_MAX, StoreIndex};

    #[test]
    fn an_index_that_makes_more_memory_than_is_permitted_is_refused() {
        let of =
            |count: usize| StoreIndex { trees: vec![Default::default(); count], ..StoreIndex::default() };
        let right = of(16384);
        assert_eq!(StoreIndex::decode(&right.encode().unwrap()), Ok(right));
        let bytes = of(2_000_000).encode().unwrap();
        assert!(bytes.len() < STORE_INDEX_BYTES_MAX as usize);
        assert_eq!(StoreIndex::decode(&bytes), Err("its body cannot be read"));
    }

    /// The files with which a fuzz target begins, and those that it found, see tests/fuzz: indexes that `coracle image bundle` wrote, and
    /// bodies of such.
    #[test]
    fn the_corpus_of_the_fuzz_target_is_read_or_refused() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/store_index");
        let mut read = 0;
        for file in std::fs::read_dir(folder).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            let whole = StoreIndex::decode(&bytes).ok();
            let body = crate::decode::<StoreIndex>(&bytes).ok();
            for index in whole.into_iter().chain(body) {
                assert_eq!(StoreIndex::decode(&index.encode().unwrap()).as_ref(), Ok(&index));
                read += usize::from(!index.images.is_empty() && !index.trees.is_empty());
            }
        }
        assert_eq!(read, 2, "the index of a store, and its body");
    }
}
