//! Where the parts of images are below `--root`, and their records. The picture is in `coracle_job::image`: workers fill
//! blobs, layers and users files aside and rename them into place; an image exists once its record does.
//!
//! A record's body, version 1: postcard of [`Stored`]. It grows at its end only, so an older coracle reads a newer one's.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use coracle_base::error::{Context, Error, Kind, plain};
use coracle_base::log;
use coracle_base::store::{self, Damage};
use coracle_job::ImageRecord;
use serde::{Deserialize, Serialize};

use super::index::{Entry, ImageId, LayerName};

const VERSION: u8 = 1;

/// Directory of links below `layers/`.
pub(super) const LINKS: &str = "l";

/// What of /etc/passwd and /etc/group a worker keeps of an image at most.
const USERS_FILE_BYTES_MAX: u64 = 1 << 20;

/// Longest config document: what a registry serves as a manifest at most.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// An image as it is on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stored {
    /// See [`Entry::sequence`].
    pub(super) sequence: u64,
    pub(super) image: ImageRecord,
}

/// What was found at the start.
pub(super) struct Loaded {
    pub(super) entries: Vec<Entry>,
    /// Records that could not be read for now, by name.
    pub(super) unread: Vec<String>,
    /// A record was set aside.
    pub(super) has_damaged: bool,
}

/// /etc/passwd and /etc/group of an image, for names of users (CRI 3.9); empty where it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsersFiles {
    /// `/etc/passwd`; empty where the image has none.
    pub passwd: Vec<u8>,
    /// `/etc/group`; empty where the image has none.
    pub group: Vec<u8>,
}

/// The store's place.
pub(super) struct Disk {
    root: PathBuf,
}

/// The record of pins that somebody set by hand: names and ids, one a line.
const MARKS: &str = "pins";
const MARKS_VERSION: u8 = 1;

impl Disk {
    /// Makes the directories that are missing.
    pub(super) fn open(root: &Path) -> Result<Disk, Error> {
        let disk = Disk { root: root.to_owned() };
        for dir in [disk.records(), disk.links(), disk.blobs().join("sha256"), disk.parts(), disk.users()] {
            fs::create_dir_all(&dir).context(|| format!("create {}", dir.display()))?;
        }
        // Images bring set-user-ID programs of any age: only root may reach them from the host (CVE-2021-41103).
        for dir in [disk.images(), disk.layers()] {
            store::close_directory(&dir).context(|| format!("set mode of {}", dir.display()))?;
        }
        Ok(disk)
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(super) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub(super) fn blobs(&self) -> PathBuf {
        self.root.join("images/blobs")
    }

    pub(super) fn parts(&self) -> PathBuf {
        self.root.join("images/parts")
    }

    pub(super) fn users(&self) -> PathBuf {
        self.root.join("images/users")
    }

    fn records(&self) -> PathBuf {
        self.root.join("images/records")
    }

    pub(super) fn layer(&self, name: &LayerName) -> PathBuf {
        self.layers().join(name.to_string())
    }

    fn links(&self) -> PathBuf {
        self.layers().join(LINKS)
    }

    /// What a mount calls the layer, below the directory of layers: the name of a link to it, which is made where it is
    /// missing. Without a sync: it is made again by the next who asks.
    pub(super) fn mount_name(&self, layer: &LayerName) -> Result<String, Error> {
        let Some(link) = layer.link() else { return Ok(layer.to_string()) };
        let (path, target) = (self.links().join(&link), format!("../{layer}"));
        let tried = || format!("link {}", path.display());
        let name = format!("{LINKS}/{link}");
        match fs::read_link(&path) {
            Ok(found) if found == Path::new(&target) => return Ok(name),
            // It would put another layer into the container.
            Ok(found) if is_there(&self.links().join(&found), Metadata::is_dir)? => {
                let text = format!("layer {layer}: its short name is taken by {}", found.display());
                return Err(Error::new(Kind::FailedPrecondition, text));
            }
            Ok(_) => fs::remove_file(&path).context(tried)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).context(tried),
        }
        symlink(&target, &path).context(tried)?;
        Ok(name)
    }

    /// Removes links to layers that are gone. One that stays is in nobody's way.
    pub(super) fn sweep_links(&self) {
        let gone = list(&self.links()).into_iter().map(|name| self.links().join(name));
        for path in gone.filter(|path| matches!(path.try_exists(), Ok(false))) {
            if let Err(error) = fs::remove_file(&path) {
                log::warn!("link to a layer stays"; path = path.display(), error = plain(&error));
            }
        }
    }

    /// Where a blob is; none for what is no digest.
    pub(super) fn blob(&self, digest: &str) -> Option<PathBuf> {
        let (algorithm, hex) = digest.split_once(':').filter(|_| super::reference::is_digest(digest))?;
        Some(self.blobs().join(algorithm).join(hex))
    }

    /// Every image that is whole. What is damaged or lacks a layer is set aside with a warning and costs itself only; what
    /// cannot be read for now stays where it is.
    pub(super) fn load_all(&self) -> Result<Loaded, Error> {
        Ok(self.load_some(store::names(&self.records())?))
    }

    /// As [`Disk::load_all`], of these records.
    pub(super) fn load_some(&self, names: Vec<String>) -> Loaded {
        let mut loaded = Loaded { entries: Vec::new(), unread: Vec::new(), has_damaged: false };
        for name in names {
            match self.load(&name) {
                Ok((entry, _)) => loaded.entries.push(entry),
                Err(Damage::Damaged(reason)) => {
                    loaded.has_damaged = true;
                    self.set_aside(&name, &reason);
                }
                // Removed meanwhile.
                Err(Damage::Absent) => {}
                Err(error @ Damage::Io(_)) => {
                    log::warn!("image not loaded, it is tried again"; image = name, error = error);
                    loaded.unread.push(name);
                }
            }
        }
        loaded
    }

    /// The record of one image.
    pub(super) fn read(&self, id: &ImageId) -> Result<Stored, Error> {
        match self.load(&id.hex()) {
            Ok((_, stored)) => Ok(stored),
            Err(damage) => {
                let kind = if matches!(damage, Damage::Absent) { Kind::NotFound } else { Kind::Internal };
                Err(Error::new(kind, damage.to_string()).context(format!("read record of image {id}")))
            }
        }
    }

    pub(super) fn commit(&self, id: &ImageId, stored: &Stored) -> Result<(), Error> {
        let body = postcard::to_allocvec(stored)
            .map_err(|error| Error::new(Kind::Internal, format!("encode record of image {id}: {error}")))?;
        store::commit(&self.records(), &id.hex(), store::Kind::Image, VERSION, &body)
    }

    pub(super) fn remove(&self, id: &ImageId) -> Result<(), Error> {
        store::remove(&self.records(), &id.hex())
    }

    /// What of `image` is not there, if anything.
    ///
    /// # Errors
    /// The disk does not say whether it is there.
    pub(super) fn missing(&self, image: &ImageRecord) -> Result<Option<String>, Error> {
        for layer in &image.layers {
            let path = self.layers().join(&layer.name);
            if !is_there(&path, Metadata::is_dir)? {
                return Ok(Some(format!("layer {} is missing", layer.name)));
            }
        }
        for digest in &image.blobs {
            let path = self.blob(digest);
            if !path.map_or(Ok(false), |path| is_there(&path, Metadata::is_file))? {
                return Ok(Some(format!("blob {digest} is missing")));
            }
        }
        Ok(None)
    }

    /// The image's config document, as it was pulled.
    pub(super) fn config(&self, id: &ImageId) -> Result<String, Error> {
        let path = self.blobs().join("sha256").join(id.hex());
        let tried = || format!("read config of image {id}");
        let bytes = read_bounded(&path, CONFIG_BYTES_MAX).context(tried)?;
        String::from_utf8(bytes).map_err(|_| Error::new(Kind::Internal, "it is not UTF-8").context(tried()))
    }

    pub(super) fn users_files(&self, id: &ImageId) -> Result<UsersFiles, Error> {
        let dir = self.users().join(id.hex());
        let read = |name: &str| match read_bounded(&dir.join(name), USERS_FILE_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.context(|| format!("read /etc/{name} of image {id}")),
        };
        Ok(UsersFiles { passwd: read("passwd")?, group: read("group")? })
    }

    /// The record of an image, whether or not what it says is there.
    pub(super) fn read_unchecked(&self, id: &ImageId) -> Result<Stored, Error> {
        let parsed = self.parse(&id.hex()).map(|(_, stored)| stored);
        parsed.map_err(|damage| {
            Error::new(Kind::Internal, damage.to_string()).context(format!("read record of image {id}"))
        })
    }

    fn load(&self, name: &str) -> Result<(Entry, Stored), Damage> {
        let (entry, stored) = self.parse(name)?;
        for layer in &entry.layers {
            match is_there(&self.layer(layer), Metadata::is_dir) {
                Ok(true) => {}
                Ok(false) => return Err(Damage::Damaged(format!("layer {layer} is missing"))),
                // The image stays, and so does the layer: a container that needs it says what is wrong with it.
                Err(error) => {
                    log::warn!("a layer of an image cannot be looked at"; image = name, error = error)
                }
            }
        }
        Ok((entry, stored))
    }

    fn parse(&self, name: &str) -> Result<(Entry, Stored), Damage> {
        // It would be in the way of the record when the image is pulled again.
        if fs::metadata(self.records().join(name)).is_ok_and(|found| !found.is_file()) {
            return Err(Damage::Damaged("it is not a file".to_owned()));
        }
        let loaded = store::load(&self.records(), name, store::Kind::Image)?;
        let damaged = |reason: String| Damage::Damaged(reason);
        let stored: Stored = postcard::from_bytes(&loaded.body)
            .map_err(|error| damaged(format!("body of version {}: {error}", loaded.version)))?;
        let entry = Entry::of(&stored.image, stored.sequence).map_err(damaged)?;
        if entry.id.hex() != name {
            return Err(damaged(format!("it is the record of {}", entry.id)));
        }
        Ok((entry, stored))
    }

    fn set_aside(&self, name: &str, reason: &str) {
        match store::quarantine(&self.root, &self.records().join(name), reason) {
            Ok(aside) => {
                log::warn!("image record set aside"; image = name, reason = reason, path = aside.display())
            }
            Err(error) => log::warn!("image record is damaged"; image = name, reason = reason, error = error),
        }
    }

    /// Pins that somebody set by hand. A record that cannot be read is logged and costs the pins: a node must start.
    pub(super) fn marks(&self) -> BTreeSet<String> {
        match store::load(&self.images(), MARKS, store::Kind::Pins) {
            Ok(loaded) => String::from_utf8_lossy(&loaded.body).lines().map(str::to_owned).collect(),
            Err(Damage::Absent) => BTreeSet::new(),
            Err(damage) => {
                log::error!("pins set by hand cannot be read: set them again"; reason = damage);
                BTreeSet::new()
            }
        }
    }

    /// Writes down what [`Disk::marks`] gives from now on.
    pub(super) fn commit_marks(&self, marks: &BTreeSet<String>) -> Result<(), Error> {
        let body: String = marks.iter().flat_map(|mark| [mark.as_str(), "\n"]).collect();
        store::commit(&self.images(), MARKS, store::Kind::Pins, MARKS_VERSION, body.as_bytes())
            .map_err(|error| error.context("keep the pins"))
    }
}

/// Whether `path` is there and of this kind; links are followed.
///
/// # Errors
/// Any error but ENOENT and ENOTDIR (`EIO`, `ENOMEM`, `ELOOP`…): it does not say that there is nothing.
fn is_there(path: &Path, is_wanted: fn(&Metadata) -> bool) -> Result<bool, Error> {
    match fs::metadata(path) {
        Ok(found) => Ok(is_wanted(&found)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error).context(|| format!("look at {}", path.display())),
    }
}

/// Reads a whole file of at most `bytes_max`.
fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// Names in a directory; what cannot be listed is empty, with a warning.
pub(super) fn list(dir: &Path) -> Vec<String> {
    let listed = fs::read_dir(dir).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<io::Result<_>>()
    });
    listed.unwrap_or_else(|error| {
        log::warn!("directory not listed"; path = dir.display(), error = plain(&error));
        Vec::new()
    })
}
