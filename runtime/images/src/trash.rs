//! How the store gives back disk. What nobody needs is renamed into a directory `layers/tmp-trash-N`, which takes no time
//! and cannot fail half-way, and a worker deletes that directory. A crash in between leaves a `tmp-` directory, which the
//! next start sweeps.
//!
//! A pull that runs at the same time may count on a layer that goes here. It notices: an image is only published when
//! all its parts are in place, and a pull that finds one gone runs again ([`super::pull`]).

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

use coracle_base::error::plain;
use coracle_base::log;
use coracle_base::reactor;
use coracle_base::workers::Workers;
use coracle_job::Job;

use super::disk::{Disk, LINKS, list};
use super::index::{Index, LayerName};

/// What directories of garbage are called; `coracle_job::image` gives workers other names with `tmp-`.
const TRASH: &str = "tmp-trash-";

/// What an unfinished layer or piece of garbage starts with.
const TEMPORARY: &str = "tmp-";

/// Half-downloaded blobs kept over a start: one big layer, so that a flaky uplink gets on. The newest stay.
const PARTS_BYTES_MAX: u64 = 1 << 30;

/// Directories of garbage under removal.
#[derive(Default)]
pub(super) struct Trash {
    next: Cell<u64>,
    under_way: RefCell<BTreeSet<String>>,
    /// How many times something may have gone.
    disposed: Cell<u64>,
}

/// What may be garbage; what of it is needed stays.
pub(super) enum Candidates {
    /// Layers that an image or container gave up.
    Given(Vec<LayerName>),
    /// What killed workers left. Only while no worker fills the store.
    Unfinished,
    /// Everything in the store, with half-downloaded blobs down to so many bytes. Only while no worker fills the store.
    All { parts_bytes_max: u64 },
}

impl Candidates {
    /// At the start of the daemon.
    pub(super) const START: Candidates = Candidates::All { parts_bytes_max: PARTS_BYTES_MAX };
    /// Once an image was removed: the kubelet wants room.
    pub(super) const EVERYTHING: Candidates = Candidates::All { parts_bytes_max: 0 };
}

impl Trash {
    /// Grows whenever the disk may have more room than before.
    pub(super) fn disposed(&self) -> u64 {
        self.disposed.get()
    }

    /// Moves what of `candidates` nobody needs out of the way, and has it deleted.
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
                layers.iter().filter(|layer| !index.is_needed(layer)).map(|layer| disk.layer(layer)).collect()
            }
            Candidates::Unfinished => {
                let mut paths = self.unneeded_layers(disk, |name| !name.starts_with(TEMPORARY));
                paths.extend(workers_own(&disk.parts()));
                paths
            }
            Candidates::All { parts_bytes_max } => {
                disk.sweep_links();
                let is_needed = |name: &str| name.parse().is_ok_and(|layer| index.is_needed(&layer));
                let mut paths = self.unneeded_layers(disk, is_needed);
                paths.extend(unneeded_files(disk, index));
                paths.extend(workers_own(&disk.parts()));
                paths.extend(oldest_parts(&disk.parts(), parts_bytes_max));
                paths
            }
        };
        paths.retain(|path| path.symlink_metadata().is_ok());
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
                log::warn!("garbage stays"; path = path.display(), error = plain(&error));
            }
        }
        self.under_way.borrow_mut().insert(name.clone());
        let (trash, workers) = (self.clone(), workers.clone());
        reactor::spawn(async move {
            if let Err(error) = workers.run(Job::RemoveTrees { paths: vec![bin] }, |_, _| {}).await {
                log::warn!("garbage is not deleted, the next sweep tries again"; error = error);
            }
            trash.under_way.borrow_mut().remove(&name);
            trash.disposed.set(trash.disposed.get() + 1);
        })
        .detach();
    }

    fn make_bin(&self, layers: &Path) -> Option<(String, PathBuf)> {
        loop {
            let name = format!("{TRASH}{}", self.next.get());
            self.next.set(self.next.get() + 1);
            let bin = layers.join(&name);
            match fs::create_dir(&bin) {
                Ok(()) => return Some((name, bin)),
                // Of an earlier daemon.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    log::warn!("garbage stays"; path = bin.display(), error = plain(&error));
                    return None;
                }
            }
        }
    }
}

/// Blobs and users files that no image has.
fn unneeded_files(disk: &Disk, index: &Index) -> Vec<PathBuf> {
    let mut blobs = BTreeSet::new();
    let mut users = BTreeSet::new();
    for entry in index.iter().filter(|entry| entry.id != super::builtin::ID) {
        users.insert(entry.id.hex());
        match disk.read(&entry.id) {
            Ok(stored) => blobs.extend(stored.image.blobs.iter().filter_map(|digest| disk.blob(digest))),
            // Not knowing what it needs, nothing can be told to be garbage.
            Err(error) => {
                log::warn!("blobs are not swept"; error = error);
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
    let strangers = list(&disk.users()).into_iter().filter(|name| !users.contains(name));
    unneeded.extend(strangers.map(|name| disk.users().join(name)));
    unneeded
}

/// Files that killed workers wrote whole under names of their own (`HEX-PID`): no other worker goes on with one.
fn workers_own(dir: &Path) -> Vec<PathBuf> {
    list(dir).into_iter().filter(|name| name.contains('-')).map(|name| dir.join(name)).collect()
}

/// Parts beyond the newest `bytes_max` bytes; an empty one is worth nothing, and takes an inode.
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
    parts.sort_unstable_by(|one, other| other.cmp(one));
    let mut bytes = 0_u64;
    let is_beyond = |(_, length, _): &(SystemTime, u64, PathBuf)| {
        bytes = bytes.saturating_add(*length);
        bytes > bytes_max || *length == 0
    };
    let beyond: Vec<bool> = parts.iter().map(is_beyond).collect();
    parts.into_iter().zip(beyond).filter(|(_, beyond)| *beyond).map(|((_, _, path), _)| path).collect()
}
