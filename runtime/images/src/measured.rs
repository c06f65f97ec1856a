//! What was measured of the store's disk usage, and when; `usage` measures.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use coracle_job::TreeUsage;

/// What images use of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// An existing directory on their file system.
    pub directory: PathBuf,
    /// When this was true.
    pub at: SystemTime,
    /// Allocated to blobs, records and layers, each counted once.
    pub used_bytes: u64,
    /// Files and directories of them.
    pub inodes_used: u64,
}

/// How many times images came, and things of the store went: two equal ones have nothing in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) published: u64,
    pub(crate) disposed: u64,
    pub(crate) filled: u64,
}

/// The last walk.
pub(crate) struct Walk {
    pub(crate) moment: Moment,
    pub(crate) at: SystemTime,
    pub(crate) begun: Instant,
    pub(crate) total: TreeUsage,
}

/// What was measured.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) layers: RefCell<BTreeMap<String, TreeUsage>>,
    pub(crate) last: RefCell<Option<Walk>>,
    pub(crate) is_walking: Cell<bool>,
}
