//! Images of the store are judged by what was stored: by which name, and what of it must be there.

use std::path::PathBuf;

use coracle_job::ImagePolicy;
use coracle_signature::{BUNDLE_TYPE, Found};
use serde_json::{Value, json};

use super::*;

/// A store with one image that a policy required no signature of.
struct Scratch {
    root: PathBuf,
    store: Store,
    id: String,
    manifest: String,
    index: String,
}

impl Scratch {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("coracle-again-{name}-{}", std::process::id()));
        let store = Store::open(&root).unwrap();
        let id = digest_of(b"config");
        let manifest = json!({ "config": { "digest": id, "size": 6 }, "layers": [] }).to_string();
        let index = json!({ "manifests": [{ "digest": digest_of(manifest.as_bytes()) }] }).to_string();
        let scratch = Self { root, store, id, manifest, index };
        scratch.put(scratch.manifest.as_bytes());
        scratch.put(scratch.index.as_bytes());
        scratch
    }

    fn put(&self, document: &[u8]) {
        std::fs::write(self.store.blob(&digest_of(document)).unwrap(), document).unwrap();
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
        let moved = kept::write(&self.store, &self.id, Some(Kept { top, member, found: vec![found] }));
        let (from, to) = moved.unwrap().unwrap();
        std::fs::rename(from, to).unwrap();
    }

    fn judge(&self, policy: &Value, name: &str) -> Result<Vec<String>, String> {
        let bytes =
            coracle_signature::parse(&policy.to_string(), &|path| Err(path.to_owned())).unwrap().to_bytes();
        let policy = ImagePolicy { bytes: bytes.into(), minimum_time: String::new() };
        let images = vec![(self.id.clone(), vec![name.to_owned()])];
        let mut judged = run(&JudgeJob { root: self.root.clone(), policy, images }).unwrap();
        assert_eq!(judged.len(), 1);
        judged.remove(0).judgement
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.root).unwrap();
    }
}

/// A policy with this requirement for images without a name and for one repository, and no other image.
fn policy(requirement: &Value) -> Value {
    json!({ "default": [requirement], "transports": { "docker": { "": [{ "type": "reject" }], "reg.io/a": [requirement] } } })
}

/// A key that signed nothing: what is judged shows in the reason.
fn needs_key() -> Value {
    const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
        MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEIknOP+8VwHycrUO6lAVtZ92ElYZr\n\
        +0FLcrAYj6AdfnaZVyMtIr6vPTvDmb2f4yZ5t6COwO3Wgq3/ozRn3mpJWQ==\n\
        -----END PUBLIC KEY-----\n";
    policy(&json!({ "type": "cosign", "keyData": data_encoding::BASE64.encode(KEY.as_bytes()) }))
}

#[test]
fn an_image_without_stored_signatures_is_accepted_only_where_none_is_needed() {
    let scratch = Scratch::new("nothing");
    let anything = policy(&json!({ "type": "insecureAcceptAnything" }));
    assert_eq!(scratch.judge(&anything, "reg.io/a:1"), Ok(vec!["insecureAcceptAnything".to_owned()]));
    assert_eq!(scratch.judge(&anything, &scratch.id).as_deref().map(<[_]>::len), Ok(1), "without a name");
    assert!(scratch.judge(&anything, "reg.io/b:1").unwrap_err().contains("[\"\"][0], reject"));
    let why = scratch.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("no signature is stored with it"), "{why}");
}

#[test]
fn a_name_by_digest_is_judged_by_what_this_digest_is() {
    let scratch = Scratch::new("digest");
    scratch.keep(&scratch.index, &scratch.manifest);
    let why = scratch.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("bundle: "), "the stored signature was judged: {why}");
    let of = |document: &str| format!("reg.io/a@{}", digest_of(document.as_bytes()));
    let why = scratch.judge(&needs_key(), &of(&scratch.index)).unwrap_err();
    assert!(why.contains("bundle: "), "{why}");
    for other in [of(&scratch.manifest), of("another")] {
        let why = scratch.judge(&needs_key(), &other).unwrap_err();
        assert!(why.contains("no signature is stored with it"), "{why}");
    }
}

#[test]
fn documents_that_are_missing_damaged_or_of_another_image_are_refused() {
    let scratch = Scratch::new("documents");
    let other = json!({ "config": { "digest": digest_of(b"other"), "size": 5 }, "layers": [] }).to_string();
    scratch.put(other.as_bytes());
    scratch.keep(&other, &other);
    let why = scratch.judge(&needs_key(), "reg.io/a:1").unwrap_err();
    assert!(why.contains("is the manifest of another image"), "{why}");
    let scratch = Scratch::new("damaged");
    scratch.keep(&scratch.index, &scratch.manifest);
    let path = scratch.store.blob(&digest_of(scratch.index.as_bytes())).unwrap();
    std::fs::write(&path, "other").unwrap();
    assert!(scratch.judge(&needs_key(), "reg.io/a:1").unwrap_err().contains("is missing or damaged"));
    std::fs::remove_file(&path).unwrap();
    assert!(scratch.judge(&needs_key(), "reg.io/a:1").unwrap_err().contains("is missing or damaged"));
}
