//! The record of the images that each file of the import directories contained.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage};
use serde::{Deserialize, Serialize};
use smol::channel::{Receiver, Sender};

use super::index::ImageId;

/// File name of the record.
const RECORD: &str = "bundles";
const VERSION: u8 = 1;

/// Identifies a version of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Signature {
    pub(crate) bytes: u64,
    pub(crate) inode: u64,
    pub(crate) modified_s: i64,
    pub(crate) modified_ns: i64,
}

/// The images of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bundle {
    pub(crate) signature: Signature,
    /// IDs of the images.
    pub(crate) images: Vec<String>,
    /// Whether all images of the file were imported.
    pub(crate) is_whole: bool,
}

/// The import directories and their imported files.
pub(crate) struct Bundles {
    pub(crate) directories: RefCell<Vec<PathBuf>>,
    /// Imported files by path.
    pub(crate) known: RefCell<BTreeMap<String, Bundle>>,
    /// Notifies the import task of changed directories.
    pub(crate) changed: (Sender<()>, Receiver<()>),
    /// Closed as soon as no archive that existed at the daemon's start is left to import; carries no messages.
    pub(crate) first_round: (Sender<()>, Receiver<()>),
}

impl Bundles {
    /// Loads the record below `images`. If the record cannot be read, the files are imported again; until
    /// then no image is pinned because of them.
    pub(crate) fn load(images: &Path) -> Bundles {
        let known = match store::load(images, RECORD, store::Kind::Bundles) {
            Ok(loaded) => postcard::from_bytes(&loaded.body).unwrap_or_default(),
            Err(Damage::Absent) => BTreeMap::new(),
            Err(damage) => {
                log::warn!("cannot read the record of import directories, their files are imported again"; reason = damage);
                BTreeMap::new()
            }
        };
        Bundles {
            directories: RefCell::default(),
            known: RefCell::new(known),
            changed: smol::channel::bounded(1),
            first_round: smol::channel::bounded(1),
        }
    }

    /// Makes the import task read the directories again.
    pub(crate) fn look_again(&self) {
        // One pending notification is sufficient.
        let _ = self.changed.0.try_send(());
    }

    /// Whether a file contains this image.
    pub(crate) fn has(&self, id: &ImageId) -> bool {
        let known = self.known.borrow();
        if known.is_empty() {
            return false;
        }
        let id = id.to_string();
        known.values().any(|bundle| bundle.images.contains(&id))
    }

    /// Replaces the record: commits `known` below `images` before it takes effect.
    pub(crate) fn commit(&self, images: &Path, known: BTreeMap<String, Bundle>) -> Result<(), Error> {
        let body = postcard::to_allocvec(&known)
            .map_err(|error| Error::new(Kind::Internal, format!("encode the import record: {error}")))?;
        store::commit(images, RECORD, store::Kind::Bundles, VERSION, &body)?;
        *self.known.borrow_mut() = known;
        Ok(())
    }
}
