//! The start of a container: from its plan to the running program. If NRI plugins or hooks follow
//! the start, the process waits (`Op::Wait`) until they have been called.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::log;
use coracle_sandbox::plan::Waits;
use coracle_sandbox::{CONTAINERS_MAX, PidNamespace, Request, Streams, disk, monitor, plan};
use nix::errno::Errno;

use crate::hooks::Point;
use crate::lifecycle::Event as Hook;
use crate::link::{ASK_LIMIT, Link, LinkError};
use crate::operations::Key;
use crate::record::DurableRecord;
use crate::spec::{ContainerPid, PodPid};
use crate::state::{self, ContainerEvent, How};
use crate::{Container, Pod};

/// Time limit from clone to exec: the image may be on slow flash, a volume on a slow network. Together with
/// the check of blocked paths and the end of the process, the start takes less than the kubelet's limit of
/// two minutes.
const START_LIMIT: Duration = Duration::from_secs(90);

impl Container {
    /// StartContainer: changes the state from Created to Running, or to Exited with the reason of the
    /// failure.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container is not in state Created or its pod sandbox is not ready;
    /// `InvalidArgument` for an error in the image; otherwise the error of the start, after which the
    /// container has exited.
    pub async fn start(self: &Rc<Self>) -> Result<(), Error> {
        let (container, key) = (Rc::clone(self), Key::Start(self.id));
        let work = async move {
            let _operation = container.operation.lock().await;
            container.pod.require_ready()?;
            container.require_known()?;
            let at_ns = container.node().kernel.clock.now_ns();
            // A container that is not in state Created is refused before anything is started.
            let allowed = container.record().state.on(ContainerEvent::Started { at_ns });
            allowed.map_err(|refused| {
                Error::new(Kind::FailedPrecondition, format!("{}: {refused}", container.title()))
            })?;
            // Nothing was started yet, so the request may be repeated.
            container.require_answers().await.map_err(|error| error.context(container.title()))?;
            if let Err(error) = container.run(at_ns).await {
                container.not_started(&error).await;
                return Err(error.context(container.title()).logged());
            }
            Ok(())
        };
        self.engine().operations.share(key, work).await
    }

    /// Creates the container's process and lets it run. If NRI plugins or hooks follow the start, the process waits until they
    /// have been called, and they are notified that the program is running.
    async fn run(self: &Rc<Self>, at_ns: i64) -> Result<(), Error> {
        let waits = self.waits();
        let (mut pidfd, record) = self.launch(at_ns, waits).await?;
        if waits == Waits::Never {
            return self.started(pidfd, at_ns);
        }
        if let Some(pidfd) = &pidfd {
            self.set_pid(monitor::pid_of(pidfd.as_fd()).unwrap_or(0));
        }
        if waits == Waits::BeforeRootAndUser {
            self.run_hooks(Point::Creating).await?;
            self.resume(&record).await?;
        }
        let turn = self.engine().hooks.begin(&self.pod).await;
        turn.start(self).await?;
        self.run_hooks(Point::Created).await?;
        // In a shared PID namespace, the running process differs from the one that waited.
        if let Some(running) = self.resume(&record).await? {
            pidfd = Some(running);
        }
        self.started(pidfd, at_ns)?;
        self.run_hooks(Point::Running).await?;
        turn.started(self).await;
        Ok(())
    }

    /// The points at which the hooks of the container and the plugins that are connected now have to be called.
    fn waits(&self) -> Waits {
        let hooks = &self.record().adjusted.hooks;
        match hooks.has_before_root() {
            true => Waits::BeforeRootAndUser,
            false if !hooks.is_empty() || self.engine().hooks.wants(Hook::StartContainer) => {
                Waits::BeforeUser
            }
            false => Waits::Never,
        }
    }

    /// Lets the waiting process continue to its next wait or to its program; returns its pidfd.
    async fn resume(&self, record: &[u8]) -> Result<Option<OwnedFd>, Error> {
        let resume = Request::Resume { container: self.id };
        let resumed = self.pod.link()?.ask(resume, &[], START_LIMIT).await;
        let process = |descriptors: Vec<OwnedFd>| descriptors.into_iter().next();
        resumed.map(process).map_err(|error| explained(record, error))
    }

    /// Compiles the launch record and starts the container's process from it. Returns the pidfd and the encoded record.
    async fn launch(&self, at_ns: i64, waits: Waits) -> Result<(Option<OwnedFd>, Vec<u8>), Error> {
        let pod = &self.pod;
        let link = pod.link()?;
        pod.forget_exited(&link).await;
        self.remove_volatile_mark()?;
        let (spec, pid, main) = {
            let container = self.record();
            let main = container.plan(container.process.clone(), self.confinement()?, container.spec.tty);
            (container.spec.clone(), container.pid(), main)
        };
        let record = plan::container(&self.plan()?, &main, link.version(), waits)?;
        let launch = monitor::memfd(&record.bytes)?;
        let log = self.open_log().await?;
        let entry = self.node().cgroups.entry(&self.cgroup()?)?;
        let mut descriptors: Vec<BorrowedFd> = vec![launch.as_fd()];
        descriptors.extend(log.as_ref().map(AsFd::as_fd));
        descriptors.extend(entry.into.as_ref().map(AsFd::as_fd));
        descriptors.extend(entry.oom_counter.as_ref().map(AsFd::as_fd));
        let host =
            if record.needs_host { Some(disk::open_device(Path::new("/proc/self/ns/mnt"))?) } else { None };
        descriptors.extend(host.as_ref().map(AsFd::as_fd));
        let request = Request::Start {
            container: self.id,
            streams: Streams { stdin: spec.stdin, tty: spec.tty, log: log.is_some() },
            pid: pod.pid_namespace(pid)?,
            has_cgroup: entry.into.is_some(),
            has_oom_counter: entry.oom_counter.is_some(),
        };
        // The start is sent before the commit begins, and the commit completes before the answer is received.
        let (answer, committed) = smol::future::zip(link.ask(request, &descriptors, START_LIMIT), async {
            self.commit_running_in_advance(at_ns)
        })
        .await;
        committed?;
        match answer {
            Ok(descriptors) => {
                let pidfd = descriptors.into_iter().next();
                let pid = pidfd.as_ref().and_then(|pidfd| monitor::pid_of(pidfd.as_fd()));
                self.adopt(pid.unwrap_or(0)).await?;
                Ok((pidfd, record.bytes))
            }
            Err(error @ LinkError::Silent { .. }) => {
                // Its process is killed with its cgroup; another access to the host paths shows whether one
                // of them blocked.
                self.require_answers().await?;
                Err(Error::new(Kind::DeadlineExceeded, error.to_string()))
            }
            Err(error) => Err(explained(&record.bytes, error)),
        }
    }

    /// Removes the mark that the kernel leaves in the work directory of an overlay that was mounted with `volatile`: it refuses
    /// to mount the overlay again, but a start that failed after the mount may be tried again. The writable layer has nothing
    /// yet that could have been lost.
    fn remove_volatile_mark(&self) -> Result<(), Error> {
        let work = self.node().paths.container(self.pod.id, self.id).join("work");
        let mark = work.join("work/incompat");
        match disk::remove_dir_all(&mark) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(failed("remove", &mark, &error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Commits the state Running while the process is created, so that the disk and the monitor work
    /// concurrently.
    fn commit_running_in_advance(&self, at_ns: i64) -> Result<(), Error> {
        let mut record = self.record().clone();
        record.state = state::Container::Running { started_at_ns: at_ns, stop: None };
        record.commit_in_advance(self.node())?;
        if let state::Container::Created { ahead_ns, .. } = &mut self.record.borrow_mut().state {
            *ahead_ns = Some(at_ns);
        }
        Ok(())
    }

    /// Handles an exit that arrives before the answer to the start: the container is first recorded and
    /// published as running, then as exited.
    pub(crate) fn run_first(&self) -> Result<(), Error> {
        let ahead_ns = self.record().state.ahead_ns();
        ahead_ns.map_or(Ok(()), |at_ns| self.change(ContainerEvent::Started { at_ns }))
    }

    fn started(&self, pidfd: Option<OwnedFd>, at_ns: i64) -> Result<(), Error> {
        let pid = pidfd.and_then(|pidfd| monitor::pid_of(pidfd.as_fd())).unwrap_or(0);
        log::info!("container started"; pod = self.pod.id, ctr = self.id,
            name = self.pod.name(), container = self.name(), pid = pid);
        if !self.record().state.is_created() {
            return Ok(()); // its exit has overtaken the answer
        }
        self.forget_plan();
        // The kernel reports no PID of a program that has ended; the one of its start is then kept.
        if pid != 0 {
            self.set_pid(pid);
        }
        self.change(ContainerEvent::Started { at_ns })
    }

    async fn not_started(self: &Rc<Self>, error: &Error) {
        log::warn!("container not started"; pod = self.pod.id, ctr = self.id,
            name = self.pod.name(), container = self.name(), image = self.image(), error = error);
        // Before clients are notified of its end.
        if let Ok(cgroup) = self.cgroup()
            && let Err(error) = self.node().cgroups.kill(&cgroup)
        {
            log::warn!("cannot kill a container that did not start, will retry"; ctr = self.id, error = error);
        }
        let how = How::NotStarted { message: error.to_string() };
        self.end(self.node().kernel.clock.now_ns(), how);
        self.end_or_retry().await;
    }
}

impl Pod {
    /// Removes the exited containers of a pod from the table of its monitor if the table may be full. The pod's clients can still
    /// list them, so each exit is recorded first: the exit record that the monitor removes may be the only one.
    async fn forget_exited(&self, link: &Link) {
        let mut entries = self.containers();
        let clean_up = |container: &Container| container.record().state.clean_up().unwrap_or_default();
        entries.retain(|container| !clean_up(container).is_forgotten);
        // The container that is being started is one of them, and has no entry yet.
        if entries.len() <= CONTAINERS_MAX {
            return;
        }
        for container in entries.iter().filter(|container| clean_up(container).is_cleared) {
            let recorded = container.record().commit(self.node());
            if let Err(error) = recorded {
                log::warn!("cannot record the exit of a container, its monitor keeps it"; pod = self.id, ctr = container.id, error = error);
                continue;
            }
            let forgotten = link.ask(Request::Forget { container: container.id }, &[], ASK_LIMIT).await;
            container.update_end(|clean_up| clean_up.is_forgotten = forgotten.is_ok());
        }
    }

    pub(crate) fn pid_namespace(&self, wanted: ContainerPid) -> Result<PidNamespace, Error> {
        let shared = self.record().spec.namespaces.pid;
        match wanted {
            ContainerPid::Own => Ok(PidNamespace::New),
            ContainerPid::Pod | ContainerPid::Node => match (wanted, shared) {
                // A request that says it in the pod alone: POD is what a missing field means, too.
                (ContainerPid::Pod, PodPid::Container) => Ok(PidNamespace::New),
                (ContainerPid::Pod, PodPid::Pod | PodPid::Node) => Ok(PidNamespace::Monitor),
                (ContainerPid::Node, PodPid::Node | PodPid::Container) => Ok(PidNamespace::Monitor),
                (_, _) => Err(Error::new(
                    Kind::InvalidArgument,
                    "config.linux.security_context.namespace_options.pid: is incompatible with the PID mode of the pod sandbox",
                )),
            },
            ContainerPid::Target(target) => {
                let is_there =
                    self.container(target).is_some_and(|target| target.record().state.is_running());
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
}

/// The error of a failed start, with the operation that failed.
fn explained(record: &[u8], error: LinkError) -> Error {
    match error.operation() {
        Some((index, errno)) => {
            let kind = match plan::is_fault_of_image(record, index, errno) {
                true => Kind::InvalidArgument,
                false => Kind::Unknown,
            };
            Error::new(kind, plan::explain(record, index, errno))
        }
        None if error.is_refusal(Errno::EAGAIN) => {
            error.exhausted(&format!("{CONTAINERS_MAX} containers that run"))
        }
        None => Error::new(Kind::Unknown, error.to_string()),
    }
}
