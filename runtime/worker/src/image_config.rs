//! Parses an image's config blob: the container's defaults, the layers and the platform. OCI image
//! specification 1.1, "Image Configuration"; Docker's format is the same.

use std::collections::BTreeMap;

use coracle_job::{Failure, ImageConfig, Layer};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::failure::invalid;
use crate::store::hex;

/// Maximum length in bytes of a manifest, index or config: the limit of registries.
pub(crate) const DOCUMENT_BYTES_MAX: u64 = 4 << 20;

/// A parsed config blob.
#[derive(Debug)]
pub(crate) struct Document {
    /// The fields that containers use.
    pub(crate) config: ImageConfig,
    /// Layers of the image, lowest first.
    pub(crate) layers: Vec<Layer>,
    /// Operating system, `linux`; empty in some old images.
    pub(crate) os: String,
    /// Architecture, for example `amd64` or `arm64`.
    pub(crate) architecture: String,
}

#[derive(Deserialize)]
struct Json {
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    config: Option<JsonConfig>,
    rootfs: JsonRoot,
}

#[derive(Deserialize)]
struct JsonRoot {
    #[serde(default)]
    diff_ids: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct JsonConfig {
    user: Option<String>,
    env: Option<Texts>,
    entrypoint: Option<Texts>,
    cmd: Option<Texts>,
    working_dir: Option<String>,
    stop_signal: Option<String>,
    volumes: Option<BTreeMap<String, serde_json::Value>>,
    labels: Option<BTreeMap<String, Option<String>>>,
}

/// Texts in which `null` is an empty one, as Go's readers take it.
type Texts = Vec<Option<String>>;

/// Parses a config blob.
pub(crate) fn parse(bytes: &[u8]) -> Result<Document, Failure> {
    let json: Json =
        serde_json::from_slice(bytes).map_err(|error| invalid(format!("image config: {error}")))?;
    let config = json.config.unwrap_or_default();
    let texts =
        |texts: Option<Texts>| texts.unwrap_or_default().into_iter().map(Option::unwrap_or_default).collect();
    let labels = config.labels.unwrap_or_default().into_iter();
    Ok(Document {
        config: ImageConfig {
            user: config.user.unwrap_or_default(),
            environment: texts(config.env),
            entrypoint: texts(config.entrypoint),
            command: texts(config.cmd),
            working_directory: config.working_dir.unwrap_or_default(),
            stop_signal: config.stop_signal.unwrap_or_default(),
            volumes: config.volumes.unwrap_or_default().into_keys().collect(),
            labels: labels.map(|(name, value)| (name, value.unwrap_or_default())).collect(),
        },
        layers: layers(json.rootfs.diff_ids.unwrap_or_default())?,
        os: json.os.unwrap_or_default(),
        architecture: json.architecture.unwrap_or_default(),
    })
}

/// Computes the chain IDs: the chain ID of the lowest layer is its diff ID; the chain ID of another layer is
/// the digest of `CHAIN_BELOW DIFF_ID`.
fn layers(diff_ids: Vec<String>) -> Result<Vec<Layer>, Failure> {
    let mut layers: Vec<Layer> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        hex(&diff_id)?;
        let chain_id = match layers.last() {
            None => diff_id.clone(),
            Some(below) => digest_of(format!("{} {diff_id}", below.chain_id).as_bytes()),
        };
        let name = hex(&chain_id)?.to_owned();
        layers.push(Layer { diff_id, chain_id, name });
    }
    Ok(layers)
}

/// The digest `sha256:HEX` of bytes.
pub(crate) fn digest_of(bytes: &[u8]) -> String {
    digest_text(&Sha256::digest(bytes))
}

/// The text `sha256:HEX` of a computed hash.
pub(crate) fn digest_text(hash: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::from("sha256:");
    for byte in hash {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_and_missing_members_are_empty() {
        for json in [
            r#"{"rootfs":{"type":"layers","diff_ids":null},"config":{"Cmd":null,"Volumes":null}}"#,
            r#"{"rootfs":{}}"#,
        ] {
            let document = parse(json.as_bytes()).unwrap();
            assert_eq!((document.config, document.layers), (ImageConfig::default(), Vec::new()), "{json}");
        }
        assert!(parse(b"{}").is_err() && parse(b"[").is_err());
    }

    #[test]
    fn null_is_an_empty_text() {
        let json = r#"{"rootfs":{},"config":{"Labels":{"a":null},"Env":[null,"A=1"],"Entrypoint":[null]}}"#;
        let config = parse(json.as_bytes()).unwrap().config;
        assert_eq!(config.labels, [("a".to_owned(), String::new())]);
        assert_eq!(
            (config.environment, config.entrypoint),
            (vec![String::new(), "A=1".into()], vec![String::new()])
        );
    }

    #[test]
    fn chain_ids_match_the_specification() {
        let diff_ids = vec![digest_of(b"a"), digest_of(b"b")];
        let layers = layers(diff_ids.clone()).unwrap();
        assert_eq!(layers[0].chain_id, diff_ids[0]);
        assert_eq!(layers[1].chain_id, digest_of(format!("{} {}", diff_ids[0], diff_ids[1]).as_bytes()));
        assert_eq!(layers[1].name, layers[1].chain_id["sha256:".len()..]);
        assert_eq!(layers[1].name.len(), 64, "all 256 bits, because an existing layer is reused by its name");
    }
}
