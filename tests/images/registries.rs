//! Which endpoint is asked, with what: containerd's hosts.toml, k3s' registries.yaml and docker's config.json as people
//! write them, proxies, redirects, and TLS by Debian's nginx. Each file is read at the next pull, without a restart.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use coracle_tests::cri::proto::AuthConfig;
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::wait_until;
use coracle_tests::http;
use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;

use crate::faults::remove;

fn write(node: &Node, path: &str, text: &str) {
    let path = node.folder().join(path);
    std::fs::create_dir_all(path.parent().expect("below the folder")).expect("a folder");
    std::fs::write(path, text).expect("a file of the node's");
}

fn explain(node: &Node, name: &str) -> String {
    let output = node.image_command(&["explain", name]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn hosts_toml_says_who_is_asked_for_what() {
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
    // Who answered for the tag is asked for the rest first; who cannot resolve it serves digests.
    remove(&node, name);
    let broken = text.replace(&format!("[host.\"http://{}/v2\"]", all.address()), "[host.\"ftp://nowhere\"]");
    write(&node, "certs.d/boats.invalid/hosts.toml", &broken);
    node.pull_image(pull(name)).expect("one bad entry disables itself");
    assert_eq!(tags(&server), 1, "read anew without a restart");
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
    // A file that breaks counts as it last was; one that goes makes way for registries.yaml's entry, before the default.
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
    // A registries.yaml that breaks leaves the last good one in force, and one that is fixed counts again.
    remove(&node, name);
    write(&node, "registries.yaml", &format!("{yaml} - what: ["));
    node.pull_image(pull(name)).expect("by the last good one");
    wait_until("the log says so", || node.log().contains("the last good one counts"));
    write(&node, "registries.yaml", "");
    remove(&node, name);
    node.pull_image(pull(name)).expect_err("nothing says where any more");
    node.stop();
}

/// REG-10, and the same for hosts.toml.
#[test]
fn broken_files_show_in_status_until_they_are_mended() {
    let mut node = Node::start();
    let trouble = |node: &Node| {
        let status = node.status(Default::default()).expect("status").status.expect("conditions");
        let found = status.conditions.into_iter().find(|condition| condition.r#type == "RegistriesReadable");
        let found = found.expect("our condition");
        assert_eq!(found.status, found.message.is_empty(), "{found:?}");
        found.message
    };
    assert_eq!(trouble(&node), "", "no file is no mistake");
    // At the start, without any pull.
    write(&node, "registries.yaml", "mirrors: {}\n - what: [");
    node.restart();
    wait_until("the start has looked", || trouble(&node).contains("registries.yaml:2: "));
    // After a pull, be it in vain; all hosts are looked at, not only the one that was asked.
    write(&node, "registries.yaml", "mirrors: {}\n");
    write(&node, "certs.d/other.invalid/hosts.toml", "\n\nserver = \n");
    node.pull_image(pull("127.0.0.1:1/x:1")).expect_err("nobody is there");
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
fn explain_says_where_a_name_leads_and_no_secret() {
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
        \x20   tls          verified by the system's roots and /ca.pem\n\
        \x20 https://registry-1.docker.io/v2/library/busybox\n\
        \x20   from         the registry itself\n\
        \x20   credentials  basic of {folder}/docker.json:3\n\
        \x20   tls          verified by the system's roots\n"
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
    ];
    for demand in demands {
        let proxy = Proxy::start(registry.address(), demand.clone(), Lie::None);
        let name = proxy.name("x", "1");
        node.pull_image(pull(&name)).expect_err("nobody was named");
        let entry = match demand {
            Demand::Refresh(_) => r#"{"identitytoken": "refresh-me"}"#,
            _ => r#"{"auth": "bWU6c2VjcmV0"}"#,
        };
        let text = format!("{{\"auths\": {{\"{}\": {entry}}}}}", proxy.address());
        write(&node, "docker.json", &text);
        node.pull_image(pull(&name))
            .unwrap_or_else(|error| panic!("{demand:?}: {error}\n{:?}", proxy.seen()));
        remove(&node, &name);
        // The request's count more, right or wrong.
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
fn redirects_lead_to_blob_stores_without_our_credentials() {
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
    assert!(round.served().len() <= 6, "{:?}", round.served().len());
    node.stop();
}

#[test]
fn tls_is_verified_by_what_the_files_say() {
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
    // A registry on loopback is asked without TLS unless a file says otherwise.
    let server = format!("server = \"https://{address}\"\n");
    write(&node, &hosts, &server);
    let refused = node.pull_image(request.clone()).expect_err("of an authority nobody knows");
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
    // The same by registries.yaml, with the password in it; then with certificates as docker looks for them.
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

#[test]
fn certificates_lie_in_the_folder_as_docker_has_them() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "docker"), "x", "1");
    let wants = Wants { certificate: true, password: false };
    let nginx = Nginx::start(fixture.folder(), "nginx", registry.address(), wants);
    // By a name that is not loopback's, a registry's own endpoint is https; the proxy knows where it is.
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
fn proxies_of_the_environment_are_asked_and_passed_by() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "proxied"), "x", "1");
    let proxy = Connect::start(registry.address());
    let environment = vec![
        ("http_proxy".to_owned(), format!("http://me:secret@{}", proxy.address)),
        ("NO_PROXY".to_owned(), ".direct.invalid".to_owned()),
    ];
    let node = Node::with(Options { environment, ..Options::default() });
    write(&node, "registries.yaml", "mirrors: {\"*\": {endpoint: [\"http://far.invalid:5000\"]}}\n");
    node.pull_image(pull("some.invalid/x:1")).expect("through the proxy");
    let seen = proxy.seen.lock().expect("no thread panics with it").clone();
    assert!(
        !seen.is_empty() && seen.iter().all(|line| line == "CONNECT far.invalid:5000 HTTP/1.1"),
        "{seen:?}"
    );
    let text = explain(&node, "some.invalid/x:1");
    assert!(text.contains(&format!("proxy        http://{}\n", proxy.address)), "{text}");
    write(&node, "registries.yaml", "mirrors: {\"*\": {endpoint: [\"http://a.direct.invalid:5000\"]}}\n");
    assert!(!explain(&node, "some.invalid/x:1").contains("proxy "));
    assert!(!node.log().contains("secret"));
    node.stop();
    fixture.stop();
}

#[test]
fn addresses_may_be_of_version_6() {
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

/// A proxy that connects everything to one place.
struct Connect {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Connect {
    fn start(to: SocketAddr) -> Connect {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let log = log.clone();
                std::thread::spawn(move || tunnel(stream, to, &log));
            }
        });
        Connect { address, seen }
    }
}

fn tunnel(mut client: TcpStream, to: SocketAddr, log: &Mutex<Vec<String>>) -> Option<()> {
    // Byte by byte: what follows the head is not ours to buffer.
    let mut reader = BufReader::with_capacity(1, client.try_clone().ok()?);
    let head = http::read_head(&mut reader).ok()?;
    log.lock().expect("no thread panics with it").push(head.first);
    let mut server = http::connect(to).ok()?;
    client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").ok()?;
    let (mut from, mut into) = (client.try_clone().ok()?, server.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut into);
        let _ = into.shutdown(std::net::Shutdown::Write);
    });
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        client.write_all(&buffer[..count]).ok()?;
    }
    client.shutdown(std::net::Shutdown::Both).ok()
}
