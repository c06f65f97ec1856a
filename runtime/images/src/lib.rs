//! The image service: index, names, users, pull, import and removal of images. It implements the rules of the
//! CRI's ImageService (CRI 2.27 to CRI 2.34); workers process blobs and layers.
//!
//! ```text
//! pull, import ──> worker fills blobs/ and layers/ ──> record ──> publish: check, merge, commit ──> index
//! remove ──> record deleted ──> index ──> trash: rename aside ──> worker deletes
//! list, find ──> index: memory only
//! ```
//!
//! The crate guarantees: an image is visible only when it is complete; a layer stays while an image or a
//! container uses it; a name belongs to one image; lists and look-ups do not access the disk. All operations
//! except pull and import are complete when they return.
#![forbid(unsafe_code)]

mod background;
mod builtin;
mod check;
mod containerd;
mod credentials;
mod disk;
mod explain;
mod export;
mod import;
mod import_directories;
mod import_record;
mod index;
mod manual_pins;
mod measurement;
mod merged_view;
mod pins;
mod policy;
mod policy_state;
mod progress;
mod pull;
mod registries;
mod replace;
mod sandbox_image;
mod tag;
#[cfg(test)]
mod tests;
mod trash;
mod usage;

pub use check::Checked;
pub use coracle_job::UsersFiles;
pub use credentials::Auth;
pub use index::{ImageId, NotHex};
pub use policy_state::PolicyOptions;
pub use progress::Pulling;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::workers::Workers;
use coracle_base::{log, reactor, time};
use coracle_job::{ImageRecord, Limits, Registries, ServedImage};
use coracle_wire::ContainerId;

use builtin::SandboxImage;
use disk::{Disk, Loaded, Stored};
use import_record::Bundles;
use index::{Entry, Found, IMAGES_MAX, Index, LayerName, NAMES_MAX};
use measurement::Measured;
use pins::Pins;
use pull::Pulls;
use trash::{Candidates, Garbage};

/// Delay before the first retry of reading a record; each further delay is twice the previous one, up to the
/// maximum.
const UNREAD_PAUSE: Duration = Duration::from_secs(1);
const UNREAD_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Configuration of the image store.
pub struct Options {
    /// The directory of `--root`.
    pub root: PathBuf,
    /// Directories of additional stores.
    pub additional_stores: Vec<PathBuf>,
    /// Whether to keep compressed layers in addition to the unpacked ones.
    pub keep_blobs: bool,
    /// Whether pulls download only the parts of a layer that the node lacks.
    pub partial_pulls: bool,
    /// Limits on the size and number of parts of images.
    pub limits: Limits,
    /// The node's registry configuration, which workers read.
    pub registries: Registries,
}

/// An image in lists and statuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Image ID; equal in all RPCs.
    pub id: ImageId,
    /// Tags as normalised `registry/path:tag`.
    pub tags: Vec<String>,
    /// Repo digests as `registry/path@sha256:…`.
    pub digests: Vec<String>,
    /// Compressed size in bytes; never 0.
    pub size_bytes: u64,
    /// The field `User` of the image config, not parsed.
    pub user: String,
    /// Whether the image is protected from garbage collection.
    pub pinned: bool,
}

/// The image store of one `--root`.
pub struct Images {
    disk: Disk,
    index: RefCell<Index>,
    sources: Sources,
    pinning: Pinning,
    pulls: Pulls,
    workers: Rc<Workers>,
    garbage: Garbage,
    measured: Measured,
}

/// The sources of images, and the limits on images from these sources.
struct Sources {
    registries: RefCell<Registries>,
    /// Whether the registry configuration files are valid.
    health: registries::Health,
    /// The policy by which images are judged.
    policy: policy_state::Policy,
    /// The import directories and their imported files.
    bundles: Bundles,
    limits: Limits,
    keep_blobs: Cell<bool>,
    partial_pulls: Cell<bool>,
}

/// The names and IDs of pinned images.
#[derive(Default)]
struct Pinning {
    /// The patterns of the configuration.
    patterns: RefCell<Pins>,
    sandbox_image: RefCell<SandboxImage>,
    /// Names and IDs that an administrator pinned.
    marks: RefCell<BTreeSet<String>>,
}

/// The reason why an image was not published.
enum Unpublished {
    /// A part was removed during the pull; a retry may succeed.
    Missing(String),
    /// An error that is not a missing part.
    Error(Error),
}

impl Images {
    /// Opens the store: creates its directories and loads its records. Nothing is removed before
    /// [`Images::sweep`], because the layers of containers are not known yet.
    ///
    /// # Errors
    /// The I/O error of a directory.
    pub fn open(options: Options, workers: Rc<Workers>) -> Result<Rc<Images>, Error> {
        let disk = Disk::open(&options.root, options.additional_stores)?;
        let mut index = Index::default();
        let Loaded { entries, unread, has_damaged } = disk.load_all()?;
        disk.sweep_foreign_layers();
        for entry in entries {
            index.insert(entry);
        }
        index.insert(builtin::entry());
        (index.damage, index.replaced) = (disk.damage(), disk.replaced());
        let images = Rc::new(Images {
            index: RefCell::new(index),
            sources: Sources {
                registries: RefCell::new(options.registries),
                health: registries::Health::default(),
                policy: policy_state::Policy::default(),
                bundles: Bundles::load(&disk.images()),
                limits: options.limits,
                keep_blobs: Cell::new(options.keep_blobs),
                partial_pulls: Cell::new(options.partial_pulls),
            },
            pinning: Pinning { marks: RefCell::new(disk.marks()), ..Pinning::default() },
            pulls: Pulls::default(),
            workers,
            garbage: Garbage {
                has_damaged: Cell::new(has_damaged),
                unread: RefCell::new(unread),
                ..Garbage::default()
            },
            measured: Measured::default(),
            disk,
        });
        if images.unread_count() > 0 {
            reactor::spawn(try_unread_later(Rc::downgrade(&images))).detach();
        }
        Ok(images)
    }

    /// Removes all data that no image and no container uses. Called once, after recovery has retained the
    /// layers of all containers, and only if all containers are known. If a record could not be read, only
    /// incomplete data is removed, because the parts of that image are unknown. Nothing is removed while a
    /// worker writes to the store.
    pub fn sweep(&self) {
        if self.measured.fills.get() > 0 {
            return;
        }
        self.dispose(if self.is_complete() { Candidates::START } else { Candidates::Unfinished });
    }

    /// Whether all records were read.
    fn is_complete(&self) -> bool {
        !self.garbage.has_damaged.get() && self.garbage.unread.borrow().is_empty()
    }

    /// Number of images whose record currently cannot be read.
    pub fn unread_count(&self) -> usize {
        self.garbage.unread.borrow().len()
    }

    /// The first record that currently cannot be read, and the error, for Status.
    pub fn unread_first(&self) -> Option<String> {
        let unread = self.garbage.unread.borrow();
        unread.iter().next().map(|(name, error)| format!("{}: {error}", self.disk.record(name).display()))
    }

    /// Reads records again that could not be read at the start, and sets those aside that could not be read for too long until `now`.
    /// If an image was pulled since then, the index already contains its new record.
    fn try_unread(&self, now: Instant) {
        let names = self.garbage.unread.take().into_keys();
        let Loaded { entries, unread, has_damaged } = self.disk.load_some(names, now);
        for entry in entries {
            log::info!("image record can be read again"; image = entry.id);
            if self.index.borrow().get(&entry.id).is_none() {
                let poorer = self.index.borrow_mut().insert(entry);
                for other in poorer {
                    self.commit_names(&other);
                }
            }
        }
        self.garbage.has_damaged.set(self.garbage.has_damaged.get() || has_damaged);
        *self.garbage.unread.borrow_mut() = unread;
    }

    /// Sets whether all layers are kept, because the layers of a container are unknown. Unused layers are
    /// then removed by the next sweep.
    pub fn keep_everything(&self, keeps: bool) {
        self.garbage.keeps_everything.set(keeps);
    }

    /// Sets whether later pulls and imports keep compressed layers.
    pub fn keep_blobs(&self, keep: bool) {
        self.sources.keep_blobs.set(keep);
    }

    /// The names of all images, under which neighbours get their manifests; `have_tags`: also by tags.
    pub fn served(&self, have_tags: bool) -> Vec<ServedImage> {
        /// Maximum numbers of images, and of tags and digests of one, so that all fit into a message.
        const SERVED_MAX: usize = 1000;
        const OF_IMAGE_MAX: usize = 8;
        let first = |list: &[String]| list.iter().take(OF_IMAGE_MAX).cloned().collect();
        let served = |entry: &Entry| ServedImage {
            digests: first(&entry.digests),
            tags: if have_tags { first(&entry.tags) } else { Vec::new() },
        };
        self.index.borrow().iter().take(SERVED_MAX).map(served).collect()
    }

    /// Sets whether later pulls download only what the node does not have of a layer.
    pub fn partial_pulls(&self, are_partial: bool) {
        self.sources.partial_pulls.set(are_partial);
    }

    /// All images in the order of their IDs.
    pub fn list(&self) -> Vec<View> {
        self.index.borrow().iter().map(|entry| self.view(entry)).collect()
    }

    /// Finds the image for a name or ID from a client; `None` if there is none.
    ///
    /// # Errors
    /// `InvalidArgument` if `name` is not a valid reference; `NotFound` if it is the prefix of several IDs.
    pub fn find(&self, name: &str) -> Result<Option<View>, Error> {
        let index = self.index.borrow();
        match index.find(name) {
            Ok(Found::One(id)) => Ok(index.get(&id).map(|entry| self.view(entry))),
            Ok(Found::None) => Ok(None),
            Ok(Found::Ambiguous) => {
                Err(Error::new(Kind::NotFound, format!("image {name}: several image IDs have this prefix")))
            }
            Err(invalid) => Err(Error::new(Kind::InvalidArgument, format!("image {name:?}: {invalid}"))),
        }
    }

    /// Finds the image of a new container.
    ///
    /// # Errors
    /// Those of [`Images::find`], and `NotFound` if there is no such image.
    pub fn resolve(&self, name: &str) -> Result<View, Error> {
        self.find(name)?.ok_or_else(|| Error::new(Kind::NotFound, format!("image {name}: not found")))
    }

    /// Reads the record of an image.
    ///
    /// # Errors
    /// The record does not exist or is damaged, or the image is the built-in sandbox image, which cannot be
    /// run.
    pub fn record(&self, id: &ImageId) -> Result<ImageRecord, Error> {
        if *id == builtin::ID {
            let text = format!("image {}: the built-in sandbox image has no files to run", builtin::TAG);
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.disk.read(id).map(|stored| stored.image)
    }

    /// Whether `path` exists in the image; links are resolved within the image.
    ///
    /// # Errors
    /// A layer cannot be read.
    pub fn has_path(&self, image: &ImageRecord, path: &str) -> Result<bool, Error> {
        let layers = image.layers.iter().rev().map(|layer| self.disk.layers().join(&layer.name)).collect();
        merged_view::exists(layers, path).context(|| format!("look up {path:?} in image {}", image.id))
    }

    /// Reads the image's /etc/passwd and /etc/group. If their copy is damaged, a worker copies them again from the layers.
    ///
    /// # Errors
    /// The I/O error, or the damage if it could not be repaired.
    pub async fn users_files(self: &Rc<Self>, id: &ImageId) -> Result<UsersFiles, Error> {
        match self.disk.users_files(id) {
            Err(error) if error.kind() == Kind::Internal => {
                log::warn!("the stored passwd and group files of an image are damaged, copied again from its layers"; image = id, error = error);
                self.repair_users(id).await.map_err(|why| error.context(format!("not repaired: {why}")))?;
                self.disk.users_files(id)
            }
            read => read,
        }
    }

    /// Returns the image's config document and the chain ID of its top layer (empty without layers), for a
    /// verbose status.
    ///
    /// # Errors
    /// The record or the document cannot be read.
    pub fn config(&self, id: &ImageId) -> Result<(String, String), Error> {
        if *id == builtin::ID {
            return Ok((builtin::CONFIG.into(), String::new()));
        }
        let record = self.record(id)?;
        let chain_id = record.layers.last().map_or_else(String::new, |layer| layer.chain_id.clone());
        Ok((self.disk.config(id)?, chain_id))
    }

    /// Marks layers as used by the container `user`, in addition to the layers marked before, until the
    /// container is released. The caller must not await between the look-up of an image and this call.
    ///
    /// # Errors
    /// A name is not a layer's name; no layer is marked then.
    pub fn retain<'a>(
        &self,
        user: ContainerId,
        layers: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), Error> {
        let parse = |name: &str| {
            name.parse::<LayerName>().map_err(|NotHex| {
                Error::new(Kind::InvalidArgument, format!("layer {name:?}: not 64 or 32 hex digits"))
            })
        };
        let layers = layers.into_iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        self.index.borrow_mut().retain(user, layers);
        Ok(())
    }

    /// Whether one of these layers is that of an additional store, outside of the directory of layers.
    pub fn are_shipped<'a>(&self, layers: impl IntoIterator<Item = &'a str>) -> bool {
        layers.into_iter().any(|layer| self.disk.layers().join(layer).is_symlink())
    }

    /// Short names of layers for the options of an overlay mount, relative to the directory of layers. They
    /// are short because all options must fit into one page.
    ///
    /// # Errors
    /// A name is not a layer's name; two layers have the same short name; the additional store of a layer is not there or not verified;
    /// an I/O error.
    pub fn mount_names<'a>(&self, layers: impl IntoIterator<Item = &'a str>) -> Result<Vec<String>, Error> {
        let name = |layer: &str| {
            let parsed = layer.parse::<LayerName>().map_err(|NotHex| {
                Error::new(Kind::InvalidArgument, format!("layer {layer:?}: not 64 or 32 hex digits"))
            })?;
            self.check_store_of(&parsed)?;
            self.disk.mount_name(&parsed)
        };
        layers.into_iter().map(name).collect()
    }

    /// Releases all layers of the container `user` and removes the layers that have no other user. An unknown
    /// container is not an error.
    pub fn release(&self, user: &ContainerId) {
        let layers = self.index.borrow_mut().release(user);
        if !layers.is_empty() {
            self.dispose(Candidates::Given(layers));
        }
    }

    /// Removes the image with all its names; layers that a container uses are kept. A missing image is not an
    /// error; the built-in image is not removed (PIN-7).
    ///
    /// # Errors
    /// Those of [`Images::find`]; an I/O error.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let Some(view) = self.find(name)?.filter(|view| view.id != builtin::ID) else { return Ok(()) };
        self.disk.remove(&view.id).map_err(|error| error.context(format!("remove image {name}")))?;
        let entry = self.index.borrow_mut().remove(&view.id);
        log::info!("image removed"; image = view.id, name = name);
        let layers = entry.map_or_else(Vec::new, |entry| entry.layers);
        let is_quiet = self.measured.fills.get() == 0 && self.is_complete();
        // A running worker may rely on its blobs: they are then removed by the next removal or start.
        self.dispose(if is_quiet { Candidates::EVERYTHING } else { Candidates::Given(layers) });
        Ok(())
    }

    /// Publishes an image that a worker has stored: checks it, adds the names and blobs of an earlier record
    /// of the same image, and commits its record. Names that other images have are moved to this image.
    fn publish(&self, mut image: ImageRecord) -> Result<ImageId, Unpublished> {
        let garbled = |why: String| {
            Unpublished::Error(Error::new(Kind::Internal, format!("the worker's record is refused: {why}")))
        };
        let sequence = self.index.borrow().sequence() + 1;
        let id = Entry::of(&image, sequence).map_err(garbled)?.id;
        if id == builtin::ID {
            // The config and therefore all layers are the same: nothing changes.
            return Ok(id);
        }
        if let Some(missing) = self.disk.missing(&image).map_err(Unpublished::Error)? {
            return Err(Unpublished::Missing(missing));
        }
        let accepted = self.refused_before(&image);
        self.add_what_was_known(&id, &mut image).map_err(Unpublished::Error)?;
        let entry = Entry::of(&image, sequence).map_err(garbled)?;
        self.disk.commit(&id, &Stored { sequence, image }).map_err(Unpublished::Error)?;
        self.note_accepted(&accepted);
        let replaced = self.index.borrow().get(&id).map_or_else(Vec::new, |known| known.layers.clone());
        let layers = entry.layers.clone();
        let poorer = self.index.borrow_mut().insert(entry);
        for other in poorer {
            self.commit_names(&other);
        }
        // The worker has removed what was noted about layers that it created again.
        let is_damaged = |layer: &LayerName| !layers.contains(layer) || self.disk.has_damage(layer);
        self.index.borrow_mut().damage.retain(|layer, _| is_damaged(layer));
        // The layers of an image that an earlier build pulled have other names.
        if replaced.iter().any(|layer| !self.index.borrow().is_needed(layer)) {
            self.dispose(Candidates::Given(replaced));
        }
        Ok(id)
    }

    fn add_what_was_known(&self, id: &ImageId, image: &mut ImageRecord) -> Result<(), Error> {
        let index = self.index.borrow();
        let Some(known) = index.get(id) else {
            if index.len() >= IMAGES_MAX {
                return Err(Error::new(
                    Kind::ResourceExhausted,
                    format!("the maximum of {IMAGES_MAX} images is reached"),
                ));
            }
            return Ok(());
        };
        merge(&mut image.tags, &known.tags);
        merge(&mut image.digests, &known.digests);
        let blobs = self.disk.read(id).map_or_else(|_| Vec::new(), |stored| stored.image.blobs);
        image.blobs.extend(blobs.into_iter().filter(|blob| !image.blobs.contains(blob)).collect::<Vec<_>>());
        Ok(())
    }

    /// Commits the record of an image that has lost names. If the commit fails, the sequences of the records
    /// lead to the same result at the next start.
    fn commit_names(&self, id: &ImageId) {
        let Some(entry) = self.index.borrow().get(id).cloned() else { return };
        let committed = self.disk.read(id).and_then(|mut stored| {
            stored.image.tags = entry.tags;
            stored.image.digests = entry.digests;
            self.disk.commit(id, &stored)
        });
        if let Err(error) = committed {
            log::warn!("cannot write the record of an image that lost names"; image = id, error = error);
        }
    }

    fn dispose(&self, candidates: Candidates) {
        // An image whose record cannot be read may use any layer, too.
        let keeps_everything =
            self.garbage.keeps_everything.get() || !self.garbage.unread.borrow().is_empty();
        let candidates = match (keeps_everything, candidates) {
            (true, Candidates::Given(_)) => return,
            (true, Candidates::All { .. }) => Candidates::Unfinished,
            (_, candidates) => candidates,
        };
        let is_of_layers = matches!(candidates, Candidates::Given(_) | Candidates::All { .. });
        self.garbage.trash.dispose(&self.disk, &self.index.borrow(), &self.workers, candidates);
        if is_of_layers {
            self.index.borrow_mut().forget_unneeded();
        }
    }

    /// Whether an image is pinned: as the built-in image, by configuration, by an import directory, or
    /// manually.
    fn is_pinned(&self, entry: &Entry) -> bool {
        let names = || entry.tags.iter().chain(&entry.digests);
        let marks = self.pinning.marks.borrow();
        entry.id == builtin::ID
            || self.pinning.patterns.borrow().is_pinned(names())
            || self.sources.bundles.has(&entry.id)
            || (!marks.is_empty()
                && (names().any(|name| marks.contains(name)) || marks.contains(&entry.id.to_string())))
    }

    fn view(&self, entry: &Entry) -> View {
        View {
            id: entry.id,
            tags: entry.tags.clone(),
            digests: entry.digests.clone(),
            size_bytes: entry.size_bytes,
            user: entry.user.clone(),
            pinned: self.is_pinned(entry),
        }
    }
}

/// The error for an answer that does not belong to the job of a worker.
fn unexpected() -> Error {
    Error::new(Kind::Internal, "unexpected answer of the worker")
}

/// Retries reading records until all are read or set aside.
async fn try_unread_later(images: Weak<Images>) {
    let mut pause = UNREAD_PAUSE;
    loop {
        reactor::sleep(pause).await;
        pause = (pause * 2).min(UNREAD_PAUSE_MAX);
        let Some(images) = images.upgrade() else { return };
        images.try_unread(time::now());
        if images.unread_count() == 0 {
            return;
        }
    }
}

/// Puts the known names in front of the new ones. Above [`NAMES_MAX`] the oldest names are dropped.
fn merge(names: &mut Vec<String>, known: &[String]) {
    let mut all = known.to_vec();
    all.extend(names.drain(..).filter(|name| !known.contains(name)));
    all.drain(..all.len().saturating_sub(NAMES_MAX));
    *names = all;
}
