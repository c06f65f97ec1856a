//! What both protocols report: streams that open, carry bytes one way and end. SPDY numbers its streams itself; of a
//! WebSocket the channel numbers are the streams.

/// Output that waits in a session. Whoever sends data waits above [`super::connection::OUTPUT_BYTES_MAX`] and adds one
/// piece, of which base64 makes four thirds; so only answers to what the peer sends can add up to this. A PING or a
/// refused stream costs a peer as much to send as us to answer: above this it is a flood.
pub(crate) const UNREAD_BYTES_MAX: usize = 256 << 10;

/// One thing that a peer did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// It opened a stream, with these headers. It waits for [`super::spdy::Session::reply`].
    Opened { stream: u32, headers: Vec<(String, String)> },
    /// Bytes of a stream.
    Data { stream: u32, bytes: &'a [u8] },
    /// It will write no more on this stream.
    Ended { stream: u32 },
    /// It gave a stream up, in both directions.
    Reset { stream: u32 },
    /// It says goodbye: no more events.
    Closed,
}

/// The peer broke the protocol: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken(pub(crate) &'static str);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}
