//! Decodes ttrpc messages from a byte stream, and encodes them. Unary calls only (NRI 1.4).
//!
//! The header, the envelope with its status and codes, and the size limit are those of the `ttrpc` crate. Its reader is
//! not used, because it blocks or needs tokio; [`Assembler`] processes the bytes of one multiplexed connection as they
//! arrive (docs/notes/005-ttrpc.md).

pub(crate) use ttrpc::proto::{
    Codec, MESSAGE_HEADER_LENGTH as HEADER_BYTES, MESSAGE_LENGTH_MAX as DATA_BYTES_MAX, MESSAGE_TYPE_DATA,
    MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE, MessageHeader,
};
pub(crate) use ttrpc::{Code, Request, Response, Status, get_status};

use super::header::Header;

/// A complete ttrpc message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) header: MessageHeader,
    /// The message's data; `None` if it exceeded the limit and was discarded.
    pub(crate) data: Option<Vec<u8>>,
}

/// Assembles messages from a stream of bytes.
#[derive(Default)]
pub(crate) struct Assembler {
    header: Header<HEADER_BYTES>,
    /// Number of data bytes that have not arrived yet.
    left: usize,
    data: Option<Vec<u8>>,
}

/// Initial capacity in bytes for announced data; the buffer grows as data arrives.
const CAPACITY_BYTES_MAX: usize = 16 << 10;

impl Assembler {
    /// Processes bytes and calls `sink` with each complete message.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut sink: impl FnMut(Message)) {
        while !bytes.is_empty() {
            if !self.header.is_complete() {
                let Some(header) = self.header.complete(&mut bytes) else { return };
                self.left = MessageHeader::from(header).length as usize;
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
                self.header.clear();
                sink(Message { header: self.header.bytes().into(), data: self.data.take() });
            }
        }
    }

    /// Number of bytes of the unfinished message.
    pub(crate) fn held(&self) -> usize {
        self.data.as_ref().map_or(0, Vec::len)
    }
}

/// Encodes a request; `None` if its data exceeds the limit.
pub(crate) fn encode_request(stream: u32, request: &Request) -> Option<Vec<u8>> {
    encode(request, |length| MessageHeader::new_request(stream, length))
}

/// Encodes a response; `None` if its data exceeds the limit.
pub(crate) fn encode_response(stream: u32, response: &Response) -> Option<Vec<u8>> {
    encode(response, |length| MessageHeader::new_response(stream, length))
}

fn encode(envelope: &impl Codec, header: impl FnOnce(u32) -> MessageHeader) -> Option<Vec<u8>> {
    let length = envelope.size();
    if length as usize > DATA_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::<u8>::from(header(length));
    bytes.extend(envelope.encode().ok()?);
    Some(bytes)
}

/// The status of an error response; `None` for success. An unknown code is an error, too, although the crate's
/// `Status::code` returns OK for it.
pub(crate) fn error_of(response: &mut Response) -> Option<Status> {
    response.status.take().filter(|status| status.code.value() != Code::OK as i32)
}

/// Whether the status has this code.
pub(crate) fn has_code(status: &Status, code: Code) -> bool {
    status.code.value() == code as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assemble(bytes: &[u8], step: usize) -> Vec<Message> {
        let (mut assembler, mut messages) = (Assembler::default(), Vec::new());
        for part in bytes.chunks(step) {
            assembler.feed(part, |message| messages.push(message));
        }
        messages
    }

    /// The bytes of an error response as recorded from the Go library.
    #[test]
    fn an_error_response_has_a_fixed_encoding() {
        let mut response = Response::default();
        response.set_status(get_status(Code::UNKNOWN, "invalid plugin index"));
        let bytes = encode_response(1, &response).unwrap();
        let hex = crate::mux::frames(2, &bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected =
            "00000002000000240000001a0000000102000a1808021214696e76616c696420706c7567696e20696e646578";
        assert_eq!(hex, expected);
    }

    #[test]
    fn messages_are_decoded_however_they_are_split() {
        let request = |method: &str| Request { method: method.into(), ..Request::default() };
        let bytes: Vec<u8> = [1, 3]
            .into_iter()
            .flat_map(|stream| encode_request(stream, &request(&"m".repeat(stream as usize))).unwrap())
            .chain(encode_response(5, &Response::default()).unwrap())
            .collect();
        for step in [1, 2, 7, 10, 1000] {
            let messages = assemble(&bytes, step);
            let streams: Vec<_> =
                messages.iter().map(|message| (message.header.stream_id, message.header.type_)).collect();
            let (request_type, response_type) = (MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE);
            assert_eq!(streams, [(1, request_type), (3, request_type), (5, response_type)]);
            assert_eq!(Request::decode(messages[1].data.as_ref().unwrap()).unwrap(), request("mmm"));
            assert_eq!(messages[2].data.as_deref(), Some(&[][..]));
        }
    }

    /// Tests rule NRI-R5 of docs/specs/nri.md.
    #[test]
    fn oversized_messages_are_discarded_while_they_are_read() {
        let length = DATA_BYTES_MAX + 1;
        let header = [(length as u32).to_be_bytes(), 7u32.to_be_bytes()].concat();
        let bytes = [header, vec![1, 0], vec![0; length], encode_request(9, &Request::default()).unwrap()];
        let messages = assemble(&bytes.concat(), 4096);
        let header = MessageHeader::new_request(7, length as u32);
        assert_eq!(messages[0], Message { header, data: None });
        assert_eq!(messages[1].header.stream_id, 9);
    }

    /// The crate's accessor returns OK for an unknown code; an error must remain an error.
    #[test]
    fn a_status_with_an_unknown_code_is_an_error() {
        // field 1, status: { field 1, code: 99; field 2, message: "no" }
        let bytes = [0x0a, 6, 0x08, 99, 0x12, 2, b'n', b'o'];
        let mut response = Response::decode(bytes).unwrap();
        let status = error_of(&mut response).unwrap();
        assert_eq!((status.code.value(), status.message.as_str()), (99, "no"));
        assert!(!has_code(&status, Code::UNKNOWN));
        // field 1, status: { message: "fine" }: code 0
        let mut fine = Response::decode([0x0a, 6, 0x12, 4, b'f', b'i', b'n', b'e']).unwrap();
        assert_eq!(error_of(&mut fine), None);
    }

    /// Tests rule NRI-R4: random bytes cause no panic, and no memory is allocated for data that is only announced.
    #[test]
    fn random_bytes_cause_no_panic_and_no_allocation() {
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
