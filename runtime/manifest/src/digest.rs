//! Digests as text.

use coracle_job::Failure;
use sha2::{Digest, Sha256};

/// The digest `sha256:HEX` of bytes.
pub fn digest_of(bytes: &[u8]) -> String {
    digest_text(&Sha256::digest(bytes))
}

/// The text `sha256:HEX` of a computed hash.
pub fn digest_text(hash: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::from("sha256:");
    for byte in hash {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The hexadecimal digits of a `sha256:` digest: the only external data that becomes part of a path.
///
/// # Errors
/// The text is not such a digest.
pub fn hex(digest: &str) -> Result<&str, Failure> {
    let digits = digest.strip_prefix("sha256:").filter(|_| coracle_reference::is_digest(digest));
    digits.ok_or_else(|| Failure::invalid(format!("{digest:?} is not a sha256 digest")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_digests_become_paths() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(hex(&good).unwrap(), "0a".repeat(32));
        for bad in ["", "sha256:", "sha256:../../x", "sha512:00", &good.to_uppercase(), &good[..70]] {
            assert!(hex(bad).is_err(), "{bad:?}");
        }
    }
}
