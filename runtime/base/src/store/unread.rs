//! Records that cannot be read, and how long. An error may pass, so that at first nothing of what they describe changes; but one that
//! lasts must not keep a pod from being removed and layers from being collected. A record whose reads have failed for
//! [`UNREAD_LIMIT`] counts as damaged.
//!
//! Guaranteed: an error of the daemon's own limits or rights ([`is_of_daemon`]) makes no record a damaged one, nor does any error
//! while nothing can be written to the disk, which has failed as a whole then.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::{Damage, require_quarantine};
use crate::log;

/// Time for which each read of a record must have failed before it counts as damaged. A disk that recovers does so sooner: the kernel
/// repeats a command for 3 minutes (180 s, sd's and nvme's longest default), and a path to a disk on a network is replaced after 2.
pub const UNREAD_LIMIT: Duration = Duration::from_secs(600);
/// Number of these reads: a daemon that was stopped itself has only seen time pass. At the pace of retries they take 5 to 8 minutes.
const UNREAD_ATTEMPTS_MIN: u32 = 20;

/// Time for which the reads must have failed if a client removes the pod: what a plugin program has made for the pod is not released
/// without its record, so that it is not given up at the first error.
const UNREAD_LIMIT_OF_REMOVED: Duration = Duration::from_secs(10);

/// Failed reads of one record, or of the list of a pod's containers.
struct Failures {
    since: Instant,
    count: u32,
}

/// The records that could not be read at the last attempt, by their path.
#[derive(Default)]
pub struct Unread(RefCell<BTreeMap<PathBuf, Failures>>);

impl Unread {
    /// A record was read, or does not exist.
    pub fn forget(&self, path: &Path) {
        self.0.borrow_mut().remove(path);
    }

    /// Keeps the failed reads of these paths only.
    pub fn retain(&self, keeps: impl Fn(&Path) -> bool) {
        self.0.borrow_mut().retain(|path, _| keeps(path));
    }

    /// The damage of a record at `path`, or of the list of a pod's containers, that was read at `now`. An error that has lasted for
    /// too long becomes one that does not pass; sooner if a client removes the pod (`is_removed`). `root`: directory with the
    /// quarantine.
    pub fn unless_lasting(
        &self,
        root: &Path,
        path: &Path,
        damage: Damage,
        is_removed: bool,
        now: Instant,
    ) -> Damage {
        let Damage::Io(error) = &damage else {
            self.forget(path);
            return damage;
        };
        if !self.has_lasted(path, error, is_removed, now) {
            return damage;
        }
        if let Err(error) = require_quarantine(root) {
            log::warn!("cannot move a record that cannot be read to quarantine"; path = path.display(), error = error);
            return damage;
        }
        let why = if is_removed { "and its pod was removed" } else { "for ten minutes" };
        Damage::Damaged(format!("cannot be read, {why}: {damage}"))
    }

    /// Notes that the file at `path` cannot be read at `now`; returns whether it has failed for too long. `is_removed`: a client
    /// removes the pod whose file it may be.
    pub fn has_lasted(&self, path: &Path, error: &io::Error, is_removed: bool, now: Instant) -> bool {
        if error.raw_os_error().is_none_or(|errno| is_of_daemon(Errno::from_raw(errno))) {
            return false;
        }
        let mut failures = self.0.borrow_mut();
        let failure = failures.entry(path.to_owned()).or_insert(Failures { since: now, count: 0 });
        failure.count = failure.count.saturating_add(1);
        let failed_for = |limit| now >= failure.since + limit;
        is_removed && failed_for(UNREAD_LIMIT_OF_REMOVED)
            || failure.count >= UNREAD_ATTEMPTS_MIN && failed_for(UNREAD_LIMIT)
    }
}

/// Whether an error is one of the daemon's own limits, or of its rights, and not of what it reads.
fn is_of_daemon(errno: Errno) -> bool {
    is_shortage(errno) || matches!(errno, Errno::EACCES | Errno::EPERM)
}

/// Whether an error is a lack of memory or descriptors, which passes.
pub fn is_shortage(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::EAGAIN | Errno::EINTR
    )
}
