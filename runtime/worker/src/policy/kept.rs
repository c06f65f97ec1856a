//! The signatures with which an image was accepted, in the store: `images/signatures/HEX`. One file for each image, with an entry for each
//! pair of documents that led to the image. Only what was verified is stored, so that nobody but the owner of a key can make the file long.
//! A file that is damaged or missing is that of an image without signatures: it is refused where signatures are needed, and the next pull
//! writes the file again.
//!
//! ```text
//!   0        4      5                n         n+32
//!   | "CSIG" | ver  | postcard body  | SHA-256 |
//! ```

use std::fs;
use std::io::Read;
use std::path::PathBuf;

use coracle_job::Failure;
use coracle_signature::Found;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::failure::io_failure;
use crate::image_config::digest_of;
use crate::store::{Move, Store, hex, open_plain};

const MAGIC: &[u8; 4] = b"CSIG";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 5;
const SUM_BYTES: usize = 32;

/// Maximum number of entries in one file; the oldest is dropped.
const ENTRIES_MAX: usize = 16;
/// Maximum number of signatures of one entry; the oldest is dropped.
const SIGNATURES_MAX: usize = 32;
/// Maximum length of a file in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The verified signatures of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Digest of the document to which a name referred.
    pub(crate) top: String,
    /// Digest of the manifest of this node's platform.
    pub(crate) member: String,
    pub(crate) found: Vec<Found>,
}

impl Kept {
    /// Adds signatures that are not there yet.
    pub(crate) fn add(&mut self, found: Vec<Found>) {
        self.found.retain(|known| !found.contains(known));
        self.found.extend(found);
        self.found.drain(..self.found.len().saturating_sub(SIGNATURES_MAX));
    }
}

/// Writes the signatures of an image under a temporary name; returns the move that publishes them. What the image had before stays.
pub(crate) fn write(store: &Store, id: &str, new: Option<Kept>) -> Result<Option<Move>, Failure> {
    let Some(mut new) = new else { return Ok(None) };
    let before = read(store, id);
    let (same, mut all): (Vec<_>, Vec<_>) =
        before.iter().cloned().partition(|kept| kept.top == new.top && kept.member == new.member);
    for kept in same {
        let found = std::mem::replace(&mut new.found, kept.found);
        new.add(found);
    }
    all.push(new);
    all.drain(..all.len().saturating_sub(ENTRIES_MAX));
    let mut bytes = encode(&all);
    while bytes.len() as u64 > FILE_BYTES_MAX && all.len() > 1 {
        all.remove(0);
        bytes = encode(&all);
    }
    // A pull of an image that is there writes nothing.
    if all == before || bytes.len() as u64 > FILE_BYTES_MAX {
        return Ok(None);
    }
    let part = store.aside(&digest_of(&bytes))?;
    fs::write(&part, bytes).map_err(|error| io_failure("write", &part, &error))?;
    Ok(Some((part, path(store, id)?)))
}

/// The signatures of an image; empty if there are none, or the file is damaged.
pub(crate) fn read(store: &Store, id: &str) -> Vec<Kept> {
    let read = || {
        let file = open_plain(&path(store, id).ok()?).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).ok()?;
        decode(&bytes)
    };
    read().unwrap_or_default()
}

fn path(store: &Store, id: &str) -> Result<PathBuf, Failure> {
    Ok(store.signatures().join(hex(id)?))
}

fn encode(all: &[Kept]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &[VERSION]].concat();
    // Fails for no type of this crate.
    bytes.extend(postcard::to_allocvec(all).unwrap_or_default());
    let sum = Sha256::digest(&bytes);
    bytes.extend(sum);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Vec<Kept>> {
    let (whole, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
    let is_right =
        whole.starts_with(MAGIC) && whole.get(4) == Some(&VERSION) && Sha256::digest(whole)[..] == sum[..];
    postcard::from_bytes(whole.get(HEADER_BYTES..)?).ok().filter(|_| is_right)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn found(content: &[u8]) -> Found {
        Found {
            digest: "sha256:00".to_owned(),
            place: "tag".to_owned(),
            is_of_notation: false,
            media_type: "text/plain".to_owned(),
            annotations: BTreeMap::new(),
            content: content.to_vec(),
        }
    }

    fn kept(top: &str, contents: &[&[u8]]) -> Kept {
        let found = contents.iter().map(|content| found(content)).collect();
        Kept { top: top.to_owned(), member: "sha256:01".to_owned(), found }
    }

    struct Scratch(PathBuf, Store, String);

    impl Scratch {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("coracle-kept-{name}-{}", std::process::id()));
            let store = Store::open(&root).unwrap();
            Self(root, store, format!("sha256:{}", "0a".repeat(32)))
        }

        /// Writes and publishes; returns whether there was anything to publish.
        fn write(&self, new: Option<Kept>) -> bool {
            let moved = write(&self.1, &self.2, new).unwrap();
            moved.inspect(|(from, to)| fs::rename(from, to).unwrap()).is_some()
        }

        fn read(&self) -> Vec<Kept> {
            read(&self.1, &self.2)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let all = vec![kept("a", &[b"x"]), kept("b", &[])];
        let bytes = encode(&all);
        assert_eq!(decode(&bytes), Some(all));
        for at in 0..bytes.len() {
            assert_eq!(decode(&bytes[..at]), None);
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode(&damaged), None, "{at}");
        }
    }

    #[test]
    fn documents_keep_their_signatures_up_to_a_number() {
        let scratch = Scratch::new("number");
        assert_eq!(scratch.read(), []);
        assert!(!scratch.write(None));
        for number in 0..ENTRIES_MAX + 4 {
            assert!(scratch.write(Some(kept(&number.to_string(), &[b"x"]))));
            assert!(!scratch.write(Some(kept(&number.to_string(), &[b"x"]))), "nothing is new");
        }
        let tops: Vec<String> = scratch.read().into_iter().map(|kept| kept.top).collect();
        assert_eq!(tops, (4..ENTRIES_MAX + 4).map(|number| number.to_string()).collect::<Vec<_>>());
        // A FIFO in place of the file does not block.
        let path = path(&scratch.1, &scratch.2).unwrap();
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(scratch.read(), []);
    }

    /// Signatures by two keys, of which each was needed by another name.
    #[test]
    fn signatures_of_one_image_are_added_up_to_a_number_and_a_length() {
        let scratch = Scratch::new("length");
        scratch.write(Some(kept("a", &[b"x"])));
        scratch.write(Some(kept("a", &[b"y"])));
        assert_eq!(scratch.read(), [kept("a", &[b"x", b"y"])]);
        for number in 0..2 * SIGNATURES_MAX {
            scratch.write(Some(kept("a", &[number.to_string().as_bytes()])));
        }
        assert_eq!(scratch.read()[0].found.len(), SIGNATURES_MAX);
        let long = vec![0; FILE_BYTES_MAX as usize];
        assert!(!scratch.write(Some(kept("b", &[&long]))), "the file before stays");
        assert_eq!(scratch.read()[0].top, "a");
        scratch.write(Some(kept("c", &[&long[..long.len() / 2]])));
        scratch.write(Some(kept("d", &[&long[..long.len() / 2]])));
        assert_eq!(scratch.read().len(), 1, "the oldest is dropped");
    }
}
