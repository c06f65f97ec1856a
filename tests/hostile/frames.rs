//! HTTP/2 frames on the CRI socket that no gRPC library sends: floods that cost the sender little and a server much (CVE-2019-9511 to
//! CVE-2019-9515, CVE-2019-9517, CVE-2019-9518, CVE-2023-44487, CVE-2023-45288), requests that are half closed, and clients that never
//! read. Others are answered meanwhile, and the daemon's memory and descriptors stay few. Times are not measured.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::Node;

/// Types of frames (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
/// A type that does not exist: such frames are ignored (RFC 9113 §4.1).
const UNKNOWN: u8 = 0xbe;

const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Error code of a peer that does too much.
const ENHANCE_YOUR_CALM: u32 = 11;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An attack: many frames of one kind.
struct Flood {
    name: &'static str,
    /// The frames that a connection sends before the flood.
    opening: fn() -> Vec<u8>,
    /// Frames that may use the stream of this odd number.
    frames: fn(u32) -> Vec<u8>,
    does_read: bool,
    /// Whether the daemon permits a few frames of this kind; if not, it ends the connection at once.
    is_permitted: bool,
}

const FLOODS: [Flood; 13] = [
    flood("rapid reset of requests", |stream| [open(stream), reset(stream)].concat()),
    flood("rapid reset of calls", |stream| [whole(stream), reset(stream)].concat()),
    Flood {
        is_permitted: false,
        ..flood("CONTINUATION without end", |_| frame(CONTINUATION, 0, 1, &header("x", &"y".repeat(100))))
    }
    .opened(|| frame(HEADERS, 0, 1, &request())),
    Flood { is_permitted: false, ..flood("empty CONTINUATION", |_| frame(CONTINUATION, 0, 1, b"")) }
        .opened(|| frame(HEADERS, 0, 1, &request())),
    flood("PING", |_| frame(PING, 0, 0, b"12345678")).unread(),
    flood("SETTINGS", |_| frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 9])).unread(),
    flood("WINDOW_UPDATE, PRIORITY, unknown", |stream| {
        let priority = frame(PRIORITY, 0, stream + 2000, &[0, 0, 0, 0, 16]);
        [frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]), priority, frame(UNKNOWN, 0xff, stream, &[0; 1000])]
            .concat()
    })
    .opened(|| open(1)),
    flood("empty DATA", |_| frame(DATA, 0, 1, b"")).opened(|| open(1)),
    flood("half-closed requests without a message", |stream| {
        frame(HEADERS, END_HEADERS | END_STREAM, stream, &request())
    }),
    flood("half-closed calls whose answers have no window", whole)
        .opened(|| frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]))
        .unread(),
    flood("calls whose answers are never read", whole).unread(),
    flood("requests without an end", open),
    flood("GOAWAY within calls", |stream| [open(stream), frame(GOAWAY, 0, 0, &[0; 8])].concat()),
];

const fn flood(name: &'static str, frames: fn(u32) -> Vec<u8>) -> Flood {
    Flood { name, opening: Vec::new, frames, does_read: true, is_permitted: true }
}

impl Flood {
    const fn opened(self, opening: fn() -> Vec<u8>) -> Flood {
        Flood { opening, ..self }
    }

    const fn unread(self) -> Flood {
        Flood { does_read: false, ..self }
    }

    /// A connection that has sent the preface and the opening.
    fn connect(&self, socket: &Path) -> io::Result<UnixStream> {
        const WRITE_LIMIT: Duration = Duration::from_millis(50);
        let mut connection = UnixStream::connect(socket)?;
        connection.set_write_timeout(Some(WRITE_LIMIT))?;
        connection.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, b""), &(self.opening)()].concat())?;
        Ok(connection)
    }

    /// Whether the daemon understands the frames: it answers a PING after three of them, or refuses a thousand for their number.
    fn is_understood(&self, socket: &Path) -> Result<(), String> {
        let tell = |error: io::Error| format!("{}: {error}", self.name);
        let mut connection = self.connect(socket).map_err(tell)?;
        connection.set_read_timeout(Some(host::patience())).map_err(tell)?;
        let count = if self.is_permitted { 3 } else { 1000 };
        let mut bytes: Vec<u8> = (0..count).flat_map(|number| (self.frames)(3 + 2 * number)).collect();
        bytes.extend(frame(PING, 0, 0, b"the last"));
        // The connection may end before all is sent.
        let _ = connection.write_all(&bytes);
        loop {
            match (read_frame(&mut connection).map_err(tell)?, self.is_permitted) {
                ((PING, ACK, payload), true) if payload == b"the last" => return Ok(()),
                ((GOAWAY, _, payload), false) if payload[4..8] == ENHANCE_YOUR_CALM.to_be_bytes() => {
                    return Ok(());
                }
                ((GOAWAY, _, payload), _) if payload[4..8] != [0; 4] => {
                    return Err(format!("{}: {payload:?}", self.name));
                }
                _ => {}
            }
        }
    }

    /// Sends until `over`, with a new connection after each that the daemon ends or does not read. Counts the bytes in `sent`.
    fn run(&self, socket: &Path, over: &AtomicBool, sent: &AtomicUsize) {
        const HELD_MAX: usize = 16;
        let mut held = Vec::new();
        while !over.load(Ordering::Relaxed) {
            // The daemon may have refused the connection.
            let Ok(mut connection) = self.connect(socket) else { continue };
            connection.set_read_timeout(Some(Duration::from_micros(1))).expect("a socket");
            let mut stream = 3;
            while !over.load(Ordering::Relaxed) && stream < u32::MAX >> 1 {
                let bytes: Vec<u8> = (0..64).flat_map(|number| (self.frames)(stream + 2 * number)).collect();
                stream += 128;
                if let Err(error) = connection.write_all(&bytes) {
                    // Of a connection that it does not read, the daemon keeps what it has.
                    if error.kind() == ErrorKind::WouldBlock {
                        held.push(connection);
                    }
                    break;
                }
                sent.fetch_add(bytes.len(), Ordering::Relaxed);
                if self.does_read {
                    let mut buffer = [0; 64 << 10];
                    while connection.read(&mut buffer).is_ok_and(|count| count == buffer.len()) {}
                }
            }
            if held.len() > HELD_MAX {
                held.remove(0);
            }
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A field without a name in a table and without compression (RFC 7541 §6.2.2).
fn header(name: &str, value: &str) -> Vec<u8> {
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

/// The fields of a call of Version.
fn request() -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/runtime.v1.RuntimeService/Version"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    fields.iter().flat_map(|(name, value)| header(name, value)).collect()
}

/// A request whose message does not come.
fn open(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &request())
}

/// A request with an empty message.
fn whole(stream: u32) -> Vec<u8> {
    [open(stream), frame(DATA, END_STREAM, stream, &[0; 5])].concat()
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])
}

/// The type, flags and payload of the next frame.
fn read_frame(connection: &mut UnixStream) -> io::Result<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    connection.read_exact(&mut head)?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    connection.read_exact(&mut payload)?;
    Ok((head[3], head[4], payload))
}

/// Four clients at once send each kind of frames, with a new connection after each that the daemon ends or does not read.
#[test]
fn floods_of_frames_neither_fill_the_daemon_nor_keep_others_from_it() {
    const THREADS: usize = 4;
    const ANSWERS_MIN: usize = 3;
    const LONG: Duration = Duration::from_millis(500);
    /// Until answers that are not read need more memory than they may.
    const LONG_UNREAD: Duration = Duration::from_secs(3);
    const PEAK_KIB_MAX: u64 = 24 << 10;
    let node = Node::start();
    let good = node.another();
    good.version(VersionRequest::default()).expect("its connection is made");
    for flood in &FLOODS {
        flood.is_understood(&node.socket()).expect("the flood is HTTP/2");
        let long = if flood.does_read { LONG } else { LONG_UNREAD };
        let before = node.descriptors();
        let (over, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
        let answers = std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| flood.run(&node.socket(), &over, &sent));
            }
            let (start, mut answers) = (Instant::now(), 0);
            let mut failure = None;
            while failure.is_none() && (start.elapsed() < long || answers < ANSWERS_MIN) {
                let old = good.version(VersionRequest::default());
                failure = old.and_then(|_| node.another().version(VersionRequest::default())).err();
                answers += 1;
            }
            over.store(true, Ordering::Relaxed);
            failure.map_or(Ok(answers), Err)
        });
        let peak = host::proc_value(node.pid(), "status", "VmHWM").expect("its peak");
        println!(
            "{}: {} KiB sent, peak {peak} KiB, {answers:?}",
            flood.name,
            sent.load(Ordering::Relaxed) >> 10
        );
        assert!(answers.is_ok(), "{}: others are answered: {answers:?}", flood.name);
        assert!(sent.load(Ordering::Relaxed) > 64 << 10, "{}: {sent:?} bytes", flood.name);
        assert!(peak <= PEAK_KIB_MAX, "{}: {peak} KiB", flood.name);
        host::wait_until("the connections are closed", || node.descriptors() <= before);
    }
    node.stop();
}
