//! The state machines of pod sandboxes and containers. All state changes are made by `Pod::on` and
//! `Container::on`.
//!
//! No I/O: callers commit the new state first and then act on it, so that `recover` can continue after a
//! crash in between. Rules: CRI 2.0 (states and reasons), 2.5 to 2.7, 2.10 to 2.14; BOOT-1 and BOOT-2 for
//! reboots.
#![warn(clippy::wildcard_enum_match_arm)]

#[cfg(feature = "testing")]
pub mod transitions;

use std::time::Instant;

use coracle_sandbox::Exit;
use serde::{Deserialize, Serialize};

/// The state of a pod sandbox. What serde skips is of this daemon: a record does not contain it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pod {
    /// The sandbox is being created: lists and calls do not find it.
    Creating {
        /// Whether an earlier daemon began the creation: a client may have the ID from a list of that daemon.
        #[serde(skip, default = "yes")]
        is_earlier: bool,
        /// The parameters of ADD, if they were committed in advance and a note has precedence.
        #[serde(skip)]
        planned: Option<Box<coracle_network::Recorded>>,
    },
    /// The sandbox is ready: containers may be created in it.
    Ready {
        /// Whether a client has used the ID, so it has received the answer: a later identical request is then a
        /// duplicate and not a retry after a lost answer (RETRY-1).
        #[serde(skip)]
        is_told: bool,
    },
    /// The sandbox was stopped, its monitor has ended, its network was removed, or it is from an earlier boot. There is no way
    /// back to Ready.
    NotReady {
        /// Why the pod sandbox is not ready.
        why: Down,
        /// Whether all objects of the pod were removed.
        #[serde(skip)]
        is_down: bool,
    },
    /// The sandbox is being removed.
    Removing,
    /// Nothing of the sandbox is left; no record has this state.
    #[serde(skip)]
    Gone,
}

/// A record that is read is one of an earlier daemon.
fn yes() -> bool {
    true
}

/// The reason why a sandbox is no longer ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Down {
    /// StopPodSandbox was called.
    Stopped,
    /// The pod's monitor has ended.
    Died,
    /// The node was rebooted.
    Rebooted,
    /// The creation failed, and undoing it is not complete.
    Failed,
    /// Another program removed the pod's links from the node. The last one, because records contain the number of a variant.
    Unlinked,
}

/// An event of a pod sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodEvent {
    /// All set-up steps are complete.
    Up,
    /// A set-up step failed, and undoing the earlier steps failed, too.
    UpFailed,
    /// StopPodSandbox is called.
    Stop,
    /// The monitor ended without a request.
    MonitorGone,
    /// The pod's links are gone from the node.
    NetworkGone,
    /// A daemon of another boot found the pod.
    Rebooted,
    /// RemovePodSandbox is called.
    Remove,
    /// Nothing of the pod is left.
    Forgotten,
}

impl PodEvent {
    /// Name of the event in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Up => "finish creating the pod sandbox",
            Self::UpFailed => "give up creating the pod sandbox",
            Self::Stop => "stop the pod sandbox",
            Self::MonitorGone => "note the end of the monitor",
            Self::NetworkGone => "note the end of the network",
            Self::Rebooted => "note a reboot",
            Self::Remove => "remove the pod sandbox",
            Self::Forgotten => "forget the pod sandbox",
        }
    }
}

/// An event that the state does not permit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Name of the state.
    pub state: &'static str,
    /// Name of the event.
    pub event: &'static str,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} while it is {}", self.event, self.state)
    }
}

impl Pod {
    /// The state of a pod sandbox that this daemon creates.
    pub(crate) const NEW: Self = Self::Creating { is_earlier: false, planned: None };

    /// Returns the state after an event; has no side effects: the caller commits the result, then acts on it.
    pub(crate) fn on(&self, event: PodEvent) -> Result<Self, Refused> {
        use PodEvent as E;
        let down = |why| Ok(Self::NotReady { why, is_down: false });
        match (self, event) {
            (Self::Creating { .. }, E::Up) => Ok(Self::Ready { is_told: false }),
            (Self::Creating { .. }, E::UpFailed | E::Stop) => down(Down::Failed),
            // The step that meets it fails, and undoes; a lost network is noticed again when the pod is ready.
            (Self::Creating { .. }, E::MonitorGone | E::NetworkGone) => Ok(self.clone()),
            (Self::Creating { .. } | Self::Ready { .. }, E::Rebooted) => down(Down::Rebooted),
            (Self::Ready { .. }, E::Stop) => down(Down::Stopped),
            (Self::Ready { .. }, E::MonitorGone) => down(Down::Died),
            (Self::Ready { .. }, E::NetworkGone) => down(Down::Unlinked),
            (Self::Creating { .. } | Self::Ready { .. } | Self::NotReady { .. }, E::Remove) => {
                Ok(Self::Removing)
            }
            (Self::Creating { .. } | Self::Removing, E::Forgotten) => Ok(Self::Gone),
            (Self::NotReady { .. }, E::Stop | E::MonitorGone | E::NetworkGone | E::Rebooted)
            | (Self::Removing, E::Stop | E::MonitorGone | E::NetworkGone | E::Rebooted | E::Remove)
            | (
                Self::Gone,
                E::Stop | E::MonitorGone | E::NetworkGone | E::Rebooted | E::Remove | E::Forgotten,
            ) => Ok(self.clone()),
            (Self::Ready { .. } | Self::NotReady { .. }, E::Up | E::UpFailed | E::Forgotten)
            | (Self::Removing | Self::Gone, E::Up | E::UpFailed) => {
                Err(Refused { state: self.name(), event: event.name() })
            }
        }
    }

    /// Name of the state in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Creating { .. } => "being created",
            Self::Ready { .. } => "ready",
            Self::NotReady { .. } => "not ready",
            Self::Removing => "being removed",
            Self::Gone => "removed",
        }
    }

    /// Whether the CRI's state is SANDBOX_READY.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }

    /// Whether the sandbox is not ready although no request or reboot ended it: its monitor may have ended at any moment.
    pub(crate) fn ended_by_itself(&self) -> bool {
        matches!(self, Self::NotReady { why: Down::Died | Down::Unlinked, .. })
    }

    /// Whether the pod sandbox is being created by an earlier daemon, or being undone after its end.
    pub(crate) fn is_earlier(&self) -> bool {
        matches!(self, Self::Creating { is_earlier: true, .. })
    }

    /// Whether all objects of the pod but its files were removed.
    pub(crate) fn is_down(&self) -> bool {
        matches!(self, Self::NotReady { is_down: true, .. } | Self::Removing | Self::Gone)
    }

    /// Whether the pod sandbox is being created.
    pub fn is_creating(&self) -> bool {
        matches!(self, Self::Creating { .. })
    }

    /// Whether the pod sandbox is listed and found by calls (CRI 2.0).
    pub(crate) fn is_visible(&self) -> bool {
        !matches!(self, Self::Creating { .. } | Self::Gone)
    }
}

/// The state of a container. What serde skips is of this daemon: a record does not contain it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Container {
    /// The container was created; its start may be in progress.
    Created {
        /// Whether a client has used the ID: see [`Pod::Ready`].
        #[serde(skip)]
        is_told: bool,
        /// The start time if the state Running was committed in advance and a note has precedence.
        #[serde(skip)]
        ahead_ns: Option<i64>,
        /// The stop in progress, of a start in progress.
        #[serde(skip)]
        stop: Option<Stop>,
    },
    /// The main process has executed its program.
    Running {
        /// Start time, wall clock in nanoseconds since 1970.
        started_at_ns: i64,
        /// The stop in progress.
        #[serde(skip)]
        stop: Option<Stop>,
    },
    /// The container has exited.
    Exited {
        /// Times and cause.
        ended: Ended,
        /// The steps that have followed the end.
        #[serde(skip, default = "CleanUp::of_earlier")]
        clean_up: CleanUp,
    },
    /// The container is being created: it is not listed, and calls do not find it. This variant is the last
    /// one in records because they contain the number of a variant.
    Creating,
    /// Nothing of the container is left; no record has this state.
    #[serde(skip)]
    Gone,
}

/// The steps that have followed the end of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CleanUp {
    /// Whether plugins were notified of the end.
    pub(crate) is_announced: bool,
    /// Whether the cgroup was removed.
    pub(crate) is_cleared: bool,
    /// Whether the monitor has removed the container from its table, which has [`coracle_sandbox::CONTAINERS_MAX`] entries.
    pub(crate) is_forgotten: bool,
}

impl CleanUp {
    /// Only the daemon that notes the end notifies plugins of it.
    fn of_earlier() -> Self {
        Self { is_announced: true, ..Self::default() }
    }
}

/// A stop in progress: the stop signal was sent or is due, SIGKILL follows at `kill_at` (CRI 2.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub(crate) kill_at: Instant,
    /// Whether the stop signal may not have been sent yet.
    pub(crate) is_signal_due: bool,
}

/// The end of a container: times and cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Start time, wall clock in nanoseconds since 1970; 0 if the container never ran.
    pub started_at_ns: i64,
    /// Time of the end, wall clock in nanoseconds since 1970.
    pub finished_at_ns: i64,
    /// Cause of the end.
    pub how: How,
}

/// The cause of a container's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// The main process exited.
    Exit {
        /// Exit code or signal.
        exit: Exit,
        /// Whether the kernel killed a process in the container's memory cgroup because of its limit.
        oom_killed: bool,
    },
    /// StartContainer failed.
    NotStarted {
        /// The error of StartContainer.
        message: String,
    },
    /// The end was not recorded, because of a reboot or the end of the monitor.
    Lost {
        /// Text about the circumstances that are known.
        message: String,
    },
}

/// An event of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContainerEvent {
    /// All files, mounts and cgroups of the container exist.
    Made,
    /// The main process has executed its program.
    Started {
        /// Start time, wall clock in nanoseconds since 1970.
        at_ns: i64,
    },
    /// The main process ended.
    Ended {
        /// Time of the end, wall clock in nanoseconds since 1970.
        at_ns: i64,
        /// Cause of the end.
        how: How,
    },
    /// Nothing of the container is left.
    Removed,
}

impl ContainerEvent {
    /// Name of the event in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Made => "finish creating the container",
            Self::Started { .. } => "start the container",
            Self::Ended { .. } => "note the end of the container",
            Self::Removed => "remove the container",
        }
    }
}

impl Container {
    /// Returns the state after an event; has no side effects: the caller commits the result, then acts on it.
    /// The event `Ended` is permitted before `Started`, if an exit arrives before the answer to
    /// StartContainer: both are recorded.
    pub(crate) fn on(&self, event: ContainerEvent) -> Result<Self, Refused> {
        use ContainerEvent as E;
        let refused = Refused { state: self.name(), event: event.name() };
        match (self, event) {
            (Self::Creating, E::Made) => Ok(Self::CREATED),
            (Self::Created { stop, .. }, E::Started { at_ns }) => {
                Ok(Self::Running { started_at_ns: at_ns, stop: *stop })
            }
            (Self::Created { .. } | Self::Running { .. }, E::Ended { at_ns, how }) => {
                let started_at_ns = match how {
                    How::Exit { .. } if self.is_created() => at_ns,
                    How::Exit { .. } | How::NotStarted { .. } | How::Lost { .. } => self.started_at_ns(),
                };
                let finished_at_ns = at_ns.max(started_at_ns); // clocks lie: created <= started <= finished
                let ended = Ended { started_at_ns, finished_at_ns, how };
                Ok(Self::Exited { ended, clean_up: CleanUp::default() })
            }
            (_, E::Removed) => Ok(Self::Gone),
            // The first end is the true one.
            (Self::Exited { .. } | Self::Gone, E::Ended { .. }) => Ok(self.clone()),
            (Self::Creating, E::Started { .. } | E::Ended { .. })
            | (Self::Created { .. } | Self::Running { .. } | Self::Exited { .. } | Self::Gone, E::Made)
            | (Self::Running { .. } | Self::Exited { .. } | Self::Gone, E::Started { .. }) => Err(refused),
        }
    }

    /// The state of a container that was created.
    pub(crate) const CREATED: Self = Self::Created { is_told: false, ahead_ns: None, stop: None };

    /// The start time in the state Running that was committed in advance.
    pub(crate) fn ahead_ns(&self) -> Option<i64> {
        if let Self::Created { ahead_ns, .. } = self { *ahead_ns } else { None }
    }

    /// The stop in progress.
    pub(crate) fn stop(&self) -> Option<Stop> {
        match self {
            Self::Created { stop, .. } | Self::Running { stop, .. } => *stop,
            Self::Creating | Self::Exited { .. } | Self::Gone => None,
        }
    }

    /// The steps that have followed the end; `None` if the container has not exited.
    pub(crate) fn clean_up(&self) -> Option<CleanUp> {
        if let Self::Exited { clean_up, .. } = self { Some(*clean_up) } else { None }
    }

    /// Start time, wall clock in nanoseconds since 1970; 0 if the container has not run.
    pub fn started_at_ns(&self) -> i64 {
        match self {
            Self::Running { started_at_ns, .. } | Self::Exited { ended: Ended { started_at_ns, .. }, .. } => {
                *started_at_ns
            }
            Self::Creating | Self::Created { .. } | Self::Gone => 0,
        }
    }

    /// The end of a container that has exited.
    pub fn ended(&self) -> Option<&Ended> {
        if let Self::Exited { ended, .. } = self { Some(ended) } else { None }
    }

    /// Name of the state in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Created { .. } => "in CONTAINER_CREATED state",
            Self::Running { .. } => "in CONTAINER_RUNNING state",
            Self::Exited { .. } => "in CONTAINER_EXITED state",
            Self::Gone => "removed",
        }
    }

    /// Whether lists show the container and calls find it (CRI 2.0).
    pub(crate) fn is_visible(&self) -> bool {
        !matches!(self, Self::Creating | Self::Gone)
    }

    /// Whether the container was created and has not run.
    pub(crate) fn is_created(&self) -> bool {
        matches!(self, Self::Created { .. })
    }

    /// Whether the container is running or has exited, also by a start that failed.
    pub(crate) fn has_run(&self) -> bool {
        matches!(self, Self::Running { .. } | Self::Exited { .. })
    }

    /// Whether the CRI's state is CONTAINER_EXITED, or the container was removed.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Exited { .. } | Self::Gone)
    }

    /// Whether the container has exited because StartContainer failed.
    pub(crate) fn is_not_started(&self) -> bool {
        matches!(self, Self::Exited { ended: Ended { how: How::NotStarted { .. }, .. }, .. })
    }

    /// Whether the CRI's state is CONTAINER_RUNNING.
    pub fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

impl Ended {
    /// Exit code in the container's CRI status (CRI 2.0).
    pub fn exit_code(&self) -> i32 {
        match &self.how {
            How::Exit { exit, .. } => exit.code(),
            How::NotStarted { .. } => 128,
            How::Lost { .. } => 255,
        }
    }

    /// Reason in the container's CRI status. OOMKilled means that the kernel killed any process of the container for a
    /// memory limit, however the main process ended: as in containerd, whose event of the kill sets the reason.
    pub fn reason(&self) -> &'static str {
        match &self.how {
            How::Exit { oom_killed: true, .. } => "OOMKilled",
            How::Exit { exit: Exit::Code(0), .. } => "Completed",
            How::Exit { .. } => "Error",
            How::NotStarted { .. } => "StartError",
            How::Lost { .. } => "Unknown",
        }
    }

    /// Message in the container's CRI status; empty if there is none.
    pub fn message(&self) -> &str {
        match &self.how {
            How::Exit { .. } => "",
            How::NotStarted { message } | How::Lost { message } => message,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::record::encode;

    const EVENTS: [PodEvent; 8] = [
        PodEvent::Up,
        PodEvent::UpFailed,
        PodEvent::Stop,
        PodEvent::MonitorGone,
        PodEvent::NetworkGone,
        PodEvent::Rebooted,
        PodEvent::Remove,
        PodEvent::Forgotten,
    ];

    /// Applies a few thousand random sequences of events: a pod that is no longer ready never becomes ready
    /// again, and a pod that is being removed stays in that state.
    #[test]
    fn random_events_never_return_a_pod_to_an_earlier_state() {
        let mut seed = 7_u64;
        for _ in 0..5000 {
            let mut pod = Pod::NEW;
            let mut was_down = false;
            for _ in 0..12 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let event = EVENTS[(seed >> 33) as usize % EVENTS.len()];
                let Ok(next) = pod.on(event) else { continue };
                assert!(
                    !(was_down && (next.is_ready() || next.is_creating())),
                    "{pod:?} on {event:?} -> {next:?}"
                );
                assert!(
                    pod != Pod::Removing || matches!(next, Pod::Removing | Pod::Gone),
                    "{pod:?} on {event:?} -> {next:?}"
                );
                assert!(pod != Pod::Gone || next == Pod::Gone, "{pod:?} on {event:?} -> {next:?}");
                was_down |= matches!(next, Pod::NotReady { .. } | Pod::Removing | Pod::Gone);
                pod = next;
            }
        }
    }

    #[test]
    fn the_first_reason_for_being_down_is_kept() {
        let died = Pod::Ready { is_told: true }.on(PodEvent::MonitorGone).unwrap();
        assert_eq!(died, Pod::NotReady { why: Down::Died, is_down: false });
        assert_eq!(died.on(PodEvent::Stop), Ok(died));
    }

    /// The transitions of `states` at `events`; none if the event changes nothing or is refused.
    fn happen<S: PartialEq, E>(
        states: &[S],
        events: &[E],
        on: impl Fn(&S, &E) -> Option<S>,
        name: fn(&S) -> &'static str,
        event_name: fn(&E) -> &'static str,
    ) -> BTreeSet<[&'static str; 3]> {
        let pairs = states.iter().flat_map(|state| events.iter().map(move |event| (state, event)));
        let changes = pairs.filter_map(|(state, event)| {
            on(state, event).filter(|next| next != state).map(|next| (state, event, next))
        });
        changes.map(|(state, event, next)| [name(state), event_name(event), name(&next)]).collect()
    }

    #[test]
    fn the_documented_transitions_are_those_of_the_functions() {
        let [ready, not_ready] =
            [Pod::Ready { is_told: true }, Pod::NotReady { why: Down::Died, is_down: true }];
        let pods = [Pod::NEW, ready, not_ready, Pod::Removing, Pod::Gone];
        let how = How::Lost { message: String::new() };
        let events = [
            ContainerEvent::Made,
            ContainerEvent::Started { at_ns: 1 },
            ContainerEvent::Ended { at_ns: 2, how: how.clone() },
            ContainerEvent::Removed,
        ];
        let ended = Ended { started_at_ns: 1, finished_at_ns: 2, how };
        let containers = [
            Container::Creating,
            Container::CREATED,
            Container::Running { started_at_ns: 1, stop: None },
            Container::Exited { ended, clean_up: CleanUp::of_earlier() },
            Container::Gone,
        ];
        let mut expected =
            happen(&pods, &EVENTS, |pod, event| pod.on(*event).ok(), Pod::name, |event| event.name());
        let on = |container: &Container, event: &ContainerEvent| container.on(event.clone()).ok();
        expected.extend(happen(&containers, &events, on, Container::name, ContainerEvent::name));
        assert_eq!(transitions::rows().collect::<BTreeSet<_>>(), expected);
    }

    #[test]
    fn records_contain_nothing_of_a_state_that_belongs_to_one_daemon() {
        let stop = Some(Stop { kill_at: coracle_base::time::now(), is_signal_due: true });
        let ended = Ended { started_at_ns: 1, finished_at_ns: 2, how: How::Lost { message: String::new() } };
        let clean_up = CleanUp { is_announced: true, is_cleared: true, is_forgotten: true };
        for (state, bytes) in [
            (Container::Created { is_told: true, ahead_ns: Some(7), stop }, &[0][..]),
            (Container::Running { started_at_ns: 3, stop }, &[1, 6]),
            (Container::Exited { ended, clean_up }, &[2, 2, 4, 2, 0]),
            (Container::Creating, &[3]),
        ] {
            assert_eq!(encode(&state).unwrap(), bytes, "{state:?}");
        }
        for (state, bytes) in [
            (Pod::NEW, &[0][..]),
            (Pod::Ready { is_told: true }, &[1]),
            (Pod::NotReady { why: Down::Rebooted, is_down: true }, &[2, 2]),
            (Pod::Removing, &[3]),
        ] {
            assert_eq!(encode(&state).unwrap(), bytes, "{state:?}");
        }
        assert!(encode(&Pod::Gone).is_err() && encode(&Container::Gone).is_err());
    }

    fn ended(exit: Exit, oom_killed: bool) -> Ended {
        Ended { started_at_ns: 1, finished_at_ns: 2, how: How::Exit { exit, oom_killed } }
    }

    #[test]
    fn reasons_and_codes_are_those_of_the_cri_table() {
        for (ended, code, reason) in [
            (ended(Exit::Code(0), false), 0, "Completed"),
            (ended(Exit::Code(0), true), 0, "OOMKilled"), // a child's OOM kill, survived
            (ended(Exit::Code(7), true), 7, "OOMKilled"),
            (ended(Exit::Code(3), false), 3, "Error"),
            (ended(Exit::Signal(9), false), 137, "Error"),
            (ended(Exit::Signal(9), true), 137, "OOMKilled"),
            (ended(Exit::Code(137), true), 137, "OOMKilled"), // a shell that passes its child's end on
            (ended(Exit::Signal(15), true), 143, "OOMKilled"),
        ] {
            assert_eq!((ended.exit_code(), ended.reason()), (code, reason), "{ended:?}");
        }
        let how = How::NotStarted { message: "no such file".into() };
        let exited = Container::CREATED.on(ContainerEvent::Ended { at_ns: 5, how }).unwrap();
        let ended = exited.ended().expect("a created container ends where its start fails");
        assert_eq!((ended.exit_code(), ended.reason(), ended.started_at_ns), (128, "StartError", 0));
    }

    #[test]
    fn a_container_that_is_being_created_neither_starts_nor_ends() {
        let how = How::Lost { message: String::new() };
        for event in [ContainerEvent::Started { at_ns: 1 }, ContainerEvent::Ended { at_ns: 1, how }] {
            assert_eq!(Container::Creating.on(event).unwrap_err().state, "being created");
        }
        let created = Container::Creating.on(ContainerEvent::Made).unwrap();
        assert!(created.is_visible() && !Container::Creating.is_visible());
        assert!(created.on(ContainerEvent::Made).is_err());
    }

    #[test]
    fn a_container_starts_once_and_its_first_end_counts() {
        let running = Container::CREATED.on(ContainerEvent::Started { at_ns: 10 }).unwrap();
        let refused = running.on(ContainerEvent::Started { at_ns: 11 }).unwrap_err();
        assert_eq!(refused.to_string(), "start the container while it is in CONTAINER_RUNNING state");
        let how = How::Exit { exit: Exit::Code(1), oom_killed: false };
        let exited = running.on(ContainerEvent::Ended { at_ns: 4, how }).unwrap();
        let ended = exited.ended().unwrap();
        assert_eq!((ended.started_at_ns, ended.finished_at_ns), (10, 10), "a clock that stepped back");
        let lost = ContainerEvent::Ended { at_ns: 99, how: How::Lost { message: String::new() } };
        assert_eq!(exited.on(lost), Ok(exited.clone()));
    }
}
