//! Proxies of the environment: whole URLs and CONNECT by HTTP, also with TLS to the proxy, and SOCKS; and what is not supported.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use coracle_tests::host::{uninterrupted, wait_until};
use coracle_tests::http;
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Registry, free_address};
use coracle_tests::request::pull;

use crate::registries::{explain, write};

#[test]
fn proxies_of_the_environment_are_used_or_bypassed() {
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
    let is_whole = |line: &String| line.starts_with("GET http://far.invalid:5000/v2/x/");
    assert!(!seen.is_empty() && seen.iter().all(is_whole), "CONNECT is for TLS: {seen:?}");
    let text = explain(&node, "some.invalid/x:1");
    assert!(text.contains(&format!("proxy        http://{} of http_proxy\n", proxy.address)), "{text}");
    write(&node, "registries.yaml", "mirrors: {\"*\": {endpoint: [\"http://a.direct.invalid:5000\"]}}\n");
    assert!(!explain(&node, "some.invalid/x:1").contains("proxy "));
    assert!(!node.log().contains("secret"));
    node.stop();
    fixture.stop();
}

/// The proxy looks the names up, as with Go's clients. An unsupported proxy must not become a direct connection, which the
/// user of a proxy may have excluded.
#[test]
fn proxies_with_socks_are_used_and_unknown_ones_refused() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "socks"), "x", "1");
    let proxy = Connect::start_with(registry.address(), socks);
    let yaml = "mirrors: {\"*\": {endpoint: [\"http://far.invalid:5000\"]}}\n";
    let node = |value: String| {
        let environment = vec![("HTTP_PROXY".to_owned(), value)];
        let node = Node::with(Options { environment, ..Options::default() });
        write(&node, "registries.yaml", yaml);
        node
    };
    let through = node(format!("socks5://{}", proxy.address));
    through.pull_image(pull("some.invalid/x:1")).expect("through the proxy");
    let seen = proxy.seen.lock().expect("no thread panics with it").clone();
    assert!(!seen.is_empty() && seen.iter().all(|line| line == "far.invalid:5000"), "{seen:?}");
    let text = explain(&through, "some.invalid/x:1");
    assert!(text.contains(&format!("proxy        socks5://{} of HTTP_PROXY\n", proxy.address)), "{text}");
    through.stop();
    let refused = node(format!("socks4://me:secret@{}", proxy.address));
    let error = refused.pull_image(pull("some.invalid/x:1")).expect_err("it is not supported");
    assert!(error.message().contains("HTTP_PROXY: a proxy with \"socks4\""), "{error}");
    assert!(explain(&refused, "some.invalid/x:1").contains("HTTP_PROXY: a proxy with \"socks4\""));
    assert_eq!(proxy.seen.lock().expect("no thread panics with it").len(), seen.len());
    assert!(!error.message().contains("secret") && !refused.log().contains("secret"));
    refused.stop();
    fixture.stop();
}

/// The password for a proxy with `https://` is sent by TLS only; openssl's server decrypts it.
#[test]
fn a_proxy_with_tls_is_contacted_with_tls() {
    let fixture = Node::start();
    let folder = fixture.folder();
    let address = free_address();
    let openssl = |words: &str| {
        let mut command = Command::new("openssl");
        command
            .args(words.split_whitespace())
            .current_dir(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout proxy.key -out proxy.pem";
    let made =
        openssl(&format!("req -x509 {key} -subj /CN=proxy -days 2 -addext subjectAltName=IP:127.0.0.1"));
    assert!({ made }.status().expect("openssl").success());
    let mut server = openssl(&format!("s_server -accept {address} -cert proxy.pem -key proxy.key -quiet"))
        .stdin(Stdio::piped())
        .spawn()
        .expect("openssl");
    wait_until("the proxy listens", || TcpStream::connect(address).is_ok());
    let (from, mut to) = (server.stdout.take().expect("a pipe"), server.stdin.take().expect("a pipe"));
    let heads: Arc<Mutex<Vec<http::Head>>> = Arc::default();
    let seen = heads.clone();
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        while let Ok(head) = http::read_head(&mut from)
            && !head.first.is_empty()
            && to.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").is_ok()
        {
            seen.lock().expect("no thread panics with it").push(head);
        }
    });
    let trusted = folder.join("proxy.pem").display().to_string();
    let environment = vec![
        ("HTTP_PROXY".to_owned(), format!("https://me:secret@{address}")),
        ("SSL_CERT_FILE".to_owned(), trusted),
    ];
    let node = Node::with(Options { environment, ..Options::default() });
    write(&node, "registries.yaml", "mirrors: {\"*\": {endpoint: [\"http://far.invalid:5000\"]}}\n");
    let refused = node.pull_image(pull("some.invalid/x:1")).expect_err("by the proxy");
    assert!(refused.message().contains("403"), "{refused}");
    server.kill().and_then(|()| server.wait()).expect("our server");
    let heads = heads.lock().expect("no thread panics with it").clone();
    assert!(heads.iter().any(|head| head.first.starts_with("GET http://far.invalid:5000/v2/")), "{heads:?}");
    assert!(
        heads.iter().all(|head| head.get("proxy-authorization") == Some("Basic bWU6c2VjcmV0")),
        "{heads:?}"
    );
    node.stop();
    fixture.stop();
}

/// A proxy that connects all requests to one address, or passes them on to it.
pub(crate) struct Connect {
    pub(crate) address: SocketAddr,
    /// First lines of the requests, or the hosts with their ports.
    pub(crate) seen: Arc<Mutex<Vec<String>>>,
}

impl Connect {
    pub(crate) fn start(to: SocketAddr) -> Connect {
        Connect::start_with(to, tunnel)
    }

    fn start_with(
        to: SocketAddr,
        serve: fn(TcpStream, SocketAddr, &Mutex<Vec<String>>) -> Option<()>,
    ) -> Connect {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let log = log.clone();
                std::thread::spawn(move || serve(stream, to, &log));
            }
        });
        Connect { address, seen }
    }
}

fn tunnel(mut client: TcpStream, to: SocketAddr, log: &Mutex<Vec<String>>) -> Option<()> {
    // Byte by byte, because data after the header must not be buffered.
    let mut reader = BufReader::with_capacity(1, client.try_clone().ok()?);
    let mut head = http::read_head(&mut reader).ok()?;
    log.lock().expect("no thread panics with it").push(head.first.clone());
    if let Some((method, rest)) = head.first.split_once(" http://") {
        let (_, path) = rest.split_once('/')?;
        head.first = format!("{method} /{path}");
        let (answer, body) = http::pass_on(to, &head).ok()?;
        let fields: String =
            answer.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        client.write_all(format!("{}\r\n{fields}\r\n", answer.first).as_bytes()).ok()?;
        return client.write_all(&body).ok();
    }
    let server = http::connect(to).ok()?;
    client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").ok()?;
    relay(client, server)
}

/// A proxy of SOCKS 5 (RFC 1928) without credentials, for host names.
fn socks(mut client: TcpStream, to: SocketAddr, log: &Mutex<Vec<String>>) -> Option<()> {
    let mut reader = client.try_clone().ok()?;
    let mut read = |count: usize| {
        let mut bytes = vec![0; count];
        reader.read_exact(&mut bytes).ok().map(|()| bytes)
    };
    let methods = usize::from(read(2)?[1]);
    read(methods)?;
    client.write_all(&[5, 0]).ok()?;
    let head = read(5)?;
    let line = match head[..4] == [5, 1, 0, 3] {
        true => {
            let name = String::from_utf8(read(head[4].into())?).ok()?;
            let port = read(2)?;
            format!("{name}:{}", u16::from_be_bytes([port[0], port[1]]))
        }
        false => format!("another request: {head:?}"),
    };
    log.lock().expect("no thread panics with it").push(line);
    client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).ok()?;
    relay(client, http::connect(to).ok()?)
}

/// Copies both ways until the server closes.
fn relay(mut client: TcpStream, mut server: TcpStream) -> Option<()> {
    let (mut from, mut into) = (client.try_clone().ok()?, server.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut into);
        let _ = into.shutdown(std::net::Shutdown::Write);
    });
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = uninterrupted(|| server.read(&mut buffer)) {
        client.write_all(&buffer[..count]).ok()?;
    }
    client.shutdown(std::net::Shutdown::Both).ok()
}
