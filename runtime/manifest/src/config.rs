//! Parses an image's config blob: the container's defaults, the layers and the platform. OCI image
//! specification 1.1, "Image Configuration"; Docker's format is the same.

use coracle_job::{Failure, ImageConfig, Layer};
use coracle_json::{Object, Problem};

use super::digest::{digest_of, hex};

/// A parsed config blob.
#[derive(Debug)]
pub struct Document {
    /// The fields that containers use.
    pub config: ImageConfig,
    /// Layers of the image, lowest first.
    pub layers: Vec<Layer>,
    /// Operating system, `linux`; empty in some old images.
    pub os: String,
    /// Architecture, for example `amd64` or `arm64`.
    pub architecture: String,
}

/// Parses a config blob.
///
/// # Errors
/// It is malformed, or has an invalid digest of a layer.
pub fn parse(bytes: &[u8]) -> Result<Document, Failure> {
    let text = String::from_utf8_lossy(bytes);
    read(&text).map_err(|problem| Failure::invalid(format!("image config: {problem}")))?
}

fn read(text: &str) -> Result<Result<Document, Failure>, Problem> {
    let json = Object::parse(text)?;
    let root = json.object("rootfs")?.ok_or("it has no rootfs")?;
    let config = json.object("config")?.unwrap_or_default();
    let document = |layers| {
        Ok(Document {
            config: ImageConfig {
                user: config.text("User")?,
                environment: config.texts("Env")?,
                entrypoint: config.texts("Entrypoint")?,
                command: config.texts("Cmd")?,
                working_directory: config.text("WorkingDir")?,
                stop_signal: config.text("StopSignal")?,
                volumes: config.names("Volumes")?,
                labels: config.map("Labels")?.into_iter().collect(),
            },
            layers,
            os: json.text("os")?,
            architecture: json.text("architecture")?,
        })
    };
    match layers(root.texts("diff_ids")?) {
        Ok(layers) => document(layers).map(Ok),
        Err(failure) => Ok(Err(failure)),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_and_missing_members_are_empty() {
        for json in [
            r#"{"rootfs":{"type":"layers","diff_ids":null},"config":{"Cmd":null,"Volumes":null}}"#,
            r#"{"rootfs":{}}"#,
            r#"{"rootfs":{},"os":null,"config":null}"#,
        ] {
            let document = parse(json.as_bytes()).unwrap();
            assert_eq!((document.config, document.layers), (ImageConfig::default(), Vec::new()), "{json}");
        }
        assert!(parse(b"{}").is_err() && parse(b"[").is_err());
    }

    /// Go compares them so: containers must not silently run as root because a builder wrote `user`.
    #[test]
    fn names_of_members_are_compared_without_case() {
        let json =
            r#"{"rootfs":{},"config":{"user":"me","cmd":["x"],"Env":["A=1",null],"Labels":{"a":null}}}"#;
        let config = parse(json.as_bytes()).unwrap().config;
        assert_eq!((config.user.as_str(), config.command), ("me", vec!["x".to_owned()]));
        assert_eq!(config.environment, ["A=1", ""]);
        assert_eq!(config.labels, [("a".to_owned(), String::new())]);
        let refused = parse(br#"{"rootfs":{},"config":{"Env":"A=1"}}"#).unwrap_err();
        assert!(refused.message.starts_with("image config: Env: invalid type"), "{}", refused.message);
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
