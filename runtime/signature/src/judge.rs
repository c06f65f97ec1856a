//! Judges an image by the rule that applies to it: all requirements have to be met, each by at least one of the signatures that were
//! found for the digest that the requirement is about.
//!
//! | requirement | is about |
//! |---|---|
//! | `sigstoreSigned` | the manifest of this node's platform, as for CRI-O, which selects it before it judges |
//! | `cosign`, `notation` | what the name refers to, an index or a manifest, as for `cosign verify` and `notation verify` |

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::policy::Requirement;
use super::reference::Name;
use super::scope::Rule;
use super::simple::{SIMPLE_SIGNING, signature_tag};
use super::time::Clock;
use super::{bundle, notation, simple};

/// Maximum number of reasons in one text: a registry may have any number of signatures.
const REASONS_MAX: usize = 5;

/// A manifest or an index.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    /// Digest `sha256:…` of the bytes, which the caller verified.
    pub digest: &'a str,
    /// The media type that the document or its registry states; empty: none.
    pub media_type: &'a str,
    /// The content.
    pub bytes: &'a [u8],
}

/// The image to judge.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// The name by which the image is pulled.
    pub name: &'a Name,
    /// The document to which the name refers.
    pub top: Document<'a>,
    /// The manifest of this node's platform; equal to `top` if that is no index.
    pub member: Document<'a>,
}

/// A signature that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The digest for which the signature was found.
    pub digest: String,
    /// The place where it was found, as text for users.
    pub place: String,
    /// Media type of the content.
    pub media_type: String,
    /// Annotations of the content's descriptor.
    pub annotations: BTreeMap<String, String>,
    /// The content.
    pub content: Vec<u8>,
}

/// The signatures by which an image is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// One line for each requirement: its type, key or root, digest, and where the signature was found.
    pub signed: Vec<String>,
}

/// The reason why an image is refused: the rule, the key, and what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Rule<'_> {
    /// Judges an image by the signatures that were found.
    ///
    /// # Errors
    /// A requirement is not met.
    pub fn judge(&self, image: &Image<'_>, found: &[Found], clock: Clock) -> Result<Verdict, Refusal> {
        let mut signed = Vec::new();
        for (index, requirement) in self.requirements.iter().enumerate() {
            let met = requirement.judge(image, found, clock);
            let line =
                met.map_err(|why| Refusal(format!("rule {self}[{index}], {}: {why}", requirement.kind())))?;
            signed.push(line);
        }
        // A policy is read with at least one requirement for each scope.
        if self.requirements.is_empty() {
            return Err(Refusal(format!("rule {self}: no requirements")));
        }
        Ok(Verdict { signed })
    }
}

impl Requirement {
    fn judge(&self, image: &Image<'_>, found: &[Found], clock: Clock) -> Result<String, String> {
        let kind = self.kind();
        let keys = |rule: &super::policy::KeyRule| {
            let names: Vec<&str> = rule.keys.iter().map(|key| key.name.as_str()).collect();
            format!("a signature of {} is needed", names.join(" or "))
        };
        match self {
            Self::AcceptAnything => Ok(kind.to_owned()),
            Self::Reject => Err("every image is refused".to_owned()),
            Self::Unsupported(_, why) => Err(why.clone()),
            Self::Sigstore(rule) => {
                let document = &image.member;
                let is_ours = |found: &Found| found.media_type == SIMPLE_SIGNING;
                one(document, found, is_ours, |found| {
                    simple::verify(rule, image.name, document.digest, found)
                })
                .map(|line| format!("{kind}: {line}"))
                .map_err(|why| format!("{}: {}", keys(rule), explained(&why, image, document)))
            }
            Self::Cosign(rule) => {
                let document = &image.top;
                let is_ours = |found: &Found| {
                    found.media_type == SIMPLE_SIGNING || found.media_type.starts_with(bundle::BUNDLE_TYPE)
                };
                let verify = |found: &Found| match found.media_type == SIMPLE_SIGNING {
                    true => simple::verify(rule, image.name, document.digest, found),
                    false => {
                        bundle::verify(rule, document, found).map_err(|problem| format!("bundle: {problem}"))
                    }
                };
                one(document, found, is_ours, verify)
                    .map(|line| format!("{kind}: {line}"))
                    .map_err(|why| format!("{}: {}", keys(rule), why.text))
            }
            Self::Notation(roots) => {
                let document = &image.top;
                let is_ours = |found: &Found| found.place.starts_with(NOTATION_PLACE);
                let names: Vec<&str> = roots.iter().map(|root| root.name.as_str()).collect();
                one(document, found, is_ours, |found| notation::verify(roots, document, found, clock))
                    .map(|line| format!("{kind}: {line}"))
                    .map_err(|why| {
                        format!("a signature below {} is needed: {}", names.join(" or "), why.text)
                    })
            }
        }
    }
}

/// Beginning of [`Found::place`] of an envelope of notation, whose media type other programs use, too.
pub const NOTATION_PLACE: &str = "notation's";

/// The reason why no signature is accepted.
struct Unmet {
    text: String,
    /// Whether there was any signature of the right kind.
    is_there: bool,
}

/// The first of the signatures of `document` that is accepted.
fn one(
    document: &Document<'_>,
    found: &[Found],
    is_ours: impl Fn(&Found) -> bool,
    verify: impl Fn(&Found) -> Result<String, String>,
) -> Result<String, Unmet> {
    let of_document = || found.iter().filter(|found| found.digest == document.digest);
    let mut reasons = Vec::new();
    for found in of_document().filter(|found| is_ours(found)) {
        match verify(found) {
            Ok(line) => return Ok(format!("{line} signed {} ({})", document.digest, found.place)),
            Err(why) => reasons.push(format!("{}: {why}", found.place)),
        }
    }
    let count = reasons.len();
    let others = of_document().filter(|found| !is_ours(found)).count();
    let text = match (count, others) {
        (0, 0) => format!("{} has no signature", document.digest),
        (0, others) => format!("{} has no such signature, but {others} of other types", document.digest),
        (count, _) => {
            reasons.truncate(REASONS_MAX);
            let more = if count > REASONS_MAX {
                format!("; and {} more", count - REASONS_MAX)
            } else {
                String::new()
            };
            format!("{}{more}", reasons.join("; "))
        }
    };
    Err(Unmet { text, is_there: count > 0 })
}

/// Adds to the reason of `sigstoreSigned` what is different from cosign's own verification.
fn explained(why: &Unmet, image: &Image<'_>, document: &Document<'_>) -> String {
    match !why.is_there && image.top.digest != document.digest {
        true => format!(
            "{}; as with CRI-O the manifest of this platform has to be signed (tag {}), not the index: cosign sign --recursive",
            why.text,
            signature_tag(document.digest)
        ),
        false => why.text.clone(),
    }
}
