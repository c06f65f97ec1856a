//! The server: a plain registry of one image whose answers the rows of a case change before they are sent. It has two ports, one
//! behind servers with TLS, and one that is a proxy.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use coracle_tests::http::{Head, read_head};
use coracle_tests::image::{Image, MANIFEST};
use coracle_tests::layer::digest;
use coracle_tests::nginx::Nginx;

use super::BASIC;
use super::rows::{Row, Script};

/// Object that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Ping,
    Manifest,
    Blob,
    Token,
    /// A path that only redirects lead to.
    Other,
}

/// A request, and what the rows may know of it.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) head: Head,
    pub(super) kind: Kind,
    pub(super) is_head: bool,
    /// True for a request to the other host.
    pub(super) is_other: bool,
    /// True for a request that came by TLS.
    pub(super) is_tls: bool,
    /// How many requests for this kind of content came before, in this case.
    pub(super) earlier: usize,
    pub(super) home: SocketAddr,
    pub(super) other: SocketAddr,
    /// The server with TLS.
    pub(super) tls: String,
    pub(super) form: String,
}

impl Request {
    /// The value of `Authorization`.
    pub(super) fn authorization(&self) -> &str {
        self.head.get("authorization").unwrap_or_default()
    }

    pub(super) fn path(&self) -> &str {
        self.head.second()
    }

    /// Whether the other host is asked as a mirror, which the query names (containerd: hosts.md).
    pub(super) fn is_of_mirror(&self) -> bool {
        self.is_other && (self.path().contains("?ns=") || self.path().contains("&ns="))
    }

    /// Whether a host saw what it must not have: credentials of the pull, a token for the registry, or a header of the server.
    /// They are for the home of the image, or for the other host if that is the server (`is_moved`). A mirror that asks for a
    /// token gets one of its own. The token service of a challenge may be anywhere, but not one to which that redirects.
    pub(super) fn is_leak(&self, is_moved: bool) -> bool {
        let given = self.authorization();
        let is_token = given.starts_with("Bearer tok") && !self.is_of_mirror();
        let is_redirected = self.path().starts_with("/token2") && self.is_other;
        let is_password = given == BASIC && self.kind != Kind::Token;
        let is_secret = is_password || is_token || self.head.get("x-own").is_some();
        self.is_other != is_moved && is_secret || given == BASIC && is_redirected
    }

    /// The request in a few words.
    pub(super) fn describe(&self) -> String {
        let method = self.head.first.split(' ').next().unwrap_or_default();
        let place = if self.is_other { "other:" } else { "" };
        let scheme = self.authorization().split(' ').next().unwrap_or_default();
        let path: String = self.path().chars().take(60).collect();
        format!("{place}{method} {path} [{scheme}]")
    }
}

/// How the end of a body is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    Length,
    /// Another length than that of the body: that many bytes more.
    WrongLength(i64),
    Chunked,
    UntilClose,
}

/// An HTTP response of the registry.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) version: &'static str,
    /// Status and reason.
    pub(super) status: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// The whole content of which the body may be a range.
    pub(super) whole: Vec<u8>,
    pub(super) framing: Framing,
    /// Bytes of the body after which the connection ends.
    pub(super) cut: usize,
    pub(super) closes: bool,
    /// Pause after each part of the body.
    pub(super) pause: Duration,
    /// Sent before the answer.
    pub(super) prefix: &'static str,
    pub(super) line_end: &'static str,
}

impl Reply {
    pub(super) fn new(status: &str, body: &[u8]) -> Reply {
        Reply {
            version: "HTTP/1.1",
            status: status.into(),
            headers: Vec::new(),
            body: body.to_vec(),
            whole: body.to_vec(),
            framing: Framing::Length,
            cut: usize::MAX,
            closes: false,
            pause: Duration::ZERO,
            prefix: "",
            line_end: "\r\n",
        }
    }

    pub(super) fn header(&mut self, name: &str, value: impl Into<String>) {
        self.headers.push((name.into(), value.into()));
    }

    /// Replaces or removes a header field.
    pub(super) fn set(&mut self, name: &str, value: Option<&str>) {
        self.headers.retain(|(key, _)| !key.eq_ignore_ascii_case(name));
        self.headers.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    }

    /// Becomes another answer.
    pub(super) fn become_status(&mut self, status: &str, body: &str) {
        *self = Reply { prefix: self.prefix, version: self.version, ..Reply::new(status, body.as_bytes()) };
    }

    fn send(&self, stream: &mut TcpStream, is_head: bool) -> io::Result<()> {
        const PIECE: usize = 16 << 10;
        let end = self.line_end;
        let mut text = format!("{}{} {}{end}", self.prefix, self.version, self.status);
        for (name, value) in &self.headers {
            text.push_str(&format!("{name}: {value}{end}"));
        }
        let length = self.body.len() as i64;
        match self.framing {
            Framing::Length => text.push_str(&format!("Content-Length: {length}{end}")),
            Framing::WrongLength(more) => text.push_str(&format!("Content-Length: {}{end}", length + more)),
            Framing::Chunked => text.push_str(&format!("Transfer-Encoding: chunked{end}")),
            Framing::UntilClose => text.push_str(&format!("Connection: close{end}")),
        }
        text.push_str(end);
        stream.write_all(text.as_bytes())?;
        if is_head {
            return Ok(());
        }
        let body = &self.body[..self.body.len().min(self.cut)];
        for piece in body.chunks(PIECE) {
            if self.framing == Framing::Chunked {
                stream.write_all(format!("{:x};ext=1\r\n", piece.len()).as_bytes())?;
            }
            stream.write_all(piece)?;
            if self.framing == Framing::Chunked {
                stream.write_all(b"\r\n")?;
            }
            std::thread::sleep(self.pause);
        }
        if self.framing == Framing::Chunked && self.cut == usize::MAX {
            stream.write_all(b"0\r\n\r\n")?;
        }
        Ok(())
    }

    fn ends_connection(&self) -> bool {
        self.closes
            || self.cut != usize::MAX
            || matches!(self.framing, Framing::UntilClose | Framing::WrongLength(_))
    }
}

/// Content that the server serves in the current case.
#[derive(Default)]
struct Case {
    blobs: BTreeMap<String, Vec<u8>>,
    manifest: Vec<u8>,
    scripts: Vec<Script>,
    /// Whether the servers with TLS are another host than the registry.
    is_tls_other: bool,
    requests: Vec<Request>,
}

/// The four ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Port {
    Home,
    Other,
    /// Behind a server with TLS.
    Inner,
    /// An HTTP proxy: the host `get.invalid` is the other one by plain HTTP, `connect.invalid` the server with TLS; as Squid does, it
    /// permits CONNECT for TLS only.
    Proxy,
}

const PORTS: [Port; 4] = [Port::Home, Port::Other, Port::Inner, Port::Proxy];

/// A server with TLS: its address, and the certificate of its authority.
type Tls = (String, String);

/// The running server; its threads end with the process.
pub(crate) struct Server {
    addresses: [SocketAddr; 4],
    tls: Arc<OnceLock<Vec<Tls>>>,
    case: Arc<Mutex<Case>>,
}

impl Server {
    pub(crate) fn start() -> Server {
        let (case, tls) = (Arc::new(Mutex::new(Case::default())), Arc::default());
        let listeners = PORTS.map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));
        let addresses = [0, 1, 2, 3].map(|at: usize| listeners[at].local_addr().expect("a bound address"));
        let server = Server { addresses, tls, case };
        for (listener, port) in listeners.into_iter().zip(PORTS) {
            let (case, tls) = (server.case.clone(), server.tls.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let connection = Connection { case: case.clone(), tls: tls.clone(), port, addresses };
                    // A client that disconnects is part of the test.
                    std::thread::spawn(move || connection.serve(stream));
                }
            });
        }
        server
    }

    /// Sets the servers with TLS: one for servers, one for any purpose.
    pub(super) fn set_tls(&self, servers: &[Nginx]) {
        let of = |server: &Nginx| (server.address().to_string(), server.file("ca.pem").display().to_string());
        self.tls.set(servers.iter().map(of).collect()).expect("set once");
    }

    /// Address of the port for the servers with TLS.
    pub(super) fn inner(&self) -> SocketAddr {
        self.addresses[2]
    }

    /// Address of the proxy.
    pub(crate) fn proxy(&self) -> SocketAddr {
        self.addresses[3]
    }

    /// A text with the addresses of all hosts.
    pub(super) fn fill(&self, text: &str) -> String {
        let [(tls, authority), (any, any_authority)] = self.tls.get().expect("set").as_slice() else {
            panic!("two servers")
        };
        text.replace("HOME", &self.addresses[0].to_string())
            .replace("OTHER", &self.addresses[1].to_string())
            .replace("TLSHOST", tls)
            .replace("TLSPORT", tls.rsplit(':').next().unwrap_or_default())
            .replace("CAFILE", authority)
            .replace("ANYHOST", any)
            .replace("ANYCA", any_authority)
    }

    /// Serves this image from now on.
    pub(super) fn expect(&self, image: &Image, rows: &[&Row]) {
        let blobs =
            [image.config_blob()].into_iter().chain(image.layers.iter().map(|layer| layer.blob.clone()));
        *self.case.lock().expect("no thread panics with it") = Case {
            blobs: blobs.map(|blob| (digest(&blob), blob)).collect(),
            manifest: image.manifest(),
            scripts: rows.iter().map(|row| row.script).collect(),
            is_tls_other: rows[0].home == "HOME",
            requests: Vec::new(),
        };
    }

    /// The requests since then.
    pub(super) fn finish(&self) -> Vec<Request> {
        std::mem::take(&mut *self.case.lock().expect("no thread panics with it")).requests
    }
}

/// One connection.
struct Connection {
    case: Arc<Mutex<Case>>,
    tls: Arc<OnceLock<Vec<Tls>>>,
    port: Port,
    addresses: [SocketAddr; 4],
}

impl Connection {
    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        // containerd tries TLS first for a registry on this machine, and believes an answer without TLS.
        const HANDSHAKE: u8 = 22;
        if reader.fill_buf()?.first() == Some(&HANDSHAKE) {
            return stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n");
        }
        loop {
            let mut head = read_head(&mut reader)?;
            if head.first.is_empty() {
                return Ok(());
            }
            if self.port == Port::Proxy {
                if head.first.starts_with("CONNECT connect.invalid:") {
                    stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n")?;
                    return relay(stream, &self.tls.get().expect("set")[0].0);
                }
                let Some((method, path)) = head.first.split_once(" http://get.invalid:5000/") else {
                    stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")?;
                    continue;
                };
                head.first = format!("{method} /{path}");
            }
            let mut form = String::new();
            reader.by_ref().take(head.length()).read_to_string(&mut form)?;
            let is_head = head.first.starts_with("HEAD ");
            let reply = self.answer(head, form);
            reply.send(&mut stream, is_head)?;
            if reply.ends_connection() {
                return Ok(());
            }
        }
    }

    fn answer(&self, head: Head, form: String) -> Reply {
        let mut case = self.case.lock().expect("no thread panics with it");
        let path = head.second().split('?').next().unwrap_or_default();
        let kind = match path {
            "/v2/" | "/v2" => Kind::Ping,
            "/token" | "/token2" => Kind::Token,
            _ if path.contains("/manifests/") => Kind::Manifest,
            _ if path.contains("/blobs/") || path.contains("/raw/") => Kind::Blob,
            _ => Kind::Other,
        };
        let earlier = case.requests.iter().filter(|request| request.kind == kind).count();
        let request = Request {
            is_head: head.first.starts_with("HEAD "),
            kind,
            is_other: match self.port {
                Port::Home => false,
                Port::Other | Port::Proxy => true,
                Port::Inner => case.is_tls_other,
            },
            is_tls: self.port == Port::Inner,
            earlier,
            home: self.addresses[0],
            other: self.addresses[1],
            tls: self.tls.get().map(|servers| servers[0].0.clone()).unwrap_or_default(),
            form,
            head,
        };
        let mut reply = plain(&case, &request);
        for script in &case.scripts {
            script(&request, &mut reply);
        }
        case.requests.push(request);
        reply
    }
}

/// Copies both ways until one side closes.
fn relay(mut client: TcpStream, to: &str) -> io::Result<()> {
    let mut server = TcpStream::connect(to)?;
    let (mut from, mut into) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut into);
        let _ = into.shutdown(std::net::Shutdown::Write);
    });
    io::copy(&mut server, &mut client)?;
    client.shutdown(std::net::Shutdown::Both)
}

/// The answer of a registry without oddities.
fn plain(case: &Case, request: &Request) -> Reply {
    let name = request.path().split('?').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    match request.kind {
        Kind::Ping => {
            let mut reply = Reply::new("200 OK", b"{}");
            reply.header("Docker-Distribution-Api-Version", "registry/2.0");
            reply
        }
        Kind::Token => {
            let mut reply = Reply::new("200 OK", br#"{"token":"tok","access_token":"tok","expires_in":300}"#);
            reply.header("Content-Type", "application/json");
            reply
        }
        Kind::Manifest if name == "1" || name == digest(&case.manifest) => {
            let mut reply = Reply::new("200 OK", &case.manifest);
            reply.header("Content-Type", MANIFEST);
            reply.header("Docker-Content-Digest", digest(&case.manifest));
            reply
        }
        Kind::Blob if case.blobs.contains_key(name) => {
            let blob = &case.blobs[name];
            let mut reply = Reply::new("200 OK", blob);
            reply.header("Content-Type", "application/octet-stream");
            reply.header("Docker-Content-Digest", name);
            let start = request
                .head
                .get("range")
                .and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse::<usize>().ok());
            if let Some(start) = start.filter(|start| *start < blob.len()) {
                reply.status = "206 Partial Content".into();
                reply.body = blob[start..].to_vec();
                reply.header("Content-Range", format!("bytes {start}-{}/{}", blob.len() - 1, blob.len()));
            }
            reply
        }
        _ => Reply::new("404 Not Found", b"{}"),
    }
}
