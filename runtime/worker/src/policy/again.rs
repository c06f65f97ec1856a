//! Judges images of the store again, by the signatures that were stored with them and without their registries: after a change of the
//! policy, for `coracle image check --policy`, and for a pull by a digest that the store has.
//!
//! Verifier programs are not run again: what they accepted counts while programs are configured.

use coracle_job::{ExplainJob, Failure, JudgeJob, Judged};
use coracle_signature::Name;

use super::kept::{self, Kept};
use super::{Rules, Signed, refused};
use crate::image_config::digest_of;
use crate::store::Store;

/// Judges the images.
pub(crate) fn run(job: &JudgeJob) -> Result<Vec<Judged>, Failure> {
    let store = Store::open(&job.root)?;
    let rules = Rules::of(&job.policy)?;
    let mut all = Vec::new();
    for (id, names) in &job.images {
        let kept = kept::read(&store, id);
        for name in names {
            let judgement = judge(&rules, &store, &kept, name).map_err(|failure| failure.message);
            all.push(Judged { id: id.clone(), name: name.clone(), judgement });
        }
    }
    Ok(all)
}

/// The rules for an image as text for users, the place in the policy first; empty without a policy.
pub(crate) fn explain(job: &ExplainJob) -> Result<Vec<String>, Failure> {
    let Some(policy) = &job.policy else { return Ok(Vec::new()) };
    let name = Name::parse(&job.reference).map_err(refused)?;
    let mut lines = Rules::of(policy)?.explain(&name);
    if let Some(verifiers) = &policy.verifiers {
        lines.push(format!("verifier programs of {}", verifiers.directory.display()));
    }
    Ok(lines)
}

fn judge(rules: &Rules, store: &Store, kept: &[Kept], name: &str) -> Result<Vec<String>, Failure> {
    let name = Name::parse(name).map_err(refused)?;
    if rules.accepts_anything(&name) && !rules.has_verifiers {
        return Ok(Vec::new());
    }
    // An image that was pulled by a tag may be named by its digest, and the reverse is not true: another digest may have the tag.
    let of_name = kept.iter().find(|kept| kept.name == name.to_string());
    let of_digest = || {
        let digest = name.digest()?;
        kept.iter().find(|kept| {
            kept.top == digest
                && Name::parse(&kept.name).is_ok_and(|known| known.repository() == name.repository())
        })
    };
    let Some(kept) = of_name.or_else(of_digest) else {
        let nothing = Signed { digest: "the image", bytes: b"" };
        let unsigned = [nothing, Signed { digest: "the image", bytes: b"" }];
        // With the rule in its text, if it is the policy that refuses.
        rules.judge_signatures(&name, &unsigned, &[])?;
        return Err(refused("it was pulled or imported before verifiers were configured".to_owned()));
    };
    let document = |digest: &str| {
        let bytes = store.document(digest).filter(|bytes| digest_of(bytes) == digest);
        bytes.ok_or_else(|| refused(format!("its manifest {digest} is missing or damaged")))
    };
    let (top, member) = (document(&kept.top)?, document(&kept.member)?);
    let documents =
        [Signed { digest: &kept.top, bytes: &top }, Signed { digest: &kept.member, bytes: &member }];
    let mut signed = rules.judge_signatures(&name, &documents, &kept.found)?;
    if rules.has_verifiers && !kept.has_programs {
        return Err(refused("no verifier program has accepted it".to_owned()));
    }
    if kept.has_programs {
        signed.extend(kept.signed.iter().filter(|line| line.starts_with(super::programs::KIND)).cloned());
    }
    Ok(signed)
}
