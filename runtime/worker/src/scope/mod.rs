//! Asks systemd for the scope of a container or a pod's monitor: org.freedesktop.systemd1(5). Its cgroup is there and limited
//! already, with the process in it; from then on systemd knows whose it is, and leaves its inside to us (Delegate).
//!
//! cgroups-rs starts scopes over the system bus and names their properties. What its client does not do goes over a zbus
//! connection of our own: see [`manager`] and docs/notes/001-cgroups-rs.md.

mod manager;

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use cgroups_rs::systemd::Property;
use cgroups_rs::systemd::props::PropertiesBuilder;
use coracle_job::{Failure, FailureKind, ScopeCommand, ScopeJob, ScopeProperty};

use self::manager::Manager;
use crate::failure::{Context, failure};

/// Longest wait for systemd: it may be busy with a boot; the kubelet gives a start two minutes.
const LIMIT: Duration = Duration::from_secs(60);

/// Does the job.
///
/// # Errors
/// `NotFound`: systemd knows no such unit or process. `Unavailable`: it cannot be reached, or did not answer within [`LIMIT`].
/// Otherwise `Internal`, with systemd's own words.
pub(crate) fn run(job: &ScopeJob) -> Result<(), Failure> {
    within(LIMIT, job, Manager::connect)
}

/// Does the job, with every wait in it, within `limit`.
fn within(
    limit: Duration,
    job: &ScopeJob,
    connect: impl FnOnce() -> Result<Manager, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let unit = job.unit.clone();
    let job = job.clone();
    let (sender, outcome) = sync_channel(1);
    // cgroups-rs' calls have no timeout. A thread that still waits for systemd at the limit ends with this process.
    std::thread::spawn(move || {
        let done = connect().context(|| "connect to systemd").and_then(|manager| carry_out(&manager, &job));
        let _ = sender.send(done); // the limit has passed
    });
    let outcome = outcome.recv_timeout(limit).unwrap_or_else(|error| {
        Err(match error {
            RecvTimeoutError::Timeout => {
                failure(FailureKind::Unavailable, format!("systemd did not answer within {limit:?}"))
            }
            RecvTimeoutError::Disconnected => {
                failure(FailureKind::Internal, "the thread that asks systemd ended")
            }
        })
    });
    outcome.context(|| format!("systemd unit {unit}"))
}

/// The one property that not every systemd of these years has.
const OOM_POLICY: &str = "OOMPolicy";

fn carry_out(manager: &Manager, job: &ScopeJob) -> Result<(), Failure> {
    match attempt(manager, job) {
        // A systemd before 253 has no such property for scopes: the file of the cgroup is all there is.
        Err(refused) if refused.message.contains(OOM_POLICY) => {
            let mut job = job.clone();
            job.properties.retain(|(name, _)| name != OOM_POLICY);
            attempt(manager, &job)
        }
        done => done,
    }
}

fn attempt(manager: &Manager, job: &ScopeJob) -> Result<(), Failure> {
    match &job.command {
        ScopeCommand::Set => manager.set_properties(&job.unit, &limits(job)),
        ScopeCommand::Stop => match manager.stop(&job.unit) {
            Err(gone) if gone.kind == FailureKind::NotFound => Ok(()),
            done => done,
        },
        ScopeCommand::Start { slice, description, pid } => {
            match manager.start(&job.unit, scope(job, slice, description, *pid))?.as_str() {
                "done" => Ok(()),
                result => Err(failure(FailureKind::Internal, format!("its start ended with {result:?}"))),
            }
        }
    }
}

/// The properties of a new scope.
fn scope<'job>(job: &'job ScopeJob, slice: &str, description: &str, pid: u32) -> Vec<Property<'job>> {
    let mut properties: Vec<Property<'job>> = PropertiesBuilder::default()
        .description(description.to_owned())
        .slice(slice.to_owned())
        // Inside it is ours. Accounting switches the controllers on above it.
        .delegate(true)
        .cpu_accounting(true)
        .memory_accounting(true)
        .task_accounting(true)
        // At shutdown the kubelet ends its pods first; systemd must not stop them together with ordinary units.
        .default_dependencies(false)
        .pids(vec![pid])
        .build();
    // A scope that failed is forgotten with its cgroup, as one that ended well.
    properties.push(("CollectMode", "inactive-or-failed".into()));
    properties.extend(limits(job));
    properties
}

fn limits(job: &ScopeJob) -> Vec<Property<'_>> {
    let limits = job.properties.iter().map(|(name, value)| {
        let value = match value {
            ScopeProperty::Number(number) => (*number).into(),
            ScopeProperty::Text(text) => text.as_str().into(),
            ScopeProperty::Mask(mask) => mask.as_slice().into(),
        };
        (name.as_str(), value)
    });
    limits.collect()
}

#[cfg(test)]
mod tests;
