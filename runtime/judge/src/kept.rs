//! The signatures with which an image was accepted, as they are stored beside it: one file for each image, with an entry for each pair of
//! documents that led to the image. Only what was verified is stored, and each signature once: others can make it longer, up to
//! [`SIGNATURE_BYTES_MAX`], but only the owner of a key can make another one that takes the place of those before (and anyone a second
//! form of one by ECDSA). A file that is damaged or
//! missing is that of an image without signatures: it is refused where signatures are needed, and the next pull writes the file again.
//!
//! ```text
//!   0        4      5                n         n+32
//!   | "CSIG" | ver  | postcard body  | SHA-256 |
//! ```

use std::collections::BTreeSet;

use coracle_signature::Found;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::collect::SIGNATURE_BYTES_MAX;

const MAGIC: &[u8; 4] = b"CSIG";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 5;
const SUM_BYTES: usize = 32;

/// Maximum number of entries in one file; the oldest is dropped.
const ENTRIES_MAX: usize = 16;
/// Maximum number of signatures of one entry; the oldest is dropped.
const SIGNATURES_MAX: usize = 32;
/// Maximum length of a file in bytes; one entry always fits.
pub const FILE_BYTES_MAX: u64 = (4 << 20) + (64 << 10);
const _: () = assert!(FILE_BYTES_MAX > SIGNATURES_MAX as u64 * (SIGNATURE_BYTES_MAX + 1024));

/// The verified signatures of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Digest of the document to which a name referred.
    pub top: String,
    /// Digest of the manifest of this node's platform.
    pub member: String,
    /// The signatures, the newest first.
    pub found: Vec<Found>,
}

impl Kept {
    /// Adds signatures; equal ones are replaced.
    pub(crate) fn add(&mut self, found: Vec<Found>) {
        let mut new = BTreeSet::new();
        new.extend(found.iter().map(Found::signature_id));
        let known = std::mem::replace(&mut self.found, found);
        self.found.extend(known.into_iter().filter(|known| !new.contains(&known.signature_id())));
        self.found.truncate(SIGNATURES_MAX);
    }
}

/// Adds the signatures of an image to those that it had before; returns the content of the file. `None`: it has them, or they are too long,
/// and the file before stays.
pub fn merge(before: &[Kept], mut new: Kept) -> Option<Vec<u8>> {
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
    (all != before && bytes.len() as u64 <= FILE_BYTES_MAX).then_some(bytes)
}

fn encode(all: &[Kept]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &[VERSION]].concat();
    // Fails for no type of this crate.
    bytes.extend(postcard::to_allocvec(all).unwrap_or_default());
    let sum = Sha256::digest(&bytes);
    bytes.extend(sum);
    bytes
}

/// The signatures in a file; empty if it is damaged.
pub fn decode(bytes: &[u8]) -> Vec<Kept> {
    let read = || {
        let (whole, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
        let is_right = whole.starts_with(MAGIC)
            && whole.get(4) == Some(&VERSION)
            && Sha256::digest(whole)[..] == sum[..];
        postcard::from_bytes(whole.get(HEADER_BYTES..)?).ok().filter(|_| is_right)
    };
    read().unwrap_or_default()
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

    /// A file of an image.
    #[derive(Default)]
    struct File(Vec<u8>);

    impl File {
        /// Adds signatures; returns whether there was anything to write.
        fn add(&mut self, new: Kept) -> bool {
            let merged = merge(&self.read(), new);
            merged.map(|bytes| self.0 = bytes).is_some()
        }

        fn read(&self) -> Vec<Kept> {
            decode(&self.0)
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let all = vec![kept("a", &[b"x"]), kept("b", &[])];
        let bytes = encode(&all);
        assert_eq!(decode(&bytes), all);
        for at in 0..bytes.len() {
            assert_eq!(decode(&bytes[..at]), []);
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode(&damaged), [], "{at}");
        }
    }

    #[test]
    fn documents_keep_their_signatures_up_to_a_number() {
        let mut file = File::default();
        for number in 0..ENTRIES_MAX + 4 {
            assert!(file.add(kept(&number.to_string(), &[b"x"])));
            assert!(!file.add(kept(&number.to_string(), &[b"x"])), "nothing is new");
        }
        let tops: Vec<String> = file.read().into_iter().map(|kept| kept.top).collect();
        assert_eq!(tops, (4..ENTRIES_MAX + 4).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    /// Members can be added to a bundle without its key.
    #[test]
    fn copies_of_one_signature_displace_no_other() {
        let bundle = |payload: &str, number: usize| {
            let content = format!(
                r#"{{"pad":{number},"dsseEnvelope":{{"payloadType":"x","payload":"{payload}","signatures":[{{"sig":"AAAA"}}]}}}}"#
            );
            Found {
                media_type: "application/vnd.dev.sigstore.bundle".to_owned(),
                ..found(content.as_bytes())
            }
        };
        let mut file = File::default();
        let kept = |payload: &str, number| Kept { found: vec![bundle(payload, number)], ..kept("a", &[]) };
        file.add(kept("BBBB", 0));
        for number in 0..2 * SIGNATURES_MAX {
            assert!(file.add(kept("AAAA", number)));
        }
        assert_eq!(file.read()[0].found, [bundle("AAAA", 2 * SIGNATURES_MAX - 1), bundle("BBBB", 0)]);
    }

    /// Signatures by two keys, of which each was needed by another name.
    #[test]
    fn signatures_of_one_image_are_added_up_to_a_number_and_a_length() {
        let mut file = File::default();
        file.add(kept("a", &[b"x"]));
        file.add(kept("a", &[b"y"]));
        assert_eq!(file.read(), [kept("a", &[b"y", b"x"])]);
        for number in 0..2 * SIGNATURES_MAX {
            file.add(kept("a", &[number.to_string().as_bytes()]));
        }
        assert_eq!(file.read()[0].found.len(), SIGNATURES_MAX);
        assert_eq!(file.read()[0].found[0], found(b"63"), "the newest is first");
        let many: Vec<String> = (100..100 + SIGNATURES_MAX).map(|number| number.to_string()).collect();
        let newest_first: Vec<&[u8]> = many.iter().map(String::as_bytes).collect();
        file.add(kept("a", &newest_first));
        file.add(kept("a", &[b"last"]));
        let first: Vec<_> = file.read()[0].found[..2].to_vec();
        assert_eq!(first, [found(b"last"), found(b"100")], "the oldest gives way");
        let long = vec![0; FILE_BYTES_MAX as usize];
        assert!(!file.add(kept("b", &[&long])), "the file before stays");
        assert_eq!(file.read()[0].top, "a");
        file.add(kept("c", &[&long[..long.len() / 2]]));
        file.add(kept("d", &[&long[..long.len() / 2]]));
        assert_eq!(file.read().len(), 1, "the oldest is dropped");
    }
}
