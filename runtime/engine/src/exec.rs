//! ExecSync: runs one command in a running container and returns its output and its exit code.
//!
//! The output is read directly from the command's pipes; the monitor only clones, reaps and reports. Each
//! running exec has a cgroup below the container's, so that a timeout ends all processes that it started (CRI
//! 2.20). Processes that a command left behind stay in that cgroup until the container exits; an empty cgroup
//! is reused by a later exec.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor::{self, Watched};
use coracle_base::{log, time};
use coracle_sandbox::cgroup::{CgroupPath, Entry};
use coracle_sandbox::{EXECS_MAX, Exit, Failure, Request, monitor, plan, process};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use smol::channel::Receiver;

use crate::Container;
use crate::link::LinkError;
use crate::output::Output;
use crate::pod::SpareCgroup;

/// Time limit from clone to exec.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Time for which the output of a command is not read unless it ends. A command that fills the pipe (64 KiB) meanwhile
/// is blocked until then.
const UNREAD_LIMIT: Duration = Duration::from_millis(5);

/// Number of times that the clean-up after a command lets other tasks run first: those that send the answer.
const YIELDS_BEFORE_CLEANUP: u32 = 3;

/// The result of a command.
pub struct ExecOutput {
    /// Standard output of the program, up to the limit.
    pub stdout: Output,
    /// Standard error of the program, up to the limit.
    pub stderr: Output,
    /// Exit code from 0 to 255; 128 + signal number if a signal ended the program.
    pub exit_code: i32,
}

/// How the time of a command ended.
enum Ran {
    /// The command has ended, and all processes have closed its output.
    Output(ExecOutput),
    /// The command is still running at the time limit.
    TooLong,
    /// The command has ended; at the time limit another process holds its output open.
    Held,
}

/// A running exec. Dropping the value kills remaining processes and releases the exec's number and cgroup.
pub(crate) struct Running {
    container: Rc<Container>,
    number: u32,
    /// The cgroup of the exec: new, or reused from an earlier exec.
    cgroup: CgroupPath,
    /// The descriptor of a reused cgroup, until the process is started.
    entry: Cell<Option<Entry>>,
    /// The descriptor of its first process, until it has ended: another program may move the process out of the cgroup.
    process: Cell<Option<OwnedFd>>,
    /// The pipes of a command that has ended, which are closed after the answer.
    pipes: Cell<Option<[Watched; 2]>>,
    has_ended: bool,
}

impl Container {
    /// Runs `command` in a container; a zero `timeout` means no limit. Dropping the future kills the command.
    ///
    /// Processes that the command leaves running may hold its output open. As with containerd, their output
    /// is part of the answer: the call waits until the last process has closed the output, and fails after `timeout`;
    /// these processes continue.
    ///
    /// # Errors
    /// `FailedPrecondition` if the container is not running; `DeadlineExceeded` after `timeout`;
    /// `ResourceExhausted` if too much output of all execs is buffered; otherwise the error of the command's
    /// start.
    pub async fn exec_sync(
        self: &Rc<Self>,
        command: Vec<String>,
        timeout: Duration,
    ) -> Result<ExecOutput, Error> {
        let title = self.title();
        let mut running = Running::new(Rc::clone(self))?;
        let limit = if timeout.is_zero() { Duration::MAX } else { timeout };
        let result = match self.exec(&running, command, limit).await {
            Ok(Ran::Output(output)) => {
                running.has_ended();
                Ok(output)
            }
            Err(error) => Err(error),
            // The texts are those of other runtimes, which the kubelet and critest expect.
            Ok(Ran::TooLong) => {
                running.end().await;
                Err(Error::new(Kind::DeadlineExceeded, format!("timeout {}s exceeded", timeout.as_secs())))
            }
            Ok(Ran::Held) => {
                running.has_ended();
                let text = format!(
                    "failed to drain exec process io in {}s because io is still held by other processes",
                    timeout.as_secs()
                );
                Err(Error::new(Kind::DeadlineExceeded, text))
            }
        };
        result.map_err(|error| error.context(format!("exec in {title}")))
    }

    /// Runs a command for at most `limit`.
    async fn exec(&self, running: &Running, command: Vec<String>, limit: Duration) -> Result<Ran, Error> {
        let begun = time::now();
        let exited = running.exited();
        let (out_read, out_write) = pipe()?;
        let (err_read, err_write) = pipe()?;
        let null = self.node().monitors.null(&self.node().paths)?;
        let streams = [null.as_fd(), out_write.as_fd(), err_write.as_fd()];
        match reactor::deadline(limit, self.start_exec(running, command, streams, false)).await {
            Ok(started) => drop(started?),
            Err(_) => return Ok(Ran::TooLong),
        }
        // Now only the command has the pipes open, so its end is their end of file.
        drop((out_write, err_write, null));
        let share = self.engine().exec_output.share();
        let (mut stdout, mut stderr) = (Output::default(), Output::default());
        let gone = |_| Error::new(Kind::Unknown, "the pod's monitor is gone");
        let left = || limit.saturating_sub(time::now() - begun);
        // The output of most probes is read once, after their end: until then it wakes no task.
        let exit = match reactor::deadline(left().min(UNREAD_LIMIT), exited.recv()).await {
            Ok(exit) => Some(exit.map_err(gone)?),
            Err(_) => None,
        };
        let exit = Cell::new(exit);
        let reading = async {
            let streams = (stdout.read_to_end(&out_read, &share), stderr.read_to_end(&err_read, &share));
            smol::future::try_zip(streams.0, streams.1).await.map(drop)
        };
        // Beside the reading, so that the end of the monitor is noticed at once.
        let ended = async {
            if exit.get().is_none() {
                exit.set(Some(exited.recv().await.map_err(gone)?));
            }
            std::future::pending().await
        };
        match reactor::deadline(left(), smol::future::or(reading, ended)).await {
            Ok(read) => read?,
            Err(_) if exit.get().is_none() => return Ok(Ran::TooLong),
            Err(_) => return Ok(Ran::Held),
        }
        let exit: Exit = match exit.get() {
            Some(exit) => exit,
            // It has closed its output and is still running.
            None => match reactor::deadline(left(), exited.recv()).await {
                Ok(exit) => exit.map_err(gone)?,
                Err(_) => return Ok(Ran::TooLong),
            },
        };
        if stdout.is_cut() || stderr.is_cut() {
            let id = running.container_id();
            log::warn!("exec output truncated"; ctr = id, stdout = stdout.kept_bytes(), stderr = stderr.kept_bytes());
        }
        running.pipes.set(Some([out_read, err_read]));
        Ok(Ran::Output(ExecOutput { stdout, stderr, exit_code: exit.code() }))
    }

    /// Starts a command; returns, with `tty`, the terminal's master side, which replaces all three streams.
    pub(crate) async fn start_exec(
        &self,
        running: &Running,
        command: Vec<String>,
        streams: [BorrowedFd<'_>; 3],
        tty: bool,
    ) -> Result<Option<OwnedFd>, Error> {
        let link = self.pod.link()?;
        let entry = match running.entry.take() {
            Some(entry) => entry,
            None => self.node().cgroups.make_exec(&self.cgroup()?, &running.cgroup)?,
        };
        let mut process = self.record().process.clone();
        process.arguments = command;
        if tty && !process.environment.iter().any(|variable| variable.starts_with(b"TERM=")) {
            process.environment.push(b"TERM=xterm".to_vec());
        }
        let process = self.record().plan(process, self.confinement()?, tty);
        let plan = plan::ExecPlan {
            cgroup_joins: entry.join_files,
            process,
            user_namespace: self.pod.record().spec.user_mappings(),
        };
        let record = plan::exec(&plan, link.version())?;
        let memfd = monitor::memfd(&record)?;
        let mut descriptors = vec![memfd.as_fd()];
        descriptors.extend(streams);
        descriptors.extend(entry.into.as_ref().map(AsFd::as_fd));
        let request =
            Request::Exec { exec: running.number, container: self.id, has_cgroup: entry.into.is_some() };
        match link.ask(request, &descriptors, START_LIMIT).await {
            Ok(descriptors) => {
                let mut descriptors = descriptors.into_iter();
                running.process.set(descriptors.next());
                Ok(descriptors.next())
            }
            Err(LinkError::Failed(Failure::Operation { index, errno })) => {
                Err(Error::new(Kind::Unknown, plan::explain(&record, index, errno)))
            }
            Err(error) if error.is_refusal(Errno::ESRCH) => {
                Err(Error::new(Kind::FailedPrecondition, "it is not running"))
            }
            Err(error) if error.is_refusal(Errno::EAGAIN) => {
                Err(error.exhausted(&format!("{EXECS_MAX} concurrent execs")))
            }
            Err(error) => Err(Error::new(Kind::Unknown, error.to_string())),
        }
    }
}

impl Running {
    /// A channel that receives the exit of the exec's process.
    pub(crate) fn exited(&self) -> Receiver<Exit> {
        let (sender, exited) = smol::channel::bounded(1);
        self.container.pod.connection.execs.waiting.borrow_mut().insert(self.number, sender);
        exited
    }

    /// ID of the container in which the exec runs.
    pub(crate) fn container_id(&self) -> coracle_sandbox::ContainerId {
        self.container.id
    }

    /// Marks the exec's process as ended; its remaining child processes continue.
    pub(crate) fn has_ended(&mut self) {
        self.has_ended = true;
        self.process.set(None);
    }

    pub(crate) fn new(container: Rc<Container>) -> Result<Self, Error> {
        if !container.record().state.is_running() {
            return Err(Error::new(
                Kind::FailedPrecondition,
                format!("exec in {}: it is not running", container.title()),
            ));
        }
        let number = container.pod.connection.execs.last.get().wrapping_add(1);
        container.pod.connection.execs.last.set(number);
        let path = container.cgroup()?;
        let reused = container.cgroup_use.spare_exec_cgroup.take().and_then(|spare| {
            let cgroups = &container.node().cgroups;
            if !spare.was_empty && !matches!(cgroups.is_populated(&spare.path), Ok(false)) {
                return None;
            }
            let entry = cgroups.reuse_exec(&path, &spare.path).ok()??;
            Some((spare.path, Some(entry)))
        });
        let (cgroup, entry) = reused.unwrap_or_else(|| (path.exec(number), None));
        let entry = Cell::new(entry);
        let (process, pipes) = (Cell::new(None), Cell::new(None));
        Ok(Self { container, number, cgroup, entry, process, pipes, has_ended: false })
    }

    /// Kills all processes of the exec and waits until they have ended.
    async fn end(&mut self) {
        end_tree(&self.container, &self.cgroup, self.process.take()).await;
        self.has_ended = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.container.pod.connection.execs.waiting.borrow_mut().remove(&self.number);
        if !reactor::is_running() {
            // The daemon is shutting down: the command ends with its pipes, or with its container.
            return;
        }
        let (container, cgroup) = (Rc::clone(&self.container), self.cgroup.clone());
        if self.has_ended {
            let pipes = self.pipes.take();
            reactor::spawn(async move {
                for _ in 0..YIELDS_BEFORE_CLEANUP {
                    reactor::yield_now().await;
                }
                drop(pipes);
                keep_cgroup(&container, cgroup);
            })
            .detach();
            return;
        }
        let process = self.process.take();
        reactor::spawn(async move { end_tree(&container, &cgroup, process).await }).detach();
    }
}

/// Keeps the cgroup of a command that has ended for the next exec: creating and removing a cgroup takes a tenth of a
/// probe's time. Whether processes remain in it is checked now, and if so, again at the next exec; it is not reused
/// while they remain, and is removed when the container exits.
fn keep_cgroup(container: &Container, path: CgroupPath) {
    let cgroups = &container.node().cgroups;
    let was_empty = matches!(cgroups.is_populated(&path), Ok(false));
    let spare = SpareCgroup { path, was_empty };
    if let Some(other) = container.cgroup_use.spare_exec_cgroup.replace(Some(spare)) {
        // If a child process remains, the cgroup is removed with the container.
        let _ = cgroups.unmake_exec(&other.path);
    }
}

async fn end_tree(container: &Container, cgroup: &CgroupPath, process: Option<OwnedFd>) {
    let killed = process.map_or(Ok(()), |process| process::kill_by(process.as_fd()));
    if let Err(error) = killed.map_err(Error::from).and(container.node().kill_cgroup(cgroup).await) {
        log::error!("cannot end an exec"; pod = container.pod.id, ctr = container.id, error = error);
    }
}

/// Creates a pipe whose read end can be waited for.
pub(crate) fn pipe() -> Result<(Watched, OwnedFd), Error> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok((Watched::unregistered(read), write))
}
