//! Judges images of the store again, by the signatures that were stored with them and without their registries: after a change of the
//! policy, for `coracle image check --policy`, for a further name, and for a pull by a digest that the store has.

use coracle_job::{ExplainJob, Failure, JudgeJob, Judged};
use coracle_reference::Name;

use super::collect::Collected;
use super::kept::{self, Kept};
use super::{Documents, Judge, Signed, refused};
use crate::image_config::digest_of;
use crate::pull::manifest::{self, Document};
use crate::store::Store;

/// The reason of a refusal without stored signatures.
const NOTHING_KEPT: &str = "no signature is stored with it; a pull asks its registry";

/// Judges the images.
pub(crate) fn run(job: &JudgeJob) -> Result<Vec<Judged>, Failure> {
    let store = Store::open(&job.root)?;
    let judge = Judge::of(&job.policy)?;
    let mut all = Vec::new();
    for (id, names) in &job.images {
        let kept = kept::read(&store, id);
        for name in names {
            let judgement = judge_name(&judge, &store, id, &kept, name).map_err(|failure| failure.message);
            all.push(Judged { id: id.clone(), name: name.clone(), judgement });
        }
    }
    Ok(all)
}

/// The rule for an image as text for users, the place in the policy first; empty without a policy.
pub(crate) fn explain(job: &ExplainJob) -> Result<Vec<String>, Failure> {
    let Some(policy) = &job.policy else { return Ok(Vec::new()) };
    let name = Name::parse(&job.reference).map_err(|invalid| refused(invalid.to_string()))?;
    Ok(Judge::of(policy)?.explain(&name))
}

/// Judges one name of an image; an image without a name has its ID instead.
fn judge_name(
    judge: &Judge,
    store: &Store,
    id: &str,
    kept: &[Kept],
    name: &str,
) -> Result<Vec<String>, Failure> {
    let name = match name == id {
        true => None,
        false => Some(Name::parse(name).map_err(|invalid| refused(invalid.to_string()))?),
    };
    let name = name.as_ref();
    let unsigned = judge.judge_unsigned(name, NOTHING_KEPT).map(|verdict| verdict.signed);
    if unsigned.is_ok() {
        return unsigned;
    }
    // A digest is that of what was signed. A tag may have been that of any document that led to the image: its content is the same.
    let digest = name.and_then(Name::digest);
    let of_name = kept.iter().rev().filter(|kept| digest.is_none_or(|digest| digest == kept.top));
    let mut first = None;
    for kept in of_name {
        match judge_by(judge, store, id, kept, name) {
            Ok(signed) => return Ok(signed),
            Err(failure) => drop(first.get_or_insert(failure)),
        }
    }
    first.map_or(unsigned, Err)
}

fn judge_by(
    judge: &Judge,
    store: &Store,
    id: &str,
    kept: &Kept,
    name: Option<&Name>,
) -> Result<Vec<String>, Failure> {
    let document = |digest: &str| {
        let bytes = store.document(digest).filter(|bytes| digest_of(bytes) == digest);
        bytes.ok_or_else(|| refused(format!("its manifest {digest} is missing or damaged")))
    };
    let (top, member) = (document(&kept.top)?, document(&kept.member)?);
    match manifest::parse(&member) {
        Ok(Document::Manifest { config, .. }) if config.digest == id => {}
        _ => return Err(refused(format!("{} is the manifest of another image", kept.member))),
    }
    let documents = Documents {
        top: Signed { digest: &kept.top, bytes: &top },
        member: Signed { digest: &kept.member, bytes: &member },
    };
    let mut collected = Collected::default();
    collected.found.clone_from(&kept.found);
    judge.judge(name, &documents, &collected).map(|verdict| verdict.signed)
}

#[cfg(test)]
mod tests;
