//! Finds the manifest of this node's platform, which may be behind indexes, and its config. Archives and
//! containerd's content store differ only in how a blob is read.

use coracle_job::Failure;

use crate::failure::invalid;
use crate::image_config;
use crate::pull::manifest::{self, Descriptor, Document};
use crate::pull::platform;

/// Maximum nesting of indexes; real archives have one level.
const INDEX_DEPTH_MAX: u32 = 3;

/// The documents of an image, and its layers.
pub(crate) struct Resolved {
    pub(crate) config: Vec<u8>,
    /// Digest and content of the manifests and indexes that lead to the image.
    pub(crate) documents: Vec<(String, Vec<u8>)>,
    /// Layers, lowest first.
    pub(crate) layers: Vec<Descriptor>,
}

/// The result of a search for this platform's image.
pub(crate) enum Resolution {
    /// The image.
    Ours(Resolved),
    /// The manifest or index with this digest is missing.
    NoManifest(String),
    /// The config with this digest is missing.
    NoConfig(String),
    /// There are images for these other platforms only.
    Foreign(Vec<String>),
}

/// Reads a manifest, index or config by its digest, which it verifies; `None` if it is missing.
pub(crate) type ReadDocument<'a> = &'a dyn Fn(&str) -> Result<Option<Vec<u8>>, Failure>;

/// Follows a descriptor to the image of this platform.
///
/// # Errors
/// A document is invalid or cannot be read, or indexes are nested too deeply.
pub(crate) fn resolve(top: &Descriptor, read: ReadDocument<'_>) -> Result<Resolution, Failure> {
    if !top.may_be_ours() {
        // Unread: what the manifests of others point to need not be layers.
        return Ok(Resolution::Foreign(vec![top.platform_name()]));
    }
    let mut documents = Vec::new();
    let mut digest = top.digest.clone();
    for _ in 0..=INDEX_DEPTH_MAX {
        let Some(bytes) = read(&digest)? else { return Ok(Resolution::NoManifest(digest)) };
        let document = manifest::parse(&bytes)?;
        documents.push((digest, bytes));
        match document {
            // A nested index may omit the platform, which is then read from the config.
            Document::Index(manifests) => {
                let unsaid = || manifests.iter().find(|manifest| manifest.may_be_ours());
                match manifest::choose(&manifests).ok().or_else(unsaid) {
                    Some(chosen) => digest = chosen.digest.clone(),
                    None => {
                        let names = manifests.iter().map(Descriptor::platform_name).collect();
                        return Ok(Resolution::Foreign(names));
                    }
                }
            }
            Document::Manifest { config, layers } => {
                let digest = config.digest;
                let Some(config) = read(&digest)? else { return Ok(Resolution::NoConfig(digest)) };
                return Ok(match foreign(&config)? {
                    Some(platform) => Resolution::Foreign(vec![platform]),
                    None => Resolution::Ours(Resolved { config, documents, layers }),
                });
            }
        }
    }
    Err(invalid(format!("indexes nested deeper than {INDEX_DEPTH_MAX}")))
}

/// The platform of an image that is not for this node; old images without a platform are accepted.
pub(super) fn foreign(config: &[u8]) -> Result<Option<String>, Failure> {
    let document = image_config::parse(config)?;
    let is_ours = platform::is_ours(&document.os, &document.architecture);
    Ok((!is_ours).then(|| format!("{}/{}", document.os, document.architecture)))
}
