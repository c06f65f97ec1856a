//! Which file of the import directories brought which images, as it is kept on disk.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage};
use serde::{Deserialize, Serialize};
use smol::channel::{Receiver, Sender};

use super::index::ImageId;

/// Their record.
const RECORD: &str = "bundles";
const VERSION: u8 = 1;

/// Tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Signature {
    pub(crate) bytes: u64,
    pub(crate) inode: u64,
    pub(crate) modified_s: i64,
    pub(crate) modified_ns: i64,
}

/// What a file brought.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bundle {
    pub(crate) signature: Signature,
    /// Ids.
    pub(crate) images: Vec<String>,
    /// Nothing of it is missing.
    pub(crate) is_whole: bool,
}

/// Import directories and what came from them.
pub(crate) struct Bundles {
    pub(crate) directories: RefCell<Vec<PathBuf>>,
    /// By path.
    pub(crate) known: RefCell<BTreeMap<String, Bundle>>,
    /// Tells the task that the directories are others now.
    pub(crate) changed: (Sender<()>, Receiver<()>),
}

impl Bundles {
    /// Loads the record below `images`. One that cannot be read costs an import, and the pins until that is done.
    pub(crate) fn load(images: &Path) -> Bundles {
        let known = match store::load(images, RECORD, store::Kind::Bundles) {
            Ok(loaded) => postcard::from_bytes(&loaded.body).unwrap_or_default(),
            Err(Damage::Absent) => BTreeMap::new(),
            Err(damage) => {
                log::warn!("what the import directories brought is not known: it is imported again"; reason = damage);
                BTreeMap::new()
            }
        };
        Bundles {
            directories: RefCell::default(),
            known: RefCell::new(known),
            changed: smol::channel::bounded(1),
        }
    }

    /// Whether a bundle brought this image.
    pub(crate) fn has(&self, id: &ImageId) -> bool {
        let known = self.known.borrow();
        if known.is_empty() {
            return false;
        }
        let id = id.to_string();
        known.values().any(|bundle| bundle.images.contains(&id))
    }

    /// Makes `known` what is known: committed below `images` first, then seen.
    pub(crate) fn commit(&self, images: &Path, known: BTreeMap<String, Bundle>) -> Result<(), Error> {
        let body = postcard::to_allocvec(&known)
            .map_err(|error| Error::new(Kind::Internal, format!("encode the record of bundles: {error}")))?;
        store::commit(images, RECORD, store::Kind::Bundles, VERSION, &body)?;
        *self.known.borrow_mut() = known;
        Ok(())
    }
}
