//! Chains of certificates up to a root of the policy. webpki verifies them; this module adds the rules of notation's specification that
//! webpki has not: each certificate of the chain is valid now, also the root, and the first one may sign documents.
//!
//! Nothing is requested, so revocation is not checked.

use std::time::Duration;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::der::{
    BOOLEAN, EXTENSIONS, GENERALIZED_TIME, OBJECT_ID, OCTET_STRING, SEQUENCE, UTC_TIME, VERSION, Value,
};
use super::json::Problem;
use super::policy::Root;
use super::time::{date, of_certificate};

/// Maximum number of certificates in a chain.
const CERTIFICATES_MAX: usize = 8;
/// Maximum number of roots in one file.
const ROOTS_MAX: usize = 64;

/// `id-kp-codeSigning` and `id-ce-keyUsage` (RFC 5280, sections 4.2.1.12 and 4.2.1.3).
const CODE_SIGNING: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x03];
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
/// The bit `digitalSignature`, the first one.
const DIGITAL_SIGNATURE: u8 = 0x80;

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
    if !Fields::read(first)?.may_sign {
        return Err("the certificate may not sign documents: its key usage lacks digitalSignature".to_owned());
    }
    let first = CertificateDer::from(first.as_slice());
    let certificate = EndEntityCert::try_from(&first).map_err(|error| format!("certificate: {error}"))?;
    let others: Vec<CertificateDer<'_>> =
        others.iter().map(|der| CertificateDer::from(der.as_slice())).collect();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
    let mut problem = webpki::Error::UnknownIssuer;
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
            Ok(_) => return Fields::read(&root.der)?.is_valid(now).map(|()| root),
            Err(webpki::Error::UnknownIssuer) => {}
            Err(error) => problem = error,
        }
    }
    Err(match problem {
        webpki::Error::UnknownIssuer => "its chain of certificates leads to no root of the policy".to_owned(),
        webpki::Error::CaUsedAsEndEntity => "its certificate is that of an authority".to_owned(),
        error => format!("its chain of certificates is refused: {error}"),
    })
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
    /// Whether the key may make signatures of documents.
    may_sign: bool,
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
        let may_sign = match extensions {
            Some(extensions) => may_sign(Value::only(extensions.content, SEQUENCE)?)?,
            None => false,
        };
        Some(Self { key: key.whole, not_before: time(not_before)?, not_after: time(not_after)?, may_sign })
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

/// Whether the key usage, which notation requires, has the bit for signatures of documents; `None` if an extension is malformed.
fn may_sign(extensions: Value<'_>) -> Option<bool> {
    for extension in extensions.parts()? {
        let parts = extension.parts()?;
        let (id, value) = match parts[..] {
            [id, value] => (id, value),
            [id, critical, value] if critical.tag == BOOLEAN => (id, value),
            _ => return None,
        };
        if (id.tag, id.content) == (OBJECT_ID, KEY_USAGE) && value.tag == OCTET_STRING {
            // A bit string: the number of unused bits, then the bits.
            let (usage, _) = Value::take(value.content)?;
            return Some(usage.content.get(1).is_some_and(|bits| bits & DIGITAL_SIGNATURE != 0));
        }
    }
    Some(false)
}
