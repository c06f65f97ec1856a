//! Decisions about the pods and containers that a daemon finds at its start: pure functions of the answers of
//! three sources, the kernel, the pod's monitor and the record. `recover` asks the sources and carries out the
//! decisions.
//!
//! - A container whose process runs is listed or ended; one that is listed as exited has no process.
//! - Processes are killed through their cgroups, and by their PID if they were moved out of them (`pod::strays`).
//! - Nothing is removed or ended because its record cannot be read for the moment.
//! - Only a record that was read and fails verification is moved to quarantine; one that cannot be read for ever is reported
//!   as such a record (`unread`).
//!
//! The tables in docs/reliability.md, "What a daemon finds at its start", are those of these functions; a test
//! compares them.
#![warn(clippy::wildcard_enum_match_arm)]

use coracle_base::store::Damage;

/// Result of reading the record of a pod or container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded<T> {
    /// There is no record: it was removed or lost, or the daemon was killed before it wrote the record.
    Absent,
    /// The record cannot be read at the moment.
    Unreadable,
    /// The record was read and fails verification.
    Damaged,
    /// The state in the record.
    State(T),
}

impl<T> Recorded<T> {
    /// The state in the record.
    ///
    /// # Errors
    /// The record cannot be used: the decision about the pod or container, which depends on nothing else.
    fn state<D>(self) -> Result<T, Decision<D>> {
        match self {
            Self::Absent => Err(Decision::EndAndDiscard),
            Self::Unreadable => Err(Decision::LeaveAlone),
            Self::Damaged => Err(Decision::EndAndSetAside),
            Self::State(state) => Ok(state),
        }
    }
}

impl<T> From<&Damage> for Recorded<T> {
    fn from(damage: &Damage) -> Self {
        match damage {
            Damage::Absent => Self::Absent,
            Damage::Io(_) => Self::Unreadable,
            Damage::Damaged(_) => Self::Damaged,
        }
    }
}

/// The state in the record of a pod, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodState {
    /// The record is of an earlier boot, in any state.
    EarlierBoot,
    /// RunPodSandbox was interrupted.
    Creating,
    /// The pod is ready, or was stopped.
    Made,
}

/// The state in the record of a container, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerState {
    /// CreateContainer was interrupted.
    Creating,
    /// The container was created or running in an earlier boot.
    EarlierBoot,
    Created,
    Running,
    Exited,
}

/// The kernel's answer about the process of a pod's monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MonitorProcess {
    NotAsked,
    /// The kernel refused to answer because of a temporary error.
    Unclear,
    /// There is no process, or its files do not identify it: it cannot be reached any more.
    Ended,
    Runs,
}

/// The answer of a monitor to its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// The monitor has not answered, or was not asked.
    Silent,
    /// The monitor answered that its set-up has failed.
    Failed,
    Serves,
}

/// The kernel's answer about the cgroup of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cgroup {
    NotAsked,
    /// The cgroup does not exist, so no process of the container runs.
    Absent,
    /// The cgroup exists and may contain processes.
    Exists,
}

/// The answer of a pod's monitor about a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    NotAsked,
    /// The monitor has ended.
    Ended,
    /// The monitor has not answered, or the start of the container is in progress for too long.
    Silent,
    /// No main process of the container runs.
    NoProcess,
    /// The main process runs.
    Process,
}

/// A decision about a pod or container; `T`: about one that is in the table of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision<T> {
    /// The record is read again later, and nothing changes until then.
    LeaveAlone,
    /// Processes are killed through their cgroups, a pod's network is released, then the directory is removed.
    EndAndDiscard,
    /// Processes are killed through their cgroups, a pod's network is released, then the directory is moved to
    /// quarantine.
    EndAndSetAside,
    /// The record was read.
    Known(T),
}

impl<T> Decision<T> {
    /// The decision about a pod or container whose record was read; `None` for all others.
    pub(crate) fn known(self) -> Option<T> {
        match self {
            Self::Known(decision) => Some(decision),
            Self::LeaveAlone | Self::EndAndDiscard | Self::EndAndSetAside => None,
        }
    }
}

/// A decision about a pod whose record was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodDecision {
    /// The kernel and the monitor are asked, then it is decided again.
    AskMonitor,
    /// The pod is not ready, its network is released, and its containers are decided about.
    NoteReboot,
    /// All that the record names is undone.
    Undo,
    /// The monitor is asked about the containers.
    AskAboutContainers,
    /// The pod is listed as recorded, and the monitor is asked again later.
    Retry,
    /// The pod is not ready, and its containers are killed through their cgroups.
    NoteMonitorsEnd,
}

/// A decision about a container whose record was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerDecision {
    /// The kernel is asked, then it is decided again.
    AskKernel,
    /// The monitor is asked, then it is decided again.
    AskMonitor,
    /// All that the record names is undone.
    Undo,
    /// The container is listed as recorded.
    Keep,
    /// The container is running.
    Run,
    /// The container is listed as recorded, and the monitor is asked again later.
    Retry,
    /// The pod's monitor has ended: the container is killed through its cgroup, together with the others of its pod.
    EndWithPod,
    /// The exit is recorded, then it is decided again.
    RecordExit,
    /// The end by a reboot is recorded, then it is decided again.
    RecordReboot,
    /// Remaining processes are killed through the cgroup.
    EndRemaining,
}

/// Maximum number of decisions about one container in one pass: each source is asked once, an exit is recorded, and
/// the remaining processes are ended.
pub(crate) const DECISIONS_MAX: usize = 4;

/// The decision about a pod.
pub(crate) fn pod(
    process: MonitorProcess,
    greeting: Greeting,
    record: Recorded<PodState>,
) -> Decision<PodDecision> {
    let state = match record.state() {
        Ok(state) => state,
        Err(decision) => return decision,
    };
    Decision::Known(match (state, process, greeting) {
        (PodState::EarlierBoot, _, _) => PodDecision::NoteReboot,
        (PodState::Creating, _, _) => PodDecision::Undo,
        (PodState::Made, MonitorProcess::NotAsked, _) => PodDecision::AskMonitor,
        (PodState::Made, MonitorProcess::Unclear, _) => PodDecision::Retry,
        (PodState::Made, MonitorProcess::Ended, _) => PodDecision::NoteMonitorsEnd,
        (PodState::Made, MonitorProcess::Runs, Greeting::Silent) => PodDecision::Retry,
        (PodState::Made, MonitorProcess::Runs, Greeting::Failed) => PodDecision::NoteMonitorsEnd,
        (PodState::Made, MonitorProcess::Runs, Greeting::Serves) => PodDecision::AskAboutContainers,
    })
}

/// The decision about a container of a pod whose record was read.
pub(crate) fn container(
    cgroup: Cgroup,
    answer: Answer,
    record: Recorded<ContainerState>,
) -> Decision<ContainerDecision> {
    use ContainerDecision as D;
    use ContainerState as S;
    let state = match record.state() {
        Ok(state) => state,
        Err(decision) => return decision,
    };
    Decision::Known(match (state, cgroup, answer) {
        (S::Creating, _, _) => D::Undo,
        (S::EarlierBoot, _, _) => D::RecordReboot,
        (S::Created | S::Running, _, Answer::NotAsked) => D::AskMonitor,
        (S::Created | S::Running, _, Answer::Ended) => D::EndWithPod,
        (S::Created | S::Running, _, Answer::Silent) => D::Retry,
        (S::Created, _, Answer::NoProcess) => D::Keep,
        (S::Running, _, Answer::NoProcess) => D::RecordExit,
        (S::Created | S::Running, _, Answer::Process) => D::Run,
        (S::Exited, Cgroup::NotAsked, _) => D::AskKernel,
        (S::Exited, Cgroup::Absent, _) => D::Keep,
        (S::Exited, Cgroup::Exists, _) => D::EndRemaining,
    })
}

#[cfg(test)]
mod tests;
