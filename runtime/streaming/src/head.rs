//! The request that opens a session: the HTTP/1.1 header and the requested protocol (streaming 6.3, §6.7).

use tungstenite::handshake::derive_accept_key;

/// Maximum length of the request header in bytes.
pub(super) const HEAD_BYTES_MAX: usize = 16 << 10;
/// Maximum number of header fields: the kubelet forwards all fields of its client and of the API server.
const HEADERS_MAX: usize = 128;

/// The request: its path and the requested upgrade, SPDY or WebSocket.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Path of the request, for example `/exec/TOKEN`.
    pub(super) path: String,
    pub(super) upgrade: Upgrade,
    /// Length of the header in bytes; the bytes after it belong to the new protocol.
    pub(super) length: usize,
}

/// The protocol family with the offered subprotocols in order of preference.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Upgrade {
    Spdy {
        offered: Vec<String>,
    },
    /// A WebSocket, with the value of Sec-WebSocket-Accept.
    WebSocket {
        offered: Vec<String>,
        accept: String,
    },
}

/// An HTTP error response.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: &'static str,
    /// Further header lines, each with its line end; may be empty.
    pub(super) headers: String,
    pub(super) text: String,
}

impl Refusal {
    pub(super) fn new(status: &'static str, text: impl Into<String>) -> Refusal {
        Refusal { status, headers: String::new(), text: text.into() }
    }

    /// Encodes the response.
    pub(super) fn encode(&self) -> String {
        let Refusal { status, headers, text } = self;
        let length = text.len() + 1;
        format!(
            "HTTP/1.1 {status}\r\n{headers}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{text}\n"
        )
    }
}

/// Parses the header at the start of `bytes`; `Ok(None)` if it is not complete. Error texts contain no header
/// field, because header fields contain credentials.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<Head>, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES_MAX => return Ok(None),
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Err(Refusal::new(
                "431 Request Header Fields Too Large",
                "the request header is too long",
            ));
        }
        Err(_) => return Err(Refusal::new("400 Bad Request", "not an HTTP/1.1 request")),
    };
    let method = request.method.unwrap_or_default();
    if !matches!(method, "GET" | "POST") {
        return Err(Refusal::new("405 Method Not Allowed", "only GET and POST are supported"));
    }
    // Several fields of the same name form one list.
    let list = |name: &str| -> Vec<String> {
        let values = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        let values = values.map(|header| String::from_utf8_lossy(header.value).into_owned());
        let parts: Vec<String> = values
            .flat_map(|value| value.split(',').map(|part| part.trim().to_owned()).collect::<Vec<_>>())
            .collect();
        parts.into_iter().filter(|part| !part.is_empty()).collect()
    };
    let has =
        |name: &str, wanted: &str| list(name).iter().any(|part| part.to_ascii_lowercase().contains(wanted));
    let path = request.path.unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default().to_owned();
    let is_upgrade = has("connection", "upgrade");
    let upgrade = if is_upgrade && has("upgrade", "websocket") {
        let key = list("sec-websocket-key").into_iter().next();
        let key = key.filter(|_| method == "GET" && has("sec-websocket-version", "13"));
        let key =
            key.ok_or_else(|| Refusal::new("400 Bad Request", "Sec-WebSocket-Key or version 13 is missing"))?;
        Upgrade::WebSocket {
            offered: list("sec-websocket-protocol"),
            accept: derive_accept_key(key.as_bytes()),
        }
    } else if is_upgrade && has("upgrade", "spdy/3.1") {
        let offered = list("x-stream-protocol-version");
        if offered.is_empty() {
            return Err(Refusal::new("400 Bad Request", "X-Stream-Protocol-Version: is missing"));
        }
        Upgrade::Spdy { offered }
    } else {
        let text = "an upgrade to SPDY/3.1 or WebSocket is required";
        return Err(Refusal::new("400 Bad Request", text));
    };
    Ok(Some(Head { path, upgrade, length }))
}

/// Chooses the protocol of `supported` that the client prefers most; the refusal lists the supported
/// protocols.
pub(super) fn choose<'a>(offered: &[String], supported: &[&'a str]) -> Result<&'a str, Refusal> {
    let found = offered.iter().find_map(|wanted| supported.iter().find(|known| *known == wanted));
    found.copied().ok_or_else(|| Refusal {
        status: "403 Forbidden",
        headers: supported
            .iter()
            .map(|name| format!("X-Accepted-Stream-Protocol-Versions: {name}\r\n"))
            .collect(),
        text: format!("none of the offered protocols is supported; supported: {}", supported.join(", ")),
    })
}

/// Encodes the response after which both sides use the chosen protocol.
pub(super) fn switch(upgrade: &Upgrade, protocol: &str) -> String {
    let named = |name: &str| match protocol {
        "" => String::new(),
        protocol => format!("{name}: {protocol}\r\n"),
    };
    let (kind, headers) = match upgrade {
        Upgrade::Spdy { .. } => ("SPDY/3.1", named("X-Stream-Protocol-Version")),
        Upgrade::WebSocket { accept, .. } => {
            ("websocket", format!("Sec-WebSocket-Accept: {accept}\r\n{}", named("Sec-WebSocket-Protocol")))
        }
    };
    format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {kind}\r\n{headers}\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPDY: &str = "POST /exec/abc?x=1 HTTP/1.1\r\nHost: h\r\nconnection: keep-alive, Upgrade\r\nUpgrade: SPDY/3.1\r\n\
        X-Stream-Protocol-Version: v5.channel.k8s.io\r\nX-Stream-Protocol-Version: v4.channel.k8s.io, v3.channel.k8s.io\r\n\r\n";

    #[test]
    fn both_upgrades_are_parsed_however_the_header_is_split() {
        for cut in 0..SPDY.len() {
            assert_eq!(parse(&SPDY.as_bytes()[..cut]), Ok(None), "cut at {cut}");
        }
        let more = format!("{SPDY}\u{0}");
        let head = parse(more.as_bytes()).unwrap().unwrap();
        assert_eq!((head.path.as_str(), head.length), ("/exec/abc", SPDY.len()));
        let Upgrade::Spdy { offered } = head.upgrade else { panic!("{head:?}") };
        assert_eq!(choose(&offered, &["v4.channel.k8s.io", "v3.channel.k8s.io"]), Ok("v4.channel.k8s.io"));
        let refusal = choose(&offered, &["portforward.k8s.io"]).unwrap_err();
        assert!(refusal.encode().contains("\r\nX-Accepted-Stream-Protocol-Versions: portforward.k8s.io\r\n"));
        // The key and its accept value are those of RFC 6455, section 1.3.
        let text = "GET /attach/t HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
            Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        let head = parse(text.as_bytes()).unwrap().unwrap();
        let expected = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
            Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
        assert_eq!(switch(&head.upgrade, ""), expected);
    }

    #[test]
    fn other_requests_are_refused_with_an_error_text() {
        let long = format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(HEAD_BYTES_MAX));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(HEADERS_MAX + 1));
        for (text, status) in [
            ("GET /exec/abc HTTP/1.1\r\n\r\n", "400"),
            ("DELETE /exec/abc HTTP/1.1\r\n\r\n", "405"),
            ("POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "400"),
            ("\u{16}\u{3}\u{1}\u{0}hello", "400"),
            (&long, "431"),
            (&many, "431"),
        ] {
            assert!(parse(text.as_bytes()).unwrap_err().status.starts_with(status), "{text:.40}");
        }
    }
}
