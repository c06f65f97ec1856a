//! Finds what a neighbour asks for in the store: complete blobs, and blobs that a pull is downloading. Nothing is verified here:
//! the neighbour compares the content with its digest.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::state::Announced;
use crate::go_json::Object;
use crate::image_config::DOCUMENT_BYTES_MAX;
use crate::store::{hex, open_plain};

/// The directory `images` of the store.
pub(super) struct Shelf {
    directory: PathBuf,
    /// Digests of the manifests or indexes of images by their tags.
    tags: BTreeMap<String, String>,
}

/// A blob that can be served.
pub(super) struct Blob {
    pub(super) file: File,
    /// Size of the complete blob in bytes.
    pub(super) size: u64,
    /// The pull that appends to the file; `None` if the blob is complete.
    pub(super) growth: Option<Announced>,
}

/// The result of looking for a blob.
pub(super) enum Found {
    Blob(Blob),
    /// A pull has this many bytes of the blob, and has not asked a registry for the others.
    Waiting(u64),
    Nothing,
}

/// A manifest or index.
pub(super) struct Manifest {
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) bytes: Vec<u8>,
}

impl Shelf {
    pub(super) fn new(directory: &Path, tags: BTreeMap<String, String>) -> Self {
        Self { directory: directory.to_owned(), tags }
    }

    /// Looks for a blob by its digest.
    pub(super) fn blob(&self, digest: &str) -> Found {
        let Ok(hex) = hex(digest) else { return Found::Nothing };
        if let Some(blob) = self.complete(hex) {
            return Found::Blob(blob);
        }
        let part = self.directory.join("parts").join(hex);
        let Some(announced) = Announced::read(&part) else {
            // A pull may have completed it since the first look.
            return self.complete(hex).map_or(Found::Nothing, Found::Blob);
        };
        let Ok(file) = open_plain(&part) else { return Found::Nothing };
        let length = file.metadata().map_or(0, |about| about.len());
        let size = announced.size;
        match announced.is_fetching {
            _ if length == size => Found::Blob(Blob { file, size, growth: None }),
            true => Found::Blob(Blob { file, size, growth: Some(announced) }),
            false => Found::Waiting(length),
        }
    }

    fn complete(&self, hex: &str) -> Option<Blob> {
        let file = open_plain(&self.directory.join("blobs/sha256").join(hex)).ok()?;
        let size = file.metadata().ok()?.len();
        Some(Blob { file, size, growth: None })
    }

    /// Reads a manifest or index by its digest.
    pub(super) fn manifest(&self, digest: &str) -> Option<Manifest> {
        let blob = self.complete(hex(digest).ok()?).filter(|blob| blob.size <= DOCUMENT_BYTES_MAX)?;
        let mut bytes = vec![0; blob.size as usize];
        blob.file.read_exact_at(&mut bytes, 0).ok()?;
        let media_type = media_type(&bytes)?;
        Some(Manifest { media_type, digest: digest.to_owned(), bytes })
    }

    /// Reads the manifest or index of a tag, `REGISTRY/NAME:TAG`.
    pub(super) fn tagged(&self, name: &str) -> Option<Manifest> {
        self.manifest(self.tags.get(name)?)
    }
}

/// The media type of a manifest or index; `None` if the document is neither (OCI image specification 1.1: `mediaType` is
/// optional).
fn media_type(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let object = Object::parse(text).ok()?;
    let stated = object.text("mediaType").ok()?;
    let has_list = |name| object.list(name).is_ok_and(|list| list.is_some());
    let usual = match (has_list("manifests"), has_list("layers")) {
        (true, _) => "application/vnd.oci.image.index.v1+json",
        (false, true) => "application/vnd.oci.image.manifest.v1+json",
        (false, false) => return None,
    };
    // The value becomes a header field.
    let is_field =
        !stated.is_empty() && stated.len() < 128 && stated.bytes().all(|byte| byte.is_ascii_graphic());
    Some(if is_field { stated } else { usual.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::mirror::state::Announcement;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    struct Images(PathBuf);

    impl Images {
        fn new(about: &str) -> Self {
            let path = std::env::temp_dir().join(format!("coracle-shelf-{about}-{}", std::process::id()));
            fs::create_dir_all(path.join("blobs/sha256")).unwrap();
            fs::create_dir_all(path.join("parts")).unwrap();
            Self(path)
        }

        fn shelf(&self) -> Shelf {
            Shelf::new(&self.0, BTreeMap::from([("r/a:1".to_owned(), DIGEST.to_owned())]))
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.join(below).join(hex(DIGEST).unwrap())
        }
    }

    impl Drop for Images {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// The state of the blob in words.
    fn state(shelf: &Shelf) -> String {
        match shelf.blob(DIGEST) {
            Found::Blob(Blob { size, growth: None, .. }) => format!("{size} complete"),
            Found::Blob(Blob { size, growth: Some(_), .. }) => format!("{size} growing"),
            Found::Waiting(length) => format!("waiting with {length}"),
            Found::Nothing => "nothing".to_owned(),
        }
    }

    #[test]
    fn a_part_is_served_as_its_pull_announces() {
        let images = Images::new("part");
        let (shelf, part) = (images.shelf(), images.path("parts"));
        assert_eq!(state(&shelf), "nothing");
        fs::write(&part, "hel").unwrap();
        assert_eq!(state(&shelf), "nothing", "a part of an earlier pull");
        let announcement = Announcement::new(&part, 5).unwrap();
        assert_eq!(state(&shelf), "waiting with 3");
        announcement.set_fetching(true);
        assert_eq!(state(&shelf), "5 growing");
        assert!(Announcement::new(&part, 5).is_none(), "a second pull waits for the part");
        fs::write(&part, "hello").unwrap();
        assert_eq!(state(&shelf), "5 complete");
        drop(announcement);
        assert_eq!(state(&shelf), "nothing");
        assert_eq!(fs::read_dir(images.0.join("parts")).unwrap().count(), 1, "the announcement is removed");
        fs::rename(&part, images.path("blobs/sha256")).unwrap();
        assert_eq!(state(&shelf), "5 complete");
    }

    #[test]
    fn the_announcement_of_a_killed_worker_says_nothing() {
        let images = Images::new("killed");
        let part = images.path("parts");
        fs::write(&part, "hel").unwrap();
        let announcement = Announcement::new(&part, 5).unwrap();
        announcement.set_fetching(true);
        let path = images.0.join("parts").join(format!("{}-state", hex(DIGEST).unwrap()));
        let text = fs::read(&path).unwrap();
        drop(announcement);
        fs::write(&path, &text).unwrap();
        assert_eq!(state(&images.shelf()), "nothing");
        for damaged in [&text[..21], b"", b"-0000000000000000005 f", b"xxxxxxxxxxxxxxxxxxxx f"] {
            fs::write(&path, damaged).unwrap();
            let locked = File::open(&path).unwrap();
            locked.lock().unwrap();
            assert_eq!(state(&images.shelf()), "nothing", "{damaged:?}");
        }
    }

    #[test]
    fn a_manifest_has_its_media_type_and_other_blobs_are_none() {
        let images = Images::new("manifest");
        let shelf = images.shelf();
        for (text, expected) in [
            (r#"{"mediaType":"application/x","config":{},"layers":[]}"#, Some("application/x")),
            (r#"{"config":{},"layers":[]}"#, Some("application/vnd.oci.image.manifest.v1+json")),
            (r#"{"manifests":[{}]}"#, Some("application/vnd.oci.image.index.v1+json")),
            (
                "{\"mediaType\":\"a\\r\\nb: c\",\"manifests\":[{}]}",
                Some("application/vnd.oci.image.index.v1+json"),
            ),
            (r#"{"architecture":"amd64"}"#, None),
            ("\x1f\u{8b}", None),
        ] {
            fs::write(images.path("blobs/sha256"), text).unwrap();
            let found = shelf.manifest(DIGEST).map(|manifest| manifest.media_type);
            assert_eq!(found.as_deref(), expected, "{text}");
        }
        fs::write(images.path("blobs/sha256"), r#"{"manifests":[{}]}"#).unwrap();
        assert_eq!(shelf.tagged("r/a:1").unwrap().digest, DIGEST);
        assert!(shelf.tagged("r/a:2").is_none());
    }
}
