//! Manifests and indexes of OCI and Docker: accepted media types and parsing. OCI image specification 1.1;
//! Docker image manifest version 2, schema 2. Schema 1 is refused. Pure.

use coracle_job::{Failure, FailureKind};
use serde::Deserialize;

use super::platform::Platform;
use crate::failure::{failure, invalid};

pub(crate) use super::platform::ARCHITECTURE;

/// Value of the `Accept` header in requests of manifests and indexes.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// Media type of an image's manifest.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Media type of an image's config.
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// A descriptor of a blob or manifest: digest, size, media type, platform.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<Platform>,
}

impl Descriptor {
    /// A descriptor of which only the digest is known.
    pub(crate) fn of(digest: &str) -> Self {
        Self { media_type: String::new(), digest: digest.to_owned(), size: 0, platform: None }
    }

    /// The name of the descriptor's platform, in docker's notation.
    pub(crate) fn platform_name(&self) -> String {
        self.platform.as_ref().map_or_else(|| "unknown/unknown".to_owned(), Platform::to_string)
    }

    /// Whether the descriptor has no platform, or this node's.
    pub(crate) fn may_be_ours(&self) -> bool {
        self.platform.as_ref().is_none_or(|platform| platform.rank().is_some())
    }
}

/// A document below a registry's `manifests/`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Document {
    /// An index of several platforms.
    Index(Vec<Descriptor>),
    /// A manifest of one image.
    Manifest {
        /// Descriptor of the image config.
        config: Descriptor,
        /// Layers of the image, lowest first.
        layers: Vec<Descriptor>,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Json {
    #[serde(default)]
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// Parses a manifest or an index; the type is detected by its members, because the Content-Type of registries
/// varies.
pub(crate) fn parse(bytes: &[u8]) -> Result<Document, Failure> {
    let json: Json = serde_json::from_slice(bytes).map_err(|error| invalid(format!("manifest: {error}")))?;
    if json.schema_version == 1 {
        return Err(invalid("manifest: Docker schema 1 is not supported"));
    }
    match (json.manifests, json.config) {
        (Some(manifests), None) => Ok(Document::Index(manifests)),
        (None, Some(config)) => {
            let layers = json.layers.unwrap_or_default();
            match layers.iter().find(|layer| !is_layer(&layer.media_type)) {
                Some(layer) => {
                    Err(invalid(format!("manifest: a layer has media type {:?}", layer.media_type)))
                }
                None => Ok(Document::Manifest { config, layers }),
            }
        }
        _ => Err(invalid(format!("manifest: {:?} is neither an image nor an index", json.media_type))),
    }
}

/// Whether a layer of this media type is supported. Foreign layers (Windows) are not.
fn is_layer(media_type: &str) -> bool {
    let compression = match media_type {
        "" | "application/vnd.docker.image.rootfs.diff.tar" => return true,
        "application/vnd.docker.image.rootfs.diff.tar.gzip"
        | "application/vnd.docker.image.rootfs.diff.tar.zstd" => {
            return true;
        }
        other => other.strip_prefix("application/vnd.oci.image.layer.v1.tar"),
    };
    matches!(compression, Some("" | "+gzip" | "+zstd"))
}

/// Chooses this node's image in an index: Linux, and the best variant for this CPU.
pub(crate) fn choose(manifests: &[Descriptor]) -> Result<&Descriptor, Failure> {
    let rank = |descriptor: &&Descriptor| descriptor.platform.as_ref().and_then(Platform::rank);
    let ours = manifests.iter().filter(|descriptor| rank(descriptor).is_some()).min_by_key(rank);
    ours.ok_or_else(|| no_match(manifests.iter().map(Descriptor::platform_name)))
}

/// Maximum number of platform names in one error: an index may list hundreds.
const PLATFORMS_MAX: usize = 20;

/// The failure for an image that is available only for `platforms`, none of which this node supports.
pub(crate) fn no_match(platforms: impl Iterator<Item = String>) -> Failure {
    let mut names: Vec<String> = platforms.filter(|name| !name.starts_with("unknown/")).collect();
    names.sort_unstable();
    names.dedup();
    let more = if names.len() > PLATFORMS_MAX { ", …" } else { "" };
    names.truncate(PLATFORMS_MAX);
    let there = match names.is_empty() {
        true => String::new(),
        false => format!("; there is: {}{more}", names.join(", ")),
    };
    let text = format!("no match for platform in manifest: linux/{ARCHITECTURE}: not found{there}");
    failure(FailureKind::NotFound, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_a_document_is_detected_by_its_members() {
        let config = r#""config":{"digest":"sha256:c","size":2}"#;
        let layer =
            |kind: &str| format!(r#"{{{config},"layers":[{{"mediaType":"{kind}","digest":"d","size":1}}]}}"#);
        for (text, expected) in [
            (r#"{"manifests":[]}"#.to_owned(), Ok("index")),
            (format!("{{{config}}}"), Ok("manifest")),
            (layer("application/vnd.oci.image.layer.v1.tar+zstd"), Ok("manifest")),
            (layer("application/vnd.docker.image.rootfs.diff.tar.gzip"), Ok("manifest")),
            (layer("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"), Err("media type")),
            (r#"{"schemaVersion":1}"#.to_owned(), Err("schema 1")),
            ("{}".to_owned(), Err("neither")),
            ("[".to_owned(), Err("manifest:")),
        ] {
            match (parse(text.as_bytes()), expected) {
                (Ok(Document::Index(_)), Ok("index")) | (Ok(Document::Manifest { .. }), Ok("manifest")) => {}
                (Err(error), Err(words)) if error.message.contains(words) => {}
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
    }
}
