//! Judges images of the store by the signatures that were stored with them ([`Kept`]) and without their registries: after a change of the
//! policy, for `coracle image check --policy`, for a further name, and for a pull by a digest that the store has.

use coracle_job::Failure;
use coracle_manifest::{Document, digest_of, parse};
use coracle_reference::Name;

use super::collect::Collected;
use super::kept::Kept;
use super::{Documents, Judge, Signed, refused};

/// The reason of a refusal without stored signatures.
const NOTHING_KEPT: &str = "no signature is stored with it; a pull asks its registry";

/// Reads a document of the store by its digest, which is verified here; `None` if it is missing.
type ReadStored<'a> = &'a dyn Fn(&str) -> Option<Vec<u8>>;

/// Judges one name of the image `id`; an image without a name has its ID instead. Returns one line for each requirement that is met.
///
/// # Errors
/// The policy does not accept the image by what is stored with it.
pub fn judge_stored(
    judge: &Judge,
    id: &str,
    name: &str,
    kept: &[Kept],
    read: ReadStored<'_>,
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
        match judge_by(judge, id, name, kept, read) {
            Ok(signed) => return Ok(signed),
            Err(failure) => drop(first.get_or_insert(failure)),
        }
    }
    first.map_or(unsigned, Err)
}

fn judge_by(
    judge: &Judge,
    id: &str,
    name: Option<&Name>,
    kept: &Kept,
    read: ReadStored<'_>,
) -> Result<Vec<String>, Failure> {
    let document = |digest: &str| {
        let bytes = read(digest).filter(|bytes| digest_of(bytes) == digest);
        bytes.ok_or_else(|| refused(format!("its manifest {digest} is missing or damaged")))
    };
    let (top, member) = (document(&kept.top)?, document(&kept.member)?);
    match parse(&member) {
        Ok(Document::Manifest { config, .. }) if config.digest == id => {}
        _ => return Err(refused(format!("{} is the manifest of another image", kept.member))),
    }
    let documents = Documents {
        top: Signed { digest: &kept.top, bytes: &top },
        member: Signed { digest: &kept.member, bytes: &member },
    };
    judge.judge(name, &documents, &Collected::of(kept.found.clone())).map(|verdict| verdict.signed)
}

#[cfg(test)]
mod tests;
