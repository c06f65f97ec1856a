//! Changes of a container's limits, by the CRI and by NRI plugins.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_sandbox::cgroup::{Limits, Resources};

use crate::Container;
use crate::record::{ContainerRecord, DurableRecord};

impl Container {
    /// UpdateContainerResources: applies all limits or none; the status shows them immediately.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container has exited; `InvalidArgument` for limits that this kernel does
    /// not support; otherwise the error of a lifecycle hook or the kernel.
    pub async fn update(self: &Rc<Self>, asked: Resources) -> Result<(), Error> {
        let container = Rc::clone(self);
        let work = async move {
            let _operation = container.operation.lock().await;
            let updated = container.update_under_guard(&asked).await;
            updated.map_err(|error| error.context(container.title()))
        };
        self.engine().operations.run(work).await
    }

    async fn update_under_guard(self: &Rc<Self>, asked: &Resources) -> Result<(), Error> {
        let turn = self.engine().hooks.begin(&self.pod).await;
        if self.record().state.is_over() {
            return Err(Error::new(Kind::FailedPrecondition, "it has ended"));
        }
        let mut wanted = self.record().limits();
        wanted.resources = wanted.resources.updated(asked);
        let wanted = turn.update(self, asked, wanted).await?;
        self.set_limits(wanted)?;
        turn.updated(self).await;
        Ok(())
    }

    /// Sets the limits of a container that is created or running: in its cgroup, then in its record. The
    /// function does not await, so changes by requests and plugins are serialised.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container has exited; otherwise the error of the kernel or of writing the
    /// record.
    pub fn set_limits(self: &Rc<Self>, wanted: Limits) -> Result<(), Error> {
        let mut record: ContainerRecord = self.record().clone();
        if record.state.is_over() {
            return Err(Error::new(Kind::FailedPrecondition, "it has ended"));
        }
        for warning in self.node().cgroups.apply(&self.cgroup()?, &wanted)? {
            self.engine().warn_once(warning);
        }
        record.limits = Some(wanted);
        // If the disk is full, the applied limits stay: the old record is read only after a restart.
        let committed = record.commit(self.node());
        *self.record.borrow_mut() = record;
        self.tell_limits();
        committed
    }
}
