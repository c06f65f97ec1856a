//! Credentials on their way from a client or a file to one endpoint. No `Debug` and no error text shows any of their
//! bytes.

use serde::{Deserialize, Serialize};

/// Credentials of one endpoint. Never logged: `Debug` says only which kind.
#[derive(Clone, Default, Serialize, Deserialize)]
pub enum Credentials {
    /// Anonymous.
    #[default]
    None,
    /// User and password: basic, or for the token service.
    Basic {
        /// User.
        username: String,
        /// Password.
        password: String,
    },
    /// OAuth2 refresh token for the token service.
    Identity(String),
    /// A bearer token, used as it is.
    Bearer(String),
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Basic { .. } => "basic",
            Self::Identity(_) => "identity token",
            Self::Bearer(_) => "registry token",
        })
    }
}

impl Credentials {
    /// From base64 of `user:password`, as `config.json` files and the CRI's AuthConfig hold it.
    ///
    /// # Errors
    /// What is wrong with it, in words that show none of it.
    pub fn from_auth(auth: &str) -> Result<Self, &'static str> {
        let bytes = decode_base64(auth).ok_or("not base64")?;
        let text = String::from_utf8(bytes).map_err(|_| "not UTF-8 in base64")?;
        let (username, password) = text.split_once(':').ok_or("no `user:password` in base64")?;
        // Some helpers pad with NULs, which other runtimes trim.
        Ok(Self::Basic { username: username.into(), password: password.trim_end_matches('\0').into() })
    }
}

/// RFC 4648 base64 with the standard alphabet, with or without padding.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_ascii_end().trim_end_matches('=').as_bytes();
    // One digit alone is six bits of a byte.
    if digits.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let mut bits = 0_u32;
        for digit in group {
            bits = bits << 6 | sextet(*digit)?;
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

fn sextet(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::decode_base64;

    #[test]
    fn base64_decodes_the_vectors_of_rfc_4648() {
        let cases = [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE", "fooba"),
            ("Zm9vYmFy\n", "foobar"),
        ];
        for (text, expected) in cases {
            assert_eq!(decode_base64(text).as_deref(), Some(expected.as_bytes()), "{text}");
        }
        for text in ["Z", "Zm9v Zg", "Zm-_", "é"] {
            assert_eq!(decode_base64(text), None, "{text}");
        }
    }
}
