//! Reads what nodes of a site say to each other, as the first byte says: a request with the content and the range that it names, and the
//! share of a blob that an answer has. Any bytes.
#![no_main]

#[allow(dead_code)]
#[path = "../../../runtime/site/src/request.rs"]
mod request;
#[allow(dead_code)]
#[path = "../../../runtime/site/src/share.rs"]
mod share;

use request::Content;
use share::State;

/// Length in bytes of the content of which a range is requested.
const SIZE: u64 = 1000;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 2 {
        0 => asked(data),
        _ => drop(std::str::from_utf8(data).ok().and_then(State::parse)),
    }
});

fn asked(data: &[u8]) {
    let Ok(Some((request, length))) = request::parse(data) else { return };
    assert!(length <= data.len() && length <= request::HEAD_BYTES_MAX);
    // A head that comes in pieces is the same one.
    assert_eq!(request::parse(&data[..length - 1]), Ok(None));
    assert_eq!(request::parse(&data[..length]), Ok(Some((clone(&request), length))));
    if let Ok(Some((begin, end))) = request::range(&request.range, SIZE) {
        assert!(begin < end && end <= SIZE);
    }
    let is_hex = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match request::content(&request.target) {
        // These are names of files.
        Some(Content::Blob(digest, _, layer)) => {
            assert!(digest.strip_prefix("sha256:").is_some_and(is_hex) && layer.is_none_or(is_hex));
        }
        Some(Content::Outline(name) | Content::Archive(name)) => assert!(is_hex(name)),
        Some(Content::Manifest(_, digest)) => assert!(digest.strip_prefix("sha256:").is_some_and(is_hex)),
        Some(Content::Version | Content::Tag(_)) | None => {}
    }
}

fn clone(request: &request::Request) -> request::Request {
    request::Request {
        is_head: request.is_head,
        target: request.target.clone(),
        range: request.range.clone(),
        authorization: request.authorization.clone(),
        keeps_alive: request.keeps_alive,
    }
}
