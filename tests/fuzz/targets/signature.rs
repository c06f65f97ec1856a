//! Signatures, as a registry has them: cosign's payloads, bundles with entries of logs, and notation's envelopes. No bytes are accepted,
//! because the keys of the policy signed nothing.
#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use coracle_signature::{Clock, Document, Found, Image, NOTATION_PLACE, Name, Policy, SIMPLE_SIGNING, parse};
use libfuzzer_sys::fuzz_target;

/// A key of P-256 and a certificate with it, made by openssl; the private key was not kept.
const KEY: &str = include_str!("signature-key.pem");
const ROOT: &str = include_str!("signature-root.pem");

static POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let encode = |text: &str| data_encoding::BASE64.encode(text.as_bytes());
    let (key, root) = (encode(KEY), encode(ROOT));
    let text = format!(
        r#"{{"default":[{{"type":"reject"}}],"transports":{{"docker":{{
            "reg.io/0":[{{"type":"cosign","keyData":"{key}"}}],
            "reg.io/1":[{{"type":"cosign","keyData":"{key}","rekorPublicKeyData":"{key}"}}],
            "reg.io/2":[{{"type":"sigstoreSigned","keyData":"{key}"}}],
            "reg.io/3":[{{"type":"notation","rootData":"{root}"}}]}}}}}}"#
    );
    parse(&text, &|_| Err("no file".to_owned())).expect("a policy")
});

fuzz_target!(|data: &[u8]| {
    let Some((&kind, content)) = data.split_first() else { return };
    // An annotation before the first zero byte, the content after it.
    let at = content.iter().position(|byte| *byte == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&content[..at]).into_owned();
    let names = ["dev.cosignproject.cosign/signature", "dev.sigstore.cosign/bundle"];
    let annotations: BTreeMap<String, String> = names.map(|name| (name.to_owned(), text.clone())).into();
    let media_types = [SIMPLE_SIGNING, "application/vnd.dev.sigstore.bundle.v0.3+json", "application/jose+json"];
    let found = Found {
        digest: "sha256:00".to_owned(),
        place: NOTATION_PLACE.to_owned(),
        media_type: media_types[usize::from(kind) % media_types.len()].to_owned(),
        annotations,
        content: content[at..].to_vec(),
    };
    let document = Document { digest: "sha256:00", media_type: "", bytes: b"{}" };
    for number in 0..4 {
        let name = Name::parse(&format!("reg.io/{number}/a:1")).expect("a name");
        let image = Image { name: &name, top: document, member: document };
        assert!(POLICY.rule(&name).judge(&image, std::slice::from_ref(&found), Clock::new(1 << 31, None)).is_err());
    }
});
