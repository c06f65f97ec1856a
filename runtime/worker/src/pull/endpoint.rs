//! One endpoint of a registry: requests with its credentials, tokens, redirects.
//!
//! Credentials go to the endpoint they were given for and to the token service it names, nobody else: redirects are
//! followed by hand, and lose them at another host. Nothing here logs a URL's query.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_job::{Credentials, Failure, FailureKind};
use serde::Deserialize;
use ureq::http::header::{ACCEPT, AUTHORIZATION, LOCATION, RANGE, WWW_AUTHENTICATE};
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, TlsProvider, parse_pem};
use ureq::{Agent, Body};

use super::challenge::{self, Challenge};
use crate::failure::{failure, invalid, io_failure};
use crate::registries::Endpoint;

/// Longest wait for a connection, TLS included: an uplink that takes longer is down.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for the first byte of an answer: registries fetch from cold storage behind it.
const FIRST_BYTE_LIMIT: Duration = Duration::from_secs(60);
/// Longest silence in the middle of a body.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// Blob stores are one redirect away, mirrors two.
const REDIRECTS_MAX: u32 = 5;
/// Longest answer of a token service.
const TOKEN_BYTES_MAX: u64 = 1 << 20;

/// Bundles of trusted roots, as distributions place them; the first that is there counts.
const ROOTS: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// An endpoint that is being asked.
pub(super) struct Connection<'a> {
    endpoint: &'a Endpoint,
    /// Added as `ns=` for mirrors.
    registry: &'a str,
    agent: Agent,
    /// The header's value, once it is known which the endpoint wants.
    authorization: Option<String>,
    /// Whether a challenge of this request has been answered: a second one says that the credentials are wrong.
    is_challenged: bool,
}

impl<'a> Connection<'a> {
    pub(super) fn new(endpoint: &'a Endpoint, registry: &'a str) -> Result<Self, Failure> {
        let config = Agent::config_builder()
            .tls_config(tls(endpoint)?)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_LIMIT))
            .timeout_recv_response(Some(FIRST_BYTE_LIMIT))
            .timeout_per_read(Some(SILENCE_LIMIT))
            .build();
        Ok(Self { endpoint, registry, agent: config.new_agent(), authorization: None, is_challenged: false })
    }

    /// The endpoint without what may be secret.
    pub(super) fn name(&self) -> &str {
        &self.endpoint.url
    }

    /// GET of `manifests/REFERENCE` or `blobs/DIGEST`, from byte `offset` on; the answer is 200 or 206.
    pub(super) fn get(&mut self, what: &str, accept: &str, offset: u64) -> Result<Response<Body>, Failure> {
        self.is_challenged = false; // a token may have expired since the last request
        let mut url = format!("{}/{}/{what}", self.endpoint.url, self.endpoint.repository);
        if self.endpoint.is_mirror {
            url.push_str(&format!("?ns={}", self.registry));
        }
        let mut response = self.follow(&url, accept, offset)?;
        if response.status() == StatusCode::UNAUTHORIZED && !self.is_challenged {
            self.answer_challenge(&response)?;
            response = self.follow(&url, accept, offset)?;
        }
        check(response.status(), &format!("{}/{}/{what}", self.endpoint.url, self.endpoint.repository))?;
        Ok(response)
    }

    fn follow(&self, url: &str, accept: &str, offset: u64) -> Result<Response<Body>, Failure> {
        let mut url = parse_url(url)?;
        let home = host_of(&url);
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.agent.get(url.clone()).header(ACCEPT, accept);
            // Another host, or the same one without TLS, gets nothing of ours.
            if let Some(authorization) = self.authorization.as_ref().filter(|_| host_of(&url) == home) {
                request = request.header(AUTHORIZATION, authorization);
            }
            if offset > 0 {
                request = request.header(RANGE, format!("bytes={offset}-"));
            }
            let response = request.call().map_err(|error| unreachable_peer(&url, &error))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            url = redirected(&url, &response)?;
        }
        Err(invalid(format!("{}: more than {REDIRECTS_MAX} redirects", self.endpoint.url)))
    }

    fn answer_challenge(&mut self, response: &Response<Body>) -> Result<(), Failure> {
        self.is_challenged = true;
        let header = response.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
        let authorization = match (challenge::parse(header.unwrap_or_default()), &self.endpoint.credentials) {
            (_, Credentials::Bearer(token)) => Some(format!("Bearer {token}")),
            (Some(Challenge::Bearer { realm, service, scope }), credentials) => {
                let scope = match scope.is_empty() {
                    true => format!("repository:{}:pull", self.endpoint.repository),
                    false => scope,
                };
                Some(format!("Bearer {}", self.token(&realm, &service, &scope, credentials)?))
            }
            (Some(Challenge::Basic), Credentials::Basic { username, password }) => {
                Some(basic(username, password))
            }
            (Some(Challenge::Basic) | None, _) => None,
        };
        match authorization {
            Some(authorization) => {
                self.authorization = Some(authorization);
                Ok(())
            }
            None => Err(failure(
                FailureKind::Denied,
                format!("{}: unauthorized: it wants credentials", self.endpoint.url),
            )),
        }
    }

    /// A token for the scope: by GET, or with a refresh token by POST (the distribution's token and OAuth2 documents).
    fn token(
        &self,
        realm: &str,
        service: &str,
        scope: &str,
        credentials: &Credentials,
    ) -> Result<String, Failure> {
        let url = parse_url(realm)?;
        let is_downgrade = self.endpoint.url.starts_with("https:") && url.scheme_str() == Some("http");
        if is_downgrade && !matches!(credentials, Credentials::None) {
            let text = format!("{}: denied: its token service does not speak https", self.endpoint.url);
            return Err(failure(FailureKind::Denied, text));
        }
        if let Credentials::Identity(token) = credentials {
            let form = [
                ("grant_type", "refresh_token"),
                ("service", service),
                ("scope", scope),
                ("client_id", "coracle"),
                ("refresh_token", token),
            ];
            let response = self.agent.post(url.clone()).send_form(form);
            return read_token(&url, response.map_err(|error| unreachable_peer(&url, &error))?);
        }
        let mut request = self.agent.get(url.clone()).query("scope", scope);
        if !service.is_empty() {
            request = request.query("service", service);
        }
        if let Credentials::Basic { username, password } = credentials {
            request = request.header(AUTHORIZATION, basic(username, password));
        }
        let response = request.call().map_err(|error| unreachable_peer(&url, &error))?;
        read_token(&url, response)
    }
}

fn read_token(url: &Uri, mut response: Response<Body>) -> Result<String, Failure> {
    #[derive(Deserialize)]
    struct Json {
        token: Option<String>,
        access_token: Option<String>,
    }
    let service = format!("token service {}", host_of(url).unwrap_or_default());
    check(response.status(), &service)?;
    let text = response.body_mut().with_config().limit(TOKEN_BYTES_MAX).read_to_vec();
    let text = text.map_err(|error| failure(FailureKind::Unavailable, format!("{service}: {error}")))?;
    let json: Json =
        serde_json::from_slice(&text).map_err(|_| invalid(format!("{service}: its answer is not JSON")))?;
    let token = json.token.or(json.access_token).filter(|token| !token.is_empty());
    token.ok_or_else(|| invalid(format!("{service}: no token in its answer")))
}

/// Answers other than success, as kinds and in the words that kubelets and people look for.
fn check(status: StatusCode, what: &str) -> Result<(), Failure> {
    let (kind, words) = match status.as_u16() {
        200..=299 => return Ok(()),
        401 => (FailureKind::Denied, "unauthorized"),
        403 => (FailureKind::Denied, "denied"),
        404 => (FailureKind::NotFound, "not found"),
        416 => (FailureKind::Invalid, "the range does not fit the blob"),
        429 => (FailureKind::Unavailable, "toomanyrequests"),
        500..=599 => (FailureKind::Unavailable, "the registry has a problem"),
        _ => (FailureKind::Internal, "an answer that makes no sense here"),
    };
    Err(failure(kind, format!("{what}: {words} (HTTP {})", status.as_u16())))
}

/// Scheme, host and port: what credentials belong to.
fn host_of(url: &Uri) -> Option<String> {
    Some(format!("{}://{}", url.scheme_str()?, url.authority()?.as_str().rsplit('@').next()?))
}

fn parse_url(text: &str) -> Result<Uri, Failure> {
    let url: Uri = text.parse().map_err(|_| invalid("a URL that cannot be read"))?;
    match url.scheme_str() {
        Some("http" | "https") if url.authority().is_some() => Ok(url),
        _ => Err(invalid("a URL that is neither http nor https")),
    }
}

/// Where a redirect leads: an absolute URL, or a path of the same host.
fn redirected(from: &Uri, response: &Response<Body>) -> Result<Uri, Failure> {
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let target = match location.starts_with('/') {
        true => parse_url(&format!("{}{location}", host_of(from).unwrap_or_default()))?,
        false => parse_url(location)?,
    };
    if from.scheme_str() == Some("https") && target.scheme_str() == Some("http") {
        return Err(invalid("a redirect from https to http"));
    }
    Ok(target)
}

fn unreachable_peer(url: &Uri, error: &ureq::Error) -> Failure {
    failure(FailureKind::Unavailable, format!("{}: {error}", host_of(url).unwrap_or_default()))
}

fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", base64(format!("{username}:{password}").as_bytes()))
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let index = bits >> (18 - 6 * place) & 63;
            text.push(if place <= group.len() { char::from(ALPHABET[index as usize]) } else { '=' });
        }
    }
    text
}

fn tls(endpoint: &Endpoint) -> Result<TlsConfig, Failure> {
    let tls = &endpoint.tls;
    let mut builder = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .disable_verification(tls.insecure_skip_verify);
    if !endpoint.url.starts_with("https:") {
        return Ok(builder.build());
    }
    let mut roots = system_roots();
    if let Some(path) = &tls.ca_file {
        let pem = std::fs::read(path).map_err(|error| io_failure("read", path, &error))?;
        roots.extend(certificates(&pem));
    }
    builder = builder.root_certs(RootCerts::new_with_certs(&roots));
    if let (Some(cert), Some(key)) = (&tls.cert_file, &tls.key_file) {
        let read =
            |path: &std::path::Path| std::fs::read(path).map_err(|error| io_failure("read", path, &error));
        let key_pem = PrivateKey::from_pem(&read(key)?);
        let key = key_pem.map_err(|error| invalid(format!("key of {}: {error}", endpoint.url)))?;
        builder = builder.client_cert(Some(ClientCert::new_with_certs(&certificates(&read(cert)?), key)));
    }
    Ok(builder.build())
}

fn system_roots() -> Vec<Certificate<'static>> {
    let configured = std::env::var_os("SSL_CERT_FILE").map(std::path::PathBuf::from);
    let mut files = configured.into_iter().chain(ROOTS.iter().map(std::path::PathBuf::from));
    files.find_map(|path| std::fs::read(path).ok()).map(|pem| certificates(&pem)).unwrap_or_default()
}

/// The certificates of a PEM file; what is something else, or broken, is left out.
fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    let items = parse_pem(pem).filter_map(Result::ok);
    items
        .filter_map(
            |item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None },
        )
        .collect()
}

/// Connections by the place of their endpoint, kept for the length of a pull.
pub(super) type Connections<'a> = HashMap<usize, Connection<'a>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }

    #[test]
    fn credentials_belong_to_scheme_host_and_port() {
        let host = |text: &str| host_of(&text.parse().unwrap()).unwrap();
        assert_eq!(host("https://reg.example/v2/x"), host("https://user:pw@reg.example/other"));
        assert_ne!(host("https://reg.example/"), host("http://reg.example/"));
        assert_ne!(host("https://reg.example/"), host("https://reg.example:444/"));
    }
}
