//! Chains of certificates up to a root of the policy. webpki verifies signatures, names, times and purposes; this module adds what it does
//! not look at and notation's specification requires (signature specification, "Certificate Requirements"):
//!
//! - each certificate of the chain is valid now, also the root;
//! - the signer's key usage is critical and has digitalSignature and nothing more, except contentCommitment; its extended key usage has none
//!   of other purposes;
//! - the key usage of each further certificate is critical and has keyCertSign, and its basic constraints CA:TRUE, also those of the root,
//!   which permits as many intermediates.
//!
//! Nothing is requested, so revocation is not checked.

use std::time::Duration;

use der::asn1::{AnyRef, BitStringRef, GeneralizedTime, ObjectIdentifier, OctetStringRef, UtcTime};
use der::{Decode, Reader, SliceReader, Tag, TagMode, TagNumber, Tagged};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::json::Problem;
use super::policy::Root;
use super::time::date;

/// Maximum number of certificates in a chain.
const CERTIFICATES_MAX: usize = 8;
/// Maximum number of roots in one file.
const ROOTS_MAX: usize = 64;

/// `id-kp-codeSigning` (RFC 5280, section 4.2.1.12).
static CODE_SIGNING: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.3");
/// Purposes that a signer must not have beside it: `serverAuth`, `clientAuth`, `emailProtection`, `timeStamping`, `OCSPSigning`, any.
const OTHER_PURPOSES: [ObjectIdentifier; 6] = [
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.1"),
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.2"),
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.4"),
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.8"),
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.9"),
    ObjectIdentifier::new_unwrap("2.5.29.37.0"),
];
/// Extensions (RFC 5280, section 4.2.1): `keyUsage`, `basicConstraints`, `extKeyUsage`.
const KEY_USAGE: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.15");
const BASIC_CONSTRAINTS: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.19");
const EXTENDED_KEY_USAGE: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.37");
/// The field `extensions` of a certificate, `[3] EXPLICIT` (RFC 5280, section 4.1).
const EXTENSIONS: Tag = Tag::ContextSpecific { constructed: true, number: TagNumber(3) };
/// Bits of the key usage, which has nine, the first one on the left.
const DIGITAL_SIGNATURE: u16 = 0x8000;
const CONTENT_COMMITMENT: u16 = 0x4000;
const KEY_CERT_SIGN: u16 = 0x0400;

/// Reads the roots of a file in PEM.
///
/// # Errors
/// There is no certificate, or one that cannot be a root.
pub(crate) fn roots(name: &str, pem: &[u8]) -> Result<Vec<Root>, Problem> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| error.to_string())?;
    if certificates.is_empty() || certificates.len() > ROOTS_MAX {
        return Err(format!(
            "{} certificates in PEM (BEGIN CERTIFICATE), 1 to {ROOTS_MAX} are possible",
            certificates.len()
        ));
    }
    let root = |certificate: CertificateDer<'_>| {
        webpki::anchor_from_trusted_cert(&certificate).map_err(|error| format!("certificate: {error}"))?;
        Fields::read(&certificate)?;
        Ok(Root { name: name.to_owned(), der: certificate.to_vec() })
    };
    certificates.into_iter().map(root).collect()
}

/// Verifies a chain, the certificate of the signer first; returns the root that it leads to.
///
/// # Errors
/// The chain leads to no root, or a certificate is not valid at `now` (seconds since 1970), or must not sign documents.
pub(crate) fn verify<'a>(chain: &[Vec<u8>], roots: &'a [Root], now: u64) -> Result<&'a Root, Problem> {
    let Some((first, others)) = chain.split_first().filter(|_| chain.len() <= CERTIFICATES_MAX) else {
        return Err(format!("{} certificates, 1 to {CERTIFICATES_MAX} are possible", chain.len()));
    };
    for certificate in chain {
        Fields::read(certificate)?.is_valid(now)?;
    }
    Fields::read(first)?.uses.may_sign()?;
    for certificate in others {
        Fields::read(certificate)?.uses.may_certify()?;
    }
    let signer = first;
    let first = CertificateDer::from(first.as_slice());
    let certificate = EndEntityCert::try_from(&first).map_err(|error| format!("certificate: {error}"))?;
    let others: Vec<CertificateDer<'_>> =
        others.iter().map(|der| CertificateDer::from(der.as_slice())).collect();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
    let (mut problem, mut of_root) = (webpki::Error::UnknownIssuer, None);
    for root in roots {
        let der = CertificateDer::from(root.der.as_slice());
        let Ok(anchor) = webpki::anchor_from_trusted_cert(&der) else { continue };
        let usage = KeyUsage::required_if_present(CODE_SIGNING.as_bytes());
        let anchors: [TrustAnchor<'_>; 1] = [anchor];
        let verified = certificate.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            &anchors,
            &others,
            time,
            usage,
            None,
            None,
        );
        match verified {
            Ok(path) => match root.permits(signer, path.intermediate_certificates().count() as u64, now) {
                Ok(()) => return Ok(root),
                // There may be a newer one with the same key.
                Err(why) => of_root = Some(why),
            },
            Err(webpki::Error::UnknownIssuer) => {}
            Err(error) => problem = error,
        }
    }
    Err(match problem {
        _ if of_root.is_some() => of_root.unwrap_or_default(),
        webpki::Error::UnknownIssuer => "its chain of certificates leads to no root of the policy".to_owned(),
        webpki::Error::CaUsedAsEndEntity => "its certificate is that of an authority".to_owned(),
        error => format!("its chain of certificates is refused: {error}"),
    })
}

impl Root {
    /// Checks what webpki does not know of a root: that it is valid, and may be the root of a chain with this number of intermediates. A
    /// certificate may also be trusted as that of a signer.
    fn permits(&self, signer: &[u8], intermediates: u64, now: u64) -> Result<(), Problem> {
        let fields = Fields::read(&self.der)?;
        fields.is_valid(now)?;
        if self.der == signer {
            return Ok(());
        }
        fields.uses.may_certify()?;
        match fields.uses.path_max.is_some_and(|max| intermediates > max) {
            true => Err(format!("its root does not permit {intermediates} intermediate certificates")),
            false => Ok(()),
        }
    }
}

/// The key of a certificate, as SubjectPublicKeyInfo in DER.
pub(crate) fn key(certificate: &[u8]) -> Result<Vec<u8>, Problem> {
    Fields::read(certificate).map(|fields| fields.key.to_vec())
}

/// The fields of a certificate that webpki does not say (RFC 5280, section 4.1).
struct Fields<'a> {
    key: &'a [u8],
    not_before: u64,
    not_after: u64,
    uses: Uses<'a>,
}

impl<'a> Fields<'a> {
    fn read(certificate: &'a [u8]) -> Result<Self, Problem> {
        let read = AnyRef::from_der(certificate).and_then(|whole| {
            whole.sequence(|parts| {
                let fields = AnyRef::decode(parts)?.sequence(Self::decode)?;
                // Algorithm and signature, which webpki verifies.
                AnyRef::decode(parts)?;
                AnyRef::decode(parts)?;
                Ok(fields)
            })
        });
        read.map_err(|error: der::Error| format!("a certificate is malformed: {error}"))
    }

    fn decode(fields: &mut SliceReader<'a>) -> der::Result<Self> {
        fields.context_specific::<u8>(TagNumber(0), TagMode::Explicit)?;
        // Serial number, algorithm, issuer.
        for _ in 0..3 {
            AnyRef::decode(fields)?;
        }
        let (not_before, not_after) =
            AnyRef::decode(fields)?.sequence(|times| Ok::<_, der::Error>((time(times)?, time(times)?)))?;
        let _subject = AnyRef::decode(fields)?;
        let key = fields.tlv_bytes()?;
        let mut uses = Uses::default();
        // Identifiers of version 2, and the extensions.
        while !fields.is_finished() {
            let field = AnyRef::decode(fields)?;
            if field.tag() == EXTENSIONS {
                uses = AnyRef::from_der(field.value())?.sequence(Uses::decode)?;
            }
        }
        Ok(Self { key, not_before, not_after, uses })
    }

    fn is_valid(&self, now: u64) -> Result<(), Problem> {
        match now {
            _ if now > self.not_after => Err(format!("a certificate expired on {}", date(self.not_after))),
            _ if now < self.not_before => {
                Err(format!("a certificate is not valid before {}", date(self.not_before)))
            }
            _ => Ok(()),
        }
    }
}

/// A time of a certificate in seconds since 1970 (RFC 5280, section 4.1.2.5).
fn time(times: &mut SliceReader<'_>) -> der::Result<u64> {
    let value = AnyRef::decode(times)?;
    let since_1970 = match value.tag() {
        Tag::UtcTime => value.decode_as::<UtcTime>()?.to_unix_duration(),
        _ => value.decode_as::<GeneralizedTime>()?.to_unix_duration(),
    };
    Ok(since_1970.as_secs())
}

/// The extensions that say what a key may be used for.
#[derive(Default)]
struct Uses<'a> {
    /// The bits of the key usage; 0: there is none, or it is not critical.
    key: u16,
    /// The extended key usage.
    purposes: Vec<&'a [u8]>,
    /// Whether this is the certificate of an authority.
    is_authority: bool,
    /// Maximum number of intermediate certificates below this one; `None`: any.
    path_max: Option<u64>,
}

impl<'a> Uses<'a> {
    fn decode(extensions: &mut SliceReader<'a>) -> der::Result<Self> {
        let mut uses = Self::default();
        while !extensions.is_finished() {
            let (id, is_critical, value) = AnyRef::decode(extensions)?.sequence(|parts| {
                // By its bytes: a private one may be longer than the crate reads.
                let id = AnyRef::decode(parts)?.value();
                let is_critical = Option::<bool>::decode(parts)?.unwrap_or(false);
                Ok::<_, der::Error>((id, is_critical, <&OctetStringRef>::decode(parts)?.as_bytes()))
            })?;
            match id {
                _ if id == KEY_USAGE.as_bytes() => {
                    let bits = BitStringRef::from_der(value)?.raw_bytes();
                    let byte = |index: usize| bits.get(index).copied().unwrap_or(0);
                    uses.key = if is_critical { u16::from_be_bytes([byte(0), byte(1)]) } else { 0 };
                }
                _ if id == EXTENDED_KEY_USAGE.as_bytes() => {
                    let purposes: Vec<AnyRef<'a>> = Vec::from_der(value)?;
                    uses.purposes = purposes.into_iter().map(AnyRef::value).collect();
                }
                _ if id == BASIC_CONSTRAINTS.as_bytes() => AnyRef::from_der(value)?.sequence(|parts| {
                    uses.is_authority = Option::<bool>::decode(parts)?.unwrap_or(false);
                    uses.path_max = Option::<u64>::decode(parts)?;
                    Ok::<_, der::Error>(())
                })?,
                _ => {}
            }
        }
        Ok(uses)
    }

    /// Checks that the key may sign documents, and is restricted to that.
    fn may_sign(&self) -> Result<(), Problem> {
        let wrong = |why: &str| Err(format!("the certificate may not sign documents: {why}"));
        if self.key & DIGITAL_SIGNATURE == 0 {
            return wrong("its key usage lacks digitalSignature, or is not critical");
        }
        if self.key & !(DIGITAL_SIGNATURE | CONTENT_COMMITMENT) != 0 {
            return wrong("its key usage is not digitalSignature alone");
        }
        match self
            .purposes
            .iter()
            .any(|purpose| OTHER_PURPOSES.iter().any(|other| other.as_bytes() == *purpose))
        {
            true => wrong("its extended key usage has other purposes"),
            false => Ok(()),
        }
    }

    /// Checks that the key may sign certificates.
    fn may_certify(&self) -> Result<(), Problem> {
        let wrong = |why: &str| Err(format!("a certificate of its chain may not sign others: {why}"));
        match (self.key & KEY_CERT_SIGN, self.is_authority) {
            (0, _) => wrong("its key usage lacks keyCertSign, or is not critical"),
            (_, false) => wrong("its basic constraints lack CA:TRUE"),
            _ => Ok(()),
        }
    }
}
