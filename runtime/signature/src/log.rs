//! Entries of a transparency log (Rekor): that the log with a configured key has a signature. Nothing is requested: the entry comes with
//! the signature, as a promise of the log (signed entry timestamp), or as a proof of inclusion with a signed checkpoint. At least one is
//! needed, and one that is there has to be right.
//!
//! The log's key decides: the ID of the log in an entry, and the origin and the key hint of a checkpoint, are not compared with it. The time
//! of an entry is not compared with the node's: with a public key it has no bearing on the signature. Entries of Rekor's second version
//! (`0.0.2`) are not supported and refused.

use data_encoding::{BASE64, HEXLOWER};

use super::json::{Members, Problem, base64};
use super::key::{Key, sha256};
use super::time::date;

/// Maximum number of hashes in a proof: a tree of 2^64 entries has as many levels.
const HASHES_MAX: usize = 64;
/// Prefixes of what is hashed in a tree (RFC 6962, section 2.1).
const LEAF: u8 = 0;
const NODE: u8 = 1;

/// The kind of an entry, which depends on what is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `hashedrekord`: a signature of bytes.
    Hashed,
    /// `dsse`: a signature of an envelope.
    Dsse,
}

/// The signature that an entry has to be about.
pub(crate) struct Logged<'a> {
    pub(crate) kind: Kind,
    pub(crate) key: &'a Key,
    pub(crate) signature: &'a [u8],
    pub(crate) payload: &'a [u8],
}

/// An entry with its promise or proof.
pub(crate) struct Entry {
    body: Vec<u8>,
    /// Seconds since 1970.
    time: u64,
    index: u64,
    log_id: String,
    promise: Option<Vec<u8>>,
    proof: Option<Proof>,
}

struct Proof {
    index: u64,
    size: u64,
    root: Vec<u8>,
    hashes: Vec<Vec<u8>>,
    checkpoint: String,
}

impl Entry {
    /// Reads the annotation of a signature in the format "simple signing".
    pub(crate) fn of_annotation(text: &str) -> Result<Self, Problem> {
        let mut members = Members::parse(text)?;
        let promise = Some(members.bytes("SignedEntryTimestamp")?);
        let mut payload = members.object("Payload")?;
        let entry = Self {
            body: payload.bytes("body")?,
            time: payload.number("integratedTime")?,
            index: payload.number("logIndex")?,
            log_id: payload.need_text("logID")?,
            promise,
            proof: None,
        };
        payload.finish()?;
        members.finish().map(|()| entry)
    }

    /// Reads an element of `tlogEntries` of a bundle.
    pub(crate) fn of_bundle(text: &str) -> Result<Self, Problem> {
        let mut members = Members::parse(text)?;
        let promise = members.take("inclusionPromise").map(Members::parse).transpose()?;
        let proof = members.take("inclusionProof").map(Members::parse).transpose()?;
        Ok(Self {
            body: members.bytes("canonicalizedBody")?,
            time: members.number_or_zero("integratedTime")?,
            index: members.number_or_zero("logIndex")?,
            log_id: HEXLOWER.encode(&members.object("logId")?.bytes("keyId")?),
            promise: promise.map(|mut promise| promise.bytes("signedEntryTimestamp")).transpose()?,
            proof: proof.map(Proof::read).transpose()?,
        })
    }

    /// Verifies that one of the logs has this signature; returns the log's key as text for users.
    pub(crate) fn verify(&self, logs: &[Key], logged: &Logged<'_>) -> Result<String, Problem> {
        self.is_about(logged).map_err(|problem| format!("entry of the transparency log: {problem}"))?;
        let log = self.log(logs).map_err(|problem| format!("entry of the transparency log: {problem}"))?;
        // The time of an entry is signed with the promise only.
        let time = self.promise.as_ref().map_or(String::new(), |_| format!(" since {}", date(self.time)));
        Ok(format!(", in the log of {}{time}", log.name))
    }

    /// The log that has the entry.
    fn log<'a>(&self, logs: &'a [Key]) -> Result<&'a Key, Problem> {
        let unsigned = |what: &str| format!("{what} was not signed by a configured log");
        let promised = match &self.promise {
            None => None,
            Some(promise) => {
                let text = self.promised()?;
                let log = logs.iter().find(|log| log.verifies(text.as_bytes(), promise));
                Some(log.ok_or_else(|| unsigned("its timestamp"))?)
            }
        };
        let proved = match &self.proof {
            None => None,
            Some(proof) => {
                let log = logs
                    .iter()
                    .find(|log| proof.is_signed_by(log))
                    .ok_or_else(|| unsigned("its checkpoint"))?;
                proof.verify(&self.body)?;
                Some(log)
            }
        };
        promised.or(proved).ok_or_else(|| "neither a signed timestamp nor a proof of inclusion".to_owned())
    }

    /// The text that a log signs for its promise: JSON in canonical form (RFC 8785), for which these members need no escapes.
    fn promised(&self) -> Result<String, Problem> {
        if !self.log_id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("logID is not hexadecimal".to_owned());
        }
        let body = BASE64.encode(&self.body);
        let (time, id, index) = (self.time, &self.log_id, self.index);
        Ok(format!(r#"{{"body":"{body}","integratedTime":{time},"logID":"{id}","logIndex":{index}}}"#))
    }

    /// Checks that the entry is about this signature, key and payload.
    fn is_about(&self, logged: &Logged<'_>) -> Result<(), Problem> {
        let mut body = Members::parse_bytes(&self.body)?;
        let (kind, version) = (body.need_text("kind")?, body.need_text("apiVersion")?);
        let mut spec = body.object("spec")?;
        let (hash, signature, key) = match (kind.as_str(), version.as_str(), logged.kind) {
            ("hashedrekord", "0.0.1", Kind::Hashed) => {
                let hash = spec.object("data")?.object("hash")?;
                let mut signature = spec.object("signature")?;
                let key = signature.object("publicKey")?.bytes("content")?;
                (hash, signature.bytes("content")?, key)
            }
            ("dsse", "0.0.1", Kind::Dsse) => {
                let signatures = spec.list("signatures")?.unwrap_or_default();
                let [signature] = signatures[..] else { return Err("not one signature".to_owned()) };
                let mut signature = Members::parse(signature)?;
                (spec.object("payloadHash")?, signature.bytes("signature")?, signature.bytes("verifier")?)
            }
            (kind, version, _) => {
                return Err(format!("{kind} {version} is not supported for this signature"));
            }
        };
        let mut hash = hash;
        if hash.need_text("algorithm")? != "sha256" {
            return Err("its hash is not sha256".to_owned());
        }
        let is_hash = hash.need_text("value")? == HEXLOWER.encode(sha256(logged.payload).as_ref());
        match (is_hash, signature == logged.signature, logged.key.is(&key)) {
            (true, true, true) => Ok(()),
            (false, ..) => Err("it is about another payload".to_owned()),
            (_, false, _) => Err("it is about another signature".to_owned()),
            (.., false) => Err("it is about another key".to_owned()),
        }
    }
}

impl Proof {
    fn read(mut members: Members<'_>) -> Result<Self, Problem> {
        let hashes = members.texts("hashes")?.unwrap_or_default();
        if hashes.len() > HASHES_MAX {
            return Err(format!("hashes: more than {HASHES_MAX}"));
        }
        Ok(Self {
            index: members.number_or_zero("logIndex")?,
            size: members.number("treeSize")?,
            root: members.bytes("rootHash")?,
            hashes: hashes.iter().map(|hash| base64(hash)).collect::<Result<_, _>>()?,
            checkpoint: members.object("checkpoint")?.need_text("envelope")?,
        })
    }

    /// The text of the checkpoint that is signed, and its signatures.
    fn parts(&self) -> Option<(&str, &str)> {
        let end = self.checkpoint.find("\n\n")?;
        Some((&self.checkpoint[..=end], &self.checkpoint[end + 2..]))
    }

    /// Whether the log signed the checkpoint (the format of a signed note: `— NAME BASE64`, whose bytes begin with four of the key).
    fn is_signed_by(&self, log: &Key) -> bool {
        let Some((text, signatures)) = self.parts() else { return false };
        let signature = |line: &str| {
            let (_, bytes) = line.strip_prefix("\u{2014} ")?.split_once(' ')?;
            let bytes = base64(bytes).ok()?;
            Some(bytes.get(4..)?.to_vec())
        };
        signatures
            .lines()
            .take(HASHES_MAX)
            .filter_map(signature)
            .any(|bytes| log.verifies(text.as_bytes(), &bytes))
    }

    /// Verifies that the tree of the checkpoint has an entry with this body.
    fn verify(&self, body: &[u8]) -> Result<(), Problem> {
        let (text, _) = self.parts().ok_or("the checkpoint is malformed")?;
        let mut lines = text.lines().skip(1);
        let size = lines.next().and_then(|line| line.parse::<u64>().ok());
        let root = lines.next().and_then(|line| base64(line).ok());
        if size != Some(self.size) || root.as_ref() != Some(&self.root) {
            return Err("the checkpoint is that of another tree".to_owned());
        }
        match self.computed_root(body) {
            Some(root) if root[..] == self.root[..] => Ok(()),
            _ => Err("the proof does not lead from the entry to the checkpoint".to_owned()),
        }
    }

    /// The root of the tree by the hashes of the proof (RFC 9162, section 2.1.3.2).
    fn computed_root(&self, body: &[u8]) -> Option<Vec<u8>> {
        let node = |left: &[u8], right: &[u8]| sha256(&[&[NODE], left, right].concat()).as_ref().to_vec();
        let (mut index, mut last) = (self.index, self.size.checked_sub(1)?);
        if index > last {
            return None;
        }
        let mut root = sha256(&[&[LEAF], body].concat()).as_ref().to_vec();
        for hash in &self.hashes {
            if last == 0 {
                return None;
            }
            if index & 1 == 1 || index == last {
                root = node(hash, &root);
                while index & 1 == 0 && index != 0 {
                    (index, last) = (index >> 1, last >> 1);
                }
            } else {
                root = node(&root, hash);
            }
            (index, last) = (index >> 1, last >> 1);
        }
        (last == 0).then_some(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The root of a tree by its definition (RFC 6962, section 2.1), and the proof of one entry.
    fn tree(bodies: &[Vec<u8>], index: usize) -> (Vec<u8>, Vec<Vec<u8>>) {
        if bodies.len() == 1 {
            return (sha256(&[&[LEAF][..], &bodies[0]].concat()).as_ref().to_vec(), Vec::new());
        }
        let half = bodies.len().next_power_of_two() / 2;
        let (left, right) = bodies.split_at(half);
        let (mut ours, other) = match index < half {
            true => (tree(left, index), tree(right, 0).0),
            false => (tree(right, index - half), tree(left, 0).0),
        };
        let (first, second) = if index < half { (&ours.0, &other) } else { (&other, &ours.0) };
        let root = sha256(&[&[NODE][..], first, second].concat()).as_ref().to_vec();
        ours.1.push(other);
        (root, ours.1)
    }

    #[test]
    fn proofs_lead_to_the_root_of_each_tree() {
        for size in 1_usize..=17 {
            let bodies: Vec<Vec<u8>> = (0..size).map(|number| vec![number as u8]).collect();
            for index in 0..size {
                let (root, hashes) = tree(&bodies, index);
                let checkpoint = String::new();
                let mut proof =
                    Proof { index: index as u64, size: size as u64, root: root.clone(), hashes, checkpoint };
                assert_eq!(proof.computed_root(&bodies[index]).as_ref(), Some(&root), "{index} of {size}");
                assert_ne!(proof.computed_root(b"other").as_ref(), Some(&root));
                proof.hashes.push(vec![0; 32]);
                assert_ne!(proof.computed_root(&bodies[index]).as_ref(), Some(&root), "one hash too many");
                proof.hashes.truncate(proof.hashes.len().saturating_sub(2));
                if size > 1 {
                    assert_ne!(proof.computed_root(&bodies[index]).as_ref(), Some(&root), "one hash too few");
                }
                proof.index = size as u64;
                assert_eq!(proof.computed_root(&bodies[index]), None);
            }
        }
    }

    /// Entries of Rekor itself: one of the public log about an envelope, and one of a log of its test installation. Both were made with
    /// certificates, so that the key is another one in any case.
    #[test]
    fn entries_that_rekor_made_are_verified() {
        let fixture: serde_json::Value = serde_json::from_str(include_str!("tests/rekor.json")).unwrap();
        let bytes = |value: &serde_json::Value| base64(value.as_str().unwrap()).unwrap();
        let read = |kind: &str| {
            let entry = &fixture[kind]["entry"];
            let log = Key { name: "the log".to_owned(), der: bytes(&fixture[kind]["log"]) };
            (entry.clone(), log)
        };
        for kind in ["dsse", "hashed"] {
            let (text, log) = read(kind);
            let entry = Entry::of_bundle(&text.to_string()).unwrap();
            assert!(entry.promise.is_some() && entry.proof.is_some());
            let logs = [log];
            assert_eq!(entry.log(&logs).map(|log| &log.name[..]), Ok("the log"), "{kind}");
            let mut other = text.clone();
            other["integratedTime"] = "1".into();
            let changed = Entry::of_bundle(&other.to_string()).unwrap();
            assert!(changed.log(&logs).unwrap_err().contains("its timestamp was not signed"));
            let mut other = text;
            other.as_object_mut().unwrap().remove("inclusionPromise");
            other["inclusionProof"]["logIndex"] = "1".into();
            let changed = Entry::of_bundle(&other.to_string()).unwrap();
            assert!(changed.log(&logs).unwrap_err().contains("does not lead from the entry"));
        }
        let (text, log) = read("dsse");
        let (signature, payload) = (bytes(&fixture["dsse"]["signature"]), bytes(&fixture["dsse"]["payload"]));
        let entry = Entry::of_bundle(&text.to_string()).unwrap();
        let about = |payload: &[u8]| {
            entry.is_about(&Logged { kind: Kind::Dsse, key: &log, signature: &signature, payload })
        };
        assert_eq!(about(&payload), Err("it is about another key".to_owned()));
        assert_eq!(about(b"other"), Err("it is about another payload".to_owned()));
    }
}
