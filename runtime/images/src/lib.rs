//! Images: which there are, what they are called, who needs them, and how they come and go. The rules are those of the
//! CRI's ImageService (CRI 2.27 to CRI 2.34); the work on blobs and layers is done by workers.
//!
//! ```text
//!   pull, import ──> worker fills blobs/ and layers/ ──> record ──> publish: check, merge, commit ──> index
//!   remove ──> record deleted ──> index ──> trash: rename aside ──> worker deletes
//!   list, find ──> index: memory only
//! ```
//!
//! Promises: an image is seen when it is whole and not before; a layer stays while an image or a container needs it; one
//! name means one image; lists and look-ups touch no disk. Everything but pull and import is done when it returns.
#![forbid(unsafe_code)]

mod builtin;
mod bundle_record;
mod bundles;
mod check;
mod credentials;
mod disk;
mod explain;
mod export;
mod import;
mod index;
mod marks;
mod measured;
mod merged;
mod pins;
mod pull;
mod pulling;
mod reference;
mod registries;
mod sandbox;
#[cfg(test)]
mod tests;
mod trash;
mod usage;

pub use check::Checked;
pub use credentials::Auth;
pub use disk::UsersFiles;
pub use index::{ImageId, NotHex};
pub use pulling::Pulling;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Context, Error, Kind};
use coracle_base::workers::Workers;
use coracle_base::{log, reactor};
use coracle_job::{ImageRecord, Limits, Registries};
use coracle_wire::ContainerId;

use builtin::SandboxImage;
use bundle_record::Bundles;
use disk::{Disk, Loaded, Stored};
use index::{Entry, Found, IMAGES_MAX, Index, LayerName, NAMES_MAX};
use measured::Measured;
use pins::Pins;
use pull::Pulls;
use trash::{Candidates, Trash};

/// From one try to read a record to the next: doubled each time, up to the second.
const UNREAD_PAUSE: Duration = Duration::from_secs(1);
const UNREAD_PAUSE_MAX: Duration = Duration::from_secs(60);

/// How the store is set up.
pub struct Options {
    /// `--root`.
    pub root: PathBuf,
    /// Keep compressed layers beside the unpacked ones.
    pub keep_blobs: bool,
    /// Bounds on what an image may make us do.
    pub limits: Limits,
    /// The node's registries, for workers to read.
    pub registries: Registries,
}

/// An image as lists and statuses show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The id, equal in every RPC.
    pub id: ImageId,
    /// Normalised `registry/path:tag`.
    pub tags: Vec<String>,
    /// `registry/path@sha256:…`.
    pub digests: Vec<String>,
    /// Bytes; never 0.
    pub size_bytes: u64,
    /// The config's `User`, as it stands.
    pub user: String,
    /// Never garbage.
    pub pinned: bool,
}

/// All images of one `--root`.
pub struct Images {
    disk: Disk,
    keep_blobs: Cell<bool>,
    registries: RefCell<Registries>,
    registries_health: registries::Health,
    limits: Limits,
    pins: RefCell<Pins>,
    sandbox_image: RefCell<SandboxImage>,
    /// Names and ids that are pinned by hand.
    marks: RefCell<BTreeSet<String>>,
    bundles: Bundles,
    workers: Rc<Workers>,
    index: RefCell<Index>,
    pulls: Pulls,
    trash: Rc<Trash>,
    /// Workers that fill the store right now.
    fills: Cell<u32>,
    /// Workers that have.
    filled: Cell<u64>,
    measured: Measured,
    /// Of the last commit.
    sequence: Cell<u64>,
    /// A record was set aside: which layers its image has is not known.
    has_damaged: Cell<bool>,
    /// Records that could not be read, by name; see [`Images::try_unread`].
    unread: RefCell<Vec<String>>,
    /// There is a container that has not said what it needs.
    keeps_everything: Cell<bool>,
}

/// Why an image is not published.
enum Unpublished {
    /// Something of it was thrown away while its worker counted on it: worth another try.
    Missing(String),
    /// Anything else.
    Error(Error),
}

impl Images {
    /// Opens the store: makes its directories and loads its records. Nothing is thrown away yet, because containers have
    /// not said what they need: see [`Images::sweep`].
    pub fn open(options: Options, workers: Rc<Workers>) -> Result<Rc<Images>, Error> {
        let disk = Disk::open(&options.root)?;
        let mut index = Index::default();
        let mut sequence = 0;
        let Loaded { entries, unread, has_damaged } = disk.load_all()?;
        for entry in entries {
            sequence = sequence.max(entry.sequence);
            index.insert(entry);
        }
        index.insert(builtin::entry());
        let marks = RefCell::new(disk.marks());
        let bundles = Bundles::load(&disk.images());
        let images = Rc::new(Images {
            marks,
            bundles,
            disk,
            keep_blobs: Cell::new(options.keep_blobs),
            registries: RefCell::new(options.registries),
            registries_health: registries::Health::default(),
            limits: options.limits,
            pins: RefCell::default(),
            sandbox_image: RefCell::default(),
            workers,
            index: RefCell::new(index),
            pulls: Pulls::default(),
            trash: Rc::default(),
            fills: Cell::new(0),
            filled: Cell::new(0),
            measured: Measured::default(),
            sequence: Cell::new(sequence),
            has_damaged: Cell::new(has_damaged),
            unread: RefCell::new(unread),
            keeps_everything: Cell::new(false),
        });
        if images.unread_count() > 0 {
            reactor::spawn(try_unread_later(Rc::downgrade(&images))).detach();
        }
        Ok(images)
    }

    /// Throws away what no image and no container needs. Once, after recovery has retained every container's layers, and
    /// only where it knows them all. A store with a record that could not be read keeps everything but the unfinished:
    /// what that image consists of is not known. Nothing goes while a worker fills the store.
    pub fn sweep(&self) {
        if self.fills.get() > 0 {
            return;
        }
        self.dispose(if self.is_complete() { Candidates::START } else { Candidates::Unfinished });
    }

    /// Every record that was on disk at the start is in the index.
    fn is_complete(&self) -> bool {
        !self.has_damaged.get() && self.unread.borrow().is_empty()
    }

    /// How many images have a record that cannot be read for now.
    pub fn unread_count(&self) -> usize {
        self.unread.borrow().len()
    }

    /// Reads again what could not be read at the start. An image that was pulled meanwhile has a new record, which is in the
    /// index already.
    fn try_unread(&self) {
        let Loaded { entries, unread, has_damaged } = self.disk.load_some(self.unread.take());
        for entry in entries {
            log::info!("image found again"; image = entry.id);
            self.sequence.set(self.sequence.get().max(entry.sequence));
            if self.index.borrow().get(&entry.id).is_none() {
                let poorer = self.index.borrow_mut().insert(entry);
                for other in poorer {
                    self.commit_names(&other);
                }
            }
        }
        self.has_damaged.set(self.has_damaged.get() || has_damaged);
        *self.unread.borrow_mut() = unread;
    }

    /// Whether no layer is thrown away for now, since a container that could not be read may need any of them. What is left
    /// over then goes with the next sweep.
    pub fn keep_everything(&self, keeps: bool) {
        self.keeps_everything.set(keeps);
    }

    /// Whether compressed layers stay, from the next pull or import on.
    pub fn keep_blobs(&self, keep: bool) {
        self.keep_blobs.set(keep);
    }

    /// All images, in an order that stays.
    pub fn list(&self) -> Vec<View> {
        self.index.borrow().iter().map(|entry| self.view(entry)).collect()
    }

    /// The image a client calls `name`, if there is one.
    ///
    /// # Errors
    /// `name` is no reference; or the beginning of more than one id.
    pub fn find(&self, name: &str) -> Result<Option<View>, Error> {
        let index = self.index.borrow();
        match index.find(name) {
            Ok(Found::One(id)) => Ok(index.get(&id).map(|entry| self.view(entry))),
            Ok(Found::None) => Ok(None),
            Ok(Found::Ambiguous) => {
                Err(Error::new(Kind::NotFound, format!("image {name}: more than one id begins like this")))
            }
            Err(invalid) => Err(Error::new(Kind::InvalidArgument, format!("image {name:?}: {invalid}"))),
        }
    }

    /// The image a container is to be made from.
    ///
    /// # Errors
    /// As [`Images::find`], and not found.
    pub fn resolve(&self, name: &str) -> Result<View, Error> {
        self.find(name)?.ok_or_else(|| Error::new(Kind::NotFound, format!("image {name}: not found")))
    }

    /// All that is known of an image, from its record on disk.
    ///
    /// # Errors
    /// Not found; damaged; or the built-in sandbox image, which has nothing to run.
    pub fn record(&self, id: &ImageId) -> Result<ImageRecord, Error> {
        if *id == builtin::ID {
            let text = format!("image {}: the built-in sandbox image has no files to run", builtin::TAG);
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.disk.read(id).map(|stored| stored.image)
    }

    /// Whether `path` names something in the image; links in it are followed inside the image.
    ///
    /// # Errors
    /// A layer cannot be read.
    pub fn has_path(&self, image: &ImageRecord, path: &str) -> Result<bool, Error> {
        let layers = image.layers.iter().rev().map(|layer| self.disk.layers().join(&layer.name)).collect();
        merged::exists(layers, path).context(|| format!("look up {path:?} in image {}", image.id))
    }

    /// The image's own /etc/passwd and /etc/group.
    pub fn users_files(&self, id: &ImageId) -> Result<UsersFiles, Error> {
        self.disk.users_files(id)
    }

    /// The image's config document and the chain ID of its top layer (empty without layers), for a verbose status.
    pub fn config(&self, id: &ImageId) -> Result<(String, String), Error> {
        if *id == builtin::ID {
            return Ok((builtin::CONFIG.into(), String::new()));
        }
        let record = self.record(id)?;
        let chain_id = record.layers.last().map_or_else(String::new, |layer| layer.chain_id.clone());
        Ok((self.disk.config(id)?, chain_id))
    }

    /// `user` needs the layers of these names, beside those it needed before, until it is released. No await may stand
    /// between looking an image up and this.
    ///
    /// # Errors
    /// A name is no layer's name; nothing is retained then.
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

    /// What the options of an overlay call these layers, below the directory of layers: short, as all of them must fit into
    /// one page.
    ///
    /// # Errors
    /// A name is no layer's name; two layers have one short name; the disk.
    pub fn mount_names<'a>(&self, layers: impl IntoIterator<Item = &'a str>) -> Result<Vec<String>, Error> {
        let name = |layer: &str| {
            let parsed = layer.parse::<LayerName>().map_err(|NotHex| {
                Error::new(Kind::InvalidArgument, format!("layer {layer:?}: not 64 or 32 hex digits"))
            })?;
            self.disk.mount_name(&parsed)
        };
        layers.into_iter().map(name).collect()
    }

    /// `user` is gone; layers that nothing else needs go as well. Not known is success.
    pub fn release(&self, user: &ContainerId) {
        let layers = self.index.borrow_mut().release(user);
        if !layers.is_empty() {
            self.dispose(Candidates::Given(layers));
        }
    }

    /// Removes the image with all its names; layers stay while a container needs them. No such image is success, and so is
    /// the built-in one, which stays (PIN-7).
    ///
    /// # Errors
    /// As [`Images::find`]; or the disk.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let Some(view) = self.find(name)?.filter(|view| view.id != builtin::ID) else { return Ok(()) };
        self.disk.remove(&view.id).map_err(|error| error.context(format!("remove image {name}")))?;
        let entry = self.index.borrow_mut().remove(&view.id);
        log::info!("image removed"; image = view.id, name = name);
        let layers = entry.map_or_else(Vec::new, |entry| entry.layers);
        let is_quiet = self.fills.get() == 0 && self.is_complete();
        // A worker may count on its blobs by now: they wait for the next removal or start.
        self.dispose(if is_quiet { Candidates::EVERYTHING } else { Candidates::Given(layers) });
        Ok(())
    }

    /// Makes what a worker brought an image: checks it, adds the names and blobs it had before, commits its record. Names
    /// that were another image's are this one's from now on.
    fn publish(&self, mut image: ImageRecord) -> Result<ImageId, Unpublished> {
        let garbled = |why: String| {
            Unpublished::Error(Error::new(Kind::Internal, format!("the worker's record is refused: {why}")))
        };
        let sequence = self.sequence.get() + 1;
        let id = Entry::of(&image, sequence).map_err(garbled)?.id;
        if id == builtin::ID {
            // The same config, byte for byte, and so no layer either: there is nothing to add.
            return Ok(id);
        }
        if let Some(missing) = self.disk.missing(&image).map_err(Unpublished::Error)? {
            return Err(Unpublished::Missing(missing));
        }
        self.add_what_was_known(&id, &mut image).map_err(Unpublished::Error)?;
        let entry = Entry::of(&image, sequence).map_err(garbled)?;
        self.disk.commit(&id, &Stored { sequence, image }).map_err(Unpublished::Error)?;
        self.sequence.set(sequence);
        let replaced = self.index.borrow().get(&id).map_or_else(Vec::new, |known| known.layers.clone());
        let poorer = self.index.borrow_mut().insert(entry);
        for other in poorer {
            self.commit_names(&other);
        }
        // Layers of an image that an earlier build pulled have other names.
        if replaced.iter().any(|layer| !self.index.borrow().is_needed(layer)) {
            self.dispose(Candidates::Given(replaced));
        }
        Ok(id)
    }

    fn add_what_was_known(&self, id: &ImageId, image: &mut ImageRecord) -> Result<(), Error> {
        let index = self.index.borrow();
        let Some(known) = index.get(id) else {
            if index.len() >= IMAGES_MAX {
                return Err(Error::new(Kind::ResourceExhausted, format!("{IMAGES_MAX} images are the most")));
            }
            return Ok(());
        };
        merge(&mut image.tags, &known.tags);
        merge(&mut image.digests, &known.digests);
        let blobs = self.disk.read(id).map_or_else(|_| Vec::new(), |stored| stored.image.blobs);
        image.blobs.extend(blobs.into_iter().filter(|blob| !image.blobs.contains(blob)).collect::<Vec<_>>());
        Ok(())
    }

    /// Writes down that an image lost names. Should that fail, the sequence of the one that has them decides at the next
    /// start as it did now.
    fn commit_names(&self, id: &ImageId) {
        let Some(entry) = self.index.borrow().get(id).cloned() else { return };
        let committed = self.disk.read(id).and_then(|mut stored| {
            stored.image.tags = entry.tags;
            stored.image.digests = entry.digests;
            self.disk.commit(id, &stored)
        });
        if let Err(error) = committed {
            log::warn!("names of an image are not written down"; image = id, error = error);
        }
    }

    fn dispose(&self, candidates: Candidates) {
        // An image whose record cannot be read for now may need any layer, too.
        let keeps_everything = self.keeps_everything.get() || !self.unread.borrow().is_empty();
        let candidates = match (keeps_everything, candidates) {
            (true, Candidates::Given(_)) => return,
            (true, Candidates::All { .. }) => Candidates::Unfinished,
            (_, candidates) => candidates,
        };
        self.trash.dispose(&self.disk, &self.index.borrow(), &self.workers, candidates);
    }

    /// By what it is, by configuration, by a bundle, or by hand.
    fn is_pinned(&self, entry: &Entry) -> bool {
        let names = || entry.tags.iter().chain(&entry.digests);
        let marks = self.marks.borrow();
        entry.id == builtin::ID
            || self.pins.borrow().is_pinned(names())
            || self.bundles.has(&entry.id)
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

/// Puts the names that were known in front of the new ones; the oldest give way to [`NAMES_MAX`].
/// Tries again to read records until all are read.
async fn try_unread_later(images: Weak<Images>) {
    let mut pause = UNREAD_PAUSE;
    loop {
        reactor::sleep(pause).await;
        pause = (pause * 2).min(UNREAD_PAUSE_MAX);
        let Some(images) = images.upgrade() else { return };
        images.try_unread();
        if images.unread_count() == 0 {
            return;
        }
    }
}

fn merge(names: &mut Vec<String>, known: &[String]) {
    let mut all = known.to_vec();
    all.extend(names.drain(..).filter(|name| !known.contains(name)));
    all.drain(..all.len().saturating_sub(NAMES_MAX));
    *names = all;
}
