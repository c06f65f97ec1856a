//! Public keys of a policy: ECDSA with P-256 and P-384, Ed25519, and RSA from 2048 to 8192 bits. All arithmetic is ring's. A key is
//! checked when the policy is read, so that a key that can verify nothing is a mistake of the policy and not of each pull.

use ring::digest::{Digest, SHA256, digest};
use ring::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use super::der::{INTEGER, OBJECT_ID, SEQUENCE, Value};
use super::json::Problem;

/// Object identifiers of keys (RFC 5480, RFC 8017, RFC 8410) and curves.
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
const P384: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x22];
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
const ED25519: &[u8] = &[0x2b, 0x65, 0x70];

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
        let malformed = || "the key is malformed".to_owned();
        let outer = Value::only(der, SEQUENCE).and_then(|outer| outer.parts()).ok_or_else(malformed)?;
        let [algorithm, bits] = outer[..] else { return Err(malformed()) };
        let identifiers = algorithm.parts().filter(|_| algorithm.tag == SEQUENCE).ok_or_else(malformed)?;
        let object = |index: usize| {
            identifiers.get(index).filter(|value| value.tag == OBJECT_ID).map(|value| value.content)
        };
        let kind = match (object(0), object(1)) {
            (Some(EC_PUBLIC_KEY), Some(P256)) => Kind::P256,
            (Some(EC_PUBLIC_KEY), Some(P384)) => Kind::P384,
            (Some(EC_PUBLIC_KEY), _) => return Err("ECDSA is supported with P-256 and P-384 only".to_owned()),
            (Some(ED25519), _) => Kind::Ed25519,
            (Some(RSA), _) => Kind::Rsa,
            _ => return Err("the key is not of ECDSA, Ed25519 or RSA".to_owned()),
        };
        let bits = bits.bits().ok_or_else(malformed)?;
        let mut modulus_bits = 0;
        if kind == Kind::Rsa {
            let numbers =
                Value::only(bits, SEQUENCE).and_then(|numbers| numbers.parts()).ok_or_else(malformed)?;
            let modulus = numbers.first().filter(|value| value.tag == INTEGER).ok_or_else(malformed)?.content;
            let modulus = modulus.strip_prefix(&[0]).unwrap_or(modulus);
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
