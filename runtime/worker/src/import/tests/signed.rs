//! Archives are judged by the policy before anything of them is unpacked.

use std::process::{Command, Stdio};

use coracle_job::ImagePolicy;
use data_encoding::BASE64;
use serde_json::{Value, json};

use super::*;

const SIMPLE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

/// Imports an archive by a policy; returns the tags of the images, or the kind and text of the failure.
fn import(scratch: &Scratch, policy: &Value, bytes: &[u8]) -> Result<Vec<String>, (FailureKind, String)> {
    let tags = |records: Vec<ImageRecord>| records.into_iter().flat_map(|record| record.tags).collect();
    records(scratch, policy, bytes, true).map(tags)
}

/// Imports an archive by a policy; returns the records.
fn records(
    scratch: &Scratch,
    policy: &Value,
    bytes: &[u8],
    keep_blobs: bool,
) -> Result<Vec<ImageRecord>, (FailureKind, String)> {
    let archive = scratch.0.join("archive");
    std::fs::write(&archive, bytes).unwrap();
    let read = |path: &str| std::fs::read(path).map_err(|error| error.to_string());
    let signatures = coracle_signature::parse(&policy.to_string(), &read).unwrap().to_bytes().into();
    let job = ImportJob {
        root: scratch.0.join("root"),
        source: ImportSource::Archive(archive),
        limits: Limits::default(),
        keep_blobs,
        is_background: false,
        serves_neighbours: false,
        policy: Some(ImagePolicy { bytes: signatures, minimum_time: String::new() }),
    };
    let imported = run(&job, &mut |_, _| ());
    imported.map(|(records, _)| records).map_err(|failure| (failure.kind, failure.message))
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

/// The files of an OCI layout to which signatures are attached.
struct Layout {
    files: Vec<(String, Vec<u8>)>,
    index: Value,
}

impl Layout {
    fn of(archive: &[u8]) -> Self {
        let mut files: Vec<(String, Vec<u8>)> = Vec::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.push((entry.path().unwrap().display().to_string(), bytes));
        }
        let index = serde_json::from_slice(&files[0].1).unwrap();
        Self { files, index }
    }

    /// Digest of the first image.
    fn digest(&self) -> String {
        self.index["manifests"][0]["digest"].as_str().unwrap().to_owned()
    }

    fn tag(&self) -> String {
        format!("{}.sig", self.digest().replace(':', "-"))
    }

    fn blob(&mut self, bytes: &[u8]) -> String {
        let digest = digest_of(bytes);
        self.files.push((format!("blobs/sha256/{}", &digest[7..]), bytes.to_vec()));
        digest
    }

    /// Adds a manifest to the index, with this name.
    fn attach(&mut self, name: &str, manifest: &Value) {
        let bytes = manifest.to_string().into_bytes();
        let digest = self.blob(&bytes);
        self.index["manifests"].as_array_mut().unwrap().push(json!({
            "digest": digest, "size": bytes.len(),
            "annotations": { "org.opencontainers.image.ref.name": name },
        }));
    }

    /// A layer with cosign's signature of the first image.
    fn signature(&mut self, scratch: &Scratch, name: &str) -> Value {
        let payload = json!({
            "critical": {
                "identity": { "docker-reference": name }, "image": { "docker-manifest-digest": self.digest() },
                "type": "cosign container image signature",
            },
            "optional": null,
        });
        let payload = payload.to_string().into_bytes();
        let paths = ["key.pem", "payload"].map(|name| scratch.0.join(name).display().to_string());
        std::fs::write(&paths[1], &payload).unwrap();
        let signature = BASE64.encode(&openssl(&["dgst", "-sha256", "-sign", &paths[0], &paths[1]]));
        json!({
            "mediaType": SIMPLE, "digest": self.blob(&payload), "size": payload.len(),
            "annotations": { "dev.cosignproject.cosign/signature": signature },
        })
    }

    fn archive(&self) -> Vec<u8> {
        let mut files = self.files.clone();
        files[0].1 = self.index.to_string().into_bytes();
        tar_of(&files)
    }
}

/// Adds cosign's signature of the first image to an OCI layout, as tools that copy a repository do.
fn signed(scratch: &Scratch, archive: &[u8], name: &str) -> Vec<u8> {
    let mut layout = Layout::of(archive);
    let layer = layout.signature(scratch, name);
    layout.attach(&layout.tag(), &json!({ "layers": [layer] }));
    layout.archive()
}

/// A key, and the policy by which all images need its signature.
fn key(scratch: &Scratch) -> Value {
    let [secret, public] = ["key.pem", "key.pub"].map(|name| scratch.0.join(name).display().to_string());
    openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &secret]);
    openssl(&["pkey", "-in", &secret, "-pubout", "-out", &public]);
    json!({ "default": [{ "type": "cosign", "keyPath": public }] })
}

#[test]
fn signatures_inside_of_an_oci_layout_are_verified_and_stored_as_root() {
    let scratch = Scratch::new("signed");
    let policy = key(&scratch);
    let plain = oci(ARCHITECTURE, false);
    let (_, text) = import(&scratch, &policy, &plain).unwrap_err();
    assert!(text.contains("has no signature"), "{text}");
    let (_, text) = import(&scratch, &policy, &signed(&scratch, &plain, "reg.example/other")).unwrap_err();
    assert!(text.contains("which signedIdentity does not accept"), "{text}");
    assert_eq!(layers(&scratch), 0);
    let archive = signed(&scratch, &plain, "reg.example/app");
    let imported = records(&scratch, &policy, &archive, true).unwrap();
    assert_eq!(imported[0].tags, ["reg.example/app:1"]);
    assert_eq!(imported[0].digests.len(), 1, "the name by digest is accepted, too");
    assert_eq!(std::fs::read_dir(scratch.0.join("root/images/signatures")).unwrap().count(), 1);
}

/// Whatever an archive has beside a signature does not make the signature worthless.
#[test]
fn one_attachment_that_is_wrong_hides_no_other_as_root() {
    let scratch = Scratch::new("beside");
    let policy = key(&scratch);
    let plain = oci(ARCHITECTURE, false);
    let long = vec![b' '; 200 << 10];
    let bundle = "application/vnd.dev.sigstore.bundle.v0.3+json";
    for broken in [
        json!({ "mediaType": SIMPLE, "digest": digest_of(b"absent"), "size": 6 }),
        json!({ "mediaType": SIMPLE, "digest": "../../x", "size": 1 }),
        json!({ "mediaType": SIMPLE, "digest": digest_of(&long), "size": long.len() }),
        json!({ "mediaType": SIMPLE, "digest": digest_of(&long), "size": 5 }),
        json!({ "mediaType": SIMPLE, "digest": 5 }),
        json!("no layer"),
    ] {
        let mut layout = Layout::of(&plain);
        layout.blob(&long);
        let subject = json!({ "digest": layout.digest() });
        let refers = json!({ "artifactType": bundle, "subject": subject, "layers": [broken] });
        layout.attach("", &refers);
        layout.attach(&layout.tag(), &json!({ "layers": [broken] }));
        layout.attach(&layout.tag(), &json!({ "layers": "no list" }));
        let (kind, text) = import(&scratch, &policy, &layout.archive()).unwrap_err();
        assert!(kind == FailureKind::Signature && text.contains("has no signature; "), "{broken}: {text}");
        let good = layout.signature(&scratch, "reg.example/app");
        layout.attach(&layout.tag(), &json!({ "layers": [broken, good] }));
        assert_eq!(import(&scratch, &policy, &layout.archive()), Ok(vec!["reg.example/app:1".to_owned()]));
    }
}

/// Nothing of such an archive has a digest that could have been signed, also if a manifest is written for it here.
#[test]
fn an_archive_of_docker_is_refused_where_a_signature_is_needed_as_root() {
    let scratch = Scratch::new("docker-signed");
    let policy = key(&scratch);
    for keep_blobs in [true, false] {
        let refused = records(&scratch, &policy, &docker(&[(ARCHITECTURE, "app")]), keep_blobs);
        let (kind, text) = refused.unwrap_err();
        assert!(kind == FailureKind::Signature && text.contains("use an OCI layout"), "{text}");
        assert_eq!(layers(&scratch), 0);
        let accepted = json!({ "default": [{ "type": "insecureAcceptAnything" }] });
        let scratch = Scratch::new("docker-accepted");
        assert_eq!(
            records(&scratch, &accepted, &docker(&[(ARCHITECTURE, "app")]), keep_blobs).unwrap().len(),
            1
        );
    }
}

/// A tag is accepted, and the name by digest, which the image would get with it, is not.
#[test]
fn a_digest_gets_no_name_that_the_policy_refuses_as_root() {
    let scratch = Scratch::new("by-digest");
    let by = |default: &str| {
        json!({
            "default": [{ "type": default }],
            "transports": { "docker": {
                "reg.example/app:1": [{ "type": "insecureAcceptAnything" }],
                "reg.example/app": [{ "type": "reject" }],
            } },
        })
    };
    let imported = records(&scratch, &by("reject"), &oci(ARCHITECTURE, false), true).unwrap();
    assert_eq!(
        (&imported[0].tags[..], &imported[0].digests[..]),
        (&["reg.example/app:1".to_owned()][..], &[][..])
    );
}

/// An image without a name has no scope: not that of any registry, and not that of all.
#[test]
fn an_image_without_a_name_is_judged_by_the_default_as_root() {
    let scratch = Scratch::new("unnamed");
    let by = |default: &str, all: &str| {
        json!({
            "default": [{ "type": default }],
            "transports": { "docker": { "": [{ "type": all }], "localhost": [{ "type": all }] } },
        })
    };
    let mut layout = Layout::of(&oci(ARCHITECTURE, false));
    layout.index["manifests"][0].as_object_mut().unwrap().remove("annotations");
    let unnamed = layout.archive();
    let (_, text) = import(&scratch, &by("reject", "insecureAcceptAnything"), &unnamed).unwrap_err();
    assert!(text.contains("an image without a name: rule default[0], reject"), "{text}");
    assert_eq!(import(&scratch, &by("insecureAcceptAnything", "reject"), &unnamed), Ok(Vec::new()));
}

/// In docker's format, too: a name with a digest there is no tag, and the image is published without it.
#[test]
fn an_image_without_a_name_that_it_would_get_is_judged_by_the_default_as_root() {
    let scratch = Scratch::new("no-tag");
    let policy = json!({
        "default": [{ "type": "reject" }],
        "transports": { "docker": { "accept.io": [{ "type": "insecureAcceptAnything" }] } },
    });
    let by_digest = format!("accept.io/x@{}", digest_of(b"x"));
    let (_, text) = import(&scratch, &policy, &docker(&[(ARCHITECTURE, &by_digest)])).unwrap_err();
    assert!(text.contains("an image without a name: rule default[0], reject"), "{text}");
    let accepted = import(&scratch, &policy, &docker(&[(ARCHITECTURE, "accept.io/x:1")]));
    assert_eq!(accepted, Ok(vec!["accept.io/x:1".to_owned()]));
}

#[test]
fn the_number_of_entries_examined_is_limited_as_root() {
    let scratch = Scratch::new("many-entries");
    let policy = key(&scratch);
    let mut layout = Layout::of(&oci(ARCHITECTURE, false));
    let absent = json!({ "digest": digest_of(b"absent"), "size": 6 });
    layout.index["manifests"].as_array_mut().unwrap().extend(vec![absent; 20_000]);
    let (_, text) = import(&scratch, &policy, &layout.archive()).unwrap_err();
    assert!(text.contains("of 20001 entries 1024 are looked at"), "{text}");
}

/// Docker writes an archive as an OCI layout, too. The reason is that of the layout, which may have signatures.
#[test]
fn an_archive_in_both_formats_is_refused_for_what_its_layout_lacks_as_root() {
    let scratch = Scratch::new("both-signed");
    let policy = key(&scratch);
    let mut layout = Layout::of(&oci(ARCHITECTURE, false));
    let config = json!([{ "Config": "absent", "RepoTags": ["reg.example/app:1"], "Layers": [] }]);
    layout.files.push(("manifest.json".to_owned(), config.to_string().into_bytes()));
    let (kind, text) = import(&scratch, &policy, &layout.archive()).unwrap_err();
    assert!(kind == FailureKind::Signature && text.contains("has no signature"), "{text}");
}
