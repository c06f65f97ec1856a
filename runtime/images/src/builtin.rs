//! The built-in sandbox image (PIN-3 in CRI 2.33). coracle needs no pause image, because the monitor is the
//! pause process, but the kubelet expects the image of sandboxes to be listed and pinned (KEP-4056).
//! Therefore there is an image that consists of a name and a config document; the document's digest is the
//! image ID. The image has no layers and is neither on disk nor in a registry.

use std::time::Instant;

use super::index::{Entry, ImageId};

/// The only tag of the sandbox image. `.local` is not an internet domain (RFC 6762), so no registry can serve
/// another image with this name. The version is that of the config document and not of coracle, because the
/// ID must not change as long as the document does not change.
pub(crate) const TAG: &str = "coracle.local/sandbox:v1";

/// The OCI image config of the sandbox image.
pub(crate) const CONFIG: &str = r#"{"architecture":"all","os":"linux","config":{"Labels":{"org.opencontainers.image.title":"coracle's built-in sandbox image"}},"rootfs":{"type":"layers","diff_ids":[]}}"#;

/// The SHA-256 of [`CONFIG`].
pub(crate) const ID: ImageId = ImageId::from_bytes([
    0xd0, 0x05, 0xea, 0x01, 0x55, 0x79, 0x65, 0x35, 0x0b, 0x0d, 0x33, 0x08, 0x3e, 0x70, 0xaa, 0x2a, 0x01,
    0x8a, 0xf9, 0xb9, 0xb3, 0xd2, 0x63, 0x91, 0x4f, 0xcd, 0x7c, 0x40, 0x62, 0xf4, 0x96, 0x9e,
]);

/// The configured sandbox image, if it is not the built-in one.
#[derive(Default)]
pub(crate) struct SandboxImage {
    /// Normalised reference; `None`: the built-in image is configured.
    pub(crate) name: Option<String>,
    /// Time at which the last pull of the image was started; `None`: never.
    pub(crate) tried: Option<Instant>,
}

/// The index entry of the sandbox image. Its sequence is the greatest, so that no other image gets its tag.
pub(super) fn entry() -> Entry {
    Entry {
        id: ID,
        tags: vec![TAG.into()],
        digests: Vec::new(),
        size_bytes: CONFIG.len() as u64,
        user: String::new(),
        layers: Vec::new(),
        sequence: u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::{CONFIG, ID, TAG};
    use coracle_reference::Reference;
    use sha2::{Digest, Sha256};

    #[test]
    fn the_id_is_the_digest_of_the_config() {
        let digest: [u8; 32] = Sha256::digest(CONFIG).into();
        assert_eq!(ID, crate::ImageId::from_bytes(digest), "{digest:#04x?}");
    }

    #[test]
    fn the_tag_is_in_normal_form_and_the_config_is_json() {
        assert_eq!(Reference::parse(TAG).unwrap().to_string(), TAG);
        serde_json::from_str::<serde_json::Value>(CONFIG).unwrap();
    }
}
