//! Attaching and detaching one pod: a list from its first plugin to its last, and back. Runs of plugins that are built in are
//! done in line, each run of others in one worker; what each came to is told the next.
//!
//! ```text
//!   add    flannel ── worker ──> result ──> portmap, bandwidth ── builtin ──> result
//!   del    portmap, bandwidth ── builtin, then flannel ── worker
//! ```
//! A list that fails half-way is not taken back here but by [`Network::del`], which is due after every error: only the worker
//! takes back its own run.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use coracle_job::{Attachment, CniCommand, CniJob, CniOutcome, Job, Outcome};

use super::builtin::{self, Part};
use super::{Network, Recorded};

/// Longest ADD, and as much again for taking a failed one back: together under the 4 minutes that a kubelet gives
/// RunPodSandbox.
const ADD_LIMIT: Duration = Duration::from_secs(100);
/// Longest DEL: under the 2 minutes that a kubelet gives StopPodSandbox.
const DEL_LIMIT: Duration = Duration::from_secs(100);
/// How long an ADD waits for pods of an earlier boot to be detached. The kubelet tries again.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);
/// What the last program of a list gets at least.
const LEAST: Duration = Duration::from_secs(1);

impl Network {
    /// Attaches a pod. After an error [`Network::del`] is due.
    ///
    /// # Errors
    /// `Unavailable` while pods of an earlier boot are still being detached; else what the plugin that failed said, with its
    /// name.
    pub async fn add(&self, recorded: &Recorded) -> Result<CniOutcome, Error> {
        // An error of `recv` is the opened gate.
        if reactor::deadline(RECOVERY_LIMIT, self.recovered.1.recv()).await.is_err() {
            let why = "pods of an earlier boot are still being detached from the network";
            return Err(Error::new(Kind::Unavailable, why));
        }
        let (end, attachment) = (Instant::now() + ADD_LIMIT, &recorded.attachment);
        let mut outcome = None;
        for part in builtin::parts(recorded, false)? {
            outcome = Some(match part {
                Part::BuiltIn(plan) => builtin::add(&self.netfilter, &plan, attachment, outcome).await?,
                Part::Programs(list) => {
                    let add = CniCommand::Add { previous_result: outcome.map(|outcome| outcome.result) };
                    self.work(add, list, attachment, until(end)).await?
                }
            });
        }
        outcome.ok_or_else(|| Error::new(Kind::Internal, "a network without plugins"))
    }

    /// Detaches a pod; what is already gone is success. `result` is that of the pod's ADD, if it came to one.
    ///
    /// # Errors
    /// What the first plugin that failed said; those before it in the list were not asked.
    pub async fn del(&self, recorded: &Recorded, result: Option<&str>) -> Result<(), Error> {
        let is_taken_over =
            self.options.runs_built_in && !recorded.is_built_in && builtin::can_take_over(recorded);
        let (end, attachment) = (Instant::now() + DEL_LIMIT, &recorded.attachment);
        for part in builtin::parts(recorded, is_taken_over)?.into_iter().rev() {
            match part {
                Part::BuiltIn(plan) => {
                    if let Some(name) = builtin::del(&self.netfilter, &plan, attachment, result).await? {
                        (self.run)(Job::RemoveLink { name }).await?;
                    }
                }
                Part::Programs(list) => {
                    let del = CniCommand::Del { previous_result: result.map(str::to_owned) };
                    self.work(del, list, attachment, until(end)).await?;
                }
            }
        }
        Ok(())
    }

    /// Takes back what the built-in plugins, and `host-local`, hold for a pod of which only the id is known: its record is lost.
    /// Searched are the usual directory of leases, that of the default network and that of the list in force. What programs
    /// hold beside leases is theirs alone to find.
    ///
    /// # Errors
    /// Something may be left: to be tried again.
    pub async fn forget(&self, id: &str) -> Result<(), Error> {
        let mut parents = vec![PathBuf::from(builtin::DATA_DIR)];
        parents.extend(self.options.default.as_ref().map(|default| default.data_dir.clone()));
        builtin::forget(&self.netfilter, id, &parents, self.conflist().as_deref()).await
    }

    /// Has a worker run the plugins of `conflist`.
    pub(super) async fn work(
        &self,
        command: CniCommand,
        conflist: String,
        attachment: &Attachment,
        limit: Duration,
    ) -> Result<CniOutcome, Error> {
        let job = CniJob {
            command,
            conflist,
            bin_dirs: self.options.bin_dirs.clone(),
            attachment: attachment.clone(),
            timeout_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        match (self.run)(Job::Cni(job)).await? {
            Outcome::Cni(outcome) => Ok(outcome),
            other => Err(Error::new(Kind::Internal, format!("a CNI job was answered with {other:?}"))),
        }
    }
}

fn until(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(LEAST)
}
