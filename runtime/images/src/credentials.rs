//! Credentials of a PullImage request (CRI 2.30). They exist only during the pull, in memory and on the
//! worker's standard input: neither `Debug` nor any error text contains a part of them.

use coracle_base::error::{Error, Kind};
use coracle_job::{AuthFields, Credentials, Precedence};

/// The CRI's AuthConfig.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Auth {
    /// URL or host of the registry; empty: any registry.
    pub server_address: String,
    /// The credentials themselves.
    pub fields: AuthFields,
}

impl Auth {
    /// Returns the credentials for `registry` (normalised); none if they are for another registry.
    ///
    /// # Errors
    /// `auth` is not base64 of `user:password`.
    pub(super) fn credentials(&self, registry: &str) -> Result<Credentials, Error> {
        if !self.server_address.is_empty() && host_of(&self.server_address) != host_of(registry) {
            return Ok(Credentials::None);
        }
        let invalid = |why| Error::new(Kind::InvalidArgument, format!("auth.auth: {why}"));
        self.fields.credentials(Precedence::Cri).map_err(invalid)
    }
}

/// Host and port of a URL or of a plain host; all names of Docker Hub are mapped to one.
fn host_of(address: &str) -> String {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].to_ascii_lowercase();
    match host.as_str() {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".into(),
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::Auth;
    use coracle_job::{AuthFields, Credentials};

    fn text(credentials: &Credentials) -> String {
        match credentials {
            Credentials::None => "none".into(),
            Credentials::Basic { username, password } => format!("{username} {password}"),
            Credentials::Identity(token) => format!("identity {token}"),
            Credentials::Bearer(token) => format!("bearer {token}"),
        }
    }

    #[test]
    fn the_first_field_that_is_set_is_used() {
        let auth = |set: fn(&mut AuthFields)| {
            let mut auth = Auth::default();
            set(&mut auth.fields);
            text(&auth.credentials("docker.io").unwrap())
        };
        assert_eq!(auth(|_| {}), "none");
        assert_eq!(auth(|a| (a.username, a.password) = ("u".into(), "p".into())), "u p");
        assert_eq!(auth(|a| a.auth = "dXNlcjpwYTpzcw==".into()), "user pa:ss");
        assert_eq!(auth(|a| a.auth = "dXNlcjpwYXNzAAA=".into()), "user pass");
        assert_eq!(auth(|a| a.identity_token = "i".into()), "identity i");
        assert_eq!(auth(|a| a.registry_token = "r".into()), "bearer r");
    }

    #[test]
    fn credentials_go_to_their_registry_only() {
        let cases = [
            ("", "reg:5000", true),
            ("reg:5000", "reg:5000", true),
            ("https://REG:5000/v2/", "reg:5000", true),
            ("reg", "reg:5000", false),
            ("reg:5000.evil.example", "reg:5000", false),
            ("https://evil.example/reg:5000", "reg:5000", false),
            ("https://index.docker.io/v1/", "docker.io", true),
            ("docker.io", "docker.io", true),
            ("https://index.docker.io/v1/", "quay.io", false),
        ];
        for (server_address, registry, expected) in cases {
            let fields = AuthFields { username: "u".into(), password: "p".into(), ..AuthFields::default() };
            let auth = Auth { server_address: server_address.into(), fields };
            let credentials = auth.credentials(registry).unwrap();
            assert_eq!(text(&credentials) == "u p", expected, "{server_address} for {registry}");
        }
    }

    #[test]
    fn the_error_of_a_malformed_auth_does_not_contain_it() {
        for auth in ["!!secret", "c2VjcmV0", "/////w==", "c2Vjc"] {
            let fields = AuthFields { auth: auth.into(), ..AuthFields::default() };
            let error = Auth { fields, ..Auth::default() }.credentials("docker.io").unwrap_err();
            assert!(error.message().starts_with("auth.auth: "), "{error}");
            assert!(!error.message().contains("secret") && !error.message().contains(auth), "{error}");
        }
        let fields = AuthFields { password: "secret".into(), ..AuthFields::default() };
        let auth = Auth { fields, ..Auth::default() };
        assert!(!format!("{auth:?}").contains("secret"));
    }
}
