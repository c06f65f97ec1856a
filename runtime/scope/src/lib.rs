//! Requests to systemd for the scope of a container or of a pod's monitor: org.freedesktop.systemd1(5). The
//! cgroup already exists, with its limits and with the process in it; systemd adopts it and delegates its
//! subtree to coracle (Delegate).
//!
//! cgroups-rs starts scopes over the system bus and defines the names of properties. Functions that its
//! client lacks use a separate zbus connection: see [`manager`] and docs/notes/001-cgroups-rs.md.
#![forbid(unsafe_code)]

mod manager;

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use cgroups_rs::systemd::Property;
use cgroups_rs::systemd::props::PropertiesBuilder;
use coracle_job::{Failure, FailureKind, ScopeCommand, ScopeJob, ScopeProperty};

use self::manager::Manager;

/// Time limit for systemd's answer, which may take long during a boot; the kubelet's limit for a start is two
/// minutes.
const LIMIT: Duration = Duration::from_secs(60);

/// Executes the job.
///
/// # Errors
/// `NotFound` if systemd has no such unit or process; `Unavailable` if it cannot be reached or does not
/// answer within [`LIMIT`]; otherwise `Internal` with systemd's message.
pub fn run(job: &ScopeJob) -> Result<(), Failure> {
    within(LIMIT, job, Manager::connect)
}

/// Executes the job within `limit`, including all waits.
fn within(
    limit: Duration,
    job: &ScopeJob,
    connect: impl FnOnce() -> Result<Manager, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let unit = job.unit.clone();
    let job = job.clone();
    let (sender, outcome) = sync_channel(1);
    // Calls of cgroups-rs have no timeout. A thread that still waits at the limit ends with this process.
    std::thread::spawn(move || {
        let connected = connect().map_err(|failure| failure.during("connect to systemd"));
        let done = connected.and_then(|manager| carry_out(&manager, &job));
        let _ = sender.send(done); // fails if the limit has passed
    });
    let outcome = outcome.recv_timeout(limit).unwrap_or_else(|error| {
        Err(match error {
            RecvTimeoutError::Timeout => {
                Failure::new(FailureKind::Unavailable, format!("systemd did not answer within {limit:?}"))
            }
            RecvTimeoutError::Disconnected => {
                Failure::new(FailureKind::Internal, "the thread for the call to systemd ended")
            }
        })
    });
    outcome.map_err(|failure| failure.during(&format!("systemd unit {unit}")))
}

/// Name of a property that older versions of systemd do not have.
const OOM_POLICY: &str = "OOMPolicy";

fn carry_out(manager: &Manager, job: &ScopeJob) -> Result<(), Failure> {
    match attempt(manager, job) {
        // systemd before 253 has no such property for scopes; the cgroup file alone is sufficient.
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
                result => {
                    Err(Failure::new(FailureKind::Internal, format!("the start job ended with {result:?}")))
                }
            }
        }
    }
}

/// The properties of a new scope.
fn scope<'job>(job: &'job ScopeJob, slice: &str, description: &str, pid: u32) -> Vec<Property<'job>> {
    let mut properties: Vec<Property<'job>> = PropertiesBuilder::default()
        .description(description.to_owned())
        .slice(slice.to_owned())
        // The subtree is managed by coracle. Accounting enables the controllers above it.
        .delegate(true)
        .cpu_accounting(true)
        .memory_accounting(true)
        .task_accounting(true)
        // At shutdown the kubelet stops its pods first; systemd must not stop them together with ordinary
        // units.
        .default_dependencies(false)
        .pids(vec![pid])
        .build();
    // A failed scope is removed with its cgroup, like one that succeeded.
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
