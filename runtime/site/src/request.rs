//! Requests of neighbours: parsing and the choice of content, without I/O. HTTP/1.1 by `httparse`; requests without a body, and
//! of the OCI distribution specification only what reads by digest.

/// Maximum length of a request's head in bytes: a name of 255 bytes, a digest, an authorization and a dozen other fields.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// Maximum number of header fields; clients of registries send about ten.
const FIELDS_MAX: usize = 48;
/// Maximum length of a repository's name in bytes (OCI distribution specification 1.1, "Pulling manifests").
const NAME_BYTES_MAX: usize = 255;

/// A request of a neighbour, or of a client of registries.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Whether only the head of the answer is wanted.
    pub is_head: bool,
    /// Path and query.
    pub target: String,
    /// The field `Range`; empty if there is none.
    pub range: String,
    /// The field `Authorization`; empty if there is none.
    pub authorization: String,
    /// Whether the client may send another request on the connection.
    pub keeps_alive: bool,
}

/// A request that is answered with an error, after which the connection is closed.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    /// Status code and reason phrase.
    pub status: &'static str,
    /// The reason, for the body of the answer.
    pub why: &'static str,
}

fn bad(why: &'static str) -> Refused {
    Refused { status: "400 Bad Request", why }
}

/// Parses the head at the start of `bytes`; returns the request and the length of the head. `Ok(None)`: it is incomplete.
///
/// # Errors
/// The request is answered with an error, and the connection is closed.
pub fn parse(bytes: &[u8]) -> Result<Option<(Request, usize)>, Refused> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Request::new(&mut fields);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= HEAD_BYTES_MAX => length,
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES_MAX => return Ok(None),
        Ok(_) => {
            return Err(Refused {
                status: "431 Request Header Fields Too Large",
                why: "the head of the request is too long",
            });
        }
        Err(_) => return Err(bad("not a request of HTTP/1.1")),
    };
    let is_head = match head.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(Refused { status: "405 Method Not Allowed", why: "only GET and HEAD are served" }),
    };
    let mut request = Request {
        is_head,
        target: head.path.unwrap_or_default().to_owned(),
        range: String::new(),
        authorization: String::new(),
        keeps_alive: head.version == Some(1),
    };
    for field in head.headers.iter() {
        let value =
            || std::str::from_utf8(field.value).map(str::to_owned).map_err(|_| bad("a field is not text"));
        let once = |known: &mut String| match known.is_empty() {
            true => value().map(|value| *known = value),
            false => Err(bad("a field that may be there once is there twice")),
        };
        match field.name.to_ascii_lowercase().as_str() {
            "range" => once(&mut request.range)?,
            "authorization" => once(&mut request.authorization)?,
            "connection" => request.keeps_alive &= !value()?.to_ascii_lowercase().contains("close"),
            // Otherwise the body would be read as the next request.
            "content-length" if field.value.trim_ascii() != b"0" => return Err(bad("a request has no body")),
            "transfer-encoding" => return Err(bad("a request has no body")),
            _ => {}
        }
    }
    Ok(Some((request, length)))
}

/// The hexadecimal digits of a `sha256:` digest; `None` if it is none.
pub fn digits(digest: &str) -> Option<&str> {
    let digits = digest.strip_prefix("sha256:")?;
    let is_hex = digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then_some(digits)
}

/// The content that a target names.
#[derive(Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// `/v2/`: whether this is a registry.
    Version,
    /// A manifest or index by its digest, and the name of the repository with its registry, which the request has in `ns`.
    Manifest(String, &'a str),
    /// A manifest or index by a tag: the name of the image with its registry.
    Tag(String),
    /// A config or layer by its digest, the registry from which it may be being downloaded, and the name of the layer for which the
    /// client asks, too.
    Blob(&'a str, String, Option<&'a str>),
    /// The outline of an unpacked layer by its name.
    Outline(&'a str),
    /// The uncompressed archive of an unpacked layer by its name.
    Archive(&'a str),
}

/// The content that the target names; `None`: nothing that could be served.
pub fn content(target: &str) -> Option<Content<'_>> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let rest = path.strip_prefix("/v2/")?;
    if rest.is_empty() {
        return Some(Content::Version);
    }
    let (rest, reference) = rest.rsplit_once('/')?;
    let (name, kind) = rest.rsplit_once('/')?;
    let name_of_layer = digits(reference);
    let is_digest = name_of_layer.is_some();
    let layer = query.split('&').find_map(|part| part.strip_prefix("layer="));
    // Clients may encode what needs no encoding in a query.
    let registry = query.split('&').find_map(|part| part.strip_prefix("ns=")).map(decoded);
    match kind {
        _ if !is_name(name) => None,
        "blobs" if is_digest => {
            let layer = layer.and_then(digits);
            Some(Content::Blob(reference, registry.unwrap_or_default(), layer))
        }
        // The name of a layer has the digits of its chain ID.
        "outlines" => name_of_layer.map(Content::Outline),
        "archives" => name_of_layer.map(Content::Archive),
        "manifests" if is_digest => Some(Content::Manifest(format!("{}/{name}", registry?), reference)),
        "manifests" if is_tag(reference) => Some(Content::Tag(format!("{}/{name}:{reference}", registry?))),
        _ => None,
    }
}

/// A registry's name without the encoding of its port and of an IPv6 address (RFC 3986, section 2.1).
fn decoded(name: &str) -> String {
    [("%3A", ":"), ("%5B", "["), ("%5D", "]")].iter().fold(name.to_owned(), |name, (code, character)| {
        name.replace(code, character).replace(&code.to_ascii_lowercase(), character)
    })
}

fn is_name(name: &str) -> bool {
    let is_part = |part: &str| {
        let is_letter =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
        part.bytes().all(is_letter) && part.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
    };
    name.len() <= NAME_BYTES_MAX && name.split('/').all(is_part)
}

fn is_tag(tag: &str) -> bool {
    const TAG_BYTES_MAX: usize = 128;
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=TAG_BYTES_MAX).contains(&tag.len()) && tag.bytes().all(is_letter)
}

/// The range of a request begins at or after the end of the content (416).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastEnd;

/// The bytes of content of `size` bytes that the field `Range` names, as offsets; `Ok(None)`: all, also for several ranges or
/// one that is counted from the end, which a server may ignore (RFC 9110, section 14.2).
///
/// # Errors
/// [`PastEnd`].
pub fn range(field: &str, size: u64) -> Result<Option<(u64, u64)>, PastEnd> {
    let Some((first, last)) = field.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-'))
    else {
        return Ok(None);
    };
    let Ok(first) = first.parse::<u64>() else { return Ok(None) };
    let end = match last {
        "" => size,
        last => match last.parse::<u64>() {
            Ok(last) if last >= first => last.saturating_add(1).min(size),
            _ => return Ok(None),
        },
    };
    if first < size { Ok(Some((first, end))) } else { Err(PastEnd) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn a_request_is_parsed_however_it_is_split() {
        let text = b"GET /v2/a/blobs/x HTTP/1.1\r\nHost: h\r\nRange: bytes=5-\r\nAuthorization: Coracle 1-a.b\r\n\r\nrest";
        let head = text.len() - b"rest".len();
        for cut in 0..head {
            assert_eq!(parse(&text[..cut]), Ok(None), "{cut}");
        }
        let (request, length) = parse(text).unwrap().unwrap();
        let expected = Request {
            is_head: false,
            target: "/v2/a/blobs/x".into(),
            range: "bytes=5-".into(),
            authorization: "Coracle 1-a.b".into(),
            keeps_alive: true,
        };
        assert_eq!((request, length), (expected, head));
    }

    #[test]
    fn the_corpus_of_the_fuzz_target_is_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/site");
        let seed = |name: &str| std::fs::read(format!("{folder}/{name}")).unwrap().split_off(1);
        let request = |name: &str| parse(&seed(name)).unwrap().unwrap().0;
        let blob = request("blob");
        assert_eq!(range(&blob.range, 10), Ok(Some((5, 10))));
        let Some(Content::Blob(DIGEST, registry, Some(_))) = content(&blob.target) else {
            panic!("{blob:?}")
        };
        assert_eq!(registry, "r.example:5000");
        assert!(matches!(content(&request("manifest").target), Some(Content::Manifest(_, DIGEST))));
        assert!(matches!(content(&request("outline").target), Some(Content::Outline(_))));
        let share = String::from_utf8(seed("share")).unwrap();
        assert_eq!(
            crate::share::State::parse(&share),
            Some((crate::share::State::Fetching(123_456), "node-a"))
        );
    }

    #[test]
    fn requests_that_are_not_served_are_refused() {
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(HEAD_BYTES_MAX));
        for (text, status) in [
            ("POST /v2/ HTTP/1.1\r\n\r\n", "405"),
            ("DELETE /v2/ HTTP/1.1\r\n\r\n", "405"),
            ("GET /v2/ HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "400"),
            ("GET /v2/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "400"),
            ("GET /v2/ HTTP/1.1\r\nRange: bytes=0-\r\nRange: bytes=1-\r\n\r\n", "400"),
            ("\x16\x03\x01\x02", "400"),
            (&long, "431"),
        ] {
            let refused = parse(text.as_bytes()).unwrap_err();
            assert!(refused.status.starts_with(status), "{text:?}: {refused:?}");
        }
    }

    #[test]
    fn only_digests_and_tags_with_a_registry_name_content() {
        let blob = format!("/v2/library/busybox/blobs/{DIGEST}");
        let manifest = format!("/v2/a/manifests/{DIGEST}?ns=docker.io");
        assert_eq!(content("/v2/"), Some(Content::Version));
        assert_eq!(content(&blob), Some(Content::Blob(DIGEST, String::new(), None)));
        let of = format!("{blob}?ns=r.example%3A5000");
        assert_eq!(content(&of), Some(Content::Blob(DIGEST, "r.example:5000".into(), None)));
        let (digits, with_layer) = (&DIGEST["sha256:".len()..], format!("{blob}?ns=r&layer={DIGEST}"));
        assert_eq!(content(&with_layer), Some(Content::Blob(DIGEST, "r".into(), Some(digits))));
        let odd_layer = format!("{blob}?layer=sha256:../../x&ns=r");
        assert_eq!(content(&odd_layer), Some(Content::Blob(DIGEST, "r".into(), None)));
        assert_eq!(content(&blob.replace("blobs", "outlines")), Some(Content::Outline(digits)));
        assert_eq!(content(&blob.replace("blobs", "archives")), Some(Content::Archive(digits)));
        assert_eq!(content(&manifest), Some(Content::Manifest("docker.io/a".into(), DIGEST)));
        let tag = Content::Tag("docker.io/a/b:1.0".into());
        assert_eq!(content("/v2/a/b/manifests/1.0?ns=docker.io"), Some(tag));
        let upper = blob.replace("abcdef", "ABCDEF");
        for nothing in [
            "/",
            "/v2",
            "/v2/a/blobs/sha256:../../x",
            "/v2/a/outlines/sha256:../../x",
            "/v2/a/archives/x",
            "/v2/../blobs/x",
            &upper,
            "/v2/a/manifests/1.0",
            &format!("/v2/a/manifests/{DIGEST}"),
            "/v2/_catalog",
            "/v2/a/tags/list",
            &format!("/v2/blobs/{DIGEST}"),
            &format!("/v2/../x/blobs/{DIGEST}"),
        ] {
            assert_eq!(content(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn ranges_are_those_of_one_part() {
        for (field, expected) in [
            ("", Ok(None)),
            ("bytes=0-", Ok(Some((0, 10)))),
            ("bytes=3-4", Ok(Some((3, 5)))),
            ("bytes=3-99", Ok(Some((3, 10)))),
            ("bytes=9-18446744073709551615", Ok(Some((9, 10)))),
            ("bytes=10-", Err(PastEnd)),
            ("bytes=-3", Ok(None)),
            ("bytes=4-3", Ok(None)),
            ("bytes=0-1,3-4", Ok(None)),
            ("lines=0-", Ok(None)),
        ] {
            assert_eq!(range(field, 10), expected, "{field}");
        }
    }
}
