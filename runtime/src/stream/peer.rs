//! The protocol a client chose, behind one shape: events in, bytes of streams out.

use super::event::{Broken, Event};
use super::{spdy, websocket};

/// One upgraded connection's protocol.
pub(super) enum Peer {
    Spdy(spdy::Session),
    WebSocket(websocket::Session),
    /// SPDY's byte stream inside WebSocket messages (streaming facts §6.9).
    Tunnel(Box<Tunnel>),
}

/// See [`Peer::Tunnel`].
pub(super) struct Tunnel {
    outer: websocket::Session,
    inner: spdy::Session,
    /// What of the last message the inner protocol has not taken yet.
    piece: Vec<u8>,
    at: usize,
}

impl Tunnel {
    pub(super) fn new() -> Tunnel {
        let outer = websocket::Session::new(websocket::Form::Raw);
        Tunnel { outer, inner: spdy::Session::new(), piece: Vec::new(), at: 0 }
    }

    fn next<'a>(&'a mut self, input: &mut &[u8]) -> Result<Option<Event<'a>>, Broken> {
        while self.at == self.piece.len() {
            match self.outer.next(input)? {
                Some(Event::Data { bytes, .. }) => {
                    self.piece.clear();
                    self.piece.extend_from_slice(bytes);
                    self.at = 0;
                }
                Some(_) => return Ok(Some(Event::Closed)),
                // Ends that follow their stream's last bytes are still to come.
                None => return self.inner.next(&mut &[][..]),
            }
        }
        let mut rest = &self.piece[self.at..];
        let event = self.inner.next(&mut rest);
        self.at = self.piece.len() - rest.len();
        event
    }

    /// What the inner protocol wrote becomes messages.
    fn wrap(&mut self) {
        let inner = std::mem::take(self.inner.output());
        if !inner.is_empty() {
            self.outer.send(0, &inner);
        }
    }
}

impl Peer {
    /// Takes the next event off the front of `input`; `None`: more is needed.
    pub(super) fn next<'a>(&'a mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Broken> {
        match self {
            Peer::Spdy(session) => session.next(input),
            Peer::WebSocket(session) => session.next(input),
            Peer::Tunnel(tunnel) => tunnel.next(input),
        }
    }

    /// Whether clients open streams by name, as SPDY's do; a WebSocket's channels are there from the start.
    pub(super) fn spdy(&mut self) -> Option<&mut spdy::Session> {
        match self {
            Peer::Spdy(session) => Some(session),
            Peer::Tunnel(tunnel) => Some(&mut tunnel.inner),
            Peer::WebSocket(_) => None,
        }
    }

    /// Bytes of a stream.
    pub(super) fn send(&mut self, stream: u32, bytes: &[u8]) {
        match self {
            Peer::Spdy(session) => session.send(stream, bytes),
            Peer::WebSocket(session) => session.send(stream, bytes),
            Peer::Tunnel(tunnel) => tunnel.inner.send(stream, bytes),
        }
    }

    /// Our half of a stream is over. A WebSocket's channels end with the connection.
    pub(super) fn finish(&mut self, stream: u32) {
        if let Some(session) = self.spdy() {
            session.finish(stream);
        }
    }

    /// Says goodbye.
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

    /// What is to be written; the caller takes it.
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
