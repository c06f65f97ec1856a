//! The cgroups of a pod with the systemd driver: systemd adopts the cgroups of monitors and containers as
//! scopes.
//!
//! ```text
//! create, apply ─► the process is in it ─► adopt: StartTransientUnit, by a worker ─► limits that systemd has
//! reset are applied again
//! update ─► apply ─► SetUnitProperties, in the background
//! ```
//! systemd removes a cgroup and its scope after the last process in it has ended. coracle waits for a short
//! time for that and otherwise stops the scope, because the scope would never end if its cgroup were removed
//! before systemd notices. Rules: CRI 3.15; `coracle_sandbox::cgroup::systemd`.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::{log, reactor, time};
use coracle_job::{Job, ScopeCommand, ScopeJob, ScopeProperty};
use coracle_sandbox::cgroup::{CgroupPath, Limits, PropertyValue};

use crate::{Container, Node, state};

/// Time limit for systemd to notice the end of a scope: usually milliseconds, longer during a boot.
const FORGET_LIMIT: Duration = Duration::from_millis(500);

/// Maximum time between an error of the adoption, for example systemd's "no such process", and the notification of the
/// daemon that the process has ended.
const END_SEEN_LIMIT: Duration = Duration::from_secs(1);

impl Container {
    /// Lets systemd adopt a container's cgroup, unless its process has already ended.
    pub(crate) async fn adopt(&self, pid: i32) -> Result<(), Error> {
        if !self.pod.record().has_scopes {
            return Ok(());
        }
        let adopted = self.adopt_with_limits(pid).await;
        // With its last process systemd removes the cgroup, at any moment of this.
        if adopted.is_err()
            && reactor::deadline(END_SEEN_LIMIT, self.until(state::Container::is_over)).await.is_ok()
        {
            return Ok(());
        }
        adopted
    }

    async fn adopt_with_limits(&self, pid: i32) -> Result<(), Error> {
        let cgroup = self.cgroup()?;
        let devices = self.node().cgroups.legacy_devices(&cgroup);
        let limits = self.record().limits();
        self.node().adopt(&cgroup, pid, format!("coracle {}", self.title()), &limits).await?;
        // systemd has written the properties that it knows, and defaults for all others.
        let limits = self.record().limits();
        self.node().cgroups.apply(&cgroup, &limits)?; // its warnings were told when it was made
        Ok(self.node().cgroups.restore_legacy_devices(&cgroup, devices)?)
    }

    /// Sends the effective limits to systemd in the background: the kernel already has them, but systemd
    /// would reset them at its next daemon-reload.
    pub(crate) fn tell_limits(self: &Rc<Self>) {
        if !self.pod.record().has_scopes || !self.record().state.is_running() {
            return;
        }
        let container = Rc::clone(self);
        reactor::spawn(async move {
            // Serialised, each with the limits that are effective at that time, so that the last one is
            // correct.
            let _turn = container.cgroup_use.scope.lock().await;
            if let Err(error) = container.set_properties().await
                && container.record().state.is_running()
            {
                log::warn!("cannot send a container's new limits to systemd"; ctr = container.id, error = error);
            }
        })
        .detach();
    }

    async fn set_properties(&self) -> Result<(), Error> {
        let cgroup = self.cgroup()?;
        let properties = self.node().properties(&self.record().limits())?;
        let unit = cgroup.slice_and_scope()?.1.to_owned();
        let job = ScopeJob { unit, command: ScopeCommand::Set, properties };
        self.node().host.workers.run(Job::Scope(job)).await?;
        let limits = self.record().limits();
        self.node().cgroups.apply(&cgroup, &limits)?;
        Ok(())
    }
}

impl Node {
    /// Lets systemd adopt a cgroup as a scope.
    pub(crate) async fn adopt(
        &self,
        cgroup: &CgroupPath,
        pid: i32,
        description: String,
        limits: &Limits,
    ) -> Result<(), Error> {
        let (slice, unit) = cgroup.slice_and_scope()?;
        let command = ScopeCommand::Start {
            slice: slice.to_owned(),
            description,
            pid: u32::try_from(pid).unwrap_or(0),
        };
        let job = ScopeJob { unit: unit.to_owned(), command, properties: self.properties(limits)? };
        self.host.workers.run(Job::Scope(job)).await?;
        Ok(())
    }

    /// Ensures that systemd removes a scope whose processes were killed, so that its cgroup can be removed.
    pub(crate) async fn end_scope(&self, cgroup: &CgroupPath) {
        let Ok((_, unit)) = cgroup.slice_and_scope() else { return };
        let end = time::now() + FORGET_LIMIT;
        let mut pause = Duration::from_millis(1);
        while self.cgroups.is_tracked(cgroup) {
            if time::now() >= end {
                let (unit, command) = (unit.to_owned(), ScopeCommand::Stop);
                let job = ScopeJob { unit, command, properties: Vec::new() };
                if let Err(error) = self.host.workers.run(Job::Scope(job)).await {
                    log::warn!("systemd did not remove a scope"; path = cgroup, error = error);
                }
                return;
            }
            reactor::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn properties(&self, limits: &Limits) -> Result<Vec<(String, ScopeProperty)>, Error> {
        let properties = self.cgroups.properties(limits)?;
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
