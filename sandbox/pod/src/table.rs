//! What the monitor knows of: containers and execs, in tables with a maximum. An entry has a place, a small number
//! that its descriptors' events and its line buffers go by; a place is free again once its entry is gone.

use coracle_sys::sibling::SiblingPid;
use coracle_sys::{Fd, process};
use coracle_wire::{ContainerId, ExecId, Exit, ExitRecord};
use heapless::Vec;

use crate::child::Failure;
use crate::log::Writer;
use crate::namespaces::ContainerNamespaces;

/// Most containers of one pod, those that ended and are not forgotten included. Kubernetes has no limit of its own;
/// pods with more than 20 are not seen. EAGAIN beyond it.
pub(crate) const CONTAINERS_MAX: usize = 64;
/// Most execs of one pod at once: probes and hooks of every container and a few shells. EAGAIN beyond it.
pub(crate) const EXECS_MAX: usize = 128;
/// Most attached clients of one pod at once. EAGAIN beyond it.
pub(crate) const ATTACHED_MAX: usize = 32;
/// stdout (or the terminal) and stderr.
pub(crate) const STREAMS: usize = 2;

/// An entry's number in its table.
pub(crate) type Slot = u8;

/// All of them: a static of the entry, because zeroed memory takes no page until an entry is there.
pub struct Table {
    pub(crate) containers: Vec<Container, CONTAINERS_MAX>,
    pub(crate) execs: Vec<Exec, EXECS_MAX>,
    pub(crate) attached: AllAttached,
}

/// Every attached client of the pod.
pub(crate) type AllAttached = Vec<Attached, ATTACHED_MAX>;

/// Pipes that get a copy of a container's output.
pub(crate) struct Attached {
    /// The container's.
    pub(crate) slot: Slot,
    pub(crate) pipes: [Option<Fd>; STREAMS],
}

/// A container from its clone until it is forgotten.
pub(crate) struct Container {
    pub(crate) id: ContainerId,
    pub(crate) slot: Slot,
    pub(crate) pid: i32,
    pub(crate) pidfd: Fd,
    pub(crate) state: ContainerState,
    /// It is in a PID namespace that is not the monitor's nor the pod's.
    pub(crate) has_own_pids: bool,
    /// What its execs join.
    pub(crate) home: ContainerNamespaces,
    /// Read ends of its streams until their end.
    pub(crate) outputs: [Option<Output>; STREAMS],
    pub(crate) log: Option<Fd>,
    pub(crate) writer: Writer,
    /// Write end of its stdin, or its terminal's master side.
    pub(crate) stdin: Option<Fd>,
    /// The counter and what it said at the start.
    pub(crate) oom: Option<(Fd, u64)>,
}

/// Where a container is in its life.
pub(crate) enum ContainerState {
    /// Its process walks the launch record.
    Starting(Starting),
    /// Its process has exec'ed.
    Running,
    /// Its process has ended.
    Exited {
        record: ExitRecord,
        /// The daemon connected now has been told.
        is_told: bool,
    },
}

/// A process between clone and exec.
pub(crate) struct Starting {
    /// The request to answer; 0 when the daemon that asked is gone.
    pub(crate) number: u32,
    /// Its end: exec; bytes: a [`Failure`].
    pub(crate) report: Fd,
    /// Where a terminal's master side comes from.
    pub(crate) terminal: Fd,
    /// Reported; the answer waits until the process is reaped.
    pub(crate) failure: Option<Failure>,
    /// It stands at an `Op::Wait`.
    pub(crate) is_waiting: bool,
    /// The process makes another one and ends: the other's pid, as long as that has not taken its place.
    pub(crate) second: Option<SiblingPid>,
    /// How the other one ended, which was before the first did.
    pub(crate) ended: Option<Exit>,
}

/// One stream of a container.
pub(crate) struct Output {
    pub(crate) file: Fd,
    /// Bytes of an unfinished line in its buffer.
    pub(crate) held: usize,
    /// Most of them since the buffer's pages were last given back.
    pub(crate) held_max: usize,
}

/// An exec from its clone until the daemon knows its end.
pub(crate) struct Exec {
    pub(crate) id: ExecId,
    pub(crate) slot: Slot,
    pub(crate) pid: i32,
    pub(crate) pidfd: Fd,
    pub(crate) state: ExecState,
}

/// Where an exec is in its life.
pub(crate) enum ExecState {
    /// Its process walks the launch record.
    Starting(Starting),
    /// Its process has exec'ed.
    Running,
    /// It has ended and the daemon is still to be told.
    Ended(Exit),
}

impl Container {
    /// Whether its main process lives.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, ContainerState::Exited { .. })
    }
}

impl Exec {
    /// Whether its process lives.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, ExecState::Ended(_))
    }
}

impl Table {
    /// An empty one.
    #[expect(clippy::new_without_default, reason = "made once, in a static, which Default cannot do")]
    pub const fn new() -> Self {
        Self { containers: Vec::new(), execs: Vec::new(), attached: Vec::new() }
    }

    /// The container of this id.
    pub(crate) fn container(&mut self, id: &ContainerId) -> Option<&mut Container> {
        self.containers.iter_mut().find(|container| container.id == *id)
    }

    /// The container of this id, once it has exec'ed and while it lives.
    pub(crate) fn running(&self, id: &ContainerId) -> Option<&Container> {
        let running = |container: &&Container| matches!(container.state, ContainerState::Running);
        self.containers.iter().find(|container| container.id == *id).filter(running)
    }

    /// A place for one more container.
    pub(crate) fn free_container(&self) -> Option<Slot> {
        lowest_free(CONTAINERS_MAX, self.containers.iter().map(|container| container.slot))
    }

    /// A place for one more exec.
    pub(crate) fn free_exec(&self) -> Option<Slot> {
        lowest_free(EXECS_MAX, self.execs.iter().map(|exec| exec.slot))
    }

    /// Whether any process lives.
    pub(crate) fn has_processes(&self) -> bool {
        self.containers.iter().any(Container::is_alive) || self.execs.iter().any(Exec::is_alive)
    }

    /// What still starts: their answers go to nobody once the daemon that asked is gone. Nobody will say to go on to those
    /// that wait.
    pub(crate) fn forget_requesters(&mut self) {
        for container in &mut self.containers {
            if let ContainerState::Starting(starting) = &mut container.state {
                starting.number = 0;
                if starting.is_waiting {
                    // ESRCH: it has just ended by itself.
                    let _ = process::pidfd_signal(container.pidfd.borrow(), process::SIGKILL);
                }
            }
        }
        for exec in &mut self.execs {
            if let ExecState::Starting(starting) = &mut exec.state {
                starting.number = 0;
            }
        }
    }
}

fn lowest_free(count: usize, used: impl Iterator<Item = Slot>) -> Option<Slot> {
    let used = used.fold(0_u128, |used, slot| used | 1 << slot);
    (0..count).find(|slot| used >> slot & 1 == 0).map(|slot| slot as Slot)
}

// A set of places is the bits of a u128.
const _: () = assert!(EXECS_MAX <= 128 && CONTAINERS_MAX <= 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_place() {
        assert_eq!(lowest_free(4, [].into_iter()), Some(0));
        assert_eq!(lowest_free(4, [0, 2, 3].into_iter()), Some(1));
        assert_eq!(lowest_free(4, 0..4), None);
        assert_eq!(lowest_free(EXECS_MAX, 0..127), Some(127));
    }
}
