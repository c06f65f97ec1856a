//! Encoding and decoding of SPDY/3.1 frames.
//!
//! | type | number | payload |
//! |---|---|---|
//! | SYN_STREAM | 1 | stream u32, associated u32, priority u8, slot u8, header block |
//! | SYN_REPLY | 2 | stream u32, header block |
//! | RST_STREAM | 3 | stream u32, status u32 |
//! | SETTINGS | 4 | count u32, count × (flags u8, id u24, value u32) |
//! | PING | 6 | id u32 |
//! | GOAWAY | 7 | last stream u32, status u32 |
//! | HEADERS | 8 | stream u32, header block |
//! | WINDOW_UPDATE | 9 | stream u32, delta u32 |

use super::super::event::Broken;
use super::headers;

/// Length of a frame header in bytes.
pub(super) const HEAD_BYTES: usize = 8;
/// Maximum length in bytes of a received control frame. Clients send fewer than ten short headers in a frame.
pub(super) const CONTROL_BYTES_MAX: usize = 64 << 10;
/// Maximum length in bytes of a sent data frame: the size of kubectl's buffer.
pub(crate) const DATA_BYTES_MAX: usize = 32 << 10;
/// FLAG_FIN: the last frame of the sender on this stream.
pub(super) const FIN: u8 = 1;

const VERSION: u16 = 3;
const IS_CONTROL: u8 = 0x80;
/// Mask of a stream ID, which has 31 bits; the first bit is ignored.
const ID_BITS: u32 = 0x7fff_ffff;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;

/// The header of a frame: its first eight bytes.
pub(super) enum Head {
    Control { kind: u16, flags: u8, length: usize },
    Data { stream: u32, flags: u8, length: usize },
}

impl Head {
    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Head, Broken> {
        let [a, b, c, d, flags, e, f, g] = *bytes;
        let length = u32::from_be_bytes([0, e, f, g]) as usize;
        if a & IS_CONTROL == 0 {
            return Ok(Head::Data { stream: u32::from_be_bytes([a, b, c, d]), flags, length });
        }
        if u16::from_be_bytes([a & !IS_CONTROL, b]) != VERSION {
            return Err(Broken("a control frame of an SPDY version other than 3"));
        }
        if length > CONTROL_BYTES_MAX {
            return Err(Broken("a control frame above the maximum length"));
        }
        Ok(Head::Control { kind: u16::from_be_bytes([c, d]), flags, length })
    }
}

/// A control frame's payload.
pub(super) enum Control<'a> {
    SynStream {
        stream: u32,
        block: &'a [u8],
    },
    Headers {
        stream: u32,
        block: &'a [u8],
    },
    Reset {
        stream: u32,
    },
    Ping {
        id: u32,
    },
    GoAway,
    /// SETTINGS, WINDOW_UPDATE, or an unknown type; ignored.
    Ignored,
}

impl<'a> Control<'a> {
    pub(super) fn decode(kind: u16, payload: &'a [u8]) -> Result<Control<'a>, Broken> {
        let broken = Broken("a control frame of the wrong length");
        let word = |at: usize| -> Result<u32, Broken> {
            let bytes = payload.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or(broken)?;
            Ok(u32::from_be_bytes(bytes))
        };
        let id = || word(0).map(|id| id & ID_BITS);
        let exactly = |length: usize| if payload.len() == length { Ok(()) } else { Err(broken) };
        Ok(match kind {
            SYN_STREAM => Control::SynStream { stream: id()?, block: payload.get(10..).ok_or(broken)? },
            HEADERS => Control::Headers { stream: id()?, block: payload.get(4..).ok_or(broken)? },
            RST_STREAM => {
                exactly(8)?;
                Control::Reset { stream: id()? }
            }
            SETTINGS => {
                let count = word(0)? as usize;
                exactly(count.saturating_mul(8).saturating_add(4))?;
                Control::Ignored
            }
            PING => {
                exactly(4)?;
                Control::Ping { id: word(0)? }
            }
            GOAWAY => {
                exactly(8)?;
                Control::GoAway
            }
            WINDOW_UPDATE => {
                exactly(8)?;
                Control::Ignored
            }
            // Only servers send SYN_REPLY; if it were skipped, the inflater would miss its header block.
            SYN_REPLY => return Err(Broken("a SYN_REPLY to a server that opens no streams")),
            _ => Control::Ignored,
        })
    }
}

fn control(output: &mut Vec<u8>, kind: u16, payload: &[&[u8]]) {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    let [_, e, f, g] = (length as u32).to_be_bytes();
    let [c, d] = kind.to_be_bytes();
    output.extend_from_slice(&[IS_CONTROL, VERSION as u8, c, d, 0, e, f, g]);
    for part in payload {
        output.extend_from_slice(part);
    }
}

/// Encodes a SYN_REPLY. `is_first`: whether it contains the connection's first header block, which must name
/// the dictionary.
pub(super) fn syn_reply(output: &mut Vec<u8>, stream: u32, is_first: bool) {
    control(output, SYN_REPLY, &[&stream.to_be_bytes(), headers::empty_block(is_first)]);
}

pub(super) fn reset(output: &mut Vec<u8>, stream: u32, status: u32) {
    control(output, RST_STREAM, &[&stream.to_be_bytes(), &status.to_be_bytes()]);
}

pub(super) fn ping(output: &mut Vec<u8>, id: u32) {
    control(output, PING, &[&id.to_be_bytes()]);
}

pub(super) fn go_away(output: &mut Vec<u8>, last: u32) {
    control(output, GOAWAY, &[&last.to_be_bytes(), &0_u32.to_be_bytes()]);
}

/// Encodes a data frame with at most [`DATA_BYTES_MAX`] bytes.
pub(super) fn data(output: &mut Vec<u8>, stream: u32, flags: u8, bytes: &[u8]) {
    let [_, e, f, g] = (bytes.len() as u32).to_be_bytes();
    output.extend_from_slice(&stream.to_be_bytes());
    output.extend_from_slice(&[flags, e, f, g]);
    output.extend_from_slice(bytes);
}
