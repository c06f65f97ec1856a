//! The part of `recover` that needs a record which was read: asks the kernel and the monitor of a pod, and
//! carries out the decisions of `reconcile` about the pod and its containers.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::{log, reactor, time};
use coracle_sandbox::monitor::ConnectError;
use coracle_sandbox::{Failure, Request, disk, monitor};
use nix::errno::Errno;

use crate::container::{REPORT_LIMIT, StoppingNote};
use crate::link::LinkError;
use crate::reconcile::{
    self, Answer, Cgroup, ContainerDecision, DECISIONS_MAX, Decision, Greeting, MonitorProcess, PodDecision,
    Recorded,
};
use crate::state::{self, ContainerEvent, How, PodEvent};
use crate::unknown::Unknown;
use crate::{Container, Pod, Pods, again, unlisted};

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

impl Pods {
    /// Connects to the monitor of a pod and queries its containers; returns which part of the pod's state is
    /// still unknown.
    pub(crate) async fn take_over(self: &Rc<Self>, pod: &Rc<Pod>) -> Option<Unknown> {
        let record = self.recorded_pod(pod)?;
        let mut why = String::new();
        let mut decision = reconcile::pod(MonitorProcess::NotAsked, Greeting::Silent, record).known()?;
        if decision == PodDecision::AskMonitor {
            let (process, greeting);
            (process, greeting, why) = self.ask_monitor(pod).await;
            decision = reconcile::pod(process, greeting, record).known()?;
        }
        match decision {
            PodDecision::NoteReboot => {
                self.log_failed(pod, self.change(pod, PodEvent::Rebooted));
                let _ = pod.creation.made.try_set(Ok(()));
                self.take_over_containers(pod, false).await.ok().flatten()
            }
            PodDecision::Undo => {
                self.undo(pod);
                None
            }
            PodDecision::AskAboutContainers => match self.take_over_containers(pod, true).await {
                Ok(unknown) => unknown,
                Err(MonitorEnded) => {
                    // The link may not have noticed it yet, and would be waited for.
                    pod.unlink();
                    self.note_monitors_end(pod).await
                }
            },
            PodDecision::AskMonitor | PodDecision::Retry => {
                self.look_at_processes(pod);
                // An answer that comes too late is not waited for; nor is it taken for the monitor's end.
                pod.connection.links.set(pod.connection.links.get() + 1);
                if let Some(link) = pod.connection.link.borrow_mut().take() {
                    link.abandon();
                }
                if let Ok(Some(unknown)) = self.take_over_containers(pod, false).await {
                    log::warn!("containers of a pod whose monitor does not answer are not ended, will retry"; pod = pod.id, reason = unknown.reason);
                }
                Some(Unknown::unattached(pod.id, why))
            }
            PodDecision::NoteMonitorsEnd => {
                if pod.record().state.is_ready() {
                    log::error!("the pod's monitor has ended"; pod = pod.id, error = why);
                }
                self.note_monitors_end(pod).await
            }
        }
    }

    /// Records that the pod's monitor has ended, and kills the pod's containers through their cgroups. Returns
    /// which of them could not be killed.
    pub(crate) async fn note_monitors_end(self: &Rc<Self>, pod: &Rc<Pod>) -> Option<Unknown> {
        if let Err(error) = self.change(pod, PodEvent::MonitorGone) {
            log::error!("cannot commit the state of a pod"; pod = pod.id, error = error);
        }
        self.end_containers(pod).await.err().map(|error| Unknown::unended(pod.id, error))
    }

    /// The state of a pod for decisions; `None` if this daemon is creating the pod, which is not recovered.
    fn recorded_pod(&self, pod: &Pod) -> Option<Recorded<reconcile::PodState>> {
        let is_same_boot = pod.record().boot == self.node.kernel.boot;
        let is_creating = pod.record().state == state::Pod::Creating;
        let is_own = pod.creation.made.is_initialized() || pod.connection.link.borrow().is_some();
        match (is_same_boot, is_creating) {
            (false, _) => Some(Recorded::State(reconcile::PodState::EarlierBoot)),
            (true, true) if is_own => None,
            (true, true) => Some(Recorded::State(reconcile::PodState::Creating)),
            (true, false) => Some(Recorded::State(reconcile::PodState::Made)),
        }
    }

    /// The state of a container for decisions.
    pub(super) fn recorded_container(&self, container: &Container) -> reconcile::ContainerState {
        let is_same_boot = container.pod.record().boot == self.node.kernel.boot;
        match &container.record().state {
            state::Container::Creating => reconcile::ContainerState::Creating,
            state::Container::Exited(_) => reconcile::ContainerState::Exited,
            state::Container::Created if is_same_boot => reconcile::ContainerState::Created,
            state::Container::Running { .. } if is_same_boot => reconcile::ContainerState::Running,
            state::Container::Created | state::Container::Running { .. } => {
                reconcile::ContainerState::EarlierBoot
            }
        }
    }

    /// Connects to the monitor of a pod, unless the daemon is connected; returns the answers of the kernel and
    /// the monitor, and the reason if the monitor does not serve.
    async fn ask_monitor(self: &Rc<Self>, pod: &Rc<Pod>) -> (MonitorProcess, Greeting, String) {
        if pod.connection.link.borrow().is_some() {
            return (MonitorProcess::Runs, Greeting::Serves, String::new());
        }
        if let Err(error) = again::require_descriptors() {
            return (MonitorProcess::Unclear, Greeting::Silent, error.to_string());
        }
        let monitor = match monitor::connect(&self.node.paths.pod_state(pod.id)) {
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
        let (process, greeting, why) = match reactor::deadline(ATTACH_LIMIT, self.attach(pod, monitor)).await
        {
            Ok(Ok(())) => (MonitorProcess::Runs, Greeting::Serves, None),
            Ok(Err(error @ LinkError::Failed(_))) => (MonitorProcess::Runs, Greeting::Failed, Some(error)),
            // If its process is running, another connection may have replaced this one.
            Ok(Err(error @ LinkError::Gone)) if !self.has_monitor(pod) => {
                pod.unlink();
                (MonitorProcess::Ended, Greeting::Silent, Some(error))
            }
            Ok(Err(error)) => (MonitorProcess::Runs, Greeting::Silent, Some(error)),
            Err(_) => (MonitorProcess::Runs, Greeting::Silent, None),
        };
        (process, greeting, why.map_or("it does not answer".to_owned(), |error| error.to_string()))
    }

    fn has_monitor(&self, pod: &Pod) -> bool {
        !matches!(monitor::connect(&self.node.paths.pod_state(pod.id)), Err(ConnectError::NotThere))
    }

    /// Determines the state of each container of a pod, then ends containers without a record. `is_served`:
    /// whether the pod's monitor serves this daemon. Returns which part of the state is still unknown.
    ///
    /// # Errors
    /// The monitor has ended meanwhile.
    async fn take_over_containers(
        self: &Rc<Self>,
        pod: &Rc<Pod>,
        is_served: bool,
    ) -> Result<Option<Unknown>, MonitorEnded> {
        let (mut unknown, mut is_silent) = (None, false);
        for container in self.containers_of(pod.id) {
            // After one request without an answer, no others are sent.
            let is_asked = is_served && !is_silent;
            match self.take_over_container(&container, is_asked).await {
                Ok(()) => {}
                Err(Undetermined::MonitorEnded) => return Err(MonitorEnded),
                Err(Undetermined::Silent(error)) => {
                    is_silent = true;
                    unknown = Some(Unknown::unattached(pod.id, error));
                }
                Err(Undetermined::Unended(error)) => {
                    unknown = unknown.or_else(|| Some(Unknown::unended(pod.id, error)));
                }
            }
        }
        let record = match self.unknown.borrow().get(&pod.id).is_some_and(|unknown| unknown.is_unread) {
            true => Recorded::Unreadable,
            false => Recorded::Absent,
        };
        Ok(match reconcile::container(Cgroup::NotAsked, Answer::NotAsked, record) {
            Decision::EndAndDiscard | Decision::EndAndSetAside => {
                let ended = self.end_unlisted(pod).await;
                unknown.or_else(|| ended.err().map(|error| Unknown::unended(pod.id, error)))
            }
            Decision::LeaveAlone | Decision::Known(_) => unknown,
        })
    }

    /// Determines the state of a container. If `is_asked` is false, its monitor is not asked.
    ///
    /// # Errors
    /// The reason why the state is still unknown.
    async fn take_over_container(
        self: &Rc<Self>,
        container: &Rc<Container>,
        is_asked: bool,
    ) -> Result<(), Undetermined> {
        let (mut cgroup, mut main, mut silence) = (Cgroup::NotAsked, 0, None);
        let mut answer = if is_asked { Answer::NotAsked } else { Answer::Silent };
        for _ in 0..DECISIONS_MAX {
            let record = Recorded::State(self.recorded_container(container));
            let Some(decision) = reconcile::container(cgroup, answer, record).known() else { return Ok(()) };
            match decision {
                ContainerDecision::AskKernel => {
                    let exists = container.cgroup().is_ok_and(|path| self.node.cgroups.exists(&path));
                    cgroup = if exists { Cgroup::Exists } else { Cgroup::Absent };
                }
                ContainerDecision::AskMonitor => {
                    answer = match self.ask_process(container).await {
                        // The monitor has reported an exit meanwhile, which is handled.
                        _ if container.ending.exited.is_initialized() => return Ok(()),
                        Ok(Some(pid)) => {
                            main = pid;
                            Answer::Process
                        }
                        Ok(None) => Answer::NoProcess,
                        // If its process is running, only the connection was lost.
                        Err(LinkError::Gone) if !self.has_monitor(&container.pod) => Answer::Ended,
                        Err(error) => {
                            silence = Some(error);
                            Answer::Silent
                        }
                    }
                }
                // An undo began when the record was read.
                ContainerDecision::Undo | ContainerDecision::Keep => return Ok(()),
                ContainerDecision::Run => {
                    self.take_over_running(container, main);
                    return Ok(());
                }
                ContainerDecision::Retry => {
                    return silence.map_or(Ok(()), |error| Err(Undetermined::Silent(error)));
                }
                ContainerDecision::EndWithPod => return Err(Undetermined::MonitorEnded),
                ContainerDecision::RecordExit => {
                    let found = self.read_exit_record(container, time::now() + REPORT_LIMIT, || false).await;
                    if container.record().state.is_running() {
                        self.end_without_monitor(container, "the monitor does not know it", found);
                    }
                }
                ContainerDecision::RecordReboot => {
                    let message = "the node was rebooted".to_owned();
                    self.end(container, self.node.kernel.clock.now_ns(), How::Lost { message });
                }
                ContainerDecision::EndRemaining => {
                    let ended = self.end_processes(container).await;
                    return ended.map_err(|error| Undetermined::Unended(error.context(container.title())));
                }
            }
        }
        Ok(())
    }

    /// Requests the main process of a container from the monitor: its PID, 0 if the PID is unknown, `None` if
    /// no process runs. If a start that an earlier daemon requested is in progress, waits for its result.
    async fn ask_process(&self, container: &Container) -> Result<Option<i32>, LinkError> {
        let link = container.pod.link().map_err(|_| LinkError::Gone)?;
        let end = time::now() + ASK_LIMIT;
        let id = container.id;
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
                let cgroup = container.cgroup().ok();
                let pid = cgroup.and_then(|cgroup| unlisted::main_process(link.pid(), &cgroup));
                Ok(Some(pid.unwrap_or(0)))
            }
            Err(LinkError::Failed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Continues a container whose main process runs. Its record may still have the state Created, if the
    /// daemon was killed between the monitor's answer and the commit.
    fn take_over_running(self: &Rc<Self>, container: &Rc<Container>, pid: i32) {
        container.set_pid(pid);
        if !container.record().state.is_running() {
            let at_ns = container.process.ahead.get().unwrap_or_else(|| self.created_ns(container, pid));
            self.log_failed(
                &container.pod,
                self.change_container(container, ContainerEvent::Started { at_ns }),
            );
        }
        self.resume_stop(container);
    }

    /// Wall-clock time of the creation of a container's process in nanoseconds since 1970; not earlier than
    /// the container's own creation.
    fn created_ns(&self, container: &Container, pid: i32) -> i64 {
        let now_ns = self.node.kernel.clock.now_ns();
        let age_ms = unlisted::created_ms(pid).map(|created_ms| time::boot_ms().saturating_sub(created_ms));
        let age_ns = i64::try_from(age_ms.unwrap_or(0)).unwrap_or(0).saturating_mul(1_000_000);
        now_ns.saturating_sub(age_ns).max(container.record().created_at_ns)
    }

    /// Reads the PIDs of running containers from the kernel, for a pod whose monitor does not answer.
    pub(super) fn look_at_processes(&self, pod: &Rc<Pod>) {
        let monitor = monitor::pid(&self.node.paths.pod_state(pod.id)).unwrap_or(0);
        for container in self.containers_of(pod.id) {
            let is_running = container.record().state.is_running();
            if let (true, Ok(cgroup)) = (is_running, container.cgroup())
                && let Some(pid) = unlisted::main_process(monitor, &cgroup)
            {
                container.set_pid(pid);
            }
        }
    }

    /// Continues a stop that the previous daemon had begun: SIGKILL is due at the same time (RST-11). The
    /// stop signal is sent if it may not have been sent: it is sent twice if the previous daemon ended
    /// directly after sending it.
    fn resume_stop(self: &Rc<Self>, container: &Rc<Container>) {
        let path = self.node.paths.stopping(container.pod.id).join(container.id.to_string());
        let note = disk::read_to_string(&path).ok().and_then(|text| StoppingNote::parse(&text));
        if let Some(StoppingNote { due_ms, is_signal_due }) = note {
            let grace = Duration::from_millis(due_ms.saturating_sub(time::boot_ms()));
            self.begin_stop(container, grace, is_signal_due);
        }
    }
}
