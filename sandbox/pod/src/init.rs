//! The first process of a PID namespace that the containers of a pod share. The monitor is not used for this, because a
//! container with CAP_SYS_PTRACE can control every process in its PID namespace. This process has no privileges: no
//! capability, no descriptor, an empty read-only root, a user id that no container can have, and a seccomp filter that
//! only allows sleeping and exiting.
//!
//! The kernel reaps orphans for it (SIGCHLD is ignored), so it never wakes up. No signal from inside the namespace ends
//! it (pid 1 has no handlers, signal(7)); SIGKILL from the monitor and the end of the monitor (PR_SET_PDEATHSIG) do.
//! When it ends, the kernel kills all processes in the namespace (pid_namespaces(7)).
//!
//! The process is created before any container, so no container can see it with its initial privileges. At that time it
//! also mounts a procfs of the namespace, because a procfs shows the PID namespace of the process that mounts it, and
//! later no privileged process is in that namespace. Containers get clones of that mount.

use coracle_sys::process::{self, Clone, Control};
use coracle_sys::{Errno, Fd, FdRef, bpf, fs, mount};
use coracle_wire::SHARED_PROC;

/// User and group ID of the process, which no container can have: Kubernetes permits IDs up to 2^31 - 1.
const NOBODY_ELSE: u32 = u32::MAX - 1;
/// MOUNT_ATTR flags nosuid, nodev, noexec: the attributes of a container's procfs.
pub(crate) const PROC_ATTRIBUTES: u64 = 0xe;
/// Mount flags of the empty root: MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC.
const EMPTY_FLAGS: u64 = 1 | 2 | 4 | 8;
/// Message to the monitor: all steps except the last two are complete.
const READY: u8 = b'r';

/// The first process of the pod's PID namespace.
pub(crate) struct Init {
    /// PID in the monitor's PID namespace.
    pub(crate) pid: i32,
    /// Descriptor of the process; also refers to its namespaces for setns(2) (Linux 5.8).
    pub(crate) pidfd: Fd,
}

/// Creates the namespace with its first process, and its procfs at [`SHARED_PROC`]. Called by the monitor during its
/// setup; waits until the process has dropped its privileges.
pub(crate) fn start() -> Result<Init, Errno> {
    let (outcome, report) = fs::pipe()?;
    let (pid, pidfd) = match process::clone(process::CLONE_NEWPID, None)? {
        Clone::Child => {
            drop(outcome);
            run(&report)
        }
        Clone::Parent { pid, pidfd } => (pid, pidfd),
    };
    drop(report);
    match read_outcome(&outcome) {
        Ok(()) => Ok(Init { pid, pidfd }),
        Err(errno) => {
            let _ = process::pidfd_signal(pidfd.borrow(), process::SIGKILL);
            let _ = process::wait(pid);
            Err(errno)
        }
    }
}

/// Reads the process's report: [`READY`] and EOF, or an error number.
fn read_outcome(outcome: &Fd) -> Result<(), Errno> {
    let mut bytes = [0; 5];
    let mut length = 0;
    while length < bytes.len() {
        match fs::read(outcome.borrow(), &mut bytes[length..]) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(0) => break,
            Ok(more) => length += more,
        }
    }
    match bytes {
        [READY, ..] if length == 1 => Ok(()),
        [READY, errno @ ..] if length == 5 => Err(Errno(i32::from_ne_bytes(errno))),
        [a, b, c, d, _] if length == 4 => Err(Errno(i32::from_ne_bytes([a, b, c, d]))),
        // The process was killed.
        _ => Err(Errno::EIO),
    }
}

/// Main function of the process.
fn run(report: &Fd) -> ! {
    let done = mount_proc()
        .and_then(|()| enter_empty_root())
        .and_then(|()| give_up_rights())
        // EPIPE: the monitor ended before the parent-death signal was set.
        .and_then(|()| fs::write(report.borrow(), &[READY]).map(drop))
        .and_then(|()| shut_in());
    if let Err(errno) = done {
        let _ = fs::write(report.borrow(), &errno.0.to_ne_bytes());
        process::exit(1)
    }
    if fs::close_from(0).is_err() {
        process::exit(1)
    }
    loop {
        process::sleep(process::Signals::MAX);
    }
}

/// Mounts the procfs at [`SHARED_PROC`] in the monitor's mount namespace; starts of containers clone it.
fn mount_proc() -> Result<(), Errno> {
    let context = mount::fsopen(c"proc")?;
    mount::fs_option(context.borrow(), c"source", Some(c"proc"))?;
    mount::fs_create(context.borrow())?;
    let mounted = mount::fsmount(context.borrow(), PROC_ATTRIBUTES)?;
    let flags = fs::O_PATH | fs::O_DIRECTORY;
    let target = fs::open(FdRef::WORKING_DIRECTORY, SHARED_PROC, flags, 0)?;
    mount::attach(mounted.borrow(), target.borrow())
}

/// Enters an empty mount namespace, and a cgroup namespace that shows no other pod.
fn enter_empty_root() -> Result<(), Errno> {
    process::unshare(process::CLONE_NEWNS | process::CLONE_NEWCGROUP)?;
    let kind = c"tmpfs";
    let options = c"mode=555,size=4k,nr_inodes=1";
    // Any directory works as a mount point: it is detached with the old root.
    mount::mount(Some(kind), SHARED_PROC, Some(kind), EMPTY_FLAGS, Some(options))?;
    fs::change_directory_to(SHARED_PROC)?;
    mount::pivot_root(c".", c".")?;
    mount::unmount(c".", mount::MNT_DETACH)?;
    fs::change_directory_to(c"/")
}

fn give_up_rights() -> Result<(), Errno> {
    process::set_name(c"coracle-init")?;
    process::leave_reaping_to_kernel()?;
    crate::capabilities::drop_bounding(0)?;
    process::set_groups(&[])?;
    process::set_group(NOBODY_ELSE)?;
    process::set_user(NOBODY_ELSE)?;
    process::set_capabilities(0, 0, 0)?;
    process::control(Control::NoNewPrivileges)?;
    // The change of ids may have reset both.
    process::control(Control::NotDumpable)?;
    process::control(Control::KillWithParent)
}

fn shut_in() -> Result<(), Errno> {
    match bpf::only_sleep() {
        // The kernel has no seccomp filters.
        Err(Errno::EINVAL | Errno::ENOSYS) => Ok(()),
        set => set,
    }
}
