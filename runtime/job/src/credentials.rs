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

/// RFC 4648 base64 with the standard alphabet, with or without padding. Bits behind the last byte are not looked at.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut lenient = data_encoding::BASE64_NOPAD.specification();
    lenient.check_trailing_bits = false;
    let digits = text.trim_ascii_end().trim_end_matches('=');
    lenient.encoding().ok()?.decode(digits.as_bytes()).ok()
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
            ("Zm9vYmF", "fooba"), // bits that no byte has
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
