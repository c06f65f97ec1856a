//! Names of images in policies and in signatures, and which signed name is accepted for an image. The rules are those of
//! containers-policy.json(5), "signedIdentity".

use serde::{Deserialize, Serialize};

use super::json::{Members, Problem};

/// Maximum length in bytes of a name with tag and digest.
const NAME_BYTES_MAX: usize = 1024;

/// The normalised name of an image: a repository with its registry, and a tag, a digest, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Registry and path: `docker.io/library/busybox`.
    pub(crate) repository: String,
    pub(crate) tag: Option<String>,
    pub(crate) digest: Option<String>,
}

impl Name {
    /// Parses and normalises a name, as images and signatures have them: `busybox` is `docker.io/library/busybox`. A tag is not added.
    ///
    /// # Errors
    /// The text is not the name of an image.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{:?} is not the name of an image", text.chars().take(256).collect::<String>());
        if text.len() > NAME_BYTES_MAX {
            return Err(wrong());
        }
        let (rest, digest) = text.split_once('@').map_or((text, None), |(rest, digest)| (rest, Some(digest)));
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        let is_word = |word: &str, more: &[char]| {
            let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || more.contains(&letter);
            !word.is_empty() && word.chars().all(is_allowed)
        };
        let is_tag = |tag: &str| is_word(tag, &['.', '_', '-']) && !tag.starts_with(['.', '-']);
        let is_digest = |digest: &str| {
            digest.split_once(':').is_some_and(|(kind, hex)| is_word(kind, &[]) && is_word(hex, &[]))
        };
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if first.contains(['.', ':']) || first == "localhost" => (first, path),
            _ => ("docker.io", name),
        };
        let registry = if registry == "index.docker.io" { "docker.io" } else { registry };
        let is_path = path.split('/').all(|part| {
            is_word(part, &['.', '_', '-']) && !part.chars().any(|letter| letter.is_ascii_uppercase())
        });
        let is_registry = is_word(registry, &['.', ':', '-', '[', ']']);
        if !is_registry || !is_path || !tag.is_none_or(is_tag) || !digest.is_none_or(is_digest) {
            return Err(wrong());
        }
        let library = if registry == "docker.io" && !path.contains('/') { "library/" } else { "" };
        Ok(Self {
            repository: format!("{registry}/{library}{path}"),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }

    /// This name, with the tag `latest` if it has neither a tag nor a digest.
    #[must_use]
    pub fn or_latest(mut self) -> Self {
        if self.is_bare() {
            self.tag = Some("latest".to_owned());
        }
        self
    }

    /// Whether there is neither a tag nor a digest.
    pub(crate) fn is_bare(&self) -> bool {
        self.tag.is_none() && self.digest.is_none()
    }

    /// The repository with its registry: `docker.io/library/busybox`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The digest; `None` if there is none.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.repository)?;
        self.tag.iter().try_for_each(|tag| write!(out, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(out, "@{digest}"))
    }
}

/// The names in a signature that are accepted for an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Identity {
    /// The name of the image with its tag or digest.
    MatchExact,
    /// The name as for [`Self::MatchExact`]; for an image by digest any name of its repository that has a tag or digest.
    MatchRepoDigestOrExact,
    /// Any name of the image's repository.
    MatchRepository,
    /// This name.
    ExactReference(Name),
    /// Any name of this repository.
    ExactRepository(String),
    /// A name for [`Self::MatchRepoDigestOrExact`], after the first prefix of the image's name was replaced by the second.
    Remap(String, String),
}

impl Identity {
    /// Reads a `signedIdentity`.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut members = Members::parse(text)?;
        let kind = members.need_text("type")?;
        let identity = match kind.as_str() {
            "matchExact" => Self::MatchExact,
            "matchRepoDigestOrExact" => Self::MatchRepoDigestOrExact,
            "matchRepository" => Self::MatchRepository,
            "exactReference" => {
                let name = named(&mut members, "dockerReference")?;
                if name.is_bare() {
                    return Err(format!("dockerReference: {name} has neither a tag nor a digest"));
                }
                Self::ExactReference(name)
            }
            "exactRepository" => Self::ExactRepository(named(&mut members, "dockerRepository")?.repository),
            "remapIdentity" => {
                let mut prefix = |name: &str| {
                    let prefix = members.need_text(name)?;
                    let is_right =
                        !prefix.is_empty() && !prefix.ends_with('/') && !prefix.contains(['@', '*']);
                    is_right
                        .then_some(prefix)
                        .ok_or_else(|| format!("{name}: not a registry or the beginning of a name"))
                };
                Self::Remap(prefix("prefix")?, prefix("signedPrefix")?)
            }
            other => return Err(format!("type: {other:?} is not known")),
        };
        members.finish().map(|()| identity)
    }

    /// Whether `signed`, the name in a signature, is accepted for `image`.
    pub(crate) fn accepts(&self, image: &Name, signed: &str) -> bool {
        let Ok(signed) = Name::parse(signed) else { return false };
        match self {
            Self::MatchExact => !image.is_bare() && !signed.is_bare() && *image == signed,
            Self::MatchRepoDigestOrExact => is_same_or_by_digest(image, &signed),
            Self::MatchRepository => image.repository == signed.repository,
            Self::ExactReference(name) => !signed.is_bare() && *name == signed,
            Self::ExactRepository(repository) => *repository == signed.repository,
            Self::Remap(prefix, signed_prefix) => {
                let rest = image.repository.strip_prefix(prefix.as_str());
                match rest.filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                    None => is_same_or_by_digest(image, &signed),
                    Some(rest) => {
                        // Not normalised: a name without a registry names none.
                        let repository = format!("{signed_prefix}{rest}");
                        is_same_or_by_digest(&Name { repository, ..image.clone() }, &signed)
                    }
                }
            }
        }
    }
}

fn is_same_or_by_digest(image: &Name, signed: &Name) -> bool {
    match (&image.tag, &image.digest) {
        _ if signed.is_bare() => false,
        (Some(_), _) => image == signed,
        (None, Some(_)) => image.repository == signed.repository,
        (None, None) => false,
    }
}

fn named(members: &mut Members<'_>, member: &str) -> Result<Name, Problem> {
    Name::parse(&members.need_text(member)?).map_err(|problem| format!("{member}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalised() {
        for (text, expected) in [
            ("busybox", Some("docker.io/library/busybox")),
            ("index.docker.io/library/busybox:1", Some("docker.io/library/busybox:1")),
            ("reg:5000/a/b@sha256:ab", Some("reg:5000/a/b@sha256:ab")),
            ("reg.io/a:1@sha256:ab", Some("reg.io/a:1@sha256:ab")),
            ("me/app", Some("docker.io/me/app")),
            ("", None),
            ("reg.io/", None),
            ("reg.io/a:", None),
            ("reg.io/A", None),
            ("reg.io/a@x", None),
            ("reg.io//a", None),
            ("reg.io/a b", None),
        ] {
            assert_eq!(Name::parse(text).ok().map(|name| name.to_string()).as_deref(), expected, "{text}");
        }
    }

    /// The cases of the table in containers-policy.json(5).
    #[test]
    fn identities_accept_what_the_manual_says() {
        let digest = "reg.io/a/b@sha256:ab";
        let remap = r#"{"type":"remapIdentity","prefix":"reg.io","signedPrefix":"up.io/x"}"#;
        for (identity, image, signed, expected) in [
            (r#"{"type":"matchExact"}"#, "reg.io/a:1", "reg.io/a:1", true),
            (r#"{"type":"matchExact"}"#, "reg.io/a:1", "reg.io/a:2", false),
            (r#"{"type":"matchExact"}"#, "reg.io/a:1", "reg.io/a", false),
            (r#"{"type":"matchRepoDigestOrExact"}"#, "reg.io/a/b:1", "reg.io/a/b:1", true),
            (r#"{"type":"matchRepoDigestOrExact"}"#, "reg.io/a/b:1", "reg.io/a/b:2", false),
            (r#"{"type":"matchRepoDigestOrExact"}"#, digest, "reg.io/a/b:2", true),
            (r#"{"type":"matchRepoDigestOrExact"}"#, digest, "reg.io/a/b", false),
            (r#"{"type":"matchRepoDigestOrExact"}"#, digest, "reg.io/a/c:2", false),
            (r#"{"type":"matchRepository"}"#, "reg.io/a:1", "reg.io/a", true),
            (r#"{"type":"matchRepository"}"#, "reg.io/a:1", "reg.io/a/b", false),
            (r#"{"type":"exactReference","dockerReference":"busybox:1"}"#, "reg.io/a:1", "busybox:1", true),
            (r#"{"type":"exactReference","dockerReference":"busybox:1"}"#, "busybox:1", "busybox", false),
            (r#"{"type":"exactRepository","dockerRepository":"busybox"}"#, "reg.io/a:1", "busybox:9", true),
            (remap, "reg.io/a:1", "up.io/x/a:1", true),
            (remap, "reg.io/a:1", "reg.io/a:1", false),
            (remap, "reg.io.evil/a:1", "reg.io.evil/a:1", true),
            (r#"{"type":"matchRepository"}"#, "reg.io/a:1", "reg.io/A", false),
        ] {
            let image = Name::parse(image).unwrap();
            let accepts = Identity::read(identity).unwrap().accepts(&image, signed);
            assert_eq!(accepts, expected, "{identity} {image} {signed}");
        }
        for wrong in [
            r#"{"type":"x"}"#,
            r#"{"type":"matchExact","more":1}"#,
            r#"{"type":"exactReference","dockerReference":"busybox"}"#,
            r#"{"type":"remapIdentity","prefix":"a/","signedPrefix":"b"}"#,
            "{}",
        ] {
            assert!(Identity::read(wrong).is_err(), "{wrong}");
        }
    }
}
