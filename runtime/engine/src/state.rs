//! The life of a pod sandbox and of a container, as values. Everything that changes one goes through `Pod::on` or
//! `Container::on`: this file is the whole truth.
//!
//! No I/O: callers commit the new state first and then act, so that a crash in between is repaired by `recover`.
//! Rules: CRI v1 sections 2.0 (states and reasons), 2.5 to 2.7, 2.10 to 2.14; BOOT-1 and BOOT-2 for reboots.
#![warn(clippy::wildcard_enum_match_arm)]

use coracle_sandbox::Exit;
use serde::{Deserialize, Serialize};

/// A pod sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pod {
    /// Being made: not listed, not found.
    Creating,
    /// Containers may be created in it.
    Ready,
    /// Stopped, dead, or from an earlier boot; for ever.
    NotReady {
        /// What is known of the reason.
        why: Down,
    },
    /// On its way out.
    Removing,
}

/// Why a sandbox is no longer ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Down {
    /// StopPodSandbox.
    Stopped,
    /// Its monitor is gone.
    Died,
    /// The node has been booted since.
    Rebooted,
    /// It never came up, and undoing it is not complete.
    Failed,
}

/// What can happen to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodEvent {
    /// Every step is made.
    Up,
    /// A step failed, and so did undoing it.
    UpFailed,
    /// StopPodSandbox.
    Stop,
    /// The monitor ended by itself.
    MonitorGone,
    /// Found at the start of a daemon in another boot.
    Rebooted,
    /// RemovePodSandbox.
    Remove,
}

/// An event that the state does not allow; both are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The state, in words.
    pub state: &'static str,
    /// What was to happen.
    pub event: &'static str,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} while it is {}", self.event, self.state)
    }
}

impl Pod {
    /// The one place where a pod changes state. Pure: the caller commits the result, then acts on it.
    pub(crate) fn on(&self, event: PodEvent) -> Result<Self, Refused> {
        use PodEvent as E;
        let down = |why| Ok(Self::NotReady { why });
        match (self, event) {
            (Self::Creating, E::Up) => Ok(Self::Ready),
            (Self::Creating, E::UpFailed) => down(Down::Failed),
            (Self::Creating, E::Stop) => down(Down::Failed),
            (Self::Creating, E::MonitorGone) => Ok(Self::Creating), // the step that meets it fails, and undoes
            (Self::Creating, E::Rebooted) => down(Down::Rebooted),
            (Self::Creating, E::Remove) => Ok(Self::Removing),

            (Self::Ready, E::Up) | (Self::Ready, E::UpFailed) => self.refuse(event),
            (Self::Ready, E::Stop) => down(Down::Stopped),
            (Self::Ready, E::MonitorGone) => down(Down::Died),
            (Self::Ready, E::Rebooted) => down(Down::Rebooted),
            (Self::Ready, E::Remove) => Ok(Self::Removing),

            (Self::NotReady { .. }, E::Up) | (Self::NotReady { .. }, E::UpFailed) => self.refuse(event),
            (Self::NotReady { why }, E::Stop) => down(*why),
            (Self::NotReady { why }, E::MonitorGone) => down(*why),
            (Self::NotReady { why }, E::Rebooted) => down(*why),
            (Self::NotReady { .. }, E::Remove) => Ok(Self::Removing),

            (Self::Removing, E::Up) | (Self::Removing, E::UpFailed) => self.refuse(event),
            (Self::Removing, E::Stop)
            | (Self::Removing, E::MonitorGone)
            | (Self::Removing, E::Rebooted)
            | (Self::Removing, E::Remove) => Ok(Self::Removing),
        }
    }

    fn refuse(&self, event: PodEvent) -> Result<Self, Refused> {
        let event = match event {
            PodEvent::Up => "finish creating the pod sandbox",
            PodEvent::UpFailed => "give up creating the pod sandbox",
            PodEvent::Stop => "stop the pod sandbox",
            PodEvent::MonitorGone => "note the end of the monitor",
            PodEvent::Rebooted => "note a reboot",
            PodEvent::Remove => "remove the pod sandbox",
        };
        Err(Refused { state: self.name(), event })
    }

    /// For messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Ready => "ready",
            Self::NotReady { .. } => "not ready",
            Self::Removing => "being removed",
        }
    }

    /// CRI: SANDBOX_READY.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready)
    }

    /// Whether lists show it and calls find it (CRI 2.0).
    pub(crate) fn is_visible(&self) -> bool {
        !matches!(self, Self::Creating)
    }
}

/// A container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Container {
    /// Created, never started.
    Created,
    /// Its main process has been exec'ed.
    Running {
        /// Wall clock, nanoseconds since 1970.
        started_at_ns: i64,
    },
    /// Over.
    Exited(Ended),
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// 0: it never ran.
    pub started_at_ns: i64,
    /// Wall clock, nanoseconds since 1970.
    pub finished_at_ns: i64,
    /// What is known of the end.
    pub how: How,
}

/// The ways to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// The main process exited.
    Exit {
        /// Code or signal.
        exit: Exit,
        /// The memory cgroup killed in it.
        oom_killed: bool,
    },
    /// StartContainer failed.
    NotStarted {
        /// The error StartContainer answered.
        message: String,
    },
    /// No record of the end is left: a reboot, a dead monitor.
    Lost {
        /// What is known.
        message: String,
    },
}

/// What can happen to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContainerEvent {
    /// Exec'ed.
    Started {
        /// When.
        at_ns: i64,
    },
    /// Over, however.
    Ended {
        /// When.
        at_ns: i64,
        /// How.
        how: How,
    },
}

impl Container {
    /// The one place where a container changes state. Pure, as [`Pod::on`].
    /// An end comes before its start where an exit overtakes the answer to StartContainer: both are kept.
    pub(crate) fn on(&self, event: ContainerEvent) -> Result<Self, Refused> {
        use ContainerEvent as E;
        match (self, event) {
            (Self::Created, E::Started { at_ns }) => Ok(Self::Running { started_at_ns: at_ns }),
            (Self::Created, E::Ended { at_ns, how }) => {
                let started_at_ns = match how {
                    How::Exit { .. } => at_ns,
                    How::NotStarted { .. } | How::Lost { .. } => 0,
                };
                Ok(Self::Exited(Ended { started_at_ns, finished_at_ns: at_ns, how }))
            }
            (Self::Running { .. }, E::Started { .. }) => {
                Err(Refused { state: "in CONTAINER_RUNNING state", event: "start the container" })
            }
            (Self::Running { started_at_ns }, E::Ended { at_ns, how }) => Ok(Self::Exited(Ended {
                started_at_ns: *started_at_ns,
                finished_at_ns: at_ns.max(*started_at_ns), // clocks lie: created <= started <= finished
                how,
            })),
            (Self::Exited(_), E::Started { .. }) => {
                Err(Refused { state: "in CONTAINER_EXITED state", event: "start the container" })
            }
            (Self::Exited(ended), E::Ended { .. }) => Ok(Self::Exited(ended.clone())), // the first end is the true one
        }
    }

    /// CRI: CONTAINER_EXITED.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Exited(_))
    }

    /// CRI: CONTAINER_RUNNING.
    pub fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

impl Ended {
    /// CRI's exit code (CRI 2.0).
    pub fn exit_code(&self) -> i32 {
        match &self.how {
            How::Exit { exit, .. } => exit.code(),
            How::NotStarted { .. } => 128,
            How::Lost { .. } => 255,
        }
    }

    /// CRI's reason. OOMKilled wants both facts: the counter rose and SIGKILL ended the main process (CRI 2.14).
    pub fn reason(&self) -> &'static str {
        match &self.how {
            How::Exit { exit, oom_killed: true } if exit.code() == 128 + 9 => "OOMKilled",
            How::Exit { exit: Exit::Code(0), .. } => "Completed",
            How::Exit { .. } => "Error",
            How::NotStarted { .. } => "StartError",
            How::Lost { .. } => "Unknown",
        }
    }

    /// CRI's message.
    pub fn message(&self) -> &str {
        match &self.how {
            How::Exit { .. } => "",
            How::NotStarted { message } | How::Lost { message } => message,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: [PodEvent; 6] = [
        PodEvent::Up,
        PodEvent::UpFailed,
        PodEvent::Stop,
        PodEvent::MonitorGone,
        PodEvent::Rebooted,
        PodEvent::Remove,
    ];

    /// A few thousand random lives: what was ready and no longer is never becomes ready again, and what is being
    /// removed stays so.
    #[test]
    fn random_lives_never_go_back() {
        let mut seed = 7_u64;
        for _ in 0..5000 {
            let mut pod = Pod::Creating;
            let mut was_down = false;
            for _ in 0..12 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let event = EVENTS[(seed >> 33) as usize % EVENTS.len()];
                let Ok(next) = pod.on(event) else { continue };
                assert!(
                    !(was_down && (next.is_ready() || next == Pod::Creating)),
                    "{pod:?} on {event:?} -> {next:?}"
                );
                assert!(pod != Pod::Removing || next == Pod::Removing, "{pod:?} on {event:?} -> {next:?}");
                was_down |= matches!(next, Pod::NotReady { .. } | Pod::Removing);
                pod = next;
            }
        }
    }

    #[test]
    fn the_first_reason_for_being_down_is_kept() {
        let died = Pod::Ready.on(PodEvent::MonitorGone).unwrap();
        assert_eq!(died.on(PodEvent::Stop), Ok(Pod::NotReady { why: Down::Died }));
    }

    fn ended(exit: Exit, oom_killed: bool) -> Ended {
        Ended { started_at_ns: 1, finished_at_ns: 2, how: How::Exit { exit, oom_killed } }
    }

    #[test]
    fn reasons_and_codes_are_those_of_the_cri_table() {
        for (ended, code, reason) in [
            (ended(Exit::Code(0), false), 0, "Completed"),
            (ended(Exit::Code(0), true), 0, "Completed"), // a child's OOM kill, survived
            (ended(Exit::Code(3), false), 3, "Error"),
            (ended(Exit::Signal(9), false), 137, "Error"),
            (ended(Exit::Signal(9), true), 137, "OOMKilled"),
            (ended(Exit::Code(137), true), 137, "OOMKilled"), // a shell that passes its child's end on
            (ended(Exit::Signal(15), true), 143, "Error"),
        ] {
            assert_eq!((ended.exit_code(), ended.reason()), (code, reason), "{ended:?}");
        }
        let how = How::NotStarted { message: "no such file".into() };
        let Ok(Container::Exited(ended)) = Container::Created.on(ContainerEvent::Ended { at_ns: 5, how })
        else {
            panic!("a created container ends where its start fails");
        };
        assert_eq!((ended.exit_code(), ended.reason(), ended.started_at_ns), (128, "StartError", 0));
    }

    #[test]
    fn a_container_starts_once_and_its_first_end_counts() {
        let running = Container::Created.on(ContainerEvent::Started { at_ns: 10 }).unwrap();
        let refused = running.on(ContainerEvent::Started { at_ns: 11 }).unwrap_err();
        assert_eq!(refused.to_string(), "start the container while it is in CONTAINER_RUNNING state");
        let how = How::Exit { exit: Exit::Code(1), oom_killed: false };
        let exited = running.on(ContainerEvent::Ended { at_ns: 4, how }).unwrap();
        let Container::Exited(ended) = &exited else { panic!("{exited:?}") };
        assert_eq!((ended.started_at_ns, ended.finished_at_ns), (10, 10), "a clock that stepped back");
        let lost = ContainerEvent::Ended { at_ns: 99, how: How::Lost { message: String::new() } };
        assert_eq!(exited.on(lost), Ok(exited.clone()));
    }
}
