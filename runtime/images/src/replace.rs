//! Replaces damaged layers by new ones that a worker has made. Containers that run keep the old directory, because overlayfs holds it;
//! later ones get the new directory. The old one is then `replaced/N/layer`, beside a record of the containers that were there:
//!
//! ```text
//! record of the containers ─► new layer to replaced/N/layer ─► exchange with layers/NAME ─► the last of them is removed ─► trash
//! ```
//! A daemon that is killed leaves `replaced/N` with the old or with the new layer, or without: it is removed in each case when none of the
//! containers is there. Another repair uses another number. The directory is not below `layers/`, where builds without this repair remove
//! all that is not a layer, below the containers too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage};
use coracle_sandbox::collect::ordered;
use coracle_wire::ContainerId;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::Images;
use super::disk::{Disk, is_absent, list};
use super::index::LayerName;
use super::trash::Candidates;

/// Name of the layer in its directory.
const LAYER: &str = "layer";
/// Name of the record of the containers.
const USERS: &str = "users";
const USERS_VERSION: u8 = 1;

impl Disk {
    /// The directories of layers that were replaced, with the containers that may use them; `None`: they cannot be read. Without record and
    /// layer it was only begun.
    pub(super) fn replaced(&self) -> BTreeMap<String, Option<BTreeSet<ContainerId>>> {
        let dir = self.replaced_layers();
        let users = |name: &str| match store::load(&dir.join(name), USERS, store::Kind::Replaced) {
            Ok(loaded) => read_users(&String::from_utf8_lossy(&loaded.body)),
            Err(Damage::Absent) if is_absent(&dir.join(name).join(LAYER)) => Some(BTreeSet::new()),
            Err(damage) => {
                log::warn!("cannot read which containers use a replaced layer"; name = name, error = damage);
                None
            }
        };
        ordered(list(&dir).into_iter().map(|name| (name.clone(), users(&name))))
    }

    /// Creates a directory for a layer that these containers may use, with their record.
    fn keep_replaced(&self, users: &BTreeSet<ContainerId>) -> Result<(String, PathBuf), Error> {
        let body: String = users.iter().map(|user| format!("{user}\n")).collect();
        for number in 0_u64.. {
            let name = number.to_string();
            let path = self.replaced_layers().join(&name);
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made.context(|| format!("create {}", path.display()))?;
                    let kept =
                        store::commit(&path, USERS, store::Kind::Replaced, USERS_VERSION, body.as_bytes());
                    // Left behind, it is removed by the next sweep.
                    kept.inspect_err(|_| drop(fs::remove_dir_all(&path)))?;
                    return Ok((name, path));
                }
            }
        }
        Err(Error::new(Kind::Internal, "too many replaced layers"))
    }
}

/// The containers in such a record; `None`: it is damaged.
fn read_users(record: &str) -> Option<BTreeSet<ContainerId>> {
    let users: Option<Vec<ContainerId>> = record.lines().map(|id| id.parse().ok()).collect();
    users.map(ordered)
}

impl Images {
    /// Puts the layer at `new` in the place of a damaged one. Does not await, so that no container begins to use the layer meanwhile.
    ///
    /// # Errors
    /// An I/O error; the file system cannot exchange two directories (RENAME_EXCHANGE); the layers of a container are not known; nothing uses the
    /// layer any more. The damaged layer is then unchanged.
    pub(super) fn replace(&self, layer: &LayerName, new: &Path) -> Result<(), Error> {
        if self.garbage.keeps_everything.get() {
            return Err(Error::new(Kind::Unavailable, "the layers of a container are not known"));
        }
        if !self.index.borrow().is_needed(layer) {
            return Err(Error::new(Kind::NotFound, "it is not used any more"));
        }
        let users = self.index.borrow().users_of(layer);
        let place = self.disk.layer(layer);
        let exchanged = if users.is_empty() {
            self.exchange(new, &place).or_else(|error| match self.garbage.cannot_exchange.get() {
                true => self.exchange_in_two_steps(new, &place),
                false => Err(error),
            })
        } else {
            let (name, path) = self.disk.keep_replaced(&users)?;
            self.index.borrow_mut().replaced.insert(name.clone(), Some(users));
            let aside = path.join(LAYER);
            let exchanged = fs::rename(new, &aside)
                .context(|| format!("rename {}", new.display()))
                .and_then(|()| sync(&path))
                .and_then(|()| self.exchange(&aside, &place));
            if exchanged.is_err() {
                self.index.borrow_mut().replaced.remove(&name);
                self.dispose(Candidates::Path(path));
            }
            exchanged
        };
        exchanged.and_then(|()| sync(&self.disk.layers()))?;
        self.disk.forget_damage(layer);
        self.index.borrow_mut().note_damage(*layer, None);
        Ok(())
    }

    /// Exchanges two directories on a file system without RENAME_EXCHANGE, which no container may use. A power cut between the two steps
    /// leaves no layer at `place`; the next start or check finds that, and a pull makes it again.
    fn exchange_in_two_steps(&self, new: &Path, place: &Path) -> Result<(), Error> {
        let old = new.with_extension("old");
        fs::rename(place, &old)
            .and_then(|()| fs::rename(new, place).inspect_err(|_| drop(fs::rename(&old, place))))
            .context(|| format!("exchange {} with {}", place.display(), new.display()))
    }

    /// Exchanges two directories; if there is none at `place`, it gets the new one.
    fn exchange(&self, new: &Path, place: &Path) -> Result<(), Error> {
        let exchanged = match renameat_with(CWD, new, CWD, place, RenameFlags::EXCHANGE) {
            Err(Errno::NOENT) => renameat_with(CWD, new, CWD, place, RenameFlags::empty()),
            exchanged => {
                self.garbage.cannot_exchange.set(exchanged == Err(Errno::INVAL));
                exchanged
            }
        };
        exchanged
            .map_err(io::Error::from)
            .context(|| format!("exchange {} with {} (RENAME_EXCHANGE)", place.display(), new.display()))
    }
}

fn sync(directory: &Path) -> Result<(), Error> {
    coracle_sandbox::disk::sync_dir(directory).context(|| format!("sync {}", directory.display()))
}
