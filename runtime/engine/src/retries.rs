//! Retries of temporary failures at the daemon's start: a record or a directory that could not be read, a
//! monitor that did not respond, too few descriptors. The daemon does not change the objects of such a pod,
//! Status has a condition for the pod, and the attempt is repeated until it succeeds: a temporary error must
//! not end a running container.

use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_sandbox::{PodId, disk};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use crate::Pods;
use crate::unknown::Unknown;

/// Delay before the first retry; each further delay is twice the previous one, up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(15);

/// Number of descriptors that must remain free when a pod is created: for connections, execs with their pipes, and workers.
const DESCRIPTORS_RESERVED: u64 = 64;

impl Pods {
    /// Number of pods whose state is not completely known, and the reason for the first of them; `None` if
    /// the state of every pod is known.
    pub fn unknown(&self) -> Option<(usize, String)> {
        let unknown = self.unknown.borrow();
        let unmoved = || Some((1, Unknown::unread(self.node().host.records.unmoved()?), String::new()));
        let first = unknown.iter().next().map(|(id, first)| (unknown.len(), first.clone(), id.to_string()));
        let (count, first, id) = first.or_else(unmoved)?;
        Some((count, format!("{}; if this lasts: {}", first.reason, first.cure.replace("POD", &id))))
    }

    /// Whether the state of every pod is known, and no record is in a spare file.
    fn is_all_known(&self) -> bool {
        self.unknown.borrow().is_empty() && self.node().host.records.unmoved().is_none()
    }

    /// Refuses a new pod sandbox while the record of another one cannot be read, for at most one minute: the other one may have the
    /// same name.
    ///
    /// # Errors
    /// `Unavailable`: the client may repeat the call.
    pub(crate) fn require_names(&self) -> Result<(), Error> {
        let (unknown, pods) = (self.unknown.borrow(), self.table.pods.borrow());
        let may_have_name = |(id, unknown): &(&PodId, &Unknown)| {
            !pods.contains_key(*id) && unknown.is_unread && unknown.is_new()
        };
        match unknown.iter().find(may_have_name) {
            Some((_, unknown)) => Err(Error::new(Kind::Unavailable, unknown.reason.clone())),
            None => Ok(()),
        }
    }

    /// Records which part of a pod's state is unknown; `None`: no part.
    pub(crate) fn set_unknown(&self, id: PodId, unknown: Option<Unknown>) {
        match unknown {
            Some(unknown) => {
                log::warn!("state of a pod is unknown, will retry"; pod = id, reason = unknown.reason);
                let mut table = self.unknown.borrow_mut();
                let since = table.get(&id).map_or(unknown.since, |before| before.since);
                table.insert(id, Unknown { since, ..unknown });
            }
            None => drop(self.unknown.borrow_mut().remove(&id)),
        }
        self.node().images.keep_everything(self.is_any_unread());
    }

    /// Records which part of a pod's state is unknown, and retries in the background.
    pub(crate) fn keep_trying(self: &Rc<Self>, id: PodId, unknown: Unknown) {
        let is_first = self.unknown.borrow().is_empty();
        // What was unknown still is: only `recover_again` reads records and asks monitors.
        let before = self.unknown.borrow().get(&id).cloned();
        let is_unended = unknown.is_unended && before.as_ref().is_none_or(|before| before.is_unended);
        self.set_unknown(id, Some(Unknown { is_unended, ..unknown.after(before.as_ref()) }));
        // Otherwise a retry is already scheduled.
        if is_first {
            self.try_again_later();
        }
    }

    /// Retries in the background until the state of all pods is known. If the retries are in progress, their delays begin again.
    pub(crate) fn try_again_later(self: &Rc<Self>) {
        if self.is_all_known() {
            return;
        }
        let is_in_progress = self.retries.pause.replace(Some(PAUSE)).is_some();
        self.retries.sooner.notify(usize::MAX);
        if is_in_progress {
            return;
        }
        let pods = Rc::clone(self);
        reactor::spawn(async move {
            while let Some(pause) = pods.retries.pause.get() {
                let sooner = pods.retries.sooner.listen();
                if reactor::deadline(pause, sooner).await.is_ok() {
                    continue;
                }
                pods.retries.pause.set(Some((pause * 2).min(PAUSE_MAX)));
                pods.try_all().await;
                if pods.is_all_known() {
                    log::info!("state of all pods is known");
                    pods.node().images.sweep();
                    pods.retries.pause.set(None);
                }
            }
        })
        .detach();
    }

    /// Attempts to determine the state of all pods whose state is unknown, all at once: one monitor that does not answer
    /// delays no other.
    async fn try_all(self: &Rc<Self>) {
        self.adopt_again();
        let is_due = |(id, unknown): (&PodId, &Unknown)| (!unknown.is_in_progress).then_some(*id);
        let ids: Vec<PodId> = self.unknown.borrow().iter().filter_map(is_due).collect();
        let attempt = |id| {
            let pods = Rc::clone(self);
            reactor::spawn(async move { pods.recover_again(id, false).await })
        };
        let attempts: Vec<_> = ids.into_iter().map(attempt).collect();
        for attempt in attempts {
            attempt.await;
        }
    }
}

/// Checks whether enough descriptors are free for another pod.
pub(crate) fn require_descriptors() -> Result<(), Error> {
    let used = match disk::open_device("/dev/null".as_ref()) {
        // The lowest free number: all lower ones are in use.
        Ok(file) => u64::try_from(file.as_raw_fd()).unwrap_or(u64::MAX),
        Err(error) if error.raw_os_error() == Some(Errno::EMFILE as i32) => u64::MAX,
        Err(error) => return Err(Error::from(error).context("open /dev/null")),
    };
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    match used.saturating_add(DESCRIPTORS_RESERVED) > limit {
        true => {
            let text = format!(
                "too few file descriptors: the limit is {limit}, see LimitNOFILE= of systemd.exec(5)"
            );
            Err(Error::new(Kind::ResourceExhausted, text))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn enough_file_descriptors_are_free_for_a_pod() {
        super::require_descriptors().unwrap();
    }
}
