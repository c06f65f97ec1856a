//! Registry configuration in containerd's hosts.toml, k3s' registries.yaml and docker's config.json, redirects, and
//! TLS with Debian's nginx. The files are read at the next pull, without a restart.

use std::net::{Ipv6Addr, TcpListener};

use coracle_tests::cri::proto::AuthConfig;
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;

use crate::faults::remove;
use crate::proxies::Connect;

pub(crate) fn write(node: &Node, path: &str, text: &str) {
    let path = node.folder().join(path);
    std::fs::create_dir_all(path.parent().expect("below the folder")).expect("a folder");
    std::fs::write(path, text).expect("a file of the node's");
}

pub(crate) fn explain(node: &Node, name: &str) -> String {
    let output = node.image_command(&["explain", name]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn hosts_toml_determines_the_endpoints() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "hosts"), "boats/probe", "1");
    let digests = Faulty::start(registry.address(), |_, _| Fault::None);
    let all = Faulty::start(registry.address(), |_, _| Fault::None);
    let server = Faulty::start(registry.address(), |_, _| Fault::None);
    let text = format!(
        r#"
server = "http://{server}"

[host."http://{digests}"]
  capabilities = ["pull"]
  [host."http://{digests}".header]
    x-boat = "coracle"

[host."http://{all}/v2"]
  capabilities = ["pull", "resolve"]
  override_path = true
"#,
        server = server.address(),
        digests = digests.address(),
        all = all.address(),
    );
    write(&node, "certs.d/boats.invalid/hosts.toml", &text);
    let name = "boats.invalid/boats/probe:1";
    node.pull_image(pull(name)).expect("pull");
    let tags = |faulty: &Faulty| {
        faulty.served().iter().filter(|served| served.head.second().contains("manifests/1")).count()
    };
    assert_eq!((tags(&digests), tags(&all), tags(&server)), (0, 1, 0));
    assert!(all.served().iter().all(|served| served.head.second().contains("ns=boats.invalid")));
    // The endpoint that resolved the tag is preferred for the rest; one that cannot resolve serves digests.
    remove(&node, name);
    let broken = text.replace(&format!("[host.\"http://{}/v2\"]", all.address()), "[host.\"ftp://nowhere\"]");
    write(&node, "certs.d/boats.invalid/hosts.toml", &broken);
    node.pull_image(pull(name)).expect("one bad entry disables itself");
    assert_eq!(tags(&server), 1, "read again without a restart");
    wait_until("the log names file and line", || {
        node.log().contains("boats.invalid/hosts.toml:9: ftp://nowhere")
    });
    let by_digest = node.list_images(Default::default()).expect("list").images;
    let by_digest = by_digest.iter().find_map(|image| image.repo_digests.first()).expect("a digest").clone();
    remove(&node, name);
    node.pull_image(pull(&by_digest)).expect("by digest");
    let blobs = digests.served();
    assert!(blobs.len() >= 2, "digests are asked of the first: {blobs:?}");
    assert!(blobs.iter().all(|served| served.head.get("x-boat") == Some("coracle")));
    // For an invalid file its last valid version applies; after its removal the entry of registries.yaml.
    remove(&node, &by_digest);
    let file = "certs.d/boats.invalid/hosts.toml";
    write(&node, file, &format!("{text}\nserver = \n"));
    node.pull_image(pull(name)).expect("by the last good one");
    wait_until("the log says so", || node.log().contains("hosts.toml:13: "));
    remove(&node, name);
    std::fs::remove_file(node.folder().join(file)).expect("our file");
    let yaml = format!("mirrors: {{boats.invalid: {{endpoint: [\"http://{}\"]}}}}\n", registry.address());
    write(&node, "registries.yaml", &yaml);
    write(&node, "certs.d/_default/hosts.toml", "server = \"http://127.0.0.1:1\"\n");
    node.pull_image(pull(name)).expect("by registries.yaml");
    // For an invalid registries.yaml the last valid version applies, and a corrected one applies again.
    remove(&node, name);
    write(&node, "registries.yaml", &format!("{yaml} - what: ["));
    node.pull_image(pull(name)).expect("by the last good one");
    wait_until("the log says so", || node.log().contains("the last valid version applies"));
    write(&node, "registries.yaml", "");
    remove(&node, name);
    node.pull_image(pull(name)).expect_err("nothing says where any more");
    node.stop();
}

/// REG-10, and the same behaviour for hosts.toml.
#[test]
fn invalid_files_are_shown_in_status_until_they_are_corrected() {
    let mut node = Node::start();
    let trouble = |node: &Node| {
        let status = node.status(Default::default()).expect("status").status.expect("conditions");
        let found = status.conditions.into_iter().find(|condition| condition.r#type == "RegistriesReadable");
        let found = found.expect("our condition");
        assert_eq!(found.status, found.message.is_empty(), "{found:?}");
        found.message
    };
    assert_eq!(trouble(&node), "", "no file is no mistake");
    // At the start, without a pull.
    write(&node, "registries.yaml", "mirrors: {}\n - what: [");
    node.restart();
    wait_until("the start has looked", || trouble(&node).contains("registries.yaml:2: "));
    // After a pull, even a failed one; the directories of all hosts are checked, not only that of the pull.
    write(&node, "registries.yaml", "mirrors: {}\n");
    write(&node, "certs.d/other.invalid/hosts.toml", "\n\nserver = \n");
    node.pull_image(pull("127.0.0.1:1/x:1")).expect_err("no registry there");
    wait_until("the pull has looked", || {
        let text = trouble(&node);
        text.contains("other.invalid/hosts.toml:3: ") && !text.contains("registries.yaml")
    });
    // After a reload.
    write(&node, "certs.d/other.invalid/hosts.toml", "");
    let pid = nix::unistd::Pid::from_raw(node.pid());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).expect("a signal");
    wait_until("the reload has looked", || trouble(&node).is_empty());
    node.stop();
}

#[test]
fn explain_lists_endpoints_without_secrets() {
    let config = "[registry]\ndocker_config = \"/FOLDER/docker.json\"\n";
    let mut node = Node::start();
    let folder = node.folder().display().to_string();
    node.rewrite_config(&config.replace("/FOLDER", &folder));
    node.restart();
    write(
        &node,
        "registries.yaml",
        "mirrors:\n  docker.io:\n    endpoint:\n      - https://mirror.invalid:5000/proxy\n      - nonsense://x\n\
         configs:\n  mirror.invalid:5000:\n    auth: {username: me, password: secret}\n    tls: {ca_file: /ca.pem}\n",
    );
    write(
        &node,
        "docker.json",
        "{\n\t\"auths\": {\n\t\t\"https://index.docker.io/v1/\": {\"auth\": \"bWU6c2VjcmV0\"}\n\t},\n\t\"credsStore\": \"desktop\"\n}\n",
    );
    let text = explain(&node, "busybox");
    let expected = format!(
        "docker.io/library/busybox:latest\n\
        \x20 https://mirror.invalid:5000/proxy/library/busybox\n\
        \x20   from         {folder}/registries.yaml:4\n\
        \x20   credentials  basic of {folder}/registries.yaml:8\n\
        \x20   tls          verified by the system's root certificates and /ca.pem\n\
        \x20 https://registry-1.docker.io/v2/library/busybox\n\
        \x20   from         the registry itself\n\
        \x20   credentials  basic of {folder}/docker.json:3\n\
        \x20   tls          verified by the system's root certificates\n"
    );
    assert_eq!(text, expected);
    write(
        &node,
        "certs.d/docker.io/hosts.toml",
        "[host.\"localhost:5000\"]\n  capabilities = [\"pull\"]\n  [host.\"localhost:5000\".header]\n    authorization = \"Basic secret\"\n\
         [host.\"https://other.invalid\"]\n  skip_verify = true\n  client = [[\"c.pem\", \"c.key\"]]\n",
    );
    let text =
        explain(&node, "busybox@sha256:0000000000000000000000000000000000000000000000000000000000000000");
    for words in [
        "  http://localhost:5000/v2/library/busybox\n",
        &format!(
            "from         {folder}/certs.d/docker.io/hosts.toml:1, for digests only, with authorization\n"
        ),
        "tls          none, plain http\n",
        &format!("tls          not verified, with the client certificate {folder}/certs.d/docker.io/c.pem\n"),
        "  https://registry-1.docker.io/v2/library/busybox\n",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    assert!(!text.contains("secret") && !text.contains("mirror.invalid"), "{text}");
    let output = node.image_command(&["explain", "No Reference"]);
    assert!(!output.status.success());
    wait_until("what is wrong is in the log", || {
        let log = node.log();
        log.contains("registries.yaml:5") && log.contains("docker.json:5: credsStore")
    });
    assert!(!node.log().contains("secret"));
    node.stop();
}

#[test]
fn credentials_come_from_the_request_or_from_files() {
    let mut node = Node::start();
    let folder = node.folder().display().to_string();
    node.rewrite_config(&format!("[registry]\ndocker_config = \"{folder}/docker.json\"\n"));
    node.restart();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "secret"), "x", "1");
    let demands = [
        Demand::Basic("bWU6c2VjcmV0".into()),
        Demand::Bearer(Some("bWU6c2VjcmV0".into())),
        Demand::Refresh("refresh-me".into()),
        Demand::Password("me", "secret"),
    ];
    for demand in demands {
        let proxy = Proxy::start(registry.address(), demand.clone(), Lie::None);
        let name = proxy.name("x", "1");
        node.pull_image(pull(&name)).expect_err("no credentials");
        let entry = match demand {
            Demand::Refresh(_) => r#"{"identitytoken": "refresh-me"}"#,
            _ => r#"{"auth": "bWU6c2VjcmV0"}"#,
        };
        let text = format!("{{\"auths\": {{\"{}\": {entry}}}}}", proxy.address());
        write(&node, "docker.json", &text);
        node.pull_image(pull(&name))
            .unwrap_or_else(|error| panic!("{demand:?}: {error}\n{:?}", proxy.seen()));
        remove(&node, &name);
        // The request's credentials have precedence, valid or not.
        let mut request = pull(&name);
        request.auth = Some(AuthConfig { registry_token: "wrong".into(), ..Default::default() });
        let refused = node.pull_image(request.clone()).expect_err("a wrong token");
        assert!(refused.message().contains("unauthorized"), "{refused}");
        if let Demand::Basic(_) = demand {
            continue;
        }
        request.auth = Some(AuthConfig { registry_token: "let-me-in".into(), ..Default::default() });
        node.pull_image(request).expect("the registry's own token");
        remove(&node, &name);
    }
    assert!(!node.log().contains("secret") && !node.log().contains("refresh-me"));
    node.stop();
}

#[test]
fn redirects_to_blob_stores_are_followed_without_credentials() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "redirect"), "x", "1");
    let store = Faulty::start(registry.address(), |_, _| Fault::None);
    let to = store.address();
    let guarded = Faulty::start(registry.address(), move |head, _| {
        if head.get("authorization").is_none() {
            return Fault::Challenge;
        }
        match head.second().contains("/blobs/") {
            true => Fault::Redirect(format!("http://{to}{}", head.second())),
            false => Fault::None,
        }
    });
    let mut request = pull(&guarded.name("x", "1"));
    request.auth =
        Some(AuthConfig { username: "me".into(), password: "secret".into(), ..Default::default() });
    node.pull_image(request).expect("pull");
    assert_eq!(store.served().len(), 2, "the configuration and a layer");
    for served in store.served() {
        assert_eq!(served.head.get("authorization"), None, "{served:?}");
    }
    let round = Faulty::start(registry.address(), |head, _| Fault::Redirect(head.second().to_owned()));
    let refused = node.pull_image(pull(&round.name("x", "1"))).expect_err("in circles");
    assert!(refused.message().contains("redirects"), "{refused}");
    assert!(round.served().len() <= 10, "{:?}", round.served().len());
    node.stop();
}

#[test]
fn tls_is_verified_according_to_the_configuration() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "tls"), "x", "1");
    let wants = Wants { certificate: true, password: true };
    let nginx = Nginx::start(node.folder(), "nginx", registry.address(), wants);
    let name = format!("{}/x:1", nginx.address());
    let mut request = pull(&name);
    request.auth =
        Some(AuthConfig { username: "me".into(), password: "secret".into(), ..Default::default() });
    let (ca, cert, key) = (nginx.file("ca.pem"), nginx.file("client.pem"), nginx.file("client.key"));
    let (ca, cert, key) = (ca.display(), cert.display(), key.display());
    let address = nginx.address();
    let hosts = format!("certs.d/{address}/hosts.toml");
    // A registry on the loopback interface is contacted without TLS unless a file requires it.
    let server = format!("server = \"https://{address}\"\n");
    write(&node, &hosts, &server);
    let refused = node.pull_image(request.clone()).expect_err("an unknown authority");
    assert!(refused.message().to_lowercase().contains("certificate"), "{refused}");
    write(&node, &hosts, &format!("{server}ca = \"{ca}\"\n"));
    node.pull_image(request.clone()).expect_err("it wants a certificate, too");
    write(&node, &hosts, &format!("{server}skip_verify = true\nclient = [[\"{cert}\", \"{key}\"]]\n"));
    node.pull_image(request.clone()).expect("not verified");
    remove(&node, &name);
    write(&node, &hosts, &format!("{server}ca = \"{ca}\"\nclient = [[\"{cert}\", \"{key}\"]]\n"));
    node.pull_image(request.clone()).expect("verified both ways");
    remove(&node, &name);
    let refused = node.pull_image(pull(&name)).expect_err("without a password");
    assert!(refused.message().contains("unauthorized"), "{refused}");
    // The same settings in registries.yaml, including the password; then with certificates in docker's
    // layout.
    std::fs::remove_dir_all(node.folder().join("certs.d")).expect("ours");
    let config = |tls: &str| {
        format!(
            "mirrors: {{\"{address}\": {{endpoint: [\"https://{address}\"]}}}}\n\
             configs: {{\"{address}\": {{auth: {{username: me, password: secret}}{tls}}}}}\n"
        )
    };
    let tls = format!(", tls: {{ca_file: {ca}, cert_file: {cert}, key_file: {key}}}");
    write(&node, "registries.yaml", &config(&tls));
    node.pull_image(pull(&name)).expect("by registries.yaml");
    remove(&node, &name);
    assert!(!node.log().contains("secret"));
    node.stop();
}

/// A certificate as `openssl req -x509` makes it and Docker's guide for a private registry shows it: accepted if it
/// is trusted itself, for its own name only; otherwise the error says what to do.
#[test]
fn a_certificate_that_signed_itself_is_accepted_where_it_is_trusted() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "self-signed"), "x", "1");
    let right = Nginx::self_signed(node.folder(), "right", registry.address(), "127.0.0.1");
    let wrong = Nginx::self_signed(node.folder(), "wrong", registry.address(), "192.0.2.1");
    let trust = |nginx: &Nginx, ca: &std::path::Path| {
        let address = nginx.address();
        format!(
            "mirrors: {{\"{address}\": {{endpoint: [\"https://{address}\"]}}}}\n\
             configs: {{\"{address}\": {{tls: {{ca_file: {}}}}}}}\n",
            ca.display()
        )
    };
    let name = format!("{}/x:1", right.address());
    write(&node, "registries.yaml", &trust(&right, &wrong.file("server.pem")));
    let refused = node.pull_image(pull(&name)).expect_err("another one is trusted");
    let words = refused.message();
    assert!(words.contains("it signed itself, or an authority") && words.contains("ca_file"), "{refused}");
    write(&node, "registries.yaml", &trust(&right, &right.file("server.pem")));
    node.pull_image(pull(&name)).expect("it is trusted itself");
    remove(&node, &name);
    // Trusted, but for another address.
    write(&node, "registries.yaml", &trust(&wrong, &wrong.file("server.pem")));
    let refused = node.pull_image(pull(&format!("{}/x:1", wrong.address()))).expect_err("of another name");
    assert!(refused.message().contains("not valid for name"), "{refused}");
    node.stop();
}

/// Certificates that openssl makes and Go's clients accept.
#[test]
fn certificates_of_all_curves_and_hashes_are_accepted() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "curves"), "x", "1");
    let usual = ("prime256v1", "sha256");
    let cases = [
        ("server-p521", (usual, ("secp521r1", "sha256")), false, ""),
        ("all-p521", (("secp521r1", "sha512"), ("secp521r1", "sha512")), false, ""),
        ("p521-sha256", (("secp521r1", "sha256"), usual), false, ""),
        ("p256-sha512", (("prime256v1", "sha512"), usual), false, ""),
        ("p384-sha512", (("secp384r1", "sha512"), usual), false, ""),
        ("authority", (usual, usual), true, ""),
        ("tls12", (usual, ("secp521r1", "sha256")), false, "ssl_protocols TLSv1.2;"),
        ("curve", (usual, usual), false, "ssl_ecdh_curve secp521r1;"),
    ];
    for (about, keys, is_authority, settings) in cases {
        let nginx = Nginx::signed(node.folder(), about, registry.address(), keys, is_authority, settings);
        let (address, ca) = (nginx.address(), nginx.file("ca.pem").display().to_string());
        write(
            &node,
            &format!("certs.d/{address}/hosts.toml"),
            &format!("server = \"https://{address}\"\nca = \"{ca}\"\n"),
        );
        let name = format!("{address}/x:1");
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{about}: {error}"));
        remove(&node, &name);
    }
    // Signed by an authority that is not trusted; and by no cipher in common.
    let other = Nginx::signed(node.folder(), "other", registry.address(), (usual, usual), true, "");
    let old = "ssl_protocols TLSv1.2; ssl_ciphers ECDHE-ECDSA-AES128-SHA;";
    let old = Nginx::signed(node.folder(), "old", registry.address(), (usual, usual), false, old);
    for (nginx, words) in
        [(&other, "an authority that this node does not trust"), (&old, "no protocol in common")]
    {
        let (address, ca) = (nginx.address(), old.file("ca.pem").display().to_string());
        write(
            &node,
            &format!("certs.d/{address}/hosts.toml"),
            &format!("server = \"https://{address}\"\nca = \"{ca}\"\n"),
        );
        let refused = node.pull_image(pull(&format!("{address}/x:1"))).expect_err(words);
        assert!(refused.message().contains(words), "{refused}");
    }
    node.stop();
}

/// A Wi-Fi's log-in page answers every request with HTML and 200.
#[test]
fn an_error_of_a_captive_portal_names_it() {
    let node = Node::start();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it has one");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            use std::io::{Read as _, Write as _};
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let page = "\n<!DOCTYPE html><html><body>Please log in</body></html>";
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\r\n{page}",
                page.len()
            );
        }
    });
    let refused = node.pull_image(pull(&format!("{address}/x:1"))).expect_err("it is no registry");
    assert!(
        refused.message().contains("web page (HTML)") && refused.message().contains("captive portal"),
        "{refused}"
    );
    node.stop();
}

#[test]
fn certificates_in_dockers_layout_are_used() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "docker"), "x", "1");
    let wants = Wants { certificate: true, password: false };
    let nginx = Nginx::start(fixture.folder(), "nginx", registry.address(), wants);
    // With a host name other than localhost, a registry's own endpoint is https; the proxy resolves it.
    let proxy = Connect::start(nginx.address());
    let environment = vec![("HTTPS_PROXY".to_owned(), format!("http://{}", proxy.address))];
    let node = Node::with(Options { environment, ..Options::default() });
    let refused = node.pull_image(pull("registry.invalid/x:1")).expect_err("nothing is known of it");
    assert!(refused.message().to_lowercase().contains("certificate"), "{refused}");
    for (from, to) in [("ca.pem", "ca.crt"), ("client.pem", "client.cert"), ("client.key", "client.key")] {
        let text = std::fs::read_to_string(nginx.file(from)).expect("nginx has it");
        write(&node, &format!("certs.d/registry.invalid/{to}"), &text);
    }
    node.pull_image(pull("registry.invalid/x:1")).expect("verified both ways");
    let seen = proxy.seen.lock().expect("no thread panics with it").clone();
    assert!(seen.iter().all(|line| line == "CONNECT registry.invalid:443 HTTP/1.1"), "{seen:?}");
    assert!(explain(&node, "registry.invalid/x:1").contains(&format!("http://{}", proxy.address)));
    node.stop();
    drop(nginx);
    drop(registry);
    fixture.stop();
}

#[test]
fn registries_may_have_ipv6_addresses() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "six"), "x", "1");
    let six = Faulty::start_at(Ipv6Addr::LOCALHOST.into(), registry.address(), |_, _| Fault::None);
    let yaml = format!("mirrors: {{six.invalid: {{endpoint: [\"http://{}\"]}}}}\n", six.address());
    write(&node, "registries.yaml", &yaml);
    node.pull_image(pull("six.invalid/x:1")).expect("pull");
    assert!(
        six.served()
            .iter()
            .all(|served| served.head.get("host").is_some_and(|host| host.starts_with("[::1]:")))
    );
    node.stop();
}
