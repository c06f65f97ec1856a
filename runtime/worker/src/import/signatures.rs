//! Judges the images of an archive before they are unpacked, if the node has rules. Signatures are those that the archive has: in an OCI
//! layout entries of its index that are referrers of the image, or that have the tag `sha256-….sig` of its digest, as tools that copy a
//! repository to a layout write them. An archive of docker has no digests that could have been signed.

use std::collections::BTreeMap;

use coracle_job::Failure;
use coracle_json::Object;
use coracle_signature::{
    BUNDLE_TYPE, Found, NOTATION_PLACE, NOTATION_TYPE, Name, SIMPLE_SIGNING, signature_tag,
};

use super::{Import, OCI_NAME, Parts};
use crate::failure::Context;
use crate::policy::kept::Kept;
use crate::policy::{Rules, Signed};
use crate::pull::manifest::Descriptor;

/// Maximum number of entries of an index that are read for the signatures of one image.
const ENTRIES_MAX: usize = 256;
/// Maximum number of signatures of one image.
const SIGNATURES_MAX: usize = 64;
/// The name by which an image without one is judged: that of no registry, to which the default of a policy applies.
const UNNAMED: &str = "localhost/unnamed";

impl Import<'_> {
    /// Judges an image by each of its names; returns what is stored about it.
    ///
    /// # Errors
    /// The image is refused.
    pub(super) fn judge(&self, parts: &Parts) -> Result<Vec<Kept>, Failure> {
        let Some(policy) = &self.job.policy else { return Ok(Vec::new()) };
        let rules = Rules::of(policy)?;
        let names = if parts.tags.is_empty() { &parts.digests } else { &parts.tags };
        let unnamed = [UNNAMED.to_owned()];
        let names = if names.is_empty() { &unnamed[..] } else { names };
        let nothing = ("the image of the archive".to_owned(), Vec::new());
        let (top, member) =
            (parts.documents.first().unwrap_or(&nothing), parts.documents.last().unwrap_or(&nothing));
        let documents = [top, member].map(|(digest, bytes)| Signed { digest, bytes });
        let mut all = Vec::new();
        for name in names {
            // The daemon adds the same tag.
            let parsed = Name::parse(name).map_err(Failure::invalid)?.or_latest();
            let found = match rules.needs(&parsed).is_something() {
                true => self.found([&top.0, &member.0])?,
                false => Vec::new(),
            };
            let kept = rules.judge(&parsed, &documents, found, self.programs, &|| self.pulse());
            all.push(kept.context(|| format!("image {name}"))?);
        }
        all.retain(|kept| !kept.signed.is_empty());
        Ok(all)
    }

    /// The signatures of these digests in an OCI layout.
    fn found(&self, digests: [&str; 2]) -> Result<Vec<Found>, Failure> {
        const INDEX: &str = "index.json";
        let mut found = Vec::new();
        if self.spool.get(INDEX).is_none() {
            return Ok(found);
        }
        let bytes = self.spool.document(INDEX)?;
        let text = String::from_utf8_lossy(&bytes);
        let wrong = |problem: String| Failure::invalid(format!("archive: {INDEX}: {problem}"));
        let entries = Object::parse(&text).and_then(|index| index.list("manifests")).map_err(wrong)?;
        for text in entries.unwrap_or_default().into_iter().take(ENTRIES_MAX) {
            let entry = Object::parse(text).map_err(wrong)?;
            let descriptor = Descriptor::read(&entry).map_err(wrong)?;
            let annotations = entry.map("annotations").unwrap_or_default();
            // One that is missing is that of another platform, or no image.
            let Ok(Some(manifest)) = self.spool.blob_document(&descriptor.digest) else { continue };
            for digest in digests {
                let room = SIGNATURES_MAX.saturating_sub(found.len());
                found.extend(self.of_entry(&manifest, &annotations, digest)?.into_iter().take(room));
            }
            if digests[0] == digests[1] {
                found.dedup();
            }
        }
        Ok(found)
    }

    /// Whether a manifest of the layout is that of signatures, and so of no image.
    pub(super) fn is_signature(&self, digest: &str) -> bool {
        let Ok(Some(manifest)) = self.spool.blob_document(digest) else { return false };
        let text = String::from_utf8_lossy(&manifest);
        let Ok(manifest) = Object::parse(&text) else { return false };
        let is_artifact =
            |kind: &str| kind == NOTATION_TYPE || kind.starts_with(BUNDLE_TYPE) || kind == SIMPLE_SIGNING;
        let kind =
            |text: &str| Object::parse(text).and_then(|json| json.text("mediaType")).unwrap_or_default();
        let config = manifest
            .object("config")
            .ok()
            .flatten()
            .unwrap_or_default()
            .text("mediaType")
            .unwrap_or_default();
        let layers = manifest.list("layers").ok().flatten().unwrap_or_default();
        is_artifact(&manifest.text("artifactType").unwrap_or_default())
            || is_artifact(&config)
            || layers.first().is_some_and(|layer| is_artifact(&kind(layer)))
    }

    /// The signatures of a digest in one manifest of the layout.
    fn of_entry(
        &self,
        manifest: &[u8],
        annotations: &BTreeMap<String, String>,
        digest: &str,
    ) -> Result<Vec<Found>, Failure> {
        let text = String::from_utf8_lossy(manifest);
        // Entries of other kinds are not read for signatures.
        let Ok(manifest) = Object::parse(&text) else { return Ok(Vec::new()) };
        let subject = manifest.object("subject").ok().flatten().unwrap_or_default();
        let tag = signature_tag(digest);
        let has_tag =
            annotations.get(OCI_NAME).is_some_and(|name| *name == tag || name.ends_with(&format!(":{tag}")));
        let kind = manifest.text("artifactType").unwrap_or_default();
        let config = manifest.object("config").ok().flatten().unwrap_or_default().text("mediaType");
        let is_notation = kind == NOTATION_TYPE || config.as_deref() == Ok(NOTATION_TYPE);
        if !has_tag && subject.text("digest").as_deref() != Ok(digest) {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for text in
            manifest.list("layers").ok().flatten().unwrap_or_default().into_iter().take(SIGNATURES_MAX)
        {
            let Ok(entry) = Object::parse(text) else { continue };
            let Ok(layer) = Descriptor::read(&entry) else { continue };
            let is_ours = layer.media_type == SIMPLE_SIGNING || layer.media_type.starts_with(BUNDLE_TYPE);
            if !is_ours && !is_notation {
                continue;
            }
            let Some(content) = self.spool.blob_document(&layer.digest)? else { continue };
            let place = if is_notation { NOTATION_PLACE } else { "the archive's" };
            found.push(Found {
                digest: digest.to_owned(),
                place: format!("{place} blob {}", layer.digest),
                media_type: layer.media_type,
                annotations: entry.map("annotations").unwrap_or_default(),
                content,
            });
        }
        Ok(found)
    }

    /// Reports that the import is alive.
    fn pulse(&self) {
        self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner)(0, 0);
    }
}
