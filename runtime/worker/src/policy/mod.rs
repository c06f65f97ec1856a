//! Judges images by the policy of signatures before they are unpacked ([`coracle_signature`]). The signatures with which an image was
//! accepted are stored beside it ([`kept`]), so that the image can be judged again by another policy without its registry.
//!
//! | module | does |
//! |---|---|
//! | [`read`] | reads the policy and its keys, once for each change of the configuration |
//! | [`collect`] | finds signatures at a registry or in an archive |
//! | [`kept`] | the signatures of an image in the store |
//! | [`again`] | judges images of the store |
//!
//! Guarantee: a policy that cannot be applied refuses the image.

pub(crate) mod again;
pub(crate) mod collect;
pub(crate) mod kept;
pub(crate) mod read;

use std::time::{SystemTime, UNIX_EPOCH};

use coracle_job::{Failure, FailureKind, ImagePolicy};
use coracle_json::Object;
use coracle_reference::Name;
use coracle_signature::{Clock, Document, Image, Needs, Policy, Verdict};

use collect::Collected;
use kept::Kept;

/// A manifest or an index, with its verified digest.
#[derive(Clone, Copy)]
pub(crate) struct Signed<'a> {
    pub(crate) digest: &'a str,
    pub(crate) bytes: &'a [u8],
}

/// The documents of an image that may be signed.
#[derive(Clone, Copy)]
pub(crate) struct Documents<'a> {
    /// The document to which the name refers: an index or a manifest.
    pub(crate) top: Signed<'a>,
    /// The manifest of this node's platform.
    pub(crate) member: Signed<'a>,
}

impl<'a> Documents<'a> {
    /// The first and the last of the documents that lead to an image; `None` if there are none.
    pub(crate) fn of(all: &'a [(String, Vec<u8>)]) -> Option<Self> {
        let [top, member] = [all.first()?, all.last()?].map(|(digest, bytes)| Signed { digest, bytes });
        Some(Self { top, member })
    }
}

/// The policy of a job.
pub(crate) struct Judge {
    policy: Policy,
    clock: Clock,
}

impl Judge {
    /// The policy of a job.
    ///
    /// # Errors
    /// It cannot be read, so that no image can be accepted.
    pub(crate) fn of(policy: &ImagePolicy) -> Result<Self, Failure> {
        let minimum = Some(&policy.minimum_time).filter(|day| !day.is_empty());
        let minimum =
            minimum.map(|day| coracle_signature::parse_time(&format!("{day}T00:00:00Z"))).transpose();
        let minimum = minimum.map_err(|why| refused(format!("image.policy.minimum_time: {why}")))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(Self {
            policy: Policy::from_bytes(&policy.bytes).map_err(refused)?,
            clock: Clock::new(now, minimum),
        })
    }

    /// The requests that are needed to judge an image of this name.
    pub(crate) fn needs(&self, name: Option<&Name>) -> Needs {
        self.policy.rule(name).needs()
    }

    /// The rule for an image as text for users: its place in the policy, and its requirements.
    pub(crate) fn explain(&self, name: &Name) -> Vec<String> {
        let rule = self.policy.rule(Some(name));
        std::iter::once(format!("rule {rule}")).chain(rule.explain()).collect()
    }

    /// Judges an image by its signatures.
    ///
    /// # Errors
    /// The image is refused; the text has the rule, the key, what was found, and what could not be read.
    pub(crate) fn judge(
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
    pub(crate) fn judge_unsigned(&self, name: Option<&Name>, why: &str) -> Result<Verdict, Failure> {
        self.policy.rule(name).judge_unsigned(why).map_err(|refusal| refused(refusal.to_string()))
    }
}

/// An image that the policy accepts.
#[derive(Debug, Default)]
pub(crate) struct Accepted {
    /// One line for each requirement that is met, as text for users.
    pub(crate) signed: Vec<String>,
    /// The signatures for the store; `None`: none was needed.
    pub(crate) kept: Option<Kept>,
    /// Names beside those that were asked for that the policy does not accept: they are not published.
    pub(crate) refused: Vec<String>,
}

impl Accepted {
    /// Notes the verdict about one name.
    pub(crate) fn add(&mut self, documents: &Documents<'_>, collected: &Collected, verdict: &Verdict) {
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

/// The media type that a document states; those that state none are of OCI.
fn media_type(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let Ok(document) = Object::parse(&text) else { return String::new() };
    let stated = document.text("mediaType").unwrap_or_default();
    match (stated.is_empty(), document.list("manifests")) {
        (false, _) => stated,
        (true, Ok(Some(_))) => "application/vnd.oci.image.index.v1+json".to_owned(),
        (true, _) => "application/vnd.oci.image.manifest.v1+json".to_owned(),
    }
}
