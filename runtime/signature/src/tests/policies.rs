//! Policies with mistakes, and what they say about an image.

use coracle_reference::Name;
use serde_json::json;

use super::make::{Chain, Pair, read};
use crate::policy::{Policy, parse};

#[test]
fn a_mistake_is_named_with_its_place() {
    let (pair, chain) = (Pair::p256(), Chain::p256());
    let small = Pair::of(&["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024"]);
    let p521 = Pair::of(&["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"]);
    let two =
        pair.folder.write("two.pub", &[pair.folder.read("key.pub"), small.folder.read("key.pub")].concat());
    let empty = pair.folder.write("empty", b"");
    let key = pair.public();
    for (requirement, words) in [
        (json!({ "type": "reject", "more": 1 }), "[0]: unknown member \"more\""),
        (json!({ "type": "rejects" }), "[0].type: \"rejects\" is not known"),
        (json!({}), "[0].type: missing"),
        (json!({ "type": "cosign" }), "keyPath, keyPaths, keyData or keyDatas: missing"),
        (json!({ "type": "cosign", "keyPath": "/absent" }), "[0].keyPath: /absent: No such file"),
        (json!({ "type": "cosign", "keyPath": "a.pub" }), "is not an absolute path"),
        (json!({ "type": "cosign", "keyPath": key, "keyData": "" }), "only one of keyPath"),
        (json!({ "type": "cosign", "keyPaths": [] }), "0 entries"),
        (json!({ "type": "cosign", "keyData": "*" }), "keyData: not base64"),
        (json!({ "type": "cosign", "keyPath": empty }), "no public key in PEM"),
        (json!({ "type": "cosign", "keyPath": pair.folder.path("key.pem") }), "no public key in PEM"),
        (json!({ "type": "cosign", "keyPath": two }), "more than one public key"),
        (json!({ "type": "cosign", "keyPath": small.public() }), "an RSA key of 1024 bits"),
        (json!({ "type": "cosign", "keyPath": p521.public() }), "P-256 and P-384 only"),
        (json!({ "type": "cosign", "keyPath": key, "keypath": key }), "unknown member \"keypath\""),
        (
            json!({ "type": "cosign", "keyPath": key, "signedIdentity": { "type": "x" } }),
            "[0].signedIdentity.type: \"x\" is not known",
        ),
        (json!({ "type": "notation" }), "rootPath, rootPaths, rootData or rootDatas: missing"),
        (json!({ "type": "notation", "rootPath": key }), "0 certificates in PEM"),
    ] {
        let place = "transports.docker[\"reg.io\"]";
        let text = json!({ "default": [{ "type": "reject" }], "transports": { "docker": { "reg.io": [requirement] } } });
        let problem = parse(&text.to_string(), &read).expect_err(words);
        assert!(problem.starts_with(place) && problem.contains(words), "{problem}: {words}");
    }
    for (text, words) in [
        ("", "EOF"),
        ("[]", "an object"),
        ("{}", "default: missing"),
        (r#"{"default":[]}"#, "default: a list of 1 to 64"),
        (r#"{"default":[{"type":"reject"}],"x":1}"#, "unknown member \"x\""),
        (r#"{"default":[{"type":"reject"}],"transports":{"docker":{"a":[],"a":[]}}}"#, "is there twice"),
        ("{\n\"default\": [{\"type\":\"reject\"},\n]}", "line 3"),
        (
            r#"{"default":[{"type":"reject"}],"transports":{"atomic":{"a":[{"type":"x"}]}}}"#,
            "transports.atomic[\"a\"][0].type",
        ),
    ] {
        let problem = parse(text, &read).expect_err(words);
        assert!(problem.contains(words), "{text}: {problem}");
    }
    let many = (0..3000).map(|number| {
        (format!("reg.io/{number}"), json!([{ "type": "notation", "rootPath": chain.root_path() }]))
    });
    let docker: serde_json::Map<_, _> = many.collect();
    let text = json!({ "default": [{ "type": "reject" }], "transports": { "docker": docker } });
    assert!(parse(&text.to_string(), &read).unwrap_err().contains("with its keys, at most"));
}

#[test]
fn an_unsupported_rule_refuses_only_the_images_that_it_governs() {
    let text = json!({
        "default": [{ "type": "insecureAcceptAnything" }],
        "transports": { "docker": {
            "a.io": [{ "type": "signedBy", "keyType": "GPGKeys", "keyPath": "/absent" }],
            "b.io": [{ "type": "sigstoreSigned", "fulcio": { "caPath": "/absent" }, "rekorPublicKeyPath": "/absent" }],
        }, "docker-daemon": { "": [{ "type": "insecureAcceptAnything" }] } },
    });
    let policy = parse(&text.to_string(), &read).unwrap();
    let unsupported = policy.unsupported();
    assert_eq!(unsupported.len(), 2, "{unsupported:?}");
    assert!(
        unsupported.iter().any(|text| text.contains("\"a.io\"") && text.contains("OpenPGP")),
        "{unsupported:?}"
    );
    let explained = |name: &str| policy.rule(Some(&Name::parse(name).unwrap())).explain().join("");
    assert!(explained("a.io/x").starts_with("signedBy: refused: "));
    assert!(explained("b.io/x").contains("fulcio"));
    assert_eq!(explained("c.io/x"), "insecureAcceptAnything");
}

/// An archive of docker has no manifest, and an image of an earlier time no stored signature: what requires none still applies.
#[test]
fn without_a_document_only_what_needs_no_signature_is_accepted() {
    let pair = Pair::p256();
    let key = json!({ "type": "cosign", "keyPath": pair.public() });
    for (requirements, expected) in [
        (json!([{ "type": "insecureAcceptAnything" }]), Ok(1)),
        (json!([{ "type": "insecureAcceptAnything" }, key]), Err("rule default[1], cosign: no manifest")),
        (json!([key]), Err("rule default[0], cosign: no manifest")),
        (json!([{ "type": "reject" }]), Err("rule default[0], reject: every image is refused")),
        (json!([{ "type": "signedBy" }]), Err("rule default[0], signedBy: signatures of OpenPGP")),
    ] {
        let policy = parse(&json!({ "default": requirements }).to_string(), &read).unwrap();
        match (policy.rule(None).judge_unsigned("no manifest"), expected) {
            (Ok(verdict), Ok(count)) => assert_eq!((verdict.signed.len(), verdict.by.len()), (count, 0)),
            (Err(refusal), Err(words)) => assert!(refusal.to_string().starts_with(words), "{refusal}"),
            (judged, _) => panic!("{requirements}: {judged:?}"),
        }
    }
}

#[test]
fn explanations_name_keys_and_roots() {
    let (pair, chain) = (Pair::p256(), Chain::p256());
    let data = data_encoding::BASE64.encode(&pair.folder.read("key.pub"));
    let text = json!({ "default": [
        { "type": "cosign", "keyPaths": [pair.public()], "rekorPublicKeyData": data },
        { "type": "sigstoreSigned", "keyDatas": [data] },
        { "type": "notation", "rootPaths": [chain.root_path()] },
    ] });
    let policy = parse(&text.to_string(), &read).unwrap();
    let explained = policy.rule(Some(&Name::parse("x").unwrap())).explain();
    assert!(
        explained[0].contains(&pair.public()) && explained[0].contains("in a log of rekorPublicKeyData"),
        "{explained:?}"
    );
    assert!(
        explained[0].ends_with("MatchRepository (not of bundles)")
            && explained[1].contains("MatchRepoDigestOrExact"),
        "{explained:?}"
    );
    assert!(explained[2].contains(&chain.root_path()), "{explained:?}");
}

/// The files with which a fuzz target begins, and those that it found, see tests/fuzz.
#[test]
fn the_corpus_of_the_fuzz_target_is_read_or_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/policy");
    let mut count = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        assert!(parse(&text, &read).is_err() && Name::parse(&text).is_err());
        count += 1;
    }
    assert!(count > 0);
}

/// The bytes that a worker receives are those of the daemon, but a damaged record is no policy.
#[test]
fn damaged_policies_are_refused() {
    let policy = parse(r#"{"default":[{"type":"reject"}]}"#, &read).unwrap();
    let bytes = policy.to_bytes();
    assert_eq!(Policy::from_bytes(&bytes), Ok(policy));
    for end in 0..bytes.len() {
        assert!(Policy::from_bytes(&bytes[..end]).is_err(), "{end}");
    }
}
