//! What could not be found out of a pod for now, as the table of pods keeps it until it is.

use coracle_sandbox::PodId;

/// Of one pod, what is not known yet.
pub(crate) struct Unknown {
    pub(crate) reason: String,
    /// A record is not read: nobody can say which layers it needs.
    pub(crate) is_unread: bool,
}

impl Unknown {
    pub(crate) fn unread(reason: impl std::fmt::Display) -> Self {
        Self { reason: reason.to_string(), is_unread: true }
    }

    pub(crate) fn unattached(id: PodId, reason: impl std::fmt::Display) -> Self {
        Self { reason: format!("monitor of pod sandbox {id:.13}: {reason}"), is_unread: false }
    }
}
