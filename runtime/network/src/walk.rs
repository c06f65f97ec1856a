//! Attaches and detaches one pod: runs the plugins of a list in order, or in reverse order. Consecutive
//! built-in plugins run directly, other consecutive plugins in one worker; each part receives the result of
//! the preceding one.
//!
//! ```text
//! add    flannel ── worker ──> result ──> portmap, bandwidth ── builtin ──> result
//! del    portmap, bandwidth ── builtin, then flannel ── worker
//! ```
//! If a part fails, [`Network::add`] does not undo the preceding parts: the caller must call [`Network::del`]
//! after every error. Only a worker undoes its own part.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_job::{Attachment, CniCommand, CniJob, CniOutcome, Job, Outcome};

use super::builtin::{self, Part};
use super::{Network, Recorded};

/// Time limit of ADD; undoing a failed ADD may take the same time again. The sum is below the kubelet's limit
/// for RunPodSandbox (4 minutes).
const ADD_LIMIT: Duration = Duration::from_secs(100);
/// Time limit of DEL, below the kubelet's limit for StopPodSandbox (2 minutes).
const DEL_LIMIT: Duration = Duration::from_secs(100);
/// Time limit for an ADD to wait until pods of an earlier boot are detached. The kubelet retries after it.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);
/// Minimum time that remains for the last program of a list.
const PROGRAM_TIME_MIN: Duration = Duration::from_secs(1);

impl Network {
    /// Attaches a pod. After an error the caller must call [`Network::del`].
    ///
    /// # Errors
    /// `Unavailable` while pods of an earlier boot are still being detached; otherwise the error of the
    /// plugin that failed, with its name.
    pub async fn add(&self, recorded: &Recorded) -> Result<CniOutcome, Error> {
        // The channel is closed, and `recv` fails, when recovery is complete.
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

    /// Detaches a pod; missing objects are success. `result` is the result of the pod's ADD; `None` if ADD
    /// did not complete. If the recorded configuration has options that this build does not support, the
    /// pod's rules, leases and link are found by its ID.
    ///
    /// # Errors
    /// The error of the first plugin that failed; the plugins before it in the list were not executed.
    pub async fn del(&self, recorded: &Recorded, result: Option<&str>) -> Result<(), Error> {
        let is_taken_over =
            self.options.runs_built_in && !recorded.is_built_in && builtin::can_take_over(recorded);
        let (end, attachment) = (Instant::now() + DEL_LIMIT, &recorded.attachment);
        let parts = match builtin::parts(recorded, is_taken_over) {
            Ok(parts) => parts,
            // Of another release: a pod must be removable all the same.
            Err(error) => {
                log::warn!("cannot use the record of a pod's network, detaching by the pod's ID"; pod = attachment.container_id, reason = error);
                builtin::forget_attachment(&self.netfilter, recorded, &self.lease_parents()).await?;
                builtin::programs_of(recorded).map(Part::Programs).into_iter().collect()
            }
        };
        for part in parts.into_iter().rev() {
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

    /// Removes what the built-in plugins, and `host-local`, allocated for a pod whose record is lost, by its
    /// ID. The function searches the default directory of leases, that of the default network and that of the
    /// active list. Other objects of plugin programs cannot be found.
    ///
    /// # Errors
    /// An object may remain; the caller must retry.
    pub async fn forget(&self, id: &str) -> Result<(), Error> {
        builtin::forget(&self.netfilter, id, &self.lease_parents(), self.conflist().as_deref()).await
    }

    /// IDs of the pods that have leases of the default network, whose directory no other program uses, or rules although they have
    /// no link.
    ///
    /// # Errors
    /// The networks cannot be listed. A lease that cannot be read is omitted.
    pub fn holders(&self) -> Result<BTreeSet<String>, Error> {
        let default = self.options.default.as_ref();
        let mut found = default.map_or(Ok(BTreeSet::new()), |default| builtin::holders(&default.data_dir))?;
        // Otherwise the question would load the kernel module on a node that has no rules of coracle.
        if default.is_some() || self.conflist().as_deref().and_then(builtin::lease_directory).is_some() {
            match builtin::owners_without_link(&self.netfilter) {
                Ok(owners) => found.extend(owners),
                Err(error) => log::warn!("cannot look for rules without a pod"; error = error),
            }
        }
        Ok(found)
    }

    /// Directories that contain one directory of leases for each network.
    fn lease_parents(&self) -> Vec<PathBuf> {
        let mut parents = vec![PathBuf::from(builtin::DATA_DIR)];
        parents.extend(self.options.default.as_ref().map(|default| default.data_dir.clone()));
        parents
    }

    /// Executes the plugins of `conflist` in a worker.
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
            other => {
                Err(Error::new(Kind::Internal, format!("unexpected answer of the CNI worker: {other:?}")))
            }
        }
    }
}

fn until(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(PROGRAM_TIME_MIN)
}
