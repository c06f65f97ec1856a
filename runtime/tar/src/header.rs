//! The fields of a header block.
//!
//! | offset | length | field | | offset | length | field |
//! |---|---|---|---|---|---|---|
//! | 0 | 100 | name | | 257 | 8 | magic number and version |
//! | 100 | 8 | mode | | 329, 337 | 8 | major and minor number, except in v7 |
//! | 108, 116 | 8 | owner, group | | 345 | 155 | POSIX: prefix of the name |
//! | 124 | 12 | size | | 345 | 131 | star: prefix of the name; 476: 12, time of access |
//! | 136 | 12 | time of modification | | 345, 357 | 12 | GNU: times of access and change |
//! | 148 | 8 | checksum | | 386 | 97 | GNU: sparse map; 483: 12, size of the file |
//! | 156, 157 | 1, 100 | type, link | | 508 | 4 | star: `tar` |

use crate::pax::Instant;
use crate::{Problem, Time};

/// Length of a block in bytes.
pub const BLOCK_BYTES: usize = 512;

/// A block of an archive.
pub type Block = [u8; BLOCK_BYTES];

const NOT_OCTAL: Problem = Problem("a number of the header is not octal");
const TOO_LARGE: Problem = Problem("a number of the header is too large");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    V7,
    Posix,
    Star,
    Gnu,
}

/// A decoded header, without the sparse map of GNU tar.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) format: Format,
    pub(crate) flag: u8,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: i64,
    pub(crate) uid: i64,
    pub(crate) gid: i64,
    pub(crate) size: i64,
    pub(crate) mtime: Time,
    pub(crate) atime: Option<Time>,
    pub(crate) ctime: Option<Time>,
    pub(crate) device: (i64, i64),
}

impl Header {
    pub(crate) fn decode(block: &Block) -> Result<Self, Problem> {
        let format = format(block)?;
        let seconds = |field: &[u8]| -> Result<Time, Problem> {
            Ok(Instant { seconds: number(field)?, nanoseconds: 0 }.bounded())
        };
        let mut header = Self {
            format,
            flag: block[156],
            path: text(&block[..100]).to_vec(),
            link: text(&block[157..257]).to_vec(),
            mode: number(&block[100..108])?,
            uid: number(&block[108..116])?,
            gid: number(&block[116..124])?,
            size: number(&block[124..136])?,
            mtime: seconds(&block[136..148])?,
            atime: None,
            ctime: None,
            device: (0, 0),
        };
        if format != Format::V7 {
            header.device = (number(&block[329..337])?, number(&block[337..345])?);
        }
        let prefix = match format {
            Format::V7 => &[][..],
            Format::Posix => text(&block[345..500]),
            Format::Star => {
                header.atime = Some(seconds(&block[476..488])?);
                header.ctime = Some(seconds(&block[488..500])?);
                text(&block[345..476])
            }
            Format::Gnu => {
                let (atime, ctime) = (&block[345..357], &block[357..369]);
                let read = |field: &[u8]| (field[0] != 0).then(|| seconds(field)).transpose();
                match (read(atime), read(ctime)) {
                    (Ok(atime), Ok(ctime)) => {
                        (header.atime, header.ctime) = (atime, ctime);
                        &[]
                    }
                    // Go before 1.8 wrote a prefix here (golang.org/issue/12594).
                    _ => Some(text(&block[345..500])).filter(|prefix| prefix.is_ascii()).unwrap_or_default(),
                }
            }
        };
        if !prefix.is_empty() {
            header.path = [prefix, b"/", &header.path].concat();
        }
        Ok(header)
    }
}

/// Checks the checksum and returns the format.
fn format(block: &Block) -> Result<Format, Problem> {
    const WRONG: Problem = Problem("the checksum of a header is wrong");
    let stated = octal(&block[148..156]).map_err(|_| WRONG)?;
    let others = || block[..148].iter().chain(&block[156..]);
    let blanks = i64::from(b' ') * 8;
    // Old writers added signed numbers.
    let unsigned = blanks + others().map(|byte| i64::from(*byte)).sum::<i64>();
    let signed = || blanks + others().map(|byte| i64::from(byte.cast_signed())).sum::<i64>();
    if stated != unsigned && stated != signed() {
        return Err(WRONG);
    }
    Ok(match (&block[257..263], &block[263..265], &block[508..]) {
        (b"ustar\0", _, b"tar\0") => Format::Star,
        (b"ustar\0", _, _) => Format::Posix,
        (b"ustar ", b" \0", _) => Format::Gnu,
        _ => Format::V7,
    })
}

/// The bytes of a field before the first NUL.
pub(crate) fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// The number in a field of a header: in octal digits or, if the first bit is set, in base 256 as a two's complement.
///
/// # Errors
/// It is neither, or has more than 63 bits.
pub fn number(field: &[u8]) -> Result<i64, Problem> {
    if field[0] & 0x80 == 0 {
        return octal(field);
    }
    let is_negative = field[0] & 0x40 != 0;
    let inverted = if is_negative { 0xff } else { 0 };
    let first = (field[0] ^ inverted) & 0x7f;
    let rest = field[1..].iter().map(|byte| byte ^ inverted);
    let value = std::iter::once(first).chain(rest).try_fold(0_u64, |value, byte| {
        (value >> 56 == 0).then_some(value << 8 | u64::from(byte)).ok_or(TOO_LARGE)
    })?;
    let value = i64::try_from(value).map_err(|_| TOO_LARGE)?;
    Ok(if is_negative { !value } else { value })
}

fn octal(field: &[u8]) -> Result<i64, Problem> {
    let is_filler = |byte: &u8| matches!(byte, 0 | b' ');
    let Some(start) = field.iter().position(|byte| !is_filler(byte)) else { return Ok(0) };
    let end = field.iter().rposition(|byte| !is_filler(byte)).map_or(start, |last| last + 1);
    text(&field[start..end]).iter().try_fold(0_i64, |value, digit| match digit {
        b'0'..=b'7' => Ok(value << 3 | i64::from(digit - b'0')),
        _ => Err(NOT_OCTAL),
    })
}
