//! Cgroups that NRI plugins give to containers. The end of a container kills every process in its cgroup and removes it, so no
//! container is given a cgroup in which there are processes of others, and what has ended leaves the cgroup to its successor.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_sandbox::ContainerId;
use coracle_sandbox::cgroup::CgroupPath;

use crate::{Container, Pod};

impl Pod {
    /// Checks that the new container `id` may be given this cgroup: its end kills every process in the cgroup and removes it.
    ///
    /// # Errors
    /// `InvalidArgument` if the cgroup exists, is that of a container that has not ended, or is below that of a container or of
    /// a pod's monitor.
    pub fn require_unused_cgroup(&self, id: ContainerId, path: &CgroupPath) -> Result<(), Error> {
        let is_within = |other: &CgroupPath| other.contains(path.as_str());
        let pods = self.engine().pods();
        let is_of_pod = |pod: &Rc<Pod>| pod.cgroup().is_ok_and(|other| is_within(&other));
        let is_of_container = |container: &Rc<Container>| {
            let may_run = container.id != id && !container.record().state.is_over();
            may_run && container.cgroup().is_ok_and(|other| is_within(&other))
        };
        let is_known = pods.is_some_and(|pods| {
            pods.pods().iter().any(is_of_pod) || pods.all_containers().iter().any(is_of_container)
        });
        match is_known || self.node().cgroups.exists(path) {
            true => Err(Error::new(Kind::InvalidArgument, format!("cgroups path {path}: is in use"))),
            false => Ok(()),
        }
    }
}

impl Container {
    /// Kills the processes of this container, which has ended, that have left its cgroup: those in it are its successor's.
    pub(super) async fn end_beside_successor(&self) -> Result<(), Error> {
        self.pod.end_strays(|container| container == Some(self.id)).await?;
        self.update_end(|clean_up| clean_up.is_cleared = true);
        Ok(())
    }

    /// Whether an NRI plugin has given the cgroup to another container after the end of this one.
    pub(super) fn has_successor(&self, cgroup: &CgroupPath) -> bool {
        let is_successor = |other: &Rc<Container>| {
            other.id != self.id
                && !other.record().state.is_over()
                && other.cgroup().is_ok_and(|other| other == *cgroup)
        };
        let is_adjusted = !self.record().adjusted.cgroup.is_empty();
        is_adjusted && self.engine().pods().is_some_and(|pods| pods.all_containers().iter().any(is_successor))
    }
}
