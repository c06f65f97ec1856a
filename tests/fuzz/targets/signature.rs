//! Signatures, as a registry has them: cosign's payloads, bundles with entries of logs, and notation's envelopes. Payloads and statements
//! are signed here, so that what is behind the check of the signature is read, too: they are accepted only if they name the image. Envelopes
//! and entries of logs are not signed, and none is accepted.
#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use coracle_reference::Name;
use coracle_signature::{BUNDLE_TYPE, Clock, Document, Found, Image, Policy, SIMPLE_SIGNING, parse};
use data_encoding::BASE64;
use libfuzzer_sys::fuzz_target;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::json;

/// A certificate of P-256, made by openssl; the private key was not kept.
const ROOT: &str = include_str!("signature-root.pem");
const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
/// The beginning of a SubjectPublicKeyInfo of Ed25519 (RFC 8410).
const ED25519: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

static PAIR: LazyLock<Ed25519KeyPair> =
    LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[7; 32]).expect("a seed of 32 bytes"));

static POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let public = BASE64.encode(&[&ED25519[..], PAIR.public_key().as_ref()].concat());
    let pem = format!("-----BEGIN PUBLIC KEY-----\n{public}\n-----END PUBLIC KEY-----\n");
    let (key, root) = (BASE64.encode(pem.as_bytes()), BASE64.encode(ROOT.as_bytes()));
    let text = format!(
        r#"{{"default":[{{"type":"reject"}}],"transports":{{"docker":{{
            "reg.io/0":[{{"type":"cosign","keyData":"{key}"}}],
            "reg.io/1":[{{"type":"cosign","keyData":"{key}","rekorPublicKeyData":"{key}"}}],
            "reg.io/2":[{{"type":"sigstoreSigned","keyData":"{key}"}}],
            "reg.io/3":[{{"type":"notation","rootData":"{root}"}}]}}}}}}"#
    );
    parse(&text, &|_| Err("no file".to_owned())).expect("a policy")
});

/// A bundle whose statement is this text, signed.
fn bundle(statement: &[u8]) -> Vec<u8> {
    let kind = "application/vnd.in-toto+json";
    let head = format!("DSSEv1 {} {kind} {} ", kind.len(), statement.len());
    let signature = PAIR.sign(&[head.as_bytes(), statement].concat());
    let signatures = json!([{ "sig": BASE64.encode(signature.as_ref()) }]);
    let envelope =
        json!({ "payload": BASE64.encode(statement), "payloadType": kind, "signatures": signatures });
    let bundle = json!({ "mediaType": BUNDLE_TYPE, "verificationMaterial": {}, "dsseEnvelope": envelope });
    bundle.to_string().into_bytes()
}

fuzz_target!(|data: &[u8]| {
    let Some((&kind, content)) = data.split_first() else { return };
    // An annotation before the first zero byte, the content after it.
    let at = content.iter().position(|byte| *byte == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&content[..at]).into_owned();
    let content = content.get(at + 1..).unwrap_or_default();
    let mut annotations: BTreeMap<String, String> = [("dev.sigstore.cosign/bundle".to_owned(), text)].into();
    let bundle_type = format!("{BUNDLE_TYPE}.v0.3+json");
    let (media_type, content) = match kind % 4 {
        0 => {
            let signature = BASE64.encode(PAIR.sign(content).as_ref());
            annotations.insert("dev.cosignproject.cosign/signature".to_owned(), signature);
            (SIMPLE_SIGNING, content.to_vec())
        }
        1 => (bundle_type.as_str(), content.to_vec()),
        2 => ("application/jose+json", content.to_vec()),
        _ => (bundle_type.as_str(), bundle(content)),
    };
    // Also by escapes of JSON.
    let names_image = kind % 4 == 3
        || content.contains(&b'\\')
        || content.windows(64).any(|part| part == &DIGEST.as_bytes()[7..]);
    let found = Found {
        digest: DIGEST.to_owned(),
        place: "fuzz".to_owned(),
        is_of_notation: kind % 4 == 2,
        media_type: media_type.to_owned(),
        annotations,
        content,
    };
    let document = Document { digest: DIGEST, media_type: "", bytes: b"{}" };
    for number in 0..4 {
        let name = Name::parse(&format!("reg.io/{number}/a:1")).expect("a name");
        let image = Image { name: Some(&name), top: document, member: document };
        let judged = POLICY.rule(Some(&name)).judge(&image, std::slice::from_ref(&found), Clock::new(1 << 31, None));
        let may_be_accepted = [0, 2].contains(&number) && names_image;
        assert!(judged.is_err() || may_be_accepted, "{number}: {judged:?}");
    }
});
