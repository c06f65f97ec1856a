//! Signatures of images as cosign makes them, by openssl, and the policy that requires them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use data_encoding::BASE64;
use serde_json::{Value, json};

use crate::image::{Image, MANIFEST, descriptor};
use crate::layer::digest;
use crate::registry::Registry;

/// Media type of the payload of a signature that cosign makes.
pub const SIMPLE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

/// A pair of keys, made by openssl.
pub struct Pair(PathBuf);

impl Pair {
    /// Makes new keys: files of this name in `folder`.
    pub fn new(folder: &Path, name: &str) -> Self {
        let pair = Self(folder.join(name));
        let secret = pair.0.with_extension("pem");
        let secret = secret.to_str().expect("a path");
        openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", secret]);
        openssl(&["pkey", "-in", secret, "-pubout", "-out", &pair.public()]);
        pair
    }

    /// Path of the public key.
    pub fn public(&self) -> String {
        self.0.with_extension("pub").display().to_string()
    }

    /// Pushes a signature as cosign does: a layer with the payload below the tag of the digest.
    pub fn sign(&self, registry: &Registry, repository: &str, signed: &str) {
        self.sign_as(&format!("{}/{repository}", registry.address()), registry, repository, signed);
    }

    /// Pushes a signature that has this name.
    pub fn sign_as(&self, name: &str, registry: &Registry, repository: &str, signed: &str) {
        let (manifest, blobs) = self.signature(name, signed);
        blobs.iter().for_each(|blob| registry.push_blob(repository, blob));
        registry.push_manifest(repository, &tag(signed), MANIFEST, &manifest);
    }

    /// An OCI layout of the image with its signature for this name, `REPOSITORY:TAG`.
    pub fn signed_archive(&self, image: &Image, name: &str) -> Vec<u8> {
        let signed = digest(&image.manifest());
        let (repository, _) = name.rsplit_once(':').expect("a tag");
        let (manifest, mut blobs) = self.signature(repository, &signed);
        let mut entry = descriptor(MANIFEST, &manifest);
        entry["annotations"] = json!({ "org.opencontainers.image.ref.name": tag(&signed) });
        blobs.push(manifest);
        image.oci_archive_with(name, &[entry], &blobs)
    }

    /// The manifest of a signature with its blobs.
    fn signature(&self, name: &str, signed: &str) -> (Vec<u8>, Vec<Vec<u8>>) {
        let payload = json!({
            "critical": {
                "identity": { "docker-reference": name }, "image": { "docker-manifest-digest": signed },
                "type": "cosign container image signature",
            },
            "optional": null,
        });
        let payload = payload.to_string().into_bytes();
        let (secret, input) = (self.0.with_extension("pem"), self.0.with_extension("payload"));
        std::fs::write(&input, &payload).expect("a payload");
        let paths = [&secret, &input].map(|path| path.to_str().expect("a path"));
        let signature = BASE64.encode(&openssl(&["dgst", "-sha256", "-sign", paths[0], paths[1]]));
        let config = br#"{"architecture":"","os":"","config":{},"rootfs":{"type":"layers","diff_ids":[]}}"#;
        let mut layer = descriptor(SIMPLE, &payload);
        layer["annotations"] = json!({ "dev.cosignproject.cosign/signature": signature });
        let about = descriptor("application/vnd.oci.image.config.v1+json", config);
        let manifest =
            json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": about, "layers": [layer] });
        (manifest.to_string().into_bytes(), vec![config.to_vec(), payload])
    }
}

/// The tag below which the signatures of a digest are.
fn tag(signed: &str) -> String {
    format!("{}.sig", signed.replace(':', "-"))
}

fn openssl(words: &[&str]) -> Vec<u8> {
    let output = Command::new("openssl").args(words).stderr(Stdio::null()).output().expect("openssl");
    assert!(output.status.success(), "openssl {words:?}");
    output.stdout
}

/// Writes a policy; returns the line of the configuration that names it.
pub fn policy(folder: &Path, text: &Value) -> String {
    let file = folder.join("policy.json");
    std::fs::write(&file, text.to_string()).expect("a policy");
    format!("[image.policy]\nfile = {file:?}\n")
}
