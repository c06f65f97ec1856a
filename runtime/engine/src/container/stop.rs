//! A container's stop: the stop signal, the grace period, SIGKILL. Concurrent calls share one stop, and a new
//! daemon continues the stops of the previous daemon.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor, store, time};
use coracle_sandbox::{ExitRecord, PidNamespace, Request, disk, process};
use nix::errno::Errno;

use crate::link::ASK_LIMIT;
use crate::operations::Key;
use crate::pod::{KILL_LIMIT, unlisted_containers};
use crate::state::Stop;
use crate::{Container, state};

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
        if !self.record().state.is_over() {
            // The start was refused, perhaps because an earlier daemon's start is still in progress.
            return self.require_known();
        }
        self.end_others().await?;
        // Each plugin has its own limit.
        self.announced().await;
        Ok(())
    }

    /// Ends the other processes of a container whose main process has ended, unless they ended with it.
    async fn end_others(&self) -> Result<(), Error> {
        if self.record().state.is_over() && !self.has_own_pids() {
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
        let is_created = self.record().state.is_created();
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
        let state = &self.record().state;
        state.is_running() || !state.is_over() && is_under_way()
    }

    /// Waits until the container does not run: it has exited, or its start was refused and has not changed
    /// it.
    pub(super) async fn ended(&self) {
        let refused = async {
            self.engine().operations.ended(Key::Start(self.id)).await;
            self.until(|state| !state.is_running()).await;
        };
        smol::future::or(self.until(state::Container::is_over), refused).await;
    }

    /// Starts a stop, or shortens the one in progress; returns the time of SIGKILL. If `with_signal` is
    /// false, no stop signal is sent before SIGKILL.
    pub(crate) fn begin_stop(self: &Rc<Self>, grace: Duration, with_signal: bool) -> Instant {
        let kill_at = time::now() + grace;
        let under_way = self.record().state.stop();
        if let Some(stop) = under_way {
            if kill_at < stop.kill_at {
                self.set_stop(Some(Stop { kill_at, ..stop }));
            }
            return kill_at.min(stop.kill_at);
        }
        let is_signal_due = with_signal && !grace.is_zero();
        self.set_stop(Some(Stop { kill_at, is_signal_due }));
        let container = Rc::clone(self);
        reactor::spawn(async move {
            let signal = async {
                if is_signal_due && container.signal().await {
                    let stop = container.record().state.stop();
                    // Else the next daemon would send it again.
                    container.set_stop(stop.map(|stop| Stop { is_signal_due: false, ..stop }));
                }
                smol::future::pending().await
            };
            smol::future::or(signal, container.wait_and_kill()).await;
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

    async fn wait_and_kill(&self) {
        while self.is_started() {
            let now = time::now();
            let stop = self.record().state.stop();
            let Some(Stop { kill_at, .. }) = stop.filter(|stop| now < stop.kill_at) else { break };
            let sooner = self.until(|state| state.stop().is_none_or(|stop| stop.kill_at < kill_at));
            let _ = reactor::deadline(kill_at - now, smol::future::or(self.ended(), sooner)).await;
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
        if !self.record().state.is_over() && !self.is_started() {
            // It may still be started, and then nothing asks it to stop.
            let _ = disk::remove_file(&self.stopping_path());
        }
        self.set_stop(None); // the next call starts over where this one did not get through
    }

    /// Whether the container's main process is the first of a PID namespace.
    pub(super) fn has_own_pids(&self) -> bool {
        matches!(self.pod.pid_namespace(self.record().pid()), Ok(PidNamespace::New))
    }

    /// Whether a process was cloned for the container, or is being cloned.
    pub(super) fn was_started(&self) -> bool {
        self.record().state.has_run() || self.process.last_pid.get() != 0 || self.is_started()
    }

    /// Kills the main process by its PID: another program may have moved it out of its cgroup.
    fn kill_main(&self) -> Result<(), Error> {
        let (pid, monitor) = (self.process.pid.get(), self.pod.monitor_pid()?);
        if pid == 0 || monitor == 0 {
            return Ok(());
        }
        // The monitor keeps the PID of a child until the exit is reported; afterwards the record has none.
        Ok(process::kill(pid, || unlisted_containers::parent(pid) == Some(monitor))?)
    }

    pub(super) fn stopping_path(&self) -> PathBuf {
        self.node().paths.stopping(self.pod.id).join(self.id.to_string())
    }

    /// Sets the stop in progress, unless the container has ended: its end has taken the note away from which the next daemon
    /// continues the stop (RST-11).
    fn set_stop(&self, new: Option<Stop>) {
        self.update_state(|state| {
            if let state::Container::Created { stop, .. } | state::Container::Running { stop, .. } = state {
                *stop = new;
            }
        });
        let now = self.record().state.stop();
        let Some(stop) = now else { return };
        let left = stop.kill_at.saturating_duration_since(time::now());
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let note = StoppingNote {
            due_ms: time::boot_ms().saturating_add(left_ms),
            is_signal_due: stop.is_signal_due,
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
    fn a_stopping_note_is_parsed_as_it_was_written() {
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
