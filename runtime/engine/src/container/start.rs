//! A container's start: from its launch record to a program that runs. Where plugins want to hear of it, or hooks are to run,
//! the process stands still on the way (`Op::Wait`) until they have been asked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::{PidNamespace, Request, Streams, monitor, plan};

use crate::hooks::Point;
use crate::lifecycle::Event as Hook;
use crate::link::LinkError;
use crate::operations::Key;
use crate::record::Kept;
use crate::spec::{ContainerPid, PodPid};
use crate::state::{self, ContainerEvent, How};
use crate::{Container, Pod, Pods};
use coracle_base::error::failed;

/// Longest time from clone to exec: an image on slow flash, a volume on a slow network. With the look at what hung, and the end
/// of the process, less than the two minutes that a kubelet waits.
const START_LIMIT: Duration = Duration::from_secs(90);

impl Pods {
    /// StartContainer: from Created to Running, or to Exited with the reason why not.
    ///
    /// # Errors
    /// `FailedPrecondition` where it is not in the state Created or its pod sandbox is not ready, `InvalidArgument` for a fault
    /// of the image, else what the start failed at: it has ended then.
    pub async fn start_container(self: &Rc<Self>, container: Rc<Container>) -> Result<(), Error> {
        let (pods, key) = (Rc::clone(self), Key::Start(container.id));
        let work = async move {
            let _operation = container.operation.lock().await;
            pods.require_ready(&container.pod)?;
            let at_ns = pods.node.kernel.clock.now_ns();
            // Refused here, before anything is tried, unless it is Created.
            let allowed = container.record().state.on(ContainerEvent::Started { at_ns });
            allowed.map_err(|refused| {
                Error::new(Kind::FailedPrecondition, format!("{}: {refused}", container.title()))
            })?;
            // Nothing has been tried yet, so the same request may come again.
            pods.require_answers(&container).await.map_err(|error| error.context(container.title()))?;
            let has_hooks = !container.record().adjusted.hooks.is_empty();
            let started = match has_hooks || pods.hooks.wants(Hook::StartContainer) {
                true => pods.start_in_turn(&container, at_ns).await,
                false => match pods.launch(&container, at_ns, false).await {
                    Ok((pidfd, _)) => pods.started(&container, pidfd, at_ns),
                    Err(error) => Err(error),
                },
            };
            if let Err(error) = started {
                pods.not_started(&container, &error).await;
                return Err(error.context(container.title()));
            }
            Ok(())
        };
        self.operations.share(key, work).await
    }

    /// The process is made and waits, plugins are asked, it goes on; what they hear next is that it runs.
    async fn start_in_turn(self: &Rc<Self>, container: &Rc<Container>, at_ns: i64) -> Result<(), Error> {
        let (mut pidfd, record) = self.launch(container, at_ns, true).await?;
        if let Some(pidfd) = &pidfd {
            container.set_pid(monitor::pid_of(pidfd.as_fd()).unwrap_or(0));
        }
        if container.record().adjusted.hooks.has_before_root() {
            self.run_hooks(container, Point::Creating).await?;
            self.resume(container, &record).await?;
        }
        let turn = self.hooks.begin(self, &container.pod).await;
        turn.start(container).await?;
        self.run_hooks(container, Point::Created).await?;
        // In a PID namespace that others are in, the process that runs is another than the one that waited.
        if let Some(running) = self.resume(container, &record).await? {
            pidfd = Some(running);
        }
        self.started(container, pidfd, at_ns)?;
        self.run_hooks(container, Point::Running).await?;
        turn.started(container).await;
        Ok(())
    }

    /// To the next place where it waits, or to its program; answers with the process.
    async fn resume(&self, container: &Container, record: &[u8]) -> Result<Option<OwnedFd>, Error> {
        let resume = Request::Resume { container: container.id };
        let resumed = container.pod.link()?.ask(resume, &[], START_LIMIT).await;
        let process = |descriptors: Vec<OwnedFd>| descriptors.into_iter().next();
        resumed.map(process).map_err(|error| explained(record, error))
    }

    /// Starts its process from the launch record; with `waits` it stands before its last steps. Answers with the process and
    /// the record that it walks.
    async fn launch(
        &self,
        container: &Rc<Container>,
        at_ns: i64,
        waits: bool,
    ) -> Result<(Option<OwnedFd>, Vec<u8>), Error> {
        let pod = &container.pod;
        let link = pod.link()?;
        let path = self.node.paths.launch(pod.id).join(container.id.to_string());
        let mut record = std::fs::read(&path).map_err(|error| failed("read", &path, &error))?;
        if waits {
            record = plan::with_waits(&record, container.record().adjusted.hooks.has_before_root())?;
        }
        record = plan::for_monitor(record, link.version())?;
        let launch = monitor::memfd(&record)?; // sealed: the child reads what was planned, whatever happens to the file
        let (log_path, spec, pid) = {
            let container = container.record();
            (container.log_path.clone(), container.spec.clone(), container.pid())
        };
        let log = match log_path.as_str() {
            "" => None,
            path => Some(self.node.host.paths.open_log(Path::new(path), &mut Mounts::default()).await?),
        };
        let entry = self.node.cgroups.entry(&container.cgroup()?)?;
        let mut descriptors: Vec<BorrowedFd> = vec![launch.as_fd()];
        descriptors.extend(log.as_ref().map(AsFd::as_fd));
        descriptors.extend(entry.into.as_ref().map(AsFd::as_fd));
        descriptors.extend(entry.oom_counter.as_ref().map(AsFd::as_fd));
        let host =
            if plan::needs_host(&record) { Some(std::fs::File::open("/proc/self/ns/mnt")?) } else { None };
        descriptors.extend(host.as_ref().map(AsFd::as_fd));
        let request = Request::Start {
            container: container.id,
            streams: Streams { stdin: spec.stdin, tty: spec.tty, log: log.is_some() },
            pid: self.pid_namespace(pod, pid)?,
            has_cgroup: entry.into.is_some(),
            has_oom_counter: entry.oom_counter.is_some(),
        };
        // The first is sent before the second begins, and that is done before anything is received.
        let (answer, committed) = smol::future::zip(link.ask(request, &descriptors, START_LIMIT), async {
            self.commit_running_ahead(container, at_ns)
        })
        .await;
        committed?;
        match answer {
            Ok(descriptors) => {
                let pidfd = descriptors.into_iter().next();
                let pid = pidfd.as_ref().and_then(|pidfd| monitor::pid_of(pidfd.as_fd()));
                self.adopt_container(container, pid.unwrap_or(0)).await?;
                Ok((pidfd, record))
            }
            Err(error @ LinkError::Silent { .. }) => {
                // Its process is killed with its cgroup; whose fault it was can only be guessed by asking again.
                self.require_answers(container).await?;
                Err(Error::new(Kind::DeadlineExceeded, error.to_string()))
            }
            Err(error) => Err(explained(&record, error)),
        }
    }

    /// The disk works while the process is made.
    fn commit_running_ahead(&self, container: &Container, at_ns: i64) -> Result<(), Error> {
        let mut record = container.record().clone();
        record.state = state::Container::Running { started_at_ns: at_ns };
        record.commit_ahead(&self.node.paths)?;
        container.ahead.set(Some(at_ns));
        Ok(())
    }

    /// An exit that overtakes the answer to the start: it ran first, and whoever listens is told so.
    pub(crate) fn run_first(&self, container: &Rc<Container>) -> Result<(), Error> {
        let is_created = container.record().state == state::Container::Created;
        match container.ahead.get() {
            Some(at_ns) if is_created => self.change_container(container, ContainerEvent::Started { at_ns }),
            _ => Ok(()),
        }
    }

    pub(crate) fn pid_namespace(&self, pod: &Pod, wanted: ContainerPid) -> Result<PidNamespace, Error> {
        let shared = pod.record().spec.namespaces.pid;
        match wanted {
            ContainerPid::Own => Ok(PidNamespace::New),
            ContainerPid::Pod | ContainerPid::Node => match (wanted, shared) {
                (ContainerPid::Pod, PodPid::Pod | PodPid::Node) => Ok(PidNamespace::Monitor),
                (ContainerPid::Node, PodPid::Node | PodPid::Container) => Ok(PidNamespace::Monitor),
                (_, _) => Err(Error::new(
                    Kind::InvalidArgument,
                    "config.linux.security_context.namespace_options.pid: does not go with the pod sandbox's",
                )),
            },
            ContainerPid::Target(target) => {
                let is_there = self
                    .table
                    .containers
                    .borrow()
                    .get(&target)
                    .is_some_and(|target| target.pod.id == pod.id && target.record().state.is_running());
                match is_there {
                    true => Ok(PidNamespace::Of(target)),
                    false => Err(Error::new(
                        Kind::FailedPrecondition,
                        format!("target container {target:.13} does not run in this pod sandbox"),
                    )),
                }
            }
        }
    }

    fn started(&self, container: &Rc<Container>, pidfd: Option<OwnedFd>, at_ns: i64) -> Result<(), Error> {
        let pid = pidfd.and_then(|pidfd| monitor::pid_of(pidfd.as_fd())).unwrap_or(0);
        log::info!("container started"; pod = container.pod.id, ctr = container.id, pid = pid);
        if !matches!(container.record().state, state::Container::Created) {
            return Ok(()); // its exit has overtaken the answer
        }
        // Of a program that has ended already the kernel tells no pid: then the one of its start is kept.
        if pid != 0 {
            container.set_pid(pid);
        }
        self.write_started(container, at_ns, pid);
        self.change_container(container, ContainerEvent::Started { at_ns })
    }

    async fn not_started(self: &Rc<Self>, container: &Rc<Container>, error: &Error) {
        log::warn!("container not started"; pod = container.pod.id, ctr = container.id, error = error);
        let how = How::NotStarted { message: error.to_string() };
        self.end(container, self.node.kernel.clock.now_ns(), how);
        if let Err(error) = self.end_processes(container).await {
            log::error!("cgroup of a container that did not start"; ctr = container.id, error = error);
        }
    }

    /// For the next daemon: when it was started and its pid. Not synced: after a reboot it means nothing.
    fn write_started(&self, container: &Rc<Container>, at_ns: i64, pid: i32) {
        let path = self.node.paths.started(container.pod.id).join(container.id.to_string());
        if let Err(error) = std::fs::write(&path, format!("{at_ns} {pid}")) {
            log::warn!("the start time would not survive a restart"; ctr = container.id, error = failed("write", &path, &error));
        }
    }
}

/// A start that failed, in words.
fn explained(record: &[u8], error: LinkError) -> Error {
    match error.operation() {
        Some((index, errno)) => {
            let kind = match plan::is_fault_of_image(record, index, errno) {
                true => Kind::InvalidArgument,
                false => Kind::Unknown,
            };
            Error::new(kind, plan::explain(record, index, errno))
        }
        None => Error::new(Kind::Unknown, error.to_string()),
    }
}
