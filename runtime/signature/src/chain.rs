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

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::der::{
    BIT_STRING, BOOLEAN, EXTENSIONS, GENERALIZED_TIME, INTEGER, OBJECT_ID, OCTET_STRING, SEQUENCE, UTC_TIME,
    VERSION, Value,
};
use super::json::Problem;
use super::policy::Root;
use super::time::{date, of_certificate};

/// Maximum number of certificates in a chain.
const CERTIFICATES_MAX: usize = 8;
/// Maximum number of roots in one file.
const ROOTS_MAX: usize = 64;

/// `id-kp-codeSigning` (RFC 5280, section 4.2.1.12).
const CODE_SIGNING: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x03];
/// Purposes that a signer must not have beside it: `serverAuth`, `clientAuth`, `emailProtection`, `timeStamping`, `OCSPSigning`, any.
const OTHER_PURPOSES: [&[u8]; 6] = [
    &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01],
    &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x02],
    &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x04],
    &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x08],
    &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x09],
    &[0x55, 0x1d, 0x25, 0x00],
];
/// Extensions (RFC 5280, section 4.2.1): `keyUsage`, `basicConstraints`, `extKeyUsage`.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
/// Bits of the key usage, which has nine, the first one on the left.
const DIGITAL_SIGNATURE: u16 = 0x8000;
const CONTENT_COMMITMENT: u16 = 0x4000;
const KEY_CERT_SIGN: u16 = 0x0400;
/// The value `true` of a boolean in DER.
const TRUE: &[u8] = &[0xff];

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
        let usage = KeyUsage::required_if_present(CODE_SIGNING);
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
        Self::parse(certificate).ok_or_else(|| "a certificate is malformed".to_owned())
    }

    fn parse(certificate: &'a [u8]) -> Option<Self> {
        let parts = Value::only(certificate, SEQUENCE)?.parts()?;
        let fields = parts.first()?.parts()?;
        let fields: Vec<_> = fields.into_iter().skip_while(|field| field.tag == VERSION).collect();
        // Serial number, algorithm, issuer, times, subject, key, and then optional fields.
        let [_, _, _, times, _, key, more @ ..] = &fields[..] else { return None };
        let times = times.parts()?;
        let [not_before, not_after] = times[..] else { return None };
        let time = |value: Value<'_>| match value.tag {
            UTC_TIME => of_certificate(value.content, false),
            GENERALIZED_TIME => of_certificate(value.content, true),
            _ => None,
        };
        let extensions = more.iter().find(|field| field.tag == EXTENSIONS);
        let uses = match extensions {
            Some(extensions) => Uses::parse(Value::only(extensions.content, SEQUENCE)?)?,
            None => Uses::default(),
        };
        Some(Self { key: key.whole, not_before: time(not_before)?, not_after: time(not_after)?, uses })
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
    /// Reads the extensions; `None` if one is malformed.
    fn parse(extensions: Value<'a>) -> Option<Self> {
        let mut uses = Self::default();
        for extension in extensions.parts()? {
            let parts = extension.parts()?;
            let (id, value, is_critical) = match parts[..] {
                [id, value] => (id, value, false),
                [id, critical, value] if critical.tag == BOOLEAN => (id, value, critical.content == TRUE),
                _ => return None,
            };
            if id.tag != OBJECT_ID || value.tag != OCTET_STRING {
                return None;
            }
            match id.content {
                // A bit string: the number of unused bits, then the bits.
                KEY_USAGE => {
                    let usage = Value::only(value.content, BIT_STRING)?;
                    let byte = |index: usize| usage.content.get(index).copied().unwrap_or(0);
                    uses.key = if is_critical { u16::from_be_bytes([byte(1), byte(2)]) } else { 0 };
                }
                EXTENDED_KEY_USAGE => {
                    let purposes = Value::only(value.content, SEQUENCE)?.parts()?;
                    uses.purposes = purposes.into_iter().map(|purpose| purpose.content).collect();
                }
                BASIC_CONSTRAINTS => {
                    let constraints = Value::only(value.content, SEQUENCE)?.parts()?;
                    let first = constraints.first();
                    uses.is_authority =
                        first.is_some_and(|value| value.tag == BOOLEAN && value.content == TRUE);
                    let number = constraints.iter().find(|value| value.tag == INTEGER);
                    uses.path_max = number.and_then(|number| small(number.content));
                }
                _ => {}
            }
        }
        Some(uses)
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
        match self.purposes.iter().any(|purpose| OTHER_PURPOSES.contains(purpose)) {
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

/// A number of at most eight bytes without a sign; a longer one limits nothing.
fn small(content: &[u8]) -> Option<u64> {
    let digits = content.strip_prefix(&[0]).unwrap_or(content);
    (digits.len() <= 8).then(|| digits.iter().fold(0, |number, digit| number << 8 | u64::from(*digit)))
}
