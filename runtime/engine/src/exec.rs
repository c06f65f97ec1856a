//! ExecSync: one command in a running container, its output and its exit code.
//!
//! The output comes straight from the command's pipes to this task; the monitor only clones, reaps and reports. Each
//! running exec has a cgroup of its own below the container's, so that a timeout ends all processes that it started
//! (CRI 2.20). Processes that a command left running when it ended in time stay in that cgroup until the
//! container ends; a cgroup that is empty is used by a later exec.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_sandbox::cgroup::{CgroupPath, Entry};
use coracle_sandbox::{Exit, Failure, Request, monitor, plan};
use nix::fcntl::OFlag;
use smol::channel::Receiver;

use crate::link::LinkError;
use crate::output::Output;
use crate::{Container, Pod, Pods};

/// How long output is still waited for after the command has ended: a child it left behind may hold the pipes open.
const DRAIN_LIMIT: Duration = Duration::from_millis(100);

/// Longest time from clone to exec.
const START_LIMIT: Duration = Duration::from_secs(30);

/// What a command did.
pub struct ExecOutput {
    /// What it wrote to stdout, within the bound.
    pub stdout: Output,
    /// What it wrote to stderr, within the bound.
    pub stderr: Output,
    /// 0 to 255; 128 + signal.
    pub exit_code: i32,
}

/// One exec under way. Dropping it, with its caller or after its end, kills what must not live on and gives back its
/// number and its cgroup.
pub(crate) struct Running {
    pods: Rc<Pods>,
    container: Rc<Container>,
    number: u32,
    /// In the name of its cgroup: that of an earlier exec whose cgroup is used again, or its own.
    cgroup_number: u32,
    cgroup: CgroupPath,
    /// Of a cgroup that is used again, until the start takes it.
    entry: RefCell<Option<Entry>>,
    has_ended: bool,
}

impl Pod {
    pub(crate) fn exec_exited(&self, exec: u32, exit: Exit) {
        let waiting = self.execs.borrow_mut().remove(&exec);
        if let Some(sender) = waiting {
            let _ = sender.try_send(exit); // nobody waits for it any more
        }
    }
}

impl Pods {
    /// Runs `command` in a container; `timeout` zero: without limit. Dropping the future kills the command.
    ///
    /// # Errors
    /// `FailedPrecondition` where it does not run, `DeadlineExceeded` after `timeout`, `ResourceExhausted` where too much
    /// output waits; else what the start of the command failed at.
    pub async fn exec_sync(
        self: &Rc<Self>,
        container: Rc<Container>,
        command: Vec<String>,
        timeout: Duration,
    ) -> Result<ExecOutput, Error> {
        let title = container.title();
        let mut running = Running::new(self, container)?;
        let limit = if timeout.is_zero() { Duration::MAX } else { timeout };
        let result = match reactor::deadline(limit, self.exec(&running, command)).await {
            Ok(Ok(output)) => {
                running.has_ended();
                Ok(output)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => {
                running.end().await;
                // The text is what kubelets and critest know from other runtimes.
                Err(Error::new(Kind::DeadlineExceeded, format!("timeout {}s exceeded", timeout.as_secs())))
            }
        };
        result.map_err(|error| error.context(format!("exec in {title}")))
    }

    async fn exec(&self, running: &Running, command: Vec<String>) -> Result<ExecOutput, Error> {
        let exited = running.exited();
        let (out_read, out_write) = pipe()?;
        let (err_read, err_write) = pipe()?;
        let null = std::fs::File::open("/dev/null")?;
        self.start_exec(running, command, [null.as_fd(), out_write.as_fd(), err_write.as_fd()], false)
            .await?;
        // The command's own copies are the only ones now: their end is its end.
        drop((out_write, err_write));
        let share = self.exec_output.share();
        let (mut stdout, mut stderr) = (Output::default(), Output::default());
        let gone = |_| Error::new(Kind::Unknown, "the pod's monitor is gone");
        let exit = Cell::new(None);
        let reading = async {
            let streams = (stdout.read_to_end(&out_read, &share), stderr.read_to_end(&err_read, &share));
            smol::future::try_zip(streams.0, streams.1).await.map(drop)
        };
        // Whoever else holds the pipes is not waited for longer than that. What was not read because there was no room
        // for it may be the command's own.
        let drained = async {
            exit.set(Some(exited.recv().await.map_err(gone)?));
            reactor::sleep(DRAIN_LIMIT).await;
            while share.has_waited() {
                reactor::sleep(DRAIN_LIMIT).await;
            }
            Ok(())
        };
        smol::future::or(reading, drained).await?;
        if stdout.is_cut() || stderr.is_cut() {
            let id = running.container_id();
            log::warn!("exec output is cut"; ctr = id, stdout = stdout.kept_bytes(), stderr = stderr.kept_bytes());
        }
        let exit: Exit = match exit.get() {
            Some(exit) => exit,
            None => exited.recv().await.map_err(gone)?,
        };
        Ok(ExecOutput { stdout, stderr, exit_code: exit.code() })
    }

    /// The process with what confines the container's: what its launch record holds, whatever has become of a profile
    /// since.
    fn confined(&self, container: &Container, process: plan::Process) -> Result<plan::Process, Error> {
        let path = self.node.paths.launch(container.pod.id).join(container.id.to_string());
        let record =
            std::fs::read(&path).map_err(|error| coracle_base::error::failed("read", &path, &error))?;
        let security = &container.record().spec.security;
        let plan::Confinement { seccomp, apparmor, selinux } = plan::confinement_of(&record);
        if seccomp.is_none() && (security.wants_default_seccomp || !security.localhost_seccomp.is_empty()) {
            let text = format!("{}: it holds no seccomp filter", path.display());
            return Err(Error::new(Kind::Internal, text));
        }
        Ok(plan::Process { seccomp, apparmor, selinux, ..process })
    }

    /// Starts a command; answers with the pidfd, then with `tty` the terminal's master side, which takes the place of
    /// all three streams.
    pub(crate) async fn start_exec(
        &self,
        running: &Running,
        command: Vec<String>,
        streams: [BorrowedFd<'_>; 3],
        tty: bool,
    ) -> Result<Vec<OwnedFd>, Error> {
        let container = &running.container;
        let link = container.pod.link()?;
        let entry = match running.entry.take() {
            Some(entry) => entry,
            None => self.node.cgroups.make_exec(&container.cgroup()?, running.cgroup_number)?,
        };
        let mut process = container.record().process.clone();
        let rlimits = container.record().adjusted.rlimits.clone();
        process.arguments = command;
        if tty && !process.environment.iter().any(|variable| variable.starts_with(b"TERM=")) {
            process.environment.push(b"TERM=xterm".to_vec());
        }
        let mut process = process.launch(tty);
        for (resource, soft, hard) in rlimits {
            process.limits.retain(|limit| limit.resource != resource);
            process.limits.push(plan::Limit { resource, soft, hard });
        }
        let process = self.confined(container, process)?;
        let record = plan::exec(&plan::ExecPlan {
            cgroup_joins: entry.join_files,
            process,
            user_namespace: container.pod.record().spec.user_mappings(),
        })?;
        let record = plan::for_monitor(record, link.version())?;
        let memfd = monitor::memfd(&record)?;
        let mut descriptors = vec![memfd.as_fd()];
        descriptors.extend(streams);
        descriptors.extend(entry.into.as_ref().map(AsFd::as_fd));
        let request =
            Request::Exec { exec: running.number, container: container.id, has_cgroup: entry.into.is_some() };
        match link.ask(request, &descriptors, START_LIMIT).await {
            Ok(descriptors) => Ok(descriptors),
            Err(LinkError::Failed(Failure::Operation { index, errno })) => {
                Err(Error::new(Kind::Unknown, plan::explain(&record, index, errno)))
            }
            Err(LinkError::Failed(Failure::Refused { errno })) if errno == nix::libc::ESRCH => {
                Err(Error::new(Kind::FailedPrecondition, "it is not running"))
            }
            Err(error) => Err(Error::new(Kind::Unknown, error.to_string())),
        }
    }
}

impl Running {
    /// Where the end of its process is told.
    pub(crate) fn exited(&self) -> Receiver<Exit> {
        let (sender, exited) = smol::channel::bounded(1);
        self.container.pod.execs.borrow_mut().insert(self.number, sender);
        exited
    }

    /// Of the container it runs in.
    pub(crate) fn container_id(&self) -> coracle_sandbox::ContainerId {
        self.container.id
    }

    /// The process has ended: what it left running may live on.
    pub(crate) fn has_ended(&mut self) {
        self.has_ended = true;
    }

    pub(crate) fn new(pods: &Rc<Pods>, container: Rc<Container>) -> Result<Self, Error> {
        if !container.record().state.is_running() {
            return Err(Error::new(
                Kind::FailedPrecondition,
                format!("exec in {}: it is not running", container.title()),
            ));
        }
        let number = container.pod.last_exec.get().wrapping_add(1);
        container.pod.last_exec.set(number);
        let path = container.cgroup()?;
        // A command may have left processes running: then the cgroup stays theirs until the container ends.
        let reused = container.spare_exec_cgroup.take().and_then(|spare| {
            let entry = pods.node.cgroups.reuse_exec(&path, spare).ok()??;
            Some((spare, entry))
        });
        let (cgroup_number, entry) = match reused {
            Some((spare, entry)) => (spare, Some(entry)),
            None => (number, None),
        };
        let (pods, cgroup, entry) = (Rc::clone(pods), path.exec(cgroup_number), RefCell::new(entry));
        Ok(Self { pods, container, number, cgroup_number, cgroup, entry, has_ended: false })
    }

    /// Kills the whole tree and waits until it is gone.
    async fn end(&mut self) {
        end_tree(&self.pods, &self.container, &self.cgroup).await;
        self.has_ended = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.container.pod.execs.borrow_mut().remove(&self.number);
        if self.has_ended {
            // One is kept for the next exec: making and removing a cgroup costs a tenth of a probe's time.
            if let Some(other) = self.container.spare_exec_cgroup.replace(Some(self.cgroup_number))
                && let Ok(path) = self.container.cgroup()
            {
                // Where a child lives on in it, it goes with the container.
                let _ = self.pods.node.cgroups.unmake_exec(&path.exec(other));
            }
            return;
        }
        if !reactor::is_running() {
            // The daemon is stopping: the command ends with its pipes, at the latest with its container.
            return;
        }
        let (pods, container, cgroup) =
            (Rc::clone(&self.pods), Rc::clone(&self.container), self.cgroup.clone());
        reactor::spawn(async move { end_tree(&pods, &container, &cgroup).await }).detach();
    }
}

async fn end_tree(pods: &Pods, container: &Container, cgroup: &CgroupPath) {
    let killed = pods.node.cgroups.kill(cgroup).map_err(Error::from);
    let cleared = match killed {
        Ok(()) => pods.clear_cgroup(cgroup).await,
        Err(error) => Err(error),
    };
    if let Err(error) = cleared {
        log::error!("exec not ended"; pod = container.pod.id, ctr = container.id, error = error);
    }
}

/// A pipe whose read end is watched.
pub(crate) fn pipe() -> Result<(Watched, OwnedFd), Error> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    Ok((Watched::new(read)?, write))
}
