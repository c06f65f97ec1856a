//! A proxy before a registry that does with each answer what a test says: cuts it off, delays it, turns it over, sends
//! the client elsewhere. It keeps a record of every request and of the bytes that went out for it.

use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::socket::{Backlog, listen};

use crate::http::{self, Head};

/// One read and write.
const PIECE_BYTES: usize = 16 << 10;
/// How long a hanging answer hangs when its client does not go away.
const HANG: Duration = Duration::from_secs(120);

/// What happens to one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The connection ends after so many bytes of the body, its length promised in full.
    Cut(u64),
    /// Nothing more comes after so many bytes of the body.
    Stall(u64),
    /// A name and a password are asked for.
    Challenge,
    /// So many bytes of the body come each tenth of a second.
    Drip(usize),
    /// Another status, with a `Retry-After` of so many seconds.
    Status(u16, Option<u32>),
    /// A byte in the middle is another.
    Flip,
    /// So many bytes more than there are, promised and sent.
    Longer(usize),
    /// A redirect; a path is one of this proxy.
    Redirect(String),
}

/// A request and what became of it.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// Its head.
    pub head: Head,
    /// Bytes of the body that were sent.
    pub bytes: u64,
    /// The answer's status.
    pub status: String,
}

impl Served {
    /// Whether it is a GET of this blob.
    pub fn is_blob(&self, digest: &str) -> bool {
        self.head.first.starts_with("GET") && self.head.second().contains(&format!("/blobs/{digest}"))
    }
}

/// Says what happens to the answer of a request, of which there were so many of the same path before.
type Plan = dyn Fn(&Head, usize) -> Fault + Send + Sync;

/// The proxy; its thread ends with the process, its connections with their clients.
pub struct Faulty {
    address: SocketAddr,
    served: Arc<Mutex<Vec<Served>>>,
    peak: Arc<Mutex<(usize, usize)>>,
}

impl Faulty {
    /// Starts one on 127.0.0.1.
    pub fn start(
        upstream: SocketAddr,
        plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static,
    ) -> Faulty {
        Faulty::start_at(Ipv4Addr::LOCALHOST.into(), upstream, plan)
    }

    /// Starts one elsewhere on this machine.
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
                // A peer that hangs up is part of what is tested.
                std::thread::spawn(move || {
                    let _ = shared.serve(stream);
                });
            }
        });
        faulty
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `HOST:PORT/REPO:TAG`.
    pub fn name(&self, repository: &str, tag: &str) -> String {
        format!("{}/{repository}:{tag}", self.address)
    }

    /// Every request so far.
    pub fn served(&self) -> Vec<Served> {
        self.served.lock().expect("no thread panics with it").clone()
    }

    /// The GETs of one blob.
    pub fn blob(&self, digest: &str) -> Vec<Served> {
        self.served().into_iter().filter(|served| served.is_blob(digest)).collect()
    }

    /// Bytes of one blob that were sent.
    pub fn blob_bytes(&self, digest: &str) -> u64 {
        self.blob(digest).iter().map(|served| served.bytes).sum()
    }

    /// Most bodies that were under way at once.
    pub fn peak(&self) -> usize {
        self.peak.lock().expect("no thread panics with it").1
    }
}

struct Shared {
    upstream: SocketAddr,
    plan: Box<Plan>,
    served: Arc<Mutex<Vec<Served>>>,
    /// Bodies under way: now, and at most.
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

    /// A blob's body begins, or all but its last piece is sent: behind that its client may ask for the next.
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
            let sent = stream.write_all(piece);
            if sent.is_err() && number + 1 < last {
                self.count(false);
            }
            sent?;
            self.note(index, |served| served.bytes += piece.len() as u64);
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

/// Says nothing until the client goes, or a while.
fn hang(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(HANG))?;
    let _ = stream.read(&mut [0]);
    Ok(())
}

/// An address at which connections are never made: its queue is full, so the kernel answers no more.
pub struct Hole {
    listener: TcpListener,
    _queue: Vec<TcpStream>,
}

impl Hole {
    /// Digs one on loopback.
    pub fn dig() -> Hole {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listen(&listener, Backlog::new(0).expect("a backlog")).expect("a shorter queue");
        let address = listener.local_addr().expect("a bound address");
        // As many as fit; the first that does not ends it.
        let fill = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let queue = (0..8).map_while(|_| fill()).collect();
        Hole { listener, _queue: queue }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("a bound address")
    }
}
