//! What the start could not find out for now: a record or a directory that could not be read, a monitor that did not answer, too
//! few descriptors. It is left alone with everything it may own, a condition in Status tells of it, and it is tried again until it
//! works: one error at the wrong moment must not end a container that runs.

use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_sandbox::PodId;
use nix::sys::resource::{Resource, getrlimit};

use crate::unknown::Unknown;
use crate::{Pod, Pods};

/// From one try to the next: doubled each time, up to the second.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Descriptors that pods leave to everything else: connections, execs with their pipes, workers.
const DESCRIPTORS_RESERVED: u64 = 64;

impl Pods {
    /// How many pods are not wholly known, and why the first of them is not.
    pub fn unknown(&self) -> Option<(usize, String)> {
        let unknown = self.unknown.borrow();
        let first = unknown.values().next()?;
        Some((unknown.len(), first.reason.clone()))
    }

    /// Takes down what is not known of a pod; `None`: it is.
    pub(crate) fn set_unknown(&self, id: PodId, unknown: Option<Unknown>) {
        match unknown {
            Some(unknown) => {
                log::warn!("a pod is not wholly known, tried again later"; pod = id, reason = unknown.reason);
                self.unknown.borrow_mut().insert(id, unknown);
            }
            None => drop(self.unknown.borrow_mut().remove(&id)),
        }
        let is_any_unread = self.unknown.borrow().values().any(|unknown| unknown.is_unread);
        self.node.images.keep_everything(is_any_unread);
    }

    /// The connection to a monitor that lives is lost: both ends make another, and what runs goes on. What happened meanwhile
    /// the monitor tells again; execs under way are over for their callers.
    pub(crate) fn monitor_lost(self: &Rc<Self>, pod: &Rc<Pod>) {
        *pod.link.borrow_mut() = None;
        pod.execs.borrow_mut().clear();
        if !pod.record().state.is_ready() {
            return;
        }
        log::warn!("the connection to a pod's monitor is lost, it is made again"; pod = pod.id);
        let (pods, pod) = (Rc::clone(self), Rc::clone(pod));
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            if !pod.record().state.is_ready() {
                return;
            }
            if let Some(unknown) = pods.take_over(&pod).await {
                let is_first = pods.unknown.borrow().is_empty();
                pods.set_unknown(pod.id, Some(unknown));
                // Else it is on its way.
                if is_first {
                    pods.try_again_later();
                }
            }
        })
        .detach();
    }

    /// Tries again until everything is known; in the background.
    pub(crate) fn try_again_later(self: &Rc<Self>) {
        if self.unknown.borrow().is_empty() {
            return;
        }
        let pods = Rc::clone(self);
        reactor::spawn(async move {
            let mut pause = PAUSE;
            loop {
                reactor::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                let ids: Vec<PodId> = pods.unknown.borrow().keys().copied().collect();
                for id in ids {
                    let unknown = pods.find_again(id).await;
                    pods.set_unknown(id, unknown);
                }
                if pods.unknown.borrow().is_empty() {
                    log::info!("every pod is known");
                    pods.node.images.sweep();
                    return;
                }
            }
        })
        .detach();
    }

    async fn find_again(self: &Rc<Self>, id: PodId) -> Option<Unknown> {
        let known = self.table.pods.borrow().get(&id).cloned();
        let _operation = match &known {
            Some(pod) => Some(pod.operation.lock().await),
            None => None,
        };
        if let Some(unknown) = self.load_pod(id).await {
            return Some(unknown);
        }
        // Everything is read, so that what is not listed is not to be; but not everything is known before the monitor answers.
        if let Some(unknown) = self.unknown.borrow_mut().get_mut(&id) {
            unknown.is_unread = false;
        }
        // It was removed meanwhile, or set aside now.
        let pod = self.table.pods.borrow().get(&id).cloned()?;
        self.take_over(&pod).await
    }
}

/// Whether another pod may take the descriptors that it needs.
pub(crate) fn require_descriptors() -> Result<(), Error> {
    let probe = std::fs::File::open("/dev/null");
    // The lowest that is free: those below are in use.
    let used = probe.as_ref().map_or(u64::MAX, |file| u64::try_from(file.as_raw_fd()).unwrap_or(u64::MAX));
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
    fn descriptors_suffice_here() {
        super::require_descriptors().unwrap();
    }
}
