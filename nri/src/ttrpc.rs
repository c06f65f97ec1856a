//! ttrpc's messages: a ten-byte header, then an envelope in protobuf (nri.md 1.4). Only unary calls.
//!
//! ```text
//!   | data length, u32 | stream id, u32 | type, u8 | flags, u8 | data |       big endian
//! ```

mod envelope {
    #![allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/ttrpc.rs"));
}
pub(crate) use envelope::{Request, Response, Status};

pub(crate) const HEADER_BYTES: usize = 10;

/// Largest data of a message, in both directions.
pub(crate) const DATA_BYTES_MAX: usize = 4 << 20;

/// Status codes, those of gRPC.
pub(crate) mod code {
    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 3;
    pub(crate) const DEADLINE_EXCEEDED: i32 = 4;
    pub(crate) const ALREADY_EXISTS: i32 = 6;
    pub(crate) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(crate) const FAILED_PRECONDITION: i32 = 9;
    pub(crate) const UNIMPLEMENTED: i32 = 12;
    pub(crate) const INTERNAL: i32 = 13;
}

/// What kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Response,
    /// Of streams, which NRI has not.
    Data,
    Unknown,
}

/// A message whose data has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) stream: u32,
    pub(crate) kind: Kind,
    /// `None`: it was above the limit, and was thrown away while it was read.
    pub(crate) data: Option<Vec<u8>>,
}

/// Puts messages together from a stream of bytes.
#[derive(Default)]
pub(crate) struct Assembler {
    header: [u8; HEADER_BYTES],
    filled: usize,
    /// Of the data, still to come.
    left: usize,
    data: Option<Vec<u8>>,
}

/// What is set aside at once for data that is only announced; more follows as it comes.
const CAPACITY_BYTES_MAX: usize = 16 << 10;

impl Assembler {
    /// Takes bytes, and hands every message that they complete to `sink`.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut sink: impl FnMut(Message)) {
        while !bytes.is_empty() {
            if self.filled < HEADER_BYTES {
                let count = bytes.len().min(HEADER_BYTES - self.filled);
                self.header[self.filled..self.filled + count].copy_from_slice(&bytes[..count]);
                self.filled += count;
                bytes = &bytes[count..];
                if self.filled < HEADER_BYTES {
                    return;
                }
                self.left = self.word(0) as usize;
                let fits = self.left <= DATA_BYTES_MAX;
                self.data = fits.then(|| Vec::with_capacity(self.left.min(CAPACITY_BYTES_MAX)));
            }
            let count = bytes.len().min(self.left);
            if let Some(data) = &mut self.data {
                data.extend(&bytes[..count]);
            }
            bytes = &bytes[count..];
            self.left -= count;
            if self.left == 0 {
                self.filled = 0;
                sink(Message { stream: self.word(4), kind: self.kind(), data: self.data.take() });
            }
        }
    }

    fn word(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.header[at..at + 4]);
        u32::from_be_bytes(word)
    }

    fn kind(&self) -> Kind {
        match self.header[8] {
            1 => Kind::Request,
            2 => Kind::Response,
            3 => Kind::Data,
            _ => Kind::Unknown,
        }
    }
}

/// A message's bytes; `None`: its data is above the limit.
pub(crate) fn encode(stream: u32, kind: Kind, envelope: &impl prost::Message) -> Option<Vec<u8>> {
    let length = envelope.encoded_len();
    if length > DATA_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::with_capacity(HEADER_BYTES + length);
    bytes.extend((length as u32).to_be_bytes());
    bytes.extend(stream.to_be_bytes());
    bytes.extend([if kind == Kind::Request { 1 } else { 2 }, 0]);
    bytes.extend(envelope.encode_to_vec());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn assemble(bytes: &[u8], step: usize) -> Vec<Message> {
        let (mut assembler, mut messages) = (Assembler::default(), Vec::new());
        for part in bytes.chunks(step) {
            assembler.feed(part, |message| messages.push(message));
        }
        messages
    }

    /// Known-good bytes of the Go library (nri-messages.md 5, E): a refusal.
    #[test]
    fn a_refusal_is_these_bytes() {
        let status = Status { code: 2, message: "invalid plugin index".into() };
        let response = Response { status: Some(status), payload: Vec::new() };
        let bytes = encode(1, Kind::Response, &response).unwrap();
        let hex = crate::mux::frames(2, &bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected =
            "00000002000000240000001a0000000102000a1808021214696e76616c696420706c7567696e20696e646578";
        assert_eq!(hex, expected);
    }

    #[test]
    fn messages_come_back_however_they_are_cut() {
        let request = |method: &str| Request { method: method.into(), ..Request::default() };
        let bytes: Vec<u8> = [1, 3]
            .into_iter()
            .flat_map(|stream| encode(stream, Kind::Request, &request(&"m".repeat(stream as usize))).unwrap())
            .chain(encode(5, Kind::Response, &Response::default()).unwrap())
            .collect();
        for step in [1, 2, 7, 10, 1000] {
            let messages = assemble(&bytes, step);
            let streams: Vec<_> = messages.iter().map(|message| (message.stream, message.kind)).collect();
            assert_eq!(streams, [(1, Kind::Request), (3, Kind::Request), (5, Kind::Response)]);
            assert_eq!(Request::decode(&messages[1].data.as_ref().unwrap()[..]).unwrap(), request("mmm"));
            assert_eq!(messages[2].data.as_deref(), Some(&[][..]));
        }
    }

    #[test]
    fn nri_r5_too_much_data_is_thrown_away_while_it_is_read() {
        let length = DATA_BYTES_MAX + 1;
        let header = [(length as u32).to_be_bytes(), 7u32.to_be_bytes()].concat();
        let bytes =
            [header, vec![1, 0], vec![0; length], encode(9, Kind::Request, &Request::default()).unwrap()];
        let messages = assemble(&bytes.concat(), 4096);
        assert_eq!(messages[0], Message { stream: 7, kind: Kind::Request, data: None });
        assert_eq!(messages[1].stream, 9);
    }

    /// NRI-R4: whatever the bytes are, nothing panics and nothing is set aside for what is only announced.
    #[test]
    fn nri_r4_random_bytes() {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..200)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            let (mut reader, mut assembler) = (crate::mux::Reader::default(), Assembler::default());
            let _ = reader.feed(&bytes, |_, payload| assembler.feed(payload, |_| ()));
            let held = assembler.data.as_ref().map_or(0, Vec::capacity);
            assert!(held <= CAPACITY_BYTES_MAX, "{held}");
        }
    }
}
