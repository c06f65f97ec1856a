//! Archives are judged by the policy before anything of them is unpacked.

use std::process::{Command, Stdio};

use coracle_job::ImagePolicy;
use data_encoding::BASE64;
use serde_json::{Value, json};

use super::*;

const SIMPLE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

/// Imports an archive by a policy; returns the tags of the images, or the kind and text of the failure.
fn import(scratch: &Scratch, policy: &Value, bytes: &[u8]) -> Result<Vec<String>, (FailureKind, String)> {
    let archive = scratch.0.join("archive");
    std::fs::write(&archive, bytes).unwrap();
    let read = |path: &str| std::fs::read(path).map_err(|error| error.to_string());
    let signatures = coracle_signature::parse(&policy.to_string(), &read).unwrap().to_bytes();
    let job = ImportJob {
        root: scratch.0.join("root"),
        source: ImportSource::Archive(archive),
        limits: Limits::default(),
        keep_blobs: true,
        is_background: false,
        policy: Some(ImagePolicy { signatures: Some(signatures), ..ImagePolicy::default() }),
    };
    let imported = run(&job, None, &mut |_, _| ());
    imported
        .map(|(records, _)| records.into_iter().flat_map(|record| record.tags).collect())
        .map_err(|failure| (failure.kind, failure.message))
}

fn layers(scratch: &Scratch) -> usize {
    std::fs::read_dir(scratch.0.join("root/layers")).map_or(0, Iterator::count)
}

#[test]
fn the_name_of_an_image_selects_the_rule_as_root() {
    let scratch = Scratch::new("rules");
    let by = |scope: &str, default: &str| {
        json!({
            "default": [{ "type": default }],
            "transports": { "docker": { scope: [{ "type": "reject" }] } },
        })
    };
    let archive = oci(ARCHITECTURE, false);
    for (policy, rule) in [
        (by("none.example", "reject"), "rule default[0], reject"),
        (by("reg.example", "insecureAcceptAnything"), "rule transports.docker[\"reg.example\"][0]"),
        (
            by("reg.example/app:1", "insecureAcceptAnything"),
            "rule transports.docker[\"reg.example/app:1\"][0]",
        ),
    ] {
        let (kind, text) = import(&scratch, &policy, &archive).unwrap_err();
        assert!(kind == FailureKind::Signature && text.contains(rule), "{text}");
        assert_eq!((layers(&scratch), scratch.rests().len()), (0, 0));
    }
    // A name without a tag is that of the tag `latest`.
    let latest = by("docker.io/library/app:latest", "insecureAcceptAnything");
    let (_, text) = import(&scratch, &latest, &docker(&[(ARCHITECTURE, "app")])).unwrap_err();
    assert!(text.contains("app:latest"), "{text}");
    // One image of an archive that is refused costs the others nothing.
    let two = docker(&[(ARCHITECTURE, "app:latest"), (ARCHITECTURE, "other:1")]);
    assert_eq!(import(&scratch, &latest, &two), Ok(vec!["other:1".to_owned()]));
    let accepted = import(&scratch, &by("none.example", "insecureAcceptAnything"), &archive);
    assert_eq!(accepted, Ok(vec!["reg.example/app:1".to_owned()]));
}

fn openssl(words: &[&str]) -> Vec<u8> {
    let output = Command::new("openssl").args(words).stderr(Stdio::null()).output().expect("openssl runs");
    assert!(output.status.success(), "openssl {words:?}");
    output.stdout
}

/// Adds cosign's signature of the first image to an OCI layout, as tools that copy a repository do.
fn signed(scratch: &Scratch, archive: &[u8], name: &str) -> Vec<u8> {
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.push((entry.path().unwrap().display().to_string(), bytes));
    }
    let mut index: Value = serde_json::from_slice(&files[0].1).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let payload = json!({
        "critical": {
            "identity": { "docker-reference": name }, "image": { "docker-manifest-digest": digest },
            "type": "cosign container image signature",
        },
        "optional": null,
    });
    let payload = payload.to_string().into_bytes();
    let paths = ["key.pem", "payload"].map(|name| scratch.0.join(name).display().to_string());
    std::fs::write(&paths[1], &payload).unwrap();
    let signature = BASE64.encode(&openssl(&["dgst", "-sha256", "-sign", &paths[0], &paths[1]]));
    let layer = json!({
        "mediaType": SIMPLE, "digest": digest_of(&payload), "size": payload.len(),
        "annotations": { "dev.cosignproject.cosign/signature": signature },
    });
    let manifest =
        json!({ "config": { "digest": digest, "size": 2 }, "layers": [layer] }).to_string().into_bytes();
    let tag = format!("{}.sig", digest.replace(':', "-"));
    index["manifests"].as_array_mut().unwrap().push(json!({
        "digest": digest_of(&manifest), "size": manifest.len(),
        "annotations": { "org.opencontainers.image.ref.name": tag },
    }));
    files[0].1 = index.to_string().into_bytes();
    for blob in [payload, manifest] {
        files.push((format!("blobs/sha256/{}", &digest_of(&blob)[7..]), blob));
    }
    tar_of(&files)
}

#[test]
fn signatures_inside_of_an_oci_layout_are_verified_and_stored_as_root() {
    let scratch = Scratch::new("signed");
    let [secret, public] = ["key.pem", "key.pub"].map(|name| scratch.0.join(name).display().to_string());
    openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &secret]);
    openssl(&["pkey", "-in", &secret, "-pubout", "-out", &public]);
    let policy = json!({ "default": [{ "type": "cosign", "keyPath": public }] });
    let plain = oci(ARCHITECTURE, false);
    let (_, text) = import(&scratch, &policy, &plain).unwrap_err();
    assert!(text.contains("has no signature"), "{text}");
    let (_, text) = import(&scratch, &policy, &signed(&scratch, &plain, "reg.example/other")).unwrap_err();
    assert!(text.contains("which signedIdentity does not accept"), "{text}");
    assert_eq!(layers(&scratch), 0);
    let archive = signed(&scratch, &plain, "reg.example/app");
    assert_eq!(import(&scratch, &policy, &archive), Ok(vec!["reg.example/app:1".to_owned()]));
    assert_eq!(std::fs::read_dir(scratch.0.join("root/images/signatures")).unwrap().count(), 1);
}
