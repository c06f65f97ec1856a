//! The daemon of a node as a unit of systemd, for a suite that stops and starts its runtime through systemd's D-Bus interface
//! where systemd does not run.
//!
//! It listens on systemd's private socket, which clients use if there is no system bus, and implements those methods of
//! `org.freedesktop.systemd1.Manager` that the suite calls: GetUnitByPID, StopUnit and StartUnit, with the signal JobRemoved.
//! Each other call is answered with an error. Numbers are little-endian; a message of the other byte order ends its connection.

use std::fs;
use std::io::{BufRead, BufReader, Read, Result, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use coracle_tests::node::Node;

/// systemd's private socket.
const SOCKET: &str = "/run/systemd/private";
const UNIT: &str = "coracle.service";
/// The unit's object path: the dot of its name is escaped.
const UNIT_PATH: &str = "/org/freedesktop/systemd1/unit/coracle_2eservice";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";

// Types of messages, and codes of header fields, of the D-Bus specification.
const CALL: u8 = 1;
const REPLY: u8 = 2;
const ERROR: u8 = 3;
const SIGNAL: u8 = 4;
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const SIGNATURE: u8 = 8;

/// Longest message: far more than a call with two strings needs.
const MESSAGE_LIMIT: usize = 64 << 10;

/// State of all connections.
struct Bus {
    /// `None` once it was taken.
    node: Mutex<Option<Node>>,
    /// Sockets of open connections; signals are sent to each, whether it has subscribed or not.
    peers: Mutex<Vec<UnixStream>>,
    jobs: Mutex<u32>,
}

/// The daemon of a node as a unit, in threads that end with the process.
pub(crate) struct RuntimeUnit(Arc<Bus>);

impl RuntimeUnit {
    /// Serves this node.
    pub(crate) fn serve(node: Node) -> Result<RuntimeUnit> {
        fs::create_dir_all(Path::new(SOCKET).parent().expect("it is in a directory"))?;
        let listener = UnixListener::bind(SOCKET)?;
        let bus =
            Arc::new(Bus { node: Mutex::new(Some(node)), peers: Mutex::default(), jobs: Mutex::default() });
        let unit = RuntimeUnit(Arc::clone(&bus));
        thread::spawn(move || accept(&listener, &bus));
        Ok(unit)
    }

    /// Ends the service; calls are answered with errors from now on.
    pub(crate) fn into_node(self) -> Node {
        self.0.node().take().expect("it is taken once")
    }
}

fn accept(listener: &UnixListener, bus: &Arc<Bus>) {
    for stream in listener.incoming() {
        let (Ok(stream), bus) = (stream, Arc::clone(bus)) else { continue };
        thread::spawn(move || {
            // The end of a connection is no failure: the suite has its own check of each answer.
            let _ = bus.connection(&stream);
        });
    }
}

impl Bus {
    fn node(&self) -> MutexGuard<'_, Option<Node>> {
        self.node.lock().expect("no thread panicked with the node")
    }

    /// Answers the calls of a connection until it ends.
    fn connection(&self, stream: &UnixStream) -> Result<()> {
        let mut input = BufReader::new(stream);
        authenticate(&mut input, stream)?;
        self.peers.lock().expect("no panic").push(stream.try_clone()?);
        loop {
            let message = Message::read(&mut input)?;
            if message.kind == CALL {
                self.answer(&message, stream)?;
            }
        }
    }

    fn answer(&self, call: &Message, stream: &UnixStream) -> Result<()> {
        let unit = call.string(0).is_some_and(|unit| unit == UNIT);
        match call.member.as_str() {
            "GetUnitByPID" if self.pid().is_some_and(|pid| call.number(0) == Some(pid)) => {
                send(stream, &reply(call, "o", &string(UNIT_PATH)))
            }
            "GetUnitByPID" => send(stream, &error(call, "org.freedesktop.systemd1.NoUnitForPID")),
            "StopUnit" if unit => self.job(call, stream, Node::terminate),
            // The suite starts it again after each spec, whether it stopped it or not.
            "StartUnit" if unit => self.job(call, stream, |node| {
                if !node.has_daemon() {
                    node.launch();
                }
            }),
            "StopUnit" | "StartUnit" => send(stream, &error(call, "org.freedesktop.systemd1.NoSuchUnit")),
            // Of the bus that other clients have: every connection gets all signals.
            "AddMatch" => send(stream, &reply(call, "", &[])),
            _ => send(stream, &error(call, "org.freedesktop.DBus.Error.UnknownMethod")),
        }
    }

    /// The daemon's process id; `None` while the unit is stopped.
    fn pid(&self) -> Option<u32> {
        self.node().as_ref().filter(|node| node.has_daemon()).map(|node| node.pid() as u32)
    }

    /// Answers with a job, does it, and tells all connections that it is done.
    fn job(&self, call: &Message, stream: &UnixStream, work: impl FnOnce(&mut Node)) -> Result<()> {
        let mut jobs = self.jobs.lock().expect("no panic");
        *jobs += 1;
        let path = format!("{MANAGER_PATH}/job/{jobs}");
        send(stream, &reply(call, "o", &string(&path)))?;
        if let Some(node) = self.node().as_mut() {
            work(node);
        }
        let mut body = jobs.to_le_bytes().to_vec();
        for text in [&path, UNIT, "done"] {
            pad(&mut body, 4);
            body.extend(string(text));
        }
        let signal = signal("JobRemoved", "uoss", &body);
        // Those that have ended refuse it.
        self.peers.lock().expect("no panic").retain(|peer| send(peer, &signal).is_ok());
        Ok(())
    }
}

/// Accepts each client by the mechanism that all clients have: EXTERNAL. File descriptors are not passed.
fn authenticate(input: &mut impl BufRead, mut output: &UnixStream) -> Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        if input.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let answer = match line.trim_start_matches('\0').trim_end() {
            "BEGIN" => return Ok(()),
            "AUTH" => "REJECTED EXTERNAL\r\n",
            words if words.starts_with("AUTH EXTERNAL") => "OK 0123456789abcdef0123456789abcdef\r\n",
            _ => "ERROR\r\n",
        };
        output.write_all(answer.as_bytes())?;
    }
}

/// A message that was received: what an answer depends on.
struct Message {
    kind: u8,
    serial: u32,
    member: String,
    body: Vec<u8>,
}

impl Message {
    fn read(input: &mut impl Read) -> Result<Message> {
        let mut fixed = [0; 16];
        input.read_exact(&mut fixed)?;
        let [body, serial, fields] = [4, 8, 12].map(|at| number(&fixed, at).expect("sixteen bytes"));
        let fields_end = 16 + fields as usize;
        let header_end = fields_end.next_multiple_of(8);
        if fixed[0] != b'l' || header_end + body as usize > MESSAGE_LIMIT {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        let mut header = vec![0; header_end];
        header[..16].copy_from_slice(&fixed);
        input.read_exact(&mut header[16..])?;
        let mut text = vec![0; body as usize];
        input.read_exact(&mut text)?;
        let member = member(&header[..fields_end]).ok_or(std::io::ErrorKind::InvalidData)?;
        Ok(Message { kind: fixed[1], serial, member, body: text })
    }

    /// The number at this position of the body.
    fn number(&self, at: usize) -> Option<u32> {
        number(&self.body, at)
    }

    /// The string whose length is at this position of the body.
    fn string(&self, at: usize) -> Option<String> {
        let length = self.number(at)? as usize;
        let bytes = self.body.get(at + 4..(at + 4).checked_add(length)?)?;
        String::from_utf8(bytes.to_vec()).ok()
    }
}

/// The field MEMBER of a header, empty if there is none; `None` if the header is malformed.
fn member(header: &[u8]) -> Option<String> {
    let (mut at, mut member) = (16, String::new());
    while at < header.len() {
        at = at.next_multiple_of(8);
        // The code, then a variant: the length of its signature, the signature (one type), a zero byte, and the value.
        let (code, kind) = (*header.get(at)?, *header.get(at + 2)?);
        at += 4;
        let (start, length) = match kind {
            b'g' => (at + 1, usize::from(*header.get(at)?)),
            b's' | b'o' => {
                at = at.next_multiple_of(4);
                (at + 4, number(header, at)? as usize)
            }
            b'u' => {
                at = at.next_multiple_of(4) + 4;
                continue;
            }
            _ => return None,
        };
        let end = start.checked_add(length)?;
        if code == MEMBER {
            member = String::from_utf8(header.get(start..end)?.to_vec()).ok()?;
        }
        at = end + 1; // the zero byte after each string
    }
    Some(member)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

/// A string or object path.
fn string(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("short");
    [&length.to_le_bytes(), text.as_bytes(), &[0]].concat()
}

/// A header field with a value of this type.
fn field(code: u8, kind: u8, value: &[u8]) -> Vec<u8> {
    [&[code, 1, kind, 0], value].concat()
}

/// A message with these fields and this body.
fn message(kind: u8, fields: &[Vec<u8>], signature: &str, body: &[u8]) -> Vec<u8> {
    let mut list = Vec::new();
    for field in fields {
        pad(&mut list, 8);
        list.extend(field);
    }
    if !signature.is_empty() {
        pad(&mut list, 8);
        let length = u8::try_from(signature.len()).expect("short");
        list.extend(field(SIGNATURE, b'g', &[&[length], signature.as_bytes(), &[0]].concat()));
    }
    // The serial is 1 in each: nothing is sent that would be answered.
    let [body_length, list_length] =
        [body.len(), list.len()].map(|length| u32::try_from(length).expect("short"));
    let mut bytes = vec![b'l', kind, 0, 1];
    for number in [body_length, 1, list_length] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(list);
    pad(&mut bytes, 8);
    bytes.extend(body);
    bytes
}

fn reply(call: &Message, signature: &str, body: &[u8]) -> Vec<u8> {
    message(REPLY, &[field(REPLY_SERIAL, b'u', &call.serial.to_le_bytes())], signature, body)
}

fn error(call: &Message, name: &str) -> Vec<u8> {
    let serial = field(REPLY_SERIAL, b'u', &call.serial.to_le_bytes());
    message(ERROR, &[serial, field(ERROR_NAME, b's', &string(name))], "", &[])
}

fn signal(member: &str, signature: &str, body: &[u8]) -> Vec<u8> {
    let fields = [
        field(PATH, b'o', &string(MANAGER_PATH)),
        field(INTERFACE, b's', &string(MANAGER)),
        field(MEMBER, b's', &string(member)),
    ];
    message(SIGNAL, &fields, signature, body)
}

fn send(mut stream: &UnixStream, message: &[u8]) -> Result<()> {
    stream.write_all(message)
}
