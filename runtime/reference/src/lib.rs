//! Names of images: the only parser of them, for the daemon, for workers and for policies of signatures. Pure. Rules: CRI 2.27; the
//! grammar is that of the distribution project's reference package, which the kubelet uses: every name that it accepts must be accepted
//! here with the same meaning.
//!
//! A [`Name`] has what was written; a [`Reference`] is what a client means by it, with exactly one of tag and digest:
//!
//! | written | reference |
//! |---|---|
//! | `busybox` | `docker.io/library/busybox:latest` |
//! | `me/app:1` | `docker.io/me/app:1` |
//! | `localhost/app`, `reg:5000/app` | `localhost/app:latest`, `reg:5000/app:latest` |
//! | `index.docker.io/me/app` | `docker.io/me/app:latest` |
//! | `app:1@sha256:…` | `docker.io/library/app@sha256:…`: the digest has precedence |
#![forbid(unsafe_code)]

use std::fmt;

use serde::{Deserialize, Serialize};

/// Default registry.
const DEFAULT_REGISTRY: &str = "docker.io";
/// An old name of the default registry, found in old manifests.
const DEFAULT_REGISTRY_OLD: &str = "index.docker.io";
/// Namespace of names with one component on the default registry.
const DEFAULT_NAMESPACE: &str = "library";
/// Tag of references without tag and digest.
const DEFAULT_TAG: &str = "latest";

/// Maximum length in bytes of registry and path together (distribution's grammar).
const NAME_BYTES_MAX: usize = 255;
const TAG_BYTES_MAX: usize = 128;

/// A name as it was written, with its registry: a tag, a digest, both or neither. Only [`Name::parse`] creates it, so all parts are valid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    registry: String,
    path: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// A normalised reference. Only [`Reference::parse`] creates it, so all parts are valid.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    version: Version,
}

/// The version of a repository's image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// A tag; a registry can assign it to another image at any time.
    Tag(String),
    /// A digest `sha256:HEX` or `sha512:HEX`, which identifies the content.
    Digest(String),
}

/// An invalid reference. The text of the error is that of other runtimes, which users know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    why: &'static str,
}

impl fmt::Display for Invalid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "invalid reference format: {}", self.why)
    }
}

impl Name {
    /// Parses a name: `busybox` is `docker.io/library/busybox`. No tag is added.
    ///
    /// # Errors
    /// The text is not a valid name of an image.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (text, None),
        };
        // A colon after the last slash starts a tag; an earlier one belongs to a registry's port.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(Invalid { why: "the tag is empty, too long, or has an invalid character" });
        }
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err(Invalid { why: "the digest is not sha256:HEX or sha512:HEX" });
        }
        let (registry, path) = split_name(name)?;
        Ok(Self { registry, path, tag: tag.map(str::to_owned), digest: digest.map(str::to_owned) })
    }

    /// Registry host, with the port if there is one: `docker.io`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository with its registry: `docker.io/library/busybox`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.registry, self.path)
    }

    /// The tag; `None` if there is none.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest; `None` if there is none.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Whether there is neither a tag nor a digest.
    pub fn is_bare(&self) -> bool {
        self.tag.is_none() && self.digest.is_none()
    }
}

impl fmt::Display for Name {
    /// Formats the name, which is parsed to the same value.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.registry, self.path)?;
        self.tag.iter().try_for_each(|tag| write!(out, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(out, "@{digest}"))
    }
}

impl From<Reference> for Name {
    fn from(reference: Reference) -> Self {
        let Reference { registry, repository: path, version } = reference;
        match version {
            Version::Tag(tag) => Self { registry, path, tag: Some(tag), digest: None },
            Version::Digest(digest) => Self { registry, path, tag: None, digest: Some(digest) },
        }
    }
}

impl From<Name> for Reference {
    /// The tag of a name without tag and digest is `latest`, and a digest has precedence over a tag.
    fn from(name: Name) -> Self {
        let Name { registry, path: repository, tag, digest } = name;
        let tag = || tag.unwrap_or_else(|| DEFAULT_TAG.into());
        let version = digest.map_or_else(|| Version::Tag(tag()), Version::Digest);
        Self { registry, repository, version }
    }
}

impl Reference {
    /// Parses and normalises a reference.
    ///
    /// # Errors
    /// The text is not a valid name of an image.
    pub fn parse(text: &str) -> Result<Reference, Invalid> {
        Name::parse(text).map(Self::from)
    }

    /// Registry host, with the port if there is one: `docker.io`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Repository path: `library/busybox`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Whether the reference has a digest and no tag.
    pub fn has_digest(&self) -> bool {
        matches!(self.version, Version::Digest(_))
    }

    /// The tag or digest of the reference.
    pub fn version(&self) -> &Version {
        &self.version
    }
}

impl fmt::Display for Reference {
    /// Formats the normal form, which is parsed to the same value.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Version::Tag(tag) => write!(out, "{}/{}:{tag}", self.registry, self.repository),
            Version::Digest(digest) => write!(out, "{}/{}@{digest}", self.registry, self.repository),
        }
    }
}

/// Whether `text` is `sha256:` and 64, or `sha512:` and 128, lower-case hex digits.
pub fn is_digest(text: &str) -> bool {
    match text.split_once(':') {
        Some(("sha256", hex)) => hex.len() == 64 && is_hex(hex),
        Some(("sha512", hex)) => hex.len() == 128 && is_hex(hex),
        _ => false,
    }
}

/// Whether `text` is lower-case hex digits only.
pub fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn split_name(name: &str) -> Result<(String, String), Invalid> {
    let (registry, path) = match name.split_once('/') {
        Some((first, path)) if first.contains(['.', ':']) || first == "localhost" => (first, path),
        _ => (DEFAULT_REGISTRY, name),
    };
    let registry = if registry == DEFAULT_REGISTRY_OLD { DEFAULT_REGISTRY } else { registry };
    if !is_registry(registry) {
        return Err(Invalid { why: "the registry is not a host name with an optional port" });
    }
    // It would be ambiguous with an image ID.
    if path.len() == 64 && is_hex(path) {
        return Err(Invalid { why: "64 hex digits are an image ID, not a name" });
    }
    if !path.split('/').all(is_path_component) {
        return Err(Invalid {
            why: "a path has lower-case letters and digits, with single separators between",
        });
    }
    let is_short = registry == DEFAULT_REGISTRY && !path.contains('/');
    let repository = if is_short { format!("{DEFAULT_NAMESPACE}/{path}") } else { path.into() };
    if registry.len() + 1 + repository.len() > NAME_BYTES_MAX {
        return Err(Invalid { why: "a name has at most 255 characters" });
    }
    Ok((registry.into(), repository))
}

/// Whether the text is a registry host: `host`, `host:port`, `[v6]` or `[v6]:port`.
fn is_registry(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            (None, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').unwrap_or("")) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(text), None),
        },
    };
    let is_port =
        |port: &str| !port.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    host.is_none_or(|host| host.split('.').all(is_host_component)) && port.is_none_or(is_port)
}

fn is_host_component(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !text.is_empty() && text.bytes().all(is_inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Whether the text consists of letters and digits, separated by `.`, `_`, `__` or any number of `-`.
fn is_path_component(text: &str) -> bool {
    let is_letter = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends_well = bytes.first().is_some_and(is_letter) && bytes.last().is_some_and(is_letter);
    ends_well
        && bytes.split(is_letter).all(|separator| {
            matches!(separator, b"" | b"." | b"_" | b"__") || separator.iter().all(|byte| *byte == b'-')
        })
}

fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= TAG_BYTES_MAX
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|byte| is_word(byte) || byte == b'.' || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::{Name, Reference, Version};

    const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn references_are_normalised() {
        let digest = format!("sha256:{HEX}");
        let cases = [
            ("busybox", "docker.io/library/busybox:latest".into()),
            ("busybox:1.36", "docker.io/library/busybox:1.36".into()),
            ("me/app", "docker.io/me/app:latest".into()),
            ("docker.io/busybox", "docker.io/library/busybox:latest".into()),
            ("index.docker.io/library/busybox", "docker.io/library/busybox:latest".into()),
            ("localhost/app:1", "localhost/app:1".into()),
            ("localhost:5000/app", "localhost:5000/app:latest".into()),
            ("reg:5000/a/b/c:x", "reg:5000/a/b/c:x".into()),
            ("reg.example/a__b-c.d---e:V_1.x-2", "reg.example/a__b-c.d---e:V_1.x-2".into()),
            ("[::1]:5000/app", "[::1]:5000/app:latest".into()),
            ("[fd00::1]/app", "[fd00::1]/app:latest".into()),
            ("reg.example", "docker.io/library/reg.example:latest".into()),
            ("REG.example/app", "REG.example/app:latest".into()),
            (&format!("app@{digest}"), format!("docker.io/library/app@{digest}")),
            (&format!("app:1@{digest}"), format!("docker.io/library/app@{digest}")),
            (&format!("reg:1/app:1@{digest}"), format!("reg:1/app@{digest}")),
            (&format!("app@sha512:{HEX}{HEX}"), format!("docker.io/library/app@sha512:{HEX}{HEX}")),
            ("sha256:abc", "docker.io/library/sha256:abc".into()),
        ];
        for (text, expected) in cases {
            assert_eq!(Reference::parse(text).map(|r| r.to_string()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_references_are_refused_with_the_usual_text() {
        let long = "a".repeat(256);
        let tag = format!("a:{}", "t".repeat(129));
        let upper = format!("a@sha256:{}", HEX.to_uppercase());
        let cases = [
            "",
            ":",
            "/",
            "@",
            "a:",
            "a/",
            "/a",
            "a//b",
            "Foo",
            "foo/Bar",
            "reg.example/Foo",
            "a b",
            "a:t g",
            "a:-x",
            "a:.x",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a._b",
            "a@",
            "a@sha256:abc",
            "a@md5:00",
            "a@b@c",
            &upper,
            HEX,
            "reg.example/",
            &long,
            &tag,
            "-reg.example/a",
            "reg.example:/a",
            "reg.example:x/a",
            "reg.example:123456/a",
            "[::1/a",
            "[zz]/a",
            "[::1]x/a",
            "ä",
            "a\0",
            "a\n",
            "http://reg/a",
            "../a",
            "reg.example/../a",
        ];
        for text in cases {
            let error = Reference::parse(text).expect_err(text);
            assert!(error.to_string().starts_with("invalid reference format"), "{text}");
        }
    }

    #[test]
    fn a_digest_has_precedence_over_a_tag() {
        let reference = Reference::parse(&format!("reg:5/app:1@sha256:{HEX}")).unwrap();
        assert_eq!(reference.registry(), "reg:5");
        assert_eq!(reference.repository(), "app");
        assert_eq!(reference.version(), &Version::Digest(format!("sha256:{HEX}")));
    }

    #[test]
    fn a_name_keeps_what_was_written() {
        let digest = format!("sha256:{HEX}");
        for (text, expected) in [
            ("busybox", "docker.io/library/busybox".to_owned()),
            ("index.docker.io/library/busybox:1", "docker.io/library/busybox:1".to_owned()),
            (&format!("reg:5000/a/b:1@{digest}"), format!("reg:5000/a/b:1@{digest}")),
            (&format!("me/app@{digest}"), format!("docker.io/me/app@{digest}")),
        ] {
            let name = Name::parse(text).unwrap();
            assert_eq!(name.to_string(), expected);
            assert_eq!(Name::parse(&expected), Ok(name.clone()));
            assert_eq!(name.is_bare(), name.tag().or(name.digest()).is_none());
        }
        let reference = Reference::parse("reg.io/a:1").unwrap();
        assert_eq!(Reference::from(Name::from(reference.clone())), reference);
    }

    /// The result of parsing any input is normalised, and parsing the normal form again does not change it.
    #[test]
    fn parsing_is_idempotent_and_never_panics() {
        let pieces = [
            "a",
            "busybox",
            "reg.example",
            "localhost",
            ":",
            "/",
            "@",
            ".",
            "_",
            "__",
            "-",
            "5000",
            "sha256:",
            HEX,
            "A",
            "é",
            "[::1]",
            " ",
            "latest",
            "docker.io",
            "index.docker.io",
            "library",
        ];
        let mut seed = 0x2545_f491_4f6c_dd1d_u64;
        let mut parsed = 0;
        for _ in 0..50_000 {
            let mut text = String::new();
            for _ in 0..next(&mut seed) % 9 {
                text.push_str(pieces[next(&mut seed) as usize % pieces.len()]);
            }
            let Ok(reference) = Reference::parse(&text) else { continue };
            parsed += 1;
            let normal = reference.to_string();
            assert_eq!(Reference::parse(&normal).as_ref(), Ok(&reference), "{text:?} -> {normal:?}");
            assert!(normal.is_ascii() && !normal.contains("//"), "{text:?} -> {normal:?}");
            assert!(reference.repository().split('/').all(|part| part != ".."), "{text:?} -> {normal:?}");
        }
        assert!(parsed > 1000, "only {parsed} of the inputs were references");
    }

    /// The next pseudo-random number (xorshift64); each test run has the same numbers.
    fn next(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }
}
