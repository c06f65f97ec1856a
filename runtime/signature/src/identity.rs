//! Which signed name is accepted for an image: the rules of containers-policy.json(5), "signedIdentity".

use coracle_reference::Name;
use serde::{Deserialize, Serialize};

use super::json::{Members, Problem};

/// The names in a signature that are accepted for an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Identity {
    /// The name of the image with its tag or digest.
    MatchExact,
    /// The name as for [`Self::MatchExact`]; for an image by digest any name of its repository that has a tag or digest.
    MatchRepoDigestOrExact,
    /// Any name of the image's repository.
    MatchRepository,
    /// Exactly this reference.
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
            "exactRepository" => Self::ExactRepository(named(&mut members, "dockerRepository")?.repository()),
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

    /// Whether `signed`, the name in a signature, is accepted for `image`. An image without a name has none that could be signed.
    pub(crate) fn accepts(&self, image: Option<&Name>, signed: &str) -> bool {
        let (Some(image), Ok(signed)) = (image, Name::parse(signed)) else { return false };
        match self {
            Self::MatchExact => !signed.is_bare() && *image == signed,
            Self::MatchRepoDigestOrExact => is_same_or_by_digest(&image.repository(), image, &signed),
            Self::MatchRepository => image.repository() == signed.repository(),
            Self::ExactReference(name) => !signed.is_bare() && *name == signed,
            Self::ExactRepository(repository) => *repository == signed.repository(),
            Self::Remap(prefix, signed_prefix) => {
                let repository = image.repository();
                let rest = repository.strip_prefix(prefix.as_str());
                match rest.filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                    None => is_same_or_by_digest(&repository, image, &signed),
                    // Not normalised: a prefix without a registry names none.
                    Some(rest) => is_same_or_by_digest(&format!("{signed_prefix}{rest}"), image, &signed),
                }
            }
        }
    }
}

/// Whether a signed name is that of `repository` with the tag and digest of `image`; for an image by digest any tag or digest.
fn is_same_or_by_digest(repository: &str, image: &Name, signed: &Name) -> bool {
    let is_same = (image.tag(), image.digest()) == (signed.tag(), signed.digest());
    let is_by_digest = image.tag().is_none() && image.digest().is_some();
    !signed.is_bare() && repository == signed.repository() && (is_same || is_by_digest)
}

fn named(members: &mut Members<'_>, member: &str) -> Result<Name, Problem> {
    Name::parse(&members.need_text(member)?).map_err(|problem| format!("{member}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cases of the table in containers-policy.json(5).
    #[test]
    fn identities_accept_names_as_containers_policy_json_says() {
        let digest = &format!("reg.io/a/b@sha256:{}", "ab".repeat(32));
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
            // What cosign writes for an image of the default registry.
            (r#"{"type":"matchRepository"}"#, "library/x:1", "index.docker.io/library/x", true),
        ] {
            let image = Name::parse(image).unwrap();
            let accepts = Identity::read(identity).unwrap().accepts(Some(&image), signed);
            assert!(!Identity::read(identity).unwrap().accepts(None, signed), "an image without a name");
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
