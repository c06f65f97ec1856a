//! What a clone of the monitor is given, and how it gets from the clone to its launch record: it makes itself clean, puts its
//! descriptors in order, and walks the record (`child`).
//!
//! Clean means: not dumpable, so that no process of a container without rights over the node can look into it; no descriptor
//! of the monitor; no signal blocked or ignored; a session of its own.

use coracle_sys::mark::Mark;
use coracle_sys::process::{self, Control};
use coracle_sys::sibling::{self, Sibling, SiblingPid};
use coracle_sys::{Errno, Fd, FdRef, fs};

use crate::child::{self, DAMAGED, Failure, Walker};
use crate::keyring::{self, KEYRING_NAME_BYTES};
use crate::mounts::{Identity, SharedProc};
use crate::namespaces::{self, KINDS, MOUNTS, OwnNamespaces};

/// Where a clone ends up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Destination<'a> {
    /// In namespaces its record makes.
    New {
        /// The host's mount namespace, where the record needs it: for `OpenTree` with `from_host` and `JoinNamespace`.
        host: Option<FdRef<'a>>,
        /// The pod's user namespace, where it has one.
        user: Option<FdRef<'a>>,
        /// The mount namespace of another container, whose PID namespace is joined.
        target: Option<FdRef<'a>>,
    },
    /// In those of a container, joined before the first operation that is no `WriteFile`: an exec's record starts with
    /// joining the cgroup by paths of the host.
    Existing {
        /// As in [`KINDS`].
        namespaces: [Option<FdRef<'a>>; KINDS.len()],
        /// The pod's user namespace, where it has one.
        user: Option<FdRef<'a>>,
    },
}

/// What a clone is given.
pub(crate) struct Launch<'a> {
    /// Sealed memfd.
    pub(crate) record: FdRef<'a>,
    /// stdin, stdout, stderr.
    pub(crate) standard: [FdRef<'a>; 3],
    /// Write end of the pipe for a [`Failure`].
    pub(crate) report: FdRef<'a>,
    /// The line to the monitor: it has sent the keyring's name; `Op::Terminal` sends the master side, a start its namespaces.
    pub(crate) terminal: FdRef<'a>,
    /// Where it ends up.
    pub(crate) home: Destination<'a>,
    /// How it gets into its PID namespace.
    pub(crate) steps: Steps<'a>,
    /// The capabilities that it walks the record with.
    pub(crate) permitted: u64,
}

/// How a process gets into its PID namespace. Where other processes are in there, they may trace whatever they see
/// (CAP_SYS_PTRACE): what appears must then have nothing that they do not have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Steps<'a> {
    /// It was cloned into it: the namespace is new, or the monitor's own.
    One,
    /// A second process ([`coracle_sys::sibling`]) walks the whole record in the namespace. For pods with a user namespace:
    /// who is in one cannot trace a process whose memory belongs to the node's (`mm->user_ns`, ptrace(2)), as it does here
    /// until exec.
    SecondWalks(Second<'a>),
    /// The record is walked outside; a second process is made when nothing is left but a filter that needs no right, and
    /// exec.
    SecondExecs {
        /// How it is made.
        second: Second<'a>,
        /// The procfs that a start mounts.
        proc: Proc,
    },
}

/// Which procfs a start mounts that is outside of its PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proc {
    /// None: an exec.
    None,
    /// That of the pod's PID namespace.
    OfPod,
    /// The one that the target was started with.
    OfTarget(Identity),
}

/// A second process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Second<'a> {
    /// pidfd of a process in the PID namespace.
    pub(crate) beside: FdRef<'a>,
    /// Where the monitor reads its pid.
    pub(crate) pid: &'a SiblingPid,
}

/// The clone's descriptors, at numbers of their own, and what else it needs on the way.
pub(crate) struct ChildState<'a> {
    pub(crate) report: FdRef<'static>,
    pub(crate) terminal: FdRef<'static>,
    pub(crate) home: Destination<'static>,
    /// What a start tells the monitor.
    pub(crate) memory: Option<OwnNamespaces>,
    /// Name of the session keyring.
    pub(crate) keyring: [u8; KEYRING_NAME_BYTES],
    /// A procfs of another PID namespace than this process's.
    pub(crate) proc: Option<SharedProc>,
    /// The procfs of a target, until `proc` is opened from it.
    pub(crate) target_proc: Option<Identity>,
    /// The exec is another process's, which is still to be made.
    pub(crate) second: Option<&'a SiblingPid>,
}

/// The life of a clone up to exec; with a failure it reports and ends.
pub(crate) fn run(launch: &Launch<'_>) -> ! {
    let mut report = launch.report;
    // A second process is in the process group of the first one until it leads its own, and whoever traces it makes it
    // signal that group: the monitor must not be in it (kill(2)).
    let walked = process::new_session();
    let walked = walked
        .and_then(|()| process::set_capabilities(launch.permitted, launch.permitted, 0))
        .and_then(|()| enter_pids(launch.steps, launch.report))
        .and_then(|()| prepare(launch))
        .map(|(record, place)| {
            report = place.report;
            Walker::new(Some(place)).walk(&record)
        });
    let failure = match walked {
        Ok(Err(failure)) => failure,
        // A record without `Exec` at its end.
        Ok(Ok(count)) => Failure { index: count, errno: DAMAGED },
        Err(errno) => Failure { index: 0, errno },
    };
    let _ = fs::write(report, &failure.to_bytes());
    process::exit(127)
}

/// Chooses the PID namespace of the second process; one that walks the record is made here.
fn enter_pids(steps: Steps<'_>, report: FdRef<'_>) -> Result<(), Errno> {
    match steps {
        Steps::One => Ok(()),
        Steps::SecondExecs { second, .. } => process::setns(second.beside, process::CLONE_NEWPID),
        Steps::SecondWalks(second) => {
            process::setns(second.beside, process::CLONE_NEWPID)?;
            become_second(second.pid, report, Mark::NONE)
        }
    }
}

/// Comes back in the second process; the first one ends.
pub(crate) fn become_second(pid: &SiblingPid, report: FdRef<'_>, mark: Mark) -> Result<(), Errno> {
    match sibling::clone_sibling(pid, report, mark)? {
        Sibling::Caller => process::exit(0),
        Sibling::New => Ok(()),
    }
}

/// Makes the clone clean and puts its descriptors in order: 0 to 2 standard streams, 3 report, 4 line to the monitor, 5 the
/// host's mount namespace, 6 the user namespace, from 7 on namespaces of a container, each where there is one; no others.
fn prepare<'a>(launch: &Launch<'a>) -> Result<(fs::Mapping, ChildState<'a>), Errno> {
    process::control(Control::NotDumpable)?;
    process::set_umask(0);
    let (second, proc) = match launch.steps {
        Steps::SecondExecs { second, proc } => (Some(second.pid), proc),
        Steps::One | Steps::SecondWalks(_) => (None, Proc::None),
    };
    if let Steps::SecondWalks(_) = launch.steps {
        process::new_session()?;
    }
    process::set_signal_mask(0)?;
    let record = fs::Mapping::sealed(launch.record)?;
    let (report, terminal, home) = arrange(launch)?;
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
    Ok((record, ChildState { report, terminal, home, memory, keyring, proc, target_proc, second }))
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
    /// Of a start: the mount namespace of the host.
    pub(crate) fn host(&self) -> Result<FdRef<'static>, Errno> {
        match self.home {
            Destination::New { host: Some(host), .. } => Ok(host),
            Destination::New { host: None, .. } | Destination::Existing { .. } => Err(Errno::EINVAL),
        }
    }

    /// An exec joins its container.
    pub(crate) fn join(&self) -> Result<(), Errno> {
        let Destination::Existing { namespaces, user } = self.home else { return Err(Errno::EINVAL) };
        namespaces::join(&namespaces, user)?;
        if user.is_some() { child::become_root() } else { Ok(()) }
    }

    /// The procfs to mount instead of a new one, where there is such.
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

    /// Tells the monitor what it has to know of a start, and closes all but the standard streams and the report. Once.
    pub(crate) fn close_descriptors(&mut self) -> Result<(), Errno> {
        /// The first number behind the report's.
        const AFTER_REPORT: i32 = 4;
        if let Some(memory) = self.memory.take() {
            memory.tell(self.terminal)?;
        }
        self.proc = None;
        fs::close_from(AFTER_REPORT)
    }
}

/// Lends what may be there.
pub(crate) fn lend(file: &Option<Fd>) -> Option<FdRef<'_>> {
    file.as_ref().map(Fd::borrow)
}
