//! Reaps processes. When a container ends, the monitor writes its last log lines, its exit record and an event, in this
//! order, so that the log and the exit record are complete when the event is received.

use coracle_sys::Errno;
use coracle_sys::process::{self, Clock, SIGCHLD, Status};
use coracle_wire::{Exit, ExitRecord};

use crate::child::Failure;
use crate::exit_records;
use crate::second::{self, Meaning};
use crate::serve::Monitor;
use crate::table::{ContainerState, ExecState, Starting};

/// Maximum number of processes reaped per iteration of the loop, so that the orphans of a fork bomb do not delay the
/// daemon's requests.
const REAPS_MAX: usize = 256;

impl Monitor<'_> {
    /// Reaps ended processes, including orphans.
    pub(crate) fn reap(&mut self) {
        for _ in 0..REAPS_MAX {
            // No child has ended, or there are no children.
            let Ok(Some((pid, status))) = process::reap(-1) else { return };
            self.ended(pid, status);
        }
        // Makes the signal descriptor readable again, for the rest.
        let _ = process::kill(process::pid(), SIGCHLD);
    }

    fn ended(&mut self, pid: i32, status: Status) {
        let exit = match status {
            Status::Code(code) => Exit::Code(code),
            Status::Signal(signal) => Exit::Signal(signal),
        };
        if self.init.as_ref().is_some_and(|init| init.pid == pid) {
            // The kernel kills all processes in its namespace, so the pod ends.
            self.init = None;
            return self.end();
        }
        for container in self.table.containers.iter_mut().filter(|container| container.is_alive()) {
            let starting = match &mut container.state {
                ContainerState::Starting(starting) => Some(starting),
                ContainerState::Running | ContainerState::Exited { .. } => None,
            };
            match second::meaning(
                (&mut container.pid, &mut container.pidfd),
                starting,
                &self.table.spare,
                (pid, exit),
            ) {
                Meaning::Stranger => {}
                Meaning::Step => return,
                Meaning::Over(exit) => {
                    let (pid, slot) = (container.pid, container.slot);
                    // Handle its report before its end.
                    self.container_report(slot);
                    return self.container_ended(pid, exit);
                }
            }
        }
        for exec in self.table.execs.iter_mut().filter(|exec| exec.is_alive()) {
            let starting = match &mut exec.state {
                ExecState::Starting(starting) => Some(starting),
                ExecState::Running | ExecState::Ended(_) => None,
            };
            match second::meaning((&mut exec.pid, &mut exec.pidfd), starting, &self.table.spare, (pid, exit))
            {
                Meaning::Stranger => {}
                Meaning::Step => return,
                Meaning::Over(exit) => {
                    let (pid, slot) = (exec.pid, exec.slot);
                    self.exec_report(slot);
                    return self.exec_ended(pid, exit);
                }
            }
        }
    }

    fn container_ended(&mut self, pid: i32, exit: Exit) {
        let is_it = |container: &crate::table::Container| container.is_alive() && container.pid == pid;
        let Some(index) = self.table.containers.iter().position(is_it) else { return };
        let oom_killed = self.table.had_oom_kill(index);
        let failed = match &self.table.containers[index].state {
            // One that waits at a point of its record, and so has been answered, ends like one that runs.
            ContainerState::Starting(starting) if starting.number == 0 && starting.failure.is_none() => None,
            ContainerState::Starting(starting) => Some((starting.number, reported(starting))),
            ContainerState::Running | ContainerState::Exited { .. } => None,
        };
        if let Some((number, failure)) = failed {
            self.remove_container(index);
            return self.reply_failure(number, failure);
        }
        self.drain(index);
        let container = &mut self.table.containers[index];
        let record = ExitRecord {
            container: container.id,
            exit,
            oom_killed,
            finished_at_ns: process::now_ns(Clock::Wall),
            lost_log_lines: container.writer.lost,
        };
        container.stdin = None;
        container.state = ContainerState::Exited { record, is_told: false };
        // If the disk is full, the daemon gets the exit from the event, or after its next Hello.
        let _ = exit_records::write(self.state.borrow(), &record);
        self.tell();
    }

    fn exec_ended(&mut self, pid: i32, exit: Exit) {
        let is_it = |exec: &crate::table::Exec| exec.is_alive() && exec.pid == pid;
        let Some(index) = self.table.execs.iter().position(is_it) else { return };
        let failed = match &self.table.execs[index].state {
            ExecState::Starting(starting) => Some((starting.number, reported(starting))),
            ExecState::Running | ExecState::Ended(_) => None,
        };
        match failed {
            Some((number, failure)) => {
                self.table.execs.swap_remove(index);
                self.reply_failure(number, failure);
            }
            None => {
                self.table.execs[index].state = ExecState::Ended(exit);
                self.tell();
            }
        }
    }
}

/// The failure of a process that ended before it reported its exec. If the report could not be read, the failure is an
/// I/O error: the request is answered in any case.
fn reported(starting: &Starting) -> Failure {
    starting.failure.unwrap_or(Failure { index: 0, errno: Errno::EIO })
}
