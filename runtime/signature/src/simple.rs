//! Signatures of cosign in the format "simple signing": a payload that names the digest and the repository, and beside it the signature
//! as an annotation. They are layers of an image below the tag `sha256-….sig` of the signed digest.
//!
//! The payload is read after its signature is verified; unknown members are refused. A registry may have an older image with a signature
//! of its own: signatures say who made an image, and not that it is the newest.

use coracle_reference::Name;

use super::image::Found;
use super::json::{Members, Problem, base64};
use super::key::Key;
use super::log::{Entry, Kind, Logged};
use super::policy::KeyRule;

/// Media type of a layer that is a payload.
pub const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The annotation with the signature in base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// The annotation with the promise of a transparency log.
const LOGGED: &str = "dev.sigstore.cosign/bundle";
/// The annotations of a signature that are read.
pub const ANNOTATIONS: [&str; 2] = [SIGNATURE, LOGGED];
/// The type in a payload.
const TYPE: &str = "cosign container image signature";

/// The tag below which signatures of a digest are: `sha256-….sig`.
pub fn signature_tag(digest: &str) -> String {
    format!("{}.sig", digest.replacen(':', "-", 1))
}

/// Verifies one signature of `digest`; returns the key, and the log if one is needed, as text for users.
///
/// # Errors
/// The reason why the rule does not accept it.
pub(crate) fn verify(
    rule: &KeyRule,
    name: Option<&Name>,
    digest: &str,
    found: &Found,
) -> Result<String, Problem> {
    let signature = found.annotations.get(SIGNATURE).ok_or_else(|| format!("no annotation {SIGNATURE}"))?;
    let signature = base64(signature).map_err(|problem| format!("{SIGNATURE}: {problem}"))?;
    let key = signer(rule, &found.content, &signature)?;
    let log = match rule.logs.is_empty() {
        true => String::new(),
        false => {
            let text = found.annotations.get(LOGGED);
            let text =
                text.ok_or_else(|| format!("no annotation {LOGGED}, so it is in no transparency log"))?;
            let entry = Entry::of_annotation(text).map_err(|problem| format!("{LOGGED}: {problem}"))?;
            let logged = Logged { kind: Kind::Hashed, key, signature: &signature, payload: &found.content };
            entry.verify(&rule.logs, &logged)?
        }
    };
    let payload = Payload::read(&found.content).map_err(|problem| format!("payload: {problem}"))?;
    if payload.digest != digest {
        return Err(format!("it is the signature of {}, not of {digest}", payload.digest));
    }
    if !rule.identity.accepts(name, &payload.reference) {
        return Err(format!(
            "it is the signature of {:?}, which signedIdentity does not accept for {}",
            payload.reference,
            name.map_or_else(|| "an image without a name".to_owned(), Name::to_string)
        ));
    }
    Ok(format!("key {}{log}", key.name))
}

/// The signed bytes, and their signature; `None` if there is none.
pub(crate) fn signature(found: &Found) -> Option<[Vec<u8>; 2]> {
    let signature = base64(found.annotations.get(SIGNATURE)?).ok()?;
    Some([found.content.clone(), signature])
}

/// The key of a rule that made a signature.
///
/// # Errors
/// There is none; the text names the keys.
pub(crate) fn signer<'a>(rule: &'a KeyRule, message: &[u8], signature: &[u8]) -> Result<&'a Key, Problem> {
    rule.keys.iter().find(|key| key.verifies(message, signature)).ok_or_else(|| {
        let names: Vec<&str> = rule.keys.iter().map(|key| key.name.as_str()).collect();
        format!("it was not made by {}", names.join(" or "))
    })
}

/// The signed content.
struct Payload {
    digest: String,
    reference: String,
}

impl Payload {
    fn read(bytes: &[u8]) -> Result<Self, Problem> {
        let mut members = Members::parse_bytes(bytes)?;
        let mut critical = members.object("critical")?;
        // Free for those who sign.
        members.need("optional")?;
        members.finish()?;
        let kind = critical.need_text("type")?;
        if kind != TYPE {
            return Err(format!("critical.type is {kind:?}, not {TYPE:?}"));
        }
        let mut image = critical.object("image")?;
        let mut identity = critical.object("identity")?;
        critical.finish()?;
        let digest = image.need_text("docker-manifest-digest")?;
        let reference = identity.need_text("docker-reference")?;
        image.finish()?;
        identity.finish()?;
        Ok(Self { digest, reference })
    }
}
