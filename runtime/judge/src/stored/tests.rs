//! Images of the store are judged by what was stored: by which name, and what of it must be there.

use std::cell::RefCell;
use std::collections::BTreeMap;

use coracle_job::ImagePolicy;
use coracle_signature::{BUNDLE_TYPE, Found};
use serde_json::{Value, json};

use super::*;

/// A store with one image that a policy required no signature of.
struct Stored {
    documents: RefCell<BTreeMap<String, Vec<u8>>>,
    kept: RefCell<Vec<Kept>>,
    id: String,
    manifest: String,
    index: String,
}

impl Stored {
    fn new() -> Self {
        let id = digest_of(b"config");
        let manifest = json!({ "config": { "digest": id, "size": 6 }, "layers": [] }).to_string();
        let index = json!({ "manifests": [{ "digest": digest_of(manifest.as_bytes()) }] }).to_string();
        let stored = Self { documents: RefCell::default(), kept: RefCell::default(), id, manifest, index };
        stored.put(stored.manifest.as_bytes());
        stored.put(stored.index.as_bytes());
        stored
    }

    fn put(&self, document: &[u8]) {
        self.documents.borrow_mut().insert(digest_of(document), document.to_vec());
    }

    fn keep(&self, top: &str, member: &str) {
        let [top, member] = [top, member].map(|document| digest_of(document.as_bytes()));
        let found = Found {
            digest: top.clone(),
            place: "tag".to_owned(),
            is_of_notation: false,
            media_type: BUNDLE_TYPE.to_owned(),
            annotations: Default::default(),
            content: b"{}".to_vec(),
        };
        self.kept.borrow_mut().push(Kept { top, member, found: vec![found] });
    }

    fn judge(&self, policy: &Value, name: &str) -> Result<Vec<String>, String> {
        let bytes =
            coracle_signature::parse(&policy.to_string(), &|path| Err(path.to_owned())).unwrap().to_bytes();
        let policy = ImagePolicy { bytes: bytes.into(), minimum_time: String::new() };
        let judge = Judge::new(&policy, 1 << 31).unwrap();
        let read = |digest: &str| self.documents.borrow().get(digest).cloned();
        judge_stored(&judge, &self.id, name, &self.kept.borrow(), &read).map_err(|failure| failure.message)
    }
}

/// A policy with this requirement for images without a name and for one repository, and no other image.
fn policy(requirement: &Value) -> Value {
    json!({ "default": [requirement], "transports": { "docker": { "": [{ "type": "reject" }], "reg.io/a": [requirement] } } })
}

/// Requirement of a key that signed nothing: the reason of the refusal shows which document was judged.
fn needs_key() -> Value {
    const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
        MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEIknOP+8VwHycrUO6lAVtZ92ElYZr\n\
        +0FLcrAYj6AdfnaZVyMtIr6vPTvDmb2f4yZ5t6COwO3Wgq3/ozRn3mpJWQ==\n\
        -----END PUBLIC KEY-----\n";
    policy(&json!({ "type": "cosign", "keyData": data_encoding::BASE64.encode(KEY.as_bytes()) }))
}

#[test]
fn an_image_without_stored_signatures_is_accepted_only_where_none_is_needed() {
    let stored = Stored::new();
    let anything = policy(&json!({ "type": "insecureAcceptAnything" }));
    assert_eq!(stored.judge(&anything, "reg.io/a:1"), Ok(vec!["insecureAcceptAnything".to_owned()]));
    assert_eq!(stored.judge(&anything, &stored.id).as_deref().map(<[_]>::len), Ok(1), "without a name");
    assert!(stored.judge(&anything, "reg.io/b:1").unwrap_err().contains("[\"\"][0], reject"));
    let why = stored.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("no signature is stored with it"), "{why}");
}

#[test]
fn a_name_by_digest_is_judged_by_the_document_with_this_digest() {
    let stored = Stored::new();
    stored.keep(&stored.index, &stored.manifest);
    let why = stored.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("bundle: "), "the stored signature was judged: {why}");
    let of = |document: &str| format!("reg.io/a@{}", digest_of(document.as_bytes()));
    let why = stored.judge(&needs_key(), &of(&stored.index)).unwrap_err();
    assert!(why.contains("bundle: "), "{why}");
    for other in [of(&stored.manifest), of("another")] {
        let why = stored.judge(&needs_key(), &other).unwrap_err();
        assert!(why.contains("no signature is stored with it"), "{why}");
    }
}

#[test]
fn documents_that_are_missing_damaged_or_of_another_image_are_refused() {
    let stored = Stored::new();
    let other = json!({ "config": { "digest": digest_of(b"other"), "size": 5 }, "layers": [] }).to_string();
    stored.put(other.as_bytes());
    stored.keep(&other, &other);
    let why = stored.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("is the manifest of another image"), "{why}");
    let stored = Stored::new();
    stored.keep(&stored.index, &stored.manifest);
    let digest = digest_of(stored.index.as_bytes());
    stored.documents.borrow_mut().insert(digest.clone(), b"other".to_vec());
    assert!(stored.judge(&needs_key(), "reg.io/a:1").unwrap_err().contains("is missing or damaged"));
    stored.documents.borrow_mut().remove(&digest);
    assert!(stored.judge(&needs_key(), "reg.io/a:1").unwrap_err().contains("is missing or damaged"));
}
