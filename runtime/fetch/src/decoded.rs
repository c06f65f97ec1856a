//! The content of a response, without its `Content-Encoding` (RFC 9110, section 8.4). Requests ask for the
//! identity coding, but some registries encode their answers nevertheless; containerd decodes these codings, too.

use std::io::{self, BufRead, BufReader, Read};

use coracle_job::Failure;
use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use ureq::Body;
use ureq::http::header::CONTENT_ENCODING;
use ureq::http::{HeaderMap, Response};

/// Largest window of zstd in the logarithm to the base 2: 8 MiB (RFC 9659).
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// Maximum number of codings of one response; each needs memory.
const CODINGS_MAX: usize = 4;

/// Size of the buffer in bytes between two decoders.
const BUFFER_BYTES: usize = 16 << 10;

/// The codings of a response, in the order in which they were applied.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Codings(Vec<Coding>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Gzip,
    Deflate,
    Zstd,
}

impl Codings {
    /// The codings of a response whose decoded content has `size` bytes, if that is known: content that already has
    /// this length is not encoded, whatever its header says.
    ///
    /// # Errors
    /// A coding is not supported; the text names it after `what`.
    pub(super) fn of(response: &Response<Body>, size: Option<u64>, what: &str) -> Result<Self, Failure> {
        if size.is_some() && response.body().content_length() == size {
            return Ok(Self::default());
        }
        Self::parse(response.headers()).map_err(|coding| {
            Failure::invalid(format!(
                "{what}: its Content-Encoding {coding:?} is not supported: gzip, deflate, zstd"
            ))
        })
    }

    fn parse(headers: &HeaderMap) -> Result<Self, String> {
        let mut codings = Vec::new();
        for field in headers.get_all(CONTENT_ENCODING) {
            let field = String::from_utf8_lossy(field.as_bytes());
            for name in field.split([',', ' ', '\t']) {
                codings.push(match name.to_ascii_lowercase().as_str() {
                    "" | "identity" => continue,
                    "gzip" | "x-gzip" => Coding::Gzip,
                    "deflate" => Coding::Deflate,
                    "zstd" => Coding::Zstd,
                    _ => return Err(name.to_owned()),
                });
            }
        }
        if codings.len() > CODINGS_MAX {
            Err(format!("{} codings", codings.len()))
        } else {
            Ok(Self(codings))
        }
    }

    /// Whether the content is not encoded.
    pub(super) fn is_identity(&self) -> bool {
        self.0.is_empty()
    }

    /// The decoded content.
    pub(super) fn decode<'a>(&self, body: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        self.0.iter().rev().try_fold(Box::new(body) as Box<dyn Read + 'a>, |content, coding| {
            let mut content = BufReader::with_capacity(BUFFER_BYTES, content);
            Ok(match coding {
                Coding::Gzip => Box::new(MultiGzDecoder::new(content)) as Box<dyn Read + 'a>,
                // RFC 9110 means the format of zlib; some servers send a bare deflate stream.
                Coding::Deflate if is_zlib(content.fill_buf()?) => Box::new(ZlibDecoder::new(content)),
                Coding::Deflate => Box::new(DeflateDecoder::new(content)),
                Coding::Zstd => {
                    let mut decoder = zstd::stream::read::Decoder::with_buffer(content)?;
                    decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                    Box::new(decoder)
                }
            })
        })
    }
}

/// Whether data begins with the header of zlib (RFC 1950, section 2.2).
fn is_zlib(data: &[u8]) -> bool {
    match data {
        [first, second, ..] => first & 15 == 8 && u16::from_be_bytes([*first, *second]).is_multiple_of(31),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &[&str]) -> Result<Codings, String> {
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.append(CONTENT_ENCODING, field.parse().unwrap());
        }
        Codings::parse(&headers)
    }

    #[test]
    fn codings_of_all_header_fields_are_parsed() {
        use Coding::{Deflate, Gzip, Zstd};
        for (fields, expected) in [
            (&[][..], vec![]),
            (&["identity"], vec![]),
            (&["GZip"], vec![Gzip]),
            (&["deflate, x-gzip", "zstd"], vec![Deflate, Gzip, Zstd]),
        ] {
            assert_eq!(parse(fields), Ok(Codings(expected)), "{fields:?}");
        }
        assert_eq!(parse(&["gzip, br"]), Err("br".to_owned()));
        assert!(parse(&["gzip,gzip,gzip,gzip,gzip"]).is_err());
    }
}
