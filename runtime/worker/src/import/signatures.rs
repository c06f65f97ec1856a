//! Judges the images of an archive by the policy before they are unpacked. Signatures are those that the archive has: in an OCI layout,
//! entries of its index that refer to the image, or that have the tag `sha256-….sig` of its digest. An archive in docker's format has no
//! manifest that could have been signed, and what is taken from containerd's store no signatures: both are refused if the policy requires
//! some.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};
use coracle_json::Object;
use coracle_reference::{Name, Reference};
use coracle_signature::{BUNDLE_TYPE, NOTATION_TYPE, Needs, SIMPLE_SIGNING};

use super::spool::Spool;
use super::{Import, OCI_NAME, Parts};
use crate::failure::Context;
use crate::policy::collect::{Collected, Place, Referrer, collect};
use crate::policy::{Accepted, Documents, Judge};
use crate::pull::manifest::Descriptor;

/// Maximum number of entries of an index that are looked at for signatures.
const ENTRIES_MAX: usize = 1024;
/// Time after which no further signature of an image is read.
const LIMIT: Duration = Duration::from_secs(120);
/// The file with the entries of an OCI layout.
const INDEX: &str = "index.json";
/// The reason of a refusal without a document that could be signed.
const NO_MANIFEST: &str =
    "an archive in docker's format has no manifest that could be signed: use an OCI layout";

/// Attachments of images in an archive.
#[derive(Default)]
pub(super) struct Attachments {
    entries: Vec<Entry>,
    problems: Vec<String>,
}

/// A manifest in the index of an OCI layout.
struct Entry {
    referrer: Referrer,
    /// The name that the index gives it; empty: none.
    name: String,
    /// The digest to which it refers; empty: none.
    subject: String,
}

impl Import<'_> {
    /// Judges an image by its names. Those by which it is asked for, its tags or else its digests, must all be accepted; further names are
    /// left out if they are not.
    ///
    /// # Errors
    /// The image is refused.
    pub(super) fn judge(&self, parts: &Parts) -> Result<Accepted, Failure> {
        let Some(policy) = &self.job.policy else { return Ok(Accepted::default()) };
        let judge = Judge::of(policy)?;
        // The daemon normalises them in the same way, and drops those that are no names.
        let valid = |names: &[String]| -> Vec<(String, Name)> {
            let parse = |name: &String| Some((name.clone(), Reference::parse(name).ok()?.into()));
            names.iter().filter_map(parse).collect()
        };
        let (mut asked, mut further) = (valid(&parts.tags), valid(&parts.digests));
        if asked.is_empty() {
            asked.append(&mut further);
        }
        let unnamed = asked.is_empty().then_some(None);
        let names: Vec<Option<&Name>> = asked.iter().map(|(_, name)| Some(name)).chain(unnamed).collect();
        let documents = Documents::of(&parts.documents).filter(|_| parts.are_documents_of_source);
        let Some(documents) = documents else {
            for name in names {
                judge.judge_unsigned(name, NO_MANIFEST).context(|| described(name))?;
            }
            return Ok(Accepted::default());
        };
        let all = names.iter().copied().chain(further.iter().map(|(_, name)| Some(name)));
        let needs = all.map(|name| judge.needs(name)).fold(Needs::default(), Needs::or);
        let collected = self.collected(needs, &documents)?;
        let mut accepted = Accepted::default();
        for name in names {
            let verdict = judge.judge(name, &documents, &collected).context(|| described(name))?;
            accepted.add(&documents, &collected, &verdict);
        }
        for (text, name) in further {
            match judge.judge(Some(&name), &documents, &collected) {
                Ok(verdict) => accepted.add(&documents, &collected, &verdict),
                Err(failure) => {
                    eprintln!("the image does not get the name {name}: {}", failure.message);
                    accepted.refused.push(text);
                }
            }
        }
        Ok(accepted)
    }

    fn collected(&self, needs: Needs, documents: &Documents<'_>) -> Result<Collected, Failure> {
        if !needs.is_something() || self.spool.get(INDEX).is_none() {
            return Ok(Collected::default());
        }
        let attachments = match self.attachments.get() {
            Some(attachments) => attachments,
            None => {
                let attachments = Attachments::read(self.spool)?;
                self.attachments.get_or_init(|| attachments)
            }
        };
        collect(&Archive { spool: self.spool, attachments }, needs, documents, Instant::now() + LIMIT)
    }

    /// Whether a manifest of the layout is that of signatures, and so of no image.
    pub(super) fn is_signature(&self, digest: &str) -> bool {
        let Ok(Some(manifest)) = self.spool.blob_document(digest) else { return false };
        let text = String::from_utf8_lossy(&manifest);
        let Ok(manifest) = Object::parse(&text) else { return false };
        let is_artifact =
            |kind: &str| kind == NOTATION_TYPE || kind.starts_with(BUNDLE_TYPE) || kind == SIMPLE_SIGNING;
        let layers = manifest.list("layers").ok().flatten().unwrap_or_default();
        let first = layers.first().map(|text| Object::parse(text).and_then(|layer| layer.text("mediaType")));
        is_artifact(&kind_of(&manifest)) || first.is_some_and(|kind| is_artifact(&kind.unwrap_or_default()))
    }
}

fn described(name: Option<&Name>) -> String {
    name.map_or_else(|| "an image without a name".to_owned(), |name| format!("image {name}"))
}

/// The artifact type of a manifest: that of its config, if it states none (OCI image specification 1.1, "artifactType").
fn kind_of(manifest: &Object<'_>) -> String {
    let stated = manifest.text("artifactType").unwrap_or_default();
    if !stated.is_empty() {
        return stated;
    }
    let config = manifest.object("config").ok().flatten().unwrap_or_default();
    config.text("mediaType").unwrap_or_default()
}

impl Attachments {
    /// Reads the index of an OCI layout and the manifests in it.
    fn read(spool: &Spool) -> Result<Self, Failure> {
        let bytes = spool.document(INDEX)?;
        let text = String::from_utf8_lossy(&bytes);
        let wrong = |problem: String| Failure::invalid(format!("archive: {INDEX}: {problem}"));
        let all = Object::parse(&text).and_then(|index| index.list("manifests")).map_err(wrong)?;
        let all = all.unwrap_or_default();
        let mut attachments = Self::default();
        if all.len() > ENTRIES_MAX {
            attachments.problems.push(format!(
                "{INDEX}: of {} entries {ENTRIES_MAX} are looked at for signatures",
                all.len()
            ));
        }
        attachments.entries =
            all.into_iter().take(ENTRIES_MAX).filter_map(|text| Entry::read(spool, text)).collect();
        Ok(attachments)
    }
}

impl Entry {
    /// Reads an entry; `None` if it is none, or its manifest is missing, as that of another platform.
    fn read(spool: &Spool, text: &str) -> Option<Self> {
        let entry = Object::parse(text).ok()?;
        let mut annotations: BTreeMap<String, String> = entry.map("annotations").unwrap_or_default();
        let mut referrer = Referrer::read(&entry).ok()?;
        let manifest = spool.blob_document(&referrer.digest).ok().flatten()?;
        let text = String::from_utf8_lossy(&manifest);
        let manifest = Object::parse(&text).ok()?;
        let subject = manifest.object("subject").ok().flatten().unwrap_or_default();
        referrer.kind = kind_of(&manifest);
        Some(Self {
            referrer,
            name: annotations.remove(OCI_NAME).unwrap_or_default(),
            subject: subject.text("digest").unwrap_or_default(),
        })
    }
}

/// An OCI layout as a place of signatures.
struct Archive<'a> {
    spool: &'a Spool,
    attachments: &'a Attachments,
}

impl Place for Archive<'_> {
    fn tagged(&self, tag: &str) -> Result<Vec<Vec<u8>>, Failure> {
        let end = format!(":{tag}");
        let has_tag = |entry: &&Entry| entry.name == tag || entry.name.ends_with(&end);
        let tagged = self.attachments.entries.iter().filter(has_tag);
        tagged.filter_map(|entry| self.manifest(&entry.referrer.digest).transpose()).collect()
    }

    fn referrers(&self, digest: &str) -> Result<Vec<Referrer>, Failure> {
        let all = self.attachments.entries.iter().filter(|entry| entry.subject == digest);
        Ok(all.map(|entry| entry.referrer.clone()).collect())
    }

    fn manifest(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        self.spool.blob_document(digest)
    }

    fn content(&self, layer: &Descriptor) -> Result<Option<Vec<u8>>, Failure> {
        self.spool.blob_document(&layer.digest)
    }

    fn is_of_place(&self, failure: &Failure) -> bool {
        failure.kind != FailureKind::Invalid
    }

    fn problems(&self) -> Vec<String> {
        self.attachments.problems.clone()
    }
}
