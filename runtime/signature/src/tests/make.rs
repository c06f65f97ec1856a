//! Makes keys, certificates, payloads and signatures.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use coracle_reference::Name;
use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use der::Decode;
use der::asn1::UintRef;
use serde_json::json;

use crate::image::{Document, Found, Image};
use crate::judge::{Refusal, Verdict};
use crate::key::sha256;
use crate::policy::{Policy, parse};
use crate::simple::SIMPLE_SIGNING;
use crate::time::Clock;

/// Media types of an index and of a manifest.
pub(super) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A directory that is removed after the test.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("coracle-signature-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.path(name)
    }

    pub(super) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.join(name)).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs openssl with this input; returns its output.
pub(super) fn openssl(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("openssl");
    let command = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("openssl runs");
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "openssl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// A pair of keys, in files of their folder.
pub(super) struct Pair {
    pub(super) folder: Folder,
    is_ed25519: bool,
}

impl Pair {
    /// Generates a pair of this algorithm: arguments of `openssl genpkey`.
    pub(super) fn of(arguments: &[&str]) -> Self {
        let folder = Folder::new();
        let (secret, public) = (folder.path("key.pem"), folder.path("key.pub"));
        openssl(&[&["genpkey", "-out", &secret], arguments].concat(), b"");
        openssl(&["pkey", "-in", &secret, "-pubout", "-out", &public], b"");
        Self { folder, is_ed25519: arguments.contains(&"ed25519") }
    }

    /// The usual key of cosign.
    pub(super) fn p256() -> Self {
        Self::of(&["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"])
    }

    /// Path of the public key.
    pub(super) fn public(&self) -> String {
        self.folder.path("key.pub")
    }

    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let (secret, input) = (self.folder.path("key.pem"), self.folder.write("message", message));
        match self.is_ed25519 {
            true => openssl(&["pkeyutl", "-sign", "-rawin", "-inkey", &secret, "-in", &input], b""),
            false => openssl(&["dgst", "-sha256", "-sign", &secret, &input], b""),
        }
    }

    /// Signs as a JWS of this algorithm does.
    fn sign_jws(&self, algorithm: &str, message: &[u8]) -> Vec<u8> {
        let (secret, input) = (self.folder.path("key.pem"), self.folder.write("message", message));
        let hash = format!("-sha{}", &algorithm[2..]);
        if algorithm.starts_with("PS") {
            let options = ["-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:digest"];
            return openssl(&[&["dgst", &hash][..], &options, &["-sign", &secret, &input]].concat(), b"");
        }
        let der = openssl(&["dgst", &hash, "-sign", &secret, &input], b"");
        let length = if algorithm == "ES256" { 32 } else { 48 };
        let fixed =
            |number: UintRef<'_>| [&vec![0; length - number.as_bytes().len()], number.as_bytes()].concat();
        Vec::<UintRef<'_>>::from_der(&der).unwrap().into_iter().flat_map(fixed).collect()
    }
}

/// A chain of certificates: a root, perhaps one between, and a pair of keys with a certificate of that.
pub(super) struct Chain {
    pub(super) root: Pair,
    between: Option<Pair>,
    pub(super) leaf: Pair,
}

/// The extensions of the certificate of a signer.
pub(super) const SIGNER: &str = "keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning\n";
/// The extensions of an authority.
pub(super) const AUTHORITY: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n";

/// Gives a pair a certificate with these extensions, of `issuer` or of itself, in the file `cert.pem` of its folder.
fn certify(pair: &Pair, subject: &str, extensions: &str, issuer: Option<&Pair>) {
    let [key, request, out] = ["key.pem", "request.pem", "cert.pem"].map(|name| pair.folder.path(name));
    // Without the extensions of the distribution's configuration.
    let settings = pair.folder.write("req.conf", b"[req]\ndistinguished_name=name\n[name]\n");
    openssl(&["req", "-new", "-key", &key, "-subj", subject, "-config", &settings, "-out", &request], b"");
    let extensions = pair.folder.write("extensions", extensions.as_bytes());
    let of_issuer = |name: &str| issuer.unwrap_or(pair).folder.path(name);
    let (issuer_cert, issuer_key) = (of_issuer("cert.pem"), of_issuer("key.pem"));
    let by = match issuer {
        Some(_) => vec!["-CA", &issuer_cert, "-CAkey", &issuer_key],
        None => vec!["-key", &key],
    };
    let sign = ["x509", "-req", "-in", &request, "-days", "10", "-set_serial", "7", "-extfile", &extensions];
    openssl(&[&sign[..], &by, &["-out", &out]].concat(), b"");
}

impl Chain {
    /// A chain whose last certificate has these extensions; all are valid for ten days.
    pub(super) fn of(algorithm: &[&str], extensions: &str) -> Self {
        Self::made(algorithm, extensions, AUTHORITY, None)
    }

    /// A chain with the extensions of the signer's certificate, of the root's, and of one between, if there is one.
    pub(super) fn made(algorithm: &[&str], signer: &str, root: &str, between: Option<&str>) -> Self {
        let chain =
            Self { root: Pair::p256(), between: between.map(|_| Pair::p256()), leaf: Pair::of(algorithm) };
        certify(&chain.root, "/CN=root", root, None);
        if let (Some(pair), Some(extensions)) = (&chain.between, between) {
            certify(pair, "/CN=between", extensions, Some(&chain.root));
        }
        certify(&chain.leaf, "/CN=signer", signer, Some(chain.between.as_ref().unwrap_or(&chain.root)));
        chain
    }

    /// A chain with P-256.
    pub(super) fn p256() -> Self {
        Self::of(&["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"], SIGNER)
    }

    /// Path of the root.
    pub(super) fn root_path(&self) -> String {
        self.root.folder.path("cert.pem")
    }

    fn der(pair: &Pair) -> String {
        BASE64.encode(&openssl(&["x509", "-in", &pair.folder.path("cert.pem"), "-outform", "DER"], b""))
    }

    /// notation's envelope with this payload and header.
    pub(super) fn envelope(
        &self,
        algorithm: &str,
        header: &serde_json::Value,
        payload: &serde_json::Value,
    ) -> Vec<u8> {
        let encode = |value: &serde_json::Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
        let (protected, payload) = (encode(header), encode(payload));
        let signature = self.leaf.sign_jws(algorithm, format!("{protected}.{payload}").as_bytes());
        let pairs = [Some(&self.leaf), self.between.as_ref(), Some(&self.root)];
        let x5c: Vec<String> = pairs.into_iter().flatten().map(Self::der).collect();
        let signature = BASE64URL_NOPAD.encode(&signature);
        let unprotected = json!({ "x5c": x5c, "io.cncf.notary.signingAgent": "tests" });
        json!({ "payload": payload, "protected": protected, "header": unprotected, "signature": signature })
            .to_string()
            .into_bytes()
    }

    /// notation's signature of a document.
    pub(super) fn signature(&self, algorithm: &str, document: &Document<'_>) -> Found {
        let content = self.envelope(algorithm, &header(algorithm), &target(document));
        notation_found(document.digest, content)
    }
}

/// notation's protected header.
pub(super) fn header(algorithm: &str) -> serde_json::Value {
    json!({
        "alg": algorithm, "cty": "application/vnd.cncf.notary.payload.v1+json",
        "crit": ["io.cncf.notary.signingScheme"], "io.cncf.notary.signingScheme": "notary.x509",
        "io.cncf.notary.signingTime": "2026-01-01T00:00:00Z",
    })
}

/// notation's payload.
pub(super) fn target(document: &Document<'_>) -> serde_json::Value {
    let (digest, size) = (document.digest, document.bytes.len());
    json!({ "targetArtifact": { "mediaType": document.media_type, "digest": digest, "size": size } })
}

pub(super) fn notation_found(digest: &str, content: Vec<u8>) -> Found {
    Found {
        digest: digest.to_owned(),
        place: "referrer".to_owned(),
        is_of_notation: true,
        media_type: "application/jose+json".to_owned(),
        annotations: BTreeMap::new(),
        content,
    }
}

/// A payload of simple signing.
pub(super) fn payload(name: &str, digest: &str) -> Vec<u8> {
    json!({
        "critical": {
            "identity": { "docker-reference": name }, "image": { "docker-manifest-digest": digest },
            "type": "cosign container image signature",
        },
        "optional": null,
    })
    .to_string()
    .into_bytes()
}

/// A signature of simple signing that was found for this digest.
pub(super) fn simple_found(digest: &str, content: Vec<u8>, signature: &[u8]) -> Found {
    let annotation = ("dev.cosignproject.cosign/signature".to_owned(), BASE64.encode(signature));
    Found {
        digest: digest.to_owned(),
        place: "tag".to_owned(),
        is_of_notation: false,
        media_type: SIMPLE_SIGNING.to_owned(),
        annotations: BTreeMap::from([annotation]),
        content,
    }
}

/// cosign's signature of a digest.
pub(super) fn simple(pair: &Pair, name: &str, digest: &str) -> Found {
    let content = payload(name, digest);
    let signature = pair.sign(&content);
    simple_found(digest, content, &signature)
}

/// An envelope of DSSE about this statement; returns it with its payload and signature.
pub(super) fn envelope(pair: &Pair, statement: &serde_json::Value) -> (serde_json::Value, Vec<u8>, Vec<u8>) {
    let (kind, payload) = ("application/vnd.in-toto+json", statement.to_string().into_bytes());
    let head = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len());
    let signature = pair.sign(&[head.as_bytes(), &payload].concat());
    let encoded = BASE64.encode(&signature);
    let envelope = json!({ "payload": BASE64.encode(&payload), "payloadType": kind, "signatures": [{ "sig": encoded }] });
    (envelope, payload, signature)
}

/// cosign's statement about a document.
pub(super) fn statement(digest: &str) -> serde_json::Value {
    let hex = digest.trim_start_matches("sha256:");
    json!({
        "_type": "https://in-toto.io/Statement/v1", "subject": [{ "digest": { "sha256": hex } }],
        "predicateType": "https://sigstore.dev/cosign/sign/v1", "predicate": {},
    })
}

pub(super) fn bundle_found(
    digest: &str,
    content: &serde_json::Value,
    entries: &[serde_json::Value],
) -> Found {
    let mut bundle = json!({
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": { "publicKey": { "hint": "x" }, "tlogEntries": entries },
    });
    bundle.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
    Found {
        digest: digest.to_owned(),
        place: "referrer".to_owned(),
        is_of_notation: false,
        media_type: "application/vnd.dev.sigstore.bundle.v0.3+json".to_owned(),
        annotations: BTreeMap::new(),
        content: bundle.to_string().into_bytes(),
    }
}

/// A transparency log.
pub(super) struct Log(pub(super) Pair);

/// Form in which a log confirms an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Says {
    Promise,
    Proof,
}

impl Log {
    pub(super) fn new() -> Self {
        Self(Pair::p256())
    }

    /// The body of an entry about a signature.
    pub(super) fn body(is_dsse: bool, key: &Pair, payload: &[u8], signature: &[u8]) -> Vec<u8> {
        let hash = json!({ "algorithm": "sha256", "value": HEXLOWER.encode(sha256(payload).as_ref()) });
        let (signature, key) = (BASE64.encode(signature), BASE64.encode(&key.folder.read("key.pub")));
        let body = match is_dsse {
            true => json!({ "apiVersion": "0.0.1", "kind": "dsse", "spec": {
                "envelopeHash": hash, "payloadHash": hash, "signatures": [{ "signature": signature, "verifier": key }],
            } }),
            false => json!({ "apiVersion": "0.0.1", "kind": "hashedrekord", "spec": {
                "data": { "hash": hash }, "signature": { "content": signature, "publicKey": { "content": key } },
            } }),
        };
        body.to_string().into_bytes()
    }

    fn promise(&self, body: &[u8]) -> String {
        let text = format!(
            r#"{{"body":"{}","integratedTime":1767225600,"logID":"abcd","logIndex":7}}"#,
            BASE64.encode(body)
        );
        BASE64.encode(&self.0.sign(text.as_bytes()))
    }

    /// The annotation of a signature of simple signing.
    pub(super) fn annotation(&self, body: &[u8]) -> String {
        let payload = json!({ "body": BASE64.encode(body), "integratedTime": 1_767_225_600, "logIndex": 7, "logID": "abcd" });
        json!({ "SignedEntryTimestamp": self.promise(body), "Payload": payload }).to_string()
    }

    /// An entry of a bundle; the tree has another entry before it.
    pub(super) fn entry(&self, body: &[u8], says: Says) -> serde_json::Value {
        let mut entry = json!({
            "logIndex": "7", "logId": { "keyId": BASE64.encode(&[0xab, 0xcd]) }, "integratedTime": "1767225600",
            "kindVersion": { "kind": "dsse", "version": "0.0.1" }, "canonicalizedBody": BASE64.encode(body),
        });
        let (name, value) = match says {
            Says::Promise => ("inclusionPromise", json!({ "signedEntryTimestamp": self.promise(body) })),
            Says::Proof => {
                let other = sha256(b"\0other");
                let leaf = sha256(&[&[0][..], body].concat());
                let root =
                    BASE64.encode(sha256(&[&[1][..], other.as_ref(), leaf.as_ref()].concat()).as_ref());
                let text = format!("log.example - 1\n2\n{root}\n");
                let signature = BASE64.encode(&[b"hint", &self.0.sign(text.as_bytes())[..]].concat());
                let envelope = format!("{text}\n\u{2014} log.example {signature}\n");
                let hashes = [BASE64.encode(other.as_ref())];
                (
                    "inclusionProof",
                    json!({
                        "logIndex": "1", "treeSize": "2", "rootHash": root, "hashes": hashes,
                        "checkpoint": { "envelope": envelope },
                    }),
                )
            }
        };
        entry.as_object_mut().unwrap().insert(name.to_owned(), value);
        entry
    }
}

/// An image of two platforms: the index, and the manifest of this node.
pub(super) struct Subject {
    name: Name,
    index: (String, Vec<u8>),
    manifest: (String, Vec<u8>),
}

impl Subject {
    pub(super) fn new(name: &str) -> Self {
        let document = |text: &str| {
            let bytes = format!("{text} of {name}").into_bytes();
            (format!("sha256:{}", HEXLOWER.encode(sha256(&bytes).as_ref())), bytes)
        };
        Self { name: Name::parse(name).unwrap(), index: document("index"), manifest: document("manifest") }
    }

    pub(super) fn top(&self) -> Document<'_> {
        Document { digest: &self.index.0, media_type: INDEX, bytes: &self.index.1 }
    }

    pub(super) fn member(&self) -> Document<'_> {
        Document { digest: &self.manifest.0, media_type: MANIFEST, bytes: &self.manifest.1 }
    }

    pub(super) fn judge_at(
        &self,
        policy: &Policy,
        found: &[Found],
        clock: Clock,
    ) -> Result<Verdict, Refusal> {
        let image = Image { name: Some(&self.name), top: self.top(), member: self.member() };
        // As a worker receives it.
        let policy = Policy::from_bytes(&policy.to_bytes()).unwrap();
        policy.rule(Some(&self.name)).judge(&image, found, clock)
    }

    pub(super) fn judge(&self, policy: &Policy, found: &[Found]) -> Result<Verdict, Refusal> {
        self.judge_at(policy, found, now())
    }

    /// Asserts that the image is refused for a reason with these words.
    #[track_caller]
    pub(super) fn is_refused(&self, policy: &Policy, found: &[Found], words: &str) {
        let refusal = self.judge(policy, found).expect_err(words).to_string();
        assert!(refusal.contains(words), "{refusal}");
    }
}

/// The node's time.
pub(super) fn now() -> Clock {
    Clock::new(seconds(), None)
}

pub(super) fn seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
}

/// A policy with these requirements of all images.
pub(super) fn policy(requirements: &serde_json::Value) -> Policy {
    parse(&json!({ "default": requirements }).to_string(), &read).unwrap()
}

pub(super) fn read(path: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| error.to_string())
}
