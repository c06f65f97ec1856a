//! Finds the signatures of an image at its registry and the mirrors of that, if the rules of the node need them: below the tag
//! `sha256-….sig` of a digest, and as its referrers (OCI distribution specification 1.1), by the API or by the tag that stands for it.
//! Nothing else is requested, and nothing from anywhere else. Number and size are limited, because a registry may attach anything.
//!
//! A registry that has no signature is not an error here: the rules decide. One that does not answer is, so that an image is refused
//! as unsigned only if its registry said so.

use std::collections::BTreeMap;

use coracle_job::{Failure, FailureKind};
use coracle_json::Object;
use coracle_signature::{
    BUNDLE_TYPE, Found, NOTATION_PLACE, NOTATION_TYPE, Name, SIMPLE_SIGNING, signature_tag,
};

use super::connection::Connection;
use super::manifest::{self, Descriptor};
use super::sources::{Need, Sources};
use super::{Fetched, Pull, read_verified};
use crate::failure::Context;
use crate::import::resolve::Resolved;
use crate::policy::kept::{self, Kept};
use crate::policy::{Rules, Signed};
use crate::store::{Move, hex};

/// Maximum number of signatures of one digest that are requested, per place; more are not looked at.
const SIGNATURES_MAX: usize = 32;
/// Maximum length of one signature in bytes; a bundle with its proof has some 10 KiB.
const SIGNATURE_BYTES_MAX: u64 = 128 << 10;
/// Artifact type of cosign's signatures that are referrers and no bundles.
const COSIGN_TYPE: &str = "application/vnd.dev.cosign.artifact.sig.v1+json";

impl Pull<'_> {
    /// Judges the image before anything of it is unpacked; returns what is stored about it. `None`: there are no rules.
    ///
    /// # Errors
    /// The image is refused; a registry did not answer.
    pub(super) fn judge(&self, image: &Resolved) -> Result<Option<Kept>, Failure> {
        let Some(policy) = &self.job.policy else { return Ok(None) };
        let rules = Rules::of(policy)?;
        let name = self.name()?;
        let [(top, top_bytes), .., (member, member_bytes)] = &image.documents[..] else {
            let [(only, bytes)] = &image.documents[..] else {
                return Err(Failure::new(FailureKind::Internal, "the image has no manifest"));
            };
            let documents = [Signed { digest: only, bytes }, Signed { digest: only, bytes }];
            return self.judge_documents(&rules, &name, &documents).map(Some);
        };
        let documents =
            [Signed { digest: top, bytes: top_bytes }, Signed { digest: member, bytes: member_bytes }];
        self.judge_documents(&rules, &name, &documents).map(Some)
    }

    fn judge_documents(
        &self,
        rules: &Rules,
        name: &Name,
        documents: &[Signed<'_>; 2],
    ) -> Result<Kept, Failure> {
        let [top, member] = [documents[0].digest, documents[1].digest];
        let needs = rules.needs(name);
        let mut found = Vec::new();
        let tags = match (needs.tag_of_top, needs.tag_of_member) {
            (true, true) if top == member => vec![top],
            (of_top, of_member) => [(of_top, top), (of_member, member)]
                .into_iter()
                .filter_map(|(is_needed, digest)| is_needed.then_some(digest))
                .collect(),
        };
        for digest in tags {
            found.extend(self.below_tag(digest).context(|| format!("signatures of {digest}"))?);
        }
        if needs.referrers {
            found.extend(self.referrers(top).context(|| format!("referrers of {top}"))?);
        }
        rules.judge(name, documents, found, self.programs, &|| self.report.pulse())
    }

    /// The name by which the image is pulled.
    fn name(&self) -> Result<Name, Failure> {
        let job = self.job;
        let version =
            if job.digest.is_empty() { format!(":{}", job.tag) } else { format!("@{}", job.digest) };
        Name::parse(&format!("{}/{}{version}", job.registry, job.repository)).map_err(Failure::invalid)
    }

    /// The move that publishes what is stored about the image.
    pub(super) fn keep(&self, id: &str, kept: Option<Kept>) -> Result<Option<Move>, Failure> {
        // An image that every rule accepts has nothing to store.
        let kept = kept.filter(|kept| !kept.signed.is_empty());
        kept::write(&self.store, id, kept.into_iter().collect())
    }

    /// The signatures below the tag of a digest.
    fn below_tag(&self, digest: &str) -> Result<Vec<Found>, Failure> {
        let tag = signature_tag(digest);
        let Some(manifest) = self.may_have(&format!("manifests/{tag}"), "")? else { return Ok(Vec::new()) };
        self.layers_of(&manifest.bytes, digest, &format!("tag {tag}"), |layer| {
            layer.media_type == SIMPLE_SIGNING
        })
    }

    /// The signatures among the referrers of a digest.
    fn referrers(&self, digest: &str) -> Result<Vec<Found>, Failure> {
        let by_api = self.may_have(&format!("referrers/{digest}"), manifest::INDEX_TYPE)?;
        let index = match by_api {
            Some(index) => Some(index),
            // A registry without the API (distribution specification, "Referrers Tag Schema").
            None => {
                self.may_have(&format!("manifests/{}", digest.replacen(':', "-", 1)), manifest::INDEX_TYPE)?
            }
        };
        let Some(index) = index else { return Ok(Vec::new()) };
        let text = String::from_utf8_lossy(&index.bytes);
        let wrong = |problem: String| Failure::invalid(format!("its list: {problem}"));
        let all = Object::parse(&text).and_then(|index| index.list("manifests")).map_err(wrong)?;
        let mut found = Vec::new();
        let mut count = 0;
        for text in all.unwrap_or_default() {
            let entry = Object::parse(text).map_err(wrong)?;
            let kind = entry.text("artifactType").map_err(wrong)?;
            let is_ours = kind.starts_with(BUNDLE_TYPE) || kind == NOTATION_TYPE || kind == COSIGN_TYPE;
            if !is_ours || count >= SIGNATURES_MAX || found.len() >= SIGNATURES_MAX {
                continue;
            }
            count += 1;
            let descriptor = Descriptor::read(&entry).map_err(wrong)?;
            found.extend(self.referrer(&descriptor, digest, &kind)?);
        }
        Ok(found)
    }

    /// The signatures of one referrer of `digest`.
    fn referrer(&self, descriptor: &Descriptor, digest: &str, kind: &str) -> Result<Vec<Found>, Failure> {
        hex(&descriptor.digest)?;
        let manifest =
            self.document(&format!("manifests/{}", descriptor.digest), None, &descriptor.digest)?;
        let text = String::from_utf8_lossy(&manifest.bytes);
        let subject = Object::parse(&text).and_then(|manifest| manifest.object("subject"));
        let subject = subject.and_then(|subject| subject.unwrap_or_default().text("digest"));
        // What is not about the digest would be refused, too; an entry of a list is no statement of the signer.
        if subject.as_deref() != Ok(digest) {
            return Ok(Vec::new());
        }
        let place = match kind == NOTATION_TYPE {
            true => format!("{NOTATION_PLACE} referrer {}", descriptor.digest),
            false => format!("referrer {}", descriptor.digest),
        };
        self.layers_of(&manifest.bytes, digest, &place, |_| true)
    }

    /// The layers of a manifest that are signatures of `digest`.
    fn layers_of(
        &self,
        manifest: &[u8],
        digest: &str,
        place: &str,
        is_wanted: impl Fn(&Descriptor) -> bool,
    ) -> Result<Vec<Found>, Failure> {
        let text = String::from_utf8_lossy(manifest);
        let wrong = |problem: String| Failure::invalid(format!("{place}: {problem}"));
        let layers = Object::parse(&text).and_then(|manifest| manifest.list("layers")).map_err(wrong)?;
        let mut found = Vec::new();
        for text in layers.unwrap_or_default() {
            let entry = Object::parse(text).map_err(wrong)?;
            let layer = Descriptor::read(&entry).map_err(wrong)?;
            if !is_wanted(&layer) || found.len() >= SIGNATURES_MAX {
                continue;
            }
            if layer.size > SIGNATURE_BYTES_MAX {
                return Err(wrong(format!("{}: longer than {SIGNATURE_BYTES_MAX} bytes", layer.digest)));
            }
            hex(&layer.digest)?;
            self.report.pulse();
            let content =
                self.document(&format!("blobs/{}", layer.digest), Some(layer.size), &layer.digest)?;
            // Annotations of other types are those of others.
            let annotations: BTreeMap<String, String> = entry.map("annotations").unwrap_or_default();
            found.push(Found {
                digest: digest.to_owned(),
                place: place.to_owned(),
                media_type: layer.media_type,
                annotations,
                content: content.bytes,
            });
        }
        Ok(found)
    }

    /// Requests a document that need not exist, from the registry and its mirrors only; `None` if none of them has it.
    fn may_have(&self, what: &str, accept: &str) -> Result<Option<Fetched>, Failure> {
        let accept = if accept.is_empty() { manifest::accept() } else { accept.to_owned() };
        let read = |connection: &Connection| read_verified(connection, what, &accept, None, "");
        let sources: &Sources = &self.sources;
        match sources.ask(Need::Resolve, &mut (), |()| 0, |connection, ()| read(connection)) {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.kind == FailureKind::NotFound => Ok(None),
            // A registry that does not know the API answers 400 or 405 (all statuses without a meaning of their own).
            Err(failure) if what.starts_with("referrers/") && failure.kind == FailureKind::Internal => {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }
}
