//! Registry credentials, and the fields by which requests and files give them. A new method of authentication is a
//! variant of [`Credentials`] and a field of [`AuthFields`] here, and its use where a worker answers a registry's
//! challenge. Neither `Debug` nor any error text contains a part of them.

use std::fmt;

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

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Basic { .. } => "basic",
            Self::Identity(_) => "identity token",
            Self::Bearer(_) => "registry token",
        })
    }
}

/// The fields of the CRI's `AuthConfig`, of `auth` in k3s' `registries.yaml` and of an entry in Docker's
/// `config.json`. An empty field means that it is not set.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct AuthFields {
    /// User name.
    pub username: String,
    /// Password or token; never logged.
    pub password: String,
    /// base64 encoding of `user:password`.
    pub auth: String,
    /// OAuth2 refresh token; never logged.
    pub identity_token: String,
    /// Bearer token; never logged.
    pub registry_token: String,
}

/// The order in which fields are tried if several are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precedence {
    /// The CRI's: user name, `auth`, identity token, registry token.
    Cri,
    /// Docker's: the same fields from the last to the first.
    Docker,
}

impl fmt::Debug for AuthFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::default() { "no credentials" } else { "credentials" })
    }
}

impl AuthFields {
    /// The field that the CRI and k3s call `name`; `None` if there is none.
    pub fn field(&mut self, name: &str) -> Option<&mut String> {
        match name {
            "username" => Some(&mut self.username),
            "password" => Some(&mut self.password),
            "auth" => Some(&mut self.auth),
            "identity_token" => Some(&mut self.identity_token),
            "registry_token" => Some(&mut self.registry_token),
            _ => None,
        }
    }

    /// The field that Docker and podman call `name`; `None` if there is none.
    pub fn docker_field(&mut self, name: &str) -> Option<&mut String> {
        match name {
            "identitytoken" => Some(&mut self.identity_token),
            "registrytoken" => Some(&mut self.registry_token),
            "username" | "password" | "auth" => self.field(name),
            _ => None,
        }
    }

    /// Determines the credentials from the fields that are set.
    ///
    /// # Errors
    /// A reason why `auth` is invalid, which contains no part of it.
    pub fn credentials(&self, precedence: Precedence) -> Result<Credentials, &'static str> {
        let set = |field: &str| (!field.is_empty()).then(|| field.to_owned());
        let password = self.password.clone();
        let methods = [
            set(&self.username).map(|username| Ok(Credentials::Basic { username, password })),
            set(&self.auth).map(|auth| Credentials::from_auth(&auth)),
            set(&self.identity_token).map(|token| Ok(Credentials::Identity(token))),
            set(&self.registry_token).map(|token| Ok(Credentials::Bearer(token))),
        ];
        let mut methods = methods.into_iter().flatten();
        let used = match precedence {
            Precedence::Cri => methods.next(),
            Precedence::Docker => methods.next_back(),
        };
        used.unwrap_or(Ok(Credentials::None))
    }
}

impl Credentials {
    /// Decodes base64 of `user:password`, the format of the field `auth` in Docker's `config.json` and in the
    /// CRI's AuthConfig.
    ///
    /// # Errors
    /// A reason that contains no part of the credentials.
    fn from_auth(auth: &str) -> Result<Self, &'static str> {
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
    use super::{AuthFields, Credentials, Precedence, decode_base64};

    #[test]
    fn of_several_fields_the_cri_uses_the_first_and_docker_the_last() {
        let mut fields = AuthFields::default();
        let mut used = Vec::new();
        for name in ["username", "auth", "identity_token", "registry_token"] {
            *fields.field(name).expect("a field of the CRI") = "dTpw".to_owned();
            let text = |precedence| format!("{:?}", fields.credentials(precedence).expect("valid"));
            used.push([text(Precedence::Cri), text(Precedence::Docker)]);
        }
        let expected = ["basic", "basic", "identity token", "registry token"];
        assert_eq!(used, expected.map(|docker| ["basic", docker].map(str::to_owned)));
        assert!(matches!(AuthFields::default().credentials(Precedence::Docker), Ok(Credentials::None)));
        assert!(!format!("{fields:?}").contains("dTpw"), "never logged");
    }

    #[test]
    fn each_file_has_names_of_its_own() {
        let mut fields = AuthFields::default();
        for (of_cri, of_docker) in [("identity_token", "identitytoken"), ("registry_token", "registrytoken")]
        {
            assert!(fields.field(of_docker).is_none() && fields.docker_field(of_cri).is_none(), "{of_cri}");
            *fields.docker_field(of_docker).expect("a field of docker") = of_cri.to_owned();
            assert_eq!(fields.field(of_cri).expect("a field of the CRI"), of_cri);
        }
    }

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
