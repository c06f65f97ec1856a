//! Verifies what webpki does not: that the certificate of a server which says that it is an authority (CA:TRUE) was
//! signed by a trusted one. It reads the fields of X.509 (RFC 5280, section 4.1) that this needs.

use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm};
use webpki::EndEntityCert;

/// DER tags.
const OBJECT_ID: u8 = 0x06;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const SEQUENCE: u8 = 0x30;
/// The field `extensions`, `[3] EXPLICIT`.
const EXTENSIONS: u8 = 0xa3;

/// `id-ce-extKeyUsage`, `id-kp-serverAuth` and `anyExtendedKeyUsage`.
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
const SERVER_AUTH: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];
const ANY_USAGE: &[u8] = &[0x55, 0x1d, 0x25, 0x00];

/// Object identifiers of algorithms with their names, for errors.
const NAMES: [(&[u8], &str); 12] = [
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x04], "RSA with MD5"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x05], "RSA with SHA-1"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0a], "RSA-PSS"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0b], "RSA with SHA-256"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01], "RSA"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x01], "ECDSA with SHA-1"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02], "ECDSA with SHA-256"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x03], "ECDSA with SHA-384"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x04], "ECDSA with SHA-512"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01], "ECDSA"),
    (&[0x2b, 0x65, 0x71], "Ed448"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x38, 0x04, 0x03], "DSA"),
];

/// The name of an `AlgorithmIdentifier`, whose bytes are without the outer tag and length.
pub(super) fn algorithm_name(identifier: &[u8]) -> String {
    let id =
        Value::take(identifier).filter(|(value, _)| value.tag == OBJECT_ID).map(|(value, _)| value.content);
    let known = NAMES.iter().find(|(known, _)| Some(*known) == id);
    known.map_or_else(|| format!("an unknown algorithm ({identifier:02x?})"), |(_, name)| (*name).to_owned())
}

/// A value of DER.
struct Value<'a> {
    tag: u8,
    content: &'a [u8],
    /// The content with tag and length.
    whole: &'a [u8],
}

impl<'a> Value<'a> {
    /// Takes one value off the front of `bytes`; returns the rest, too. `None` if it is malformed, or longer than
    /// 64 KiB.
    fn take(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (&tag, rest) = bytes.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match (first, rest) {
            (0..=0x7f, rest) => (usize::from(first), rest),
            (0x81, [one, rest @ ..]) => (usize::from(*one), rest),
            (0x82, [one, two, rest @ ..]) => (usize::from(u16::from_be_bytes([*one, *two])), rest),
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        Some((Self { tag, content, whole: &bytes[..bytes.len() - rest.len()] }, rest))
    }

    /// The values that make up the content of one; the list ends at a malformed one.
    fn parts(content: &'a [u8]) -> impl Iterator<Item = Value<'a>> {
        let mut rest = content;
        std::iter::from_fn(move || {
            let (value, after) = Self::take(rest)?;
            rest = after;
            Some(value)
        })
    }
}

/// The parts of a certificate.
pub(super) struct Certificate<'a> {
    /// The signed part.
    signed: Value<'a>,
    /// The algorithm of the signature, without tag and length.
    algorithm: &'a [u8],
    signature: &'a [u8],
}

impl<'a> Certificate<'a> {
    /// `None` if the certificate is malformed.
    pub(super) fn parse(der: &'a CertificateDer<'_>) -> Option<Self> {
        let (outer, rest) = Value::take(der)?;
        let mut parts = Value::parts(outer.content);
        let (signed, algorithm, signature) = (parts.next()?, parts.next()?, parts.next()?);
        let is_whole = rest.is_empty() && parts.next().is_none();
        let tags = [outer.tag, signed.tag, algorithm.tag, signature.tag];
        // A bit string begins with the number of unused bits.
        let signature = signature.content.strip_prefix(&[0])?;
        let is_right = is_whole && tags == [SEQUENCE, SEQUENCE, SEQUENCE, BIT_STRING];
        is_right.then_some(Self { signed, algorithm: algorithm.content, signature })
    }

    /// Whether the purposes of the certificate, if it names some, include servers.
    pub(super) fn is_for_servers(&self) -> bool {
        let extensions = Value::parts(self.signed.content).filter(|field| field.tag == EXTENSIONS);
        let lists = extensions.flat_map(|field| Value::parts(field.content));
        let usages = lists.flat_map(|list| Value::parts(list.content)).filter(|extension| {
            Value::take(extension.content).is_some_and(|(id, _)| id.content == EXTENDED_KEY_USAGE)
        });
        usages.into_iter().all(|usage| {
            let value = Value::parts(usage.content).find(|part| part.tag == OCTET_STRING);
            let list = value.and_then(|value| Some(Value::take(value.content)?.0));
            let is_server = |purpose: Value<'_>| [SERVER_AUTH, ANY_USAGE].contains(&purpose.content);
            list.is_some_and(|list| Value::parts(list.content).any(is_server))
        })
    }

    /// Whether the key of `issuer` made the signature.
    pub(super) fn is_signed_by(
        &self,
        issuer: &CertificateDer<'_>,
        algorithms: &[&dyn SignatureVerificationAlgorithm],
    ) -> bool {
        let Ok(anchor) = webpki::anchor_from_trusted_cert(issuer) else { return false };
        // Names are constrained by webpki only.
        let Some(issuer) = EndEntityCert::try_from(issuer).ok().filter(|_| anchor.name_constraints.is_none())
        else {
            return false;
        };
        algorithms
            .iter()
            .filter(|algorithm| algorithm.signature_alg_id().as_ref() == self.algorithm)
            .any(|algorithm| issuer.verify_signature(*algorithm, self.signed.whole, self.signature).is_ok())
    }
}
