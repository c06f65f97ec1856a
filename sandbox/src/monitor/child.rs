//! The process that becomes a monitor, from its clone to exec: it joins the pod's cgroup, creates the pod's namespaces
//! and arranges its descriptors. Allocates nothing after the clone. A step that fails is reported through a pipe.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use coracle_sys::process::{self, Pointers};
use coracle_sys::{self as sys, Fd, FdRef};

use super::{Spawn, kernel};
use crate::base_mount_ns::BaseMountNamespace;
use crate::{Error, sched, userns};

/// Descriptors of the monitor: 3 to 5, and /dev/null for 0 to 2. The pod's user namespace, if it has one, is 6.
pub(super) struct Inherited {
    pub(super) null: Fd,
    pub(super) listener: Fd,
    pub(super) directory: Fd,
    pub(super) setup: Fd,
}

/// The cloned child until exec. All allocations happen before the clone.
pub(super) struct Child<'a> {
    procs: Vec<CString>,
    /// The CLONE_NEW… flags of the pod's namespaces if they belong to the child's own user namespace.
    own: u64,
    /// The pod's user namespace, to which its namespaces then belong; `None` if it has none.
    user: Option<userns::Plan>,
    arguments: Pointers<'static>,
    program: FdRef<'a>,
    base: &'a BaseMountNamespace,
}

impl<'a> Child<'a> {
    pub(super) fn prepare(spawn: &Spawn<'a>) -> Result<Self, Error> {
        let c_string = |path: &PathBuf| {
            CString::new(path.as_os_str().as_bytes())
                .map_err(|_| Error::invalid("cgroup_joins", "has a NUL in a path"))
        };
        let procs = spawn.cgroup_joins.iter().map(c_string).collect::<Result<_, _>>()?;
        let no_memory = |errno| kernel("map", "arguments of the monitor", errno);
        let mut arguments = Pointers::with_capacity(1, 0).map_err(no_memory)?;
        arguments.push_argument(c"coracle-pod").map_err(no_memory)?;
        let namespaces = pod_namespaces(spawn);
        let user = spawn.user.map(|mappings| userns::Plan::new(mappings, namespaces));
        Ok(Self {
            procs,
            own: if user.is_some() { 0 } else { namespaces },
            user,
            arguments,
            program: spawn.program.file.borrow(),
            base: spawn.base,
        })
    }

    pub(super) fn run(&self, inherited: &Inherited, go: &Fd, report: &Fd) -> ! {
        let mut word = [0; 1];
        let mut report = report.borrow();
        let (step, errno) = match sys::fs::read(go.borrow(), &mut word) {
            // EOF: the daemon ended before the pid file was written.
            Ok(0) => process::exit(0),
            Ok(_) => match self.become_monitor(inherited, &mut report) {
                Ok(never) => never,
                Err(failed) => failed,
            },
            Err(errno) => (STEP_RELEASE, errno),
        };
        let mut bytes = [step; OUTCOME_BYTES];
        bytes[1..].copy_from_slice(&errno.0.to_ne_bytes());
        // If `report` has been moved to another descriptor, `report` refers to that one.
        let _ = sys::fs::write(report, &bytes);
        process::exit(127)
    }

    /// Joins cgroups, arranges descriptors, executes the program; returns only if a step fails.
    fn become_monitor(
        &self,
        inherited: &Inherited,
        report: &mut FdRef<'_>,
    ) -> Result<(u8, sys::Errno), (u8, sys::Errno)> {
        // An error is ignored, because the daemon has logged the same error for itself.
        let _ = sched::set_inherited_short_slice();
        for procs in &self.procs {
            sys::fs::open(FdRef::WORKING_DIRECTORY, procs, sys::fs::O_WRONLY, 0)
                .and_then(|file| sys::fs::write(file.borrow(), b"0"))
                .map_err(|errno| (STEP_CGROUP, errno))?;
        }
        // Created by this process and not by its clone, so that the kernel charges their memory to
        // the pod's cgroup and not to the daemon's.
        if self.own != 0 {
            process::unshare(self.own).map_err(|errno| (STEP_OWN_NAMESPACES, errno))?;
        }
        let user = self.user.as_ref().map(userns::Plan::make).transpose();
        let user = user.map_err(|(part, errno)| (STEP_USER_NAMESPACE + part as u8, errno))?;
        // Entered only now, because the paths above are those of the host.
        self.base.enter().map_err(|errno| (STEP_BASE, errno))?;
        let Inherited { null, listener, directory, setup } = inherited;
        let null = Some((null.borrow(), false));
        let files = [
            null,
            null,
            null,
            Some((listener.borrow(), false)),
            Some((directory.borrow(), false)),
            Some((setup.borrow(), false)),
            user.as_ref().map(|namespace| (namespace.borrow(), false)),
            Some((*report, true)),
            Some((self.program, true)),
        ];
        let [.., moved, program] = sys::fs::arrange(files).map_err(|errno| (STEP_DESCRIPTORS, errno))?;
        let (Some(moved), Some(program)) = (moved, program) else {
            return Err((STEP_DESCRIPTORS, sys::Errno::EINVAL));
        };
        *report = moved;
        let errno = process::exec_fd(program, &self.arguments);
        Ok((STEP_EXEC, errno))
    }

    /// Reads the outcome that the child writes before its end if a step fails; the pipe is closed by exec.
    pub(super) fn read_outcome(&self, directory: &Path, outcome: &Fd) -> Result<(), Error> {
        let mut bytes = [0; OUTCOME_BYTES];
        match sys::fs::read(outcome.borrow(), &mut bytes) {
            Ok(0) => Ok(()),
            Ok(_) => {
                let [step, errno @ ..] = bytes;
                let errno = sys::Errno(i32::from_ne_bytes(errno));
                let part = step.checked_sub(STEP_USER_NAMESPACE);
                let part = part.and_then(|part| userns::Part::ALL.get(usize::from(part)));
                if let (Some(user), Some(part)) = (&self.user, part) {
                    return Err(user.error(*part, errno));
                }
                let op = match step {
                    STEP_CGROUP => "join cgroup for monitor of",
                    STEP_BASE => "make mount namespace for monitor of",
                    STEP_DESCRIPTORS => "order descriptors for monitor of",
                    STEP_RELEASE => "release monitor of",
                    STEP_OWN_NAMESPACES => "make namespaces for monitor of",
                    _ => "execute monitor of",
                };
                Err(kernel(op, directory.display(), errno))
            }
            Err(errno) => Err(kernel("read outcome of", directory.display(), errno)),
        }
    }
}

/// Length of an outcome in bytes: a step and an error number.
const OUTCOME_BYTES: usize = 5;
const STEP_CGROUP: u8 = 0;
const STEP_DESCRIPTORS: u8 = 1;
const STEP_EXEC: u8 = 2;
const STEP_BASE: u8 = 3;
const STEP_RELEASE: u8 = 4;
const STEP_OWN_NAMESPACES: u8 = 5;
/// The first part of making the user namespace; the others follow, see [`userns::Part`].
const STEP_USER_NAMESPACE: u8 = 6;

/// CLONE_NEW… flags of the namespaces that are created for the pod.
fn pod_namespaces(spawn: &Spawn<'_>) -> u64 {
    let asked = [
        (spawn.network, process::CLONE_NEWNET),
        (spawn.ipc, process::CLONE_NEWIPC),
        (spawn.uts, process::CLONE_NEWUTS),
    ];
    asked.iter().filter(|(is_asked, _)| *is_asked).fold(0, |flags, (_, flag)| flags | flag)
}
