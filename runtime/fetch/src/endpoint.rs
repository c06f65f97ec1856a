//! One endpoint of a registry: requests with credentials, tokens and redirects.
//!
//! Credentials and headers are sent only to the endpoint for which they were configured and to the token service that
//! this endpoint names. Redirects are followed by this module: from the first request to another host or
//! scheme on, no credentials or headers of the endpoint are sent, and a challenge (401) is an error, because
//! its sender could name a token service that receives the password or the refresh token (as in
//! CVE-2020-15157 of containerd). The query of a URL is never logged.
//!
//! An endpoint that may have TLS or not is asked by the scheme that it speaks ([`Plain`]), which its first answer decides.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use coracle_job::{Credentials, Failure, FailureKind};
use coracle_sandbox::describe_io;
use ureq::http::header::{ACCEPT, AUTHORIZATION, LOCATION, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use ureq::http::{Response, StatusCode, Uri};
use ureq::{Agent, Body, RequestBuilder};

use super::agent::{self, Security};
use super::challenge::{self, Challenge};
use super::decoded::Codings;
use super::protocol::{Get, Remote, Setup};
use super::request_failure::RequestFailure;
use super::{location, tls};
use coracle_json::Object;
use coracle_registries::{Plain, Proxy};

/// Maximum number of redirects: blob stores need one, mirrors two; Go's client, and so containerd, ends after ten requests
/// (net/http, `defaultCheckRedirect`).
pub(super) const REDIRECTS_MAX: u32 = 9;
/// The error of a token service that redirects a refresh token or a password.
const TOKEN_LEFT: &str = "it redirects to another host, to which no secret is sent";
/// The error of a token service that redirects from https to http: who reads the token has the registry's access.
const TOKEN_PLAIN: &str = "it redirects from https to http";
/// Maximum length in bytes of a token service's answer.
const TOKEN_BYTES_MAX: u64 = 1 << 20;

/// A connection to one endpoint, used by all threads of the fetcher.
pub(super) struct Connection {
    /// All endpoints and their common settings.
    setup: Arc<Setup>,
    /// Index of the endpoint.
    index: usize,
    /// HTTP clients, usually two or three, by protection and proxy.
    agents: Mutex<Vec<(AgentKey, Agent)>>,
    /// Whether the endpoint has answered by the scheme of the second attempt ([`Plain`]).
    is_second: AtomicBool,
    /// Whether the endpoint has answered by TLS.
    has_tls: AtomicBool,
    /// Value of the `Authorization` header; `None` until the endpoint's scheme is known.
    authorization: Mutex<Option<String>>,
}

/// The response to a request after all redirects.
struct Answer {
    response: Response<Body>,
    /// The host that responded, if it is not the endpoint or if another host redirected to it; otherwise
    /// `None`.
    foreign: Option<String>,
}

/// The key of an HTTP client: its protection, and the proxy's URL.
type AgentKey = (Security, Option<String>);

impl Connection {
    /// Creates the connections, one for each endpoint.
    pub(super) fn all(setup: Setup) -> Vec<Self> {
        let setup = Arc::new(setup);
        let one = |index| Self {
            setup: setup.clone(),
            index,
            agents: Mutex::default(),
            is_second: AtomicBool::new(false),
            has_tls: AtomicBool::new(false),
            authorization: Mutex::default(),
        };
        (0..setup.remotes.len()).map(one).collect()
    }

    fn remote(&self) -> &Remote {
        &self.setup.remotes[self.index]
    }

    /// Makes a request; the response has a success status.
    pub(super) fn get(&self, get: &Get) -> Result<(Response<Body>, Codings), RequestFailure> {
        let place = format!("{}/{}/{}", self.remote().url, self.remote().repository, get.what);
        if let Some(url) = &get.url {
            let url = parse_url(url)?;
            let what = format!("{}{}", host_of(&url).unwrap_or_default(), url.path());
            return checked(self.follow_get(url, get, None, true)?.response, get, &what);
        }
        let url = match self.remote().is_mirror {
            true => format!("{place}?ns={}", self.setup.registry),
            false => place.clone(),
        };
        let url = parse_url(&url)?;
        // Read before the scheme, which is stored first: what was a secret of TLS is not sent without.
        let known = self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut answer = self.follow_get(self.with_spoken_scheme(&url)?, get, known.as_deref(), false)?;
        // The token may have expired; a second challenge means that the credentials are wrong.
        if answer.is_own_challenge() {
            let authorization = self.answer_challenge(&answer.response)?;
            answer = self.follow_get(self.with_spoken_scheme(&url)?, get, Some(&authorization), false)?;
            *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(authorization);
        }
        let Answer { response, foreign } = answer;
        if let (StatusCode::UNAUTHORIZED, Some(host)) = (response.status(), foreign) {
            let text = format!(
                "{}: unauthorized: it redirects to {host}, which requires credentials; credentials are not sent \
                 to another host",
                self.remote().url
            );
            return Err(Failure::new(FailureKind::Denied, text).into());
        }
        checked(response, get, &place)
    }

    /// The URL with the scheme that the endpoint speaks, as far as its answers have shown it.
    fn with_spoken_scheme(&self, url: &Uri) -> Result<Uri, Failure> {
        match (self.remote().plain, self.is_second.load(Ordering::Relaxed)) {
            (Plain::AfterTls, false) | (Plain::BeforeTls, true) => with_scheme(url, "https"),
            _ => Ok(url.clone()),
        }
    }

    /// Requests content by GET. To a `foreign` URL, which is not of the endpoint, no credentials are sent.
    fn follow_get(
        &self,
        url: Uri,
        get: &Get,
        authorization: Option<&str>,
        is_foreign: bool,
    ) -> Result<Answer, RequestFailure> {
        self.follow(url, is_foreign, |agent, url, has_left| {
            let mut request = agent.get(url).header(ACCEPT, &get.accept);
            if !has_left {
                request = self.with_headers(request, authorization);
            }
            let range = get.range();
            if !range.is_empty() {
                request = request.header(RANGE, range);
            }
            request.call()
        })
    }

    /// Adds the headers that the endpoint's configuration has for each request, and these credentials.
    fn with_headers<B>(
        &self,
        mut request: RequestBuilder<B>,
        authorization: Option<&str>,
    ) -> RequestBuilder<B> {
        let is_ours = |name: &str| !name.eq_ignore_ascii_case("authorization");
        for (name, value) in &self.remote().headers {
            if authorization.is_none() || is_ours(name) {
                request = request.header(name, value);
            }
        }
        match authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// Sends a request, and sends it again to each target of a redirect. The last argument of `send` is whether
    /// the URL was chosen by another host, which must not get credentials.
    fn follow(
        &self,
        mut url: Uri,
        is_foreign: bool,
        send: impl Fn(&Agent, &Uri, bool) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Answer, RequestFailure> {
        let mut first = url.clone();
        let mut has_left = is_foreign;
        for number in 0..=REDIRECTS_MAX {
            // After a redirect to another host, that host chose the URL, so even the first one counts as
            // another host.
            has_left |= host_of(&url) != host_of(&first) && !is_upgrade(&first, &url);
            let mut response = send(&self.agent(&url)?, &url, has_left);
            if let Some(second) = self.second(&url, &response).filter(|_| number == 0) {
                let answer = send(&self.agent(&second)?, &second, has_left);
                // What has no TLS either has failed for another reason.
                if answer.is_ok() || second.scheme_str() == Some("http") {
                    self.is_second.fetch_or(answer.is_ok(), Ordering::Relaxed);
                    (url, first, response) = (second.clone(), second, answer);
                }
            }
            let response = response.map_err(|error| unreachable_peer(&url, &error))?;
            if url.scheme_str() == Some("https") && self.is_own(&url) {
                self.has_tls.store(true, Ordering::Relaxed);
            }
            match redirected(&url, &response)? {
                Some(target) => url = target,
                None => {
                    let foreign = has_left.then(|| host_of(&url).unwrap_or_default());
                    return Ok(Answer { response, foreign });
                }
            }
        }
        let host = host_of(&first).unwrap_or_default();
        Err(Failure::invalid(format!("{host}: more than {REDIRECTS_MAX} redirects")).into())
    }

    /// Whether the URL is of the endpoint's host, by either scheme.
    fn is_own(&self, url: &Uri) -> bool {
        let host = |url: &Uri| host_of(&with_scheme(url, "https").ok()?);
        self.remote().url.parse().is_ok_and(|own| host(&own) == host(url))
    }

    /// Returns the URL with the other scheme, if the endpoint may have it and this answer says that it does not speak the first
    /// one; an endpoint that has answered by TLS has it. From TLS to plain HTTP for the answers of `httpFallback` in containerd's
    /// core/remotes/docker/resolver.go, and for others that are no TLS (compared by tests/compare, "TLS where hosts.toml has http …").
    fn second(&self, url: &Uri, answer: &Result<Response<Body>, ureq::Error>) -> Option<Uri> {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof};
        let kind = match answer {
            Err(ureq::Error::Io(error)) => Some(error.kind()),
            Err(_) | Ok(_) => None,
        };
        let is_refused = url.port().is_none() && kind == Some(ConnectionRefused);
        // Some programs with TLS close a connection with plain HTTP without an answer.
        let is_closed = matches!(kind, Some(ConnectionAborted | ConnectionReset | UnexpectedEof));
        let other = match (self.remote().plain, url.scheme_str(), answer) {
            (Plain::AfterTls, Some("https"), Err(error))
                if !self.has_tls.load(Ordering::Relaxed) && (is_refused || is_not_tls(error)) =>
            {
                "http"
            }
            (Plain::BeforeTls, Some("http"), Err(error))
                if is_refused || is_closed || matches!(error, ureq::Error::Protocol(_)) =>
            {
                "https"
            }
            (Plain::BeforeTls, Some("http"), Ok(answer)) if answer.status() == StatusCode::BAD_REQUEST => {
                "https"
            }
            _ => return None,
        };
        with_scheme(url, other).ok().filter(|_| self.is_own(url))
    }

    /// The HTTP client for a URL of the endpoint, of its token service, or of the blob store to which the
    /// endpoint redirects.
    fn agent(&self, url: &Uri) -> Result<Agent, Failure> {
        let proxy = self.setup.environment.proxy_for(url).map(Proxy::url);
        let security = match (url.scheme_str(), self.remote().plain) {
            (Some("https"), Plain::BeforeTls) if self.is_own(url) => Security::Unverified,
            (Some("https"), _) => Security::Tls,
            _ => Security::Plain,
        };
        let key = (security, proxy.transpose().map_err(Failure::invalid)?);
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, agent)) = agents.iter().find(|(known, _)| *known == key) {
            return Ok(agent.clone());
        }
        let agent = agent::agent(
            self.remote(),
            &self.setup.system_roots,
            &self.setup.timeouts,
            key.0,
            key.1.as_deref(),
        )?;
        agents.push((key, agent.clone()));
        Ok(agent)
    }

    /// The value of the `Authorization` header for the endpoint's challenge.
    fn answer_challenge(&self, response: &Response<Body>) -> Result<String, RequestFailure> {
        let fields = response.headers().get_all(WWW_AUTHENTICATE).iter();
        let challenge = challenge::of(fields.map(|field| field.as_bytes()));
        let authorization = match (challenge, &self.remote().credentials) {
            (_, Credentials::Bearer(token)) => Some(format!("Bearer {token}")),
            (Some(Challenge::Bearer { realm, service, scope }), credentials) => {
                let scope = match scope.is_empty() {
                    true => format!("repository:{}:pull", self.remote().repository),
                    false => scope,
                };
                Some(format!("Bearer {}", self.token(&realm, &service, &scope, credentials)?))
            }
            (Some(Challenge::Basic), Credentials::Basic { username, password }) => {
                Some(basic(username, password))
            }
            (Some(Challenge::Basic) | None, _) => None,
        };
        authorization.ok_or_else(|| {
            let text = format!("{}: unauthorized: the registry requires credentials", self.remote().url);
            Failure::new(FailureKind::Denied, text).into()
        })
    }

    /// Requests a token for the scope: by GET, or with a refresh token by POST (token and OAuth2 documents of
    /// the distribution project). A service that refuses the password of a GET is asked by POST, as some have no other way;
    /// containerd tries both in the reverse order.
    fn token(
        &self,
        realm: &str,
        service: &str,
        scope: &str,
        credentials: &Credentials,
    ) -> Result<String, RequestFailure> {
        let url = parse_url(realm)?;
        let has_tls = self.remote().url.starts_with("https:") || self.has_tls.load(Ordering::Relaxed);
        let is_downgrade = has_tls && url.scheme_str() == Some("http");
        if is_downgrade && !matches!(credentials, Credentials::None) {
            let text = format!("{}: denied: its token service does not use https", self.remote().url);
            return Err(Failure::new(FailureKind::Denied, text).into());
        }
        if let Credentials::Identity(token) = credentials {
            let secrets = [("grant_type", "refresh_token"), ("refresh_token", token)];
            return self.granted_token(&url, service, scope, &secrets);
        }
        let answer = self.follow(url.clone(), false, |agent, target, has_left| {
            if url.scheme_str() == Some("https") && target.scheme_str() == Some("http") {
                return Err(ureq::Error::Other(TOKEN_PLAIN.into()));
            }
            let mut request = agent.get(target);
            // The target of a redirect has a query of its own.
            if *target == url {
                request = request.query("scope", scope);
                if !service.is_empty() {
                    request = request.query("service", service);
                }
            }
            let secret = match credentials {
                Credentials::Basic { username, password } => Some(basic(username, password)),
                Credentials::None | Credentials::Bearer(_) | Credentials::Identity(_) => None,
            };
            match has_left || is_downgrade {
                true => request.call(),
                false => self.with_headers(request, secret.as_deref()).call(),
            }
        });
        let response = answer?.response;
        let is_refused = matches!(response.status().as_u16(), 400 | 401 | 404 | 405);
        if let (Credentials::Basic { username, password }, true) = (credentials, is_refused) {
            let secrets = [("grant_type", "password"), ("username", username), ("password", password)];
            let granted = self.granted_token(&url, service, scope, &secrets);
            // The answer to the usual request says more, if there is no other way either.
            if granted.is_ok() {
                return granted;
            }
        }
        read_token(&url, response)
    }

    /// Requests a token by POST (OAuth2 document of the distribution project) with these secrets, which are not sent to another
    /// host.
    fn granted_token(
        &self,
        url: &Uri,
        service: &str,
        scope: &str,
        secrets: &[(&str, &str)],
    ) -> Result<String, RequestFailure> {
        let form = [("service", service), ("scope", scope), ("client_id", "coracle")];
        let is_tls = url.scheme_str() == Some("https");
        let answer = self.follow(url.clone(), false, |agent, url, has_left| match has_left {
            true => Err(ureq::Error::Other(TOKEN_LEFT.into())),
            false if is_tls && url.scheme_str() == Some("http") => {
                Err(ureq::Error::Other(TOKEN_PLAIN.into()))
            }
            false => self.with_headers(agent.post(url), None).send_form(form.iter().chain(secrets).copied()),
        });
        read_token(url, answer?.response)
    }
}

impl Answer {
    /// Whether the endpoint itself requires credentials.
    fn is_own_challenge(&self) -> bool {
        self.response.status() == StatusCode::UNAUTHORIZED && self.foreign.is_none()
    }
}

fn read_token(url: &Uri, mut response: Response<Body>) -> Result<String, RequestFailure> {
    let service = format!("token service {}", host_of(url).unwrap_or_default());
    check(&response, &service)?;
    let codings = Codings::of(&response, None, &service)?;
    let mut text = Vec::new();
    // Also encoded, so that what decodes to nothing has an end.
    let read = codings
        .decode(response.body_mut().with_config().limit(TOKEN_BYTES_MAX).reader())
        .and_then(|body| body.take(TOKEN_BYTES_MAX).read_to_end(&mut text));
    read.map_err(|error| {
        Failure::new(FailureKind::Unavailable, format!("{service}: {}", describe_io(&error)))
    })?;
    token_of(&text).map_err(|words| Failure::invalid(format!("{service}: {words}")).into())
}

/// The token in the answer of a token service. Its member is `token`, or `access_token` as in OAuth 2.0; the other
/// one may be empty.
fn token_of(answer: &[u8]) -> Result<String, &'static str> {
    let text = String::from_utf8_lossy(answer);
    let answer = Object::parse(&text).map_err(|_| "its answer is not JSON")?;
    let member = |name| answer.text(name).unwrap_or_default();
    let tokens = [member("token"), member("access_token")];
    tokens.into_iter().find(|token| !token.is_empty()).ok_or("no token in its answer")
}

/// Checks that the response has a success status and content that can be decoded.
pub(super) fn checked(
    response: Response<Body>,
    get: &Get,
    what: &str,
) -> Result<(Response<Body>, Codings), RequestFailure> {
    check(&response, what)?;
    let length = match get.end {
        Some(end) => end.checked_sub(get.offset),
        None => get.size.filter(|_| get.offset == 0),
    };
    let codings = Codings::of(&response, length, what)?;
    Ok((response, codings))
}

/// Maps error responses to kinds and to texts that kubelets and users search for.
fn check(response: &Response<Body>, what: &str) -> Result<(), RequestFailure> {
    let status = response.status().as_u16();
    let (kind, words) = match status {
        200..=299 => return Ok(()),
        401 => (FailureKind::Denied, "unauthorized"),
        403 => (FailureKind::Denied, "denied"),
        404 => (FailureKind::NotFound, "not found"),
        407 => (FailureKind::Denied, "the proxy requires a user and a password"),
        408 => (FailureKind::Unavailable, "the request took too long"),
        416 => (FailureKind::Invalid, "the range does not fit the blob"),
        429 => (FailureKind::RateLimited, "toomanyrequests"),
        500..=599 => (FailureKind::Unavailable, "the registry has a problem"),
        _ => (FailureKind::Internal, "an answer that makes no sense here"),
    };
    let mut failed = RequestFailure::from(Failure::new(kind, format!("{what}: {words} (HTTP {status})")));
    failed.status = Some(status);
    Err(failed.after(response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok())))
}

/// Scheme, host and port of a URL, for which credentials are valid. Host names are compared without case, and
/// the default port of the scheme may be omitted (RFC 3986, section 6.2).
fn host_of(url: &Uri) -> Option<String> {
    let (scheme, host) = (url.scheme_str()?, url.host()?.to_ascii_lowercase());
    let port = match (scheme, url.port_u16()) {
        (_, None) | ("http", Some(80)) | ("https", Some(443)) => String::new(),
        (_, Some(port)) => format!(":{port}"),
    };
    Some(format!("{scheme}://{host}{port}"))
}

pub(super) fn parse_url(text: &str) -> Result<Uri, Failure> {
    let url: Uri = text.parse().map_err(|_| Failure::invalid("a URL that cannot be parsed"))?;
    match url.scheme_str() {
        Some("http" | "https") if url.authority().is_some() => Ok(url),
        _ => Err(Failure::invalid("a URL that is neither http nor https")),
    }
}

/// Whether `to` is the TLS port of the host that `from` contacts without TLS, both on the default port.
fn is_upgrade(from: &Uri, to: &Uri) -> bool {
    let text = |url| host_of(url).unwrap_or_default();
    text(from).strip_prefix("http://").is_some_and(|host| {
        from.port_u16().is_none_or(|port| port == 80) && text(to).strip_prefix("https://") == Some(host)
    })
}

/// The target of a redirect; `None` if the response is none. The status codes are those for which Go's client
/// follows the `Location`.
fn redirected(from: &Uri, response: &Response<Body>) -> Result<Option<Uri>, Failure> {
    let location = response.headers().get(LOCATION);
    let Some(location) = location.filter(|_| matches!(response.status().as_u16(), 301..=303 | 307 | 308))
    else {
        return Ok(None);
    };
    let target = location::resolve(from, location.as_bytes());
    let target = target.ok_or_else(|| {
        // Without the query, which may have a signature.
        let text = String::from_utf8_lossy(location.as_bytes());
        let text = text.split('?').next().unwrap_or_default().to_owned();
        Failure::invalid(format!(
            "{}: a redirect to {text:?}, which is no URL",
            host_of(from).unwrap_or_default()
        ))
    })?;
    parse_url(&target.to_string()).map(Some)
}

/// The URL with another scheme; a port stays.
fn with_scheme(url: &Uri, scheme: &str) -> Result<Uri, Failure> {
    let rest = url.to_string();
    parse_url(&format!("{scheme}://{}", rest.split_once("://").map_or("", |(_, rest)| rest)))
}

/// Whether the peer does not speak TLS: its answer is none of TLS, or there is none in time.
fn is_not_tls(error: &ureq::Error) -> bool {
    let is_silent = matches!(error, ureq::Error::Io(error) if error.to_string().starts_with("no TLS within"));
    let is_other = |error: &rustls::Error| {
        matches!(error, rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType))
    };
    is_silent || tls_error(error).is_some_and(is_other)
}

pub(super) fn unreachable_peer(url: &Uri, error: &ureq::Error) -> RequestFailure {
    let words = match error {
        ureq::Error::Timeout(ureq::Timeout::RecvResponse) => "no answer in time".to_owned(),
        error => tls_error(error).and_then(tls::explain).unwrap_or_else(|| match error {
            ureq::Error::Io(error) => describe_io(error),
            error => error.to_string(),
        }),
    };
    let kind = match error {
        error if is_certificate(error) => FailureKind::Certificate,
        error if is_resolver(error) => FailureKind::NameResolution,
        _ => FailureKind::Unavailable,
    };
    let failure = Failure::new(kind, format!("{}: {words}", host_of(url).unwrap_or_default()));
    match is_certificate(error) {
        true => RequestFailure::lasting(failure),
        false => failure.into(),
    }
}

/// Whether the lookup of the host's name has failed. The standard library has no error kind for this, only
/// this text.
fn is_resolver(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound => true,
        ureq::Error::Io(error) => error.to_string().starts_with("failed to lookup address information"),
        _ => false,
    }
}

/// Whether the error is an untrusted certificate, for which a retry is useless.
fn is_certificate(error: &ureq::Error) -> bool {
    let certificate = |error: &rustls::Error| {
        matches!(error, rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)
    };
    tls_error(error).is_some_and(certificate)
}

/// The TLS error in `error`; `None` for other errors.
fn tls_error(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    }
}

/// The header value for basic authentication (RFC 7617, section 2).
pub(super) fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", data_encoding::BASE64.encode(format!("{username}:{password}").as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn basic_authentication_has_the_format_of_the_rfc() {
        assert_eq!(basic("Aladdin", "open sesame"), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(basic("", ""), "Basic Og==");
    }

    #[test]
    fn a_token_may_be_in_one_of_two_members() {
        for (answer, expected) in [
            (r#"{"token":"t","access_token":"a"}"#, Ok("t")),
            (r#"{"token":"","access_token":"a"}"#, Ok("a")),
            (r#"{"token":null,"access_token":"a","expires_in":"60"}"#, Ok("a")),
            (r#"{"token":""}"#, Err("no token in its answer")),
            ("<html>", Err("its answer is not JSON")),
        ] {
            assert_eq!(token_of(answer.as_bytes()), expected.map(str::to_owned), "{answer}");
        }
    }

    #[test]
    fn an_answer_of_more_than_a_mebibyte_has_no_token() {
        let read = |bytes: usize| {
            let token = r#"{"token":"t"}"#;
            let answer = " ".repeat(bytes - token.len()) + token;
            let response = Response::new(Body::builder().data(answer));
            read_token(&"https://t/token".parse().unwrap(), response).map_err(|failed| failed.failure.message)
        };
        assert_eq!(read(1 << 20).as_deref(), Ok("t"));
        assert_eq!(read((1 << 20) + 1).unwrap_err(), "token service https://t: its answer is not JSON");
    }

    #[test]
    fn a_redirect_from_https_to_http_leaves_the_endpoint() {
        let (from, to) = ("https://reg.example/v2/x", "http://reg.example/blob");
        let mut response = Response::new(Body::builder().data(""));
        *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        response.headers_mut().insert(LOCATION, to.parse().unwrap());
        let target = redirected(&from.parse().unwrap(), &response).unwrap().unwrap();
        assert_eq!(target, to);
        assert_ne!(host_of(&target), host_of(&from.parse().unwrap()), "it gets no secret");
    }

    /// A server without TLS, which answers a handshake by an error as most do.
    #[test]
    fn an_endpoint_with_http_and_tls_settings_is_asked_with_tls_first() {
        const HANDSHAKE: u8 = 22;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while seen.len() < 3 {
                let (mut stream, _) = listener.accept().unwrap();
                let mut bytes = [0; 4096];
                let count = stream.read(&mut bytes).unwrap();
                let first = if count > 0 { bytes[0] } else { 0 };
                seen.push(first);
                let status = if first == HANDSHAKE { "400 Bad Request" } else { "200 OK" };
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
            }
            seen
        });
        let remote = Remote {
            url: format!("http://{address}/v2"),
            repository: "x".into(),
            credentials: Credentials::None,
            headers: Vec::new(),
            is_mirror: false,
            plain: Plain::AfterTls,
            insecure_skip_verify: true,
            tls: Ok(super::super::protocol::Pem::default()),
        };
        let timeouts = coracle_job::Timeouts {
            connect_ms: 5_000,
            tls_ms: 5_000,
            first_byte_ms: 5_000,
            rate_window_ms: 5_000,
            ..coracle_job::Timeouts::default()
        };
        let setup = Setup {
            registry: address.to_string(),
            remotes: vec![remote],
            timeouts,
            environment: coracle_registries::Environment::default(),
            system_roots: String::new(),
        };
        let connection = Connection::all(setup).remove(0);
        for _ in 0..2 {
            let get = Get { what: "manifests/1".into(), ..Get::default() };
            assert!(connection.get(&get).is_ok());
        }
        assert_eq!(server.join().unwrap(), [HANDSHAKE, b'G', b'G'], "TLS once");
    }

    #[test]
    fn only_the_tls_port_of_a_host_is_an_upgrade() {
        let is = |from: &str, to: &str| is_upgrade(&from.parse().unwrap(), &to.parse().unwrap());
        assert!(is("http://auth.example/token", "https://Auth.example:443/token"));
        for (from, to) in [
            ("http://auth.example/", "https://other.example/"),
            ("http://auth.example/", "https://auth.example:8443/"),
            ("http://auth.example:5000/", "https://auth.example/"),
            ("https://auth.example/", "http://auth.example/"),
        ] {
            assert!(!is(from, to), "{from} {to}");
        }
    }

    #[test]
    fn credentials_belong_to_scheme_host_and_port() {
        let host = |text: &str| host_of(&text.parse().unwrap()).unwrap();
        assert_eq!(host("https://reg.example/v2/x"), host("https://user:pw@reg.example/other"));
        assert_ne!(host("https://reg.example/"), host("http://reg.example/"));
        assert_ne!(host("https://reg.example/"), host("https://reg.example:444/"));
        assert_ne!(host("https://reg.example/"), host("https://reg.example:80/"));
        assert_eq!(host("https://reg.example/"), host("https://Reg.Example:443/"));
        assert_eq!(host("http://[::1]:5000/"), "http://[::1]:5000");
    }
}
