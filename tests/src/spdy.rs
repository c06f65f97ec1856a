//! A client of the streaming server without SPDY libraries: SPDY/3.1 with stored (uncompressed) header
//! blocks, which zlib allows, so that tests can also violate the protocol.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::http::{Head, read_head};

/// Read timeout of a connection.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// zlib header with the dictionary of SPDY/3.
const ZLIB_HEAD: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];

/// A frame that the server has sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// The server accepted a stream.
    Reply(u32),
    /// Data of a stream, and whether it is the stream's last data.
    Data(u32, bool, Vec<u8>),
    /// The server reset a stream; with stream number and status.
    Reset(u32, u32),
    /// The server answered a PING.
    Ping(u32),
    /// The server closes the connection.
    GoAway,
}

/// A client's connection with SPDY.
pub struct Client {
    reader: BufReader<TcpStream>,
    last: u32,
}

/// The result of a session.
#[derive(Debug, Default)]
pub struct Outcome {
    /// All data of stdout.
    pub stdout: Vec<u8>,
    /// All data of stderr.
    pub stderr: Vec<u8>,
    /// The status of the error stream; null if there was none.
    pub status: Value,
}

impl Outcome {
    /// The exit code in the status.
    pub fn exit_code(&self) -> u8 {
        match self.status["status"].as_str() {
            Some("Success") => 0,
            _ => {
                let cause = self.status["details"]["causes"][0]["message"].as_str();
                cause.and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{}", self.status))
            }
        }
    }
}

/// Sends a request header to a URL of the server; returns the response header and the connection.
pub fn upgrade(
    url: &str,
    method: &str,
    headers: &[(&str, &str)],
) -> io::Result<(Head, BufReader<TcpStream>)> {
    let rest = url.strip_prefix("http://").expect("an http URL");
    let (address, path) = rest.split_once('/').expect("a URL with a path");
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_nodelay(true)?;
    let mut text = format!("{method} /{path} HTTP/1.1\r\nHost: {address}\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{text}\r\n").as_bytes())?;
    let mut reader = BufReader::new(stream);
    let head = read_head(&mut reader)?;
    Ok((head, reader))
}

impl Client {
    /// Upgrades a connection to SPDY; panics with the response if the server refuses.
    #[track_caller]
    pub fn connect(url: &str, protocol: &str) -> Client {
        let headers =
            [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", protocol)];
        let (head, reader) = upgrade(url, "POST", &headers).expect("the server answers");
        assert_eq!(head.second(), "101", "{head:?}");
        assert_eq!(head.get("x-stream-protocol-version"), Some(protocol));
        Client { reader, last: 0 }
    }

    /// Writes arbitrary bytes.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    fn control(&mut self, kind: u8, flags: u8, payload: &[u8]) -> io::Result<()> {
        let length = (payload.len() as u32).to_be_bytes();
        self.write(&[&[0x80, 3, 0, kind, flags], &length[1..], payload].concat())
    }

    /// Opens a stream without waiting for the reply.
    pub fn open(&mut self, headers: &[(&str, &str)]) -> io::Result<u32> {
        let mut block = (headers.len() as u32).to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            block.extend((text.len() as u32).to_be_bytes());
            block.extend(text.as_bytes());
        }
        let length = block.len() as u16;
        let zlib: &[u8] = if self.last == 0 { &ZLIB_HEAD } else { &[] };
        self.last = if self.last == 0 { 1 } else { self.last + 2 };
        let payload = [
            &self.last.to_be_bytes()[..],
            &[0; 6],
            zlib,
            &[0],
            &length.to_le_bytes(),
            &(!length).to_le_bytes(),
            &block,
        ];
        self.control(1, 0, &payload.concat())?;
        Ok(self.last)
    }

    /// Opens the streams of an exec or attach in the order of real clients, and waits for the replies.
    pub fn open_stdio(&mut self, names: &[&str]) -> BTreeMap<String, u32> {
        let mut streams = BTreeMap::new();
        for name in names {
            let stream = self.open(&[("streamtype", name)]).expect("a stream");
            assert_eq!(self.next().expect("a reply"), Frame::Reply(stream));
            streams.insert((*name).to_owned(), stream);
        }
        streams
    }

    /// Sends data on a stream.
    pub fn send(&mut self, stream: u32, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(32 << 10) {
            let length = (part.len() as u32).to_be_bytes();
            self.write(&[&stream.to_be_bytes()[..], &[0], &length[1..], part].concat())?;
        }
        Ok(())
    }

    /// Ends the client's half of a stream.
    pub fn finish(&mut self, stream: u32) -> io::Result<()> {
        self.write(&[&stream.to_be_bytes()[..], &[1, 0, 0, 0]].concat())
    }

    /// Sends a PING.
    pub fn ping(&mut self, id: u32) -> io::Result<()> {
        self.control(6, 0, &id.to_be_bytes())
    }

    /// Receives the next frame; `UnexpectedEof` if the server has disconnected.
    #[expect(clippy::should_implement_trait, reason = "an iterator would hide the errors")]
    pub fn next(&mut self) -> io::Result<Frame> {
        let mut head = [0; 8];
        self.reader.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize;
        let mut payload = vec![0; length];
        self.reader.read_exact(&mut payload)?;
        let word = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().expect("four bytes"));
        if head[0] & 0x80 == 0 {
            let stream = u32::from_be_bytes(head[..4].try_into().expect("four bytes"));
            return Ok(Frame::Data(stream, head[4] & 1 != 0, payload));
        }
        match head[3] {
            2 => Ok(Frame::Reply(word(0))),
            3 => Ok(Frame::Reset(word(0), word(4))),
            6 => Ok(Frame::Ping(word(0))),
            7 => Ok(Frame::GoAway),
            other => panic!("the server sent a control frame of type {other}"),
        }
    }

    /// Runs a session to its end; sends `input` if there is a stream for it.
    pub fn finish_session(mut self, streams: &BTreeMap<String, u32>, input: Option<&[u8]>) -> Outcome {
        let stream = |name: &str| streams.get(name).copied().unwrap_or(0);
        let writer = input.map(|input| {
            let mut writer = Client {
                reader: BufReader::new(self.reader.get_ref().try_clone().expect("a second handle")),
                last: self.last,
            };
            let (input, stdin) = (input.to_vec(), stream("stdin"));
            // Concurrently in both directions, to avoid a deadlock of two full buffers.
            std::thread::spawn(move || {
                // A process that exits early does not read all of it.
                let _ = writer.send(stdin, &input).and_then(|()| writer.finish(stdin));
            })
        });
        let (mut outcome, mut status) = (Outcome::default(), Vec::new());
        while let Ok(frame) = self.next() {
            match frame {
                Frame::Data(from, _, bytes) if from == stream("stdout") => outcome.stdout.extend(bytes),
                Frame::Data(from, _, bytes) if from == stream("stderr") => outcome.stderr.extend(bytes),
                Frame::Data(from, _, bytes) if from == stream("error") => status.extend(bytes),
                Frame::GoAway => break,
                _ => {}
            }
        }
        drop(self);
        if let Some(writer) = writer {
            writer.join().expect("the writer ends");
        }
        outcome.status = serde_json::from_slice(&status).unwrap_or(Value::Null);
        outcome
    }
}
