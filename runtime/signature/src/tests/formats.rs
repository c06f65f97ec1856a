//! Each format and each kind of key is accepted.

use coracle_reference::Name;
use serde_json::json;

use super::make::{
    Chain, Log, Pair, SIGNER, Says, Subject, bundle_found, envelope, notation_found, policy, simple,
    simple_found, statement,
};
use crate::image::{Document, Found, Image};
use crate::time::Clock;

const NAME: &str = "reg.io/team/app:1";

/// The kinds of keys: arguments of `openssl genpkey`.
const KEYS: [&[&str]; 6] = [
    &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
    &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"],
    &["-algorithm", "ed25519"],
    &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
    &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:4096"],
    &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"],
];

#[test]
fn each_kind_of_key_is_accepted_in_both_formats() {
    let subject = Subject::new(NAME);
    for kind in KEYS {
        let pair = Pair::of(kind);
        let cosign = policy(&json!([{ "type": "cosign", "keyPath": pair.public() }]));
        let found = simple(&pair, "reg.io/team/app", subject.top().digest);
        let verdict =
            subject.judge(&cosign, &[found]).unwrap_or_else(|refusal| panic!("{kind:?}: {refusal}"));
        assert!(verdict.signed[0].contains(&pair.public()), "{verdict:?}");
        let (envelope, ..) = envelope(&pair, &statement(subject.top().digest));
        let found = bundle_found(subject.top().digest, &json!({ "dsseEnvelope": envelope }), &[]);
        subject.judge(&cosign, &[found]).unwrap_or_else(|refusal| panic!("{kind:?}: {refusal}"));
        let sigstore_signed = json!([{ "type": "sigstoreSigned", "keyPath": pair.public(), "signedIdentity": { "type": "matchRepository" } }]);
        let found = simple(&pair, "reg.io/team/app", subject.member().digest);
        subject.judge(&policy(&sigstore_signed), &[found]).unwrap();
    }
}

/// The files with which a fuzz target begins, and those that it found, see tests/fuzz: with a right signature they are accepted by what they
/// say.
#[test]
fn the_corpus_of_the_fuzz_target_is_accepted_or_refused() {
    let (pair, digest) = (Pair::p256(), format!("sha256:{}", "0".repeat(64)));
    let key = policy(&json!([{ "type": "cosign", "keyPath": pair.public() }]));
    let name = Name::parse("reg.io/0/a:1").unwrap();
    let document = Document { digest: &digest, media_type: "", bytes: b"{}" };
    let image = Image { name: Some(&name), top: document, member: document };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/signature");
    let mut accepted = Vec::new();
    for file in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap()) {
        let bytes = std::fs::read(file.path()).unwrap();
        let end = 1 + bytes[1..].iter().position(|byte| *byte == 0).unwrap();
        let content = bytes[end + 1..].to_vec();
        let found = match bytes[0] {
            0 => {
                let signature = pair.sign(&content);
                simple_found(&digest, content, &signature)
            }
            2 => notation_found(&digest, content),
            3 => {
                let (envelope, ..) = envelope(&pair, &serde_json::from_slice(&content).unwrap());
                bundle_found(&digest, &json!({ "dsseEnvelope": envelope }), &[])
            }
            _ => Found { content, ..bundle_found(&digest, &json!({}), &[]) },
        };
        if key.rule(Some(&name)).judge(&image, &[found], Clock::new(1 << 31, None)).is_ok() {
            accepted.push(file.file_name().into_string().unwrap());
        }
    }
    accepted.sort();
    assert_eq!(accepted, ["simple", "statement"]);
}

#[test]
fn a_signature_in_a_log_is_accepted_by_its_promise_and_by_its_proof() {
    let (subject, pair, log) = (Subject::new(NAME), Pair::p256(), Log::new());
    let digest = subject.top().digest;
    let logged = policy(
        &json!([{ "type": "cosign", "keyPath": pair.public(), "rekorPublicKeyPath": log.0.public() }]),
    );
    let mut found = simple(&pair, "reg.io/team/app", digest);
    let signature = pair.sign(&found.content);
    found = simple_found(digest, found.content, &signature);
    let body = Log::body(false, &pair, &found.content, &signature);
    found.annotations.insert("dev.sigstore.cosign/bundle".to_owned(), log.annotation(&body));
    let verdict = subject.judge(&logged, &[found]).unwrap();
    assert!(
        verdict.signed[0].contains("in the log of") && verdict.signed[0].contains("2026-01-01"),
        "{verdict:?}"
    );

    let (envelope, payload, signature) = envelope(&pair, &statement(digest));
    let body = Log::body(true, &pair, &payload, &signature);
    for says in [Says::Promise, Says::Proof] {
        let found = bundle_found(digest, &json!({ "dsseEnvelope": envelope }), &[log.entry(&body, says)]);
        subject.judge(&logged, &[found]).unwrap();
    }
}

#[test]
fn notations_envelopes_are_accepted_with_each_algorithm() {
    let subject = Subject::new(NAME);
    for (kind, algorithm) in
        [(KEYS[0], "ES256"), (KEYS[1], "ES384"), (KEYS[3], "PS256"), (KEYS[4], "PS512"), (KEYS[5], "PS384")]
    {
        let chain = Chain::of(kind, SIGNER);
        let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
        let found = chain.signature(algorithm, &subject.top());
        let verdict =
            subject.judge(&notation, &[found]).unwrap_or_else(|refusal| panic!("{algorithm}: {refusal}"));
        assert!(verdict.signed[0].contains(&chain.root_path()), "{verdict:?}");
    }
}

/// A client that can attach a signature can attach any number of copies that differ in what is not signed.
#[test]
fn copies_of_a_signature_are_counted_once() {
    let (subject, pair, other, chain) = (Subject::new(NAME), Pair::p256(), Pair::p256(), Chain::p256());
    let digest = subject.top().digest;
    let pad = |found: &Found, number: usize| {
        let mut document: serde_json::Value = serde_json::from_slice(&found.content).unwrap();
        document["pad"] = json!("x".repeat(number));
        Found { content: document.to_string().into_bytes(), ..found.clone() }
    };
    let bundle = |pair: &Pair| {
        let (envelope, ..) = envelope(pair, &statement(digest));
        bundle_found(digest, &json!({ "dsseEnvelope": envelope }), &[])
    };
    let simple = simple(&pair, "reg.io/team/app", digest);
    let promise = |number: usize| {
        let annotation = ("dev.sigstore.cosign/bundle".to_owned(), "x".repeat(number));
        Found {
            annotations: simple.annotations.clone().into_iter().chain([annotation]).collect(),
            ..simple.clone()
        }
    };
    let (ours, theirs) = (bundle(&pair), bundle(&other));
    let mut found: Vec<Found> = (0..32).map(|number| pad(&ours, number)).collect();
    found.push(theirs);
    found.extend((0..32).map(promise));
    let keys = policy(&json!([{ "type": "cosign", "keyPaths": [pair.public(), other.public()] }]));
    assert_eq!(subject.judge(&keys, &found).unwrap().by, [0, 32, 33]);
    let among_envelopes = |number: usize| Found { is_of_notation: true, ..pad(&ours, number) };
    let found: Vec<Found> = (0..32).map(among_envelopes).collect();
    assert_eq!(subject.judge(&keys, &found).unwrap().by, [0], "a bundle that a referrer of notation has");
    let envelope = chain.signature("ES256", &subject.top());
    let found: Vec<Found> = (0..32).map(|number| pad(&envelope, number)).collect();
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    assert_eq!(subject.judge(&notation, &found).unwrap().by, [0]);
}

/// One signature is enough for a requirement, and all requirements have to be met.
#[test]
fn one_valid_signature_of_two_suffices() {
    let (subject, right, other) = (Subject::new(NAME), Pair::p256(), Pair::p256());
    let sign = |pair: &Pair| simple(pair, "reg.io/team/app", subject.top().digest);
    let found: [Found; 2] = [sign(&other), sign(&right)];
    let key = |pair: &Pair| json!({ "type": "cosign", "keyPath": pair.public() });
    let by = |requirements| subject.judge(&policy(&requirements), &found).unwrap().by;
    assert_eq!(by(json!([key(&right)])), [1]);
    assert_eq!(by(json!([key(&right), key(&other)])), [0, 1]);
    // What is stored allows to remove either key later.
    let all = json!([{ "type": "cosign", "keyPaths": [right.public(), other.public()] }]);
    assert_eq!(by(all), [0, 1]);
    let both = policy(&json!([key(&right), key(&other)]));
    subject.is_refused(&both, &found[1..], "rule default[1], cosign");
    subject.is_refused(&both, &found[..1], "rule default[0], cosign");
    let either = policy(&json!([{ "type": "cosign", "keyPaths": [right.public(), other.public()] }]));
    assert!(subject.judge(&either, &found[..1]).is_ok());
}
