//! Images on disk below `--root`, and their records. `coracle_job::image` documents the layout: workers write
//! blobs, layers and user files under temporary names and rename them; an image exists when it has a record.
//!
//! Format of a record's body, version 1: postcard of [`Stored`]. Fields are only appended, so older releases
//! can read newer records.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use coracle_base::error::{Context, Error, Kind, describe_io};
use coracle_base::store::{self, Damage, Unread};
use coracle_base::{log, time};
use coracle_job::{
    ImageRecord, STORE_INDEX, USERS_FILE_BYTES_MAX, USERS_RECORD, USERS_RECORD_BYTES_MAX, UsersFiles,
};
use coracle_sandbox::collect::ordered;
use serde::{Deserialize, Serialize};

use super::index::{Entry, ImageId, LayerName};

const VERSION: u8 = 1;

/// Name of the directory with symbolic links to layers, below `layers/`.
pub(super) const LINKS: &str = "l";

/// Maximum length in bytes of a text about damage: a path, and what is wrong with it.
const DAMAGE_BYTES_MAX: u64 = 64 << 10;

/// Maximum length of a config document in bytes: the maximum size of a manifest that registries serve.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// The content of an image record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stored {
    /// Sequence of the commit ([`Entry::sequence`]).
    pub(super) sequence: u64,
    pub(super) image: ImageRecord,
}

/// The result of loading the records at the start.
pub(super) struct Loaded {
    pub(super) entries: Vec<Entry>,
    /// Names of records that could not be read, with the error.
    pub(super) unread: BTreeMap<String, String>,
    /// Whether a record was damaged and moved to quarantine.
    pub(super) has_damaged: bool,
}

/// The directory of the store.
pub(super) struct Disk {
    root: PathBuf,
    /// Directories of additional stores.
    stores: Vec<PathBuf>,
    unread: Unread,
}

/// Name of the record of manual pins: names and IDs, one per line.
const MARKS: &str = "pins";
const MARKS_VERSION: u8 = 1;

impl Disk {
    /// Opens the store; creates missing directories.
    pub(super) fn open(root: &Path, stores: Vec<PathBuf>) -> Result<Disk, Error> {
        let disk = Disk { root: root.to_owned(), stores, unread: Unread::default() };
        disk.make_directories()?;
        Ok(disk)
    }

    /// Creates missing directories, also those that another program has removed since the start.
    pub(super) fn make_directories(&self) -> Result<(), Error> {
        for dir in [
            self.records(),
            self.links(),
            self.blobs().join("sha256"),
            self.parts(),
            self.users(),
            self.signatures(),
            self.replaced_layers(),
        ]
        .into_iter()
        .chain(self.of_layers())
        {
            coracle_sandbox::disk::create_dir_all(&dir).context(|| format!("create {}", dir.display()))?;
        }
        // Only root may access images from the host, because they contain set-user-ID programs
        // (CVE-2021-41103).
        for dir in [self.images(), self.layers()] {
            store::close_directory(&dir).context(|| format!("set mode of {}", dir.display()))?;
        }
        Ok(())
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Directories of additional stores.
    pub(super) fn stores(&self) -> &[PathBuf] {
        &self.stores
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

    /// Directory of the signatures of images, each with the image's ID.
    pub(super) fn signatures(&self) -> PathBuf {
        self.root.join("images/signatures")
    }

    /// Directories of files about layers, each with the layer's name: indexes, lists of files, texts about damage.
    pub(super) fn of_layers(&self) -> [PathBuf; 3] {
        ["images/contents", "images/lists", "images/damage"].map(|name| self.root.join(name))
    }

    /// Directory of the layers that were replaced while containers used them.
    pub(super) fn replaced_layers(&self) -> PathBuf {
        self.root.join("replaced")
    }

    /// The recorded damage of layers, from an earlier daemon. If the text of a record cannot be read, its layer counts as damaged.
    pub(super) fn damage(&self) -> BTreeMap<LayerName, String> {
        let dir = self.notes();
        let text = |name: &str| match read_bounded(&dir.join(name), DAMAGE_BYTES_MAX) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => format!("not known: {}", describe_io(&error)),
        };
        ordered(list(&dir).into_iter().filter_map(|name| Some((name.parse().ok()?, text(&name)))))
    }

    /// Directory of the texts about damage of layers.
    fn notes(&self) -> PathBuf {
        let [.., notes] = self.of_layers();
        notes
    }

    /// Whether there is a text about damage of a layer.
    pub(super) fn has_damage(&self, layer: &LayerName) -> bool {
        !is_absent(&self.notes().join(layer.to_string()))
    }

    /// Forgets damage of a layer that was repaired. It is not synced: the next check finds the layer whole.
    pub(super) fn forget_damage(&self, layer: &LayerName) {
        if let Err(error) = fs::remove_file(self.notes().join(layer.to_string()))
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("cannot delete the file that records damage of a layer"; layer = layer, error = describe_io(&error));
        }
    }

    fn records(&self) -> PathBuf {
        self.root.join("images/records")
    }

    /// Path of the record with this name.
    pub(super) fn record(&self, name: &str) -> PathBuf {
        self.records().join(name)
    }

    pub(super) fn layer(&self, name: &LayerName) -> PathBuf {
        self.layers().join(name.to_string())
    }

    fn links(&self) -> PathBuf {
        self.layers().join(LINKS)
    }

    /// The layer's name in mount options, relative to the directory of layers: the name of a symbolic link,
    /// which is created if missing. The link is not synced, because the next call creates it again.
    pub(super) fn mount_name(&self, layer: &LayerName) -> Result<String, Error> {
        let Some(link) = layer.link() else { return Ok(layer.to_string()) };
        let (path, target) = (self.links().join(&link), format!("../{layer}"));
        let tried = || format!("link {}", path.display());
        let name = format!("{LINKS}/{link}");
        match fs::read_link(&path) {
            Ok(found) if found == Path::new(&target) => return Ok(name),
            // Using it would put another layer into the container.
            Ok(found) if is_there(&self.links().join(&found), Metadata::is_dir)? => {
                let text = format!("layer {layer}: its short name is in use for {}", found.display());
                return Err(Error::new(Kind::FailedPrecondition, text));
            }
            Ok(_) => fs::remove_file(&path).context(tried)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).context(tried),
        }
        // Another program may have removed it.
        coracle_sandbox::disk::create_dir_all(&self.links()).context(tried)?;
        symlink(&target, &path).context(tried)?;
        Ok(name)
    }

    /// Removes links to layers that no longer exist. A link that cannot be removed does no harm.
    pub(super) fn sweep_links(&self) {
        let gone = list(&self.links()).into_iter().map(|name| self.links().join(name));
        for path in gone.filter(|path| matches!(path.try_exists(), Ok(false))) {
            if let Err(error) = fs::remove_file(&path) {
                log::warn!("cannot remove the link to a removed layer"; path = path.display(), error = describe_io(&error));
            }
        }
    }

    /// Path of a blob; `None` if `digest` is not a digest.
    pub(super) fn blob(&self, digest: &str) -> Option<PathBuf> {
        let (algorithm, hex) = digest.split_once(':').filter(|_| coracle_reference::is_digest(digest))?;
        Some(self.blobs().join(algorithm).join(hex))
    }

    /// Loads all complete images. A record that is damaged, or whose image lacks a layer, is moved to
    /// quarantine with a warning; a record that cannot be read at the moment is kept.
    pub(super) fn load_all(&self) -> Result<Loaded, Error> {
        Ok(self.load_some(store::names(&self.records())?, time::now()))
    }

    /// Loads the records of these names, like [`Disk::load_all`]. One that could not be read for too long until `now` counts as damaged.
    pub(super) fn load_some(&self, names: impl IntoIterator<Item = String>, now: Instant) -> Loaded {
        let mut loaded = Loaded { entries: Vec::new(), unread: BTreeMap::new(), has_damaged: false };
        for name in names {
            let path = self.record(&name);
            let damage = match self.load(&name) {
                Ok((entry, _)) => {
                    self.unread.forget(&path);
                    loaded.entries.push(entry);
                    continue;
                }
                Err(damage) => self.unread.unless_lasting(&self.root, &path, damage, false, now),
            };
            match damage {
                Damage::Damaged(reason) if self.is_of_additional_store(&name) => self.forget(&name, &reason),
                Damage::Damaged(reason) => {
                    loaded.has_damaged = true;
                    self.set_aside(&name, &reason);
                }
                // It was removed meanwhile.
                Damage::Absent => {}
                Damage::Io(_) => {
                    log::warn!("cannot load image, will retry"; image = name, error = damage);
                    loaded.unread.insert(name, damage.to_string());
                }
            }
        }
        loaded
    }

    /// Reads the record of one image.
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

    /// Returns the first missing part of `image`; `None` if the image is complete.
    ///
    /// # Errors
    /// The I/O error, after which it is unknown whether the part exists.
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

    /// The image's config document.
    pub(super) fn config(&self, id: &ImageId) -> Result<String, Error> {
        let path = self.blobs().join("sha256").join(id.hex());
        let tried = || format!("read config of image {id}");
        let bytes = read_bounded(&path, CONFIG_BYTES_MAX).context(tried)?;
        String::from_utf8(bytes).map_err(|_| Error::new(Kind::Internal, "it is not UTF-8").context(tried()))
    }

    /// /etc/passwd and /etc/group of an image, for names of users (CRI 3.9); empty if the image has none.
    ///
    /// # Errors
    /// The file cannot be read, or its checksum is wrong.
    pub(super) fn users_files(&self, id: &ImageId) -> Result<UsersFiles, Error> {
        let dir = self.users().join(id.hex());
        let path = dir.join(USERS_RECORD);
        match read_bounded(&path, USERS_RECORD_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            read => {
                let tried = || format!("read users of image {id} from {}", path.display());
                let decoded = UsersFiles::decode(&read.context(tried)?);
                return decoded.map_err(|why| {
                    let text = format!("{why}: `coracle image check --repair` repairs it");
                    Error::new(Kind::Internal, text).context(tried())
                });
            }
        }
        // Of an image that a build before 0.1.0 stored: two files without a checksum.
        let read = |name: &str| match read_bounded(&dir.join(name), USERS_FILE_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.context(|| format!("read /etc/{name} of image {id}")),
        };
        Ok(UsersFiles { passwd: read("passwd")?, group: read("group")? })
    }

    /// Reads the record of an image without checking its parts.
    pub(super) fn read_unchecked(&self, id: &ImageId) -> Result<Stored, Error> {
        let parsed = self.parse(&id.hex()).map(|(_, stored)| stored);
        parsed.map_err(|damage| {
            Error::new(Kind::Internal, damage.to_string()).context(format!("read record of image {id}"))
        })
    }

    fn load(&self, name: &str) -> Result<(Entry, Stored), Damage> {
        let (entry, stored) = self.parse(name)?;
        for layer in &entry.layers {
            match self.has_layer(layer) {
                Ok(true) => {}
                Ok(false) => return Err(Damage::Damaged(format!("layer {layer} is missing"))),
                // The image and the layer stay: a container that needs the layer gets the error.
                Err(error) => {
                    log::warn!("cannot access a layer of an image"; image = name, error = error)
                }
            }
        }
        Ok((entry, stored))
    }

    /// Whether a layer can be used, now or when its additional store is mounted. One of a store that is not configured cannot, because monitors do
    /// not have it.
    fn has_layer(&self, layer: &LayerName) -> Result<bool, Error> {
        let is_there = || is_there(&self.layer(layer), Metadata::is_dir);
        let Some(target) = self.link(layer) else { return is_there() };
        match self.store_of(&target) {
            Some(store) if !store.join(STORE_INDEX).is_file() => Ok(true),
            store => Ok(is_there()? && store.is_some()),
        }
    }

    /// The target of a layer that is a link.
    pub(super) fn link(&self, layer: &LayerName) -> Option<PathBuf> {
        fs::read_link(self.layer(layer)).ok()
    }

    /// Removes the link to a layer of an additional store, also if a container uses the layer.
    pub(super) fn remove_link(&self, layer: &LayerName) -> Result<(), Error> {
        let path = self.layer(layer);
        match self.link(layer) {
            Some(_) => fs::remove_file(&path).context(|| format!("remove {}", path.display())),
            None => Ok(()),
        }
    }

    /// The configured additional store that has this path.
    pub(super) fn store_of(&self, path: &Path) -> Option<&PathBuf> {
        self.stores.iter().find(|store| path.starts_with(store))
    }

    /// Whether all layers of an image are those of additional stores, so that a missing one is the consequence of a change of the
    /// configuration or of the system's image, and no damage.
    fn is_of_additional_store(&self, name: &str) -> bool {
        let are_links = |(entry, _): (Entry, Stored)| {
            !entry.layers.is_empty() && entry.layers.iter().all(|layer| self.link(layer).is_some())
        };
        self.parse(name).is_ok_and(are_links)
    }

    /// Removes links to layers of additional stores that are not configured.
    pub(super) fn sweep_foreign_layers(&self) {
        for path in list(&self.layers()).into_iter().map(|name| self.layers().join(name)) {
            let is_foreign =
                |target: PathBuf| !target.starts_with(&self.root) && self.store_of(&target).is_none();
            if fs::read_link(&path).is_ok_and(is_foreign)
                && let Err(error) = fs::remove_file(&path)
            {
                log::warn!("cannot remove the link to a layer of another store"; path = path.display(), error = describe_io(&error));
            }
        }
    }

    fn forget(&self, name: &str, reason: &str) {
        match store::remove(&self.records(), name) {
            Ok(()) => log::info!("image removed with its additional store"; image = name, reason = reason),
            Err(error) => log::warn!("cannot remove the record of an image"; image = name, error = error),
        }
    }

    fn parse(&self, name: &str) -> Result<(Entry, Stored), Damage> {
        // Anything but a file would prevent the record from being written when the image is pulled again.
        if fs::metadata(self.records().join(name)).is_ok_and(|found| !found.is_file()) {
            return Err(Damage::Damaged("not a regular file".to_owned()));
        }
        let loaded = store::load(&self.records(), name, store::Kind::Image)?;
        let damaged = |reason: String| Damage::Damaged(reason);
        let stored: Stored = coracle_job::decode(&loaded.body)
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
                log::warn!("image record moved to quarantine"; image = name, reason = reason, path = aside.display())
            }
            Err(error) => {
                log::warn!("image record is damaged and cannot be moved to quarantine"; image = name, reason = reason, error = error)
            }
        }
    }

    /// The manual pins. If the record cannot be read, an error is logged and there are no pins, because the
    /// daemon must start.
    pub(super) fn marks(&self) -> BTreeSet<String> {
        match store::load(&self.images(), MARKS, store::Kind::Pins) {
            Ok(loaded) => ordered(String::from_utf8_lossy(&loaded.body).lines().map(str::to_owned)),
            Err(Damage::Absent) => BTreeSet::new(),
            Err(damage) => {
                log::error!("cannot read the manual pins, they must be set again"; reason = damage);
                BTreeSet::new()
            }
        }
    }

    /// Writes the record of manual pins.
    pub(super) fn commit_marks(&self, marks: &BTreeSet<String>) -> Result<(), Error> {
        let body: String = marks.iter().flat_map(|mark| [mark.as_str(), "\n"]).collect();
        store::commit(&self.images(), MARKS, store::Kind::Pins, MARKS_VERSION, body.as_bytes())
            .map_err(|error| error.context("write the pins"))
    }
}

/// Whether `path` exists and has the wanted type; links are followed.
///
/// # Errors
/// Any error except ENOENT and ENOTDIR (`EIO`, `ENOMEM`, `ELOOP`…), because such an error does not mean that
/// the file is missing.
fn is_there(path: &Path, is_wanted: fn(&Metadata) -> bool) -> Result<bool, Error> {
    match fs::metadata(path) {
        Ok(found) => Ok(is_wanted(&found)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error).context(|| format!("stat {}", path.display())),
    }
}

/// Whether there is certainly nothing at a path, not even a link that leads nowhere.
pub(super) fn is_absent(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Reads a file of at most `bytes_max` bytes.
fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let bytes = coracle_sandbox::disk::read_up_to(path, bytes_max + 1)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// The names in a directory; empty, with a log message, if it cannot be listed.
pub(super) fn list(dir: &Path) -> Vec<String> {
    let listed = fs::read_dir(dir).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<io::Result<_>>()
    });
    listed.unwrap_or_else(|error| {
        log::warn!("cannot list directory"; path = dir.display(), error = describe_io(&error));
        Vec::new()
    })
}
