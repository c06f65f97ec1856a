//! Sigstore's bundles, which cosign attaches as referrers: a signature with its entries of a transparency log in one document
//! (sigstore/protobuf-specs, version 0.3), an envelope of DSSE with a statement of in-toto. Verified with public keys only; those with a
//! `messageSignature` are refused.
//!
//! The statement names the digest of the image and no repository: a key whose bundles are accepted for one repository accepts them for
//! all for which it is configured. A rule that states a `signedIdentity` accepts none.

use super::image::{Document, Found};
use super::json::{Members, Problem};
use super::log::{Entry, Kind, Logged};
use super::policy::KeyRule;
use super::simple::signer;

/// Beginning of the media type of a bundle, and of the artifact type of its manifest.
pub const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle";
/// The type of an envelope's payload, and of the statement in it.
const STATEMENT: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// The statement by which cosign signs an image. Those of other types are about images, too, but sign none: lists of contents, scans.
pub const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";
/// The annotation of a bundle's manifest with the type of its statement.
pub const PREDICATE: &str = "dev.sigstore.bundle.predicateType";
/// The reason why no bundle meets a rule that states a name.
pub(crate) const NO_REPOSITORY: &str = "names no repository, which signedIdentity needs";
/// Maximum number of entries of logs in one bundle.
const ENTRIES_MAX: usize = 8;

/// Verifies one bundle as a signature of `document`; returns the key, and the log if one is needed, as text for users.
///
/// # Errors
/// The reason why the rule does not accept it.
pub(crate) fn verify(rule: &KeyRule, document: &Document<'_>, found: &Found) -> Result<String, Problem> {
    if !rule.accepts_bundles() {
        return Err(format!("it {NO_REPOSITORY}"));
    }
    let mut members = Members::parse_bytes(&found.content)?;
    let media_type = members.need_text("mediaType")?;
    if !media_type.starts_with(BUNDLE_TYPE) {
        return Err(format!("the document is of media type {media_type:?}, not a bundle"));
    }
    let mut material = members.object("verificationMaterial")?;
    if material.take("certificate").is_some() || material.take("x509CertificateChain").is_some() {
        return Err("it was made with a certificate; only public keys are supported".to_owned());
    }
    let entries = material.list("tlogEntries")?.unwrap_or_default();
    let envelope = members.need("dsseEnvelope")?;
    let envelope = Envelope::read(envelope).map_err(|problem| format!("dsseEnvelope: {problem}"))?;
    let key = signer(rule, &envelope.signed(), &envelope.signature)?;
    let logged = Logged { kind: Kind::Dsse, key, signature: &envelope.signature, payload: &envelope.payload };
    let log = logged_in(rule, &entries, &logged)?;
    envelope.is_about(document)?;
    Ok(format!("key {}{log}", key.name))
}

/// The signed bytes of a bundle, and their signature; `None` if it is malformed.
pub(crate) fn signature(found: &Found) -> Option<[Vec<u8>; 2]> {
    let envelope = Members::parse_bytes(&found.content).ok()?.take("dsseEnvelope")?;
    let envelope = Envelope::read(envelope).ok()?;
    Some([envelope.signed(), envelope.signature])
}

/// Verifies that a log has the signature, if the rule needs one; returns the log as text for users.
fn logged_in(rule: &KeyRule, entries: &[&str], logged: &Logged<'_>) -> Result<String, Problem> {
    if rule.logs.is_empty() {
        return Ok(String::new());
    }
    let mut problem = "no entry of a transparency log".to_owned();
    for entry in entries.iter().take(ENTRIES_MAX) {
        match Entry::of_bundle(entry).and_then(|entry| entry.verify(&rule.logs, logged)) {
            Ok(log) => return Ok(log),
            Err(why) => problem = why,
        }
    }
    Err(problem)
}

/// An envelope of DSSE with one signature.
struct Envelope {
    payload_type: String,
    payload: Vec<u8>,
    signature: Vec<u8>,
}

impl Envelope {
    fn read(text: &str) -> Result<Self, Problem> {
        let mut members = Members::parse(text)?;
        let signatures = members.list("signatures")?.unwrap_or_default();
        let [signature] = signatures[..] else {
            return Err(format!("{} signatures, not one", signatures.len()));
        };
        Ok(Self {
            payload_type: members.need_text("payloadType")?,
            payload: members.bytes("payload")?,
            signature: Members::parse(signature)?.bytes("sig")?,
        })
    }

    /// The bytes that are signed (DSSE, "Pre-Authentication Encoding").
    fn signed(&self) -> Vec<u8> {
        let kind = &self.payload_type;
        let head = format!("DSSEv1 {} {kind} {} ", kind.len(), self.payload.len());
        [head.as_bytes(), &self.payload].concat()
    }

    /// Checks that the payload is the statement that signs `document`.
    fn is_about(&self, document: &Document<'_>) -> Result<(), Problem> {
        if self.payload_type != STATEMENT {
            return Err(format!("its payload is of type {:?}, not {STATEMENT:?}", self.payload_type));
        }
        let mut statement =
            Members::parse_bytes(&self.payload).map_err(|problem| format!("payload: {problem}"))?;
        let kinds = (statement.need_text("_type")?, statement.need_text("predicateType")?);
        if kinds != (STATEMENT_TYPE.to_owned(), SIGNED.to_owned()) {
            return Err(format!("its statement is of type {:?}, which does not sign an image", kinds.1));
        }
        let wanted = document.digest.strip_prefix("sha256:").ok_or("the document has no digest of sha256")?;
        let mut signed = Vec::new();
        for subject in statement.list("subject")?.unwrap_or_default() {
            signed.extend(Members::parse(subject)?.object("digest")?.text("sha256")?);
        }
        match signed.iter().any(|signed| signed == wanted) {
            true => Ok(()),
            false => Err(format!(
                "it is the signature of sha256:{}, not of {}",
                signed.join(", "),
                document.digest
            )),
        }
    }
}
