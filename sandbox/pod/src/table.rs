//! Tables of the monitor's containers, execs and attached clients, with fixed limits. Each entry has a slot, a small
//! number that identifies it in epoll tokens and line buffers; the slot becomes free when the entry is removed.

use core::cell::Cell;

use coracle_sys::sibling::SiblingPid;
use coracle_sys::{Fd, process};
use coracle_wire::{CONTAINERS_MAX, ContainerId, EXECS_MAX, ExecId, Exit, ExitRecord};
use heapless::Vec;

use crate::child::Failure;
use crate::log::Writer;
use crate::namespaces::ContainerNamespaces;
use crate::oom::{Counter, PodCounter};

/// Maximum number of concurrently attached clients of a pod; EAGAIN beyond it.
pub(crate) const ATTACHED_MAX: usize = 32;
/// Number of streams of a container: stdout (or the terminal) and stderr.
pub(crate) const STREAMS: usize = 2;

/// The number of an entry in its table.
pub(crate) type Slot = u8;

/// All tables. The value is a static of the entry point, because zeroed memory uses no page before the first entry. The
/// order puts the first containers and all that is written beside them on the first page, which the kernel writes anyway
/// (see build.rs), and the execs on a later one.
#[repr(C)]
pub struct Table {
    /// Memory for the PID of the next second process; `None` if it must be allocated.
    pub(crate) spare: Cell<Option<SiblingPid>>,
    /// The OOM counter of the pod's cgroup; `None` on v1, without a memory controller, and before the first container.
    pub(crate) pod_oom: Option<PodCounter>,
    pub(crate) attached: AllAttached,
    pub(crate) containers: Vec<Container, CONTAINERS_MAX>,
    pub(crate) execs: Vec<Exec, EXECS_MAX>,
}

/// All attached clients of the pod.
pub(crate) type AllAttached = Vec<Attached, ATTACHED_MAX>;

/// Pipes that get a copy of a container's output.
pub(crate) struct Attached {
    /// Slot of the container.
    pub(crate) slot: Slot,
    pub(crate) pipes: [Option<Fd>; STREAMS],
}

/// A container, from its clone until the request `Forget`.
pub(crate) struct Container {
    pub(crate) id: ContainerId,
    pub(crate) slot: Slot,
    pub(crate) pid: i32,
    pub(crate) pidfd: Fd,
    pub(crate) state: ContainerState,
    /// Whether the container is in a PID namespace other than the monitor's and the pod's.
    pub(crate) has_own_pids: bool,
    /// The namespaces that the container's execs join.
    pub(crate) home: ContainerNamespaces,
    /// Read ends of the container's streams; `None` after EOF.
    pub(crate) outputs: [Option<Output>; STREAMS],
    pub(crate) log: Option<Fd>,
    pub(crate) writer: Writer,
    /// Write end of the container's standard input, or the master side of its terminal; `None` without one.
    pub(crate) stdin: Option<Fd>,
    /// The OOM counter; `None` without a memory controller and after the end.
    pub(crate) oom: Option<Counter>,
}

/// State of a container.
pub(crate) enum ContainerState {
    /// The process executes the launch record.
    Starting(Starting),
    /// The process has called exec.
    Running,
    /// The process has ended.
    Exited {
        record: ExitRecord,
        /// Whether the connected daemon has received the exit event.
        is_told: bool,
    },
}

/// A process between clone and exec.
pub(crate) struct Starting {
    /// Number of the request to answer; 0 if the daemon that sent it has disconnected.
    pub(crate) number: u32,
    /// The report pipe: EOF means exec, six bytes are a [`Failure`].
    pub(crate) report: Fd,
    /// The socket on which the master side of a terminal arrives.
    pub(crate) terminal: Fd,
    /// The reported failure, if any; the reply is sent when the process has been reaped.
    pub(crate) failure: Option<Failure>,
    /// Whether the process waits at an `Op::Wait`.
    pub(crate) is_waiting: bool,
    /// Memory with the PID of the second process, for a start in two steps, until the second replaces the first;
    /// otherwise `None`.
    pub(crate) second: Option<SiblingPid>,
    /// Exit of the second process if it ended before the first process; otherwise `None`.
    pub(crate) ended: Option<Exit>,
}

/// One stream of a container.
pub(crate) struct Output {
    pub(crate) file: Fd,
    /// Number of bytes of an incomplete line in the stream's buffer.
    pub(crate) held: usize,
    /// Maximum of `held` since the buffer's pages were last returned to the kernel.
    pub(crate) held_max: usize,
}

/// An exec, from its clone until the daemon has received its exit event.
pub(crate) struct Exec {
    pub(crate) id: ExecId,
    pub(crate) slot: Slot,
    pub(crate) pid: i32,
    pub(crate) pidfd: Fd,
    pub(crate) state: ExecState,
}

/// State of an exec.
pub(crate) enum ExecState {
    /// The process executes the launch record.
    Starting(Starting),
    /// The process has called exec.
    Running,
    /// The process has ended, and the event has not been sent yet.
    Ended(Exit),
}

impl Container {
    /// Whether the container's main process is running.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, ContainerState::Exited { .. })
    }
}

impl Exec {
    /// Whether the exec's process is running.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, ExecState::Ended(_))
    }
}

impl Table {
    /// Creates empty tables.
    #[expect(clippy::new_without_default, reason = "made once, in a static, which Default cannot do")]
    pub const fn new() -> Self {
        Self {
            spare: Cell::new(None),
            pod_oom: None,
            attached: Vec::new(),
            containers: Vec::new(),
            execs: Vec::new(),
        }
    }

    /// The container with this ID.
    pub(crate) fn container(&mut self, id: &ContainerId) -> Option<&mut Container> {
        self.containers.iter_mut().find(|container| container.id == *id)
    }

    /// The container with this ID, if its process has called exec and is running.
    pub(crate) fn running(&self, id: &ContainerId) -> Option<&Container> {
        let running = |container: &&Container| matches!(container.state, ContainerState::Running);
        self.containers.iter().find(|container| container.id == *id).filter(running)
    }

    /// A free slot for a container.
    pub(crate) fn free_container(&self) -> Option<Slot> {
        lowest_free(CONTAINERS_MAX, self.containers.iter().map(|container| container.slot))
    }

    /// A free slot for an exec.
    pub(crate) fn free_exec(&self) -> Option<Slot> {
        lowest_free(EXECS_MAX, self.execs.iter().map(|exec| exec.slot))
    }

    /// Whether any process is running.
    pub(crate) fn has_processes(&self) -> bool {
        self.containers.iter().any(Container::is_alive) || self.execs.iter().any(Exec::is_alive)
    }

    /// Removes the execs whose process has ended, if there are any: a pod without execs does not write their page.
    pub(crate) fn forget_ended_execs(&mut self) {
        if !self.execs.iter().all(Exec::is_alive) {
            self.execs.retain(|exec| exec.is_alive());
        }
    }

    /// Clears the request numbers of starting processes, because the daemon that sent the requests has disconnected,
    /// and kills processes that wait at `Op::Wait`, because no daemon would resume them.
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

// A set of slots is stored in the bits of a u128.
const _: () = assert!(EXECS_MAX <= 128 && CONTAINERS_MAX <= 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_used() {
        assert_eq!(lowest_free(4, [].into_iter()), Some(0));
        assert_eq!(lowest_free(4, [0, 2, 3].into_iter()), Some(1));
        assert_eq!(lowest_free(4, 0..4), None);
        assert_eq!(lowest_free(EXECS_MAX, 0..127), Some(127));
    }
}
