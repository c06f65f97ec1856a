//! The HTTP server behind the URLs: takes a connection, its head and its token, switches to the protocol that client and
//! server share, and runs the session. A slow or hostile client costs a task until its deadline, nobody else's time.
//!
//! Whoever can connect may hold a connection without a token, so those have a small pool and a short time of their own,
//! and the oldest of them goes first when the pool is full. Only a connection with a token counts as a session.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Task, Watched};
use coracle_base::workers::Workers;
use coracle_engine::streams::Wanted;
use coracle_engine::{Container, Pod, Pods};
use nix::sys::socket::{setsockopt, sockopt};

use super::connection::{CLOSE_LIMIT, Connection, Lost, Receiver, read_through};
use super::forward::Forward;
use super::head::{self, HEAD_BYTES_MAX, Head, Refusal, Upgrade};
use super::peer::{Peer, Tunnel};
use super::status::Dialect;
use super::stdio::Stdio;
use super::tokens::Tokens;
use super::websocket::Form;
use super::{spdy, websocket};

/// How the server behind exec, attach and port-forward URLs is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The address it listens on.
    pub address: IpAddr,
    /// Its port; 0: any.
    pub port: u16,
    /// PEM files for TLS; both or neither.
    pub certificate: Option<PathBuf>,
    /// See `certificate`.
    pub key: Option<PathBuf>,
    /// Longest silence of a session; zero: no limit.
    pub idle_timeout: Duration,
    /// From connect to a session.
    pub creation_timeout: Duration,
    /// Connections at once.
    pub sessions_max: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            address: IpAddr::from([127, 0, 0, 1]),
            port: 0,
            certificate: None,
            key: None,
            idle_timeout: Duration::ZERO,
            creation_timeout: Duration::ZERO,
            sessions_max: 0,
        }
    }
}

/// What a client may fetch once.
pub enum Request {
    /// A command in a container.
    Exec {
        /// Where it runs.
        container: Rc<Container>,
        /// The program and its arguments.
        command: Vec<String>,
        /// Which streams the client has.
        wanted: Wanted,
    },
    /// A container's main process.
    Attach {
        /// The container.
        container: Rc<Container>,
        /// Which streams the client has.
        wanted: Wanted,
    },
    /// Ports of a pod.
    Forward {
        /// The pod sandbox.
        pod: Rc<Pod>,
        /// Ports for clients that cannot name them later.
        ports: Vec<u16>,
    },
}

impl Request {
    /// The first part of its path.
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

/// Pause after a failed `accept`: a table of descriptors that is full does not empty at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections at once that have shown no token. A kubelet sends its head as soon as it is connected.
const WAITING_MAX: usize = 64;

/// From a connection to its complete head.
const HEAD_LIMIT: Duration = Duration::from_secs(2);

/// More for a TLS handshake, with the start of the process that does it.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);

/// What TLS is served with, and by whom.
struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    workers: Rc<Workers>,
}

/// The server.
pub struct Streams {
    pods: Rc<Pods>,
    tokens: Tokens<Request>,
    /// `http://127.0.0.1:34567`
    base: String,
    tls: Option<Tls>,
    options: Options,
    /// Connections whose token was valid.
    sessions: Cell<usize>,
    /// Those that have shown none yet, oldest first.
    waiting: RefCell<BTreeMap<u64, Task<()>>>,
    last_connection: Cell<u64>,
}

impl Streams {
    /// Listens, and serves for as long as the reactor runs.
    ///
    /// # Errors
    /// What the kernel says of the address.
    pub fn start(options: &Options, pods: Rc<Pods>) -> Result<Rc<Streams>, Error> {
        let tls = match (&options.certificate, &options.key) {
            (Some(certificate), Some(key)) => Some(Tls {
                certificate: certificate.clone(),
                key: key.clone(),
                workers: Rc::clone(&pods.node.host.workers),
            }),
            (None, None) => None,
            _ => {
                let text = "streaming: tls_cert_file and tls_key_file go together";
                return Err(Error::new(Kind::InvalidArgument, text));
            }
        };
        let address = SocketAddr::new(options.address, options.port);
        let listener = TcpListener::bind(address).context(|| format!("streaming: listen on {address}"))?;
        let mut bound = listener.local_addr()?;
        // The kubelet that fetches the URL is on this node.
        match bound.ip() {
            ip if !ip.is_unspecified() => {}
            ip if ip.is_ipv4() => bound.set_ip(Ipv4Addr::LOCALHOST.into()),
            _ => bound.set_ip(Ipv6Addr::LOCALHOST.into()),
        }
        let watched = Watched::new(OwnedFd::from(listener.try_clone()?))?;
        let streams = Rc::new(Streams {
            pods,
            tokens: Tokens::new(),
            base: format!("{}://{bound}", if tls.is_some() { "https" } else { "http" }),
            tls,
            options: options.clone(),
            sessions: Cell::new(0),
            waiting: RefCell::default(),
            last_connection: Cell::new(0),
        });
        let server = Rc::clone(&streams);
        reactor::spawn(async move {
            loop {
                match watched.read_with(|_| listener.accept()).await {
                    Ok((socket, _)) => server.admit(socket.into()),
                    Err(error) => {
                        log::warn!("streaming: accept"; error = coracle_base::error::plain(&error));
                        reactor::sleep(ACCEPT_PAUSE).await;
                    }
                }
                reactor::yield_now().await;
            }
        })
        .detach();
        Ok(streams)
    }

    /// The URL at which `request` starts.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn url(&self, request: Request) -> Result<String, Error> {
        let kind = request.kind();
        let token = self.tokens.insert(request, Instant::now())?;
        Ok(format!("{}/{kind}/{token}", self.base))
    }

    fn admit(self: &Rc<Self>, socket: OwnedFd) {
        let number = self.last_connection.get() + 1;
        self.last_connection.set(number);
        let oldest = {
            let mut waiting = self.waiting.borrow_mut();
            if waiting.len() >= WAITING_MAX { waiting.pop_first() } else { None }
        };
        if oldest.is_some() {
            log::debug!("streaming: a connection without a token makes room"; waiting = WAITING_MAX);
        }
        drop(oldest);
        let place = Place { server: Rc::clone(self), number };
        let server = Rc::clone(self);
        let task = reactor::spawn(async move { server.serve(socket, place).await });
        self.waiting.borrow_mut().insert(number, task);
    }

    /// Ends TLS where it is served. Nobody gets a process who has said nothing.
    async fn plain(&self, socket: OwnedFd) -> Result<Watched, Error> {
        // A small piece of output is not to wait for the answer to the one before. It works without, slower.
        let _ = setsockopt(&socket, sockopt::TcpNoDelay, &true);
        let Some(Tls { certificate, key, workers }) = &self.tls else { return Ok(Watched::new(socket)?) };
        let own = Watched::new(socket.try_clone()?)?;
        own.readable().await?;
        drop(own);
        Ok(Watched::new(workers.terminate_tls(socket, certificate, key)?)?)
    }

    /// From a connection to a request with its protocol, and what came after the head.
    async fn ask(&self, socket: OwnedFd) -> Result<Asked, Gone> {
        let limit = self.options.creation_timeout.min(match self.tls {
            Some(_) => HEAD_LIMIT + HANDSHAKE_LIMIT,
            None => HEAD_LIMIT,
        });
        let asked = async {
            let socket = self.plain(socket).await.map_err(Gone::Server)?;
            let mut read = Vec::new();
            let head = match read_head(&socket, &mut read).await {
                Err(Gone::Refused(refusal)) => return Ok(Err((socket, refusal))),
                head => head?,
            };
            let rest = read.split_off(head.length);
            match self.take(&head) {
                Ok((request, protocol)) => Ok(Ok(Asked { socket, head, request, protocol, rest })),
                Err(refusal) => Ok(Err((socket, refusal))),
            }
        };
        match reactor::deadline(limit, asked).await {
            Ok(Ok(Ok(asked))) => Ok(asked),
            Ok(Ok(Err((socket, refusal)))) => {
                let answer = refusal.encode();
                // Whether it is read is the client's business.
                let _ = reactor::deadline(limit, socket.write_all(answer.as_bytes())).await;
                Err(Gone::Refused(refusal))
            }
            Ok(Err(gone)) => Err(gone),
            Err(_) => Err(Gone::Silent(limit)),
        }
    }

    async fn serve(self: Rc<Self>, socket: OwnedFd, place: Place) {
        let limit = self.options.creation_timeout;
        let Asked { socket, head, request, protocol, rest } = match self.ask(socket).await {
            Ok(asked) => asked,
            Err(Gone::Client) => return,
            Err(Gone::Refused(refusal)) => return log::debug!("streaming: refused"; status = refusal.status),
            Err(Gone::Server(error)) => return log::warn!("streaming: a client is not served"; error = error),
            // At debug: whoever can connect could fill the log.
            Err(Gone::Silent(limit)) => {
                return log::debug!("streaming: a client sent no request"; ms = limit.as_millis());
            }
        };
        let _open = Open::new(&self);
        drop(place);
        let answer = head::switch(&head.upgrade, protocol);
        let written = reactor::deadline(limit, socket.write_all(answer.as_bytes())).await;
        if !matches!(written, Ok(Ok(()))) {
            return;
        }
        let connection =
            Rc::new(Connection::new(socket, peer(&head.upgrade, protocol), self.options.idle_timeout));
        let kind = request.kind();
        log::debug!("streaming: session"; kind = kind, protocol = protocol);
        match self.run(&connection, Receiver::new(rest), request, protocol).await {
            // Leaving is a client's way to end an attach and a port-forward.
            Ok(()) | Err(Lost::Closed) => {}
            Err(lost) => log::warn!("streaming: session lost"; kind = kind, reason = lost),
        }
    }

    /// Spends the token and chooses the protocol.
    fn take(&self, head: &Head) -> Result<(Request, &'static str), Refusal> {
        let unknown = || Refusal::new("404 Not Found", "no such stream, or its token is spent");
        // Before the token is spent: it is good for another try.
        if self.sessions.get() >= self.options.sessions_max {
            log::warn!("streaming: a client is turned away"; sessions = self.sessions.get());
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
            // No name at all means the oldest of them.
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
    ) -> Result<(), Lost> {
        let (wanted, container, command) = match request {
            Request::Exec { container, command, wanted } => (wanted, container, Some(command)),
            Request::Attach { container, wanted } => (wanted, container, None),
            Request::Forward { pod, ports } => {
                let forward = Forward::new(Rc::clone(connection), Rc::clone(&self.pods), pod);
                let lost = forward.run(receiver, &ports).await;
                drop(forward);
                // It was the client that left: what is still on its way is of no use to it.
                let _ = reactor::deadline(CLOSE_LIMIT, connection.close()).await;
                return Err(lost);
            }
        };
        let limit = self.options.creation_timeout;
        let stdio = Stdio::new(connection, receiver, wanted, Dialect::of(protocol), limit).await?;
        match command {
            Some(command) => stdio.exec(&self.pods, container, command).await,
            None => stdio.attach(&self.pods, &container).await,
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

/// A request whose token was valid.
struct Asked {
    socket: Watched,
    head: Head,
    request: Request,
    protocol: &'static str,
    rest: Vec<u8>,
}

/// Why there is no session.
enum Gone {
    Client,
    Refused(Refusal),
    /// TLS cannot be served, or a descriptor not be had.
    Server(Error),
    /// There was no whole head in this time.
    Silent(Duration),
}

impl From<Refusal> for Gone {
    fn from(refusal: Refusal) -> Gone {
        Gone::Refused(refusal)
    }
}

async fn read_head(socket: &Watched, read: &mut Vec<u8>) -> Result<Head, Gone> {
    loop {
        let taken = |bytes: &[u8]| read.extend_from_slice(bytes);
        if read_through(socket, taken).await.map_err(|_| Gone::Client)? == 0 {
            return Err(Gone::Client);
        }
        // What follows the head may have come with it; the head itself has its limit.
        if let Some(head) = head::parse(&read[..read.len().min(HEAD_BYTES_MAX)])? {
            return Ok(head);
        }
    }
}

/// One connection among those without a token. Dropping it lets the connection's task go on by itself.
struct Place {
    server: Rc<Streams>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let task = self.server.waiting.borrow_mut().remove(&self.number);
        if let Some(task) = task {
            task.detach();
        }
    }
}

/// One session in the count.
struct Open(Rc<Streams>);

impl Open {
    fn new(server: &Rc<Streams>) -> Open {
        server.sessions.set(server.sessions.get() + 1);
        Open(Rc::clone(server))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.sessions.set(self.0.sessions.get() - 1);
    }
}
