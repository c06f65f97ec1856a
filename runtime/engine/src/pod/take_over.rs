//! The part of the recovery of a pod that needs a record which was read: asks the kernel and the pod's monitor, and
//! carries out the decisions of `reconcile` about the pod and its containers.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor, time};
use coracle_sandbox::monitor::ConnectError;
use coracle_sandbox::{Failure, Request, disk, monitor};
use nix::errno::Errno;

use crate::container::{REPORT_LIMIT, StoppingNote};
use crate::link::LinkError;
use crate::pod::unlisted_containers;
use crate::reconcile::{
    self, Answer, Cgroup, ContainerDecision, DECISIONS_MAX, Decision, Greeting, MonitorProcess, PodDecision,
    Recorded,
};
use crate::state::{self, ContainerEvent, How, PodEvent};
use crate::unknown::Unknown;
use crate::{Container, Pod, retries};

/// Time limit for a monitor's answer to its first request, and for the answers about its containers.
const ATTACH_LIMIT: Duration = Duration::from_secs(5);

/// Interval between two checks of a container whose start is in progress.
const STARTING_PAUSE: Duration = Duration::from_millis(20);

/// Time limit for a monitor's answer about one container.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// The reason why the state of a container is not determined.
enum Undetermined {
    /// The monitor has not answered.
    Silent(LinkError),
    MonitorEnded,
    /// Remaining processes of an exited container could not be killed.
    Unended(Error),
}

/// The monitor ended while the states of its containers were determined.
struct MonitorEnded;

impl Pod {
    /// Connects to the monitor of a pod and queries its containers; returns which part of the pod's state is
    /// still unknown.
    pub(crate) async fn take_over(self: &Rc<Self>) -> Option<Unknown> {
        let record = self.recorded()?;
        let mut why = String::new();
        let mut decision = reconcile::pod(MonitorProcess::NotAsked, Greeting::Silent, record).known()?;
        if decision == PodDecision::AskMonitor {
            let (process, greeting);
            (process, greeting, why) = self.ask_monitor().await;
            decision = reconcile::pod(process, greeting, record).known()?;
        }
        match decision {
            PodDecision::NoteReboot => {
                self.log_failed(self.change(PodEvent::Rebooted));
                // A request that has joined the interrupted creation gets no pod that cannot become ready.
                let text = format!("the node was restarted while pod sandbox {:.13} was created", self.id);
                let _ = self.made.try_set(Err(Error::new(Kind::Unavailable, text)));
                self.take_over_containers(false).await.ok().flatten()
            }
            PodDecision::Undo => {
                self.undo();
                None
            }
            PodDecision::AskAboutContainers => match self.take_over_containers(true).await {
                Ok(unknown) => unknown,
                Err(MonitorEnded) => {
                    // The link may not have noticed it yet, and would be waited for.
                    self.unlink();
                    self.note_monitors_end().await
                }
            },
            PodDecision::AskMonitor | PodDecision::Retry => {
                self.look_at_processes();
                // An answer that comes too late is not waited for; nor is it taken for the monitor's end.
                self.connection.links.set(self.connection.links.get() + 1);
                if let Some(link) = self.connection.link.borrow_mut().take() {
                    link.abandon();
                }
                if let Ok(Some(unknown)) = self.take_over_containers(false).await {
                    log::warn!("containers of a pod whose monitor does not answer are not ended, will retry"; pod = self.id, reason = unknown.reason);
                }
                Some(Unknown::unattached(self.id, why))
            }
            PodDecision::NoteMonitorsEnd => {
                if self.record().state.is_ready() {
                    log::error!("the pod's monitor has ended"; pod = self.id, error = why);
                }
                self.note_monitors_end().await
            }
        }
    }

    /// Records that the pod's monitor has ended or cannot be reached any more, and kills the pod's containers, then
    /// the monitor, if it runs. Returns which of them could not be killed.
    pub(crate) async fn note_monitors_end(self: &Rc<Self>) -> Option<Unknown> {
        if let Err(error) = self.change(PodEvent::MonitorGone) {
            log::error!("cannot commit the state of a pod"; pod = self.id, error = error);
        }
        let ended = match self.end_containers().await {
            Ok(()) => self.end_monitor().await,
            Err(error) => Err(error),
        };
        ended.err().map(|error| Unknown::unended(self.id, error))
    }

    /// The state of a pod for decisions; `None` if this daemon is creating the pod, which is not recovered.
    fn recorded(&self) -> Option<Recorded<reconcile::PodState>> {
        let is_same_boot = self.record().boot == self.node().kernel.boot;
        let is_creating = self.record().state.is_creating();
        let is_own = self.made.is_initialized() || self.connection.link.borrow().is_some();
        match (is_same_boot, is_creating) {
            (false, _) => Some(Recorded::State(reconcile::PodState::EarlierBoot)),
            (true, true) if is_own => None,
            (true, true) => Some(Recorded::State(reconcile::PodState::Creating)),
            (true, false) => Some(Recorded::State(reconcile::PodState::Made)),
        }
    }

    /// Connects to the monitor of a pod, unless the daemon is connected; returns the answers of the kernel and
    /// the monitor, and the reason if the monitor does not serve.
    async fn ask_monitor(self: &Rc<Self>) -> (MonitorProcess, Greeting, String) {
        if self.connection.link.borrow().is_some() {
            return (MonitorProcess::Runs, Greeting::Serves, String::new());
        }
        if let Err(error) = retries::require_descriptors() {
            return (MonitorProcess::Unclear, Greeting::Silent, error.to_string());
        }
        let monitor = match monitor::connect(&self.node().paths.pod_state(self.id)) {
            Ok(monitor) => monitor,
            Err(error) => {
                let process = match &error {
                    // A temporary error of the kernel: a full descriptor table, a failing disk.
                    ConnectError::Failed(coracle_sandbox::Error::Kernel { .. }) => MonitorProcess::Unclear,
                    ConnectError::NotThere | ConnectError::Failed(_) => MonitorProcess::Ended,
                };
                return (process, Greeting::Silent, error.to_string());
            }
        };
        let (process, greeting, why) = match reactor::deadline(ATTACH_LIMIT, self.attach(monitor)).await {
            Ok(Ok(())) => (MonitorProcess::Runs, Greeting::Serves, None),
            Ok(Err(error @ LinkError::Failed(_))) => (MonitorProcess::Runs, Greeting::Failed, Some(error)),
            // If its process is running, another connection may have replaced this one.
            Ok(Err(error @ LinkError::Gone)) if !self.has_monitor() => {
                self.unlink();
                (MonitorProcess::Ended, Greeting::Silent, Some(error))
            }
            Ok(Err(error)) => (MonitorProcess::Runs, Greeting::Silent, Some(error)),
            Err(_) => (MonitorProcess::Runs, Greeting::Silent, None),
        };
        (process, greeting, why.map_or("it does not answer".to_owned(), |error| error.to_string()))
    }

    fn has_monitor(&self) -> bool {
        !matches!(monitor::connect(&self.node().paths.pod_state(self.id)), Err(ConnectError::NotThere))
    }

    /// Determines the state of each container of a pod, then ends containers without a record. `is_served`:
    /// whether the pod's monitor serves this daemon. Returns which part of the state is still unknown.
    ///
    /// # Errors
    /// The monitor has ended meanwhile.
    async fn take_over_containers(&self, is_served: bool) -> Result<Option<Unknown>, MonitorEnded> {
        let (mut unknown, mut is_silent) = (None, false);
        for container in self.containers() {
            // After one request without an answer, no others are sent.
            let is_asked = is_served && !is_silent;
            match container.take_over(is_asked).await {
                Ok(()) => {}
                Err(Undetermined::MonitorEnded) => return Err(MonitorEnded),
                Err(Undetermined::Silent(error)) => {
                    is_silent = true;
                    unknown = Some(Unknown::unattached(self.id, error));
                }
                Err(Undetermined::Unended(error)) => {
                    unknown = unknown.or_else(|| Some(Unknown::unended(self.id, error)));
                }
            }
        }
        let record = match self.unknown().is_some_and(|unknown| unknown.is_unread) {
            true => Recorded::Unreadable,
            false => Recorded::Absent,
        };
        Ok(match reconcile::container(Cgroup::NotAsked, Answer::NotAsked, record) {
            Decision::EndAndDiscard | Decision::EndAndSetAside => {
                let ended = self.end_unlisted().await;
                unknown.or_else(|| ended.err().map(|error| Unknown::unended(self.id, error)))
            }
            Decision::LeaveAlone | Decision::Known(_) => unknown,
        })
    }

    /// Reads the PIDs of running containers from the kernel, for a pod whose monitor does not answer.
    pub(crate) fn look_at_processes(&self) {
        // The PIDs of the containers stay unknown until the next attempt.
        let Ok(Some(monitor)) = monitor::pid(&self.node().paths.pod_state(self.id)) else { return };
        for container in self.containers() {
            let is_running = container.record().state.is_running();
            if let (true, Ok(cgroup)) = (is_running, container.cgroup())
                && let Some(pid) = unlisted_containers::main_process(monitor, self.id, container.id, &cgroup)
            {
                container.set_pid(pid);
            }
        }
    }

    /// Undoes an interrupted RunPodSandbox in the background; the pod's name is reserved until then.
    fn undo(self: &Rc<Self>) {
        let pod = Rc::clone(self);
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            log::info!("undoing an incomplete pod sandbox"; pod = pod.id);
            pod.log_failed(pod.undo_creation().await);
            let _ = pod.made.try_set(Err(Error::new(
                Kind::Unavailable,
                "the runtime was restarted while making it: try again",
            )));
        })
        .detach();
    }

    pub(crate) fn log_failed(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            log::error!("recovery of a pod is incomplete"; pod = self.id, error = error);
        }
    }
}

impl Container {
    /// The state of a container for decisions.
    pub(crate) fn recorded(&self) -> reconcile::ContainerState {
        let is_same_boot = self.pod.record().boot == self.node().kernel.boot;
        match &self.record().state {
            state::Container::Creating => reconcile::ContainerState::Creating,
            state::Container::Exited { .. } | state::Container::Gone => reconcile::ContainerState::Exited,
            state::Container::Created { .. } if is_same_boot => reconcile::ContainerState::Created,
            state::Container::Running { .. } if is_same_boot => reconcile::ContainerState::Running,
            state::Container::Created { .. } | state::Container::Running { .. } => {
                reconcile::ContainerState::EarlierBoot
            }
        }
    }

    /// Determines the state of a container. If `is_asked` is false, its monitor is not asked.
    ///
    /// # Errors
    /// The reason why the state is still unknown.
    async fn take_over(self: &Rc<Self>, is_asked: bool) -> Result<(), Undetermined> {
        let (mut cgroup, mut main, mut silence) = (Cgroup::NotAsked, 0, None);
        let mut answer = if is_asked { Answer::NotAsked } else { Answer::Silent };
        for _ in 0..DECISIONS_MAX {
            let record = Recorded::State(self.recorded());
            let Some(decision) = reconcile::container(cgroup, answer, record).known() else { return Ok(()) };
            match decision {
                ContainerDecision::AskKernel => {
                    let exists = self.cgroup().is_ok_and(|path| self.node().cgroups.exists(&path));
                    cgroup = if exists { Cgroup::Exists } else { Cgroup::Absent };
                }
                ContainerDecision::AskMonitor => {
                    answer = match self.ask_process().await {
                        // The monitor has reported an exit meanwhile, which is handled.
                        _ if self.record().state.is_over() => return Ok(()),
                        Ok(Some(pid)) => {
                            main = pid;
                            Answer::Process
                        }
                        Ok(None) => Answer::NoProcess,
                        // If its process is running, only the connection was lost.
                        Err(LinkError::Gone) if !self.pod.has_monitor() => Answer::Ended,
                        Err(error) => {
                            silence = Some(error);
                            Answer::Silent
                        }
                    }
                }
                // An undo began when the record was read.
                ContainerDecision::Undo | ContainerDecision::Keep => return Ok(()),
                ContainerDecision::Run => {
                    self.take_over_running(main);
                    return Ok(());
                }
                ContainerDecision::Retry => {
                    return silence.map_or(Ok(()), |error| Err(Undetermined::Silent(error)));
                }
                ContainerDecision::EndWithPod => return Err(Undetermined::MonitorEnded),
                ContainerDecision::RecordExit => {
                    let found = self.read_exit_record(time::now() + REPORT_LIMIT, || false).await;
                    if self.record().state.is_running() {
                        self.end_without_monitor("the monitor does not know it", found);
                    }
                }
                ContainerDecision::RecordReboot => {
                    let message = "the node was rebooted".to_owned();
                    self.end(self.node().kernel.clock.now_ns(), How::Lost { message });
                }
                ContainerDecision::EndRemaining => {
                    let ended = self.end_processes().await;
                    return ended.map_err(|error| Undetermined::Unended(error.context(self.title())));
                }
            }
        }
        Ok(())
    }

    /// Requests the main process of a container from the monitor: its PID, 0 if the PID is unknown, `None` if
    /// no process runs. If a start that an earlier daemon requested is in progress, waits for its result.
    async fn ask_process(&self) -> Result<Option<i32>, LinkError> {
        let link = self.pod.link().map_err(|_| LinkError::Gone)?;
        let end = time::now() + ASK_LIMIT;
        let id = self.id;
        loop {
            let refused = match link.ask(Request::Process { container: id }, &[], ASK_LIMIT).await {
                Ok(descriptors) => {
                    let pid = descriptors.first().and_then(|pidfd| monitor::pid_of(pidfd.as_fd()));
                    return Ok(Some(pid.unwrap_or(0)));
                }
                Err(LinkError::Failed(Failure::Unknown)) => break,
                Err(LinkError::Failed(Failure::Refused { errno })) => Errno::from_raw(errno),
                Err(error) => return Err(error),
            };
            match refused {
                Errno::EAGAIN if time::now() < end => reactor::sleep(STARTING_PAUSE).await,
                Errno::EAGAIN => return Err(LinkError::Silent { limit: ASK_LIMIT }),
                _ => return Ok(None),
            }
        }
        // A monitor of an earlier build does not report it; the kernel does.
        match link.ask(Request::Signal { container: id, signal: 0 }, &[], ASK_LIMIT).await {
            Ok(_) => {
                let cgroup = self.cgroup().ok();
                let pid = cgroup.and_then(|cgroup| {
                    unlisted_containers::main_process(link.pid(), self.pod.id, id, &cgroup)
                });
                Ok(Some(pid.unwrap_or(0)))
            }
            Err(LinkError::Failed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Continues a container whose main process runs. Its record may still have the state Created, if the
    /// daemon was killed between the monitor's answer and the commit.
    fn take_over_running(self: &Rc<Self>, pid: i32) {
        self.set_pid(pid);
        if !self.record().state.is_running() {
            let ahead_ns = self.record().state.ahead_ns();
            let at_ns = ahead_ns.unwrap_or_else(|| self.created_ns(pid));
            self.pod.log_failed(self.change(ContainerEvent::Started { at_ns }));
        }
        self.resume_stop();
    }

    /// Wall-clock time of the creation of a container's process in nanoseconds since 1970; not earlier than
    /// the container's own creation.
    fn created_ns(&self, pid: i32) -> i64 {
        let now_ns = self.node().kernel.clock.now_ns();
        let age_ms =
            unlisted_containers::created_ms(pid).map(|created_ms| time::boot_ms().saturating_sub(created_ms));
        let age_ns = i64::try_from(age_ms.unwrap_or(0)).unwrap_or(0).saturating_mul(1_000_000);
        now_ns.saturating_sub(age_ns).max(self.record().created_at_ns)
    }

    /// Continues a stop that the previous daemon had begun: SIGKILL is due at the same time (RST-11). The
    /// stop signal is sent if it may not have been sent: it is sent twice if the previous daemon ended
    /// directly after sending it.
    fn resume_stop(self: &Rc<Self>) {
        let path = self.node().paths.stopping(self.pod.id).join(self.id.to_string());
        let note = disk::read_to_string(&path).ok().and_then(|text| StoppingNote::parse(&text));
        if let Some(StoppingNote { due_ms, is_signal_due }) = note {
            let grace = Duration::from_millis(due_ms.saturating_sub(time::boot_ms()));
            self.begin_stop(grace, is_signal_due);
        }
    }
}
