//! A common interface of the protocols that a client can choose: events of the client, and sending of stream
//! data.

use super::event::{Broken, Event};
use super::{spdy, websocket};

/// The protocol of an upgraded connection.
pub(super) enum Peer {
    Spdy(spdy::Session),
    WebSocket(websocket::Session),
    /// SPDY's byte stream inside WebSocket messages (streaming 6.9).
    Tunnel(Box<Tunnel>),
}

/// SPDY frames inside of WebSocket messages; see [`Peer::Tunnel`].
pub(super) struct Tunnel {
    outer: websocket::Session,
    inner: spdy::Session,
    /// The part of the last message that the inner protocol has not consumed yet.
    piece: Vec<u8>,
    at: usize,
}

/// An event without its data.
enum Found {
    Data { stream: u32, length: usize },
    Other(Event<'static>),
}

impl Tunnel {
    pub(super) fn new() -> Tunnel {
        let outer = websocket::Session::new(websocket::Form::Raw);
        Tunnel { outer, inner: spdy::Session::new(), piece: Vec::new(), at: 0 }
    }

    fn next<'a>(&'a mut self, input: &mut &[u8]) -> Result<Option<Event<'a>>, Broken> {
        loop {
            // A frame may be split anywhere, so a message without a complete event is followed by the next
            // message.
            match self.inner_next()? {
                Some(Found::Data { stream, length }) => {
                    return Ok(Some(Event::Data { stream, bytes: &self.piece[self.at - length..self.at] }));
                }
                Some(Found::Other(event)) => return Ok(Some(event)),
                None => {}
            }
            match self.outer.next(input)? {
                Some(Event::Data { bytes, .. }) => {
                    self.piece.clear();
                    self.piece.extend_from_slice(bytes);
                    self.at = 0;
                }
                Some(_) => return Ok(Some(Event::Closed)),
                None => return Ok(None),
            }
        }
    }

    /// The next event of the inner protocol; `at` is the end of its data.
    fn inner_next(&mut self) -> Result<Option<Found>, Broken> {
        let mut rest = &self.piece[self.at..];
        let found = match self.inner.next(&mut rest)? {
            None => None,
            Some(Event::Data { stream, bytes }) => Some(Found::Data { stream, length: bytes.len() }),
            Some(Event::Opened { stream, headers }) => Some(Found::Other(Event::Opened { stream, headers })),
            Some(Event::Ended { stream }) => Some(Found::Other(Event::Ended { stream })),
            Some(Event::Reset { stream }) => Some(Found::Other(Event::Reset { stream })),
            Some(Event::Closed) => Some(Found::Other(Event::Closed)),
        };
        self.at = self.piece.len() - rest.len();
        Ok(found)
    }

    /// Wraps the output of the inner protocol into messages.
    fn wrap(&mut self) {
        let inner = std::mem::take(self.inner.output());
        if !inner.is_empty() {
            self.outer.send(0, &inner);
        }
    }
}

impl Peer {
    /// Takes the next event from the start of `input`; `None` if more input is needed.
    pub(super) fn next<'a>(&'a mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Broken> {
        match self {
            Peer::Spdy(session) => session.next(input),
            Peer::WebSocket(session) => session.next(input),
            Peer::Tunnel(tunnel) => tunnel.next(input),
        }
    }

    /// The SPDY session, in which clients open streams by name; `None` for a WebSocket, whose channels exist
    /// from the start.
    pub(super) fn spdy(&mut self) -> Option<&mut spdy::Session> {
        match self {
            Peer::Spdy(session) => Some(session),
            Peer::Tunnel(tunnel) => Some(&mut tunnel.inner),
            Peer::WebSocket(_) => None,
        }
    }

    /// Sends data on a stream.
    pub(super) fn send(&mut self, stream: u32, bytes: &[u8]) {
        match self {
            Peer::Spdy(session) => session.send(stream, bytes),
            Peer::WebSocket(session) => session.send(stream, bytes),
            Peer::Tunnel(tunnel) => tunnel.inner.send(stream, bytes),
        }
    }

    /// Ends the server's half of a stream. The channels of a WebSocket end with the connection, so the call
    /// has no effect on them.
    pub(super) fn finish(&mut self, stream: u32) {
        if let Some(session) = self.spdy() {
            session.finish(stream);
        }
    }

    /// Sends the protocol's close message.
    pub(super) fn close(&mut self) {
        match self {
            Peer::Spdy(session) => session.close(),
            Peer::WebSocket(session) => session.close(),
            Peer::Tunnel(tunnel) => {
                tunnel.inner.close();
                tunnel.wrap();
                tunnel.outer.close();
            }
        }
    }

    /// Pending output; the caller removes the bytes that it has written.
    pub(super) fn output(&mut self) -> &mut Vec<u8> {
        match self {
            Peer::Spdy(session) => session.output(),
            Peer::WebSocket(session) => session.output(),
            Peer::Tunnel(tunnel) => {
                tunnel.wrap();
                tunnel.outer.output()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::Event;
    use super::Tunnel;

    /// Clients send the header and the payload of a SPDY frame in separate messages.
    #[test]
    fn a_frame_may_be_split_into_several_messages() {
        let message = |bytes: &[u8]| {
            let masked = bytes.iter().copied(); // with a mask of zeros
            [0x82, 0x80 | bytes.len() as u8, 0, 0, 0, 0].into_iter().chain(masked).collect::<Vec<u8>>()
        };
        // A stream without headers, then `hi` on it and its end.
        let frames = [
            &[0x80, 3, 0, 1, 0, 0, 0, 25][..],
            &[
                0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2, 0, 4, 0, 0xfb, 0xff, 0, 0,
                0, 0,
            ],
            &[0, 0, 0, 1, 1, 0, 0, 2],
            b"hi",
        ];
        let input: Vec<u8> = frames.iter().flat_map(|frame| message(frame)).collect();
        for cut in 0..input.len() {
            let mut tunnel = Tunnel::new();
            let mut seen = String::new();
            for part in [&input[..cut], &input[cut..]] {
                let mut rest = part;
                while let Some(event) = tunnel.next(&mut rest).unwrap() {
                    match event {
                        Event::Opened { stream, .. } => seen += &format!("{stream} opened, "),
                        Event::Data { bytes, .. } => seen += &String::from_utf8_lossy(bytes),
                        other => seen += &format!(", {other:?}"),
                    }
                }
                assert!(rest.is_empty(), "cut at {cut}");
            }
            assert_eq!(seen, "1 opened, hi, Ended { stream: 1 }", "cut at {cut}");
        }
    }
}
