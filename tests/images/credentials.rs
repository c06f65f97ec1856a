//! Which servers receive credentials: finding 6 of docs/results/0.1.0.md. Each server of a pull records all
//! requests with header and body, so the tests check what was sent to whom and not only whether the pull
//! succeeded.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use coracle_tests::cri::proto::AuthConfig;
use coracle_tests::http::{self, Head};
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::Node;
use coracle_tests::request::pull;

/// The answer of a recording server.
#[derive(Clone, Debug)]
enum Reply {
    Redirect(String),
    /// 401 with this `WWW-Authenticate` without `Authorization`; 404 otherwise.
    Challenge(String),
    /// A token service's answer.
    Token,
}

type Plan = dyn Fn(&Head) -> Reply + Send + Sync;

/// An HTTP server that records its requests.
struct Witness {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Witness {
    fn start(plan: impl Fn(&Head) -> Reply + Send + Sync + 'static) -> Witness {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        Witness::serve(listener, plan)
    }

    fn serve(listener: TcpListener, plan: impl Fn(&Head) -> Reply + Send + Sync + 'static) -> Witness {
        let (address, seen) = (listener.local_addr().expect("a bound address"), Arc::default());
        let (plan, log): (Arc<Plan>, Arc<Mutex<Vec<String>>>) = (Arc::new(plan), Arc::clone(&seen));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (plan, log) = (plan.clone(), log.clone());
                // A client that disconnects leaves no record.
                std::thread::spawn(move || answer(stream, &*plan, &log));
            }
        });
        Witness { address, seen }
    }

    /// All requests: first line, `Authorization`, body.
    fn seen(&self) -> String {
        self.seen.lock().expect("no thread panics with it").join("\n")
    }
}

fn answer(mut stream: TcpStream, plan: &Plan, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let Ok(head) = http::read_head(&mut reader) else {
        // A client that tries TLS first, because there are TLS settings, learns that there is none, as from any server.
        return stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let mut body = String::new();
    reader.take(head.length()).read_to_string(&mut body)?;
    let authorization = head.get("authorization").unwrap_or_default();
    log.lock().expect("no thread panics with it").push(format!("{} | {authorization} | {body}", head.first));
    let (status, header, text) = match plan(&head) {
        Reply::Challenge(challenge) if authorization.is_empty() => {
            ("401 Unauthorized", format!("WWW-Authenticate: {challenge}\r\n"), "{}")
        }
        Reply::Challenge(_) => ("404 Not Found", String::new(), "{}"),
        Reply::Redirect(to) => ("307 Temporary Redirect", format!("Location: {to}\r\n"), ""),
        Reply::Token => ("200 OK", String::new(), r#"{"token":"issued-token"}"#),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\n{header}Content-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Challenger {
    Registry,
    RedirectTarget,
    Mirror,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Realm {
    /// The host that sent the challenge.
    Same,
    /// Another host, as with auth.docker.io.
    Other,
    /// Another host without TLS, named by a host with TLS.
    Downgrade,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Basic,
    Bearer,
    Identity,
}

impl Kind {
    /// The credentials of `whose` in a request.
    fn auth(self, whose: &str) -> AuthConfig {
        let secret = format!("{whose}-secret");
        match self {
            Kind::Basic => AuthConfig { username: whose.into(), password: secret, ..Default::default() },
            Kind::Bearer => AuthConfig { registry_token: secret, ..Default::default() },
            Kind::Identity => AuthConfig { identity_token: secret, ..Default::default() },
        }
    }

    /// The credentials of `whose` in registries.yaml.
    fn yaml(self, whose: &str) -> String {
        match self {
            Kind::Basic => format!("{{username: {whose}, password: {whose}-secret}}"),
            Kind::Bearer => format!("{{registry_token: {whose}-secret}}"),
            Kind::Identity => format!("{{identity_token: {whose}-secret}}"),
        }
    }

    /// The credentials of `whose` as they are transmitted.
    fn on_wire(self, whose: &str) -> String {
        match (self, whose) {
            (Kind::Basic, "registry") => "Basic cmVnaXN0cnk6cmVnaXN0cnktc2VjcmV0".into(),
            (Kind::Basic, _) => "Basic bWlycm9yOm1pcnJvci1zZWNyZXQ=".into(),
            (Kind::Bearer, _) => format!("Bearer {whose}-secret"),
            (Kind::Identity, _) => format!("refresh_token={whose}-secret"),
        }
    }
}

/// Asserts that these credentials were not sent in any form.
fn assert_nothing_of(whose: &str, seen: &str, case: &str) {
    for kind in [Kind::Basic, Kind::Bearer, Kind::Identity] {
        assert!(!seen.contains(&kind.on_wire(whose)), "{case}: the {whose}'s credentials went to: {seen}");
    }
}

/// A server that sends a challenge, with TLS if its realm has none.
struct Challenging {
    witness: Witness,
    tls: Option<Nginx>,
    realm: Option<Witness>,
}

impl Challenging {
    fn start(node: &Node, name: &str, realm: Realm) -> Challenging {
        let token = (realm != Realm::Same).then(|| Witness::start(|_| Reply::Token));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let own = listener.local_addr().expect("a bound address");
        let host = token.as_ref().map_or(own, |token| token.address);
        let challenge = format!(r#"Bearer realm="http://{host}/token",service="boat""#);
        let witness = Witness::serve(listener, move |head| match head.second().starts_with("/token") {
            true => Reply::Token,
            false => Reply::Challenge(challenge.clone()),
        });
        let tls = (realm == Realm::Downgrade)
            .then(|| Nginx::start(node.folder(), name, witness.address, Wants::default()));
        Challenging { witness, tls, realm: token }
    }

    fn url(&self) -> String {
        match &self.tls {
            Some(nginx) => format!("https://{}", nginx.address()),
            None => format!("http://{}", self.witness.address),
        }
    }

    /// Requests that the server's token service has received; if the server is that service, its own requests.
    fn realm_seen(&self) -> String {
        self.realm.as_ref().unwrap_or(&self.witness).seen()
    }
}

fn write(node: &Node, path: &str, text: &str) {
    let path = node.folder().join(path);
    std::fs::create_dir_all(path.parent().expect("below the folder")).expect("a folder");
    std::fs::write(path, text).expect("a file of the node's");
}

/// {401 by registry, by redirect target, by mirror} × {realm on the same host, on another, without TLS} ×
/// {password, token, refresh token}. Regression: the redirect target's realm received the password and the
/// refresh token.
#[test]
fn credentials_are_sent_only_to_their_registry() {
    let node = Node::start();
    for challenger in [Challenger::Registry, Challenger::RedirectTarget, Challenger::Mirror] {
        for realm in [Realm::Same, Realm::Other, Realm::Downgrade] {
            for kind in [Kind::Basic, Kind::Bearer, Kind::Identity] {
                let case = format!("{challenger:?} {realm:?} {kind:?}");
                let name = format!("tls-{challenger:?}-{realm:?}-{kind:?}");
                let challenging = Challenging::start(&node, &name, realm);
                match challenger {
                    Challenger::Registry => by_registry(&node, &challenging, realm, kind, &case),
                    Challenger::RedirectTarget => by_redirect_target(&node, &challenging, kind, &case),
                    Challenger::Mirror => by_mirror(&node, &challenging, realm, kind, &case),
                }
            }
        }
    }
    assert!(!node.log().contains("-secret"));
    node.stop();
}

/// The requests to a host that has credentials of its own, and to its token service.
fn assert_answered(challenging: &Challenging, realm: Realm, kind: Kind, whose: &str, case: &str) {
    let (own, at_realm) = (challenging.witness.seen(), challenging.realm_seen());
    match kind {
        Kind::Bearer => {
            assert!(own.contains(&kind.on_wire(whose)), "{case}: {own}");
            assert!(!at_realm.contains("/token"), "{case}: a token needs no service: {at_realm}");
        }
        Kind::Basic | Kind::Identity if realm == Realm::Downgrade => {
            assert_eq!(at_realm, "", "{case}: the realm has no TLS");
        }
        Kind::Basic | Kind::Identity => {
            assert!(at_realm.contains(&kind.on_wire(whose)), "{case}: {at_realm}");
            assert!(own.contains("Bearer issued-token"), "{case}: {own}");
        }
    }
}

fn by_registry(node: &Node, registry: &Challenging, realm: Realm, kind: Kind, case: &str) {
    let url = registry.url();
    let host = url.split_once("//").expect("a URL").1;
    write(node, &format!("certs.d/{host}/hosts.toml"), &format!("server = \"{url}\"\nskip_verify = true\n"));
    let mut request = pull(&format!("{host}/x:1"));
    request.auth = Some(kind.auth("registry"));
    node.pull_image(request).expect_err("there is no such image");
    assert_answered(registry, realm, kind, "registry", case);
}

/// The registry redirects to a host that requires credentials.
fn by_redirect_target(node: &Node, target: &Challenging, kind: Kind, case: &str) {
    let to = target.url();
    let registry = Witness::start(move |head| Reply::Redirect(format!("{to}{}", head.second())));
    let host = registry.address;
    write(
        node,
        &format!("certs.d/{host}/hosts.toml"),
        &format!("server = \"http://{host}\"\nskip_verify = true\n"),
    );
    let mut request = pull(&format!("{host}/x:1"));
    request.auth = Some(kind.auth("registry"));
    let refused = node.pull_image(request).expect_err("the target requires credentials");
    assert_nothing_of("registry", &target.witness.seen(), case);
    assert_nothing_of("registry", &target.realm_seen(), case);
    assert!(!target.realm_seen().contains("/token"), "{case}: {}", target.realm_seen());
    let words = format!("redirects to {}, which requires credentials", target.url());
    assert!(refused.message().contains(&words), "{case}: {refused}");
}

/// A mirror has its own credentials, the registry those of the request; both require credentials.
fn by_mirror(node: &Node, mirror: &Challenging, realm: Realm, kind: Kind, case: &str) {
    let registry = Challenging::start(node, "unused", Realm::Other);
    let (host, url) = (registry.witness.address, mirror.url());
    let mirror_host = url.split_once("//").expect("a URL").1;
    write(
        node,
        &format!("certs.d/{host}/hosts.toml"),
        &format!("server = \"http://{host}\"\n[host.\"{url}\"]\n  skip_verify = true\n"),
    );
    let yaml = format!("configs: {{\"{mirror_host}\": {{auth: {}}}}}\n", kind.yaml("mirror"));
    write(node, "registries.yaml", &yaml);
    let mut request = pull(&format!("{host}/x:1"));
    request.auth = Some(kind.auth("registry"));
    node.pull_image(request.clone()).expect_err("there is no such image");
    assert_answered(mirror, realm, kind, "mirror", case);
    assert_answered(&registry, Realm::Other, kind, "registry", case);
    // The credentials of one are not sent to the other, nor to its token service.
    for seen in [mirror.witness.seen(), mirror.realm_seen()] {
        assert_nothing_of("registry", &seen, case);
    }
    for seen in [registry.witness.seen(), registry.realm_seen()] {
        assert_nothing_of("mirror", &seen, case);
    }
    // A mirror without credentials receives none, and its token service is asked for an anonymous token.
    write(node, "registries.yaml", "");
    node.pull_image(request).expect_err("there is no such image");
    for seen in [mirror.witness.seen(), mirror.realm_seen()] {
        assert_nothing_of("registry", &seen, case);
    }
}

/// Basic challenges of a redirect's target, and requests that return to the registry through another host,
/// which then chose the URL.
#[test]
fn redirects_through_another_host_are_followed_without_credentials() {
    let node = Node::start();
    let basic = || Reply::Challenge(r#"Basic realm="boat""#.into());
    let secret = Kind::Basic.on_wire("registry");
    // The registry requires a password first, so that the second request contains it.
    let target = Witness::start(move |_| basic());
    let to = format!("http://{}/blob", target.address);
    let registry = Witness::start(move |head| match head.get("authorization") {
        None => basic(),
        Some(_) => Reply::Redirect(to.clone()),
    });
    let with_password = |host: SocketAddr| {
        let mut request = pull(&format!("{host}/x:1"));
        request.auth = Some(Kind::Basic.auth("registry"));
        request
    };
    let refused =
        node.pull_image(with_password(registry.address)).expect_err("the target requires credentials");
    assert!(refused.message().contains("which requires credentials"), "{refused}");
    assert!(registry.seen().contains(&secret), "it asked itself: {}", registry.seen());
    assert_eq!(target.seen().matches("GET").count(), 1, "asked once: {}", target.seen());
    assert_nothing_of("registry", &target.seen(), "target");
    // Registry, other host, registry.
    let back = Arc::new(Mutex::new(String::new()));
    let to = back.clone();
    let other = Witness::start(move |_| Reply::Redirect(to.lock().expect("ours").clone()));
    let to = format!("http://{}/away", other.address);
    let registry = Witness::start(move |head| match (head.get("authorization"), head.second()) {
        (_, "/chosen") => Reply::Challenge(r#"Basic realm="boat""#.into()),
        (None, _) => Reply::Challenge(r#"Basic realm="boat""#.into()),
        (Some(_), _) => Reply::Redirect(to.clone()),
    });
    *back.lock().expect("ours") = format!("http://{}/chosen", registry.address);
    node.pull_image(with_password(registry.address)).expect_err("it ends with a challenge");
    let chosen =
        registry.seen().lines().filter(|line| line.contains("/chosen")).collect::<Vec<_>>().join("\n");
    assert_eq!(chosen.lines().count(), 1, "{chosen}");
    assert_nothing_of("registry", &chosen, "chosen by the other host");
    assert_nothing_of("registry", &other.seen(), "other host");
    node.stop();
}
