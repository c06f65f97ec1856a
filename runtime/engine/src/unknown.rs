//! The unknown parts of a pod's state, recorded in the table of pods until they are determined.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::time;
use coracle_sandbox::PodId;
use event_listener::Event;

/// Duration for which an unreadable record delays new pods, or new containers of its pod: a temporary error has passed by then,
/// and a damaged disk must not keep the node from running any pod.
pub(crate) const NAMES_LIMIT: Duration = Duration::from_secs(60);

/// Cure for a record that cannot be read. In each cure `POD` stands for the ID of the pod.
const SET_ASIDE: &str = "check the disk (dmesg); after ten minutes of I/O errors it is moved to quarantine, and what it describes is \
                         ended; `mv` it away to have that at once";
/// Cure for processes that do not end.
const END: &str = "check what they wait for (`cat /proc/PID/stack`, dmesg): a file system that does not answer, or a debugger";
/// Cure for a directory that cannot be removed.
const REMOVE_BY_HAND: &str = "check the disk (dmesg), or remove the directory by hand";
/// Cure for a monitor that does not answer.
const REMOVE: &str = "continue its process (`kill -CONT PID`), or delete the pod (`crictl rmp -f POD`)";

/// The unknown parts of one pod's state.
#[derive(Clone)]
pub(crate) struct Unknown {
    pub(crate) reason: String,
    /// Actions that end this state if it lasts, as text for users.
    pub(crate) cure: &'static str,
    /// Whether containers may run whose record was not read, so that their layers are unknown.
    pub(crate) is_unread: bool,
    /// Whether only processes remain that could not be killed: the states of the pod's containers are known.
    pub(crate) is_unended: bool,
    /// Time since which a part of the pod's state is unknown.
    pub(crate) since: Instant,
    /// Whether an earlier attempt has not ended, so that no other one begins.
    pub(crate) is_in_progress: bool,
}

impl Unknown {
    fn new(reason: String, cure: &'static str, is_unread: bool) -> Self {
        Self { reason, cure, is_unread, is_unended: false, since: time::now(), is_in_progress: false }
    }

    /// Whether the state has been unknown for less than [`NAMES_LIMIT`].
    pub(crate) fn is_new(&self) -> bool {
        time::now() < self.since + NAMES_LIMIT
    }

    pub(crate) fn unread(reason: impl std::fmt::Display) -> Self {
        Self::new(reason.to_string(), SET_ASIDE, true)
    }

    /// This entry for a pod of which `before` is unknown, too. While any record is unread, containers that are not listed are not ended.
    pub(crate) fn after(self, before: Option<&Self>) -> Self {
        Self { is_unread: self.is_unread || before.is_some_and(|before| before.is_unread), ..self }
    }

    /// Entry for a pod whose record, or that of one of its containers, cannot be read. `directory`: that of the record, or the one that
    /// cannot be listed.
    pub(crate) fn unread_file(id: PodId, directory: &Path, reason: impl std::fmt::Display) -> Self {
        let reason = format!("pod sandbox {id:.13}: read {}: {reason}", directory.display());
        Self::new(reason, SET_ASIDE, true)
    }

    /// Entry for a pod with containers without a usable record that could not be killed.
    pub(crate) fn unended_unread(id: PodId, reason: impl std::fmt::Display) -> Self {
        Self::new(format!("pod sandbox {id:.13}: {reason}"), END, true)
    }

    /// Entry for a pod without a record whose processes could not be killed.
    pub(crate) fn orphan(id: PodId, reason: impl std::fmt::Display) -> Self {
        Self::new(format!("pod sandbox {id:.13}, which has no record: {reason}"), END, true)
    }

    /// Entry for a pod with a directory that has no usable record and could not be removed.
    pub(crate) fn unremoved(reason: impl std::fmt::Display) -> Self {
        Self::new(reason.to_string(), REMOVE_BY_HAND, false)
    }

    /// Entry for a pod whose containers could not be killed.
    pub(crate) fn unended(id: PodId, reason: impl std::fmt::Display) -> Self {
        let unknown = Self::new(format!("containers of pod sandbox {id:.13}: {reason}"), END, false);
        Self { is_unended: true, ..unknown }
    }

    pub(crate) fn unattached(id: PodId, reason: impl std::fmt::Display) -> Self {
        Self::new(format!("monitor of pod sandbox {id:.13}: {reason}"), REMOVE, false)
    }
}

/// The task that retries the pods whose state is unknown; there is at most one.
#[derive(Default)]
pub(crate) struct Retries {
    /// Delay before the next attempt; `None`: there is no task.
    pub(crate) pause: Cell<Option<Duration>>,
    /// Notified when the delay begins again.
    pub(crate) sooner: Event,
}
