//! Removal of unused data from the store. Unused data is renamed into a directory `layers/tmp-trash-N`, which
//! is fast and atomic, and a worker removes that directory. After a crash in between, the next start removes
//! the `tmp-` directory.
//!
//! A concurrent pull may rely on a layer that is removed by this module. An image is published only if all
//! its parts exist, so the pull detects the removal and starts again ([`super::pull`]).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

use coracle_base::error::describe_io;
use coracle_base::log;
use coracle_base::reactor;
use coracle_base::workers::Workers;
use coracle_job::Job;
use coracle_sandbox::collect;

use super::disk::{Disk, LINKS, is_absent, list};
use super::index::{Index, LayerName};

/// Prefix of directories of removed data; workers use other names with `tmp-` (`coracle_job::image`).
const TRASH: &str = "tmp-trash-";

/// Prefix of all temporary directories.
const TEMPORARY: &str = "tmp-";

/// Maximum total size in bytes of the partly downloaded blobs that are kept at a start: one large layer, so
/// that pulls over an unreliable network make progress. The newest blobs are kept.
const PARTS_BYTES_MAX: u64 = 1 << 30;

/// The removal of unused data, and the reasons that prevent it.
#[derive(Default)]
pub(super) struct Garbage {
    pub(super) trash: Rc<Trash>,
    /// Whether a record was moved to quarantine: the layers of the record's image are unknown.
    pub(super) has_damaged: Cell<bool>,
    /// Names of records that could not be read, with the error; reading them is retried.
    pub(super) unread: RefCell<BTreeMap<String, String>>,
    /// Whether a container's layers are unknown, so that no layer may be removed.
    pub(super) keeps_everything: Cell<bool>,
    /// Whether layers cannot be replaced, because the file system cannot exchange directories.
    pub(super) cannot_exchange: Cell<bool>,
}

/// The removal of unused data.
#[derive(Default)]
pub(super) struct Trash {
    next: Cell<u64>,
    under_way: RefCell<BTreeSet<String>>,
    /// Number of calls that have removed data.
    disposed: Cell<u64>,
}

/// Data to be removed if it is not used.
pub(super) enum Candidates {
    /// Layers that an image or a container has released, and layers that were replaced.
    Given(Vec<LayerName>),
    /// A directory that nothing uses any more.
    Path(PathBuf),
    /// Incomplete data of killed workers. Allowed only while no worker writes to the store.
    Unfinished,
    /// All unused data in the store, and partly downloaded blobs beyond this total size in bytes. Allowed
    /// only while no worker writes to the store.
    All { parts_bytes_max: u64 },
}

impl Candidates {
    /// The candidates for removal at the start of the daemon.
    pub(super) const START: Candidates = Candidates::All { parts_bytes_max: PARTS_BYTES_MAX };
    /// The candidates for removal together with an image, which the kubelet removes to free disk space.
    pub(super) const EVERYTHING: Candidates = Candidates::All { parts_bytes_max: 0 };
}

impl Trash {
    /// A number that increases when data is removed.
    pub(super) fn disposed(&self) -> u64 {
        self.disposed.get()
    }

    /// Moves those of `candidates` that are unused to a trash directory and starts its removal.
    pub(super) fn dispose(
        self: &Rc<Self>,
        disk: &Disk,
        index: &Index,
        workers: &Rc<Workers>,
        candidates: Candidates,
    ) {
        self.disposed.set(self.disposed.get() + 1);
        let mut paths = match candidates {
            Candidates::Given(layers) => {
                let layers = || layers.iter().filter(|layer| !index.is_needed(layer));
                let of = |layer: &LayerName| disk.of_layers().map(|dir| dir.join(layer.to_string()));
                let layers = layers().map(|layer| disk.layer(layer)).chain(layers().flat_map(of));
                layers.chain(unused_replaced(disk, index)).collect()
            }
            Candidates::Path(path) => vec![path],
            Candidates::Unfinished => {
                let mut paths = self.unneeded_layers(disk, |name| !name.starts_with(TEMPORARY));
                paths.extend(workers_own(&disk.parts()));
                paths
            }
            Candidates::All { parts_bytes_max } => {
                disk.sweep_links();
                let is_needed = |name: &str| name.parse().is_ok_and(|layer| index.is_needed(&layer));
                let mut paths = self.unneeded_layers(disk, is_needed);
                for dir in disk.of_layers() {
                    let unneeded = list(&dir).into_iter().filter(|name| !is_needed(name));
                    paths.extend(unneeded.map(|name| dir.join(name)));
                }
                paths.extend(unused_replaced(disk, index));
                paths.extend(unneeded_files(disk, index));
                paths.extend(workers_own(&disk.parts()));
                paths.extend(oldest_parts(&disk.parts(), parts_bytes_max));
                paths
            }
        };
        paths.retain(|path| !is_absent(path));
        if !paths.is_empty() {
            self.throw(&disk.layers(), &paths, workers);
        }
    }

    fn unneeded_layers(&self, disk: &Disk, is_needed: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let under_way = self.under_way.borrow();
        let names = list(&disk.layers()).into_iter();
        let names = names.filter(|name| name != LINKS && !is_needed(name) && !under_way.contains(name));
        names.map(|name| disk.layers().join(name)).collect()
    }

    fn throw(self: &Rc<Self>, layers: &Path, paths: &[PathBuf], workers: &Rc<Workers>) {
        let Some((name, bin)) = self.make_bin(layers) else { return };
        for (number, path) in paths.iter().enumerate() {
            if let Err(error) = fs::rename(path, bin.join(number.to_string())) {
                log::warn!("cannot move unused data, will retry at the next garbage collection"; path = path.display(), error = describe_io(&error));
            }
        }
        self.under_way.borrow_mut().insert(name.clone());
        let (trash, workers) = (self.clone(), workers.clone());
        reactor::spawn(async move {
            if let Err(error) = workers.run(Job::RemoveTrees { paths: vec![bin] }).await {
                log::warn!("cannot remove unused data, will retry at the next garbage collection"; error = error);
            }
            trash.under_way.borrow_mut().remove(&name);
            trash.disposed.set(trash.disposed.get() + 1);
        })
        .detach();
    }

    /// The path of a new temporary directory, which is not created.
    pub(super) fn new_directory(&self, layers: &Path) -> PathBuf {
        loop {
            self.next.set(self.next.get() + 1);
            let path = layers.join(format!("{TEMPORARY}remade-{}-{}", std::process::id(), self.next.get()));
            // A directory of an earlier boot has the layers of that time.
            if path.symlink_metadata().is_err() {
                return path;
            }
        }
    }

    fn make_bin(&self, layers: &Path) -> Option<(String, PathBuf)> {
        loop {
            let name = format!("{TRASH}{}", self.next.get());
            self.next.set(self.next.get() + 1);
            let bin = layers.join(&name);
            match fs::create_dir(&bin) {
                Ok(()) => return Some((name, bin)),
                // A directory of an earlier daemon.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    log::warn!("cannot create the directory for unused data, nothing is removed now"; path = bin.display(), error = describe_io(&error));
                    return None;
                }
            }
        }
    }
}

/// Layers that were replaced and that no container uses any more.
fn unused_replaced(disk: &Disk, index: &Index) -> Vec<PathBuf> {
    let names = list(&disk.replaced_layers()).into_iter().filter(|name| !index.uses_replaced(name));
    names.map(|name| disk.replaced_layers().join(name)).collect()
}

/// Blobs, user files and signatures that no image uses.
fn unneeded_files(disk: &Disk, index: &Index) -> Vec<PathBuf> {
    let mut blobs = BTreeSet::new();
    let mut users = BTreeSet::new();
    for entry in index.iter().filter(|entry| entry.id != super::builtin::ID) {
        users.insert(entry.id.hex());
        match disk.read(&entry.id) {
            Ok(stored) => blobs.extend(stored.image.blobs.iter().filter_map(|digest| disk.blob(digest))),
            // If the blobs of one image are unknown, no blob can be removed.
            Err(error) => {
                log::warn!("cannot determine unused blobs, none is removed"; error = error);
                return Vec::new();
            }
        }
    }
    let mut unneeded = Vec::new();
    for algorithm in list(&disk.blobs()) {
        let dir = disk.blobs().join(algorithm);
        unneeded
            .extend(list(&dir).into_iter().map(|name| dir.join(name)).filter(|path| !blobs.contains(path)));
    }
    for dir in [disk.users(), disk.signatures()] {
        let strangers = list(&dir).into_iter().filter(|name| !users.contains(name));
        unneeded.extend(strangers.map(|name| dir.join(name)));
    }
    unneeded
}

/// Temporary files of killed workers (`HEX-PID`), which no other worker uses.
fn workers_own(dir: &Path) -> Vec<PathBuf> {
    list(dir).into_iter().filter(|name| name.contains('-')).map(|name| dir.join(name)).collect()
}

/// The oldest partly downloaded blobs: all except the newest ones with up to `bytes_max` bytes in total.
/// Empty files are included, because each only uses an inode.
fn oldest_parts(dir: &Path, bytes_max: u64) -> Vec<PathBuf> {
    let mut parts: Vec<(SystemTime, u64, PathBuf)> = list(dir)
        .into_iter()
        .filter(|name| !name.contains('-'))
        .filter_map(|name| {
            let path = dir.join(name);
            let metadata = path.symlink_metadata().ok()?;
            Some((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), metadata.len(), path))
        })
        .collect();
    collect::sort_by(&mut parts, |one, other| other.cmp(one));
    let mut bytes = 0_u64;
    let is_beyond = |(_, length, _): &(SystemTime, u64, PathBuf)| {
        bytes = bytes.saturating_add(*length);
        bytes > bytes_max || *length == 0
    };
    let beyond: Vec<bool> = parts.iter().map(is_beyond).collect();
    parts.into_iter().zip(beyond).filter(|(_, beyond)| *beyond).map(|((_, _, path), _)| path).collect()
}
