//! Proof that a request comes from a node of the site, without sending the site's key: an HMAC-SHA256 of the request.
//!
//! ```text
//! 401, WWW-Authenticate: Coracle NONCE          NONCE = age of the server in seconds, HMAC(secret of the server, age)
//! Authorization: Coracle NONCE.PROOF            PROOF = HMAC(key, server's address, NONCE, method, target, range)
//! Coracle-Proof: PROOF                          PROOF = HMAC(key, the request's Authorization, digest of the document or share of a blob)
//! ```
//! The nonce comes from the server, because the clock of a node without a battery may show 1970. The proof covers the server's
//! address, so that a neighbour cannot use what it receives at another one. An attacker who recorded a request may send it again while its
//! nonce is valid, and gets the content that it names, also if the recorded answer was cut off or was that the node did not have it.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_registries::node_file;
use coracle_sandbox::describe_io;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::SCHEME;

/// Minimum length of a key in bytes: 128 bits in hexadecimal digits.
const KEY_BYTES_MIN: usize = 32;
/// Maximum length of a key in bytes; a longer file was probably chosen by mistake.
const KEY_BYTES_MAX: usize = 4096;
/// Time for which a nonce is valid: longer than the pauses between the requests of a pull.
const NONCE_AGE_MAX: Duration = Duration::from_secs(300);
/// Number of hexadecimal digits of the HMAC in a nonce.
const NONCE_DIGITS: usize = 32;

/// The key that the nodes of a site share.
#[derive(Clone, Serialize, Deserialize)]
pub struct SiteKey(Vec<u8>);

/// The parts of a request that a proof covers.
#[derive(Clone, Copy)]
pub struct Signed<'a> {
    /// The address to which the request is sent.
    pub server: SocketAddr,
    /// `GET` or `HEAD`.
    pub method: &'a str,
    /// Path and query.
    pub target: &'a str,
    /// Value of the field `Range`; empty if there is none.
    pub range: &'a str,
}

impl SiteKey {
    /// Reads the key from a file; white space at its ends is not part of it.
    ///
    /// # Errors
    /// The file cannot be read, or its content is too short or too long for a key.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |why: String| format!("{}: {why}", path.display());
        let bytes = node_file::read(path).map_err(|error| wrong(describe_io(&error)))?;
        let key = bytes.trim_ascii();
        match key.len() {
            KEY_BYTES_MIN..=KEY_BYTES_MAX => Ok(Self(key.to_vec())),
            length => {
                Err(wrong(format!("{length} bytes, but a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")))
            }
        }
    }

    fn hmac(&self, nonce: &str, signed: Signed<'_>) -> Option<Hmac<Sha256>> {
        let Signed { server, method, target, range } = signed;
        // A server that listens on [::] sees the addresses of IPv4 in another form, and a zone is local to a node.
        let (address, port) = (server.ip().to_canonical(), server.port());
        let mut hmac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        // No part can contain a line feed: they come from a request's head.
        hmac.update(
            format!("coracle-mirror-1\n{address} {port}\n{nonce}\n{method}\n{target}\n{range}").as_bytes(),
        );
        Some(hmac)
    }

    /// The value of `Authorization` for a request to a server that sent this nonce.
    pub fn authorize(&self, nonce: &str, signed: Signed<'_>) -> String {
        let proof = self.hmac(nonce, signed).map(|hmac| hex(&hmac.finalize().into_bytes()));
        format!("{SCHEME} {nonce}.{}", proof.unwrap_or_default())
    }

    fn answer_hmac(&self, authorization: &str, digest: &str) -> Option<Hmac<Sha256>> {
        let hmac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        Some(hmac.chain_update(format!("coracle-mirror-answer-1\n{authorization}\n{digest}")))
    }

    /// The proof that a node of the site answers a request with the document that has this digest, or with this share of a blob.
    pub fn vouch(&self, authorization: &str, digest: &str) -> String {
        let proof = self.answer_hmac(authorization, digest).map(|hmac| hex(&hmac.finalize().into_bytes()));
        proof.unwrap_or_default()
    }

    /// Whether a node of the site has answered the request with this value of `Authorization` with this document.
    pub fn is_vouched(&self, authorization: &str, digest: &str, proof: &str) -> bool {
        let Ok(proof) = data_encoding::HEXLOWER.decode(proof.as_bytes()) else { return false };
        let hmac = self.answer_hmac(authorization, digest);
        !authorization.is_empty() && hmac.is_some_and(|hmac| hmac.verify_slice(&proof).is_ok())
    }

    /// Whether the value of `Authorization` proves that the sender of the request has the key.
    pub fn verifies(&self, nonces: &Nonces, authorization: &str, signed: Signed<'_>) -> bool {
        let value = authorization.strip_prefix(SCHEME).unwrap_or_default().trim_start();
        let Some((nonce, proof)) = value.split_once('.') else { return false };
        let Ok(proof) = data_encoding::HEXLOWER.decode(proof.as_bytes()) else { return false };
        let is_proof = self.hmac(nonce, signed).is_some_and(|hmac| hmac.verify_slice(&proof).is_ok());
        is_proof && nonces.is_valid(nonce, Instant::now())
    }
}

/// The nonces of one server process. None is stored: each contains its age and an HMAC of it.
pub struct Nonces {
    secret: [u8; 32],
    begun: Instant,
}

impl Nonces {
    /// Chooses a secret.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub fn new() -> Result<Self, String> {
        let mut secret = [0; 32];
        let random = rustls::crypto::ring::default_provider().secure_random;
        random.fill(&mut secret).map_err(|_| "there are no random numbers".to_owned())?;
        Ok(Self { secret, begun: Instant::now() })
    }

    /// A nonce that is valid from `now` on.
    pub fn issue(&self, now: Instant) -> String {
        self.at(now.duration_since(self.begun).as_secs())
    }

    fn at(&self, age: u64) -> String {
        let hmac = Hmac::<Sha256>::new_from_slice(&self.secret).ok();
        let digits = hmac.map(|hmac| hex(&hmac.chain_update(age.to_le_bytes()).finalize().into_bytes()));
        format!("{age}-{}", digits.unwrap_or_default().get(..NONCE_DIGITS).unwrap_or_default())
    }

    fn is_valid(&self, nonce: &str, now: Instant) -> bool {
        let age = nonce.split('-').next().and_then(|age| age.parse().ok());
        let now = now.duration_since(self.begun);
        // The nonce is no secret: it was sent in clear text before.
        age.is_some_and(|age| {
            nonce == self.at(age) && now.saturating_sub(Duration::from_secs(age)) <= NONCE_AGE_MAX
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_vouched_for_its_request_and_its_document_only() {
        let (key, other) = (SiteKey(vec![1; 32]), SiteKey(vec![2; 32]));
        let (authorization, digest) = (key.authorize("5-a", signed("/v2/a/manifests/1")), "sha256:d");
        let proof = key.vouch(&authorization, digest);
        assert!(key.is_vouched(&authorization, digest, &proof));
        assert!(!key.is_vouched(&authorization, "sha256:e", &proof), "another document");
        assert!(!key.is_vouched(&format!("{authorization}0"), digest, &proof), "another request");
        assert!(!other.is_vouched(&authorization, digest, &proof), "another key");
        assert!(!key.is_vouched("", digest, &key.vouch("", digest)), "a request without a proof");
        assert!(!key.is_vouched(&authorization, digest, ""));
    }

    fn signed(target: &str) -> Signed<'_> {
        Signed { server: "10.0.0.2:5000".parse().unwrap(), method: "GET", target, range: "bytes=5-9" }
    }

    #[test]
    fn a_proof_is_valid_for_its_request_its_server_and_its_key_only() {
        let (key, other) = (SiteKey(vec![1; 32]), SiteKey(vec![2; 32]));
        let nonces = Nonces::new().unwrap();
        let nonce = nonces.issue(Instant::now());
        let proof = key.authorize(&nonce, signed("/v2/a/blobs/b"));
        assert!(key.verifies(&nonces, &proof, signed("/v2/a/blobs/b")));
        let mapped = Signed { server: "[::ffff:10.0.0.2]:5000".parse().unwrap(), ..signed("/v2/a/blobs/b") };
        assert!(key.verifies(&nonces, &proof, mapped), "a server on [::]");
        let good = signed("/v2/a/blobs/b");
        for (what, bad) in [
            ("target", signed("/v2/a/blobs/c")),
            ("method", Signed { method: "HEAD", ..good }),
            ("range", Signed { range: "", ..good }),
            ("server", Signed { server: "10.0.0.3:5000".parse().unwrap(), ..good }),
            ("port", Signed { server: "10.0.0.2:5001".parse().unwrap(), ..good }),
        ] {
            assert!(!key.verifies(&nonces, &proof, bad), "{what}");
        }
        assert!(!other.verifies(&nonces, &proof, good), "another key");
        assert!(!key.verifies(&Nonces::new().unwrap(), &proof, good), "another server's nonce");
        for garbage in ["", "Coracle", "Coracle .", "Coracle 0-0.00", "Basic eDp5", &proof[..proof.len() - 2]]
        {
            assert!(!key.verifies(&nonces, garbage, good), "{garbage}");
        }
    }

    #[test]
    fn a_nonce_is_valid_for_some_minutes() {
        let nonces = Nonces::new().unwrap();
        let nonce = nonces.issue(nonces.begun + Duration::from_secs(50));
        let is_valid = |seconds| nonces.is_valid(&nonce, nonces.begun + Duration::from_secs(seconds));
        assert!(is_valid(50) && is_valid(350));
        assert!(!is_valid(351));
        assert!(!nonces.is_valid(&nonce.replace("50-", "51-"), nonces.begun), "a forged age");
    }
}
