//! Signatures of notation: an envelope in JWS (RFC 7515) with a chain of certificates, about the descriptor of a manifest
//! (notaryproject/specifications, signature envelope and signing scheme `notary.x509`). Envelopes of COSE, the scheme of signing
//! authorities, plugins and timestamps of other authorities are not supported: they are refused with a text, or, for timestamps, not
//! regarded, so that a certificate has to be valid when the signature is verified.
//!
//! The envelope names no repository: a root accepts the same signatures for all repositories for which it is configured.

use data_encoding::BASE64URL_NOPAD;
use ring::signature::{self, VerificationAlgorithm};

use super::chain;
use super::image::{Document, Found};
use super::json::{Members, Problem, base64};
use super::key::{Kind, Parts};
use super::policy::Root;
use super::time::{Clock, date, parse_time};

/// Artifact type of the manifests of signatures.
pub const NOTATION_TYPE: &str = "application/vnd.cncf.notary.signature";
/// Media types of envelopes.
const JWS: &str = "application/jose+json";
const COSE: &str = "application/cose";
/// Media type of the payload.
const PAYLOAD: &str = "application/vnd.cncf.notary.payload.v1+json";
/// Members of the protected header.
const SCHEME: &str = "io.cncf.notary.signingScheme";
const EXPIRY: &str = "io.cncf.notary.expiry";
/// The supported signing scheme.
const X509: &str = "notary.x509";

/// Verifies one signature of `document`; returns the root as text for users.
///
/// # Errors
/// The reason why no root accepts it.
pub(crate) fn verify(
    roots: &[Root],
    document: &Document<'_>,
    found: &Found,
    clock: Clock,
) -> Result<String, Problem> {
    match found.media_type.as_str() {
        JWS => {}
        COSE => {
            return Err("envelopes of COSE are not supported: sign with --signature-format jws".to_owned());
        }
        other => return Err(format!("an envelope of media type {other:?} is not supported")),
    }
    let now = clock.now()?;
    let envelope = Envelope::read(&found.content).map_err(|problem| format!("envelope: {problem}"))?;
    envelope.check_signature()?;
    envelope.check_header(now)?;
    let root = chain::verify(&envelope.chain, roots, now)?;
    is_about(&envelope.payload, document)?;
    Ok(format!("a certificate below {}", root.name))
}

/// The signed bytes of an envelope, and their signature; `None` if it is malformed.
pub(crate) fn signature(found: &Found) -> Option<[Vec<u8>; 2]> {
    let envelope = Envelope::read(&found.content).ok()?;
    Some([envelope.signed.into_bytes(), envelope.signature])
}

/// The parts of an envelope.
struct Envelope {
    /// The text that is signed: header and payload in base64.
    signed: String,
    header: String,
    payload: Vec<u8>,
    signature: Vec<u8>,
    /// Certificates in DER, that of the signer first.
    chain: Vec<Vec<u8>>,
}

impl Envelope {
    fn read(bytes: &[u8]) -> Result<Self, Problem> {
        let mut members = Members::parse_bytes(bytes)?;
        let (header, payload) = (members.need_text("protected")?, members.need_text("payload")?);
        let decode = |name: &str, text: &str| {
            BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|error| format!("{name}: not base64url: {error}"))
        };
        let chain = members.object("header")?.texts("x5c")?.unwrap_or_default();
        Ok(Self {
            header: String::from_utf8(decode("protected", &header)?)
                .map_err(|_| "protected: not UTF-8".to_owned())?,
            payload: decode("payload", &payload)?,
            signature: decode("signature", &members.need_text("signature")?)?,
            chain: chain
                .iter()
                .map(|text| base64(text))
                .collect::<Result<_, _>>()
                .map_err(|problem| format!("x5c: {problem}"))?,
            signed: format!("{header}.{payload}"),
        })
    }

    /// Verifies the signature with the key of the first certificate, which is not trusted yet.
    fn check_signature(&self) -> Result<(), Problem> {
        let algorithm = Members::parse(&self.header)?.need_text("alg")?;
        let key = chain::key(self.chain.first().ok_or("no certificate")?)?;
        let key = Parts::read(&key)?;
        // The key determines the algorithm (signature specification, "Signature Algorithm Requirements").
        let verifier: &'static dyn VerificationAlgorithm =
            match (algorithm.as_str(), key.kind, key.modulus_bits) {
                ("PS256", Kind::Rsa, 2048) => &signature::RSA_PSS_2048_8192_SHA256,
                ("PS384", Kind::Rsa, 3072) => &signature::RSA_PSS_2048_8192_SHA384,
                ("PS512", Kind::Rsa, 4096) => &signature::RSA_PSS_2048_8192_SHA512,
                ("ES256", Kind::P256, _) => &signature::ECDSA_P256_SHA256_FIXED,
                ("ES384", Kind::P384, _) => &signature::ECDSA_P384_SHA384_FIXED,
                _ => {
                    return Err(format!(
                        "the algorithm {algorithm:?} is not supported with the key of its certificate"
                    ));
                }
            };
        match key.verifies(verifier, self.signed.as_bytes(), &self.signature) {
            true => Ok(()),
            false => Err("it was not made with the key of its certificate".to_owned()),
        }
    }

    /// Checks the protected header; refuses critical members that are unknown.
    fn check_header(&self, now: u64) -> Result<(), Problem> {
        let mut header = Members::parse(&self.header)?;
        let kind = header.need_text("cty")?;
        if kind != PAYLOAD {
            return Err(format!("its payload is of type {kind:?}, not {PAYLOAD:?}"));
        }
        let critical = header.texts("crit")?.unwrap_or_default();
        if let Some(unknown) = critical.iter().find(|name| ![SCHEME, EXPIRY].contains(&name.as_str())) {
            return Err(format!("its header needs {unknown:?}, which is not supported"));
        }
        let scheme = header.need_text(SCHEME)?;
        if scheme != X509 || !critical.iter().any(|name| name == SCHEME) {
            return Err(format!("its signing scheme {scheme:?} is not supported, or not declared critical"));
        }
        match header.text(EXPIRY)? {
            None => Ok(()),
            Some(_) if !critical.iter().any(|name| name == EXPIRY) => {
                Err("its expiry is not declared critical".to_owned())
            }
            Some(expiry) => match parse_time(&expiry)? {
                expiry if now >= expiry => Err(format!("the signature expired on {}", date(expiry))),
                _ => Ok(()),
            },
        }
    }
}

/// Checks that a payload is about `document`.
fn is_about(payload: &[u8], document: &Document<'_>) -> Result<(), Problem> {
    let mut members = Members::parse_bytes(payload).map_err(|problem| format!("payload: {problem}"))?;
    let mut target = members.object("targetArtifact")?;
    let digest = target.need_text("digest")?;
    if digest != document.digest {
        return Err(format!("it is the signature of {digest}, not of {}", document.digest));
    }
    let (media_type, size) = (target.need_text("mediaType")?, target.number("size")?);
    if !document.media_type.is_empty() && media_type != document.media_type {
        return Err(format!(
            "it is the signature of a document of type {media_type:?}, not {:?}",
            document.media_type
        ));
    }
    match size == document.bytes.len() as u64 {
        true => Ok(()),
        false => {
            Err(format!("it is the signature of a document of {size} bytes, not {}", document.bytes.len()))
        }
    }
}
