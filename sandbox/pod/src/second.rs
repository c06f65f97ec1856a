//! Processes that are created in two steps (`coracle_sys::sibling`). The first process stays in the node's PID
//! namespace, where containers do not see it, performs the privileged operations, clones the second process into the
//! container's PID namespace and exits. Both are children of the monitor and can end in any order.

use core::cell::Cell;

use coracle_sys::sibling::SiblingPid;
use coracle_sys::{Fd, process};
use coracle_wire::Exit;

use crate::serve::Monitor;
use crate::table::{ContainerState, ExecState, Starting, Table};

/// The meaning of a process's end for a container or an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The process does not belong to the container or exec.
    Stranger,
    /// The container or exec continues.
    Step,
    /// The container or exec has ended.
    Over(Exit),
}

/// Classifies the end of the process `ended` for a container or exec with the process `pid`, which may still be
/// `starting`.
pub(crate) fn meaning(
    (pid, pidfd): (&mut i32, &mut Fd),
    starting: Option<&mut Starting>,
    spare: &Cell<Option<SiblingPid>>,
    (ended, exit): (i32, Exit),
) -> Meaning {
    let is_own = *pid == ended;
    let two_steps = starting.and_then(|starting| {
        let born = starting.second.as_ref()?.get();
        Some((starting, born))
    });
    match two_steps {
        // It failed before the second process was created.
        None | Some((_, None)) if is_own => Meaning::Over(exit),
        Some((starting, Some(born))) if is_own => match starting.ended.take() {
            // The second ended before the first: it has been reaped, so no pidfd can be opened.
            Some(exit) => {
                starting.second = None;
                *pid = born;
                Meaning::Over(exit)
            }
            None => {
                adopt(starting, (pid, pidfd), spare);
                Meaning::Step
            }
        },
        // The report is complete only when the first has ended, because it holds the pipe open.
        Some((starting, Some(born))) if born == ended => {
            starting.ended = Some(exit);
            Meaning::Step
        }
        None | Some(_) => Meaning::Stranger,
    }
}

/// Replaces the first process by the second in `pid` and `pidfd`, if there is a second one. Has no effect after the
/// second was reaped, because its PID may have been reused. The memory that contained the PID becomes `spare`, for the
/// next start.
pub(crate) fn adopt(
    starting: &mut Starting,
    (pid, pidfd): (&mut i32, &mut Fd),
    spare: &Cell<Option<SiblingPid>>,
) {
    if starting.ended.is_some() {
        return;
    }
    let Some(born) = starting.second.as_ref().and_then(SiblingPid::get) else { return };
    spare.set(starting.second.take());
    *pid = born;
    // If no descriptor is available, the old one is kept; it refers to a process that is ending.
    if let Ok(opened) = process::pidfd_open(born) {
        *pidfd = opened;
    }
}

impl Monitor<'_> {
    /// Replaces the first processes of all starts by the second ones, before all processes are killed.
    pub(crate) fn adopt_second_processes(&mut self) {
        let Table { containers, execs, spare, .. } = &mut *self.table;
        for container in containers {
            if let ContainerState::Starting(starting) = &mut container.state {
                adopt(starting, (&mut container.pid, &mut container.pidfd), spare);
            }
        }
        for exec in execs {
            if let ExecState::Starting(starting) = &mut exec.state {
                adopt(starting, (&mut exec.pid, &mut exec.pidfd), spare);
            }
        }
    }
}
