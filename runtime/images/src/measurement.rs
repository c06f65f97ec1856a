//! The last measurement of the store's disk usage; module `usage` measures.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use coracle_job::TreeUsage;
use smol::Task;

/// Disk usage of images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// An existing directory on the file system of the images.
    pub directory: PathBuf,
    /// Time of the measurement.
    pub at: SystemTime,
    /// Allocated bytes of blobs, records and layers, each counted once.
    pub used_bytes: u64,
    /// Number of files and directories of blobs, records and layers.
    pub inodes_used: u64,
}

/// A state of the store, identified by the number of added images and of removals. If two states are equal,
/// the store did not change in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) published: u64,
    pub(crate) disposed: u64,
    pub(crate) filled: u64,
}

/// The result of the last measurement.
pub(crate) struct Walk {
    pub(crate) moment: Moment,
    pub(crate) at: SystemTime,
    pub(crate) begun: Instant,
    pub(crate) total: TreeUsage,
}

/// The measurements, and counters of the workers that make them outdated.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) layers: RefCell<BTreeMap<String, TreeUsage>>,
    pub(crate) last: RefCell<Option<Walk>>,
    pub(crate) is_walking: Cell<bool>,
    /// Number of workers that currently write to the store.
    pub(crate) fills: Cell<u32>,
    /// Number of workers that have written to the store.
    pub(crate) filled: Cell<u64>,
    /// The task that checks layers in the background.
    pub(crate) checking: RefCell<Option<Task<()>>>,
}
