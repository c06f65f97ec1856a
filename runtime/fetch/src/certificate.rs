//! Verifies what webpki does not: that the certificate of a server which says that it is an authority (CA:TRUE) was
//! signed by a trusted one. It reads the fields of X.509 (RFC 5280, section 4.1) that this needs.

use der::asn1::{AnyRef, BitStringRef, ObjectIdentifier, OctetStringRef};
use der::{Decode, Reader, SliceReader, Tag, TagNumber, Tagged};
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm};
use webpki::EndEntityCert;

/// The field `extensions`, `[3] EXPLICIT`.
const EXTENSIONS: Tag = Tag::ContextSpecific { constructed: true, number: TagNumber(3) };

/// `id-ce-extKeyUsage`, `id-kp-serverAuth` and `anyExtendedKeyUsage`.
const EXTENDED_KEY_USAGE: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.37");
const SERVER_AUTH: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.1");
pub(super) const ANY_USAGE: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.37.0");

/// Object identifiers of algorithms with their names, for errors.
const NAMES: [(ObjectIdentifier, &str); 12] = [
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.4"), "RSA with MD5"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.5"), "RSA with SHA-1"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.10"), "RSA-PSS"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.11"), "RSA with SHA-256"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1"), "RSA"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.1"), "ECDSA with SHA-1"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.2"), "ECDSA with SHA-256"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.3"), "ECDSA with SHA-384"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.4"), "ECDSA with SHA-512"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.2.1"), "ECDSA"),
    (ObjectIdentifier::new_unwrap("1.3.101.113"), "Ed448"),
    (ObjectIdentifier::new_unwrap("1.2.840.10040.4.3"), "DSA"),
];

/// The name of an `AlgorithmIdentifier`, whose bytes are without the outer tag and length.
pub(super) fn algorithm_name(identifier: &[u8]) -> String {
    let id = SliceReader::new(identifier).and_then(|mut parts| ObjectIdentifier::decode(&mut parts));
    let Ok(id) = id else { return format!("an unknown algorithm ({identifier:02x?})") };
    let known = NAMES.iter().find(|(known, _)| *known == id);
    known.map_or_else(|| format!("an unknown algorithm ({id})"), |(_, name)| (*name).to_owned())
}

/// The parts of a certificate.
pub(super) struct Certificate<'a> {
    /// The signed part, with tag and length.
    signed: &'a [u8],
    /// The algorithm of the signature, without tag and length.
    algorithm: &'a [u8],
    signature: &'a [u8],
}

impl<'a> Certificate<'a> {
    /// `None` if the certificate is malformed.
    pub(super) fn parse(der: &'a CertificateDer<'_>) -> Option<Self> {
        let parts = |parts: &mut SliceReader<'a>| {
            let signed = parts.tlv_bytes()?;
            let algorithm = AnyRef::decode(parts)?;
            algorithm.tag().assert_eq(Tag::Sequence)?;
            let signature = BitStringRef::decode(parts)?.raw_bytes();
            Ok::<_, der::Error>(Self { signed, algorithm: algorithm.value(), signature })
        };
        AnyRef::from_der(der).and_then(|whole| whole.sequence(parts)).ok()
    }

    /// Whether the purposes of the certificate, if it names some, include servers.
    pub(super) fn is_for_servers(&self) -> bool {
        self.purposes().is_ok_and(|purposes| {
            let is_server =
                |id: &AnyRef<'_>| [SERVER_AUTH, ANY_USAGE].iter().any(|of| of.as_bytes() == id.value());
            purposes.is_none_or(|purposes| purposes.iter().any(is_server))
        })
    }

    /// The purposes of the certificate; `None`: it does not name any.
    fn purposes(&self) -> der::Result<Option<Vec<AnyRef<'a>>>> {
        fn value<'b>(extension: &mut SliceReader<'b>) -> der::Result<Option<&'b [u8]>> {
            // By its bytes: a private one may be longer than the crate reads.
            let id = AnyRef::decode(extension)?;
            let _is_critical = Option::<bool>::decode(extension)?;
            let value = <&OctetStringRef>::decode(extension)?.as_bytes();
            Ok((id.value() == EXTENDED_KEY_USAGE.as_bytes()).then_some(value))
        }
        AnyRef::from_der(self.signed)?.sequence(|fields| {
            let mut found = None;
            while !fields.is_finished() {
                let field = AnyRef::decode(fields)?;
                if field.tag() != EXTENSIONS {
                    continue;
                }
                for extension in Vec::<AnyRef<'_>>::from_der(field.value())? {
                    if let Some(value) = extension.sequence(value)? {
                        found = Some(Vec::from_der(value)?);
                    }
                }
            }
            Ok(found)
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
            .any(|algorithm| issuer.verify_signature(*algorithm, self.signed, self.signature).is_ok())
    }
}
