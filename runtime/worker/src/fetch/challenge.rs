//! `WWW-Authenticate`, as registries send it: which scheme, and for bearer tokens where to get one (RFC 9110 section
//! 11.6.1; the distribution specification's token authentication). Pure.

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User and password with each request.
    Basic,
    /// A token of the service at `realm`.
    Bearer {
        /// URL of the token service.
        realm: String,
        /// Parameter `service`; empty where it is not given.
        service: String,
        /// Parameter `scope`; empty where it is not given.
        scope: String,
    },
}

/// Longest header that is read: realms and scopes are some hundred bytes.
const HEADER_BYTES_MAX: usize = 8192;

/// Reads one header value. A bearer challenge wins over a basic one beside it; `None`: neither is in it.
pub(super) fn parse(header: &str) -> Option<Challenge> {
    if header.len() > HEADER_BYTES_MAX {
        return None;
    }
    let mut rest = header;
    let mut found = None;
    while let Some((scheme, parameters)) = next_scheme(&mut rest) {
        let value = |name: &str| {
            let found = parameters.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        if scheme.eq_ignore_ascii_case("bearer") && !value("realm").is_empty() {
            return Some(Challenge::Bearer {
                realm: value("realm"),
                service: value("service"),
                scope: value("scope"),
            });
        }
        if scheme.eq_ignore_ascii_case("basic") {
            found = Some(Challenge::Basic);
        }
    }
    found
}

/// A scheme with its `name=value` pairs.
type Scheme = (String, Vec<(String, String)>);

fn next_scheme(rest: &mut &str) -> Option<Scheme> {
    skip(rest, &[' ', ',', '\t']);
    let scheme = token(rest)?;
    let mut parameters = Vec::new();
    loop {
        let before = *rest;
        skip(rest, &[' ', ',', '\t']);
        let Some(name) = token(rest) else { break };
        skip(rest, &[' ', '\t']);
        let Some(after) = rest.strip_prefix('=') else {
            // A token without `=` is the next scheme.
            *rest = before;
            break;
        };
        *rest = after;
        skip(rest, &[' ', '\t']);
        parameters.push((name, value(rest)));
    }
    Some((scheme, parameters))
}

fn skip(rest: &mut &str, characters: &[char]) {
    *rest = rest.trim_start_matches(characters);
}

fn token(rest: &mut &str) -> Option<String> {
    let end = rest.find([' ', ',', '=', '"', '\t']).unwrap_or(rest.len());
    let (token, after) = rest.split_at(end);
    *rest = after;
    (!token.is_empty()).then(|| token.to_owned())
}

/// A token or a quoted string with its escapes; an unfinished one ends with the header.
fn value(rest: &mut &str) -> String {
    let Some(quoted) = rest.strip_prefix('"') else { return token(rest).unwrap_or_default() };
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => {
                *rest = &quoted[at + 1..];
                return text;
            }
            '\\' => text.extend(characters.next().map(|(_, escaped)| escaped)),
            character => text.push(character),
        }
    }
    *rest = "";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: &str, scope: &str) -> Option<Challenge> {
        Some(Challenge::Bearer { realm: realm.into(), service: service.into(), scope: scope.into() })
    }

    #[test]
    fn challenges_of_real_registries_are_read() {
        for (header, expected) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull""#,
                bearer("https://auth.docker.io/token", "registry.docker.io", "repository:a/b:pull"),
            ),
            (r#"bearer Realm=http://x/t , service="a \"b\", c""#, bearer("http://x/t", "a \"b\", c", "")),
            (r#"Basic realm="Registry Realm""#, Some(Challenge::Basic)),
            (r#"Basic realm="r", Bearer realm="https://t""#, bearer("https://t", "", "")),
            (r#"Negotiate, Basic"#, Some(Challenge::Basic)),
            (r#"Bearer service="no realm""#, None),
            ("", None),
            (r#"Bearer realm="unfinished"#, bearer("unfinished", "", "")),
        ] {
            assert_eq!(parse(header), expected, "{header}");
        }
    }

    /// Whatever a peer sends, the parser ends and holds no more than it was given.
    #[test]
    fn garbage_ends() {
        let alphabet = [" ", ",", "=", "\"", "\\", "a", "Bearer", "realm", "é", "\t"];
        let mut seed = 1_u64;
        for _ in 0..20_000 {
            let mut header = String::new();
            for _ in 0..12 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                header.push_str(alphabet[(seed >> 33) as usize % alphabet.len()]);
            }
            if let Some(Challenge::Bearer { realm, service, scope }) = parse(&header) {
                assert!(realm.len() + service.len() + scope.len() <= header.len(), "{header}");
            }
        }
    }
}
