//! Judges images by the rules of the node before they are unpacked: the policy of signatures ([`coracle_signature`]), and verifier
//! programs ([`programs`]). The signatures with which an image was accepted are stored beside it ([`kept`]), so that the image can be
//! judged again by another policy without its registry.
//!
//! | module | does |
//! |---|---|
//! | [`read`] | reads the policy and its keys, once for each change of the configuration |
//! | [`kept`] | the signatures of an image in the store |
//! | [`again`] | judges images of the store |
//! | [`programs`] | runs verifier programs |
//!
//! Guarantee: rules that cannot be applied refuse the image. How signatures are found is the task of `pull` and `import`.

pub(crate) mod again;
pub(crate) mod kept;
pub(crate) mod programs;
pub(crate) mod read;

use std::time::{SystemTime, UNIX_EPOCH};

use coracle_job::{Failure, FailureKind, ImagePolicy};
use coracle_json::Object;
use coracle_signature::{Clock, Document, Found, Image, Name, Needs, Policy};

use kept::Kept;
use programs::Programs;

/// A manifest or an index, with its digest.
pub(crate) struct Signed<'a> {
    pub(crate) digest: &'a str,
    pub(crate) bytes: &'a [u8],
}

/// The rules of a job.
pub(crate) struct Rules {
    policy: Option<Policy>,
    clock: Clock,
    /// Whether verifier programs have to accept an image, too.
    has_verifiers: bool,
}

impl Rules {
    /// The rules of a job.
    ///
    /// # Errors
    /// They cannot be read, so that no image can be accepted.
    pub(crate) fn of(policy: &ImagePolicy) -> Result<Self, Failure> {
        let signatures = policy.signatures.as_deref().map(Policy::from_bytes).transpose();
        let minimum = Some(&policy.minimum_time).filter(|day| !day.is_empty());
        let minimum =
            minimum.map(|day| coracle_signature::parse_time(&format!("{day}T00:00:00Z"))).transpose();
        let minimum = minimum.map_err(|why| refused(format!("image.policy.minimum_time: {why}")))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(Self {
            policy: signatures.map_err(refused)?,
            clock: Clock::new(now, minimum),
            has_verifiers: policy.verifiers.is_some(),
        })
    }

    /// The requests that are needed to judge an image of this name.
    pub(crate) fn needs(&self, name: &Name) -> Needs {
        self.policy.as_ref().map_or_else(Needs::default, |policy| policy.rule(name).needs())
    }

    /// Whether the policy accepts every image of this name.
    pub(crate) fn accepts_anything(&self, name: &Name) -> bool {
        self.policy.as_ref().is_none_or(|policy| policy.rule(name).accepts_anything())
    }

    /// The rule for an image as text for users: its place in the policy, and its requirements.
    pub(crate) fn explain(&self, name: &Name) -> Vec<String> {
        self.policy.as_ref().map_or_else(Vec::new, |policy| {
            let rule = policy.rule(name);
            std::iter::once(format!("rule {rule}")).chain(rule.explain()).collect()
        })
    }

    /// Judges an image by its signatures; returns one line for each requirement of the policy.
    ///
    /// # Errors
    /// The image is refused; the text has the rule, the key, and what was found.
    pub(crate) fn judge_signatures(
        &self,
        name: &Name,
        [top, member]: &[Signed<'_>; 2],
        found: &[Found],
    ) -> Result<Vec<String>, Failure> {
        let Some(policy) = self.policy.as_ref().filter(|_| !self.accepts_anything(name)) else {
            return Ok(Vec::new());
        };
        let types = [top, member].map(|signed| media_type(signed.bytes));
        let [top, member] = [(top, &types[0]), (member, &types[1])].map(|(signed, media_type)| Document {
            digest: signed.digest,
            media_type,
            bytes: signed.bytes,
        });
        let verdict = policy.rule(name).judge(&Image { name, top, member }, found, self.clock);
        verdict.map(|verdict| verdict.signed).map_err(|refusal| refused(refusal.to_string()))
    }

    /// Judges an image by its signatures, and by the programs if there are some; returns the signatures for the store. `pulse` is
    /// called while it waits.
    ///
    /// # Errors
    /// Those of [`Self::judge_signatures`]; a program refused the image.
    pub(crate) fn judge(
        &self,
        name: &Name,
        documents: &[Signed<'_>; 2],
        found: Vec<Found>,
        programs: Option<&Programs>,
        pulse: &dyn Fn(),
    ) -> Result<Kept, Failure> {
        let mut signed = self.judge_signatures(name, documents, &found)?;
        let [top, member] = documents;
        if self.has_verifiers {
            let absent =
                || Failure::new(FailureKind::Internal, "the process for verifier programs was not started");
            let media_type = media_type(top.bytes);
            let document = Document { digest: top.digest, media_type: &media_type, bytes: top.bytes };
            signed.extend(programs.ok_or_else(absent)?.judge(name, &document, pulse)?);
        }
        let [top, member] = [top, member].map(|document| document.digest.to_owned());
        Ok(Kept { name: name.to_string(), top, member, found, has_programs: self.has_verifiers, signed })
    }
}

/// The failure of an image that the rules refuse.
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
