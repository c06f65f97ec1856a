//! The HTTP server of the streaming URLs: accepts a connection, reads the request header with the token,
//! switches to the protocol that client and server share, and runs the session. A slow or malicious client
//! uses only a task until its deadline.
//!
//! A client can connect without a token, so connections that have not sent a valid token have a separate
//! small limit and a short time limit; if there are too many, the oldest is closed. Only a connection with a
//! valid token counts as a session.

use std::cell::Cell;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::clients::{Client, Clients};
use coracle_base::error::{Context, Error};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_base::settings::Streaming;
use coracle_base::workers::Workers;
use coracle_engine::streams::Wanted;
use coracle_engine::{Container, Pod};
use nix::sys::socket::{setsockopt, sockopt};

use super::connection::{CLOSE_LIMIT, Connection, EndReason, Receiver, read_through};
use super::forward::Forward;
use super::head::{self, HEAD_BYTES_MAX, Head, Refusal, Upgrade};
use super::peer::{Peer, Tunnel};
use super::status::Dialect;
use super::stdio::Stdio;
use super::tokens::Tokens;
use super::websocket::Form;
use super::{spdy, websocket};

/// A prepared request, for which a token is issued.
pub enum Request {
    /// Executes a command in a container.
    Exec {
        /// The container in which the command is executed.
        container: Rc<Container>,
        /// The program and its arguments.
        command: Vec<String>,
        /// The streams that the client requests.
        wanted: Wanted,
    },
    /// Attaches to a container's main process.
    Attach {
        /// The container to which the client attaches.
        container: Rc<Container>,
        /// The streams that the client requests.
        wanted: Wanted,
    },
    /// Forwards ports of a pod.
    Forward {
        /// The pod sandbox whose ports are forwarded.
        pod: Rc<Pod>,
        /// Ports for clients that cannot name ports later (WebSocket).
        ports: Vec<u16>,
    },
}

impl Request {
    /// First component of the path in URLs.
    fn kind(&self) -> &'static str {
        match self {
            Request::Exec { .. } => "exec",
            Request::Attach { .. } => "attach",
            Request::Forward { .. } => "portforward",
        }
    }
}

const SPDY_STDIO: &[&str] =
    &["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
const SPDY_FORWARD: &[&str] = &["portforward.k8s.io"];
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
const WEBSOCKET_FORWARD: &[&str] =
    &[TUNNEL, "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "channel.k8s.io", "base64.channel.k8s.io"];
const WEBSOCKET_STDIO: &[&str] = &[
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
];

/// Pause after a failed `accept`, in which descriptors may become free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Maximum number of connections that have not sent a valid token. A kubelet sends its request as soon as it
/// is connected.
const WAITING_MAX: usize = 64;

/// Time limit from the connection to the complete request header.
const HEAD_LIMIT: Duration = Duration::from_secs(2);

/// Additional time for a TLS handshake including the start of its process.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);

/// The TLS certificate and key, and the workers that terminate TLS.
struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    workers: Rc<Workers>,
}

/// The streaming server with its tokens and sessions.
pub struct Streams {
    tokens: Tokens<Request>,
    /// Beginning of all URLs, for example `http://127.0.0.1:34567`.
    base: String,
    tls: Option<Tls>,
    options: Streaming,
    /// Number of connections whose token was valid.
    sessions: Cell<usize>,
    /// Connections that have not sent a valid token.
    waiting: Rc<Clients>,
}

impl Streams {
    /// Starts to listen; serves until the reactor ends.
    ///
    /// # Errors
    /// The kernel's error for the address; `InvalidArgument` if only one of certificate and key is set.
    pub fn start(options: &Streaming, workers: &Rc<Workers>) -> Result<Rc<Streams>, Error> {
        options.check()?;
        let tls = match (&options.certificate, &options.key) {
            (Some(certificate), Some(key)) => {
                Some(Tls { certificate: certificate.clone(), key: key.clone(), workers: Rc::clone(workers) })
            }
            (Some(_) | None, None) | (None, Some(_)) => None,
        };
        let address = SocketAddr::new(options.address, options.port);
        let listener = TcpListener::bind(address).context(|| format!("streaming: listen on {address}"))?;
        let mut bound = listener.local_addr()?;
        // The kubelet that requests the URL runs on this node.
        match bound.ip() {
            ip if !ip.is_unspecified() => {}
            ip if ip.is_ipv4() => bound.set_ip(Ipv4Addr::LOCALHOST.into()),
            _ => bound.set_ip(Ipv6Addr::LOCALHOST.into()),
        }
        let watched = Watched::new(OwnedFd::from(listener.try_clone()?))?;
        let streams = Rc::new(Streams {
            tokens: Tokens::new(),
            base: format!("{}://{bound}", if tls.is_some() { "https" } else { "http" }),
            tls,
            options: options.clone(),
            sessions: Cell::new(0),
            waiting: Clients::new(WAITING_MAX),
        });
        let server = Rc::clone(&streams);
        reactor::spawn(async move {
            loop {
                match watched.read_with(|_| listener.accept()).await {
                    Ok((socket, _)) => server.admit(socket.into()),
                    Err(error) => {
                        log::warn!("cannot accept a streaming connection"; error = coracle_base::error::describe_io(&error));
                        reactor::sleep(ACCEPT_PAUSE).await;
                    }
                }
                reactor::yield_now().await;
            }
        })
        .detach();
        Ok(streams)
    }

    /// Returns the URL at which the client can start `request`.
    ///
    /// # Errors
    /// The kernel returns no random bytes.
    pub fn url(&self, request: Request) -> Result<String, Error> {
        let kind = request.kind();
        let token = self.tokens.insert(request, Instant::now())?;
        Ok(format!("{}/{kind}/{token}", self.base))
    }

    fn admit(self: &Rc<Self>, socket: OwnedFd) {
        let server = Rc::clone(self);
        if self.waiting.serve(move |place| server.serve(socket, place)) {
            log::debug!("streaming: too many connections without a token, closing the oldest"; waiting = WAITING_MAX);
        }
    }

    /// Returns the decrypted connection if TLS is configured, otherwise the socket. Waits for the client's
    /// first bytes, so that no process is started for a silent client.
    async fn plain(&self, socket: OwnedFd) -> Result<Watched, Error> {
        // A small write must not wait for the acknowledgement of the previous one. An error only affects
        // latency.
        let _ = setsockopt(&socket, sockopt::TcpNoDelay, &true);
        let Some(Tls { certificate, key, workers }) = &self.tls else { return Ok(Watched::new(socket)?) };
        let own = Watched::new(socket.try_clone()?)?;
        own.readable().await?;
        drop(own);
        Ok(Watched::new(workers.terminate_tls(socket, certificate, key)?)?)
    }

    /// Reads the request from a connection, checks its token, and chooses the protocol.
    async fn ask(&self, socket: OwnedFd) -> Result<AcceptedRequest, NoSession> {
        let limit = self.options.creation_timeout.min(match self.tls {
            Some(_) => HEAD_LIMIT + HANDSHAKE_LIMIT,
            None => HEAD_LIMIT,
        });
        let asked = async {
            let socket = self.plain(socket).await.map_err(NoSession::Server)?;
            let mut read = Vec::new();
            let head = match read_head(&socket, &mut read).await {
                Err(NoSession::Refused(refusal)) => return Ok(Err((socket, refusal))),
                head => head?,
            };
            let rest = read.split_off(head.length);
            match self.take(&head) {
                Ok((request, protocol)) => Ok(Ok(AcceptedRequest { socket, head, request, protocol, rest })),
                Err(refusal) => Ok(Err((socket, refusal))),
            }
        };
        match reactor::deadline(limit, asked).await {
            Ok(Ok(Ok(asked))) => Ok(asked),
            Ok(Ok(Err((socket, refusal)))) => {
                let answer = refusal.encode();
                // An error is ignored: the client does not have to read the response.
                let _ = reactor::deadline(limit, socket.write_all(answer.as_bytes())).await;
                Err(NoSession::Refused(refusal))
            }
            Ok(Err(gone)) => Err(gone),
            Err(_) => Err(NoSession::Silent(limit)),
        }
    }

    async fn serve(self: Rc<Self>, socket: OwnedFd, place: Client) {
        let limit = self.options.creation_timeout;
        let AcceptedRequest { socket, head, request, protocol, rest } = match self.ask(socket).await {
            Ok(asked) => asked,
            Err(NoSession::Client) => return,
            Err(NoSession::Refused(refusal)) => {
                return log::debug!("streaming: request refused"; status = refusal.status);
            }
            Err(NoSession::Server(error)) => {
                return log::warn!("cannot serve a streaming client"; error = error);
            }
            // At level debug, because any client could fill the log.
            Err(NoSession::Silent(limit)) => {
                return log::debug!("streaming: a client sent no request"; ms = limit.as_millis());
            }
        };
        let _open = CountedSession::new(&self);
        drop(place);
        let answer = head::switch(&head.upgrade, protocol);
        let written = reactor::deadline(limit, socket.write_all(answer.as_bytes())).await;
        if !matches!(written, Ok(Ok(()))) {
            return;
        }
        let connection =
            Rc::new(Connection::new(socket, peer(&head.upgrade, protocol), self.options.idle_timeout));
        let kind = request.kind();
        log::debug!("streaming: session begins"; kind = kind, protocol = protocol);
        match self.run(&connection, Receiver::new(rest), request, protocol).await {
            // Attach and port-forward normally end by a disconnect of the client.
            Ok(()) | Err(EndReason::Closed) => {}
            Err(reason) => log::warn!("streaming: session ended with an error"; kind = kind, reason = reason),
        }
    }

    /// Consumes the token and chooses the protocol.
    fn take(&self, head: &Head) -> Result<(Request, &'static str), Refusal> {
        let unknown =
            || Refusal::new("404 Not Found", "unknown path, or the token was already used or has expired");
        // Checked before the token is consumed, so that the client can retry with it.
        if self.sessions.get() >= self.options.sessions_max {
            log::warn!("streaming: too many sessions, client refused"; sessions = self.sessions.get());
            return Err(Refusal::new("503 Service Unavailable", "too many streaming sessions"));
        }
        let mut parts = head.path.trim_start_matches('/').split('/');
        let (Some(kind), Some(token), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(unknown());
        };
        let request = self.tokens.take(token, Instant::now()).filter(|request| request.kind() == kind);
        let request = request.ok_or_else(unknown)?;
        let is_forward = matches!(request, Request::Forward { .. });
        let protocol = match (&head.upgrade, is_forward) {
            (Upgrade::Spdy { offered }, false) => head::choose(offered, SPDY_STDIO)?,
            (Upgrade::Spdy { offered }, true) => head::choose(offered, SPDY_FORWARD)?,
            // A client that offers no subprotocol uses the oldest one.
            (Upgrade::WebSocket { offered, .. }, _) if offered.is_empty() => "",
            (Upgrade::WebSocket { offered, .. }, false) => head::choose(offered, WEBSOCKET_STDIO)?,
            (Upgrade::WebSocket { offered, .. }, true) => head::choose(offered, WEBSOCKET_FORWARD)?,
        };
        Ok((request, protocol))
    }

    async fn run(
        &self,
        connection: &Rc<Connection>,
        receiver: Receiver,
        request: Request,
        protocol: &str,
    ) -> Result<(), EndReason> {
        let (wanted, container, command) = match request {
            Request::Exec { container, command, wanted } => (wanted, container, Some(command)),
            Request::Attach { container, wanted } => (wanted, container, None),
            Request::Forward { pod, ports } => {
                let forward = Forward::new(Rc::clone(connection), pod);
                let reason = forward.run(receiver, &ports).await;
                drop(forward);
                // The client disconnected: pending output is dropped.
                let _ = reactor::deadline(CLOSE_LIMIT, connection.close()).await;
                return Err(reason);
            }
        };
        let limit = self.options.creation_timeout;
        let stdio = Stdio::new(connection, receiver, wanted, Dialect::of(protocol), limit).await?;
        match command {
            Some(command) => stdio.exec(container, command).await,
            None => stdio.attach(&container).await,
        }
    }
}

fn peer(upgrade: &Upgrade, protocol: &str) -> Peer {
    match (upgrade, protocol) {
        (Upgrade::Spdy { .. }, _) => Peer::Spdy(spdy::Session::new()),
        (Upgrade::WebSocket { .. }, TUNNEL) => Peer::Tunnel(Box::new(Tunnel::new())),
        (Upgrade::WebSocket { .. }, protocol) => {
            let form = match protocol.contains("base64") {
                true => Form::Base64,
                false => Form::Binary { has_close_signal: protocol.starts_with("v5.") },
            };
            Peer::WebSocket(websocket::Session::new(form))
        }
    }
}

/// A request with a valid token.
struct AcceptedRequest {
    socket: Watched,
    head: Head,
    request: Request,
    protocol: &'static str,
    rest: Vec<u8>,
}

/// The reason why no session was started.
enum NoSession {
    Client,
    Refused(Refusal),
    /// TLS cannot be started, or there is no free descriptor.
    Server(Error),
    /// The client did not send a complete header within this time.
    Silent(Duration),
}

impl From<Refusal> for NoSession {
    fn from(refusal: Refusal) -> NoSession {
        NoSession::Refused(refusal)
    }
}

async fn read_head(socket: &Watched, read: &mut Vec<u8>) -> Result<Head, NoSession> {
    loop {
        let taken = |bytes: &[u8]| read.extend_from_slice(bytes);
        if read_through(socket, taken).await.map_err(|_| NoSession::Client)? == 0 {
            return Err(NoSession::Client);
        }
        // Bytes after the header may have been read with it; the limit applies to the header only.
        if let Some(head) = head::parse(&read[..read.len().min(HEAD_BYTES_MAX)])? {
            return Ok(head);
        }
    }
}

/// A session in the counter of sessions; dropping the value decrements the counter.
struct CountedSession(Rc<Streams>);

impl CountedSession {
    fn new(server: &Rc<Streams>) -> CountedSession {
        server.sessions.set(server.sessions.get() + 1);
        CountedSession(Rc::clone(server))
    }
}

impl Drop for CountedSession {
    fn drop(&mut self) {
        self.0.sessions.set(self.0.sessions.get() - 1);
    }
}
