//! Processes that are made in two steps (`coracle_sys::sibling`): what the monitor clones is not what runs in the end.
//! The first stays in the node's PID namespace, where containers do not see it, does what needs rights, clones the second
//! into the container's PID namespace and ends. Both are children of the monitor, and their ends come in any order.

use core::cell::Cell;

use coracle_sys::sibling::SiblingPid;
use coracle_sys::{Fd, process};
use coracle_wire::Exit;

use crate::serve::Monitor;
use crate::table::{ContainerState, ExecState, Starting, Table};

/// What the end of a process means for a container or an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// It is none of its processes.
    Stranger,
    /// It goes on.
    Step,
    /// It is over, in this way.
    Over(Exit),
}

/// What the end of `ended` means for one that has the process `pid`, and what it still `starting` waits for.
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
        // It failed before the second was born.
        None | Some((_, None)) if is_own => Meaning::Over(exit),
        Some((starting, Some(born))) if is_own => match starting.ended.take() {
            // The second ended before the first: it is reaped, and nothing is left to refer to.
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
        // The report is complete only with the end of the first, which holds it open.
        Some((starting, Some(born))) if born == ended => {
            starting.ended = Some(exit);
            Meaning::Step
        }
        None | Some(_) => Meaning::Stranger,
    }
}

/// From the first process to the second, if there is one. Not once the second has been reaped: its pid may be another's.
/// The memory that held the pid becomes `spare`, for the next start.
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
    // Without descriptors to spare the old one stays; it refers to a process that ends.
    if let Ok(opened) = process::pidfd_open(born) {
        *pidfd = opened;
    }
}

impl Monitor<'_> {
    /// Before whatever lives is killed.
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
