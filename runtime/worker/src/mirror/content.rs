//! Finds what a neighbour asks for in the store: complete blobs, and blobs that a pull is downloading. Nothing is verified here:
//! the neighbour compares the content with its digest.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use coracle_job::ServedImage;

use crate::store::open_plain;
use coracle_json::Object;
use coracle_manifest::{DOCUMENT_BYTES_MAX, hex};
use coracle_site::announcement::{Announced, Stage};

/// The directory `images` of the store.
pub(super) struct Shelf {
    directory: PathBuf,
    /// Digests of the manifests or indexes that the node has pulled, by `REGISTRY/NAME`.
    digests: BTreeMap<String, Vec<String>>,
    /// Digests of the manifests or indexes of images by their tags.
    tags: BTreeMap<String, String>,
    /// Held while a document is read and parsed, which takes several times its length of memory.
    reading: Mutex<()>,
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
    /// A pull has this many bytes of the blob, or of what changed, and does not download the blob.
    Begun(Stage, u64),
    Nothing,
}

/// A manifest or index.
pub(super) struct Manifest {
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) blob: Blob,
}

impl Shelf {
    pub(super) fn new(directory: &Path, images: &[ServedImage]) -> Self {
        let mut digests: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut tags = BTreeMap::new();
        for image in images {
            let names = || image.digests.iter().filter_map(|name| name.split_once('@'));
            for (name, digest) in names() {
                digests.entry(name.to_owned()).or_default().push(digest.to_owned());
            }
            for tag in &image.tags {
                let name = tag.rsplit_once(':').map(|(name, _)| name);
                if let Some((_, digest)) = names().find(|(other, _)| Some(*other) == name) {
                    tags.insert(tag.clone(), digest.to_owned());
                }
            }
        }
        Self { directory: directory.to_owned(), digests, tags, reading: Mutex::new(()) }
    }

    /// Looks for a blob by its digest, also for one that is being downloaded from `registry`.
    pub(super) fn blob(&self, digest: &str, registry: &str) -> Found {
        let Ok(hex) = hex(digest) else { return Found::Nothing };
        if let Some(blob) = self.complete(hex) {
            return Found::Blob(blob);
        }
        let part = self.directory.join("parts").join(hex);
        let (Some(announced), Ok(file)) =
            (Announced::read(&part, |path| open_plain(path).ok()), open_plain(&part))
        else {
            // A pull may have completed it since the first look.
            return self.complete(hex).map_or(Found::Nothing, Found::Blob);
        };
        let length = file.metadata().map_or(0, |about| about.len());
        let size = announced.size;
        match announced.stage {
            _ if !announced.is_of(registry) => Found::Nothing,
            Stage::Changing => Found::Begun(Stage::Changing, size),
            _ if length == size => Found::Blob(Blob { file, size, growth: None }),
            Stage::Waiting => Found::Begun(Stage::Waiting, length),
            Stage::Fetching | Stage::Resuming => Found::Blob(Blob { file, size, growth: Some(announced) }),
        }
    }

    fn complete(&self, hex: &str) -> Option<Blob> {
        let file = open_plain(&self.directory.join("blobs/sha256").join(hex)).ok()?;
        let size = file.metadata().ok()?.len();
        Some(Blob { file, size, growth: None })
    }

    /// Looks for a manifest or index by its digest, if this node has it under `name`, `REGISTRY/NAME`: as the image that it has pulled,
    /// or as one of an index. Otherwise who may read one repository could read all of them.
    pub(super) fn manifest_of(&self, name: &str, digest: &str) -> Option<Manifest> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let pulled = self.digests.get(name)?;
        let is_listed = |index: &String| self.read(index).is_some_and(|(_, index)| lists(&index, digest));
        let is_known = pulled.iter().any(|own| own == digest) || pulled.iter().any(is_listed);
        if is_known { self.manifest(digest) } else { None }
    }

    fn manifest(&self, digest: &str) -> Option<Manifest> {
        let (blob, bytes) = self.read(digest)?;
        let media_type = media_type(&bytes)?;
        Some(Manifest { media_type, digest: digest.to_owned(), blob })
    }

    fn read(&self, digest: &str) -> Option<(Blob, Vec<u8>)> {
        let blob = self.complete(hex(digest).ok()?).filter(|blob| blob.size <= DOCUMENT_BYTES_MAX)?;
        let mut bytes = vec![0; blob.size as usize];
        blob.file.read_exact_at(&mut bytes, 0).ok()?;
        Some((blob, bytes))
    }

    /// Looks for the manifest or index of a tag, `REGISTRY/NAME:TAG`.
    pub(super) fn tagged(&self, name: &str) -> Option<Manifest> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.manifest(self.tags.get(name)?)
    }
}

/// Whether an index has a manifest with this digest.
fn lists(index: &[u8], digest: &str) -> bool {
    let manifests = || {
        let index = Object::parse(std::str::from_utf8(index).ok()?).ok()?;
        index.list("manifests").ok()?
    };
    let digest_of = |text: &str| Object::parse(text).and_then(|descriptor| descriptor.text("digest"));
    manifests().unwrap_or_default().into_iter().any(|text| digest_of(text).as_deref() == Ok(digest))
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
    use coracle_site::announcement::Announcement;

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
            let image =
                ServedImage { digests: vec![format!("r/a@{DIGEST}")], tags: vec!["r/a:1".to_owned()] };
            Shelf::new(&self.0, &[image])
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
        match shelf.blob(DIGEST, "r") {
            Found::Blob(Blob { size, growth: None, .. }) => format!("{size} complete"),
            Found::Blob(Blob { size, growth: Some(_), .. }) => format!("{size} growing"),
            Found::Begun(stage, length) => format!("{} with {length}", stage.word()),
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
        let announcement = Announcement::new(&part, 5, "r").unwrap();
        assert_eq!(state(&shelf), "waiting with 3");
        announcement.set(Stage::Resuming);
        assert_eq!(state(&shelf), "5 growing");
        announcement.set(Stage::Waiting);
        assert_eq!(state(&shelf), "waiting with 3");
        announcement.changing(0);
        assert_eq!(state(&shelf), "changing with 0");
        fs::write(&part, "").unwrap();
        assert_eq!(state(&shelf), "changing with 0", "an empty part is not a blob of its size");
        announcement.changing(7);
        assert_eq!(state(&shelf), "changing with 7");
        assert!(announcement.waiting(5, "r"));
        assert_eq!(state(&shelf), "waiting with 0");
        announcement.set(Stage::Fetching);
        assert_eq!(state(&shelf), "5 growing");
        assert!(Announcement::new(&part, 5, "r").is_none(), "a second pull waits for the part");
        assert!(matches!(shelf.blob(DIGEST, "other"), Found::Nothing), "a pull from another registry");
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
        let announcement = Announcement::new(&part, 5, "r").unwrap();
        announcement.set(Stage::Fetching);
        let path = images.0.join("parts").join(format!("{}-state", hex(DIGEST).unwrap()));
        let text = fs::read(&path).unwrap();
        drop(announcement);
        fs::write(&path, &text).unwrap();
        assert_eq!(state(&images.shelf()), "nothing");
        let with = |begin: &[u8]| [begin, &text[begin.len()..]].concat();
        let damaged = [
            text[..text.len() - 1].to_vec(),
            Vec::new(),
            with(b"-0000000000000000005 f"),
            with(b"xxxxxxxxxxxxxxxxxxxx f"),
            with(b"00000000000000000005 x"),
        ];
        for damaged in damaged {
            // The announcement is locked, and its text is another one.
            let announcement = Announcement::new(&part, 5, "r").unwrap();
            fs::write(&path, &damaged).unwrap();
            assert_eq!(state(&images.shelf()), "nothing", "{damaged:?}");
            drop(announcement);
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

    #[test]
    fn a_manifest_is_served_under_its_names_only() {
        let images = Images::new("names");
        let shelf = images.shelf();
        let of_platform = DIGEST.replace("sha256:01", "sha256:ff");
        let index = format!(r#"{{"manifests":[{{"digest":"{of_platform}"}}]}}"#);
        fs::write(images.path("blobs/sha256"), index).unwrap();
        fs::write(images.0.join("blobs/sha256").join(hex(&of_platform).unwrap()), r#"{"layers":[]}"#)
            .unwrap();
        for digest in [DIGEST, &of_platform] {
            assert!(shelf.manifest_of("r/a", digest).is_some(), "{digest}");
            for other in ["r/b", "s/a", "a", ""] {
                assert!(shelf.manifest_of(other, digest).is_none(), "{other} {digest}");
            }
        }
        let other = DIGEST.replace("sha256:01", "sha256:ee");
        fs::write(images.0.join("blobs/sha256").join(hex(&other).unwrap()), r#"{"layers":[]}"#).unwrap();
        assert!(shelf.manifest_of("r/a", &other).is_none(), "an image of another repository");
    }
}
