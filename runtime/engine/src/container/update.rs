//! Changes of a container's limits, by the CRI and by NRI plugins.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};

use crate::record::{ContainerRecord, Kept, Limits};
use crate::spec::Resources;
use crate::{Container, Pods};

impl Pods {
    /// UpdateContainerResources: applies all limits or none; the status shows them immediately.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container has exited; `InvalidArgument` for limits that this kernel does
    /// not support; otherwise the error of a lifecycle hook or the kernel.
    pub async fn update_container(
        self: &Rc<Self>,
        container: Rc<Container>,
        asked: Resources,
    ) -> Result<(), Error> {
        let pods = Rc::clone(self);
        let work = async move {
            let _operation = container.operation.lock().await;
            let updated = pods.update_under_guard(&container, &asked).await;
            updated.map_err(|error| error.context(container.title()))
        };
        self.operations.run(work).await
    }

    async fn update_under_guard(
        self: &Rc<Self>,
        container: &Rc<Container>,
        asked: &Resources,
    ) -> Result<(), Error> {
        let turn = self.hooks.begin(self, &container.pod).await;
        if container.record().state.is_over() {
            return Err(Error::new(Kind::FailedPrecondition, "it has ended"));
        }
        let mut wanted = container.record().limits();
        wanted.resources = wanted.resources.updated(asked);
        let wanted = turn.update(container, asked, wanted).await?;
        self.set_limits(container, wanted)?;
        turn.updated(container).await;
        Ok(())
    }

    /// Sets the limits of a container that is created or running: in its cgroup, then in its record. The
    /// function does not await, so changes by requests and plugins are serialised.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container has exited; otherwise the error of the kernel or of writing the
    /// record.
    pub fn set_limits(self: &Rc<Self>, container: &Rc<Container>, wanted: Limits) -> Result<(), Error> {
        let mut record: ContainerRecord = container.record().clone();
        if record.state.is_over() {
            return Err(Error::new(Kind::FailedPrecondition, "it has ended"));
        }
        for warning in self.node.cgroups.apply(&container.cgroup()?, &wanted.of_cgroup())? {
            self.warn_once(warning);
        }
        record.limits = Some(wanted);
        // If the disk is full, the applied limits stay: the old record is read only after a restart.
        let committed = record.commit(&self.node.paths);
        *container.record.borrow_mut() = record;
        self.tell_limits(container);
        committed
    }
}
