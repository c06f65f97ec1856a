//! Images that cosign and notation signed, with their own programs and against a registry, are pulled by the policies that name their keys;
//! the same signatures do not serve other keys.

use std::path::Path;
use std::process::{Command, Output};

use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::signing::policy;
use serde_json::{Value, json};

/// Runs a program in a folder that is its home, too; it must succeed.
fn run(folder: &Path, program: &str, words: &[&str]) -> Output {
    let output = Command::new(program)
        .args(words)
        .current_dir(folder)
        .env("HOME", folder)
        .env("XDG_CONFIG_HOME", folder.join("config"))
        .env("COSIGN_PASSWORD", "")
        .env("COSIGN_YES", "true")
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; `tests/tools/install signers` brings it"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {words:?}: {said}");
    output
}

/// The flags by which cosign signs without any service, in its newest format, and in the one before.
const BUNDLE: [&str; 3] = ["--use-signing-config=false", "--tlog-upload=false", "--new-bundle-format=true"];
const SIMPLE: [&str; 3] = ["--use-signing-config=false", "--tlog-upload=false", "--new-bundle-format=false"];

fn cosign(folder: &Path, flags: &[&str], signed: &str) {
    cosign_by(folder, "cosign.key", flags, signed);
}

fn cosign_by(folder: &Path, key: &str, flags: &[&str], signed: &str) {
    let sign = ["sign", "--key", key, "--allow-insecure-registry", "--allow-http-registry"];
    run(folder, "cosign", &[&sign, flags, &[signed]].concat());
}

/// A node whose policy is this one for all images.
fn node(folder: &Path, requirement: Value) -> Node {
    let config = policy(folder, &json!({ "default": [requirement] }));
    Node::with(Options { config, ..Options::default() })
}

#[test]
#[ignore = "needs cosign and notation: make test-all PARTS=signatures"]
fn images_that_cosign_signed_are_pulled_in_both_formats() {
    let fixture = Node::start();
    let folder = fixture.folder();
    let registry = Registry::start(folder);
    run(folder, "cosign", &["generate-key-pair"]);
    let key = folder.join("cosign.pub").display().to_string();
    let node = node(folder, json!({ "type": "cosign", "keyPath": key }));
    for (repository, flags) in [("bundle", BUNDLE), ("simple", SIMPLE)] {
        let digest = registry.push(&Image::probe(&fixture.probe(), repository), repository, "1");
        let name = registry.name(repository, "1");
        let refused = node.pull_image(pull(&name)).expect_err("refused");
        assert!(refused.message().contains("has no signature"), "{refused}");
        cosign(folder, &flags, &format!("{}/{repository}@{digest}", registry.address()));
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{repository}: {error}"));
    }
    node.stop();
    // By another key.
    std::fs::remove_file(folder.join("cosign.pub")).expect("removed");
    std::fs::remove_file(folder.join("cosign.key")).expect("removed");
    run(folder, "cosign", &["generate-key-pair"]);
    let node = self::node(folder, json!({ "type": "cosign", "keyPath": key }));
    for repository in ["bundle", "simple"] {
        let refused = node.pull_image(pull(&registry.name(repository, "1"))).expect_err("refused");
        assert!(refused.message().contains("it was not made by"), "{refused}");
    }
    node.stop();
    fixture.stop();
}

/// Keys that openssl made and cosign imported; the policy has the public key itself. The pull of an image that another of the keys
/// signed is refused, and of what a key of Ed25519 signed, because cosign makes signatures of Ed25519ph (RFC 8032) by it, which are
/// not supported.
#[test]
#[ignore = "needs cosign and notation: make test-all PARTS=signatures"]
fn keys_of_each_algorithm_count_for_what_they_signed() {
    let fixture = Node::start();
    let folder = fixture.folder();
    let registry = Registry::start(folder);
    let kinds: [(&str, &[&str]); 5] = [
        ("p256", &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]),
        ("p384", &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"]),
        ("ed25519", &["ED25519"]),
        ("rsa2048", &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"]),
        ("rsa4096", &["RSA", "-pkeyopt", "rsa_keygen_bits:4096"]),
    ];
    let mut signed = Vec::new();
    for (kind, words) in kinds {
        let file = format!("{kind}.pem");
        run(folder, "openssl", &[&["genpkey", "-out", &file, "-algorithm"], words].concat());
        run(folder, "cosign", &["import-key-pair", "--key", &file, "--output-key-prefix", kind]);
        let public = std::fs::read(folder.join(format!("{kind}.pub"))).expect("cosign writes it");
        let names = [("bundle", BUNDLE), ("simple", SIMPLE)].map(|(format, flags)| {
            let repository = format!("{kind}-{format}");
            let digest = registry.push(&Image::probe(&fixture.probe(), &repository), &repository, "1");
            let key = format!("{kind}.key");
            cosign_by(folder, &key, &flags, &format!("{}/{repository}@{digest}", registry.address()));
            registry.name(&repository, "1")
        });
        signed.push((kind, data_encoding::BASE64.encode(&public), names));
    }
    for (kind, key, _) in &signed {
        let node = node(folder, json!({ "type": "cosign", "keyData": key }));
        for (other, _, names) in &signed {
            for name in names {
                let is_accepted = kind == other && *kind != "ed25519";
                match node.pull_image(pull(name)) {
                    Ok(_) => assert!(is_accepted, "{name} by {kind}"),
                    Err(refused) => assert!(
                        !is_accepted && refused.message().contains("it was not made by"),
                        "{name} by {kind}: {refused}"
                    ),
                }
            }
        }
        node.stop();
    }
    fixture.stop();
}

/// `sigstoreSigned` is about the manifest of the platform: cosign signs that of an index with `--recursive` only.
#[test]
#[ignore = "needs cosign and notation: make test-all PARTS=signatures"]
fn an_index_is_signed_recursively_for_sigstore_signed() {
    let fixture = Node::start();
    let folder = fixture.folder();
    let registry = Registry::start(folder);
    run(folder, "cosign", &["generate-key-pair"]);
    let key = folder.join("cosign.pub").display().to_string();
    let identity = json!({ "type": "matchRepository" });
    let node = node(folder, json!({ "type": "sigstoreSigned", "keyPath": key, "signedIdentity": identity }));
    let images = [Image::probe(&fixture.probe(), "one")];
    let digest = registry.push_index(&images, "index", "1");
    let (name, signed) = (registry.name("index", "1"), format!("{}/index@{digest}", registry.address()));
    cosign(folder, &SIMPLE, &signed);
    let refused = node.pull_image(pull(&name)).expect_err("refused");
    assert!(refused.message().contains("cosign sign --recursive"), "{refused}");
    cosign(folder, &[&SIMPLE[..], &["--recursive"]].concat(), &signed);
    node.pull_image(pull(&name)).expect("pull");
    node.stop();
    fixture.stop();
}

#[test]
#[ignore = "needs cosign and notation: make test-all PARTS=signatures"]
fn images_that_notation_signed_are_pulled() {
    let fixture = Node::start();
    let folder = fixture.folder();
    let registry = Registry::start(folder);
    let digest = registry.push(&Image::probe(&fixture.probe(), "notation"), "app", "1");
    let signed = format!("{}/app@{digest}", registry.address());
    run(folder, "notation", &["cert", "generate-test", "--default", "coracle.example"]);
    let root = folder.join("config/notation/localkeys/coracle.example.crt").display().to_string();
    let node = node(folder, json!({ "type": "notation", "rootPath": root }));
    let name = registry.name("app", "1");
    for (format, words) in [("cose", Some("COSE")), ("jws", None)] {
        run(folder, "notation", &["sign", "--insecure-registry", "--signature-format", format, &signed]);
        match (node.pull_image(pull(&name)), words) {
            (Ok(_), None) => {}
            (Err(refused), Some(words)) if refused.message().contains(words) => {}
            (answer, _) => panic!("{format}: {answer:?}"),
        }
    }
    node.stop();
    fixture.stop();
}
