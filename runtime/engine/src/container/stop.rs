//! A container's stop: the stop signal, the grace period, SIGKILL. Concurrent calls share one stop, and a new
//! daemon continues the stops of the previous daemon.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor, store, time};
use coracle_sandbox::{ExitRecord, PidNamespace, Request, disk, process};
use event_listener::Event as Changed;
use nix::errno::Errno;

use super::ASK_LIMIT;
use crate::operations::Key;
use crate::pod::{KILL_LIMIT, Stop};
use crate::{Container, state, unlisted};

/// Pause after a stop signal that was not sent.
const SIGNAL_PAUSE: Duration = Duration::from_millis(500);

impl Container {
    /// StopContainer: sends the stop signal, waits for the grace period, then kills. Concurrent calls share
    /// one stop; the shortest grace period applies.
    ///
    /// # Errors
    /// `DeadlineExceeded` if the kernel does not end the processes in time; `Unavailable` if the daemon has
    /// not reached the pod's monitor since its start: the client may repeat the call.
    pub async fn stop(self: &Rc<Self>, grace: Duration) -> Result<(), Error> {
        if !self.is_started() {
            self.require_known()?;
            // Perhaps the retry of a stop that could not end them.
            return self.end_others().await;
        }
        self.pod.require_reached()?;
        let kill_at = self.begin_stop(grace, true);
        let limit = kill_at.saturating_duration_since(time::now()) + KILL_LIMIT;
        let ended = reactor::deadline(limit, self.ended()).await;
        ended.map_err(|_| {
            let process = match self.process.pid.get() {
                0 => String::new(),
                pid => format!("process {pid} "),
            };
            let text = format!("{}: {process}does not end after SIGKILL", self.title());
            Error::new(Kind::DeadlineExceeded, text)
        })?;
        if !self.ending.exited.is_initialized() {
            // The start was refused, perhaps because an earlier daemon's start is still in progress.
            return self.require_known();
        }
        self.end_others().await?;
        // Each plugin has its own limit.
        self.ending.stop_told.wait().await;
        Ok(())
    }

    /// Ends the other processes of a container whose main process has ended, unless they ended with it.
    async fn end_others(&self) -> Result<(), Error> {
        if self.ending.exited.is_initialized() && !self.has_own_pids() {
            self.end_processes().await.map_err(|error| error.context(self.title()))?;
        }
        Ok(())
    }

    /// Refuses a container with state Created if an earlier daemon may have requested its start and this
    /// daemon has not received the result from the monitor yet.
    ///
    /// # Errors
    /// `Unavailable`: the client may repeat the call.
    pub(super) fn require_known(&self) -> Result<(), Error> {
        let is_created = matches!(self.record().state, state::Container::Created);
        match self.pod.unknown().filter(|unknown| is_created && !unknown.is_unended) {
            Some(unknown) => {
                Err(Error::new(Kind::Unavailable, format!("{}: {}", self.title(), unknown.reason)))
            }
            None => Ok(()),
        }
    }

    /// Whether the container must be stopped: it is running, or its start is in progress and may result in a
    /// running process. False exactly if [`Container::ended`] returns at once: the start may still be in progress
    /// for some time after the exit.
    pub(super) fn is_started(&self) -> bool {
        let is_under_way = || self.engine().operations.is_under_way(Key::Start(self.id));
        !self.ending.exited.is_initialized() && (self.record().state.is_running() || is_under_way())
    }

    /// Waits until the container does not run: it has exited, or its start was refused and has not changed
    /// it.
    pub(super) async fn ended(&self) {
        let exited = async {
            self.ending.exited.wait().await;
        };
        let refused = async {
            self.engine().operations.ended(Key::Start(self.id)).await;
            if self.record().state.is_running() {
                self.ending.exited.wait().await;
            }
        };
        smol::future::or(exited, refused).await;
    }

    /// Starts a stop, or shortens the one in progress; returns the time of SIGKILL. If `with_signal` is
    /// false, no stop signal is sent before SIGKILL.
    pub(crate) fn begin_stop(self: &Rc<Self>, grace: Duration, with_signal: bool) -> Instant {
        let kill_at = time::now() + grace;
        let under_way = self.ending.stop.borrow().clone();
        if let Some(stop) = under_way {
            if kill_at < stop.kill_at.get() {
                stop.kill_at.set(kill_at);
                self.write_stopping(&stop);
                stop.sooner.notify(usize::MAX);
            }
            return stop.kill_at.get();
        }
        let is_signal_due = with_signal && !grace.is_zero();
        let stop = Rc::new(Stop {
            kill_at: Cell::new(kill_at),
            is_signal_due: Cell::new(is_signal_due),
            sooner: Changed::new(),
        });
        *self.ending.stop.borrow_mut() = Some(Rc::clone(&stop));
        self.write_stopping(&stop);
        let container = Rc::clone(self);
        reactor::spawn(async move {
            let signal = async {
                if is_signal_due && container.signal().await {
                    stop.is_signal_due.set(false);
                    // Else the next daemon would send it again.
                    container.write_stopping(&stop);
                }
                smol::future::pending().await
            };
            smol::future::or(signal, container.wait_and_kill(&stop)).await;
        })
        .detach();
        kill_at
    }

    /// Sends the stop signal, again after an error: a program that does not get it loses what it would have written. Returns
    /// whether the monitor has confirmed it; `false`: the container ended by itself, or has no monitor.
    async fn signal(&self) -> bool {
        // Before that there is no program that could handle it.
        self.engine().operations.ended(Key::Start(self.id)).await;
        let signal = self.record().stop_signal;
        loop {
            let Ok(link) = self.pod.link() else { return false };
            let sent = link.ask(Request::Signal { container: self.id, signal }, &[], ASK_LIMIT).await;
            match sent {
                Ok(_) => return true,
                Err(error) if error.is_refusal(Errno::ESRCH) || !self.is_started() => {
                    log::debug!("stop signal not sent"; ctr = self.id, error = error);
                    return false;
                }
                Err(error) => {
                    log::warn!("stop signal not sent, will retry until the end of the grace period"; ctr = self.id, error = error);
                    reactor::sleep(SIGNAL_PAUSE).await;
                }
            }
        }
    }

    async fn wait_and_kill(&self, stop: &Stop) {
        while self.is_started() {
            let sooner = stop.sooner.listen();
            let now = time::now();
            if now >= stop.kill_at.get() {
                break;
            }
            let end = smol::future::or(self.ended(), async {
                sooner.await;
            });
            let _ = reactor::deadline(stop.kill_at.get() - now, end).await;
        }
        // Again and again: a fork may be ahead of the first SIGKILL.
        let end = time::now() + KILL_LIMIT;
        while self.is_started() && time::now() < end {
            let by_cgroup = self.cgroup().and_then(|cgroup| Ok(self.node().cgroups.kill(&cgroup)?));
            match by_cgroup.and(self.kill_main()) {
                Ok(()) => {}
                Err(error) => {
                    log::error!("cannot kill a container, will retry"; ctr = self.id, error = error)
                }
            }
            let _ = reactor::deadline(Duration::from_millis(100), self.ended()).await;
        }
        if !self.ending.exited.is_initialized() && !self.is_started() {
            // It may still be started, and then nothing asks it to stop.
            let _ = disk::remove_file(&self.stopping_path());
        }
        *self.ending.stop.borrow_mut() = None; // the next call starts over where this one did not get through
    }

    /// Whether the container's main process is the first of a PID namespace.
    pub(super) fn has_own_pids(&self) -> bool {
        matches!(self.pod.pid_namespace(self.record().pid()), Ok(PidNamespace::New))
    }

    /// Whether a process was cloned for the container, or is being cloned.
    pub(super) fn was_started(&self) -> bool {
        let is_made = matches!(self.record().state, state::Container::Creating | state::Container::Created);
        !is_made || self.process.last_pid.get() != 0 || self.is_started()
    }

    /// Kills the main process by its PID: another program may have moved it out of its cgroup.
    fn kill_main(&self) -> Result<(), Error> {
        let (pid, monitor) = (self.process.pid.get(), self.pod.monitor_pid()?);
        if pid == 0 || monitor == 0 {
            return Ok(());
        }
        // The monitor keeps the PID of a child until the exit is reported; afterwards the record has none.
        Ok(process::kill(pid, || unlisted::parent(pid) == Some(monitor))?)
    }

    pub(super) fn stopping_path(&self) -> PathBuf {
        self.node().paths.stopping(self.pod.id).join(self.id.to_string())
    }

    /// Writes the note from which the next daemon continues the stop (RST-11).
    fn write_stopping(&self, stop: &Stop) {
        if self.ending.exited.is_initialized() {
            return; // its end has taken the note away
        }
        let left = stop.kill_at.get().saturating_duration_since(time::now());
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let note = StoppingNote {
            due_ms: time::boot_ms().saturating_add(left_ms),
            is_signal_due: stop.is_signal_due.get(),
        };
        let directory = self.node().paths.stopping(self.pod.id);
        let written = store::write_unsynced(&directory, &self.id.to_string(), note.text().as_bytes());
        if let Err(error) = written {
            log::warn!("cannot write the note of a stop, a restarted daemon would not continue it"; ctr = self.id, error = error);
        }
    }
}

/// The note about a stop in progress, for the next daemon. Format: `DUE_MS` or `DUE_MS signal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoppingNote {
    /// Time of SIGKILL in milliseconds of the boot-time clock.
    pub(crate) due_ms: u64,
    /// Whether the stop signal may not have been sent yet.
    pub(crate) is_signal_due: bool,
}

impl StoppingNote {
    const SIGNAL: &str = " signal";

    fn text(self) -> String {
        format!("{}{}", self.due_ms, if self.is_signal_due { Self::SIGNAL } else { "" })
    }

    /// Parses a note; `None` if `text` is malformed.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (due_ms, is_signal_due) = match text.strip_suffix(Self::SIGNAL) {
            Some(due_ms) => (due_ms, true),
            None => (text, false),
        };
        Some(Self { due_ms: due_ms.parse().ok()?, is_signal_due })
    }
}

/// Logs the end of a container: after an OOM kill with the memory limit, which `coracle why` reports.
pub(super) fn log_exit(container: &Container, exit: &ExitRecord) {
    let (pod, code, lost) = (&container.pod, exit.exit.code(), exit.lost_log_lines);
    if exit.oom_killed {
        let limit = container.record().spec.resources.memory_limit_bytes;
        log::info!("container exited"; pod = pod.id, ctr = container.id, name = pod.name(), container = container.name(),
            code = code, oom = true, memory_limit_bytes = limit, lost_lines = lost);
    } else {
        log::info!("container exited"; pod = pod.id, ctr = container.id, name = pod.name(), container = container.name(),
            code = code, oom = false, lost_lines = lost);
    }
}

#[cfg(test)]
mod tests {
    use super::StoppingNote;

    #[test]
    fn a_stop_comes_back_with_the_signal_that_is_due() {
        for note in [(7, true), (7, false), (u64::MAX, true)] {
            let note = StoppingNote { due_ms: note.0, is_signal_due: note.1 };
            assert_eq!(StoppingNote::parse(&note.text()), Some(note));
        }
        assert_eq!(StoppingNote::parse("7"), Some(StoppingNote { due_ms: 7, is_signal_due: false }));
        for other in ["", " signal", "7 ", "7 signals", "-7"] {
            assert_eq!(StoppingNote::parse(other), None, "{other:?}");
        }
    }
}
