//! Judges images by the policy of signatures before they are unpacked ([`coracle_signature`]), and judges those of the store again, by another
//! policy and without their registries, by the signatures with which they were accepted. The crate reads no file and makes no
//! request: its callers read documents for it, and say what time it is.
//!
//! | module | does |
//! |---|---|
//! | `collect` | finds signatures at a place: an endpoint of a registry, or an archive |
//! | `layout` | an OCI layout as such a place |
//! | `kept` | the form in which the signatures of an image are stored |
//! | `stored` | judges an image of the store |
//!
//! Guarantee: a policy that cannot be applied refuses the image.
#![forbid(unsafe_code)]

mod collect;
mod kept;
mod layout;
mod stored;

use coracle_job::{Failure, FailureKind, ImagePolicy};
use coracle_json::Object;
use coracle_manifest::{INDEX_TYPE, MANIFEST};
use coracle_reference::Name;
use coracle_signature::{Clock, Document, Image, Needs, Policy, Verdict};

pub use collect::{Collected, Place, Referrer, collect};
pub use kept::{FILE_BYTES_MAX, Kept, decode, merge};
pub use layout::{Attachments, Layout, is_attachment};
pub use stored::judge_stored;

/// A manifest or an index, with its verified digest.
#[derive(Clone, Copy)]
pub struct Signed<'a> {
    /// Digest `sha256:…` of the bytes.
    pub digest: &'a str,
    /// Content in bytes.
    pub bytes: &'a [u8],
}

/// The documents of an image that may be signed.
#[derive(Clone, Copy)]
pub struct Documents<'a> {
    /// The document to which the name refers: an index or a manifest.
    pub top: Signed<'a>,
    /// The manifest of this node's platform.
    pub member: Signed<'a>,
}

impl<'a> Documents<'a> {
    /// The first and the last of the documents that lead to an image; `None` if there are none.
    pub fn of(all: &'a [(String, Vec<u8>)]) -> Option<Self> {
        let [top, member] = [all.first()?, all.last()?].map(|(digest, bytes)| Signed { digest, bytes });
        Some(Self { top, member })
    }
}

/// The policy of a job.
pub struct Judge {
    policy: Policy,
    clock: Clock,
}

impl Judge {
    /// Reads the policy of a job; `now` is the node's time in seconds since 1970.
    ///
    /// # Errors
    /// It cannot be read, so that no image can be accepted.
    pub fn new(policy: &ImagePolicy, now: u64) -> Result<Self, Failure> {
        let minimum = Some(&policy.minimum_time).filter(|day| !day.is_empty());
        let minimum =
            minimum.map(|day| coracle_signature::parse_time(&format!("{day}T00:00:00Z"))).transpose();
        let minimum = minimum.map_err(|why| refused(format!("image.policy.minimum_time: {why}")))?;
        Ok(Self {
            policy: Policy::from_bytes(&policy.bytes).map_err(refused)?,
            clock: Clock::new(now, minimum),
        })
    }

    /// The requests that are needed to judge an image of this name.
    pub fn needs(&self, name: Option<&Name>) -> Needs {
        self.policy.rule(name).needs()
    }

    /// The rule for an image as text for users: its place in the policy, and its requirements.
    pub fn explain(&self, name: &Name) -> Vec<String> {
        let rule = self.policy.rule(Some(name));
        std::iter::once(format!("rule {rule}")).chain(rule.explain()).collect()
    }

    /// Judges an image by its signatures.
    ///
    /// # Errors
    /// The image is refused; the text has the rule, the key, what was found, and what could not be read.
    pub fn judge(
        &self,
        name: Option<&Name>,
        documents: &Documents<'_>,
        collected: &Collected,
    ) -> Result<Verdict, Failure> {
        let types = [documents.top, documents.member].map(|signed| media_type(signed.bytes));
        let [top, member] = [(documents.top, &types[0]), (documents.member, &types[1])]
            .map(|(Signed { digest, bytes }, media_type)| Document { digest, media_type, bytes });
        let verdict =
            self.policy.rule(name).judge(&Image { name, top, member }, &collected.found, self.clock);
        verdict.map_err(|refusal| refused(format!("{refusal}{}", collected.problems())))
    }

    /// Judges an image without a document that could be signed; `why` is the reason for that.
    ///
    /// # Errors
    /// The policy requires a signature, or refuses the image in any case.
    pub fn judge_unsigned(&self, name: Option<&Name>, why: &str) -> Result<Verdict, Failure> {
        self.policy.rule(name).judge_unsigned(why).map_err(|refusal| refused(refusal.to_string()))
    }
}

/// An image that the policy accepts.
#[derive(Debug, Default)]
pub struct Accepted {
    /// One line for each requirement that is met, as text for users.
    pub signed: Vec<String>,
    /// The signatures for the store; `None`: none was needed.
    pub kept: Option<Kept>,
    /// Names beside those that were asked for that the policy does not accept: they are not published.
    pub refused: Vec<String>,
}

impl Accepted {
    /// Adds the verdict about one name.
    pub fn add(&mut self, documents: &Documents<'_>, collected: &Collected, verdict: &Verdict) {
        let found: Vec<_> =
            verdict.by.iter().filter_map(|index| collected.found.get(*index).cloned()).collect();
        if found.is_empty() {
            return;
        }
        let [top, member] = [documents.top, documents.member].map(|document| document.digest.to_owned());
        self.kept.get_or_insert_with(|| Kept { top, member, found: Vec::new() }).add(found);
    }
}

/// The failure of an image that the policy refuses.
pub(crate) fn refused(why: String) -> Failure {
    Failure::new(FailureKind::Signature, why)
}

/// The media type that a document states; without one it is an OCI document.
fn media_type(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let Ok(document) = Object::parse(&text) else { return String::new() };
    let stated = document.text("mediaType").unwrap_or_default();
    match (stated.is_empty(), document.list("manifests")) {
        (false, _) => stated,
        (true, Ok(Some(_))) => INDEX_TYPE.to_owned(),
        (true, _) => MANIFEST.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_before_the_minimum_time_of_the_policy_is_that_time() {
        let text = r#"{"default":[{"type":"reject"}]}"#;
        let parsed = coracle_signature::parse(text, &|path| Err(path.to_owned())).unwrap();
        let clock = |day: &str, now| {
            let policy = ImagePolicy { bytes: parsed.to_bytes().into(), minimum_time: day.to_owned() };
            Judge::new(&policy, now).map(|judge| judge.clock).map_err(|failure| failure.message)
        };
        let day = coracle_signature::parse_time("2026-01-31T00:00:00Z").unwrap();
        assert_eq!(clock("2026-01-31", 5), Ok(Clock::new(day, None)));
        assert_eq!(clock("2026-01-31", day + 5), Ok(Clock::new(day + 5, None)));
        assert_eq!(clock("", 5), Ok(Clock::new(5, None)));
        assert!(clock("2026-13-31", 5).unwrap_err().contains("image.policy.minimum_time"));
    }
}
