//! A proxy of a registry that modifies answers as a test requires: truncates, delays, changes or redirects
//! them. The proxy records all requests and the number of bytes that were sent.

use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::socket::{Backlog, listen};

use crate::http::{self, Head};

/// Buffer size in bytes for copying bodies.
const PIECE_BYTES: usize = 16 << 10;
/// Time for which a blocked answer waits until its client disconnects.
const HANG: Duration = Duration::from_secs(120);

/// A modification of one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The answer is not modified.
    None,
    /// The connection ends after this many bytes of the body, although the header has the full length.
    Cut(u64),
    /// No more bytes are sent after this many bytes of the body.
    Stall(u64),
    /// The answer is a challenge for basic authentication.
    Challenge,
    /// The body is sent at a rate of this many bytes per tenth of a second.
    Drip(usize),
    /// The answer has this status, and `Retry-After` with this many seconds if it is given.
    Status(u16, Option<u32>),
    /// A byte in the middle of the body is changed.
    Flip,
    /// The body has this many additional bytes.
    Longer(usize),
    /// The answer is a redirect to this target; a path is one of this proxy.
    Redirect(String),
    /// The answer is sent after this time.
    Late(Duration),
    /// The body passes this line.
    Over(Line),
    /// The answer consists of these bytes, after which the connection is closed.
    Raw(Vec<u8>),
}

/// A line of a limited rate that several answers share.
#[derive(Debug, Clone)]
pub struct Line {
    /// Time at which all bytes so far have passed.
    free: Arc<Mutex<Instant>>,
    bytes_per_second: f64,
}

impl Line {
    /// An idle line of this rate.
    pub fn new(bytes_per_second: f64) -> Line {
        Line { free: Arc::new(Mutex::new(Instant::now())), bytes_per_second }
    }

    /// Waits until this number of bytes has passed.
    fn pass(&self, bytes: usize) {
        let passed = {
            let mut free = self.free.lock().expect("no thread panics with it");
            *free =
                (*free).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
            *free
        };
        std::thread::sleep(passed.saturating_duration_since(Instant::now()));
    }
}

impl PartialEq for Line {
    fn eq(&self, other: &Line) -> bool {
        Arc::ptr_eq(&self.free, &other.free)
    }
}

impl Eq for Line {}

impl Fault {
    /// An answer with this status, these header lines and this body.
    pub fn raw(status: &str, headers: &[&str], body: &[u8]) -> Fault {
        let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let head = format!(
            "HTTP/1.1 {status}\r\n{lines}Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        Fault::Raw([head.as_bytes(), body].concat())
    }
}

/// A request and the answer to it.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// Header of the request.
    pub head: Head,
    /// Number of bytes of the body that were sent.
    pub bytes: u64,
    /// Status of the answer.
    pub status: String,
}

impl Served {
    /// Whether the request is a GET of this blob.
    pub fn is_blob(&self, digest: &str) -> bool {
        self.head.first.starts_with("GET") && self.head.second().contains(&format!("/blobs/{digest}"))
    }
}

/// Chooses the modification for a request, given the number of earlier requests for the same path.
type Plan = dyn Fn(&Head, usize) -> Fault + Send + Sync;

/// The proxy. Its thread ends with the process, its connections with their clients.
pub struct Faulty {
    address: SocketAddr,
    served: Arc<Mutex<Vec<Served>>>,
    peak: Arc<Mutex<(usize, usize)>>,
}

impl Faulty {
    /// Starts a proxy on 127.0.0.1 in front of `upstream`.
    pub fn start(
        upstream: SocketAddr,
        plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static,
    ) -> Faulty {
        Faulty::start_at(Ipv4Addr::LOCALHOST.into(), upstream, plan)
    }

    /// Starts a proxy on this address in front of `upstream`.
    pub fn start_at(
        host: IpAddr,
        upstream: SocketAddr,
        plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static,
    ) -> Faulty {
        let listener = TcpListener::bind((host, 0)).expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let (served, peak) = (Arc::default(), Arc::default());
        let shared = Arc::new(Shared { upstream, plan: Box::new(plan), served, peak });
        let faulty = Faulty { address, served: shared.served.clone(), peak: shared.peak.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                // A client that disconnects is part of the test.
                std::thread::spawn(move || {
                    let _ = shared.serve(stream);
                });
            }
        });
        faulty
    }

    /// The address on which the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The image name `HOST:PORT/REPO:TAG` at this proxy.
    pub fn name(&self, repository: &str, tag: &str) -> String {
        format!("{}/{repository}:{tag}", self.address)
    }

    /// All requests so far.
    pub fn served(&self) -> Vec<Served> {
        self.served.lock().expect("no thread panics with it").clone()
    }

    /// The GETs of one blob.
    pub fn blob(&self, digest: &str) -> Vec<Served> {
        self.served().into_iter().filter(|served| served.is_blob(digest)).collect()
    }

    /// Number of bytes of one blob that were sent.
    pub fn blob_bytes(&self, digest: &str) -> u64 {
        self.blob(digest).iter().map(|served| served.bytes).sum()
    }

    /// Maximum number of bodies that were sent concurrently.
    pub fn peak(&self) -> usize {
        self.peak.lock().expect("no thread panics with it").1
    }
}

struct Shared {
    upstream: SocketAddr,
    plan: Box<Plan>,
    served: Arc<Mutex<Vec<Served>>>,
    /// Current and maximum number of concurrent bodies.
    peak: Arc<Mutex<(usize, usize)>>,
}

impl Shared {
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let head = http::read_head(&mut reader)?;
        let (index, before) = {
            let mut served = self.served.lock().expect("no thread panics with it");
            let before = served.iter().filter(|other| other.head.first == head.first).count();
            served.push(Served { head: head.clone(), ..Served::default() });
            (served.len() - 1, before)
        };
        self.answer(&mut stream, &head, (self.plan)(&head, before), index)
    }

    /// Counts the begin of a body; or its end, which is before its last part is sent, because its client may
    /// then request the next one.
    fn count(&self, is_begin: bool) {
        let mut peak = self.peak.lock().expect("no thread panics with it");
        peak.0 = if is_begin { peak.0 + 1 } else { peak.0 - 1 };
        peak.1 = peak.1.max(peak.0);
    }

    fn answer(&self, stream: &mut TcpStream, head: &Head, fault: Fault, index: usize) -> std::io::Result<()> {
        let own = |status: &str, header: String| {
            format!("HTTP/1.1 {status}\r\n{header}Content-Length: 0\r\nConnection: close\r\n\r\n")
        };
        match &fault {
            Fault::Status(status, retry_after) => {
                self.note(index, |served| served.status = status.to_string());
                let header = retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n"));
                let text = own(&format!("{status} Fault"), header.unwrap_or_default());
                stream.write_all(text.as_bytes())
            }
            Fault::Challenge => {
                self.note(index, |served| served.status = "401".into());
                let text = own("401 Unauthorized", "WWW-Authenticate: Basic realm=\"boat\"\r\n".into());
                stream.write_all(text.as_bytes())
            }
            Fault::Redirect(to) => {
                self.note(index, |served| served.status = "307".into());
                let text = own("307 Temporary Redirect", format!("Location: {to}\r\n"));
                stream.write_all(text.as_bytes())
            }
            Fault::Late(time) => {
                std::thread::sleep(*time);
                self.forward(stream, head, &fault, index)
            }
            Fault::Raw(bytes) => {
                self.note(index, |served| served.status = "raw".into());
                stream.write_all(bytes)
            }
            _ => self.forward(stream, head, &fault, index),
        }
    }

    fn forward(
        &self,
        stream: &mut TcpStream,
        head: &Head,
        fault: &Fault,
        index: usize,
    ) -> std::io::Result<()> {
        let (reply, mut body) = http::pass_on(self.upstream, head)?;
        let middle = body.len() / 2;
        match fault {
            Fault::Flip => body[middle] ^= 1,
            Fault::Longer(bytes) => body.extend(vec![0; *bytes]),
            _ => {}
        }
        write!(stream, "{}\r\n", reply.first)?;
        let kept = |name: &str| !matches!(name, "connection" | "content-length" | "transfer-encoding");
        for (name, value) in reply.headers.iter().filter(|(name, _)| kept(name)) {
            write!(stream, "{name}: {value}\r\n")?;
        }
        let length = if head.first.starts_with("HEAD") { reply.length() } else { body.len() as u64 };
        write!(stream, "content-length: {length}\r\nconnection: close\r\n\r\n")?;
        self.note(index, |served| served.status = reply.second().to_owned());
        self.send(stream, &body, fault, index)
    }

    fn send(&self, stream: &mut TcpStream, body: &[u8], fault: &Fault, index: usize) -> std::io::Result<()> {
        let end = match fault {
            Fault::Cut(bytes) | Fault::Stall(bytes) => body.len().min(*bytes as usize),
            _ => body.len(),
        };
        let piece = if let Fault::Drip(bytes) = fault { *bytes } else { PIECE_BYTES };
        let pieces = body[..end].chunks(piece);
        self.count(true);
        let last = pieces.len();
        for (number, piece) in pieces.enumerate() {
            if number + 1 == last {
                self.count(false);
            }
            if let Fault::Over(line) = fault {
                line.pass(piece.len());
            }
            // Counted before, because a test may read the count as soon as its client has the last bytes.
            self.note(index, |served| served.bytes += piece.len() as u64);
            let sent = stream.write_all(piece);
            if sent.is_err() {
                self.note(index, |served| served.bytes -= piece.len() as u64);
                if number + 1 < last {
                    self.count(false);
                }
            }
            sent?;
            if let Fault::Drip(_) = fault {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        if last == 0 {
            self.count(false);
        }
        match fault {
            Fault::Stall(_) if end < body.len() => hang(stream),
            _ => Ok(()),
        }
    }

    fn note(&self, index: usize, change: impl FnOnce(&mut Served)) {
        change(&mut self.served.lock().expect("no thread panics with it")[index]);
    }
}

/// Sends nothing until the client disconnects or [`HANG`] has passed.
fn hang(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(HANG))?;
    let _ = stream.read(&mut [0]);
    Ok(())
}

/// An address to which no connection can be established, because the queue of its socket is full.
pub struct Hole {
    listener: TcpListener,
    _queue: Vec<TcpStream>,
}

impl Hole {
    /// Creates the address on the loopback interface.
    pub fn dig() -> Hole {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listen(&listener, Backlog::new(0).expect("a backlog")).expect("a shorter queue");
        let address = listener.local_addr().expect("a bound address");
        // Fills the queue until a connection fails.
        let fill = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let queue = (0..8).map_while(|_| fill()).collect();
        Hole { listener, _queue: queue }
    }

    /// The address to which no connection can be established.
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("a bound address")
    }
}
