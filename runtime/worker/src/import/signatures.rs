//! Judges the images of an archive by the policy before they are unpacked. Signatures are those that the archive has ([`Layout`]). An archive
//! in docker's format has no manifest that could have been signed, and what is taken from containerd's store no signatures: both are refused
//! if the policy requires some.

use std::time::{Duration, Instant};

use coracle_job::Failure;
use coracle_judge::{Accepted, Attachments, Collected, Documents, Layout, collect, is_attachment};
use coracle_reference::{Name, Reference};
use coracle_signature::Needs;

use super::{Import, Parts};
use crate::failure::Context;
use crate::policy;

/// Time after which no further signature of an image is read.
const LIMIT: Duration = Duration::from_secs(120);
/// The file with the entries of an OCI layout.
const INDEX: &str = "index.json";
/// The reason of a refusal without a document that could be signed.
const NO_MANIFEST: &str =
    "an archive in docker's format has no manifest that could be signed: use an OCI layout";

impl Import<'_> {
    /// Judges an image by its names. Those by which it is asked for, its tags or else its digests, must all be accepted; further names are
    /// left out if they are not.
    ///
    /// # Errors
    /// The image is refused.
    pub(super) fn judge(&self, parts: &Parts) -> Result<Accepted, Failure> {
        let Some(configured) = &self.job.policy else { return Ok(Accepted::default()) };
        let judge = policy::judge(configured)?;
        // The daemon normalises them in the same way, and drops those that are no names, or no tag or digest.
        let valid = |names: &[String], are_digests: bool| -> Vec<(String, Name)> {
            let parse = |name: &String| {
                let reference = Reference::parse(name).ok()?;
                (reference.has_digest() == are_digests).then(|| (name.clone(), reference.into()))
            };
            names.iter().filter_map(parse).collect()
        };
        let (mut asked, mut further) = (valid(&parts.tags, false), valid(&parts.digests, true));
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
        let (collected, mut unread) = self.collected(needs, &documents)?;
        let mut accepted = Accepted::default();
        for name in names {
            let verdict =
                judge.judge(name, &documents, &collected).map_err(|why| unread.take().unwrap_or(why));
            accepted.add(&documents, &collected, &verdict.context(|| described(name))?);
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

    /// The signatures that the archive has; with the first failure of this node that may have hidden some.
    fn collected(
        &self,
        needs: Needs,
        documents: &Documents<'_>,
    ) -> Result<(Collected, Option<Failure>), Failure> {
        if !needs.is_something() || self.spool.get(INDEX).is_none() {
            return Ok(Default::default());
        }
        let read = |digest: &str| self.spool.blob_document(digest);
        let attachments = match self.attachments.get() {
            Some(attachments) => attachments,
            None => {
                let attachments = Attachments::read(&self.spool.document(INDEX)?, &read)?;
                self.attachments.get_or_init(|| attachments)
            }
        };
        Ok(collect(&Layout { read: &read, attachments }, needs, documents, Instant::now() + LIMIT))
    }

    /// Whether a manifest of the layout is that of signatures, and so of no image.
    pub(super) fn is_signature(&self, digest: &str) -> bool {
        self.spool.blob_document(digest).is_ok_and(|found| found.is_some_and(|bytes| is_attachment(&bytes)))
    }
}

fn described(name: Option<&Name>) -> String {
    name.map_or_else(|| "an image without a name".to_owned(), |name| format!("image {name}"))
}
