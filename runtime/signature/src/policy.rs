//! Reads a policy: containers-policy.json(5), with two types of coracle. All keys are read with it, so that a policy in use depends on
//! no file. An unknown member is a mistake, and so is an empty list of requirements.

use serde::{Deserialize, Serialize};

use super::identity::Identity;
use super::json::{Members, Problem, base64, list, within};
use super::key::Key;

/// Maximum length in bytes of a policy with its keys, which the daemon keeps.
pub const POLICY_BYTES_MAX: usize = 256 << 10;
/// Maximum number of requirements of one scope, and of keys of one requirement.
const LIST_MAX: usize = 64;

/// Reads a file of which a policy has the path; the error is a reason without the path.
pub(crate) type ReadFile<'a> = &'a dyn Fn(&str) -> Result<Vec<u8>, String>;

/// A policy with its keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Requirements of images to which no scope applies.
    pub(crate) default: Vec<Requirement>,
    /// The scopes of the transport `docker`, with their requirements.
    pub(crate) scopes: Vec<(String, Vec<Requirement>)>,
}

/// A requirement of an image, beside all others of the same scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Requirement {
    /// `insecureAcceptAnything`: nothing.
    AcceptAnything,
    /// `reject`: no image meets it.
    Reject,
    /// A type that cannot be verified; with its name and the reason.
    Unsupported(String, String),
    /// `sigstoreSigned`: a signature of the platform's manifest below its tag `sha256-….sig`.
    Sigstore(KeyRule),
    /// `cosign`: a signature of the named document.
    Cosign(KeyRule),
    /// `notation`: a signature of what the name refers to by a certificate of one of these roots.
    Notation(Vec<Root>),
}

/// Keys of which one must have signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeyRule {
    pub(crate) keys: Vec<Key>,
    /// Keys of transparency logs, one of which must contain the signature; empty: no log is needed.
    pub(crate) logs: Vec<Key>,
    /// The names that a signature may have.
    pub(crate) identity: Identity,
    /// Whether the policy states identities; then signatures without a name are refused.
    pub(crate) is_identity_stated: bool,
}

impl KeyRule {
    /// Whether a bundle may meet the rule: it names no repository.
    pub(crate) fn accepts_bundles(&self) -> bool {
        !self.is_identity_stated
    }
}

/// A certificate at the root of chains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Root {
    /// Path of the certificate's file, or the name of the member that has it.
    pub(crate) name: String,
    pub(crate) der: Vec<u8>,
}

/// Reads a policy; `read` reads the files of its keys.
///
/// # Errors
/// The first mistake, with its place: `transports.docker["reg.io"][0].keyPath: /etc/a.pub: no such file or directory`.
pub fn parse(text: &str, read: &dyn Fn(&str) -> Result<Vec<u8>, String>) -> Result<Policy, String> {
    let mut members = Members::parse(text)?;
    let default =
        requirements(members.need("default")?, read).map_err(|problem| within("default", &problem))?;
    let mut scopes = Vec::new();
    if let Some(transports) = members.take("transports") {
        let transports = Members::parse(transports).map_err(|problem| within("transports", &problem))?;
        for (transport, all) in transports.rest() {
            let place = format!("transports.{transport}");
            for (scope, text) in Members::parse(all).map_err(|problem| within(&place, &problem))?.rest() {
                let place = format!("{place}[{scope:?}]");
                let found = requirements(text, read).map_err(|problem| within(&place, &problem))?;
                // The others are read for their mistakes only: there are no images of other transports here.
                if transport == "docker" {
                    scopes.push((scope, found));
                }
            }
        }
    }
    members.finish()?;
    let policy = Policy { default, scopes };
    match policy.to_bytes().len() {
        0..=POLICY_BYTES_MAX => Ok(policy),
        length => Err(format!("{length} bytes with its keys, at most {POLICY_BYTES_MAX}")),
    }
}

impl Policy {
    /// The policy in the form in which it is passed to workers.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Fails for no type of this crate.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Reads [`Self::to_bytes`].
    ///
    /// # Errors
    /// These are not the bytes of a policy.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        postcard::from_bytes(bytes).map_err(|error| format!("policy: {error}"))
    }

    /// The scopes whose images are refused because a requirement is not supported, with the type and the reason.
    pub fn unsupported(&self) -> Vec<String> {
        let scopes = self.scopes.iter().map(|(scope, all)| (format!("transports.docker[{scope:?}]"), all));
        let all = scopes.chain([("default".to_owned(), &self.default)]);
        let texts = all.flat_map(|(place, all)| {
            all.iter().filter_map(move |requirement| match requirement {
                Requirement::Unsupported(kind, why) => Some(format!("{place}: {kind}: {why}")),
                _ => None,
            })
        });
        texts.collect()
    }
}

fn requirements(text: &str, read: ReadFile<'_>) -> Result<Vec<Requirement>, Problem> {
    let all = list(text)?;
    if all.is_empty() || all.len() > LIST_MAX {
        return Err(format!("a list of 1 to {LIST_MAX} requirements is needed, and there are {}", all.len()));
    }
    let one =
        |(index, text)| requirement(text, read).map_err(|problem| within(&format!("[{index}]"), &problem));
    all.into_iter().enumerate().map(one).collect()
}

fn requirement(text: &str, read: ReadFile<'_>) -> Result<Requirement, Problem> {
    let mut members = Members::parse(text)?;
    let kind = members.need_text("type")?;
    let unsupported = |why: &str| Ok(Requirement::Unsupported(kind.clone(), why.to_owned()));
    let requirement = match kind.as_str() {
        "insecureAcceptAnything" => Requirement::AcceptAnything,
        "reject" => Requirement::Reject,
        // Their members are not checked: they are refused in any case.
        "signedBy" => {
            return unsupported(
                "signatures of OpenPGP are not supported; sign the image with cosign or notation",
            );
        }
        "signedBaseLayer" => return unsupported("no program supports it"),
        "sigstoreSigned" | "cosign" => {
            for member in ["fulcio", "pki"] {
                if members.take(member).is_some() {
                    return unsupported(&format!(
                        "{member}: certificates are not supported, only public keys"
                    ));
                }
            }
            let (default, make): (_, fn(KeyRule) -> Requirement) = match kind.as_str() {
                "cosign" => (Identity::MatchRepository, Requirement::Cosign),
                _ => (Identity::MatchRepoDigestOrExact, Requirement::Sigstore),
            };
            let stated = members.take("signedIdentity").map(Identity::read).transpose();
            let stated = stated.map_err(|problem| within("signedIdentity", &problem))?;
            let is_identity_stated = stated.is_some();
            let identity = stated.unwrap_or(default);
            let keys =
                keys(&mut members, "key", read)?.ok_or("keyPath, keyPaths, keyData or keyDatas: missing")?;
            let logs = self::keys(&mut members, "rekorPublicKey", read)?.unwrap_or_default();
            make(KeyRule { keys, logs, identity, is_identity_stated })
        }
        "notation" => Requirement::Notation(roots(&mut members, read)?),
        _ => return Err(format!("type: {kind:?} is not known")),
    };
    members.finish().map(|()| requirement)
}

/// The content of a file or of a member, with the path or the member's name.
type Content = (String, Vec<u8>);

/// The contents of `…Path`, `…Paths`, `…Data` or `…Datas`, with their names; `None` if there is none of these members.
fn contents(
    members: &mut Members<'_>,
    prefix: &str,
    read: ReadFile<'_>,
) -> Result<Option<Vec<Content>>, Problem> {
    let [path, paths, data, several_data] =
        ["Path", "Paths", "Data", "Datas"].map(|end| format!("{prefix}{end}"));
    let of_file = |member: &str, path: String| {
        if !path.starts_with('/') {
            return Err(format!("{member}: {path:?} is not an absolute path"));
        }
        let bytes = read(&path).map_err(|why| format!("{member}: {path}: {why}"))?;
        Ok((path, bytes))
    };
    let of_data = |member: &str, text: String| {
        let bytes = base64(&text).map_err(|problem| format!("{member}: {problem}"))?;
        Ok((member.to_owned(), bytes))
    };
    let found = [
        members.text(&path)?.map(|one| of_file(&path, one).map(|one| vec![one])),
        members.texts(&paths)?.map(|all| all.into_iter().map(|one| of_file(&paths, one)).collect()),
        members.text(&data)?.map(|one| of_data(&data, one).map(|one| vec![one])),
        members
            .texts(&several_data)?
            .map(|all| all.into_iter().map(|one| of_data(&several_data, one)).collect()),
    ];
    let mut found = found.into_iter().flatten();
    let Some(first) = found.next() else { return Ok(None) };
    if found.next().is_some() {
        return Err(format!("only one of {path}, {paths}, {data} and {several_data} is possible"));
    }
    let all: Vec<_> = first?;
    match all.len() {
        1..=LIST_MAX => Ok(Some(all)),
        count => Err(format!("{prefix}: {count} entries, 1 to {LIST_MAX} are possible")),
    }
}

fn keys(members: &mut Members<'_>, prefix: &str, read: ReadFile<'_>) -> Result<Option<Vec<Key>>, Problem> {
    let Some(contents) = contents(members, prefix, read)? else { return Ok(None) };
    let key = |(name, pem): (String, Vec<u8>)| {
        Key::of_pem(&name, &pem).map_err(|problem| format!("{prefix}: {name}: {problem}"))
    };
    contents.into_iter().map(key).collect::<Result<Vec<_>, _>>().map(Some)
}

/// The certificates of `rootPath`, `rootPaths`, `rootData` or `rootDatas`; each may have several.
fn roots(members: &mut Members<'_>, read: ReadFile<'_>) -> Result<Vec<Root>, Problem> {
    let contents =
        contents(members, "root", read)?.ok_or("rootPath, rootPaths, rootData or rootDatas: missing")?;
    let mut roots = Vec::new();
    for (name, pem) in contents {
        let found = super::chain::roots(&name, &pem).map_err(|problem| format!("root: {name}: {problem}"))?;
        roots.extend(found);
    }
    Ok(roots)
}
