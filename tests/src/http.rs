//! A minimal HTTP client and server for pushing to a registry and modifying its answers, and for asking a kubelet: one
//! request per connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Read timeout of a connection.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The first line and the header fields of a request or a response.
#[derive(Debug, Default, Clone)]
pub struct Head {
    /// The first line, without its line end.
    pub first: String,
    /// Header fields; names are in lower case.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The value of a header field; `None` if it is missing.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Length of the body in bytes, from `Content-Length`.
    pub fn length(&self) -> u64 {
        self.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// The second word of the first line: the path of a request, the status of a response.
    pub fn second(&self) -> &str {
        self.first.split(' ').nth(1).unwrap_or("")
    }
}

/// Reads the first line and the headers.
pub fn read_head(reader: &mut impl BufRead) -> io::Result<Head> {
    let mut head = Head::default();
    let mut line = String::new();
    reader.read_line(&mut line)?;
    head.first = line.trim_end().to_owned();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 || line.trim_end().is_empty() {
            return Ok(head);
        }
        if let Some((name, value)) = line.split_once(':') {
            head.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
}

/// Opens a connection with a read timeout.
pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, SILENCE_MAX)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    Ok(stream)
}

/// Forwards a request without a body to `upstream`, without credentials; returns the whole response.
pub fn pass_on(upstream: SocketAddr, request: &Head) -> io::Result<(Head, Vec<u8>)> {
    let mut upstream = connect(upstream)?;
    write!(upstream, "{}\r\n", request.first)?;
    for (name, value) in &request.headers {
        if !matches!(name.as_str(), "connection" | "authorization") {
            write!(upstream, "{name}: {value}\r\n")?;
        }
    }
    write!(upstream, "connection: close\r\n\r\n")?;
    let mut reader = BufReader::new(upstream);
    let reply = read_head(&mut reader)?;
    let mut body = Vec::new();
    if !request.first.starts_with("HEAD") {
        reader.read_to_end(&mut body)?;
    }
    Ok((reply, body))
}

/// Sends a GET request of HTTP/1.0, whose response is not chunked, and reads the body; `None` unless its status is 200.
pub fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}

/// Sends one request and reads the whole response.
pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    media_type: &str,
    body: &[u8],
) -> io::Result<(Head, Vec<u8>)> {
    let mut stream = connect(address)?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: {media_type}\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    )?;
    stream.write_all(body)?;
    let mut reader = BufReader::new(stream);
    let head = read_head(&mut reader)?;
    let mut answer = Vec::new();
    if method != "HEAD" {
        reader.take(head.length().max(1 << 20)).read_to_end(&mut answer)?;
    }
    Ok((head, answer))
}
