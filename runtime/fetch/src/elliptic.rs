//! What ring lacks of the curves of NIST: signatures and the key exchange with P-521, and ECDSA with SHA-512. `openssl`
//! makes such certificates on request, and Go's clients accept them, so registries have them.
//!
//! The additional verification is by RustCrypto's crates, whose code needs 0.1 MB; all that ring knows stays with ring.

use std::fmt;
use std::sync::LazyLock;

use p521::elliptic_curve::sec1::ToSec1Point;
use p521::{PublicKey, SecretKey};
use rustls::crypto::{
    ActiveKeyExchange, CryptoProvider, GetRandomFailed, SharedSecret, SupportedKxGroup,
    WebPkiSupportedAlgorithms, ring,
};
use rustls::ffdhe_groups::FfdheGroup;
use rustls::pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, alg_id};
use rustls::{Error, NamedGroup, PeerMisbehaved, SignatureScheme};
use sha2::{Digest, Sha256, Sha384, Sha512};

/// Length in bytes of a coordinate and of a scalar of P-521.
const P521_BYTES: usize = 66;

/// The provider of ring with these additions. They are last in each order of preference.
pub(super) fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    provider.signature_verification_algorithms = *ALGORITHMS;
    provider.kx_groups.push(&P521Exchange);
    provider
}

#[derive(Clone, Copy, Debug)]
enum Curve {
    P256,
    P384,
    P521,
}

#[derive(Clone, Copy, Debug)]
enum Hash {
    Sha256,
    Sha384,
    Sha512,
}

/// ECDSA with one curve and one hash, as X.509 and TLS encode it.
#[derive(Debug)]
struct Ecdsa(Curve, Hash);

static P256_SHA512: Ecdsa = Ecdsa(Curve::P256, Hash::Sha512);
static P384_SHA512: Ecdsa = Ecdsa(Curve::P384, Hash::Sha512);
static P521_SHA256: Ecdsa = Ecdsa(Curve::P521, Hash::Sha256);
static P521_SHA384: Ecdsa = Ecdsa(Curve::P521, Hash::Sha384);
static P521_SHA512: Ecdsa = Ecdsa(Curve::P521, Hash::Sha512);

/// The algorithms of ring and these. rustls wants them as constants, so they are never freed.
static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
    type Algorithms = Vec<&'static dyn SignatureVerificationAlgorithm>;
    let ring = ring::default_provider().signature_verification_algorithms;
    let more: Algorithms = vec![&P256_SHA512, &P384_SHA512, &P521_SHA256, &P521_SHA384, &P521_SHA512];
    let all: Algorithms = ring.all.iter().copied().chain(more).collect();
    // For TLS 1.2 a scheme stands for its hash with any curve; for TLS 1.3 the first algorithm counts.
    let mut mapping: Vec<(SignatureScheme, &'static [_])> = Vec::new();
    for (scheme, algorithms) in ring.mapping {
        let mut algorithms: Algorithms = algorithms.to_vec();
        match scheme {
            SignatureScheme::ECDSA_NISTP256_SHA256 => algorithms.push(&P521_SHA256),
            SignatureScheme::ECDSA_NISTP384_SHA384 => algorithms.push(&P521_SHA384),
            _ => {}
        }
        mapping.push((*scheme, algorithms.leak()));
    }
    let sha512: Algorithms = vec![&P521_SHA512, &P384_SHA512, &P256_SHA512];
    mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, sha512.leak()));
    WebPkiSupportedAlgorithms { all: all.leak(), mapping: mapping.leak() }
});

impl SignatureVerificationAlgorithm for Ecdsa {
    fn verify_signature(
        &self,
        public_key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        let hash = match self.1 {
            Hash::Sha256 => Sha256::digest(message).to_vec(),
            Hash::Sha384 => Sha384::digest(message).to_vec(),
            Hash::Sha512 => Sha512::digest(message).to_vec(),
        };
        // A hash is a number: zeros in front do not change it, and the crate refuses much shorter ones.
        let mut padded = [0; P521_BYTES];
        padded[P521_BYTES - hash.len()..].copy_from_slice(&hash);
        macro_rules! verify {
            ($curve:ident, $hash:expr) => {{
                use $curve::ecdsa::signature::hazmat::PrehashVerifier;
                let key = $curve::ecdsa::VerifyingKey::from_sec1_bytes(public_key);
                let signature = $curve::ecdsa::Signature::from_der(signature);
                match (key, signature) {
                    (Ok(key), Ok(signature)) => key.verify_prehash($hash, &signature),
                    (Err(error), _) | (_, Err(error)) => Err(error),
                }
            }};
        }
        let verified = match self.0 {
            Curve::P256 => verify!(p256, &hash),
            Curve::P384 => verify!(p384, &hash),
            Curve::P521 => verify!(p521, &padded),
        };
        verified.map_err(|_| InvalidSignature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        match self.0 {
            Curve::P256 => alg_id::ECDSA_P256,
            Curve::P384 => alg_id::ECDSA_P384,
            Curve::P521 => alg_id::ECDSA_P521,
        }
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        match self.1 {
            Hash::Sha256 => alg_id::ECDSA_SHA256,
            Hash::Sha384 => alg_id::ECDSA_SHA384,
            Hash::Sha512 => alg_id::ECDSA_SHA512,
        }
    }
}

/// The key exchange with P-521 (RFC 8446, section 4.2.8.2), for servers that offer no other curve.
#[derive(Debug)]
struct P521Exchange;

impl SupportedKxGroup for P521Exchange {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let mut bytes = [0; P521_BYTES];
        loop {
            ring::default_provider()
                .secure_random
                .fill(&mut bytes)
                .map_err(|GetRandomFailed| Error::FailedToGetRandomBytes)?;
            // A scalar has 521 bits. One in 2^260 is not below the order of the curve.
            bytes[0] &= 1;
            if let Ok(secret) = SecretKey::from_slice(&bytes) {
                let public = secret.public_key().to_sec1_point(false).as_bytes().to_vec();
                return Ok(Box::new(Exchange { secret, public }));
            }
        }
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::secp521r1
    }
}

/// A key exchange in progress.
struct Exchange {
    secret: SecretKey,
    public: Vec<u8>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Exchange")
    }
}

impl ActiveKeyExchange for Exchange {
    fn complete(self: Box<Self>, peer: &[u8]) -> Result<SharedSecret, Error> {
        // Only the uncompressed format is allowed, which begins with 4. The crate refuses points that are not on the
        // curve.
        let peer = Some(peer).filter(|peer| peer.first() == Some(&4)).map(PublicKey::from_sec1_bytes);
        let Some(Ok(peer)) = peer else { return Err(PeerMisbehaved::InvalidKeyShare.into()) };
        Ok(SharedSecret::from(&self.secret.diffie_hellman(&peer).raw_secret_bytes()[..]))
    }

    fn pub_key(&self) -> &[u8] {
        &self.public
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::secp521r1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_an_exchange_have_the_same_secret() {
        let (one, other) = (P521Exchange.start().unwrap(), P521Exchange.start().unwrap());
        let (one_key, other_key) = (one.pub_key().to_vec(), other.pub_key().to_vec());
        assert_eq!(one_key.len(), 1 + 2 * P521_BYTES);
        let secret = one.complete(&other_key).unwrap();
        assert_eq!(secret.secret_bytes(), other.complete(&one_key).unwrap().secret_bytes());
        assert_eq!(secret.secret_bytes().len(), P521_BYTES);
        for refused in [&other_key[..50], &[4; 133], &[]] {
            assert!(P521Exchange.start().unwrap().complete(refused).is_err());
        }
    }
}
