//! The records of a PAX header (POSIX pax, "pax Extended Header"): `LENGTH KEY=VALUE\n`, where the length is that of the whole
//! record. A value may contain line breaks and whole records; only the length says where it ends.

use std::collections::BTreeMap;

use crate::{Problem, Time};

pub(crate) const XATTR: &[u8] = b"SCHILY.xattr.";
pub(crate) const SPARSE: &[u8] = b"GNU.sparse.";
pub(crate) const SPARSE_MAP: &[u8] = b"GNU.sparse.map";
const SPARSE_OFFSET: &[u8] = b"GNU.sparse.offset";
const SPARSE_LENGTH: &[u8] = b"GNU.sparse.numbytes";
/// Names, which must not contain a NUL.
const NAMES: [&[u8]; 4] = [b"path", b"linkpath", b"uname", b"gname"];
/// Length of the shortest record, `5 a=` and a line break.
const RECORD_BYTES_MIN: i64 = 5;
const INVALID: Problem = Problem("a PAX record is malformed");

/// The records of one PAX header by their key. Of equal keys the last one counts, except for the pairs of the sparse format
/// 0.0, which become a map as in 0.1.
pub type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// Decodes the body of a PAX header.
///
/// # Errors
/// A record is malformed.
pub fn records(mut body: &[u8]) -> Result<Records, Problem> {
    let (mut records, mut map) = (Records::new(), Vec::<&[u8]>::new());
    while !body.is_empty() {
        let Record { key, value, rest } = record(body)?;
        body = rest;
        if key == SPARSE_OFFSET || key == SPARSE_LENGTH {
            let expected = if map.len() % 2 == 0 { SPARSE_OFFSET } else { SPARSE_LENGTH };
            if key != expected || value.contains(&b',') {
                return Err(Problem("the pairs of a sparse map are malformed"));
            }
            map.push(value);
        } else {
            records.insert(key.to_vec(), value.to_vec());
        }
    }
    if !map.is_empty() {
        records.insert(SPARSE_MAP.to_vec(), map.join(&b','));
    }
    Ok(records)
}

/// A record, and the bytes after it.
struct Record<'a> {
    key: &'a [u8],
    value: &'a [u8],
    rest: &'a [u8],
}

/// Decodes the first record.
fn record(body: &[u8]) -> Result<Record<'_>, Problem> {
    let space = body.iter().position(|byte| *byte == b' ').ok_or(INVALID)?;
    let length = integer(&body[..space]).filter(|length| *length >= RECORD_BYTES_MIN).ok_or(INVALID)?;
    let length = usize::try_from(length).map_err(|_| INVALID)?;
    let (whole, rest) = body.split_at_checked(length).ok_or(INVALID)?;
    let pair = whole.get(space + 1..).and_then(|pair| pair.strip_suffix(b"\n")).ok_or(INVALID)?;
    let equals = pair.iter().position(|byte| *byte == b'=').ok_or(INVALID)?;
    let (key, value) = (&pair[..equals], &pair[equals + 1..]);
    let checked = if NAMES.contains(&key) { value } else { key };
    match key.is_empty() || checked.contains(&0) {
        true => Err(INVALID),
        false => Ok(Record { key, value, rest }),
    }
}

/// A decimal number with an optional sign, as Go's `strconv.ParseInt` reads it.
pub(crate) fn integer(text: &[u8]) -> Option<i64> {
    str::from_utf8(text).ok()?.parse().ok()
}

/// A time that may be out of range.
pub(crate) struct Instant {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: i64,
}

impl Instant {
    /// Decodes `SECONDS.FRACTION`; digits after the ninth are ignored.
    pub(crate) fn decode(text: &[u8]) -> Option<Self> {
        let mut parts = text.splitn(2, |byte| *byte == b'.');
        let whole = parts.next()?;
        let fraction = parts.next().unwrap_or_default();
        let seconds = integer(whole)?;
        if !fraction.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let digits = fraction.iter().map(|digit| i64::from(digit - b'0')).chain(std::iter::repeat(0));
        let nanoseconds = digits.take(9).fold(0, |value, digit| value * 10 + digit);
        let is_negative = whole.starts_with(b"-");
        Some(Self { seconds, nanoseconds: if is_negative { -nanoseconds } else { nanoseconds } })
    }

    /// This time, or 1970 if it is earlier, or later than 2^63 nanoseconds after 1970 (containerd, pkg/archive/time.go).
    pub(crate) fn bounded(&self) -> Time {
        let total = i128::from(self.seconds) * 1_000_000_000 + i128::from(self.nanoseconds);
        let total = i64::try_from(total).unwrap_or_default().max(0);
        Time { seconds: total / 1_000_000_000, nanoseconds: (total % 1_000_000_000) as u32 }
    }
}
