//! Limits of a container that change while it is there: by the CRI, by plugins.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};

use crate::record::{ContainerRecord, Kept, Limits};
use crate::spec::Resources;
use crate::{Container, Pods};

impl Pods {
    /// UpdateContainerResources: all of it or nothing; status shows it at once.
    ///
    /// # Errors
    /// `FailedPrecondition` where it has ended, `InvalidArgument` for limits that this kernel lacks, else a refusal by who
    /// follows its life or the kernel.
    pub async fn update_container(
        self: &Rc<Self>,
        container: Rc<Container>,
        asked: Resources,
    ) -> Result<(), Error> {
        let pods = Rc::clone(self);
        let work = async move {
            let _operation = container.operation.lock().await;
            let updated = pods.update_in_turn(&container, &asked).await;
            updated.map_err(|error| error.context(container.title()))
        };
        self.operations.run(work).await
    }

    async fn update_in_turn(
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

    /// Limits of a container that is created or runs: in its cgroup, then in its record. One step, without a wait: requests
    /// and plugins that change the same container come one after the other.
    ///
    /// # Errors
    /// `FailedPrecondition` where it has ended; else what the kernel refused, or a record that could not be written.
    pub fn set_limits(self: &Rc<Self>, container: &Rc<Container>, wanted: Limits) -> Result<(), Error> {
        let mut record: ContainerRecord = container.record().clone();
        if record.state.is_over() {
            return Err(Error::new(Kind::FailedPrecondition, "it has ended"));
        }
        for warning in self.node.cgroups.apply(&container.cgroup()?, &wanted.of_cgroup())? {
            self.warn_once(warning);
        }
        record.limits = Some(wanted);
        // A disk that is full now does not undo limits that hold: the old record is read again only after a restart.
        let committed = record.commit(&self.node.paths);
        *container.record.borrow_mut() = record;
        self.tell_limits(container);
        committed
    }
}
