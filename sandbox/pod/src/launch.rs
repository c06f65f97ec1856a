//! The input of a cloned child, and its path from clone to the launch record: it resets inherited state, arranges its
//! descriptors, and executes the record (`child`).
//!
//! After the reset the child is not dumpable, so that container processes without privileges on the node cannot inspect
//! it. It has no descriptor of the monitor, no blocked or ignored signal, and its own session.

use coracle_sys::mark::Mark;
use coracle_sys::memory::Mapping;
use coracle_sys::process::{self, Control};
use coracle_sys::sched;
use coracle_sys::sibling::{self, Sibling, SiblingPid};
use coracle_sys::{Errno, Fd, FdRef, fs};

use crate::child::{self, DAMAGED, Failure, Walker};
use crate::keyring::{self, KEYRING_NAME_BYTES};
use crate::mounts::{Identity, SharedProc};
use crate::namespaces::{self, KINDS, MOUNTS, OwnNamespaces};

/// The namespaces that a child runs in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Destination<'a> {
    /// A container: the process runs in namespaces that its record creates.
    New {
        /// The host's mount namespace, if the record needs it: for `OpenTree` with `from_host` and `JoinNamespace`.
        host: Option<FdRef<'a>>,
        /// The pod's user namespace; `None` if the pod has none.
        user: Option<FdRef<'a>>,
        /// The mount namespace of the container whose PID namespace is joined; `None` if no container's is joined.
        target: Option<FdRef<'a>>,
    },
    /// An exec: the namespaces of its container, joined before the first operation other than `WriteFile`, because the
    /// record starts with joining the cgroup through paths of the host.
    Existing {
        /// Namespaces in the order of [`KINDS`]; `None` for kinds that the container does not have.
        namespaces: [Option<FdRef<'a>>; KINDS.len()],
        /// The pod's user namespace; `None` if the pod has none.
        user: Option<FdRef<'a>>,
    },
}

/// Input of a cloned child process.
pub(crate) struct Launch<'a> {
    /// The launch record, a sealed memfd.
    pub(crate) record: FdRef<'a>,
    /// Standard input, output and error.
    pub(crate) standard: [FdRef<'a>; 3],
    /// Write end of the pipe for a [`Failure`].
    pub(crate) report: FdRef<'a>,
    /// The socket to the monitor, on which the monitor has sent the keyring's name. `Op::Terminal` sends the master
    /// side of the terminal on this socket, and a start sends its namespaces.
    pub(crate) terminal: FdRef<'a>,
    /// The namespaces in which the child runs.
    pub(crate) home: Destination<'a>,
    /// The way in which the process enters its PID namespace.
    pub(crate) steps: Steps<'a>,
    /// The capabilities with which the child executes the record, as a bit mask.
    pub(crate) permitted: u64,
}

/// The way in which a process enters its PID namespace. Other processes in that namespace may have CAP_SYS_PTRACE and
/// trace all processes that they see, so a process must not have privileges that they lack when it becomes visible
/// there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Steps<'a> {
    /// The process was cloned into the PID namespace, which is new or the monitor's own.
    One,
    /// A second process ([`coracle_sys::sibling`]) executes the whole record in the namespace. For pods with a user
    /// namespace: a process inside cannot trace a process whose memory belongs to the node's user namespace
    /// (`mm->user_ns`, ptrace(2)), which is the case for the second process until exec.
    SecondWalks(Second<'a>),
    /// The record is executed outside of the PID namespace. A second process is created in it when only exec, and
    /// possibly a filter that needs no privilege, remain.
    SecondExecs {
        /// Parameters of the clone that creates the second process.
        second: Second<'a>,
        /// The procfs that the start mounts.
        proc: Proc,
    },
}

/// The procfs that the start of a container mounts, if its process is not in the container's PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proc {
    /// No procfs is mounted; for an exec.
    None,
    /// The procfs of the pod's PID namespace.
    OfPod,
    /// The procfs with which the target container was started.
    OfTarget(Identity),
}

/// Input for the creation of a second process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Second<'a> {
    /// pidfd of a process in the PID namespace that the second process enters.
    pub(crate) beside: FdRef<'a>,
    /// The memory from which the monitor reads the second process's PID.
    pub(crate) pid: &'a SiblingPid,
}

/// The child's descriptors, which have fixed numbers, and its other state until exec.
pub(crate) struct ChildState<'a> {
    pub(crate) report: FdRef<'static>,
    pub(crate) terminal: FdRef<'static>,
    pub(crate) home: Destination<'static>,
    /// The namespaces that a start sends to the monitor; `None` for an exec and after sending.
    pub(crate) memory: Option<OwnNamespaces>,
    /// Name of the session keyring.
    pub(crate) keyring: [u8; KEYRING_NAME_BYTES],
    /// A procfs of a PID namespace other than this process's; `None` if a new procfs is mounted.
    pub(crate) proc: Option<SharedProc>,
    /// Identity of the target's procfs, until `proc` has been opened.
    pub(crate) target_proc: Option<Identity>,
    /// Memory for the PID of the second process; `None` if no second process must be created for the exec.
    pub(crate) second: Option<&'a SiblingPid>,
}

/// Runs a child up to exec; after a failure it reports and exits.
pub(crate) fn run(launch: &Launch<'_>) -> ! {
    let mut report = launch.report;
    // The second process is in the session of the first until it creates its own, and a tracer can make it signal the
    // process group (kill(2)). Every process of the container can set the nice value of that session's scheduler group
    // (/proc/PID/autogroup, sched(7)). Therefore the monitor must be in neither.
    let walked = process::new_session();
    let walked = walked
        .and_then(|()| process::set_capabilities(launch.permitted, launch.permitted, 0))
        .and_then(|()| enter_pids(launch.steps, launch.report))
        .and_then(|()| prepare(launch, &mut report))
        .map(|(record, destination)| Walker::new(Some(destination)).walk(&record));
    let failure = match walked {
        Ok(Err(failure)) => failure,
        // The record has no `Exec` at its end.
        Ok(Ok(count)) => Failure { index: count, errno: DAMAGED },
        Err(errno) => Failure { index: 0, errno },
    };
    let _ = fs::write(report, &failure.to_bytes());
    process::exit(127)
}

/// Selects the PID namespace of the second process; for `SecondWalks` also creates that process.
fn enter_pids(steps: Steps<'_>, report: FdRef<'_>) -> Result<(), Errno> {
    match steps {
        Steps::One => Ok(()),
        Steps::SecondExecs { second, .. } => process::setns(second.beside, process::CLONE_NEWPID),
        Steps::SecondWalks(second) => {
            process::setns(second.beside, process::CLONE_NEWPID)?;
            stay_on_this_cpu();
            become_second(second.pid, report, Mark::NONE)
        }
    }
}

/// Makes the second process start on the CPU of the first, which exits: waking an idle CPU takes longer. Before the
/// seccomp filter, which may forbid the call.
pub(crate) fn stay_on_this_cpu() {
    // If it fails, the second process starts on any CPU.
    let _ = sched::stay_on_this_cpu();
}

/// Creates the second process, in which the function returns; the first process exits. Both may have been restricted by
/// [`stay_on_this_cpu`]; the second may use all CPUs again.
pub(crate) fn become_second(pid: &SiblingPid, report: FdRef<'_>, mark: Mark) -> Result<(), Errno> {
    match sibling::clone_sibling(pid, report, mark)? {
        Sibling::Caller => process::exit(0),
        Sibling::New => sched::use_all_cpus(mark),
    }
}

/// Resets inherited state and arranges the descriptors: 0 to 2 standard streams, 3 report pipe, 4 socket to the
/// monitor, 5 the host's mount namespace, 6 the user namespace, from 7 on namespaces of a container, as far as they
/// exist; all others are closed. `report` then has its new number, also if a later step fails.
fn prepare<'a>(launch: &Launch<'a>, report: &mut FdRef<'a>) -> Result<(Mapping, ChildState<'a>), Errno> {
    process::control(Control::NotDumpable)?;
    process::set_umask(0);
    if let Steps::One = launch.steps {
        // Since Linux 6.2 joining a cpuset no longer undoes the daemon's restriction to some CPUs. runc and crun do the
        // same. If it fails, the restriction is inherited.
        let _ = sched::use_all_cpus(Mark::NONE);
    }
    let (second, proc) = match launch.steps {
        Steps::SecondExecs { second, proc } => (Some(second.pid), proc),
        Steps::One | Steps::SecondWalks(_) => (None, Proc::None),
    };
    if let Steps::SecondWalks(_) = launch.steps {
        process::new_session()?;
    }
    process::set_signal_mask(0)?;
    let record = Mapping::sealed(launch.record)?;
    let (moved, terminal, home) = arrange(launch)?;
    *report = moved;
    let keyring = keyring::take_name(terminal)?;
    let memory = match home {
        Destination::New { .. } => Some(OwnNamespaces::new()?),
        Destination::Existing { .. } => None,
    };
    let (proc, target_proc) = match proc {
        Proc::None => (None, None),
        Proc::OfPod => (Some(SharedProc::open()?), None),
        Proc::OfTarget(identity) => (None, Some(identity)),
    };
    Ok((record, ChildState { report: moved, terminal, home, memory, keyring, proc, target_proc, second }))
}

fn arrange(launch: &Launch<'_>) -> Result<(FdRef<'static>, FdRef<'static>, Destination<'static>), Errno> {
    let (host, user, namespaces) = match launch.home {
        Destination::New { host, user, target } => {
            let mut namespaces = [None; KINDS.len()];
            namespaces[MOUNTS] = target;
            (host, user, namespaces)
        }
        Destination::Existing { namespaces, user } => (None, user, namespaces),
    };
    let kept = |file| Some((file, false));
    let ours = |file| Some((file, true));
    let [stdin, stdout, stderr] = launch.standard.map(kept);
    let [a, b, c, d, e] = namespaces.map(|file| file.and_then(ours));
    let (report, terminal) = (ours(launch.report), ours(launch.terminal));
    let (host, user) = (host.and_then(ours), user.and_then(ours));
    let [_, _, _, report, terminal, host, user, namespaces @ ..] =
        fs::arrange([stdin, stdout, stderr, report, terminal, host, user, a, b, c, d, e])?;
    let home = match launch.home {
        Destination::New { .. } => Destination::New { host, user, target: namespaces[MOUNTS] },
        Destination::Existing { .. } => Destination::Existing { namespaces, user },
    };
    Ok((report.ok_or(Errno::EINVAL)?, terminal.ok_or(Errno::EINVAL)?, home))
}

impl ChildState<'_> {
    /// The descriptor of the host's mount namespace, for a start.
    pub(crate) fn host(&self) -> Result<FdRef<'static>, Errno> {
        match self.home {
            Destination::New { host: Some(host), .. } => Ok(host),
            Destination::New { host: None, .. } | Destination::Existing { .. } => Err(Errno::EINVAL),
        }
    }

    /// Joins the container's namespaces, for an exec.
    pub(crate) fn join(&self) -> Result<(), Errno> {
        let Destination::Existing { namespaces, user } = self.home else { return Err(Errno::EINVAL) };
        namespaces::join(&namespaces, user)?;
        if user.is_some() { child::become_root() } else { Ok(()) }
    }

    /// The procfs to mount instead of a new one; `None` if a new one is mounted.
    pub(crate) fn proc(&mut self) -> Result<Option<&mut SharedProc>, Errno> {
        if let Some(identity) = self.target_proc.take() {
            let Destination::New { target: Some(target), .. } = self.home else { return Err(Errno::EINVAL) };
            let own = self.memory.as_ref().ok_or(Errno::EINVAL)?.mounts()?;
            process::setns(target, process::CLONE_NEWNS)?;
            let opened = SharedProc::of_container(identity);
            process::setns(own.borrow(), process::CLONE_NEWNS)?;
            self.proc = Some(opened?);
        }
        Ok(self.proc.as_mut())
    }

    /// Sends a start's namespaces to the monitor and closes all descriptors except the standard streams and the report
    /// pipe. Has no effect when called again.
    pub(crate) fn close_descriptors(&mut self) -> Result<(), Errno> {
        /// The first descriptor number after the report pipe.
        const AFTER_REPORT: i32 = 4;
        if let Some(memory) = self.memory.take() {
            memory.tell(self.terminal)?;
        }
        self.proc = None;
        fs::close_from(AFTER_REPORT)
    }
}

/// Borrows an optional descriptor.
pub(crate) fn lend(file: &Option<Fd>) -> Option<FdRef<'_>> {
    file.as_ref().map(Fd::borrow)
}
