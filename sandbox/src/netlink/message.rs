//! Netlink messages as bytes: a builder that packs several into one batch, and a reader of what the kernel answers.
//! Pure. The reader takes whatever comes: a length that does not fit ends the walk.
//!
//! ```text
//!   message    length u32, kind u16, flags u16, sequence u32, port u32, header of its kind, attributes
//!   attribute  length u16 (with these 4 bytes), kind u16, value, zeros up to a multiple of 4
//! ```
//! All numbers are the machine's own but where a family says otherwise (nftables: big endian).

use nix::errno::Errno;

use crate::Error;

/// Bytes before a message's own header.
const HEADER_BYTES: usize = 16;
/// Bytes before an attribute's value.
const ATTRIBUTE_BYTES: usize = 4;

/// An acknowledgement, or a refusal.
const NLMSG_ERROR: u16 = 2;
/// The end of a dump.
const NLMSG_DONE: u16 = 3;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
/// In an error: the text attributes follow.
const NLM_F_ACK_TLVS: u16 = 0x200;
/// The answer has many messages (NLM_F_ROOT, NLM_F_MATCH).
pub(super) const NLM_F_DUMP: u16 = 0x300;
pub(super) const NLM_F_EXCL: u16 = 0x200;
pub(super) const NLM_F_CREATE: u16 = 0x400;
pub(super) const NLM_F_APPEND: u16 = 0x800;

/// The value is made of attributes.
const NLA_F_NESTED: u16 = 0x8000;
/// Takes the two flags off an attribute's kind.
const NLA_TYPE_MASK: u16 = 0x3fff;
/// The text in an error.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Messages that go to the kernel together, in order.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// Where the last message starts.
    start: usize,
    /// The message whose acknowledgement ends the answer.
    acknowledged: Option<u32>,
    expectations: Expectations,
}

/// What each message of a batch is about, by its sequence number, for errors.
#[derive(Debug, Default)]
pub(super) struct Expectations(Vec<Expectation>);

#[derive(Debug)]
struct Expectation {
    op: &'static str,
    target: String,
    tolerated: &'static [Errno],
}

/// The kernel's no to one message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal<'a> {
    errno: Errno,
    /// In words, where it has some.
    text: &'a str,
}

impl Expectations {
    /// The error that a refusal comes to, unless the message tolerates it.
    pub(super) fn judge(&self, sequence: u32, refusal: &Refusal<'_>) -> Option<Error> {
        let Some(expected) = usize::try_from(sequence).ok().and_then(|index| self.0.get(index)) else {
            return Some(Error::kernel("talk to", "the kernel by netlink", refusal.errno));
        };
        if expected.tolerated.contains(&refusal.errno) {
            return None;
        }
        let target = match refusal.text {
            "" => expected.target.clone(),
            text => format!("{} ({text})", expected.target),
        };
        Some(Error::kernel(expected.op, target, refusal.errno))
    }
}

/// An attribute whose value is still being written.
#[must_use]
pub(super) struct Nest(usize);

impl Batch {
    /// Begins a message: `op` and `target` are what an error says of it.
    pub(super) fn message(
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

    /// These refusals of the last message are as good as a yes.
    pub(super) fn tolerate(&mut self, errnos: &'static [Errno]) {
        if let Some(expected) = self.expectations.0.last_mut() {
            expected.tolerated = errnos;
        }
    }

    /// Adds an attribute to the last message. A value longer than an attribute can be is cut: callers' values are
    /// names and addresses.
    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let value = &value[..value.len().min(usize::from(u16::MAX) - ATTRIBUTE_BYTES)];
        self.bytes.extend(((value.len() + ATTRIBUTE_BYTES) as u16).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.put(value);
    }

    /// A text with the NUL that the kernel wants behind it.
    pub(super) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, format!("{value}\0").as_bytes());
    }

    /// Begins an attribute that is made of attributes.
    pub(super) fn nest(&mut self, kind: u16) -> Nest {
        let nest = Nest(self.bytes.len());
        self.attribute(kind | NLA_F_NESTED, &[]);
        nest
    }

    /// As [`Batch::nest`], without the mark of such attributes: nftables lists them so, and does not ask for it.
    pub(super) fn nest_unmarked(&mut self, kind: u16) -> Nest {
        let nest = Nest(self.bytes.len());
        self.attribute(kind, &[]);
        nest
    }

    /// More bytes of a header inside of a nested attribute.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = (self.bytes.len() - self.start) as u32;
        self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Ends what [`Batch::nest`] began.
    pub(super) fn end(&mut self, nest: Nest) {
        let length = u16::try_from(self.bytes.len() - nest.0).unwrap_or(u16::MAX);
        self.bytes[nest.0..nest.0 + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Has the kernel acknowledge the last message, which ends the answer; once in a batch.
    pub(super) fn acknowledge(&mut self) {
        if self.acknowledged.is_some() || self.is_empty() {
            return;
        }
        self.acknowledged = Some(self.expectations.0.len() as u32 - 1);
        let flags = u16::from_ne_bytes([self.bytes[self.start + 6], self.bytes[self.start + 7]]) | NLM_F_ACK;
        self.bytes[self.start + 6..self.start + 8].copy_from_slice(&flags.to_ne_bytes());
    }

    /// Bytes in it.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Its bytes, what they are about, and the message whose acknowledgement ends the answer.
    pub(super) fn finish(mut self) -> (Vec<u8>, Expectations, u32) {
        self.acknowledge();
        (self.bytes, self.expectations, self.acknowledged.unwrap_or_default())
    }
}

/// One message of the kernel's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message<'a> {
    pub(super) kind: u16,
    flags: u16,
    pub(super) sequence: u32,
    /// Header of its kind and attributes.
    pub(super) body: &'a [u8],
}

impl<'a> Message<'a> {
    /// Whether the dump it belongs to is torn by a change.
    pub(super) fn is_torn(&self) -> bool {
        self.flags & NLM_F_DUMP_INTR != 0
    }

    /// `Some` where this is the end of an answer: an acknowledgement, a refusal, the end of a dump.
    pub(super) fn outcome(&self) -> Option<Option<Refusal<'a>>> {
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

    /// The attributes after a header of `bytes`.
    pub(super) fn attributes(&self, bytes: usize) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        attributes(self.body.get(bytes..).unwrap_or_default())
    }
}

/// The messages in what was received.
pub(super) fn parse(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
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

/// The attributes in `bytes`, their kinds without flags.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header: &[u8; ATTRIBUTE_BYTES] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = bytes.get(ATTRIBUTE_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([header[2], header[3]]) & NLA_TYPE_MASK, value))
    })
}

/// A text up to its NUL; empty where it is none.
pub(super) fn text(value: &[u8]) -> &str {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_read_back() {
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
        assert!(judge(7, Errno::EINVAL, "").is_some(), "of no message of ours");
    }

    #[test]
    fn outcomes_are_told_from_answers() {
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

    /// Whatever comes: the walk ends, within the bytes.
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
