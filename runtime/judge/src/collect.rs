//! Finds the signatures of an image in one place: an endpoint of a registry, or an archive. There are two ways to attach one: below the tag
//! `sha256-….sig` of a digest, and as a referrer (OCI distribution specification 1.1).
//!
//! Guarantees: nothing is looked for that the policy does not need; number, length and time are limited; what one attachment lacks does not
//! hide another one, and neither does a request that is not answered. What was found is not trusted: [`coracle_signature`] verifies it. What could not be read is a reason in the text of a
//! refusal.

use std::collections::BTreeMap;
use std::time::Instant;

use coracle_job::Failure;
use coracle_json::Object;
use coracle_manifest::{Descriptor, hex};
use coracle_signature::{
    ANNOTATIONS, BUNDLE_TYPE, Found, NOTATION_TYPE, Needs, PREDICATE, SIGNED, SIMPLE_SIGNING, shortened,
    signature_tag,
};

use super::Documents;

/// Maximum number of signatures below one tag, and of referrers of one digest with what they refer to.
const SIGNATURES_MAX: usize = 32;
/// Maximum length of one signature in bytes, with its media type and annotations; a bundle with its proof has some 10 KiB.
pub(crate) const SIGNATURE_BYTES_MAX: u64 = 128 << 10;
/// The artifact type that programs without support for artifact types write into a list: that of an empty config.
const EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// Maximum number of entries of a list that are looked at.
pub(crate) const ENTRIES_MAX: usize = 1024;
/// Maximum number of reasons that are kept; further ones are dropped.
const PROBLEMS_MAX: usize = 32;

/// A place that may have signatures. Content is verified against its digest.
pub trait Place {
    /// The manifests with this tag: one at most, except in an archive of several repositories.
    fn tagged(&self, tag: &str) -> Result<Vec<Vec<u8>>, Failure>;
    /// The referrers of a digest.
    fn referrers(&self, digest: &str) -> Result<Vec<Referrer>, Failure>;
    /// The manifest with this digest; `None` if there is none.
    fn manifest(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure>;
    /// The content of a layer; `None` if there is none.
    fn content(&self, layer: &Descriptor) -> Result<Option<Vec<u8>>, Failure>;
    /// Whether a failure concerns the place or the node, and not only what was read.
    fn is_of_place(&self, failure: &Failure) -> bool;
    /// Reasons that concern the whole place.
    fn problems(&self) -> Vec<String>;
}

/// A manifest that refers to an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Referrer {
    /// Digest of the manifest.
    pub digest: String,
    /// The artifact type.
    pub kind: String,
    /// The type of its statement; empty: not known.
    pub predicate: String,
}

impl Referrer {
    /// Reads an entry of a list of referrers.
    ///
    /// # Errors
    /// A member has another type, or the digest is none.
    pub fn read(entry: &Object<'_>) -> Result<Self, String> {
        let mut annotations: BTreeMap<String, String> = entry.map("annotations").unwrap_or_default();
        let digest = entry.text("digest")?;
        hex(&digest).map_err(|failure| failure.message)?;
        Ok(Self {
            digest,
            kind: entry.text("artifactType")?,
            predicate: annotations.remove(PREDICATE).unwrap_or_default(),
        })
    }

    /// Reads the entries of an index; returns the problems, too.
    ///
    /// # Errors
    /// The index is malformed.
    pub fn read_all(index: &[u8]) -> Result<(Vec<Self>, Vec<String>), String> {
        let text = String::from_utf8_lossy(index);
        let all = Object::parse(&text).and_then(|index| index.list("manifests"))?.unwrap_or_default();
        let (mut read, mut problems) = (Vec::new(), Vec::new());
        if all.len() > ENTRIES_MAX {
            problems.push(format!("of {} entries {ENTRIES_MAX} are looked at", all.len()));
        }
        for text in all.into_iter().take(ENTRIES_MAX) {
            match Object::parse(text).and_then(|entry| Self::read(&entry)) {
                Ok(referrer) => read.push(referrer),
                Err(problem) => problems.push(problem),
            }
        }
        Ok((read, problems))
    }

    /// Whether the list of referrers lacks the type, so that the manifest must be read for it.
    fn is_unknown(&self) -> bool {
        ["", EMPTY].contains(&self.kind.as_str())
    }

    /// Whether the referrer may be a signature that is needed. Other statements are about images, too, but sign none.
    fn is_needed(&self, needs: Needs) -> bool {
        let is_bundle = self.kind.starts_with(BUNDLE_TYPE) || self.is_unknown();
        let is_envelope = self.kind == NOTATION_TYPE || self.is_unknown();
        let signs = ["", SIGNED].contains(&self.predicate.as_str());
        needs.bundles && is_bundle && signs || needs.envelopes && is_envelope
    }
}

/// The signatures of one or more places, and the reasons why others could not be read.
#[derive(Debug, Default)]
pub struct Collected {
    pub(crate) found: Vec<Found>,
    problems: Vec<String>,
}

impl Collected {
    pub(crate) fn of(found: Vec<Found>) -> Self {
        Self { found, problems: Vec::new() }
    }

    /// Adds the signatures and reasons of another place.
    pub fn add(&mut self, other: Self) {
        let new = other.found.into_iter().filter(|new| !self.found.contains(new));
        let new: Vec<Found> = new.collect();
        self.found.extend(new);
        other.problems.into_iter().for_each(|problem| self.note(problem));
    }

    /// Adds a reason, which may repeat what a registry sent.
    pub fn note(&mut self, problem: String) {
        let problem = shortened(problem);
        if self.problems.len() < PROBLEMS_MAX && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// The reasons as one text for users; empty if there is none.
    pub(crate) fn problems(&self) -> String {
        const SHOWN_MAX: usize = 5;
        let shown = self.problems.iter().take(SHOWN_MAX).map(|problem| format!("; {problem}"));
        let more = match self.problems.len().saturating_sub(SHOWN_MAX) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        shown.chain([more]).collect()
    }
}

/// Finds the signatures of an image that are needed; with the first failure of a place that did not answer, which may have hidden some.
/// After `end` nothing more is read.
pub fn collect(
    place: &dyn Place,
    needs: Needs,
    documents: &Documents<'_>,
    end: Instant,
) -> (Collected, Option<Failure>) {
    let mut search = Search { place, end, collected: Collected::default(), unanswered: None };
    let [top, member] = [documents.top.digest, documents.member.digest];
    if needs.tag_of_top || (needs.tag_of_member && top == member) {
        search.below_tag(top);
    }
    if needs.tag_of_member && top != member {
        search.below_tag(member);
    }
    if needs.bundles || needs.envelopes {
        search.referrers(top, needs);
    }
    place.problems().into_iter().for_each(|problem| search.collected.note(problem));
    (search.collected, search.unanswered)
}

struct Search<'a> {
    place: &'a dyn Place,
    end: Instant,
    collected: Collected,
    unanswered: Option<Failure>,
}

/// A manifest of signatures.
struct Attachment<'a> {
    /// The digest that is signed.
    digest: &'a str,
    /// The place where it was found, as text for users.
    name: &'a str,
    is_of_notation: bool,
}

impl Search<'_> {
    /// The result; otherwise the reason is noted.
    fn usable<T>(&mut self, name: &str, read: Result<Option<T>, Failure>) -> Option<T> {
        match read {
            Ok(Some(found)) => return Some(found),
            Ok(None) => self.collected.note(format!("{name}: not found")),
            Err(failure) if self.place.is_of_place(&failure) => drop(self.unanswered.get_or_insert(failure)),
            Err(failure) => self.collected.note(format!("{name}: {}", failure.message)),
        }
        None
    }

    fn is_late(&mut self) -> bool {
        let is_late = Instant::now() >= self.end;
        if is_late {
            self.collected.note("not all was looked at within the time limit".to_owned());
        }
        is_late
    }

    fn below_tag(&mut self, digest: &str) {
        if self.is_late() {
            return;
        }
        let tag = signature_tag(digest);
        let name = format!("tag {tag}");
        let manifests = self.place.tagged(&tag).map(Some);
        let mut room = SIGNATURES_MAX;
        for manifest in self.usable(&name, manifests).unwrap_or_default() {
            let attachment = Attachment { digest, name: &name, is_of_notation: false };
            self.layers(&manifest, &attachment, &mut room);
        }
    }

    fn referrers(&mut self, digest: &str, needs: Needs) {
        if self.is_late() {
            return;
        }
        let all = self.place.referrers(digest).map(Some);
        let mut all = self.usable(&format!("referrers of {digest}"), all).unwrap_or_default();
        all.retain(|referrer| referrer.is_needed(needs));
        // Those that may be anything leave room for the others.
        let (unknown, mut all): (Vec<_>, Vec<_>) = all.into_iter().partition(Referrer::is_unknown);
        all.extend(unknown);
        if all.len() > SIGNATURES_MAX {
            self.collected.note(format!("more than {SIGNATURES_MAX} referrers are not looked at"));
        }
        let mut room = SIGNATURES_MAX;
        for mut referrer in all.into_iter().take(SIGNATURES_MAX) {
            if self.is_late() {
                break;
            }
            let name = format!("referrer {}", referrer.digest);
            let manifest = self.place.manifest(&referrer.digest);
            let Some(manifest) = self.usable(&name, manifest) else { continue };
            let text = String::from_utf8_lossy(&manifest);
            let parsed = Object::parse(&text).unwrap_or_default();
            let subject =
                parsed.object("subject").and_then(|subject| subject.unwrap_or_default().text("digest"));
            // What is not about the digest would be refused, too; an entry of a list is no statement of the signer.
            if subject.as_deref() != Ok(digest) {
                self.collected.note(format!("{name}: it refers to another digest"));
                continue;
            }
            if referrer.is_unknown() {
                referrer.kind = kind_of(&parsed);
                if referrer.is_unknown() || !referrer.is_needed(needs) {
                    continue;
                }
            }
            let is_of_notation = referrer.kind == NOTATION_TYPE;
            self.layers(&manifest, &Attachment { digest, name: &name, is_of_notation }, &mut room);
        }
    }

    /// Reads the layers of a manifest that may be signatures; `room` is their number at most.
    fn layers(&mut self, manifest: &[u8], attachment: &Attachment<'_>, room: &mut usize) {
        let name = attachment.name;
        let text = String::from_utf8_lossy(manifest);
        let layers = match Object::parse(&text).and_then(|manifest| manifest.list("layers")) {
            Ok(layers) => layers.unwrap_or_default(),
            Err(problem) => return self.collected.note(format!("{name}: {problem}")),
        };
        // The newest first: cosign appends.
        for (number, text) in layers.into_iter().enumerate().rev() {
            let read = Object::parse(text).and_then(|entry| Ok((Descriptor::read(&entry)?, entry)));
            let (layer, entry) = match read {
                Ok(read) => read,
                Err(problem) => {
                    self.collected.note(format!("{name}: layers[{number}]: {problem}"));
                    continue;
                }
            };
            let is_cosigns = layer.media_type == SIMPLE_SIGNING || layer.media_type.starts_with(BUNDLE_TYPE);
            if !attachment.is_of_notation && !is_cosigns {
                continue;
            }
            if self.is_late() {
                break;
            }
            if *room == 0 {
                self.collected
                    .note(format!("{name}: more than {SIGNATURES_MAX} signatures are not looked at"));
                break;
            }
            *room -= 1;
            if let Err(failure) = hex(&layer.digest) {
                self.collected.note(format!("{name}: layers[{number}]: {}", failure.message));
                continue;
            }
            self.layer(layer, &entry, attachment);
        }
    }

    /// Reads one layer.
    fn layer(&mut self, layer: Descriptor, entry: &Object<'_>, attachment: &Attachment<'_>) {
        let name = format!("{}, layer {}", attachment.name, layer.digest);
        // Annotations of other types are those of others.
        let mut all: BTreeMap<String, String> = entry.map("annotations").unwrap_or_default();
        let mut annotations = BTreeMap::new();
        annotations.extend(ANNOTATIONS.iter().filter_map(|name| all.remove_entry(*name)));
        let beside = layer.media_type.len() + annotations.values().map(String::len).sum::<usize>();
        if layer.size.saturating_add(beside as u64) > SIGNATURE_BYTES_MAX {
            return self.collected.note(format!("{name}: longer than {SIGNATURE_BYTES_MAX} bytes"));
        }
        let content = self.place.content(&layer);
        let Some(content) = self.usable(&name, content) else { return };
        if content.len() as u64 != layer.size {
            return self.collected.note(format!("{name}: its length is not {}", layer.size));
        }
        self.collected.found.push(Found {
            digest: attachment.digest.to_owned(),
            place: attachment.name.to_owned(),
            is_of_notation: attachment.is_of_notation,
            media_type: layer.media_type,
            annotations,
            content,
        });
    }
}

/// The artifact type of a manifest: that of its config, if it states none (OCI image specification 1.1, "artifactType").
pub(crate) fn kind_of(manifest: &Object<'_>) -> String {
    let stated = manifest.text("artifactType").unwrap_or_default();
    if !stated.is_empty() {
        return stated;
    }
    let config = manifest.object("config").ok().flatten().unwrap_or_default();
    config.text("mediaType").unwrap_or_default()
}

#[cfg(test)]
mod tests;
