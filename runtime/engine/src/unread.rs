//! Pods with records that cannot be read. One that cannot be read for too long counts as damaged ([`Unread`](coracle_base::store::Unread)):
//! what runs is ended, and the record is moved to quarantine. A client that removes the pod does not wait for as long.

use std::path::Path;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::store::Damage;
use coracle_base::{log, time};
use coracle_sandbox::{ContainerId, PodId, monitor};

use crate::Pods;
use crate::operations::Key;
use crate::pod::unlisted_containers;
use crate::unknown::Unknown;

impl Pods {
    /// The damage of a record, or of the list of a pod's containers, at `path`. An error that has lasted for too long becomes one that
    /// does not pass; sooner if a client removes the pod (`is_removed`).
    pub(crate) fn unless_lasting(&self, path: &Path, damage: Damage, is_removed: bool) -> Damage {
        let root = &self.node().paths.root;
        self.unread.unless_lasting(root, path, damage, is_removed, time::now())
    }

    /// Sets aside spare files from which a record could not be moved for too long. The pod whose record it was has none then.
    pub(crate) fn give_up_spare_files(&self) {
        let records = &self.node().host.records;
        let unmoved = records.unmoved_files();
        let is_moved = |path: &Path| records.is_spare_file(path) && !unmoved.contains_key(path);
        self.unread.retain(|path| !is_moved(path));
        for (path, errno) in unmoved {
            let Some(errno) = errno else { continue };
            let damage = Damage::Io(std::io::Error::from_raw_os_error(errno));
            let Damage::Damaged(reason) = self.unless_lasting(&path, damage, false) else { continue };
            log::error!("moving a spare file with a record to quarantine"; path = path.display(), reason = reason);
            match records.give_up(&path, &reason) {
                Ok(()) => self.unread.forget(&path),
                Err(error) => {
                    log::warn!("cannot move a spare file to quarantine"; path = path.display(), error = error);
                }
            }
        }
    }

    /// Removes a pod that is not listed because its record cannot be read: what runs is ended, and the record moved to quarantine. Any
    /// other pod is left alone.
    ///
    /// # Errors
    /// `Unavailable` if the state of the pod is still unknown, with the reason.
    pub async fn remove_unread(self: &Rc<Self>, id: &str) -> Result<(), Error> {
        let is_unlisted = |id: &PodId| !self.table.pods.borrow().contains_key(id);
        let is_unread = |id: &PodId| {
            self.unknown.borrow().get(id).is_some_and(|unknown| unknown.is_unread && !unknown.is_in_progress)
        };
        let Some(id) = id.parse().ok().filter(|id| is_unlisted(id) && is_unread(id)) else { return Ok(()) };
        let pods = Rc::clone(self);
        let work = async move {
            pods.recover_again(id, true).await;
            match pods.unknown.borrow().get(&id) {
                Some(Unknown { reason, .. }) => Err(Error::new(Kind::Unavailable, reason.clone())),
                None => Ok(()),
            }
        };
        self.engine().operations.share(Key::RemoveUnread(id), work).await
    }

    /// Forgets the failed reads of a pod's records.
    pub(crate) fn forget_unread(&self, id: PodId) {
        let pod = self.node().paths.pod(id);
        self.unread.retain(|path| !path.starts_with(&pod));
    }

    /// Whether a container whose ID begins with `id` may be one of a pod whose records were not all read.
    pub(crate) fn may_be_unread(&self, id: &str) -> bool {
        let unknown = self.unknown.borrow();
        unknown.iter().filter(|(_, unknown)| unknown.is_unread).any(|(pod, _)| self.may_be_in(*pod, id))
    }

    /// Whether a pod may have a container whose ID begins with `id`, by its directory, its notes and its processes.
    fn may_be_in(&self, pod: PodId, id: &str) -> bool {
        let paths = &self.node().paths;
        let is_it = |found: &ContainerId| found.to_string().starts_with(id);
        let listed = unlisted_containers::ids::<ContainerId>(&paths.containers(pod));
        let Ok(listed) = listed else { return true };
        let monitor = monitor::pid(&paths.pod_state(pod)).ok().flatten();
        listed.iter().any(is_it)
            || unlisted_containers::traces(paths, pod, monitor.unwrap_or(0), |_, _| true)
                .map_or(true, |traces| traces.keys().any(is_it))
    }
}
