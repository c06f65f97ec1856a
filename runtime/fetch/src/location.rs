//! Resolves the `Location` of a redirect, which is a URI reference (RFC 9110, section 10.2.2), against the URL of
//! the request (RFC 3986, section 5.2). Pure.

use std::fmt::Write;

use ureq::http::Uri;

/// Resolves the value of a `Location` field. Bytes that a URL cannot contain are percent-encoded, because
/// object stores send them in signed URLs and Go's client sends them on.
///
/// # Errors
/// `None`: the value contains control characters, or is no URL with a host.
pub(super) fn resolve(base: &Uri, location: &[u8]) -> Option<Uri> {
    let text = escape(location)?;
    let scheme = text.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
    let (scheme, rest) = match scheme {
        Some((scheme, rest)) => (Some(scheme), rest),
        None => (None, text.as_str()),
    };
    let (hierarchy, query) = match rest.split_once('?') {
        Some((hierarchy, query)) => (hierarchy, Some(query)),
        None => (rest, None),
    };
    let (authority, path, query) = match (hierarchy.strip_prefix("//"), scheme) {
        (Some(rest), _) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            (authority, path.to_owned(), query)
        }
        // `https:path` has no host.
        (None, Some(_)) => return None,
        (None, None) => {
            let (path, query) = match hierarchy {
                "" => (base.path().to_owned(), query.or(base.query())),
                path if path.starts_with('/') => (path.to_owned(), query),
                path => {
                    let directory = base.path().rsplit_once('/').map_or("", |(directory, _)| directory);
                    (format!("{directory}/{path}"), query)
                }
            };
            (base.authority()?.as_str(), path, query)
        }
    };
    let mut url = format!("{}://{authority}{}", scheme.or(base.scheme_str())?, remove_dots(&path));
    if let Some(query) = query {
        url.push('?');
        url.push_str(query);
    }
    url.parse().ok()
}

fn is_scheme(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Percent-encodes what RFC 3986 does not allow in a URL, and removes the fragment; `None` for control
/// characters.
fn escape(bytes: &[u8]) -> Option<String> {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes.trim_ascii().iter().take_while(|byte| **byte != b'#') {
        match byte {
            byte if byte.is_ascii_control() => return None,
            byte if byte.is_ascii_alphanumeric() || b"-._~:/?[]@!$&'()*+,;=%".contains(byte) => {
                text.push(char::from(*byte));
            }
            // Writing to a string does not fail.
            byte => drop(write!(text, "%{byte:02X}")),
        }
    }
    Some(text)
}

/// Removes the segments `.` and `..` of an absolute path (RFC 3986, section 5.2.4).
fn remove_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        match segment {
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                // A trailing `.` or `..` names a directory.
                if segments.peek().is_none() {
                    kept.push("");
                }
            }
            segment => kept.push(segment),
        }
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(base: &str, location: &[u8]) -> Option<String> {
        resolve(&base.parse().unwrap(), location).map(|url| url.to_string())
    }

    /// The examples of RFC 3986, section 5.4, that concern URLs with a host.
    #[test]
    fn references_are_resolved_as_in_the_rfc() {
        for (reference, expected) in [
            ("http://g/h", "http://g/h"),
            ("g", "http://a/b/c/g"),
            ("./g", "http://a/b/c/g"),
            ("g/", "http://a/b/c/g/"),
            ("/g", "http://a/g"),
            ("//g", "http://g/"),
            ("?y", "http://a/b/c/d;p?y"),
            ("g?y", "http://a/b/c/g?y"),
            ("#s", "http://a/b/c/d;p?q"),
            ("g?y#s", "http://a/b/c/g?y"),
            (";x", "http://a/b/c/;x"),
            ("", "http://a/b/c/d;p?q"),
            (".", "http://a/b/c/"),
            ("..", "http://a/b/"),
            ("../g", "http://a/b/g"),
            ("../..", "http://a/"),
            ("../../../g", "http://a/g"),
            ("/./g", "http://a/g"),
            ("/../g", "http://a/g"),
            ("g.", "http://a/b/c/g."),
            ("..g", "http://a/b/c/..g"),
            ("./../g", "http://a/b/g"),
            ("g/./h", "http://a/b/c/g/h"),
            ("g;x=1/../y", "http://a/b/c/y"),
            ("g?y/../x", "http://a/b/c/g?y/../x"),
            ("sha256:1", ""),
            ("./sha256:1", "http://a/b/c/sha256:1"),
            ("//host:5000/x?y=//z", "http://host:5000/x?y=//z"),
        ] {
            let expected = (!expected.is_empty()).then(|| expected.to_owned());
            assert_eq!(resolved("http://a/b/c/d;p?q", reference.as_bytes()), expected, "{reference}");
        }
    }

    #[test]
    fn unusual_bytes_are_encoded_and_control_characters_refused() {
        let base = "https://reg.example/v2/x";
        for (location, expected) in [
            ("https://s.example/a b|c?sig=a|b\u{e9}", "https://s.example/a%20b%7Cc?sig=a%7Cb%C3%A9"),
            ("/a%7Cb?x={y}", "https://reg.example/a%7Cb?x=%7By%7D"),
        ] {
            assert_eq!(resolved(base, location.as_bytes()).as_deref(), Some(expected), "{location}");
        }
        assert_eq!(resolved(base, b"/caf\xe9").as_deref(), Some("https://reg.example/caf%E9"));
        for refused in [&b"/a\0b"[..], b"/a\tb", b"http:x", b"https://"] {
            assert_eq!(resolved(base, refused), None, "{refused:?}");
        }
    }
}
