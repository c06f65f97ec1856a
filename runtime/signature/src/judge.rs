//! Judges an image by the rule that applies to it: all requirements have to be met, each by at least one of the signatures that were
//! found for the digest that the requirement is about.
//!
//! | requirement | is about |
//! |---|---|
//! | `sigstoreSigned` | the manifest of this node's platform |
//! | `cosign`, `notation` | what the name refers to, an index or a manifest |
//!
//! Guarantee: whatever was found, an image is accepted only by signatures of keys and roots of its rule over its digest.

use std::collections::BTreeSet;
use std::fmt;

use super::image::{Document, Found, Image};
use super::key::sha256;
use super::policy::{KeyRule, Requirement};
use super::scope::Rule;
use super::simple::{SIMPLE_SIGNING, signature_tag};
use super::time::Clock;
use super::{bundle, notation, simple};

/// Maximum number of reasons in one text: a registry may have any number of signatures.
const REASONS_MAX: usize = 5;
/// Maximum length of one reason in bytes: it may repeat what a registry sent.
const REASON_BYTES_MAX: usize = 400;

/// The signatures by which an image is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// One line for each requirement: its type, key or root, digest, and where the signature was found.
    pub signed: Vec<String>,
    /// Indices of the signatures that are accepted.
    pub by: Vec<usize>,
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
        self.judge_each(|requirement| requirement.judge(image, found, clock))
    }

    /// Judges an image without a document that could be signed; `why` is the reason for that.
    ///
    /// # Errors
    /// A signature is required, or no image is accepted.
    pub fn judge_unsigned(&self, why: &str) -> Result<Verdict, Refusal> {
        self.judge_each(|requirement| match requirement.without_signatures() {
            Some(judged) => judged,
            None => Err(why.to_owned()),
        })
    }

    fn judge_each(&self, judge: impl Fn(&Requirement) -> Judged) -> Result<Verdict, Refusal> {
        let mut verdict = Verdict { signed: Vec::new(), by: Vec::new() };
        for (index, requirement) in self.requirements.iter().enumerate() {
            let refusal = |why| Refusal(format!("rule {self}[{index}], {}: {why}", requirement.kind()));
            let (line, by) = judge(requirement).map_err(refusal)?;
            verdict.signed.push(format!("{}{line}", requirement.kind()));
            verdict.by.extend(by);
        }
        // A policy is read with at least one requirement for each scope.
        if self.requirements.is_empty() {
            return Err(Refusal(format!("rule {self}: no requirements")));
        }
        verdict.by.sort_unstable();
        verdict.by.dedup();
        Ok(verdict)
    }
}

impl Found {
    /// Digest of what is signed and of the signature, without what anyone can change around them.
    pub fn signature_id(&self) -> [u8; 32] {
        let parts = match self.media_type.as_str() {
            SIMPLE_SIGNING => simple::signature(self),
            // Also among those of notation, where it is judged as a bundle, too.
            bundle if bundle.starts_with(bundle::BUNDLE_TYPE) => bundle::signature(self),
            _ if self.is_of_notation => notation::signature(self),
            _ => bundle::signature(self),
        };
        // What is malformed is none.
        let [signed, signature] = parts.unwrap_or_else(|| [self.content.clone(), Vec::new()]);
        let mut id = [0; 32];
        id.copy_from_slice(sha256(&[sha256(&signed).as_ref(), &signature].concat()).as_ref());
        id
    }
}

/// The end of the line about a requirement that is met, with the indices of the signatures that meet it; or the reason why it is not met.
type Judged = Result<(String, Vec<usize>), String>;

impl Requirement {
    /// The judgement of a requirement that does not depend on signatures.
    fn without_signatures(&self) -> Option<Judged> {
        match self {
            Self::AcceptAnything => Some(Ok((String::new(), Vec::new()))),
            Self::Reject => Some(Err("every image is refused".to_owned())),
            Self::Unsupported(_, why) => Some(Err(why.clone())),
            Self::Sigstore(_) | Self::Cosign(_) | Self::Notation(_) => None,
        }
    }

    fn judge(&self, image: &Image<'_>, found: &[Found], clock: Clock) -> Judged {
        if let Some(judged) = self.without_signatures() {
            return judged;
        }
        let signers = |names: Vec<&str>| names.join(" or ");
        let keys = |rule: &KeyRule| signers(rule.keys.iter().map(|key| key.name.as_str()).collect());
        match self {
            Self::AcceptAnything | Self::Reject | Self::Unsupported(..) => Err("not judged".to_owned()),
            Self::Sigstore(rule) => {
                let document = &image.member;
                let is_ours = |found: &Found| found.media_type == SIMPLE_SIGNING;
                accepted(document, found, is_ours, |found| {
                    simple::verify(rule, image.name, document.digest, found)
                })
                .map_err(|why| {
                    format!("a signature of {} is needed: {}", keys(rule), explained(&why, image, document))
                })
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
                let no_bundles = match rule.accepts_bundles() {
                    true => String::new(),
                    false => format!("; no bundle is looked for: it {}", bundle::NO_REPOSITORY),
                };
                accepted(document, found, is_ours, verify).map_err(|why| {
                    format!("a signature of {} is needed: {}{no_bundles}", keys(rule), why.text)
                })
            }
            Self::Notation(roots) => {
                let document = &image.top;
                let is_ours = |found: &Found| found.is_of_notation;
                accepted(document, found, is_ours, |found| notation::verify(roots, document, found, clock))
                    .map_err(|why| {
                        let names = signers(roots.iter().map(|root| root.name.as_str()).collect());
                        format!("a signature below {names} is needed: {}", why.text)
                    })
            }
        }
    }
}

/// The reason why no signature is accepted.
struct Unmet {
    text: String,
    /// Whether any signature of the required kind was found.
    is_there: bool,
}

/// The signatures of `document` that are accepted, with the text about the first one. All are verified: when keys are replaced, the
/// image may be judged by another one than the first. One that is there several times, with different content around it, counts once: anyone
/// can make such copies.
fn accepted(
    document: &Document<'_>,
    found: &[Found],
    is_ours: impl Fn(&Found) -> bool,
    verify: impl Fn(&Found) -> Result<String, String>,
) -> Result<(String, Vec<usize>), Unmet> {
    let of_document = || found.iter().enumerate().filter(|(_, found)| found.digest == document.digest);
    let (mut first, mut by, mut reasons, mut known) = (None, Vec::new(), Vec::new(), BTreeSet::new());
    for (index, found) in of_document().filter(|(_, found)| is_ours(found)) {
        match verify(found) {
            Ok(line) => {
                if known.insert(found.signature_id()) {
                    by.push(index);
                }
                first.get_or_insert_with(|| format!(": {line} signed {} ({})", document.digest, found.place));
            }
            Err(why) => reasons.push(shortened(format!("{}: {why}", found.place))),
        }
    }
    if let Some(line) = first {
        return Ok((line, by));
    }
    let count = reasons.len();
    let others = of_document().filter(|(_, found)| !is_ours(found)).count();
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

/// Cuts a reason that repeats what a registry sent.
pub fn shortened(mut reason: String) -> String {
    if reason.len() > REASON_BYTES_MAX {
        let end = (0..=REASON_BYTES_MAX).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or(0);
        reason.truncate(end);
        reason.push('…');
    }
    reason
}

/// Adds to the reason of `sigstoreSigned` which document has to be signed.
fn explained(why: &Unmet, image: &Image<'_>, document: &Document<'_>) -> String {
    match !why.is_there && image.top.digest != document.digest {
        true => format!(
            "{}; the manifest of this platform has to be signed (tag {}), not only the index: cosign sign --recursive",
            why.text,
            signature_tag(document.digest)
        ),
        false => why.text.clone(),
    }
}
