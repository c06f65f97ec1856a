//! Registry credentials. Neither `Debug` nor any error text contains a part of them.

use serde::{Deserialize, Serialize};

/// Credentials for one registry endpoint. They are never logged: `Debug` prints only the variant's name.
#[derive(Clone, Default, Serialize, Deserialize)]
pub enum Credentials {
    /// No credentials: anonymous access.
    #[default]
    None,
    /// User name and password, for basic authentication or for the token service.
    Basic {
        /// User name.
        username: String,
        /// Password.
        password: String,
    },
    /// OAuth2 refresh token for the token service.
    Identity(String),
    /// A bearer token that is sent unchanged.
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
    /// Decodes base64 of `user:password`, the format of the field `auth` in Docker's `config.json` and in the
    /// CRI's AuthConfig.
    ///
    /// # Errors
    /// A reason that contains no part of the credentials.
    pub fn from_auth(auth: &str) -> Result<Self, &'static str> {
        let bytes = decode_base64(auth).ok_or("not base64")?;
        let text = String::from_utf8(bytes).map_err(|_| "not UTF-8 in base64")?;
        let (username, password) = text.split_once(':').ok_or("no `user:password` in base64")?;
        // Some credential helpers pad with NUL bytes, which other runtimes trim as well.
        Ok(Self::Basic { username: username.into(), password: password.trim_end_matches('\0').into() })
    }
}

/// Decodes base64 (RFC 4648) with the standard alphabet, with or without padding. Trailing bits are ignored.
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
            ("Zm9vYmF", "fooba"), // with trailing bits
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
