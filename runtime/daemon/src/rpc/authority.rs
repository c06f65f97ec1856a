//! Makes the `:authority` of every client acceptable to h2. If the value is not the authority of a URL, h2 answers RST_STREAM
//! PROTOCOL_ERROR before any code of coracle runs. Clients written in Go send such values when they dial a Unix socket with
//! their own dialer: grpc-go of 2020 sends the path (`/run/coracle/coracle.sock`), newer versions the percent-encoded path
//! (`%2Frun%2F…`), and an empty value for the target `passthrough:///`. coracle does not use the value.
//!
//! [`Rewriter`] sees the bytes of a connection before h2 does and changes a value in place, so that the number of bytes
//! and the length of the decoded value stay the same:
//!
//! | value | changed to |
//! |---|---|
//! | `/` or `%` | `-` |
//! | `:` after the first, outside of `[…]` | `-` in plain strings, `z` in Huffman-coded ones |
//! | an empty value | the field becomes an empty `user-agent`, a name of the same length |
//!
//! In Huffman's code (RFC 7541, appendix B) `/`, `%` and `-` have 6 bits each, `:` and `z` 7. Therefore the lengths of frames,
//! blocks and strings stay valid, and the header tables of both ends evict the same entries, whatever their size: the rewriter
//! stores neither the table nor a header block. A connection needs a few words of memory for its position.
//!
//! Not changed, so that h2 refuses them: other characters that no authority has; a name that refers to the header table (no
//! known encoder does that for a name of the static table); a change in two frames (CONTINUATION), which is possible only if a
//! character is divided between them.

/// Length in bytes of the connection preface of a client (RFC 9113 §3.4).
const PREFACE_BYTES: u32 = 24;
const FRAME_HEAD_BYTES: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
/// Length in bytes of the dependency and weight in a HEADERS frame with [`FLAG_PRIORITY`].
const PRIORITY_BYTES: u32 = 5;

/// Index of `:authority` in the static table.
const AUTHORITY: u8 = 1;
const USER_AGENT: u8 = 58;
/// First byte of a "literal with incremental indexing" whose name is `:authority`.
const LITERAL_AUTHORITY: u8 = 0x40 | AUTHORITY;
const LITERAL_USER_AGENT: u8 = 0x40 | USER_AGENT;
/// First byte of the indexed field `:authority` with the empty value in the static table.
const INDEXED_AUTHORITY: u8 = 0x80 | AUTHORITY;
const INDEXED_USER_AGENT: u8 = 0x80 | USER_AGENT;
/// The name `:authority` in plain text; clients on gRPC's C core send names plain or Huffman-coded.
const NAME: &[u8] = b":authority";
const NAME_HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// The position in the byte stream that a client sends on one connection.
#[derive(Debug)]
pub(super) struct Rewriter {
    frame: Frame,
    field: Field,
    /// The last byte that was read, if it may still have to be changed; otherwise `None`.
    held: Option<u8>,
    /// Number of bytes directly before the next byte that belong to the same fragment of a header block.
    adjacent: u32,
}

impl Rewriter {
    /// Creates a rewriter at the beginning of a connection.
    pub(super) fn new() -> Rewriter {
        Rewriter { frame: Frame::Skip(PREFACE_BYTES), field: Field::First, held: None, adjacent: 0 }
    }

    /// Creates a rewriter that changes nothing.
    #[cfg(test)]
    pub(super) fn off() -> Rewriter {
        Rewriter { field: Field::Lost, ..Rewriter::new() }
    }

    /// Returns and clears the byte that was held back. The caller must put it in front of the next bytes for
    /// [`Rewriter::rewrite`].
    pub(super) fn held(&mut self) -> Option<u8> {
        self.held.take()
    }

    /// Puts back the value of [`Rewriter::held`], if no bytes have been read since.
    pub(super) fn hold(&mut self, held: Option<u8>) {
        self.held = held;
    }

    /// Processes and changes the bytes from `known` on; `bytes[..known]` is the value of [`Rewriter::held`]. Returns how many
    /// bytes at the start are final: all, or all but the last, which is then held back.
    pub(super) fn rewrite(&mut self, bytes: &mut [u8], known: usize) -> usize {
        for at in known..bytes.len() {
            self.step(bytes, at);
        }
        match bytes.last() {
            Some(last) if self.field.may_change_last() && self.adjacent > 0 => {
                self.held = Some(*last);
                bytes.len() - 1
            }
            _ => bytes.len(),
        }
    }

    fn step(&mut self, bytes: &mut [u8], at: usize) {
        let byte = bytes[at];
        self.frame = match self.frame {
            Frame::Skip(1) => Frame::NEXT,
            Frame::Skip(left) => Frame::Skip(left.saturating_sub(1)),
            Frame::Head { mut head, have } => {
                head[usize::from(have)] = byte;
                match usize::from(have) + 1 == FRAME_HEAD_BYTES {
                    true => self.begin(head),
                    false => Frame::Head { head, have: have + 1 },
                }
            }
            Frame::PadLength { before, rest, ends } => {
                let padding = u32::from(byte).min(rest);
                Block { before, fragment: rest - padding, padding, ends }.next(&mut self.field)
            }
            Frame::Block(mut block) => {
                if block.before > 0 {
                    block.before -= 1;
                } else if block.fragment > 0 {
                    let previous = if self.adjacent > 0 { at.checked_sub(1) } else { None };
                    self.field = std::mem::replace(&mut self.field, Field::Lost).step(bytes, at, previous);
                    block.fragment -= 1;
                    self.adjacent = self.adjacent.saturating_add(1);
                } else {
                    block.padding -= 1;
                }
                block.next(&mut self.field)
            }
        };
    }

    /// Determines the payload after a frame's header.
    fn begin(&mut self, head: [u8; FRAME_HEAD_BYTES]) -> Frame {
        let [high, middle, low, kind, flags, ..] = head;
        let length = u32::from_be_bytes([0, high, middle, low]);
        self.adjacent = 0;
        let ends = flags & FLAG_END_HEADERS != 0;
        match kind {
            HEADERS => {
                let before = if flags & FLAG_PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
                let is_padded = flags & FLAG_PADDED != 0;
                // A frame too short for its own flags ends the connection; h2 says so.
                let rest = length.saturating_sub(before).saturating_sub(u32::from(is_padded));
                match is_padded && length > 0 {
                    true => Frame::PadLength { before: before.min(length - 1), rest, ends },
                    false => Block { before: before.min(length), fragment: rest, padding: 0, ends }
                        .next(&mut self.field),
                }
            }
            CONTINUATION => Block { before: 0, fragment: length, padding: 0, ends }.next(&mut self.field),
            _ if length == 0 => Frame::NEXT,
            _ => Frame::Skip(length),
        }
    }
}

/// The position of the next byte in a frame.
#[derive(Debug, Clone, Copy)]
enum Frame {
    /// In the preface or in a frame without a header block; with the number of remaining bytes, at least one.
    Skip(u32),
    Head {
        head: [u8; FRAME_HEAD_BYTES],
        have: u8,
    },
    /// The next byte is the length of the frame's padding.
    PadLength {
        before: u32,
        rest: u32,
        ends: bool,
    },
    Block(Block),
}

impl Frame {
    const NEXT: Frame = Frame::Head { head: [0; FRAME_HEAD_BYTES], have: 0 };
}

/// The rest of a frame with a fragment of a header block: lengths in bytes.
#[derive(Debug, Clone, Copy)]
struct Block {
    /// Bytes before the fragment, with the priority.
    before: u32,
    fragment: u32,
    padding: u32,
    /// Whether the header block ends with this frame.
    ends: bool,
}

impl Block {
    /// Continues in this frame, or with the next one if this one has no remaining bytes.
    fn next(self, field: &mut Field) -> Frame {
        if self.fragment == 0 && self.ends && !matches!(field, Field::Lost) {
            *field = Field::First;
        }
        match self.before + self.fragment + self.padding {
            0 => Frame::NEXT,
            _ => Frame::Block(self),
        }
    }
}

/// The position of the next byte in a header block (RFC 7541 §6).
#[derive(Debug)]
enum Field {
    /// The next byte is the first of a field.
    First,
    /// The next byte belongs to a number of several bytes: an indexed field, a table's size, or with `then_value` the index of
    /// a name.
    Number {
        number: Number,
        then_value: bool,
    },
    /// The next byte is the first of a string's length.
    Length {
        part: Part,
    },
    /// The next byte belongs to a string's length of several bytes.
    LongLength {
        part: Part,
        number: Number,
        is_huffman: bool,
    },
    String {
        part: Part,
        left: u32,
        is_huffman: bool,
    },
    /// The block is malformed: no further byte of this connection is changed.
    Lost,
}

/// The kind of a string, and how many of its bytes have been read.
#[derive(Debug)]
enum Part {
    /// A name, with the number of its bytes that equal those of `:authority`.
    Name {
        same: Option<usize>,
    },
    /// The value of any other field.
    Value,
    Authority(Authority),
}

impl Field {
    /// Whether the previous byte may still have to be changed.
    fn may_change_last(&self) -> bool {
        match self {
            Field::Length { part: Part::Authority(authority) } => authority.is_indexed,
            Field::String { part: Part::Authority(authority), .. } => authority.code.bits > 0,
            _ => false,
        }
    }

    fn step(self, bytes: &mut [u8], at: usize, previous: Option<usize>) -> Field {
        let byte = bytes[at];
        match self {
            Field::First => {
                if byte == INDEXED_AUTHORITY {
                    bytes[at] = INDEXED_USER_AGENT;
                }
                Field::first(byte)
            }
            Field::Number { number, then_value } => match number.push(byte) {
                Pushed::Whole(_) if then_value => Field::Length { part: Part::Value },
                Pushed::Whole(_) => Field::First,
                Pushed::More(number) => Field::Number { number, then_value },
                Pushed::TooLarge => Field::Lost,
            },
            Field::Length { part } => {
                if let (Part::Authority(Authority { is_indexed: true, .. }), 0, Some(previous)) =
                    (&part, byte & 0x7f, previous)
                {
                    bytes[previous] = LITERAL_USER_AGENT;
                }
                let is_huffman = byte & 0x80 != 0;
                match Number::first(byte, 7) {
                    Pushed::Whole(left) => Field::string(part, left, is_huffman),
                    Pushed::More(number) => Field::LongLength { part, number, is_huffman },
                    Pushed::TooLarge => Field::Lost,
                }
            }
            Field::LongLength { part, number, is_huffman } => match number.push(byte) {
                Pushed::Whole(left) => Field::string(part, left, is_huffman),
                Pushed::More(number) => Field::LongLength { part, number, is_huffman },
                Pushed::TooLarge => Field::Lost,
            },
            Field::String { mut part, left, is_huffman } => {
                match &mut part {
                    Part::Name { same } => {
                        let name = if is_huffman { NAME_HUFFMAN } else { NAME };
                        *same = same.filter(|same| name.get(*same) == Some(&byte)).map(|same| same + 1);
                    }
                    Part::Value => {}
                    Part::Authority(authority) if is_huffman => authority.huffman(bytes, at, previous),
                    Part::Authority(authority) => bytes[at] = authority.plain(byte),
                }
                Field::string(part, left - 1, is_huffman)
            }
            Field::Lost => Field::Lost,
        }
    }

    fn first(byte: u8) -> Field {
        let (bits, is_literal) = match byte {
            0x80.. => (7, false),
            0x40.. => (6, true),
            // A change of the table's size.
            0x20.. => (5, false),
            _ => (4, true),
        };
        match Number::first(byte, bits) {
            Pushed::Whole(_) if !is_literal => Field::First,
            Pushed::Whole(0) => Field::Length { part: Part::Name { same: Some(0) } },
            Pushed::Whole(index) if index == u32::from(AUTHORITY) => {
                let is_indexed = byte == LITERAL_AUTHORITY;
                Field::Length { part: Part::Authority(Authority { is_indexed, ..Authority::default() }) }
            }
            Pushed::Whole(_) => Field::Length { part: Part::Value },
            Pushed::More(number) => Field::Number { number, then_value: is_literal },
            Pushed::TooLarge => Field::Lost,
        }
    }

    /// The position in a string of `left` bytes, or after it if `left` is 0.
    fn string(part: Part, left: u32, is_huffman: bool) -> Field {
        match part {
            part if left > 0 => Field::String { part, left, is_huffman },
            Part::Name { same } => {
                let name = if is_huffman { NAME_HUFFMAN } else { NAME };
                let part = match same == Some(name.len()) {
                    true => Part::Authority(Authority::default()),
                    false => Part::Value,
                };
                Field::Length { part }
            }
            Part::Value | Part::Authority(_) => Field::First,
        }
    }
}

/// An HPACK number (RFC 7541 §5.1) whose bytes have not all been read.
#[derive(Debug)]
struct Number {
    value: u32,
    shift: u32,
}

enum Pushed {
    Whole(u32),
    More(Number),
    /// The number is larger than any that fits into a header block.
    TooLarge,
}

impl Number {
    /// Decodes the lowest `bits` bits of the first byte.
    fn first(byte: u8, bits: u32) -> Pushed {
        let most = u32::from(u8::MAX) >> (8 - bits);
        match u32::from(byte) & most {
            value if value == most => Pushed::More(Number { value, shift: 0 }),
            value => Pushed::Whole(value),
        }
    }

    fn push(self, byte: u8) -> Pushed {
        /// Maximum shift: four more bytes, up to 256 MiB.
        const SHIFT_MAX: u32 = 21;
        if self.shift > SHIFT_MAX {
            return Pushed::TooLarge;
        }
        let value = self.value + (u32::from(byte & 0x7f) << self.shift);
        match byte & 0x80 {
            0 => Pushed::Whole(value),
            _ => Pushed::More(Number { value, shift: self.shift + 7 }),
        }
    }
}

/// The state within a value of `:authority`.
#[derive(Debug, Default)]
struct Authority {
    /// Whether the header field began with the single byte [`LITERAL_AUTHORITY`].
    is_indexed: bool,
    has_bracket: bool,
    has_colon: bool,
    code: Code,
}

impl Authority {
    /// The byte that replaces the plain character `byte`.
    fn plain(&mut self, byte: u8) -> u8 {
        match byte {
            b'/' | b'%' => b'-',
            b':' if self.is_further_colon() => b'-',
            b'[' => {
                self.has_bracket = true;
                byte
            }
            _ => byte,
        }
    }

    /// Replaces characters that end in the Huffman-coded byte `bytes[at]`.
    fn huffman(&mut self, bytes: &mut [u8], at: usize, previous: Option<usize>) {
        /// Huffman code of `%` with the number of its bits (RFC 7541, appendix B).
        const PERCENT: (u32, u32) = (0x15, 6);
        const SLASH: (u32, u32) = (0x18, 6);
        const HYPHEN: u16 = 0x16;
        const COLON: (u32, u32) = (0x5c, 7);
        const LETTER_Z: u16 = 0x7b;
        const BRACKET: (u32, u32) = (0x1ffb, 13);
        let coded = bytes[at];
        for below in (0..8).rev() {
            let Some(symbol) = self.code.push(coded >> below & 1) else { continue };
            let other = match symbol {
                PERCENT | SLASH => HYPHEN,
                COLON if self.is_further_colon() => LETTER_Z,
                BRACKET => {
                    self.has_bracket = true;
                    continue;
                }
                _ => continue,
            };
            let bits = symbol.1;
            let before = match previous {
                Some(previous) => bytes[previous],
                None if bits + below > 8 => continue,
                None => 0,
            };
            let mask = ((1 << bits) - 1) << below;
            let changed = (u16::from_be_bytes([before, bytes[at]]) & !mask) | other << below;
            let [before, here] = changed.to_be_bytes();
            if let Some(previous) = previous {
                bytes[previous] = before;
            }
            bytes[at] = here;
        }
    }

    fn is_further_colon(&mut self) -> bool {
        std::mem::replace(&mut self.has_colon, true) && !self.has_bracket
    }
}

/// The first bits of a character in HPACK's Huffman code.
#[derive(Debug, Default)]
struct Code {
    bits: u32,
    code: u32,
    /// The lowest code with `bits` bits.
    lowest: u32,
}

impl Code {
    /// Adds a bit. If the code is complete, returns it with the number of its bits. The code is canonical: codes of one length
    /// are consecutive numbers, after the shorter codes.
    fn push(&mut self, bit: u8) -> Option<(u32, u32)> {
        /// Numbers of codes with 1, 2, … 30 bits. The last code is the end of a string, which no string may contain.
        const COUNTS: [u32; 30] = [
            0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0,
            4,
        ];
        // A code longer than any is not possible, as all 30-bit prefixes are assigned.
        let count = COUNTS.get(self.bits as usize).copied().unwrap_or(0);
        self.bits += 1;
        self.code = self.code << 1 | u32::from(bit);
        self.lowest <<= 1;
        if self.code.wrapping_sub(self.lowest) < count {
            let whole = (self.code, self.bits);
            *self = Code::default();
            return Some(whole);
        }
        self.lowest += count;
        None
    }
}

#[cfg(test)]
mod tests;
