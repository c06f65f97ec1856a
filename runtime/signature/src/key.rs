//! Public keys of a policy: ECDSA with P-256 and P-384, Ed25519, and RSA from 2048 to 8192 bits. All arithmetic is ring's. A key is
//! checked when the policy is read, so that a key that can verify nothing is a mistake of the policy and not of each pull.

use der::asn1::{AnyRef, ObjectIdentifier, UintRef};
use der::{Decode, SliceReader};
use ring::digest::{Digest, SHA256, digest};
use ring::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use spki::SubjectPublicKeyInfoRef;

use super::json::Problem;

/// Object identifiers of keys (RFC 5480, RFC 8017, RFC 8410) and curves.
const EC_PUBLIC_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
const P384: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.34");
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");

/// Lengths in bits of RSA keys that ring verifies.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    digest(&SHA256, bytes)
}

/// The kind of a key, which determines how it signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    P256,
    P384,
    Ed25519,
    Rsa,
}

/// The parts of a key's DER.
pub(crate) struct Parts<'a> {
    pub(crate) kind: Kind,
    /// The key as ring expects it: a point, or for RSA the DER of modulus and exponent.
    pub(crate) bits: &'a [u8],
    /// Length of the modulus of RSA in bits, else 0.
    pub(crate) modulus_bits: usize,
}

impl<'a> Parts<'a> {
    /// Reads a SubjectPublicKeyInfo (RFC 5280, section 4.1.2.7).
    ///
    /// # Errors
    /// It is malformed, of an unsupported kind, or too short.
    pub(crate) fn read(der: &'a [u8]) -> Result<Self, Problem> {
        let malformed = |error: der::Error| format!("the key is malformed: {error}");
        let key = SubjectPublicKeyInfoRef::from_der(der).map_err(malformed)?;
        let kind = match (key.algorithm.oid, key.algorithm.parameters_oid().ok()) {
            (EC_PUBLIC_KEY, Some(P256)) => Kind::P256,
            (EC_PUBLIC_KEY, Some(P384)) => Kind::P384,
            (EC_PUBLIC_KEY, _) => return Err("ECDSA is supported with P-256 and P-384 only".to_owned()),
            (ED25519, _) => Kind::Ed25519,
            (RSA, _) => Kind::Rsa,
            _ => return Err("the key is not of ECDSA, Ed25519 or RSA".to_owned()),
        };
        let bits = key.subject_public_key.as_bytes().ok_or("the key is malformed: its bits are not bytes")?;
        let mut modulus_bits = 0;
        if kind == Kind::Rsa {
            let numbers = |parts: &mut SliceReader<'a>| {
                let modulus = UintRef::decode(parts)?.as_bytes();
                UintRef::decode(parts)?;
                Ok(modulus)
            };
            let modulus =
                AnyRef::from_der(bits).and_then(|both| both.sequence(numbers)).map_err(malformed)?;
            modulus_bits = (modulus.len() * 8)
                .saturating_sub(modulus.first().map_or(0, |byte| byte.leading_zeros() as usize));
            if !RSA_BITS.contains(&modulus_bits) {
                return Err(format!("an RSA key of {modulus_bits} bits: 2048 to 8192 are supported"));
            }
        }
        Ok(Self { kind, bits, modulus_bits })
    }

    /// Whether the key made the signature of `message` by this algorithm.
    pub(crate) fn verifies(
        &self,
        algorithm: &'static dyn VerificationAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> bool {
        UnparsedPublicKey::new(algorithm, self.bits).verify(message, signature).is_ok()
    }
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// Path of the key's file, or the name of the member that has it.
    pub(crate) name: String,
    /// The key as SubjectPublicKeyInfo in DER.
    pub(crate) der: Vec<u8>,
}

impl Key {
    /// Reads a key in PEM.
    ///
    /// # Errors
    /// There is no key, several, or one that is not supported.
    pub(crate) fn of_pem(name: &str, pem: &[u8]) -> Result<Self, Problem> {
        let mut keys = SubjectPublicKeyInfoDer::pem_slice_iter(pem);
        let key = match (keys.next(), keys.next()) {
            (Some(Ok(key)), None) => key,
            (Some(Ok(_)), Some(_)) => return Err("more than one public key".to_owned()),
            (Some(Err(error)), _) => return Err(error.to_string()),
            (None, _) => return Err("no public key in PEM (BEGIN PUBLIC KEY)".to_owned()),
        };
        Parts::read(&key)?;
        Ok(Self { name: name.to_owned(), der: key.to_vec() })
    }

    /// Whether this key made the signature of `message`, with SHA-256, and for P-384 also with SHA-384.
    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let Ok(parts) = Parts::read(&self.der) else { return false };
        let algorithms: &[&'static dyn VerificationAlgorithm] = match parts.kind {
            Kind::P256 => &[&signature::ECDSA_P256_SHA256_ASN1],
            Kind::P384 => &[&signature::ECDSA_P384_SHA256_ASN1, &signature::ECDSA_P384_SHA384_ASN1],
            Kind::Ed25519 => &[&signature::ED25519],
            Kind::Rsa => &[&signature::RSA_PKCS1_2048_8192_SHA256],
        };
        algorithms.iter().any(|algorithm| parts.verifies(*algorithm, message, signature))
    }

    /// Whether a text in PEM is this key.
    pub(crate) fn is(&self, pem: &[u8]) -> bool {
        Self::of_pem("", pem).is_ok_and(|key| key.der == self.der)
    }
}
