//! Events of both protocols: streams that are opened, carry data in one direction and end. SPDY has its own
//! stream numbers; for WebSocket the channel numbers are used.

/// Maximum size in bytes of a session's pending output. Senders wait above
/// [`super::connection::OUTPUT_BYTES_MAX`] and add at most one piece, which base64 enlarges by a third, so
/// only replies to the peer's messages can reach this limit. Each such message is as expensive for the peer
/// as the reply is for the daemon; if the limit is exceeded, the peer floods the daemon and is disconnected.
pub(crate) const UNREAD_BYTES_MAX: usize = 256 << 10;

/// An event that the peer caused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// The peer opened a stream with these headers and waits for [`super::spdy::Session::reply`].
    Opened { stream: u32, headers: Vec<(String, String)> },
    /// Data of a stream.
    Data { stream: u32, bytes: &'a [u8] },
    /// The peer finished its half of the stream.
    Ended { stream: u32 },
    /// The peer reset the stream, which ends both directions.
    Reset { stream: u32 },
    /// The peer closed the connection: no more events follow.
    Closed,
}

/// The peer violated the protocol, for this reason; the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken(pub(crate) &'static str);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}
