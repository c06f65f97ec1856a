//! The signatures with which an image was accepted, in the store: `images/signatures/HEX`. One file for each image, with an entry for
//! each name. A file that is damaged or missing is that of an image without signatures: it is refused where signatures are needed, and
//! the next pull writes the file again.
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

/// Maximum number of names in one file; the oldest is dropped.
const NAMES_MAX: usize = 16;
/// Maximum length of a file in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// An accepted name of an image, with its signatures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The name.
    pub(crate) name: String,
    /// Digest of the document to which the name referred.
    pub(crate) top: String,
    /// Digest of the manifest of this node's platform.
    pub(crate) member: String,
    pub(crate) found: Vec<Found>,
    /// Whether verifier programs accepted the image.
    pub(crate) has_programs: bool,
    /// One line for each requirement that was met, as text for users.
    pub(crate) signed: Vec<String>,
}

/// Writes the signatures of an image under a temporary name; returns the move that publishes them. Other names of the image keep theirs.
pub(crate) fn write(store: &Store, id: &str, new: Vec<Kept>) -> Result<Option<Move>, Failure> {
    if new.is_empty() {
        return Ok(None);
    }
    let mut all = read(store, id);
    all.retain(|kept| new.iter().all(|new| new.name != kept.name));
    all.extend(new);
    all.drain(..all.len().saturating_sub(NAMES_MAX));
    let mut bytes = encode(&all);
    while bytes.len() as u64 > FILE_BYTES_MAX && all.len() > 1 {
        all.remove(0);
        bytes = encode(&all);
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
    use super::*;

    fn kept(name: &str) -> Kept {
        Kept {
            name: name.to_owned(),
            top: "sha256:00".to_owned(),
            member: "sha256:01".to_owned(),
            found: Vec::new(),
            has_programs: true,
            signed: vec!["cosign: key a".to_owned()],
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let all = vec![kept("a"), kept("b")];
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
    fn names_keep_their_signatures_up_to_a_number() {
        let root = std::env::temp_dir().join(format!("coracle-kept-{}", std::process::id()));
        let store = Store::open(&root).unwrap();
        let id = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(read(&store, &id), []);
        assert!(write(&store, &id, Vec::new()).unwrap().is_none());
        for number in 0..NAMES_MAX + 4 {
            for _ in 0..2 {
                let (from, to) = write(&store, &id, vec![kept(&number.to_string())]).unwrap().unwrap();
                fs::rename(from, to).unwrap();
            }
        }
        let names: Vec<String> = read(&store, &id).into_iter().map(|kept| kept.name).collect();
        assert_eq!(names, (4..NAMES_MAX + 4).map(|number| number.to_string()).collect::<Vec<_>>());
        // A FIFO in place of the file does not block.
        let path = path(&store, &id).unwrap();
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read(&store, &id), []);
        fs::remove_dir_all(&root).unwrap();
    }
}
