//! The policy of signatures on this node: reads it with its keys at the start of the daemon, at its reloads, and for `coracle config check`;
//! and reads and writes the signatures of images in the store, `images/signatures/HEX`. [`coracle_judge`] judges.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use coracle_job::{ExplainJob, Failure, ImagePolicy, JudgeJob, Judged};
use coracle_judge::{FILE_BYTES_MAX, Judge, Kept, decode, judge_stored, merge};
use coracle_manifest::digest_of;
use coracle_reference::Name;
use coracle_registries::node_file;
use coracle_sandbox::describe_io;
use coracle_signature::Policy;
use rustix::fs::FlockOperation;

use crate::failure::io_failure;
use crate::store::{Store, open_plain};

/// The first argument of a process that checks a policy.
pub(crate) const CHECK_SUBCOMMAND: &str = "check-image-policy";

/// Reads a policy with its keys.
///
/// # Errors
/// The mistake, with the file and the place.
pub(crate) fn read(path: &Path) -> Result<Policy, Failure> {
    let wrong = |why: String| Failure::invalid(format!("image.policy.file: {}: {why}", path.display()));
    let read = |path: &Path| node_file::read(path).map_err(|error| describe_io(&error));
    let bytes = read(path).map_err(wrong)?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("not UTF-8".to_owned()))?;
    coracle_signature::parse(&text, &|path| read(Path::new(path))).map_err(wrong)
}

/// Checks the policy whose path is the argument; prints the mistake.
pub(crate) fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let path = PathBuf::from(arguments.next().unwrap_or_default());
    match read(&path) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stdout(), "{}", failure.message);
            ExitCode::FAILURE
        }
    }
}

/// The policy of a job, at the time of the node.
///
/// # Errors
/// It cannot be read, so that no image can be accepted.
pub(crate) fn judge(policy: &ImagePolicy) -> Result<Judge, Failure> {
    Judge::new(policy, SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Checks the images of the store against the policy, with the signatures that are stored with them.
pub(crate) fn judge_images(job: &JudgeJob) -> Result<Vec<Judged>, Failure> {
    let store = Store::open(&job.root)?;
    let judge = judge(&job.policy)?;
    let mut all = Vec::new();
    for (id, names) in &job.images {
        let kept = kept(&store, id);
        for name in names {
            let document = |digest: &str| store.document(digest).ok().flatten();
            let judgement = judge_stored(&judge, id, name, &kept, &document);
            let judgement = judgement.map_err(|failure| failure.message);
            all.push(Judged { id: id.clone(), name: name.clone(), judgement });
        }
    }
    Ok(all)
}

/// The rule for an image as text for users, the place in the policy first, and the programs that are asked; empty if images are not judged.
pub(crate) fn explain(job: &ExplainJob) -> Result<Vec<String>, Failure> {
    let mut rules = Vec::new();
    if let Some(policy) = &job.policy {
        let name = Name::parse(&job.reference).map_err(|invalid| Failure::invalid(invalid.to_string()))?;
        rules = judge(policy)?.explain(&name);
    }
    rules.extend(job.verifiers.iter().flat_map(coracle_programs::explain));
    Ok(rules)
}

/// Adds signatures to those that are stored with an image. They are stored before the image is published; if it is not published, they
/// are removed with its other files.
pub(crate) fn keep(store: &Store, id: &str, new: Option<Kept>) -> Result<(), Failure> {
    let Some(new) = new else { return Ok(()) };
    let path = store.signatures(id)?;
    let directory = path.parent().unwrap_or(&path);
    // Another worker may add those of another name. It holds the lock while it writes this file; if it is killed, the kernel releases it.
    let lock = fs::File::open(directory).and_then(|directory| {
        rustix::fs::flock(&directory, FlockOperation::LockExclusive)?;
        Ok(directory)
    });
    let lock = lock.map_err(|error| io_failure("lock", directory, &error))?;
    // A pull of an image that is there writes nothing.
    if let Some(bytes) = merge(&kept(store, id), new) {
        let part = store.aside(&digest_of(&bytes))?;
        fs::write(&part, bytes).map_err(|error| io_failure("write", &part, &error))?;
        store.publish(&part, &path)?;
    }
    drop(lock);
    Ok(())
}

/// The signatures that are stored with an image; empty if there are none, or the file is damaged.
fn kept(store: &Store, id: &str) -> Vec<Kept> {
    let read = || {
        let file = open_plain(&store.signatures(id).ok()?).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).ok()?;
        Some(decode(&bytes))
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests;
