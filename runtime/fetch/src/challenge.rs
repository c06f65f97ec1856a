//! Parses `WWW-Authenticate` of registries: the scheme, and for bearer tokens the token service (RFC 9110
//! section 11.6.1; token authentication of the distribution specification). Pure.

/// The authentication that a registry requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// Basic authentication for each request.
    Basic,
    /// A bearer token from the service at `realm`.
    Bearer {
        /// URL of the token service.
        realm: String,
        /// Parameter `service`; empty if missing.
        service: String,
        /// Parameter `scope`; empty if missing.
        scope: String,
    },
}

/// Maximum length of the header in bytes; usual headers have some hundred.
const HEADER_BYTES_MAX: usize = 8192;

/// The challenge of a response with these `WWW-Authenticate` fields, which together are one list (RFC 9110, section
/// 5.3). A bearer challenge has precedence over a basic one; `None` if there is neither.
pub(super) fn of<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Option<Challenge> {
    let found = fields.filter_map(|field| parse(&String::from_utf8_lossy(field)));
    // Of several, the first of the preferred kind.
    found.min_by_key(|challenge| matches!(challenge, Challenge::Basic))
}

/// Parses one header value.
fn parse(header: &str) -> Option<Challenge> {
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

/// Name of an authentication scheme, and its `name=value` pairs.
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
        // The credentials of Negotiate are a token with `=` at its end.
        *rest = after.trim_start_matches('=');
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

/// Parses a token or a quoted string with escapes; an unterminated string ends at the end of the header.
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
    fn challenges_of_real_registries_are_parsed() {
        for (header, expected) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull""#,
                bearer("https://auth.docker.io/token", "registry.docker.io", "repository:a/b:pull"),
            ),
            (r#"bearer Realm=http://x/t , service="a \"b\", c""#, bearer("http://x/t", "a \"b\", c", "")),
            (r#"Basic realm="Registry Realm""#, Some(Challenge::Basic)),
            (r#"Basic realm="r", Bearer realm="https://t""#, bearer("https://t", "", "")),
            (r#"Negotiate, Basic"#, Some(Challenge::Basic)),
            (r#"Negotiate YII==, Bearer realm="https://t""#, bearer("https://t", "", "")),
            (r#"Bearer service="no realm""#, None),
            ("", None),
            (r#"Bearer realm="unfinished"#, bearer("unfinished", "", "")),
        ] {
            assert_eq!(parse(header), expected, "{header}");
        }
    }

    #[test]
    fn a_header_of_more_than_8_kib_is_ignored() {
        let of = |bytes: usize| format!("{:bytes$}", r#"Bearer realm="https://t""#);
        assert_eq!(parse(&of(8192)), bearer("https://t", "", ""));
        assert_eq!(parse(&of(8193)), None);
    }

    /// RFC 9110, section 11.6.1: several fields mean the same as one.
    #[test]
    fn all_fields_are_read() {
        let of_all = |fields: &[&str]| of(fields.iter().map(|field| field.as_bytes()));
        let token = r#"Bearer realm="https://t",service="s""#;
        for fields in [["Negotiate", token], [r#"Basic realm="x""#, token], [token, "Basic"]] {
            assert_eq!(of_all(&fields), bearer("https://t", "s", ""), "{fields:?}");
        }
        assert_eq!(of_all(&["Negotiate", "Basic"]), Some(Challenge::Basic));
        assert_eq!(of([&b"Basic realm=\"caf\xe9\""[..]].into_iter()), Some(Challenge::Basic));
        assert_eq!(of_all(&[]), None);
    }

    /// Any input is parsed without a panic and with bounded memory.
    #[test]
    fn malformed_challenges_cause_no_panic() {
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
