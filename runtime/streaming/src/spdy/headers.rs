//! Header blocks of SPDY/3: names and values, compressed with zlib (RFC 1950) and the dictionary of the
//! SPDY/3 draft. Each direction of a connection is one deflate stream: its window continues across frames,
//! and each block ends with a sync flush.
//!
//! ```text
//! count u32, count × (name length u32, name, value length u32, value)         before compression
//! ```
//! The inflater is the core of a pure Rust library. Its window is in this module and initially contains the
//! dictionary; the inflater needs the window and 11 KiB of state. All sent blocks are equal: an empty list,
//! stored without compression.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_HAS_MORE_INPUT;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::super::event::Broken;

/// Maximum size in bytes of a decompressed block.
const BLOCK_BYTES_MAX: usize = 64 << 10;
/// Maximum number of headers in a block; clients send fewer than ten.
const HEADERS_MAX: u32 = 100;
/// Size of deflate's window in bytes.
const WINDOW_BYTES: usize = 32 << 10;

/// Adler-32 checksum of [`DICTIONARY`].
const DICTIONARY_ID: [u8; 4] = [0xe3, 0xc6, 0xa7, 0xc2];
/// First byte of a zlib stream: deflate (8) with a window of 32 KiB (7); smaller windows are accepted, too.
const DEFLATE: u8 = 8;
/// FDICT flag in the second byte of a zlib stream: a preset dictionary is used.
const HAS_DICTIONARY: u8 = 0x20;
const ZLIB_HEAD_BYTES: usize = 6;

/// HTTP header fields that are invalid in SPDY.
const REFUSED: [&str; 5] = ["connection", "host", "keep-alive", "proxy-connection", "transfer-encoding"];

/// Decompressor for the peer's header blocks.
pub(super) struct Inflater {
    state: Box<DecompressorOxide>,
    window: Box<[u8]>,
    at: usize,
    /// The received part of the zlib header, which precedes the first block only.
    head: Vec<u8>,
}

impl Inflater {
    pub(super) fn new() -> Inflater {
        let mut window = vec![0; WINDOW_BYTES].into_boxed_slice();
        window[..DICTIONARY.len()].copy_from_slice(&DICTIONARY);
        Inflater { state: Box::default(), window, at: DICTIONARY.len(), head: Vec::new() }
    }

    /// Decompresses one block, which must use all bytes of `input`. `None`: the headers are malformed, but
    /// later blocks can be read.
    pub(super) fn block(&mut self, mut input: &[u8]) -> Result<Option<Vec<(String, String)>>, Broken> {
        if self.head.len() < ZLIB_HEAD_BYTES {
            self.head.extend_from_slice(super::take(&mut input, ZLIB_HEAD_BYTES));
            check_head(&self.head)?;
        }
        let mut block = Vec::new();
        loop {
            let (status, used, made) =
                decompress(&mut self.state, input, &mut self.window, self.at, TINFL_FLAG_HAS_MORE_INPUT);
            block.extend_from_slice(&self.window[self.at..self.at + made]);
            self.at = (self.at + made) % WINDOW_BYTES;
            input = &input[used..];
            if block.len() > BLOCK_BYTES_MAX {
                return Err(Broken("a header block above the maximum decompressed size"));
            }
            match status {
                TINFLStatus::HasMoreOutput => {}
                TINFLStatus::NeedsMoreInput if input.is_empty() => return Ok(parse(&block)),
                _ => return Err(Broken("a header block that cannot be decompressed")),
            }
        }
    }
}

fn check_head(head: &[u8]) -> Result<(), Broken> {
    let broken = Broken("a header block without the dictionary of SPDY/3");
    let [first, second, id @ ..] = head else { return Err(broken) };
    let is_zlib = first & 0x0f == DEFLATE && u16::from_be_bytes([*first, *second]) % 31 == 0;
    match is_zlib && second & HAS_DICTIONARY != 0 && *id == DICTIONARY_ID {
        true => Ok(()),
        false => Err(broken),
    }
}

fn parse(mut block: &[u8]) -> Option<Vec<(String, String)>> {
    let count = word(&mut block)?;
    if count > HEADERS_MAX {
        return None;
    }
    let mut headers: Vec<(String, String)> = Vec::new();
    for _ in 0..count {
        let (name, value) = (text(&mut block)?, text(&mut block)?);
        let is_bad = name.is_empty()
            || name.bytes().any(|byte| byte.is_ascii_uppercase())
            || REFUSED.contains(&name)
            || headers.iter().any(|(known, _)| known == name);
        if is_bad {
            return None;
        }
        headers.push((name.to_owned(), value.to_owned()));
    }
    block.is_empty().then_some(headers)
}

fn word(block: &mut &[u8]) -> Option<u32> {
    let (bytes, rest) = block.split_first_chunk()?;
    *block = rest;
    Some(u32::from_be_bytes(*bytes))
}

fn text<'a>(block: &mut &'a [u8]) -> Option<&'a str> {
    let length = word(block)? as usize;
    let (bytes, rest) = block.split_at_checked(length)?;
    *block = rest;
    std::str::from_utf8(bytes).ok()
}

/// Encodes the block without headers: a stored block with the count, then the empty block of a sync flush.
pub(super) fn empty_block(is_first: bool) -> &'static [u8] {
    const BLOCK: [u8; 20] = [
        0x78,
        HAS_DICTIONARY,
        DICTIONARY_ID[0],
        DICTIONARY_ID[1],
        DICTIONARY_ID[2],
        DICTIONARY_ID[3],
        0,
        4,
        0,
        0xfb,
        0xff,
        0,
        0,
        0,
        0, //
        0,
        0,
        0,
        0xff,
        0xff,
    ];
    const LATER: &[u8] = BLOCK.split_at(ZLIB_HEAD_BYTES).1;
    if is_first { &BLOCK } else { LATER }
}

/// The dictionary of SPDY/3: each word preceded by its length, then a tail without lengths.
static DICTIONARY: [u8; 1423] = dictionary();

const fn dictionary() -> [u8; 1423] {
    let mut bytes = [0; 1423];
    let (mut at, mut index) = (0, 0);
    while index < WORDS.len() {
        let length = (WORDS[index].len() as u32).to_be_bytes();
        at = put(&mut bytes, at, &length);
        at = put(&mut bytes, at, WORDS[index].as_bytes());
        index += 1;
    }
    at = put(&mut bytes, at, TAIL.as_bytes());
    assert!(at == bytes.len());
    bytes
}

const fn put(bytes: &mut [u8; 1423], at: usize, part: &[u8]) -> usize {
    let mut index = 0;
    while index < part.len() {
        bytes[at + index] = part[index];
        index += 1;
    }
    at + part.len()
}

const WORDS: [&str; 65] = [
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

const TAIL: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 No",
    "n-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403",
    " Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Fe",
    "b Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunke",
    "d,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/",
    "javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_is_that_of_the_draft() {
        let (mut low, mut high) = (1_u32, 0_u32);
        for byte in DICTIONARY {
            low = (low + u32::from(byte)) % 65_521;
            high = (high + low) % 65_521;
        }
        assert_eq!((high << 16 | low).to_be_bytes(), DICTIONARY_ID);
    }

    #[test]
    fn the_empty_block_decompresses_to_no_headers() {
        let mut inflater = Inflater::new();
        assert_eq!(inflater.block(empty_block(true)), Ok(Some(Vec::new())));
        assert_eq!(inflater.block(empty_block(false)), Ok(Some(Vec::new())));
    }

    #[test]
    fn malformed_headers_are_refused() {
        let block = |headers: &[(&str, &str)]| {
            let mut block = (headers.len() as u32).to_be_bytes().to_vec();
            for text in headers.iter().flat_map(|(name, value)| [name, value]) {
                block.extend((text.len() as u32).to_be_bytes());
                block.extend(text.as_bytes());
            }
            block
        };
        let good = block(&[("streamtype", "error"), ("port", "80")]);
        assert_eq!(parse(&good).unwrap()[1], ("port".to_owned(), "80".to_owned()));
        for headers in [&[("", "x")][..], &[("Port", "x")], &[("host", "x")], &[("a", "1"), ("a", "2")]] {
            assert_eq!(parse(&block(headers)), None, "{headers:?}");
        }
        for cut in 0..good.len() {
            assert_eq!(parse(&good[..cut]), None, "cut at {cut}");
        }
        assert_eq!(parse(&[&good[..], b"x"].concat()), None);
        assert_eq!(parse(&u32::MAX.to_be_bytes()), None);
    }
}
