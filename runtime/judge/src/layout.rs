//! An OCI layout as a place of signatures: entries of its index that refer to the image, or that have the tag `sha256-….sig` of its digest.

use std::collections::BTreeMap;

use coracle_job::{Failure, FailureKind};
use coracle_json::Object;
use coracle_manifest::Descriptor;
use coracle_signature::{BUNDLE_TYPE, NOTATION_TYPE, SIMPLE_SIGNING};

use super::collect::{ENTRIES_MAX, Place, Referrer, kind_of};

/// The annotation with the name of an entry (OCI image specification), often only a tag.
const NAME: &str = "org.opencontainers.image.ref.name";

/// Reads a blob of the layout by its digest, which it verifies; `None` if it is missing.
type ReadBlob<'a> = &'a dyn Fn(&str) -> Result<Option<Vec<u8>>, Failure>;

/// The manifests in the index of a layout that may be signatures, for all images of the layout.
#[derive(Debug, Default)]
pub struct Attachments {
    entries: Vec<Entry>,
    problems: Vec<String>,
}

/// A manifest in the index.
#[derive(Debug)]
struct Entry {
    referrer: Referrer,
    /// The name that the index gives it; empty: none.
    name: String,
    /// The digest to which it refers; empty: none.
    subject: String,
}

impl Attachments {
    /// Reads the content of `index.json`, and the manifests in it.
    ///
    /// # Errors
    /// The index is malformed.
    pub fn read(index: &[u8], read: ReadBlob<'_>) -> Result<Self, Failure> {
        let text = String::from_utf8_lossy(index);
        let wrong = |problem: String| Failure::invalid(format!("archive: index.json: {problem}"));
        let all = Object::parse(&text).and_then(|index| index.list("manifests")).map_err(wrong)?;
        let all = all.unwrap_or_default();
        let mut attachments = Self::default();
        if all.len() > ENTRIES_MAX {
            let text =
                format!("index.json: of {} entries {ENTRIES_MAX} are looked at for signatures", all.len());
            attachments.problems.push(text);
        }
        let entries = all.into_iter().take(ENTRIES_MAX).filter_map(|text| Entry::read(text, read));
        attachments.entries = entries.collect();
        Ok(attachments)
    }
}

impl Entry {
    /// Reads an entry; `None` if it is none, or its manifest is missing, as that of another platform.
    fn read(text: &str, read: ReadBlob<'_>) -> Option<Self> {
        let entry = Object::parse(text).ok()?;
        let mut annotations: BTreeMap<String, String> = entry.map("annotations").unwrap_or_default();
        let mut referrer = Referrer::read(&entry).ok()?;
        let manifest = read(&referrer.digest).ok().flatten()?;
        let text = String::from_utf8_lossy(&manifest);
        let manifest = Object::parse(&text).ok()?;
        let subject = manifest.object("subject").ok().flatten().unwrap_or_default();
        referrer.kind = kind_of(&manifest);
        Some(Self {
            referrer,
            name: annotations.remove(NAME).unwrap_or_default(),
            subject: subject.text("digest").unwrap_or_default(),
        })
    }
}

/// A layout as a place of signatures.
pub struct Layout<'a> {
    /// Reads a blob.
    pub read: ReadBlob<'a>,
    /// The entries of the index.
    pub attachments: &'a Attachments,
}

impl Place for Layout<'_> {
    fn tagged(&self, tag: &str) -> Result<Vec<Vec<u8>>, Failure> {
        let end = format!(":{tag}");
        let has_tag = |entry: &&Entry| entry.name == tag || entry.name.ends_with(&end);
        let tagged = self.attachments.entries.iter().filter(has_tag);
        tagged.filter_map(|entry| (self.read)(&entry.referrer.digest).transpose()).collect()
    }

    fn referrers(&self, digest: &str) -> Result<Vec<Referrer>, Failure> {
        let all = self.attachments.entries.iter().filter(|entry| entry.subject == digest);
        Ok(all.map(|entry| entry.referrer.clone()).collect())
    }

    fn manifest(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        (self.read)(digest)
    }

    fn content(&self, layer: &Descriptor) -> Result<Option<Vec<u8>>, Failure> {
        (self.read)(&layer.digest)
    }

    fn is_of_place(&self, failure: &Failure) -> bool {
        failure.kind != FailureKind::Invalid
    }

    fn problems(&self) -> Vec<String> {
        self.attachments.problems.clone()
    }
}

/// Whether a manifest contains signatures and is therefore no image.
pub fn is_attachment(manifest: &[u8]) -> bool {
    let text = String::from_utf8_lossy(manifest);
    let Ok(manifest) = Object::parse(&text) else { return false };
    let is_artifact =
        |kind: &str| kind == NOTATION_TYPE || kind.starts_with(BUNDLE_TYPE) || kind == SIMPLE_SIGNING;
    let layers = manifest.list("layers").ok().flatten().unwrap_or_default();
    let first = layers.first().map(|text| Object::parse(text).and_then(|layer| layer.text("mediaType")));
    is_artifact(&kind_of(&manifest)) || first.is_some_and(|kind| is_artifact(&kind.unwrap_or_default()))
}
