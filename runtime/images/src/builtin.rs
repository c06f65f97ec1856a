//! The built-in sandbox image (design "The sandbox image"; PIN-3 in CRI 2.33). No pause image is needed, since
//! the monitor is the pause process, but the kubelet's contract (KEP-4056) wants the image that sandboxes are made from
//! listed and pinned. So there is one that consists of its name: it has a config document, and its id is the digest
//! of that, like any other image's; it has no layer, is on no disk and in no registry.

use std::time::Instant;

use super::index::{Entry, ImageId};

/// Its one tag. `.local` names nothing on the internet (RFC 6762), so no registry can ever serve something else under
/// this name. The version is that of the document below, not of coracle: the id must stay while nothing changes.
pub(crate) const TAG: &str = "coracle.local/sandbox:v1";

/// Its OCI config.
pub(crate) const CONFIG: &str = r#"{"architecture":"all","os":"linux","config":{"Labels":{"org.opencontainers.image.title":"coracle's built-in sandbox image"}},"rootfs":{"type":"layers","diff_ids":[]}}"#;

/// The SHA-256 of [`CONFIG`].
pub(crate) const ID: ImageId = ImageId::from_bytes([
    0xd0, 0x05, 0xea, 0x01, 0x55, 0x79, 0x65, 0x35, 0x0b, 0x0d, 0x33, 0x08, 0x3e, 0x70, 0xaa, 0x2a, 0x01,
    0x8a, 0xf9, 0xb9, 0xb3, 0xd2, 0x63, 0x91, 0x4f, 0xcd, 0x7c, 0x40, 0x62, 0xf4, 0x96, 0x9e,
]);

/// The sandbox image that is configured, if it is not the built-in one.
#[derive(Default)]
pub(crate) struct SandboxImage {
    /// In normal form.
    pub(crate) name: Option<String>,
    /// When the last pull of it was begun.
    pub(crate) tried: Option<Instant>,
}

/// As it stands in the index, beside the others; its sequence is the greatest, so that nobody takes its tag.
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
    use crate::reference::Reference;
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
