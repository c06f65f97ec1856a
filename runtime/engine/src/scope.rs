//! systemd's part in a pod's cgroups, where it is the driver: it adopts the cgroups of monitors and containers as scopes.
//!
//! ```text
//!   make, apply ─► the process is in it ─► adopt: StartTransientUnit, by a worker ─► what systemd has reset is applied again
//!   update ─► apply ─► tell: SetUnitProperties, in the background
//! ```
//! systemd takes a cgroup away when its last process has ended, and forgets the scope: it is given a moment for that, and told
//! to where it did not (a cgroup that vanishes before systemd has looked leaves a scope without end). Rules: CRI 3.15; `coracle_sandbox::cgroup::systemd`.

use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use coracle_base::{log, reactor};
use coracle_job::{Job, ScopeCommand, ScopeJob, ScopeProperty};
use coracle_sandbox::cgroup::{CgroupPath, PropertyValue, Resources};

use crate::{Container, Pod, Pods};

/// How long systemd may take to see that a scope is over: milliseconds, but on a node that boots.
const FORGET_LIMIT: Duration = Duration::from_millis(500);

/// How long the end of a process may take to be seen here after systemd did not find it.
const END_SEEN_LIMIT: Duration = Duration::from_secs(1);

impl Pods {
    /// Has systemd adopt the monitor's cgroup.
    pub(crate) async fn adopt_monitor(&self, pod: &Pod) -> Result<(), Error> {
        if !pod.record().has_scopes {
            return Ok(());
        }
        let name = pod.record().spec.name.clone();
        let description = format!("coracle pod sandbox {}/{}", name.namespace, name.name);
        self.adopt(&pod.cgroup()?, pod.pid(), description, &Resources::default()).await
    }

    /// Has systemd adopt a container's cgroup; one whose process has ended meanwhile needs none.
    pub(crate) async fn adopt_container(&self, container: &Container, pid: i32) -> Result<(), Error> {
        if !container.pod.record().has_scopes {
            return Ok(());
        }
        let cgroup = container.cgroup()?;
        let devices = self.node.cgroups.legacy_devices(&cgroup);
        let limits = container.record().limits().of_cgroup();
        let adopted = self.adopt(&cgroup, pid, format!("coracle {}", container.title()), &limits).await;
        if adopted.is_err() && reactor::deadline(END_SEEN_LIMIT, container.exited.wait()).await.is_ok() {
            return Ok(());
        }
        adopted?;
        // systemd has written what it knows, and its defaults where it knows nothing.
        let limits = container.record().limits().of_cgroup();
        self.node.cgroups.apply(&cgroup, &limits)?; // its warnings were told when it was made
        Ok(self.node.cgroups.restore_legacy_devices(&cgroup, devices)?)
    }

    async fn adopt(
        &self,
        cgroup: &CgroupPath,
        pid: i32,
        description: String,
        limits: &Resources,
    ) -> Result<(), Error> {
        let (slice, unit) = cgroup.slice_and_scope()?;
        let command = ScopeCommand::Start {
            slice: slice.to_owned(),
            description,
            pid: u32::try_from(pid).unwrap_or(0),
        };
        let job = ScopeJob { unit: unit.to_owned(), command, properties: self.properties(limits)? };
        self.node.host.workers.run(Job::Scope(job), |_, _| ()).await?;
        Ok(())
    }

    /// Sees to it that systemd forgets a scope whose processes were killed, and then its cgroup may go.
    pub(crate) async fn end_scope(&self, cgroup: &CgroupPath) {
        let Ok((_, unit)) = cgroup.slice_and_scope() else { return };
        let end = Instant::now() + FORGET_LIMIT;
        let mut pause = Duration::from_millis(1);
        while self.node.cgroups.is_tracked(cgroup) {
            if Instant::now() >= end {
                let (unit, command) = (unit.to_owned(), ScopeCommand::Stop);
                let job = ScopeJob { unit, command, properties: Vec::new() };
                if let Err(error) = self.node.host.workers.run(Job::Scope(job), |_, _| ()).await {
                    log::warn!("systemd keeps a scope"; path = cgroup, error = error);
                }
                return;
            }
            reactor::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Tells systemd the limits in force, in the background: they hold already, and would until its next daemon-reload.
    pub(crate) fn tell_limits(self: &Rc<Self>, container: &Rc<Container>) {
        if !container.pod.record().has_scopes || !container.record().state.is_running() {
            return;
        }
        let (pods, container) = (Rc::clone(self), Rc::clone(container));
        reactor::spawn(async move {
            // One after the other, each with what is in force when its turn comes: the last one tells the truth.
            let _turn = container.scope.lock().await;
            if let Err(error) = pods.set_properties(&container).await
                && container.record().state.is_running()
            {
                log::warn!("systemd does not know a container's new limits"; ctr = container.id, error = error);
            }
        })
        .detach();
    }

    async fn set_properties(&self, container: &Container) -> Result<(), Error> {
        let cgroup = container.cgroup()?;
        let properties = self.properties(&container.record().limits().of_cgroup())?;
        let unit = cgroup.slice_and_scope()?.1.to_owned();
        let job = ScopeJob { unit, command: ScopeCommand::Set, properties };
        self.node.host.workers.run(Job::Scope(job), |_, _| ()).await?;
        let limits = container.record().limits().of_cgroup();
        self.node.cgroups.apply(&cgroup, &limits)?;
        Ok(())
    }

    fn properties(&self, limits: &Resources) -> Result<Vec<(String, ScopeProperty)>, Error> {
        let properties = self.node.cgroups.properties(limits)?;
        let told = properties.into_iter().map(|property| {
            let value = match property.value {
                PropertyValue::Number(number) => ScopeProperty::Number(number),
                PropertyValue::Text(text) => ScopeProperty::Text(text.to_owned()),
                PropertyValue::Mask(mask) => ScopeProperty::Mask(mask),
            };
            (property.name.to_owned(), value)
        });
        Ok(told.collect())
    }
}
