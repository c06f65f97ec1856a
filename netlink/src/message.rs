//! Encodes netlink messages in batches and decodes the kernel's replies. Pure. The decoder accepts any input: an
//! invalid length ends the iteration.
//!
//! ```text
//!   message    length u32, kind u16, flags u16, sequence u32, port u32, header of its kind, attributes
//!   attribute  length u16 (with these 4 bytes), kind u16, value, zeros up to a multiple of 4
//! ```
//! All numbers are in native byte order, except where a family differs (nftables: big endian).

use nix::errno::Errno;

use crate::Error;

/// Length of the common message header in bytes.
const HEADER_BYTES: usize = 16;
/// Length of an attribute's header in bytes.
const ATTRIBUTE_BYTES: usize = 4;

/// Message type: an acknowledgement or an error.
const NLMSG_ERROR: u16 = 2;
/// Message type: the end of a dump.
const NLMSG_DONE: u16 = 3;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
/// Flag of an error: text attributes follow.
const NLM_F_ACK_TLVS: u16 = 0x200;
/// Flag: request a dump (NLM_F_ROOT, NLM_F_MATCH).
pub(crate) const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLM_F_EXCL: u16 = 0x200;
pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_APPEND: u16 = 0x800;

/// Flag of an attribute that contains attributes.
const NLA_F_NESTED: u16 = 0x8000;
/// Mask that removes the two flags from an attribute's type.
const NLA_TYPE_MASK: u16 = 0x3fff;
/// Type of the attribute with the text of an error.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Messages that are sent to the kernel together, in order.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// Offset of the last message in bytes.
    start: usize,
    /// Sequence number of the message whose acknowledgement ends the reply; `None`: no acknowledgement requested.
    acknowledged: Option<u32>,
    expectations: Expectations,
}

/// Operation and object of each message of a batch, by sequence number, for error messages.
#[derive(Debug, Default)]
pub(crate) struct Expectations(Vec<Expectation>);

#[derive(Debug)]
struct Expectation {
    op: &'static str,
    target: String,
    tolerated: &'static [Errno],
}

/// The kernel's error for one message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal<'a> {
    errno: Errno,
    /// The kernel's text about the error; may be empty.
    text: &'a str,
}

impl Expectations {
    /// Converts a refusal to an error; `None` if the message tolerates the error number.
    pub(crate) fn judge(&self, sequence: u32, refusal: &Refusal<'_>) -> Option<Error> {
        let Some(expected) = usize::try_from(sequence).ok().and_then(|index| self.0.get(index)) else {
            return Some(Error::new("talk to", "the kernel by netlink", refusal.errno));
        };
        if expected.tolerated.contains(&refusal.errno) {
            return None;
        }
        let target = match refusal.text {
            "" => expected.target.clone(),
            text => format!("{} ({text})", expected.target),
        };
        Some(Error::new(expected.op, target, refusal.errno))
    }
}

/// A nested attribute that was started and not ended; the value is its offset.
#[must_use]
pub(crate) struct Nest(usize);

impl Batch {
    /// Starts a message; `op` and `target` are the operation and object in its error.
    pub(crate) fn message(
        &mut self,
        kind: u16,
        flags: u16,
        header: &[u8],
        op: &'static str,
        target: impl Into<String>,
    ) {
        self.start = self.bytes.len();
        let sequence = self.expectations.0.len() as u32;
        self.expectations.0.push(Expectation { op, target: target.into(), tolerated: &[] });
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        self.bytes.extend(sequence.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.put(header);
    }

    /// Treats these error numbers of the last message as success.
    pub(crate) fn tolerate(&mut self, errnos: &'static [Errno]) {
        if let Some(expected) = self.expectations.0.last_mut() {
            expected.tolerated = errnos;
        }
    }

    /// Adds an attribute to the last message. A value that is too long for an attribute is truncated; callers only pass
    /// names and addresses.
    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let value = &value[..value.len().min(usize::from(u16::MAX) - ATTRIBUTE_BYTES)];
        self.bytes.extend(((value.len() + ATTRIBUTE_BYTES) as u16).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.put(value);
    }

    /// Adds a text with the terminating NUL that the kernel requires.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, format!("{value}\0").as_bytes());
    }

    /// Starts a nested attribute.
    pub(crate) fn nest(&mut self, kind: u16) -> Nest {
        let nest = Nest(self.bytes.len());
        self.attribute(kind | NLA_F_NESTED, &[]);
        nest
    }

    /// Starts a nested attribute without the flag NLA_F_NESTED, which nftables neither sends nor requires.
    pub(crate) fn nest_unmarked(&mut self, kind: u16) -> Nest {
        let nest = Nest(self.bytes.len());
        self.attribute(kind, &[]);
        nest
    }

    /// Adds bytes of a header inside a nested attribute.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = (self.bytes.len() - self.start) as u32;
        self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Ends a nested attribute.
    pub(crate) fn end(&mut self, nest: Nest) {
        let length = u16::try_from(self.bytes.len() - nest.0).unwrap_or(u16::MAX);
        self.bytes[nest.0..nest.0 + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Requests an acknowledgement of the last message, which ends the reply; at most once in a batch.
    pub(crate) fn acknowledge(&mut self) {
        if self.acknowledged.is_some() || self.is_empty() {
            return;
        }
        self.acknowledged = Some(self.expectations.0.len() as u32 - 1);
        let flags = u16::from_ne_bytes([self.bytes[self.start + 6], self.bytes[self.start + 7]]) | NLM_F_ACK;
        self.bytes[self.start + 6..self.start + 8].copy_from_slice(&flags.to_ne_bytes());
    }

    /// Length of the batch in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the batch has no messages.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The encoded batch, its expectations, and the sequence number of the message whose acknowledgement ends the
    /// reply.
    pub(crate) fn finish(mut self) -> (Vec<u8>, Expectations, u32) {
        self.acknowledge();
        (self.bytes, self.expectations, self.acknowledged.unwrap_or_default())
    }
}

/// One message of the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    flags: u16,
    pub(crate) sequence: u32,
    /// The header of the message type, and attributes.
    pub(crate) body: &'a [u8],
}

impl<'a> Message<'a> {
    /// Whether the dump was interrupted by a change (NLM_F_DUMP_INTR).
    pub(crate) fn is_torn(&self) -> bool {
        self.flags & NLM_F_DUMP_INTR != 0
    }

    /// The result of the request: `Some` at the end of a reply (an acknowledgement, a refusal, or the end of a dump).
    pub(crate) fn outcome(&self) -> Option<Option<Refusal<'a>>> {
        if !matches!(self.kind, NLMSG_ERROR | NLMSG_DONE) {
            return None;
        }
        let number = self.body.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
        if number == 0 {
            return Some(None);
        }
        let has_text = self.flags & NLM_F_ACK_TLVS != 0;
        let tail = self.body.get(4 + HEADER_BYTES..).filter(|_| has_text).unwrap_or_default();
        let text =
            attributes(tail).find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG).map_or("", |found| text(found.1));
        Some(Some(Refusal { errno: Errno::from_raw(number.saturating_neg()), text }))
    }

    /// The attributes after a header of `bytes` bytes.
    pub(crate) fn attributes(&self, bytes: usize) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        attributes(self.body.get(bytes..).unwrap_or_default())
    }
}

/// The messages in received bytes.
pub(crate) fn parse(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let body = bytes.get(HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: u32::from_ne_bytes([header[8], header[9], header[10], header[11]]),
            body,
        })
    })
}

/// The attributes in `bytes`: type without flags, value.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header: &[u8; ATTRIBUTE_BYTES] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = bytes.get(ATTRIBUTE_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([header[2], header[3]]) & NLA_TYPE_MASK, value))
    })
}

/// A text up to its NUL; empty if it is invalid.
pub(crate) fn text(value: &[u8]) -> &str {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_messages_are_parsed() {
        let mut batch = Batch::default();
        batch.message(16, NLM_F_CREATE, &[7; 5], "make", "a");
        batch.text(3, "eth0");
        let outer = batch.nest(18);
        batch.attribute(1, &[1, 2, 3]);
        let inner = batch.nest(2);
        batch.put(&[9; 6]);
        batch.attribute(4, &[]);
        batch.end(inner);
        batch.end(outer);
        batch.message(17, 0, &[], "remove", "b");
        let (bytes, _, acknowledged) = batch.finish();
        assert_eq!(acknowledged, 1);
        let messages: Vec<_> = parse(&bytes).collect();
        assert_eq!(messages.len(), 2);
        assert_eq!((messages[0].kind, messages[0].flags, messages[0].sequence), (16, 0x401, 0));
        assert_eq!((messages[1].kind, messages[1].flags, messages[1].sequence), (17, 5, 1));
        let found: Vec<_> = messages[0].attributes(8).collect();
        assert_eq!(found[0], (3, &b"eth0\0"[..]));
        assert_eq!(found[1].0, 18, "without the flag of nested ones");
        let nested: Vec<_> = attributes(found[1].1).collect();
        assert_eq!(nested[0], (1, &[1, 2, 3][..]));
        assert_eq!(nested[1].1, [9, 9, 9, 9, 9, 9, 0, 0, 4, 0, 4, 0]);
    }

    #[test]
    fn refusals_name_their_message_or_are_tolerated() {
        let mut batch = Batch::default();
        batch.message(16, 0, &[], "make link", "veth0");
        batch.message(20, 0, &[], "add address", "10.0.0.2/24");
        batch.tolerate(&[Errno::EEXIST]);
        let (_, expectations, _) = batch.finish();
        let judge = |sequence, errno, text| {
            expectations.judge(sequence, &Refusal { errno, text }).map(|error| error.to_string())
        };
        assert_eq!(judge(1, Errno::EEXIST, ""), None);
        assert_eq!(judge(0, Errno::EEXIST, "").as_deref(), Some("make link veth0: file exists"));
        assert_eq!(
            judge(1, Errno::EINVAL, "bad prefix").as_deref(),
            Some("add address 10.0.0.2/24 (bad prefix): invalid argument")
        );
        assert!(judge(7, Errno::EINVAL, "").is_some(), "for an unknown message");
    }

    #[test]
    fn outcomes_of_requests_are_parsed() {
        let mut batch = Batch::default();
        let mut refusal = (-17_i32).to_ne_bytes().to_vec();
        refusal.resize(20, 0);
        batch.message(NLMSG_ERROR, NLM_F_ACK_TLVS, &refusal, "", "");
        batch.text(NLMSGERR_ATTR_MSG, "busy");
        batch.message(NLMSG_ERROR, 0, &[0; 20], "", "");
        batch.message(NLMSG_DONE, NLM_F_DUMP_INTR, &[], "", "");
        batch.message(16, 0, &[0; 16], "", "");
        let (bytes, ..) = batch.finish();
        let outcomes: Vec<_> = parse(&bytes).map(|message| message.outcome()).collect();
        let busy = Refusal { errno: Errno::EEXIST, text: "busy" };
        assert_eq!(outcomes, [Some(Some(busy)), Some(None), Some(None), None]);
        assert!(parse(&bytes).nth(2).is_some_and(|message| message.is_torn()));
    }

    /// Decoding any bytes terminates and never accesses memory outside of them.
    #[test]
    fn damaged_answers_are_read_without_harm() {
        let mut batch = Batch::default();
        for index in 0..4 {
            batch.message(16 + index, 0, &[1; 16], "", "");
            batch.text(3, "eth0");
            let nest = batch.nest(18);
            batch.attribute(1, b"bridge");
            batch.end(nest);
        }
        let (whole, ..) = batch.finish();
        let mut random: u64 = 5;
        for _ in 0..5000 {
            // xorshift64
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let mut bytes = whole.clone();
            let at = random as usize % bytes.len();
            bytes[at] = (random >> 32) as u8;
            bytes.truncate((random >> 40) as usize % (whole.len() + 1));
            let mut seen = 0;
            for message in parse(&bytes) {
                seen += 1;
                let _ = message.outcome();
                for (_, value) in message.attributes(16) {
                    let _ = (text(value), attributes(value).count());
                }
            }
            assert!(seen <= bytes.len() / HEADER_BYTES, "{bytes:?}");
        }
    }
}
